"""Softmax of rows in which keys may be forbidden, whole or in parts.

Forbidden means a score of -inf. Subtracting `where(isneginf(max), 0, max)` before the
exponential makes a row without any key the identity of everything here, weights 0 and
log-sum-exp -inf, and no other line needs a case for it.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np


def accumulator(dtype: Any) -> np.dtype:
    """The dtype of scores and sums: float64 for float64 inputs, else float32."""
    # By numpy: JAX's own promotion may be "strict", and then refuses bfloat16.
    return np.promote_types(jnp.dtype(dtype), np.float32)


def mask_scores(scores: jax.Array, allowed: jax.Array | bool) -> jax.Array:
    """The scores, with those of forbidden pairs at -inf.

    A large negative number in its place would be beaten by lower scores, and is -inf
    in float16 all the same.

    Args:
        scores: scores, (..., T, S).
        allowed: Boolean, of the rank of `scores`, each axis full or 1, or a scalar.
            True where a query may look.

    Returns:
        The shape and dtype of `scores`.

    Raises:
        TypeError: `allowed` is not Boolean.
        ValueError: its axes are not those of `scores`.

    Example:
        >>> mask_scores(jnp.array([1.0, 2.0]), jnp.array([True, False]))
        Array([  1., -inf], dtype=float32)
    """
    if not jnp.issubdtype(jnp.result_type(allowed), jnp.bool_):
        raise TypeError(
            "mask_scores: allowed must be Boolean, but got "
            f"{jnp.result_type(allowed)}. For numbers, write `allowed != 0`."
        )
    shape, want = jnp.shape(allowed), jnp.shape(scores)
    fits = len(shape) == len(want) and all(
        n in (1, m) for n, m in zip(shape, want, strict=True)
    )
    if shape and not fits:
        raise ValueError(
            "mask_scores: allowed must have the axes of scores, each full or 1, here "
            f"{want}, but got {shape}. Give it the missing axes, of size 1."
        )
    return jnp.where(allowed, scores, -jnp.inf)


def masked_softmax(scores: jax.Array) -> jax.Array:
    """Softmax over the last axis, in which a score of -inf is a forbidden key.

        p_j = exp(s_j) / sum_l exp(s_l)

    A forbidden key weighs exactly 0. A row sums to one unless every key of it is
    forbidden: then it is 0.

    Args:
        scores: scores, (..., S), any floating dtype.

    Returns:
        Weights of the shape and dtype of `scores`.

    Example:
        >>> masked_softmax(jnp.array([[0.0, 0.0, -jnp.inf], 3 * [-jnp.inf]]))
        Array([[0.5, 0.5, 0. ],
               [0. , 0. , 0. ]], dtype=float32)
    """
    forbidden = jnp.isneginf(scores)
    row_max = jnp.max(scores, axis=-1, keepdims=True, initial=-jnp.inf)
    exps = jnp.exp(scores - jax.lax.stop_gradient(finite(row_max)))
    wide = accumulator(scores.dtype)
    total = jnp.sum(exps, axis=-1, keepdims=True, dtype=wide)
    weights = exps.astype(wide) / jnp.where(total == 0, 1, total)
    # Forbidden keys again, because a row with a NaN is NaN in every place.
    return jnp.where(forbidden, 0, weights).astype(scores.dtype)


def logsumexp(scores: jax.Array) -> jax.Array:
    """Log sum_j exp(s_j) over the last axis: (..., S) to (...); -inf without keys."""
    row_max = finite(jnp.max(scores, axis=-1, initial=-jnp.inf))
    row_max = jax.lax.stop_gradient(row_max)
    return row_max + _log(jnp.sum(jnp.exp(scores - row_max[..., None]), axis=-1))


class SoftmaxState(NamedTuple):
    """What some queries have seen of some set of keys, before normalisation.

    States of disjoint sets are joined by `merge`, which is associative and
    commutative and has `empty` as its identity. Whatever splits the keys is a fold of
    it: over tiles, over parts of a cache, over devices.

    Attributes:
        max: the largest score; -inf if there was none. (..., T).
        sum: sum of exp(score - max). (..., T).
        acc: sum of exp(score - max) * value. (..., T, D).

    Source: Milakov & Gimelshein 2018, arXiv:1805.02867, section 3.1.
    """

    max: jax.Array
    sum: jax.Array
    acc: jax.Array

    @classmethod
    def empty(
        cls, shape: tuple[int, ...], value_dim: int, dtype: jax.typing.DTypeLike
    ) -> "SoftmaxState":
        """The state of rows, (..., T) in `shape`, that have seen no key."""
        return cls(
            jnp.full(shape, -jnp.inf, dtype),
            jnp.zeros(shape, dtype),
            jnp.zeros((*shape, value_dim), dtype),
        )

    @classmethod
    def of_sink(
        cls, sink: jax.Array, shape: tuple[int, ...], value_dim: int
    ) -> "SoftmaxState":
        """The state of rows that have seen one key, of logit `sink`, without a value.

        Source: Xiao et al. 2023, arXiv:2309.17453, section 3.3.
        """
        empty = cls.empty(shape, value_dim, sink.dtype)
        some = jnp.where(jnp.isneginf(sink), 0, 1).astype(sink.dtype)
        return empty._replace(max=empty.sum + sink, sum=empty.sum + some)

    @classmethod
    def from_scores(
        cls,
        scores: jax.Array,
        value: jax.Array,
        precision: jax.lax.PrecisionLike = None,
    ) -> "SoftmaxState":
        """The state after one set of keys: scores (..., T, S), value (..., S, D)."""

        def weigh(exps: jax.Array) -> jax.Array:
            return jnp.matmul(
                exps.astype(value.dtype),
                value,
                precision=precision,
                preferred_element_type=scores.dtype,
            )

        empty = cls.empty(scores.shape[:-1], value.shape[-1], scores.dtype)
        return empty.add(scores, weigh)

    def add(
        self, scores: jax.Array, weigh: Callable[[jax.Array], jax.Array]
    ) -> "SoftmaxState":
        """The state after more keys, as `merge(from_scores(scores, value))`.

        Args:
            scores: (..., T, S).
            weigh: from exp(score - max), (..., T, S), to its product with their values,
                (..., T, D).
        """
        row_max = jnp.maximum(self.max, jnp.max(scores, axis=-1, initial=-jnp.inf))
        shift = finite(row_max)
        exps = jnp.exp(below(scores, shift))
        old = jnp.exp(self.max - shift)
        return SoftmaxState(
            row_max,
            old * self.sum + jnp.sum(exps, axis=-1),
            old[..., None] * self.acc + weigh(exps),
        )

    def merge(self, other: "SoftmaxState") -> "SoftmaxState":
        """The state over the union of two disjoint sets of keys."""
        row_max = jnp.maximum(self.max, other.max)
        mine = jnp.exp(self.max - finite(row_max))
        others = jnp.exp(other.max - finite(row_max))
        return SoftmaxState(
            row_max,
            mine * self.sum + others * other.sum,
            mine[..., None] * self.acc + others[..., None] * other.acc,
        )

    def finish(self) -> tuple[jax.Array, jax.Array]:
        """The output (..., T, D) and its log-sum-exp (..., T); 0 and -inf if empty."""
        out, shift, log_sum = self.normalised()
        return out, shift + log_sum

    def normalised(self) -> tuple[jax.Array, jax.Array, jax.Array]:
        """The output, and the log-sum-exp in two parts.

        Beside a large maximum the logarithm of the sum has no digits left, so whoever
        wants weights again takes exp(score - shift - log_sum).

        Returns:
            out: (..., T, D).
            shift: (..., T), the maximum; 0 if empty.
            log_sum: (..., T), the logarithm of the sum; -inf if empty.
        """
        total = jnp.where(self.sum == 0, 1, self.sum)
        return self.acc / total[..., None], finite(self.max), _log(self.sum)


def below(scores: jax.Array, shift: jax.Array) -> jax.Array:
    """Scores (..., T, S) less the maximum of their row, (..., T): never above 0.

    No score is above the maximum; saying so keeps a compiler from contracting a product
    in the score with the subtraction, after which the largest weight would differ from
    1 by the rounding of a large score.
    """
    shift = shift[..., None]
    return jnp.where(scores > shift, shift, scores) - shift


def finite(row_max: jax.Array) -> jax.Array:
    """What to subtract before the exponential: the maximum, 0 if there is none."""
    return jnp.where(jnp.isneginf(row_max), 0, row_max)


def _log(total: jax.Array) -> jax.Array:
    """log(total), -inf at 0, with a derivative of 0 there instead of NaN."""
    some = total != 0
    return jnp.where(some, jnp.log(jnp.where(some, total, 1)), -jnp.inf)
