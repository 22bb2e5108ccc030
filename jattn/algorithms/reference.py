"""Attention as in the textbook, O(T S) memory: the oracle of the other algorithms.

    softmax(Q K^T / sqrt(H) + M) V

Source: Vaswani et al. 2017, arXiv:1706.03762, equation 1.
"""

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jattn.core.softmax import logsumexp, masked_softmax
from jattn.core.spec import AttentionSpec
from jattn.core.stats import Stats, stats_of_rows
from jattn.core.tile import Pairs, logits, poison, with_sink


def attend(
    q: jax.Array, k: jax.Array, v: jax.Array, pairs: Pairs, spec: AttentionSpec
) -> tuple[jax.Array, jax.Array, Stats | None]:
    """Attention of one head.

    Args:
        q: queries, (T, H).
        k: keys, (S, H).
        v: values, (S, D).
        pairs: scale, score rules, mask, positions, sink and dropout.
        spec: the static options.

    Returns:
        out: (T, D), in the dtype of the scores; 0 where a query saw no key.
        lse: (T,), the natural log of the softmax's denominator; -inf there.
        stats: each (T,), if the spec asks for them.
    """
    q, k, v = poison(q, k, v)
    s = with_sink(logits(q, k.T, pairs, spec), pairs.sink)
    p = masked_softmax(s)
    lse = checkpoint_name(logsumexp(s), "attention_lse")
    stats = stats_of_rows(s, p) if spec.stats else None
    p = _of_keys(p, pairs)
    out = jnp.matmul(p, v.astype(s.dtype), precision=spec.precision)
    # A row with a NaN takes it from lse, which changes nothing but where its cotangent
    # goes: times the weights of 0 of keys that it may not see, a NaN would reach them.
    out = jnp.where(jnp.isnan(lse)[:, None], lse[:, None], out)
    return checkpoint_name(out, "attention_out"), lse, stats


def weights(q: jax.Array, k: jax.Array, pairs: Pairs, spec: AttentionSpec) -> jax.Array:
    """The weights of the values of one head: (T, H), (S, H) to (T, S)."""
    q, k, _ = poison(q, k, k)
    s = with_sink(logits(q, k.T, pairs, spec), pairs.sink)
    p = masked_softmax(s)
    kept = _of_keys(p, pairs)
    if spec.empty_rows == "mean":
        kept = jnp.where(p.any(axis=1, keepdims=True), kept, 1 / kept.shape[1])
    return kept


def _of_keys(p: jax.Array, pairs: Pairs) -> jax.Array:
    """The weights without that of a sink, and after dropout."""
    return pairs.kept(p if pairs.sink is None else p[:, :-1])
