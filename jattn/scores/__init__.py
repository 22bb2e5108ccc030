"""Score rules: what happens to the score of a pair before the mask.

Given to `attention` as `score=`, one or a tuple of them, applied in order:

    >>> score = soft_cap(50.0), alibi()
"""

from jattn.core.rules import Score as Score
from jattn.scores.by_position import alibi as alibi
from jattn.scores.by_position import log_n_scale as log_n_scale
from jattn.scores.by_position import relative_bias as relative_bias
from jattn.scores.by_value import additive as additive
from jattn.scores.by_value import rule as rule
from jattn.scores.by_value import soft_cap as soft_cap

__all__ = [
    "Score",
    "additive",
    "alibi",
    "log_n_scale",
    "relative_bias",
    "rule",
    "soft_cap",
]
