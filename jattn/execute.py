"""The compiled calls: one head's algorithm over heads and batch."""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from jattn.algorithms import blockwise, decode, reference, score_gradients
from jattn.core.dropout import Shared, dropout_of
from jattn.core.heads import over_heads
from jattn.core.letters import letters_of
from jattn.core.rules import Array
from jattn.core.spec import AttentionSpec
from jattn.core.stats import Stats
from jattn.core.tile import Pairs, accumulator, scores_of_head

ALGORITHMS: dict[str, Callable[..., tuple[jax.Array, jax.Array, Stats | None]]] = {
    "reference": reference.attend,
    "blockwise": blockwise.attend,
    "decode": decode.attend,
}

CACHED = ("KHS", "KSH")
"""How a cache stores keys and values, behind *B; H is that of a vector."""


@functools.partial(jax.jit, static_argnames="spec")
def attend(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    pairs: Pairs,
    dropout_rng: jax.Array | Shared | None,
    *,
    spec: AttentionSpec,
    tokens: tuple[jax.Array, jax.Array] | None = None,
) -> tuple[jax.Array, jax.Array, Stats | None]:
    """The output, its log-sum-exp and, if the spec asks for them, its statistics.

    Keys and values are (*B, S, K, ...), or as `CACHED` says if `tokens` are given: the
    number of the token that each query is, (*B, T), and that each slot holds, (*B, S).
    """
    cached = tokens is not None
    *batch, num_queries, num_heads, _ = query.shape
    shape = (*batch, num_queries, num_heads)
    out_dtype = query.dtype
    query = query.astype(spec.dtype)
    algorithm = functools.partial(ALGORITHMS[spec.implementation], spec=spec)
    key_axes = ("SKH", "SKH")
    if spec.implementation == "decode":  # which casts what it reads
        algorithm = functools.partial(algorithm, cached=cached)
        key_axes = CACHED if cached else key_axes
    else:
        if cached:
            key, value = jnp.moveaxis(key, -1, -3), jnp.swapaxes(value, -2, -3)
        key, value = key.astype(spec.dtype), value.astype(spec.dtype)
    num_keys = key.shape[-len(key_axes[0]) + key_axes[0].index("S")]
    pairs = _completed(pairs, dropout_rng, query, num_keys, spec, tokens)
    if 0 in shape or num_keys == 0:
        out = jnp.zeros((*shape, value.shape[-1]), out_dtype)
        return out, *_without_pairs(shape, pairs.sink, spec)
    heads = {"K": 1, "G": 1}
    results = over_heads(
        algorithm, (query,), (key, value), pairs, spec.align, heads, key_axes
    )
    out, lse, stats = jax.tree.map(
        lambda x: x.reshape(*shape, *x.shape[len(shape) + 1 :]), results
    )
    if spec.empty_rows == "mean":
        mean = jnp.repeat(jnp.mean(value, axis=-3), num_heads // value.shape[-2], -2)
        mean = mean[..., None, :, :].astype(out.dtype)
        out = jnp.where(jnp.isneginf(lse)[..., None], mean, out)
    return out.astype(out_dtype), lse, stats


@functools.partial(jax.jit, static_argnames="spec")
def weights(
    query: jax.Array,
    key: jax.Array,
    pairs: Pairs,
    dropout_rng: jax.Array | Shared | None,
    *,
    spec: AttentionSpec,
) -> jax.Array:
    """The attention weights, (*B, N, T, S)."""
    *batch, num_queries, num_heads, _ = query.shape
    shape = (*batch, num_heads, num_queries, key.shape[-3])
    if 0 in shape:
        return jnp.zeros(shape, accumulator(spec.dtype))
    query, key = (x.astype(spec.dtype) for x in (query, key))
    pairs = _completed(pairs, dropout_rng, query, key.shape[-3], spec)
    one_head = functools.partial(reference.weights, spec=spec)
    result = over_heads(one_head, (query,), (key,), pairs, spec.align, {})
    return result.reshape(shape)


@functools.partial(jax.jit, static_argnames="spec")
def score_gradient_rows(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    out_gradient: jax.Array,
    lse_gradient: jax.Array | None,
    pairs: Pairs,
    dropout_rng: jax.Array | Shared | None,
    *,
    spec: AttentionSpec,
) -> jax.Array:
    """The norms of dL/dlogits, (*B, T, N)."""
    shape, wide = query.shape[:-1], accumulator(spec.dtype)
    if 0 in shape or key.shape[-3] == 0:
        return jnp.zeros(shape, wide)
    query, key, value = (x.astype(spec.dtype) for x in (query, key, value))
    pairs = _completed(pairs, dropout_rng, query, key.shape[-3], spec)
    if lse_gradient is None:
        lse_gradient = jnp.zeros(shape, wide)
    queries = (query, out_gradient, lse_gradient[..., None])
    one_head = functools.partial(score_gradients.score_gradient_rows, spec=spec)
    heads = {"K": 1, "G": 1}
    rows = over_heads(one_head, queries, (key, value), pairs, spec.align, heads)
    return jax.lax.stop_gradient(rows.reshape(shape))


@functools.partial(jax.jit, static_argnames="spec")
def score(
    query: jax.Array, key: jax.Array, pairs: Pairs, *, spec: AttentionSpec
) -> jax.Array:
    """The scaled dot products, (*B, N, T, S)."""

    def one_head(q: jax.Array, k: jax.Array, pairs: Pairs) -> jax.Array:
        return scores_of_head(q, k.T, pairs.scale, spec)

    *batch, num_queries, num_heads, _ = query.shape
    shape = (*batch, num_heads, num_queries, key.shape[-3])
    if 0 in shape:
        return jnp.zeros(shape, accumulator(spec.dtype))
    query, key = (x.astype(spec.dtype) for x in (query, key))
    return over_heads(one_head, (query,), (key,), pairs, "start", {}).reshape(shape)


def _completed(
    pairs: Pairs,
    dropout_rng: jax.Array | Shared | None,
    query: jax.Array,
    num_keys: int,
    spec: AttentionSpec,
    tokens: tuple[jax.Array, jax.Array] | None = None,
) -> Pairs:
    """The rules with wide arrays, whose gradients are sums over tiles, and dropout."""
    wide = accumulator(spec.dtype)
    if pairs.sink is not None:
        pairs = dataclasses.replace(pairs, sink=pairs.sink.astype(wide))
    leaves, structure = jax.tree.flatten(pairs)
    widened = [
        # That of a pair is no sum, and a copy would be as large as all pairs.
        x if _of_pairs(x, letters) or not _is_narrow(x, wide) else x.astype(wide)
        for x, letters in zip(leaves, letters_of(pairs), strict=True)
    ]
    pairs = jax.tree.unflatten(structure, widened)
    if spec.dropout_rate and dropout_rng is not None:
        *batch, num_queries, num_heads, _ = query.shape
        places = tokens or (np.arange(num_queries), np.arange(num_keys))
        heads = (*batch, num_heads)
        dropout = dropout_of(spec.dropout_rate, dropout_rng, heads, *places)
        pairs = dataclasses.replace(pairs, dropout=dropout)
    return pairs


def _is_narrow(x: Array, wide: jnp.dtype) -> bool:
    return jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize < wide.itemsize


def _of_pairs(x: Array, letters: str) -> bool:
    """Whether there is one entry for each query and each key."""
    return letters.endswith("TS") and min(x.shape[-2:]) > 1


def _without_pairs(
    shape: tuple[int, ...], sink: Array | None, spec: AttentionSpec
) -> tuple[jax.Array, Stats | None]:
    """What rows see, (*B, T, N), where there are no keys: a sink at most."""
    lse = jnp.full(shape, -jnp.inf, accumulator(spec.dtype))
    if sink is not None:
        lse = jnp.broadcast_to(sink, shape)
    on_sink = jnp.where(jnp.isneginf(lse), 0, 1).astype(lse.dtype)
    rest = (lse, jnp.zeros_like(lse), on_sink, on_sink)
    stats = Stats(lse, *map(jax.lax.stop_gradient, rest))
    return lse, stats if spec.stats else None
