"""What to look at when attention goes wrong."""

from jattn.diagnostics.score_gradients import score_gradient_rows as score_gradient_rows
