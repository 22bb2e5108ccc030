"""Rotary position embedding.

Source: Su et al. 2021, arXiv:2104.09864, section 3.2.2.
"""

from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from jattn.core.boundary import (
    Sizes,
    check_floating,
    check_positions,
    one_of,
)
from jattn.core.tile import accumulator


def rotary(
    x: jax.Array,
    positions: jax.Array | np.ndarray | None = None,
    *,
    base: float = 10_000.0,
    style: Literal["half", "interleaved"] = "half",
) -> jax.Array:
    """Turns each pair of channels by an angle proportional to the position.

    Pair i at position p turns by p * base^(-2i/H), so that the dot product of a turned
    query and a turned key depends on their contents and on their distance only.

    Args:
        x: queries or keys, (*B, T, N, H), H even.
        positions: integers that broadcast to (*B, T); default 0 to T - 1. Angles are
            formed in float32 at least, whatever the dtype of x.
        base: the largest wavelength is close to 2 pi base.
        style: which channels are a pair: "half" (i and i + H/2, as in GPT-NeoX and
            Llama) or "interleaved" (2i and 2i + 1, as in the paper). Weights trained
            with one do not work with the other.

    Returns:
        The shape and dtype of x.

    Raises:
        ValueError: H is odd, a position does not fit, or an option is unknown.
        TypeError: x is not floating point, or positions are not integers.

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
    if x.shape[-1] % 2 or x.shape[-1] == 0:
        raise ValueError(
            f"rotary: x must have an even head size H, but got {x.shape}. Turn an even "
            "part of the channels, x[..., :H - 1]."
        )
    if not 0 < base < float("inf"):
        raise ValueError(f"rotary: base must be positive and finite, but got {base=}.")
    *batch, length, num_heads, head_dim = x.shape
    if positions is None:
        positions = np.arange(length, dtype=np.int32)
    sizes = Sizes(tuple(batch), length, length, num_heads, num_heads, head_dim)
    positions = check_positions("rotary", "positions", positions, "T", sizes)

    dtype = accumulator(x.dtype)
    frequencies = (base ** (-np.arange(0, head_dim, 2) / head_dim)).astype(dtype)
    frequencies = frequencies.reshape((1,) * (x.ndim - 1) + (-1,))
    angles = positions[..., None, None].astype(dtype) * frequencies  # (*B, T, 1, H/2)
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    x1, x2 = _pairs(x.astype(dtype), style)
    turned = (x1 * cos - x2 * sin, x2 * cos + x1 * sin)
    axis = -2 if style == "half" else -1
    return jnp.stack(turned, axis=axis).reshape(x.shape).astype(x.dtype)


def _pairs(x: jax.Array, style: str) -> tuple[jax.Array, jax.Array]:
    if style == "half":
        return tuple(jnp.split(x, 2, axis=-1))  # type: ignore[return-value]
    return x[..., ::2], x[..., 1::2]
