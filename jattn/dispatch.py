"""The front door: `attention`, lifted from one head to heads and batch."""

import functools
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp

from jattn.algorithms import blockwise, reference
from jattn.core.boundary import Sizes, check_vectors, one_of
from jattn.core.heads import over_heads
from jattn.core.rules import Array, Mask, Score
from jattn.core.spec import AttentionSpec
from jattn.core.tile import Pairs, accumulator, scores_of_head
from jattn.prepare import Call, check_scale, prepare

ALGORITHMS: dict[str, Callable[..., tuple[jax.Array, jax.Array]]] = {
    "reference": reference.attend,
    "blockwise": blockwise.attend,
}

EMPTY_ROWS = ("zero", "mean")

ONE_TILE = 256
"""Up to this many queries and keys, one tile is all there is: `reference`."""


def attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    mask: Mask | Array | None = None,
    score: Score | tuple[Score, ...] | None = None,
    bias: Array | None = None,
    scale: float | Array | None = None,
    query_positions: Array | Literal["start", "end"] | None = None,
    key_positions: Array | None = None,
    implementation: Literal["reference", "blockwise"] | None = None,
    block_sizes: tuple[int, int] | None = None,
    empty_rows: Literal["zero", "mean"] = "zero",
    precision: jax.lax.PrecisionLike = None,
    return_lse: bool = False,
) -> Any:
    """Scaled dot-product attention under any mask and any score rule.

        out = softmax(score(query key^T scale) + bias, forbidden pairs at -inf) value

    Letters: *B any leading axes, T queries, S keys, N query heads, K key heads (query
    head n reads key head n // (N // K)), H head size, D width of a value.

    A query that may look at no key gets 0. A NaN or an Inf in a vector makes exactly
    those queries NaN that may look at it, and nothing else. A score that overflows to
    -inf has a weight of 0, as arithmetic says. Positions lie within +-2**30.

    Args:
        query: (*B, T, N, H), floating point.
        key: (*B, S, K, H); N a multiple of K.
        value: (*B, S, K, D).
        mask: which query may look at which key: a rule from `jattn.masks`, or a
            Boolean array (*B, N, T, S), each axis full or 1, True where it may.
        score: a rule from `jattn.scores`, or a tuple of them, applied in order.
        bias: floating point, (*B, N, T, S), each axis full or 1; added after the
            score rules.
        scale: factor of the dot products; a number, or an array of shape (), (1,) or
            (N,). Default 1/sqrt(H).
        query_positions: where the queries stand: "start" (the first of them beside the
            first key), "end" (the last beside the last key), or integers that broadcast
            to (*B, T). None is "start" if T == S; otherwise it must be chosen wherever
            a rule uses positions.
        key_positions: integers that broadcast to (*B, S); default 0 to S - 1.
        implementation: "reference" (whole rows, O(T S) memory) or "blockwise" (O(T +
            S) memory). None takes reference where everything fits one tile of 256 x
            256 and no block sizes are given, else blockwise.
        block_sizes: (queries, keys) of a tile of blockwise; default (256, 256).
        empty_rows: "zero", or "mean": a query without keys gets the mean of all
            values, whatever they hold, as in `jax.nn.dot_product_attention`.
        precision: of the matrix products, as in `jax.lax.dot_general`.
        return_lse: whether to return the log-sum-exp too.

    Returns:
        out: (*B, T, N, D), dtype of query.
        lse: (*B, T, N), float32 (float64 if a vector is), differentiable, with
            `return_lse`: natural log of the softmax's denominator, -inf for a query
            without keys.

    Raises:
        ValueError: shapes, positions or options do not fit, named in letters.
        TypeError: an argument is of the wrong kind.

    Source: Vaswani et al. 2017, arXiv:1706.03762, section 3.2.

    Example:
        >>> import jax, jattn
        >>> x = jax.random.normal(jax.random.key(0), (2, 5, 4, 8))  # (B, T, N, H)
        >>> jattn.attention(x, x, x, mask=jattn.masks.causal()).shape
        (2, 5, 4, 8)
    """
    sizes = check_vectors("attention", query, key, value)
    pairs, align = prepare(
        Call("attention", sizes),
        mask=mask,
        score=score,
        bias=bias,
        scale=scale,
        query_positions=query_positions,
        key_positions=key_positions,
    )
    chosen, blocks = _choose(implementation, block_sizes, sizes)
    spec = AttentionSpec(
        implementation=chosen,
        block_sizes=blocks,
        empty_rows=one_of("attention", "empty_rows", empty_rows, EMPTY_ROWS),
        align=align,
        precision=precision,
    )
    out, lse = _attention(query, key, value, pairs, spec=spec)
    return (out, lse) if return_lse else out


def attention_weights(
    query: jax.Array,
    key: jax.Array,
    *,
    mask: Mask | Array | None = None,
    score: Score | tuple[Score, ...] | None = None,
    bias: Array | None = None,
    scale: float | Array | None = None,
    query_positions: Array | Literal["start", "end"] | None = None,
    key_positions: Array | None = None,
    empty_rows: Literal["zero", "mean"] = "zero",
    precision: jax.lax.PrecisionLike = None,
) -> jax.Array:
    """The weights with which `attention` averages the values; O(T S) memory.

    Args and errors are those of `attention`, without value, implementation,
    block_sizes and return_lse.

    Returns:
        (*B, N, T, S), float32 (float64 for float64 inputs). A row sums to one, or to
        zero where a query may look at no key (one with `empty_rows="mean"`).

    Example:
        >>> import jax, jattn
        >>> x = jax.random.normal(jax.random.key(0), (2, 5, 4, 8))  # (B, T, N, H)
        >>> jattn.attention_weights(x, x, mask=jattn.masks.causal())[0, 0, 0]
        Array([1., 0., 0., 0., 0.], dtype=float32)
    """
    sizes = check_vectors("attention_weights", query, key)
    pairs, align = prepare(
        Call("attention_weights", sizes),
        mask=mask,
        score=score,
        bias=bias,
        scale=scale,
        query_positions=query_positions,
        key_positions=key_positions,
    )
    spec = AttentionSpec(
        empty_rows=one_of("attention_weights", "empty_rows", empty_rows, EMPTY_ROWS),
        align=align,
        precision=precision,
    )
    return _weights(query, key, pairs, spec=spec)


def scaled_scores(
    query: jax.Array, key: jax.Array, scale: float | Array | None = None
) -> jax.Array:
    """Dot products of queries and keys, scaled: the first step of attention.

        s = query key^T scale

    Args:
        query: (*B, T, N, H), floating point.
        key: (*B, S, K, H); N a multiple of K.
        scale: a number, or an array of shape () or (N,). Default 1/sqrt(H), which
            keeps the variance of a score at 1 when those of the vectors' entries are.

    Returns:
        (*B, N, T, S), float32 (float64 for float64 inputs).

    Raises:
        ValueError: shapes do not fit, named in letters.
        TypeError: an argument is not a floating-point array.

    Source: Vaswani et al. 2017, arXiv:1706.03762, section 3.2.1.

    Example:
        >>> import jattn
        >>> q, k = jnp.ones((1, 1, 4)), jnp.ones((2, 1, 4))
        >>> jattn.scaled_scores(q, k), jattn.scaled_scores(q, k, scale=1.0)
        (Array([[[2., 2.]]], dtype=float32), Array([[[4., 4.]]], dtype=float32))
    """
    sizes = check_vectors("scaled_scores", query, key)
    call = Call("scaled_scores", sizes)
    pairs = Pairs(check_scale(call, scale), (), None)
    return _scores(query, key, pairs)


def _choose(
    implementation: str | None, block_sizes: Any, sizes: Sizes
) -> tuple[str, tuple[int, int] | None]:
    """The name of the algorithm, and its block sizes."""
    if implementation is not None:
        one_of("attention", "implementation", implementation, tuple(ALGORITHMS))
    if block_sizes is None:
        small = max(sizes.T, sizes.S) <= ONE_TILE
        return implementation or ("reference" if small else "blockwise"), None
    ints = isinstance(block_sizes, tuple) and len(block_sizes) == 2
    if not ints or not all(type(n) is int and n > 0 for n in block_sizes):
        raise ValueError(
            "attention: block_sizes must be two positive ints (queries, keys), but got "
            f"{block_sizes!r}. The default is (256, 256)."
        )
    if implementation == "reference":
        raise ValueError(
            "attention: implementation='reference' has no tiles, but got "
            f"{block_sizes=}. Leave one of them out."
        )
    return "blockwise", block_sizes


@functools.partial(jax.jit, static_argnames="spec")
def _attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    pairs: Pairs,
    *,
    spec: AttentionSpec,
) -> tuple[jax.Array, jax.Array]:
    *batch, num_queries, num_heads, _ = query.shape
    shape = (*batch, num_queries, num_heads)
    out_dtype, common = query.dtype, jnp.result_type(query, key, value)
    query, key, value = (x.astype(common) for x in (query, key, value))
    dtype = accumulator(common)
    if 0 in shape or key.shape[-3] == 0:
        return (
            jnp.zeros((*shape, value.shape[-1]), out_dtype),
            jnp.full(shape, -jnp.inf, dtype),
        )
    algorithm = functools.partial(ALGORITHMS[spec.implementation], spec=spec)
    heads = {"K": 1, "G": 1}
    out, lse = over_heads(algorithm, query, (key, value), pairs, spec.align, heads)
    out = out.reshape(*shape, value.shape[-1])
    lse = lse.reshape(shape)
    if spec.empty_rows == "mean":
        mean = jnp.repeat(jnp.mean(value, axis=-3), num_heads // value.shape[-2], -2)
        out = jnp.where(jnp.isneginf(lse)[..., None], mean[..., None, :, :], out)
    return out.astype(out_dtype), lse


@functools.partial(jax.jit, static_argnames="spec")
def _weights(
    query: jax.Array, key: jax.Array, pairs: Pairs, *, spec: AttentionSpec
) -> jax.Array:
    *batch, num_queries, num_heads, _ = query.shape
    shape = (*batch, num_heads, num_queries, key.shape[-3])
    if 0 in shape:
        return jnp.zeros(shape, accumulator(jnp.result_type(query, key)))
    one_head = functools.partial(reference.weights, spec=spec)
    weights = over_heads(one_head, query, (key,), pairs, spec.align, {}).reshape(shape)
    if spec.empty_rows == "mean":
        empty = ~weights.any(axis=-1, keepdims=True)
        weights = jnp.where(empty, 1 / shape[-1], weights)
    return weights


@jax.jit
def _scores(query: jax.Array, key: jax.Array, pairs: Pairs) -> jax.Array:
    def one_head(q: jax.Array, k: jax.Array, pairs: Pairs) -> jax.Array:
        return scores_of_head(q, k.T, pairs.scale)

    *batch, num_queries, num_heads, _ = query.shape
    shape = (*batch, num_heads, num_queries, key.shape[-3])
    if 0 in shape:
        return jnp.zeros(shape, accumulator(jnp.result_type(query, key)))
    return over_heads(one_head, query, (key,), pairs, "start", {}).reshape(shape)
