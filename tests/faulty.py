"""Attention with one mistake in it, for audits to find.

All take and return (B, T, N, H). Masks are (B, T, S); where nothing else is said, the
mask is causal.
"""

import jax
import jax.numpy as jnp
import numpy as np

B, T, N, H = 2, 7, 2, 7
CAUSAL = np.tri(T, dtype=bool)[None]
IDS = np.array([[1, 1, 1, 2, 2, 2, 2], [3, 3, 3, 3, 4, 4, 4]])
VALID = np.array([[0, 0, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 1]], bool)
DOCUMENTS = CAUSAL & (IDS[:, :, None] == IDS[:, None, :])
PADDED = CAUSAL & VALID[:, None, :]


def distance(T):
    """How far back a key is, (T, S)."""
    return np.arange(T)[:, None] - np.arange(T)[None, :]


def logits(q, k, scale=None):
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    return jnp.einsum("btnh,bsnh->bnts", q, k) * scale


def average(weights, v):
    return jnp.einsum("bnts,bsnh->btnh", weights, v)


def softmax(s, axis=-1):
    """0 where all is -inf, and no NaN in its gradient."""
    dead = jnp.isneginf(s).all(axis, keepdims=True)
    return jnp.where(dead, 0, jax.nn.softmax(jnp.where(dead, 0, s), axis))


def right(q, k, v, allowed=CAUSAL, scale=None):
    """No mistake in this one."""
    if allowed is not True:
        allowed = jnp.asarray(allowed)[:, None]
    s = jnp.where(allowed, logits(q, k, scale), -jnp.inf)
    return average(softmax(s), v)


def causal(T):
    return distance(T)[None] >= 0


def keys_not_transposed(q, k, v):
    s = jnp.einsum("btnh,bhns->bnts", q, k) * H**-0.5
    return average(jax.nn.softmax(s, -1), v)


def softmax_over_queries(q, k, v):
    return average(jax.nn.softmax(logits(q, k), -2), v)


def softmax_over_heads(q, k, v):
    return average(jax.nn.softmax(logits(q, k), -3), v)


def mask_after_softmax(q, k, v):
    return average(jax.nn.softmax(logits(q, k), -1) * CAUSAL[:, None], v)


def one_key_further(q, k, v):
    return right(q, k, v, distance(T)[None] >= -1)


def own_key_hidden(q, k, v):
    return right(q, k, v, distance(T)[None] > 0)


def mask_transposed(q, k, v):
    return right(q, k, v, distance(T)[None] <= 0)


def mask_by_heads(q, k, v):
    s = jnp.where(jnp.asarray(DOCUMENTS)[None], logits(q, k), -jnp.inf)
    return average(softmax(s), v)


def heads_mixed(q, k, v):
    s = jnp.where(CAUSAL[:, None], logits(q, k), -jnp.inf)
    out = jnp.einsum("bnts,bsnh->bnth", softmax(s), v)
    return out.reshape(q.shape)  # instead of swapping axes


def batch_mixed(q, k, v):
    return right(q, k, v[::-1])


def future_by_a_millionth(q, k, v):
    return right(q, k, v) + 1e-6 * jnp.roll(v, -1, 1)


def sentinel(number):
    def attend(q, k, v):
        s = jnp.where(CAUSAL[:, None], logits(q, k), number)
        return average(jax.nn.softmax(s, -1), v)

    return attend


def values_pooled(q, k, v):
    return jnp.broadcast_to(v.mean(1, keepdims=True), q.shape)


def positions_from_the_end(q, k, v):
    angle = (np.arange(q.shape[1]) - q.shape[1])[None, :, None, None] / 5
    return right(q + np.sin(angle).astype("f4"), k, v, causal(q.shape[1]))


class Dropout:
    """Left on: every call has its own pattern."""

    def __init__(self):
        self.calls = np.random.default_rng(0)

    def __call__(self, q, k, v):
        return right(q, k, v * self.calls.integers(0, 2, v.shape))


def scaled_twice(q, k, v):
    return right(q * q.shape[-1] ** -0.5, k, v, causal(q.shape[1]))


def unscaled(q, k, v):
    return right(q, k, v, causal(q.shape[1]), 1.0)


def scaled_by_width(q, k, v):
    width = q.shape[-1] * q.shape[-2]
    return right(q, k, v, causal(q.shape[1]), width**-0.5)


def scaled_by_length(q, k, v):
    return right(q, k, v, causal(q.shape[1]), np.log(q.shape[1]))


def capped(q, k, v):
    s = 50 * jnp.tanh(logits(q, k) / 50)
    return average(softmax(jnp.where(causal(q.shape[1])[:, None], s, -jnp.inf)), v)


def queries_normalised(q, k, v):
    norm = jnp.linalg.norm(q, axis=-1, keepdims=True)
    return right(q / (norm + 1e-6), k, v, causal(q.shape[1]))


def nan_in_the_backward_pass(q, k, v, *, mask):
    """The output is cleaned, its gradient is not: 0 x NaN in the products."""
    s = jnp.where(mask, logits(q, k), -jnp.inf)
    seen = mask.any((1, 2))[..., None, None]
    return average(softmax(s), jnp.where(seen, v, 0))


def minus_billion(q, k, v, *, mask):
    s = logits(q, k) + jnp.where(mask, 0, -1e9).astype(q.dtype)
    return average(jax.nn.softmax(s, -1), v)


def mean_on_empty_rows(q, k, v, *, mask):
    s = jnp.where(mask, logits(q, k), jnp.finfo(q.dtype).min)
    return average(jax.nn.softmax(s, -1), v)


def everything_kept(q, k, v):
    """All scores at once."""
    return right(q, k, v, causal(q.shape[1]))
