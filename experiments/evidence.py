"""Rules of evidence: intervals, what decides, and how both are told."""

import math
from collections.abc import Iterable, Sequence
from statistics import fmean
from typing import NamedTuple

import numpy as np
from scipy import stats

HOLDS, PART, FAILS, OPEN = "holds", "holds in part", "does not hold", "not resolved"
ROUNDING = 1e-12  # a smaller uncertainty is none
OUTCOME_RULE = (
    "A claim holds if all its conditions are met, holds in part if some are, does not "
    "hold if none is met and at least one is refuted, and is not resolved otherwise. "
    "A gap whose interval contains zero, or a missing measurement, decides nothing."
)


class Interval(NamedTuple):
    """Mean with the half-width of its 95 % interval; None for a single value."""

    mean: float
    half_width: float | None
    n: int

    @property
    def sign(self) -> int | None:
        """1 or -1 if the interval excludes zero on that side, else None."""
        if self.half_width is None or abs(self.mean) <= self.half_width:
            return None
        return 1 if self.mean > 0 else -1


def t_interval(values: Sequence[float]) -> Interval:
    """Student-t 95 % interval of the mean: mean +- t_{.975, n-1} s / sqrt(n)."""
    count = len(values)
    if count < 2:
        return Interval(values[0], None, 1)
    error = np.std(values, ddof=1) / np.sqrt(count)
    half_width = stats.t.ppf(0.975, count - 1) * error
    return Interval(fmean(values), float(half_width), count)


def decide(conditions: Iterable[bool | None]) -> str:
    """OUTCOME_RULE, with True for met, False for refuted and None for undecided."""
    seen = list(conditions)
    if True in seen:
        return HOLDS if all(seen) else PART
    return FAILS if False in seen else OPEN


def together(conditions: Iterable[bool | None]) -> bool | None:
    """Whether all are met: False if one is refuted, else None if one is undecided."""
    seen = list(conditions)
    if False in seen:
        return False
    return None if None in seen else True


def describe(interval: Interval | None, of: str = "paired seeds") -> str:
    """The interval in words; `of` is what the mean is over."""
    if interval is None:
        return "no finished pair: not resolved"
    if interval.half_width is None:
        one = of.removeprefix("paired ").removesuffix("s")
        return f"{interval.mean:.3g}, one {one}: not resolved"
    digits = _decimals(interval.half_width)
    ends = [interval.mean + side * interval.half_width for side in (-1, 1)]
    text = (
        f"{interval.mean:.{max(digits, 3)}f} (95 %: {ends[0]:.{digits}f} to "
        f"{ends[1]:.{digits}f}), {interval.n} {of}"
    )
    return text if interval.sign else f"{text}: not resolved"


def plus_minus(mean: float, error: float | None) -> str:
    """A mean and its uncertainty as in "0.9930 ± 0.0066"; alone if all are alike."""
    if error is None or error < ROUNDING:
        return f"{mean:.3f}"
    digits = _decimals(error)
    return f"{mean:.{digits}f} ± {error:.{digits}f}"


def _decimals(error: float) -> int:
    """As many as show two digits of an uncertainty; three if there is none."""
    if error < ROUNDING:
        return 3
    return max(0, 1 - math.floor(math.log10(max(error, 1e-6))))
