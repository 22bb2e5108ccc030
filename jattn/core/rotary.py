"""Rotary position embedding.

Source: Su et al. 2021, arXiv:2104.09864, section 3.2.2.
"""

import functools
from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from jattn.core.angles import cos_sin
from jattn.core.arguments import is_known, positive, static_int
from jattn.core.boundary import Sizes, check_floating, check_positions, one_of
from jattn.core.rules import Array
from jattn.core.softmax import accumulator

Style: TypeAlias = Literal["half", "interleaved"]

BASE = 10_000.0
"""That of the paper."""


def rotary(
    x: jax.Array,
    positions: Array | None = None,
    *,
    base: float | None = None,
    style: Style = "half",
    rotary_dim: int | None = None,
    frequencies: Sequence[float] | Array | None = None,
    magnitude: float = 1.0,
) -> jax.Array:
    """Turns each pair of channels by an angle proportional to the position.

    Pair i of R / 2 at position p turns by p * base^(-2i/R), R being `rotary_dim`, so
    that the dot product of a turned query and a turned key depends on their contents
    and on their distance only. Near or far, cosine and sine are off by 1.5e-7 at most,
    for float64 by 3e-16. `jattn.rope` has frequencies for longer contexts than those of
    training.

    Args:
        x: queries or keys, (*B, T, N, H).
        positions: integers that broadcast to (*B, T), less than 2**30 in size;
            default 0 to T - 1.
        base: the largest wavelength is close to 2 pi base; default 10,000.
        style: which channels are a pair: "half" (i and i + R/2, as in GPT-NeoX and
            Llama) or "interleaved" (2i and 2i + 1, as in the paper). Weights trained
            with one do not work with the other.
        rotary_dim: R, how many channels turn, the first ones; the others pass through.
            Even; default H.
        frequencies: radians per position of each pair, (R/2,), instead of `base`. They
            are static, and taken in float64.
        magnitude: what the turned channels are multiplied by.

    Returns:
        The shape and dtype of x; computed in float32 at least.

    Raises:
        ValueError: R is odd or more than H, a position or the frequencies do not fit,
            or an option is unknown, out of range or in the way of another.
        TypeError: x is not floating point, positions are not integers, or an option is
            traced or not a number.

    Source: Su et al. 2021, arXiv:2104.09864, equation 34.

    Example:
        >>> rotary(jnp.ones((2, 1, 2)), np.array([0, 1]))[:, 0]
        Array([[ 1.        ,  1.        ],
               [-0.30116868,  1.3817732 ]], dtype=float32)
    """
    one_of("rotary", "style", style, ("half", "interleaved"))
    check_floating("rotary", "x", x)
    if x.ndim < 3:
        raise ValueError(
            f"rotary: x must be (*B, T, N, H), but got {x.shape}. Give a single head "
            "its axis: x[..., None, :]."
        )
    *batch, length, num_heads, head_dim = x.shape
    size = turned_channels("rotary", rotary_dim, head_dim)
    if frequencies is None:
        frequencies = frequencies_of(BASE if base is None else base, size)
    elif base is not None:
        raise ValueError(
            f"rotary: frequencies take the place of base, but got {base=} as well. "
            "Leave one out."
        )
    known = _checked_frequencies(frequencies, size)
    magnitude = positive("rotary", "magnitude", magnitude)
    if positions is None:
        positions = np.arange(length, dtype=np.int32)
    sizes = Sizes(tuple(batch), length, length, num_heads, num_heads, head_dim)
    positions = check_positions("rotary", "positions", positions, "T", sizes)

    dtype = accumulator(jax.dtypes.canonicalize_dtype(x.dtype))
    cos, sin = cos_sin(positions, known, dtype)
    return _turned(x, cos, sin, magnitude=magnitude, style=style)


def frequencies_of(base: float, size: int) -> np.ndarray:
    """The paper's radians per position of each of size / 2 pairs, float64."""
    return positive("rotary", "base", base) ** (-np.arange(0, size, 2) / size)


def turned_channels(caller: str, rotary_dim: int | None, head_dim: int) -> int:
    """How many of H channels turn, R.

    Raises:
        ValueError: it is odd or more than H.
        TypeError: it is not an int.
    """
    if rotary_dim is None:
        if head_dim % 2 or not head_dim:
            raise ValueError(
                f"{caller}: channels turn in pairs, so the head size H must be even, "
                f"but got H={head_dim}. Turn a part of the channels: rotary_dim."
            )
        return head_dim
    size = static_int(caller, "rotary_dim", rotary_dim, 2)
    if size % 2 or size > head_dim:
        raise ValueError(
            f"{caller}: rotary_dim must be even and at most H, but got {rotary_dim=}, "
            f"H={head_dim}. None turns all channels."
        )
    return size


def _checked_frequencies(given: Any, size: int) -> tuple[float, ...]:
    if not is_known(given):
        raise TypeError(
            f"rotary: frequencies must be known numbers, but got {given}. They are "
            "static, a part of the program: give them as a numpy array."
        )
    array = np.asarray(given, np.float64)
    if array.shape != (size // 2,) or not (np.abs(array) < 2**30).all():
        raise ValueError(
            f"rotary: frequencies must be (R/2,), here ({size // 2},), and less than "
            f"2**30 in size, but got {array} of shape {array.shape}. Give one for each "
            "pair of channels, in radians per position."
        )
    return tuple(array.tolist())


@functools.partial(jax.jit, static_argnames=("magnitude", "style"))
def _turned(
    x: jax.Array, cos: Array, sin: Array, *, magnitude: float, style: Style
) -> jax.Array:
    """Turns the first channels, in the dtype of `cos`; the others are as they were."""
    size = 2 * cos.shape[-1]
    part, rest = x[..., :size], x[..., size:]
    cos, sin = cos * magnitude, sin * magnitude
    first, second = _pairs(part.astype(cos.dtype), style)
    turned = jnp.stack(
        (first * cos - second * sin, second * cos + first * sin),
        axis=-2 if style == "half" else -1,
    )
    turned = turned.reshape(part.shape).astype(x.dtype)
    return jnp.concatenate((turned, rest), -1) if rest.shape[-1] else turned


def _pairs(x: jax.Array, style: Style) -> tuple[jax.Array, jax.Array]:
    if style == "half":
        return tuple(jnp.split(x, 2, axis=-1))  # type: ignore[return-value]
    return x[..., ::2], x[..., 1::2]
