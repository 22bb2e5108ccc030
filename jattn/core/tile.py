"""The tile function: the only place where the scores of queries and keys are made.

Every algorithm is a fold of `logits` over tiles, or calls it once for all pairs. The
order is always the same: scale, score rules as written, bias, mask last.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jattn.core.letters import children, leaf, lettered
from jattn.core.rules import Array, Mask, Rule, Score
from jattn.core.softmax import mask_scores


@lettered
class Pairs(Rule):
    """All that turns the dot product of a query and a key into a logit.

    One pytree for everything but the vectors themselves, so that a tile, a head and a
    shard of it are taken by the letters of its arrays.

    Attributes:
        scale: factor of the dot product; None until `over_heads` puts the default.
        scores: score rules in order; a bias is the last of them.
        mask: which query may look at which key. None allows all.
        q_pos: positions of the queries; None, likewise, where they are static.
        k_pos: positions of the keys.
        q_nan: 0, or NaN for a query that holds a NaN or an Inf; see `guard`.
        k_nan: the same for a key and its value.
    """

    scale: Array | float | None = leaf("N")
    scores: tuple[Score, ...] = children()
    mask: Mask | None = children()
    q_pos: Array | None = leaf("BT", default=None)
    k_pos: Array | None = leaf("BS", default=None)
    q_nan: Array | None = leaf("T", default=None)
    k_nan: Array | None = leaf("S", default=None)


def accumulator(dtype: Any) -> jnp.dtype:
    """The dtype of scores and sums: float64 for float64 inputs, else float32."""
    return jnp.promote_types(dtype, jnp.float32)


def scores_of_head(
    q: jax.Array,
    k: jax.Array,
    scale: Array | float | None,
    precision: jax.lax.PrecisionLike = None,
) -> jax.Array:
    """Q k^T * scale for one head: (T, H), (S, H) to (T, S) in `accumulator(dtype)`.

    The scale multiplies the product, where it can't overflow a narrow dtype or round
    in it.
    """
    dtype = accumulator(jnp.result_type(q, k))
    product = jnp.einsum(
        "th,sh->ts", q, k, precision=precision, preferred_element_type=dtype
    )
    return product * jnp.asarray(scale, dtype)


def logits(
    q: jax.Array, k: jax.Array, pairs: Pairs, precision: jax.lax.PrecisionLike = None
) -> jax.Array:
    """The logits of a tile of one head, forbidden pairs at -inf.

    Args:
        q: queries, (T, H).
        k: keys, (S, H).
        pairs: the rules, with the arrays of this tile.
        precision: of the product, as in `jax.lax.dot_general`.

    Returns:
        (T, S), float32, or float64 for float64 inputs.

    Raises:
        ValueError: a score rule changes the shape or the dtype of the scores.
    """
    s = scores_of_head(q, k, pairs.scale, precision)
    assert pairs.q_pos is not None and pairs.k_pos is not None
    q_pos, k_pos = pairs.q_pos[:, None], pairs.k_pos[None, :]
    for rule in pairs.scores:
        s = _apply(rule, s, q_pos, k_pos)
    if pairs.q_nan is not None and pairs.k_nan is not None:
        s = s + pairs.q_nan[:, None] + pairs.k_nan[None, :]
    if pairs.mask is not None:
        s = mask_scores(s, pairs.mask.allowed(q_pos, k_pos))
    return s


def _apply(rule: Score, s: jax.Array, q_pos: Array, k_pos: Array) -> jax.Array:
    changed = rule(s, q_pos, k_pos)
    if jnp.shape(changed) != s.shape or jnp.result_type(changed) != s.dtype:
        raise ValueError(
            f"attention: score rule {rule} must keep the scores' shape (T, S) and "
            f"dtype, but got {jnp.shape(changed)} {jnp.result_type(changed)} from "
            f"{s.shape} {s.dtype}. Broadcast its arrays against s and cast them to "
            "s.dtype."
        )
    return changed


def guard(
    q: jax.Array, k: jax.Array, v: jax.Array, pairs: Pairs
) -> tuple[jax.Array, jax.Array, jax.Array, Pairs]:
    """Takes NaN and Inf out of the vectors of one head and into `pairs`.

    A NaN multiplied by a weight of 0 is NaN still, so in a matrix product it reaches
    rows that must not see it, forwards and backwards. Here such a vector becomes 0,
    and a NaN is added to the logits of its pairs instead, before the mask: exactly
    the rows that may see it are NaN, and so are the gradients of exactly what these
    rows look at.
    """
    dtype = accumulator(q.dtype)
    q_nan = _nan_rows(q, dtype)
    k_nan = _nan_rows(k, dtype) + _nan_rows(v, dtype)
    pairs = dataclasses.replace(pairs, q_nan=q_nan, k_nan=k_nan)
    return _finite_rows(q), _finite_rows(k), _finite_rows(v), pairs


def _nan_rows(x: jax.Array, dtype: Any) -> jax.Array:
    return jnp.where(jnp.isfinite(x).all(axis=-1), 0, jnp.nan).astype(dtype)


@jax.custom_jvp
def _finite_rows(x: jax.Array) -> jax.Array:
    return jnp.where(jnp.isfinite(x).all(axis=-1, keepdims=True), x, 0)


@_finite_rows.defjvp
def _finite_rows_jvp(primals: tuple, tangents: tuple) -> tuple:
    # The identity: the cotangent of a NaN row is NaN and must arrive there.
    return _finite_rows(*primals), tangents[0]
