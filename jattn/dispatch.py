"""The front door: `attention`, and the functions that show its steps."""

from typing import Any, Literal

import jax
import jax.numpy as jnp

from jattn import execute
from jattn.choice import arrange, empty_rows_of
from jattn.core.boundary import check_vectors
from jattn.core.rules import Array, Mask, Score
from jattn.core.spec import AttentionSpec
from jattn.core.tile import Pairs
from jattn.prepare import Call, check_dropout, per_head, prepare


def attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    mask: Mask | Array | None = None,
    score: Score | tuple[Score, ...] | None = None,
    bias: Array | None = None,
    scale: float | Array | None = None,
    sinks: Array | None = None,
    dropout_rate: float = 0.0,
    dropout_rng: jax.Array | None = None,
    query_positions: Array | Literal["start", "end"] | None = None,
    key_positions: Array | None = None,
    implementation: Literal["reference", "decode", "blockwise"] | None = None,
    block_sizes: tuple[int, int] | None = None,
    empty_rows: Literal["zero", "mean"] = "zero",
    precision: jax.lax.PrecisionLike = None,
    return_lse: bool = False,
    stats: bool = False,
) -> Any:
    """Scaled dot-product attention under any mask and any score rule.

        out = softmax(score(query key^T scale) + bias, forbidden pairs at -inf) value

    Letters: *B any leading axes, T queries, S keys, N query heads, K key heads (query
    head n reads key head n // (N // K)), H head size, D width of a value.

    A query that may look at no key gets 0. A NaN or an Inf in a vector makes exactly
    those queries NaN that may look at it, and nothing else. A score that overflows to
    -inf has a weight of 0, as arithmetic says. Positions are less than 2**30 in size.
    Policies of `jax.checkpoint` find out and lse under the names "attention_out" and
    "attention_lse".

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
        sinks: a number, or (N,): for each head the logit of one more key, which every
            query may see and which has no value. Not with `empty_rows="mean"`.
        dropout_rate: the share of weights that are set to 0, in [0, 1); the others are
            divided by 1 - dropout_rate. Which ones follows from dropout_rng, batch row,
            head, query index and key index, by a hash (lowbias32) that is not that of
            `jax.random`, and from nothing else: not from tiles or implementation. Under
            `jax.vmap` or `jax.shard_map` rows are counted anew, so give each its key.
        dropout_rng: a key of `jax.random`; required if dropout_rate is not 0.
        query_positions: where the queries stand: "start" (the first of them beside the
            first key), "end" (the last beside the last key), or integers that broadcast
            to (*B, T). None is "start" if T == S; otherwise it must be chosen wherever
            a rule uses positions. Integers are data, as in a rule: which tiles to visit
            is planned while the program runs, not while it is traced.
        key_positions: integers that broadcast to (*B, S); default 0 to S - 1.
        implementation: "reference" (whole rows, O(T S) memory), "blockwise" (O(T + S)
            memory) or "decode" (likewise, for few queries: the keys are split, and all
            queries stand in one tile). None takes, where no block sizes are given,
            reference if everything fits one tile of 256 x 256, and decode if T (N // K)
            <= 64; else blockwise.
        block_sizes: (queries, keys) of a tile of blockwise; of decode that of keys, by
            default 128 on a CPU and 1024 elsewhere. By default (256, 256) on a
            CPU and (512, 512) elsewhere, with the rows shared by the N // K query heads
            of a key head, but 64 at least; halved, down to 128 keys, where that fits a
            static mask better. `jattn.tune` measures what is best.
        empty_rows: "zero", or "mean": a query without keys gets the mean of all
            values, whatever they hold, as in `jax.nn.dot_product_attention`.
        precision: of the matrix products, as in `jax.lax.dot_general`.
        return_lse: whether to return the log-sum-exp too.
        stats: whether to return statistics of the weights too.

    Returns:
        out: (*B, T, N, D), dtype of query; alone, or as (out, lse) with `return_lse`,
            or as (out, Stats) with `stats`.
        lse: (*B, T, N), float32 (float64 if a vector is), differentiable: natural log
            of the softmax's denominator, -inf for a query without keys.
        Stats: lse, max_logit, entropy, max_prob and sum_p2, each like lse; see
            `jattn.Stats`.

    Raises:
        ValueError: shapes, positions or options do not fit, named in letters.
        TypeError: an argument is of the wrong kind.

    Source: Vaswani et al. 2017, arXiv:1706.03762, section 3.2; Xiao et al. 2023,
        arXiv:2309.17453, section 3.3 (sinks); Srivastava et al. 2014 (dropout).

    Example:
        >>> import jax, jattn
        >>> x = jax.random.normal(jax.random.key(0), (2, 5, 4, 8))  # (B, T, N, H)
        >>> jattn.attention(x, x, x, mask=jattn.masks.causal()).shape
        (2, 5, 4, 8)
        >>> out, stats = jattn.attention(x, x, x, mask=jattn.masks.causal(), stats=True)
        >>> stats.max_prob[0, 0]  # the first query sees itself only
        Array([1., 1., 1., 1.], dtype=float32)
    """
    return attend_as(
        "attention",
        query,
        key,
        value,
        mask=mask,
        score=score,
        bias=bias,
        scale=scale,
        sinks=sinks,
        dropout_rate=dropout_rate,
        dropout_rng=dropout_rng,
        query_positions=query_positions,
        key_positions=key_positions,
        implementation=implementation,
        block_sizes=block_sizes,
        empty_rows=empty_rows,
        precision=precision,
        return_lse=return_lse,
        stats=stats,
    )


def attend_as(caller: str, query: Any, key: Any, value: Any, **options: Any) -> Any:
    """`attention`, with its options and their defaults, whose errors name `caller`."""
    options = (attention.__kwdefaults__ or {}) | options
    call = Call(caller, check_vectors(caller, query, key, value))
    pairs, spec, _ = arrange(call, jnp.result_type(query, key, value), **options)
    out, lse, measured = execute.attend(
        query, key, value, pairs, options["dropout_rng"], spec=spec
    )
    if options["stats"]:
        return out, measured
    return (out, lse) if options["return_lse"] else out


def attention_weights(
    query: jax.Array,
    key: jax.Array,
    *,
    mask: Mask | Array | None = None,
    score: Score | tuple[Score, ...] | None = None,
    bias: Array | None = None,
    scale: float | Array | None = None,
    sinks: Array | None = None,
    dropout_rate: float = 0.0,
    dropout_rng: jax.Array | None = None,
    query_positions: Array | Literal["start", "end"] | None = None,
    key_positions: Array | None = None,
    empty_rows: Literal["zero", "mean"] = "zero",
    precision: jax.lax.PrecisionLike = None,
) -> jax.Array:
    """The weights with which `attention` averages the values; O(T S) memory.

    Args and errors are those of `attention`, without value, implementation,
    block_sizes, return_lse and stats.

    Returns:
        (*B, N, T, S), float32 (float64 for float64 inputs). Without sinks and dropout
        a row sums to one, or to zero where a query may look at no key (one with
        `empty_rows="mean"`).

    Example:
        >>> import jax, jattn
        >>> x = jax.random.normal(jax.random.key(0), (2, 5, 4, 8))  # (B, T, N, H)
        >>> jattn.attention_weights(x, x, mask=jattn.masks.causal())[0, 0, 0]
        Array([1., 0., 0., 0., 0.], dtype=float32)
    """
    sizes = check_vectors("attention_weights", query, key)
    call = Call("attention_weights", sizes)
    pairs, align = prepare(
        call,
        mask=mask,
        score=score,
        bias=bias,
        scale=scale,
        sinks=sinks,
        query_positions=query_positions,
        key_positions=key_positions,
    )
    spec = AttentionSpec(
        dtype=str(jnp.result_type(query, key)),
        empty_rows=empty_rows_of(call, empty_rows, sinks),
        align=align,
        precision=precision,
        dropout_rate=check_dropout(call, dropout_rate, dropout_rng),
    )
    return execute.weights(query, key, pairs, dropout_rng, spec=spec)


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
    pairs = Pairs(per_head(call, "scale", scale), (), None)
    spec = AttentionSpec(dtype=str(jnp.result_type(query, key)))
    return execute.score(query, key, pairs, spec=spec)
