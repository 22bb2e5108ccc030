"""Score rules of the score itself, of arrays, and of one's own functions."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jattn.core.arguments import (
    array_of,
    check_callable,
    is_known,
    tile_views,
    with_axes,
)
from jattn.core.letters import leaf, leaves_from
from jattn.core.rules import Array, Score, as_array


class SoftCap(Score):
    """See `soft_cap`."""

    positional = False

    cap: float | Array = leaf("N")

    def __call__(self, s: jax.Array, q_pos: Array, k_pos: Array) -> jax.Array:
        cap = jnp.asarray(self.cap, s.dtype)
        return cap * jnp.tanh(s / cap)


def soft_cap(cap: float | Array) -> Score:
    """Keeps scores within (-cap, cap), smoothly.

    s -> cap * tanh(s / cap)

    Args:
        cap: a positive number, or an array: a scalar, or one per head (N,).

    Raises:
        ValueError: cap is known not to lie within 1e-9 and 1e30.
        TypeError: cap is not a number or floating point.

    Source: Bello et al. 2016, arXiv:1611.09940; Gemma Team 2024,
        arXiv:2408.00118, section 2.

    Example:
        >>> soft_cap(50.0)(jnp.array([[-1e4, 1.0, 40.0, 1e4]]), None, None)
        Array([[-50.        ,   0.99986655,  33.201836  ,  50.        ]], dtype=float32)
    """
    if isinstance(cap, bool) or not isinstance(cap, (int, float)):
        cap = as_array(cap)
        if not jnp.issubdtype(cap.dtype, jnp.floating):
            raise TypeError(
                f"soft_cap: cap must be a number or floating point, but got {cap!r}. "
                "Give 50.0, or an array (N,)."
            )
    if is_known(cap):
        caps = np.asarray(cap, np.float64)
        if not np.all((caps >= 1e-9) & (caps <= 1e30)):
            raise ValueError(
                "soft_cap: cap must be positive, from 1e-9 to 1e30, where float32 has "
                f"s / cap and its gradient, but got {cap=}. To have no cap, leave the "
                "rule out."
            )
    return SoftCap(cap)


class Additive(Score):
    """See `additive`."""

    positional = False

    bias: Array = leaf("BNTS")

    def __call__(self, s: jax.Array, q_pos: Array, k_pos: Array) -> jax.Array:
        return s + jnp.asarray(self.bias, s.dtype)


def additive(bias: Array) -> Score:
    """Adds a bias to the scores.

    s -> s + bias

    Args:
        bias: floating point, (*B, N, T, S), each axis full or 1. It has the rank of
            query; nothing is broadcast from fewer axes.

    Raises:
        TypeError: bias is Boolean or of integers.

    Example:
        >>> import jattn
        >>> q, k = jnp.zeros((3, 1, 4)), jnp.zeros((2, 1, 4))
        >>> bias = np.log(np.array([[[0.25, 0.75]]]))  # N, T, S = 1, 1, 2
        >>> jattn.attention_weights(q, k, score=additive(bias)).round(2)
        Array([[[0.25, 0.75],
                [0.25, 0.75],
                [0.25, 0.75]]], dtype=float32)
    """
    return Additive(array_of("additive", "bias", bias, np.floating))


class CustomScore(Score):
    """See `rule`."""

    fn: Callable[..., Any]
    arrays: tuple[Array, ...] = leaves_from("axes")
    axes: tuple[str, ...] = ()

    called = "rule"

    def __call__(self, s: jax.Array, q_pos: Array, k_pos: Array) -> jax.Array:
        return self.fn(s, q_pos, k_pos, *tile_views(self.arrays, self.axes))


def rule(
    fn: Callable[..., Any], *arrays: Array, axes: Sequence[str] | None = None
) -> Score:
    """Changes scores by a function of them and the positions.

    Args:
        fn: `fn(s, q_pos, k_pos, *arrays) -> s`, elementwise over (T, S), (T, 1) and
            (1, S). It keeps the shape and the dtype of `s`, and is finite where `s`
            is. It is compiled, and the function itself is part of the cache's key: use
            the same one again, not a fresh lambda, and let it read what varies from
            `arrays` only.
        *arrays: what else it needs; gradients reach them.
        axes: the letters of each array, of "BNTS" and in that order, with a dot for
            any other axis. An array with T or S reaches `fn` as the tile's part of it,
            T as (T, 1) and S as (1, S); B and N are mapped away; a dot is passed
            whole. By default "", which passes all of it whole.

    Raises:
        ValueError: `axes` does not name the axes of each array.

    Example:
        >>> def favour(s, q_pos, k_pos, per_head, distance):
        ...     return s + per_head * (q_pos - k_pos == distance)
        >>> rule(favour, np.array([0.5, 0.25]), np.int32(2), axes=["N", ""])
        rule(favour, float64[2], int32[], axes=('N', ''))
    """
    check_callable("scores.rule", "fn", fn)
    return CustomScore(fn, *with_axes("scores.rule", arrays, axes))
