"""The tile function: the only place where the scores of queries and keys are made.

Every algorithm is a fold of `logits` over tiles, or calls it once for all pairs. The
order is always the same: scale, score rules as written, bias, mask last.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from jattn.core.boundary import positions_beside
from jattn.core.dropout import Dropout
from jattn.core.letters import children, leaf
from jattn.core.product import product
from jattn.core.rules import Array, Mask, Rule, Score
from jattn.core.softmax import accumulator as accumulator
from jattn.core.softmax import mask_scores
from jattn.core.spec import AttentionSpec


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
        sink: logit of one more key, which every query may see and which has no value.
        dropout: which weights are dropped.
    """

    positional = False

    scale: Array | float | None = leaf("N")
    scores: tuple[Score, ...] = children()
    mask: Mask | None = children()
    q_pos: Array | None = leaf("BT", default=None)
    k_pos: Array | None = leaf("BS", default=None)
    sink: Array | None = leaf("N", default=None)
    dropout: Dropout | None = children(default=None)

    def kept(self, weights: jax.Array) -> jax.Array:
        """Weights (T, S) after dropout."""
        return weights if self.dropout is None else self.dropout.kept(weights)

    def placed(self, num_queries: int, num_keys: int, align: str) -> "Pairs":
        """With positions, which count places in the arrays where none were given."""
        q_pos, k_pos = self.q_pos, self.k_pos
        if q_pos is None:
            q_pos = positions_beside("attention", k_pos, num_queries, num_keys, align)
        if k_pos is None:
            k_pos = np.arange(num_keys, dtype=np.int32)
        return dataclasses.replace(self, q_pos=q_pos, k_pos=k_pos)

    @property
    def positions(self) -> tuple[Array, Array]:
        """Of the queries, (T, 1), and of the keys, (1, S)."""
        assert self.q_pos is not None and self.k_pos is not None
        return self.q_pos[:, None], self.k_pos[None, :]


def scores_of_head(
    q: jax.Array, k_t: jax.Array, scale: Array | float | None, spec: AttentionSpec
) -> jax.Array:
    """Scaled products of one head: (T, H), (H, S) to (T, S) in `accumulator(dtype)`.

    It is cheaper to scale the queries than the products, but a narrow dtype would
    round them.
    """
    wide = accumulator(spec.dtype)
    scale = jnp.asarray(scale, wide)
    multiply = functools.partial(
        product, "th,hs->ts", dtype=spec.dtype, precision=spec.precision
    )
    if wide == spec.dtype:
        return multiply(q.astype(wide) * scale, k_t)
    return multiply(q, k_t) * scale


def scores(
    q: jax.Array, k_t: jax.Array, pairs: Pairs, spec: AttentionSpec
) -> jax.Array:
    """The scores of a tile of one head, as if every pair were allowed.

    Args:
        q: queries, (T, H).
        k_t: keys, transposed: (H, S).
        pairs: the rules, with the arrays of this tile.
        spec: the dtype and the precision of the product.

    Returns:
        (T, S), float32, or float64 for float64 inputs.

    Raises:
        ValueError: a score rule changes the shape or the dtype of the scores.
    """
    s = scores_of_head(q, k_t, pairs.scale, spec)
    for rule in pairs.scores:
        s = _apply(rule, s, *pairs.positions)
    return s


def logits(
    q: jax.Array, k_t: jax.Array, pairs: Pairs, spec: AttentionSpec
) -> jax.Array:
    """The scores of a tile of one head, those of forbidden pairs at -inf.

    A vector that `poison` has marked counts as 0, and NaN is added to its pairs before
    the mask, so that it reaches no pair that is forbidden, forwards or backwards.
    """
    (q, q_nan), (k_t, k_nan) = _unpoisoned(q, 1), _unpoisoned(k_t, 0)
    s = scores(q, k_t, pairs, spec)
    s = s + q_nan.astype(s.dtype) + k_nan.astype(s.dtype)
    if pairs.mask is None:
        return s
    try:
        return mask_scores(s, pairs.mask.allowed(*pairs.positions))
    except (TypeError, ValueError) as error:
        error.add_note(f"In attention, under the mask {pairs.mask}.")
        raise


def with_sink(s: jax.Array, sink: Array | None) -> jax.Array:
    """The logits of whole rows, (T, S), and that of the sink behind them, if any."""
    if sink is None:
        return s
    column = jnp.broadcast_to(jnp.asarray(sink, s.dtype), (s.shape[0], 1))
    return jnp.concatenate([s, column], axis=1)


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


def poison(
    q: jax.Array, k: jax.Array, v: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Turns vectors of one head that hold a NaN or an Inf into marks.

    A NaN multiplied by a weight of 0 is NaN still, so in a matrix product it reaches
    rows that must not see it. So such a query or key becomes NaN as a whole, a value
    becomes 0 and makes its key NaN, and `logits` takes care of the rest: exactly the
    rows that may see them are NaN, and so are the gradients of exactly what these
    rows look at.
    """
    q_bad, k_bad, v_bad = (~jnp.isfinite(x).all(-1, keepdims=True) for x in (q, k, v))
    return (
        _replace(q, q_bad, jnp.nan),
        _replace(k, k_bad | v_bad, jnp.nan),
        _replace(v, v_bad, 0.0),
    )


def _unpoisoned(x: jax.Array, axis: int) -> tuple[jax.Array, jax.Array]:
    """The vectors along `axis`, 0 where they are marked, and their marks, 0 or NaN."""
    bad = jnp.isnan(x).any(axis, keepdims=True)
    return _replace(x, bad, 0.0), jnp.where(bad, jnp.nan, 0.0)


@functools.partial(jax.custom_jvp, nondiff_argnums=(2,))
def _replace(x: jax.Array, where: jax.Array, value: float) -> jax.Array:
    return jnp.where(where, value, x)


@_replace.defjvp
def _replace_jvp(value: float, primals: tuple, tangents: tuple) -> tuple:
    # The identity: the cotangent of a row with a NaN is NaN and must arrive there.
    return _replace(*primals, value), tangents[0]
