"""Rotary positions slowed by the turns that pairs of channels made in training."""

import math
from dataclasses import KW_ONLY, dataclass

import numpy as np

from jattn.core.arguments import positive, static_int
from jattn.rope.by_factor import Rope


@dataclass(frozen=True)
class yarn(Rope):
    """Slows pairs that made no turn in training, and sharpens the attention ("YaRN").

    frequency -> frequency ((1 - s) + s / factor)

    Between the pairs that make beta_fast and beta_slow turns in `original_length`, s
    goes from 0 to 1, linearly in the index of the pair, as in the authors' code; their
    text has it linear in the turns.

    Args:
        factor: how many times longer a context may be, 1 or more.
        original_length: of the contexts in training.
        beta_fast: pairs that make more turns stay as they are.
        beta_slow: pairs that make fewer are slowed by all of the factor.
        truncate: whether the ramp begins and ends at whole pairs, the next ones out.
        magnitude: what turned channels are multiplied by, so logits by its square;
            default 0.1 ln(factor) + 1.
        base: as in `jattn.rotary`, and so are `style` and `rotary_dim`; more than 1.

    Raises:
        ValueError: an argument is out of range, or the betas are in the wrong order.
        TypeError: an argument is not a number, or not of its kind.

    Source: Peng et al. 2023, arXiv:2309.00071, section 3.

    Example:
        >>> from jattn.rope import plain
        >>> slowed = yarn(4.0, original_length=4096)
        >>> (plain().frequencies(16) / slowed.frequencies(16)).round(2)
        array([1.  , 1.  , 1.  , 1.23, 1.6 , 2.29, 4.  , 4.  ])
    """

    factor: float
    _: KW_ONLY
    original_length: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    magnitude: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_factor(self.factor)
        static_int(self._name, "original_length", self.original_length, 1)
        self._check_order("beta_slow", "beta_fast")
        if self.base <= 1:
            raise ValueError(
                f"rope.yarn: base must be more than 1, but got base={self.base}. Pairs "
                "must turn slower one after another."
            )
        if not isinstance(self.truncate, bool):
            raise TypeError(
                f"rope.yarn: truncate must be a bool, but got {self.truncate!r}. Give "
                "True or False."
            )
        if self.magnitude is not None:
            positive(self._name, "magnitude", self.magnitude)

    def _pair(self, turns: float, num_pairs: int) -> float:
        """The pair, a real number, that makes so many turns in training."""
        frequency = 2 * math.pi * turns / self.original_length
        return -num_pairs * math.log(frequency) / math.log(self.base)

    def _scaled(self, original: np.ndarray) -> np.ndarray:
        num_pairs = original.size
        first = self._pair(self.beta_fast, num_pairs)
        last = self._pair(self.beta_slow, num_pairs)
        if self.truncate:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, 2 * num_pairs - 1)
        slowed = (np.arange(num_pairs) - first) / max(last - first, 1e-3)
        slowed = np.clip(slowed, 0, 1)
        return original * (1 - slowed) + original / self.factor * slowed

    def _magnitude(self) -> float:
        if self.magnitude is None:
            return 0.1 * math.log(self.factor) + 1
        return self.magnitude


@dataclass(frozen=True)
class llama3(Rope):
    """Slows pairs that made few turns in training, as Llama 3.1 does.

    frequency -> frequency (s + (1 - s) / factor)

    Between low_freq_factor and high_freq_factor turns in `original_length`, s goes from
    0 to 1, linearly in the turns that the pair makes.

    Args:
        factor: how many times longer a context may be, 1 or more; 8 in Llama 3.1.
        original_length: of the contexts in training; 8192 in Llama 3.1.
        low_freq_factor: pairs that make fewer turns are slowed by all of the factor.
        high_freq_factor: pairs that make more stay as they are.
        base: as in `jattn.rotary`, but that of Llama 3 by default; and so are `style`
            and `rotary_dim`.

    Raises:
        ValueError: an argument is out of range, or the two are in the wrong order.
        TypeError: an argument is not a number, or not of its kind.

    Source: Meta 2024, the reference code of Llama 3.1, `apply_scaling`.

    Example:
        >>> from jattn.rope import plain
        >>> slowed = llama3(8.0, original_length=8192)
        >>> (plain(base=5e5).frequencies(16) / slowed.frequencies(16)).round(2)
        array([1.  , 1.  , 1.  , 1.  , 2.69, 8.  , 8.  , 8.  ])
    """

    factor: float
    _: KW_ONLY
    original_length: int
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    base: float = 500_000.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_factor(self.factor)
        static_int(self._name, "original_length", self.original_length, 1)
        self._check_order("low_freq_factor", "high_freq_factor")

    def _scaled(self, original: np.ndarray) -> np.ndarray:
        low, high = self.low_freq_factor, self.high_freq_factor
        turns = self.original_length * original / (2 * math.pi)
        kept = np.clip((turns - low) / (high - low), 0, 1)
        return original * kept + original / self.factor * (1 - kept)
