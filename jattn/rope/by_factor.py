"""Rotary positions slowed by a factor, whatever the length of training."""

import dataclasses

import jax
import numpy as np

from jattn.core.arguments import positive
from jattn.core.boundary import check_floating, one_of
from jattn.core.rotary import (
    BASE,
    Style,
    frequencies_of,
    rotary,
    turned_channels,
)
from jattn.core.rules import Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rope:
    """What the kinds have in common.

    Attributes:
        base: as in `jattn.rotary`, like the others.
        style: which channels are a pair.
        rotary_dim: R, how many channels turn.
    """

    base: float = BASE
    style: Style = "half"
    rotary_dim: int | None = None

    def __post_init__(self) -> None:
        one_of(self._name, "style", self.style, ("half", "interleaved"))
        positive(self._name, "base", self.base)
        if self.rotary_dim is not None:
            turned_channels(self._name, self.rotary_dim, self.rotary_dim)

    @property
    def _name(self) -> str:
        return f"rope.{type(self).__name__}"

    def _check_factor(self, factor: float) -> None:
        if positive(self._name, "factor", factor) < 1:
            raise ValueError(
                f"{self._name}: factor must be 1 or more, but got {factor=}. It is the "
                "new length in units of the old one."
            )

    def _check_order(self, less: str, more: str) -> None:
        low, high = (positive(self._name, x, getattr(self, x)) for x in (less, more))
        if low >= high:
            raise ValueError(
                f"{self._name}: {less} must be less than {more}, but got {less}={low}, "
                f"{more}={high}. Exchange them."
            )

    def frequencies(self, head_dim: int) -> np.ndarray:
        """Radians per position of each pair of H channels, (R/2,), float64.

        Raises:
            ValueError: R is odd or more than H.
        """
        size = turned_channels(self._name, self.rotary_dim, head_dim)
        return self._scaled(frequencies_of(self.base, size))

    def _scaled(self, original: np.ndarray) -> np.ndarray:
        return original

    def _magnitude(self) -> float:
        return 1.0

    def __call__(self, x: jax.Array, positions: Array | None = None) -> jax.Array:
        """Turns queries or keys (*B, T, N, H) at positions (*B, T): `jattn.rotary`."""
        check_floating(self._name, "x", x)
        return rotary(
            x,
            positions,
            style=self.style,
            rotary_dim=self.rotary_dim,
            frequencies=self.frequencies(x.shape[-1]),
            magnitude=self._magnitude(),
        )


class plain(Rope):
    """The frequencies of `jattn.rotary`.

    base^(-2i/R) for pair i of R / 2

    Args:
        base: as in `jattn.rotary`, like the others.
        style: which channels are a pair.
        rotary_dim: R, how many channels turn.

    Raises:
        ValueError: an argument is out of range.
        TypeError: an argument is not a number.

    Source: Su et al. 2021, arXiv:2104.09864, section 3.2.2.

    Example:
        >>> plain().frequencies(8)
        array([1.   , 0.1  , 0.01 , 0.001])
    """


@dataclasses.dataclass(frozen=True)
class linear(Rope):
    """Squeezes positions into those of training ("position interpolation").

    frequency -> frequency / factor, so that position p * factor is what p was

    Args:
        factor: how many times longer a context may be, 1 or more.
        base: as in `jattn.rotary`, and so are `style` and `rotary_dim`.

    Raises:
        ValueError: an argument is out of range.
        TypeError: an argument is not a number.

    Source: Chen et al. 2023, arXiv:2306.15595, section 2.3.

    Example:
        >>> linear(4.0).frequencies(8)
        array([0.25   , 0.025  , 0.0025 , 0.00025])
    """

    factor: float

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_factor(self.factor)

    def _scaled(self, original: np.ndarray) -> np.ndarray:
        return original / self.factor


@dataclasses.dataclass(frozen=True)
class ntk(Rope):
    """Slows a pair of channels the more the slower it is ("NTK-aware").

    base -> base * factor^(R / (R - 2)), which leaves the frequency of the first pair
    as it is and divides that of the last by `factor`

    Args:
        factor: how many times longer a context may be, 1 or more.
        base: as in `jattn.rotary`, and so are `style` and `rotary_dim`, 4 or more.

    Raises:
        ValueError: an argument is out of range.
        TypeError: an argument is not a number.

    Source: bloc97 2023, "NTK-aware scaled RoPE"; Peng et al. 2023, arXiv:2309.00071,
        section 3.1.

    Example:
        >>> plain().frequencies(8) / ntk(8.0).frequencies(8)
        array([1., 2., 4., 8.])
    """

    factor: float

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_factor(self.factor)

    def _scaled(self, original: np.ndarray) -> np.ndarray:
        last = original.size - 1
        if not last:
            raise ValueError(
                "rope.ntk: R must be 4 or more, a fast pair of channels and a slow "
                "one, but got R=2. Use rope.linear."
            )
        return original * self.factor ** (-np.arange(last + 1) / last)
