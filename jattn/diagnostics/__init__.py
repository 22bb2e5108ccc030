"""What to look at when attention goes wrong, in jattn or anywhere else."""

from jattn.diagnostics.finiteness import nan_safety as nan_safety
from jattn.diagnostics.leakage import leaks as leaks
from jattn.diagnostics.memory import memory_against_length as memory_against_length
from jattn.diagnostics.scaling import measured_scale as measured_scale
from jattn.diagnostics.score_gradients import score_gradient_rows as score_gradient_rows
from jattn.diagnostics.weight_rows import rows as rows
from jattn.reports import Finding as Finding
from jattn.reports import Report as Report
