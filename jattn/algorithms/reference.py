"""Attention as in the textbook, O(T S) memory: the oracle of the other algorithms.

    softmax(Q K^T / sqrt(H) + M) V

Source: Vaswani et al. 2017, arXiv:1706.03762, equation 1.
"""

import jax
import jax.numpy as jnp

from jattn.core.softmax import logsumexp, masked_softmax
from jattn.core.spec import AttentionSpec
from jattn.core.tile import Pairs, logits, poison


def attend(
    q: jax.Array, k: jax.Array, v: jax.Array, pairs: Pairs, spec: AttentionSpec
) -> tuple[jax.Array, jax.Array]:
    """Attention of one head.

    Args:
        q: queries, (T, H).
        k: keys, (S, H).
        v: values, (S, D).
        pairs: scale, score rules, mask and positions.
        spec: the static options.

    Returns:
        out: (T, D), in the dtype of the scores; 0 where a query saw no key.
        lse: (T,), the natural log of the softmax's denominator; -inf there.
    """
    q, k, v = poison(q, k, v)
    s = logits(q, k.T, pairs, spec.precision)
    out = jnp.matmul(masked_softmax(s), v.astype(s.dtype), precision=spec.precision)
    lse = logsumexp(s)
    # A row with a NaN takes it from lse, which changes nothing but where its cotangent
    # goes: times the weights of 0 of keys that it may not see, a NaN would reach them.
    return jnp.where(jnp.isnan(lse)[:, None], lse[:, None], out), lse


def weights(q: jax.Array, k: jax.Array, pairs: Pairs, spec: AttentionSpec) -> jax.Array:
    """The attention weights of one head: (T, H), (S, H) to (T, S)."""
    q, k, _ = poison(q, k, k)
    return masked_softmax(logits(q, k.T, pairs, spec.precision))
