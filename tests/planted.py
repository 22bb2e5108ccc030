"""Attention in numpy that is right, and for each claim a function that is wrong."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

import jattn


def textbook(
    query,
    key,
    value,
    *,
    mask=None,
    bias=None,
    scale=None,
    is_causal=False,
    query_seq_lengths=None,
    key_value_seq_lengths=None,
    local_window_size=None,
    query_positions=None,
    key_positions=None,
    sinks=None,
    logits_soft_cap=None,
    return_lse=False,
    dropout_rate=0.0,
    dropout_rng=None,
):
    """Whole rows in float64; refuses what makes no sense."""
    if query.ndim == 3:
        return textbook(*(x[None] for x in (query, key, value)))[0]
    (_, T, N, H), (_, S, K, _) = query.shape, key.shape
    refuse(N % K, "heads")
    refuse(not jnp.issubdtype(query.dtype, jnp.floating), "dtype")
    refuse(mask is not None and (mask.ndim, mask.dtype) != (4, bool), "mask")
    refuse(bias is not None and bias.dtype == bool, "bias")
    refuse(min(local_window_size or (0,)) < 0, "window")
    refuse(not 0 <= dropout_rate < 1, "dropout_rate")
    refuse(dropout_rate > 0 and dropout_rng is None, "dropout_rng")
    q, k, v = (np.asarray(x, np.float64) for x in (query, key, value))
    k, v = np.repeat(k, N // K, 2), np.repeat(v, N // K, 2)
    s = np.einsum("btnh,bsnh->bnts", q, k) * (H**-0.5 if scale is None else scale)
    if logits_soft_cap is not None:
        s = logits_soft_cap * np.tanh(s / logits_soft_cap)
    s = s if bias is None else s + np.asarray(bias, np.float64)
    allowed = np.ones(s.shape, bool) if mask is None else np.broadcast_to(mask, s.shape)
    q_pos = np.arange(T)[None] if query_positions is None else query_positions
    k_pos = np.arange(S)[None] if key_positions is None else key_positions
    distance = (q_pos[:, :, None] - k_pos[:, None, :])[:, None]
    if is_causal:
        allowed = allowed & (distance >= 0)
    if local_window_size is not None:
        left, right = local_window_size
        allowed = allowed & (distance <= left) & (distance >= -right)
    if key_value_seq_lengths is not None:
        inside = np.arange(S) < key_value_seq_lengths[:, None]
        allowed = allowed & inside[:, None, None, :]
    if query_seq_lengths is not None:
        inside = np.arange(T) < query_seq_lengths[:, None]
        allowed = allowed & inside[:, None, :, None]
    s = np.where(allowed, s, -np.inf)
    weights, lse = softmax(s, -np.inf if sinks is None else sinks[:, None, None])
    if dropout_rate:
        seed = int(jax.random.key_data(dropout_rng).sum())
        kept = np.random.default_rng(seed).random(weights.shape) >= dropout_rate
        weights = weights * kept / (1 - dropout_rate)
    out = average(weights, v, allowed).astype(query.dtype)
    return (out, lse.astype(np.float32)) if return_lse else out


def refuse(wrong, what):
    if wrong:
        raise ValueError(what)


def softmax(s, sink=-np.inf):
    """The weights, and the lse as (B, T, N)."""
    top = np.maximum(s.max(-1, keepdims=True, initial=-np.inf), sink)
    top = np.where(np.isneginf(top), 0, top)
    e = np.exp(s - top)
    total = e.sum(-1, keepdims=True) + np.exp(sink - top)
    with np.errstate(divide="ignore"):
        lse = (top + np.log(total))[..., 0]
    return e / np.where(total == 0, 1, total), np.swapaxes(lse, 1, 2)


def average(weights, v, allowed=True):
    seen = np.where(allowed, weights, 0)[..., None]
    terms = np.where(seen == 0, 0, seen * np.swapaxes(v, 1, 2)[:, :, None])
    return np.swapaxes(terms.sum(3), 1, 2)


def naive(q, k, v, *, mask=True, bias=0.0, is_causal=False, key_value_seq_lengths=None):
    """What everybody writes, in JAX: a finite sentinel, added to the scores."""
    if key_value_seq_lengths is not None:
        mask = (jnp.arange(k.shape[1]) < key_value_seq_lengths[:, None])[:, None, None]
    if is_causal:
        mask = mask & np.tri(q.shape[1], k.shape[1], dtype=bool)
    s = jnp.einsum("btnh,bsnh->bnts", q, k) * q.shape[-1] ** -0.5 + bias
    s = s + jnp.where(mask, 0, -1e30)
    e = jnp.exp(s - s.max(-1, keepdims=True))
    return jnp.einsum("bnts,bsnh->btnh", e / e.sum(-1, keepdims=True), v)


def half(q, k, v, *, mask=True):
    """Everything in float16, sentinel included."""
    s = np.einsum("btnh,bsnh->bnts", q, k) * np.float16(q.shape[-1] ** -0.5)
    e = np.exp(s - s.max(-1, keepdims=True))
    s = np.where(mask, s, np.float16(-np.inf))
    e = np.exp(s - s.max(-1, keepdims=True))
    return average(e / e.sum(-1, keepdims=True), v).astype(np.float16)


def by_remainder(q, k, v):
    """Query head n reads key head n % K, whatever N and K."""
    heads = np.arange(q.shape[2]) % k.shape[2]
    return textbook(q, k[:, :, heads], v[:, :, heads])


def without_maximum(q, k, v):
    s = np.einsum("btnh,bsnh->bnts", q, k) * q.shape[-1] ** -0.5
    e = np.exp(s.astype(np.float32))
    return average(e / e.sum(-1, keepdims=True), v)


def capped_last(q, k, v, *, mask, logits_soft_cap):
    s = np.einsum("btnh,bsnh->bnts", q, k) * q.shape[-1] ** -0.5
    s = np.tanh(np.where(mask, s, -np.inf) / logits_soft_cap) * logits_soft_cap
    return average(softmax(s)[0], v)


def mean_instead(q, k, v, **options):
    """The mean of all values for rows without keys."""
    out, lse = textbook(q, k, v, return_lse=True, **options)
    mean = np.broadcast_to(v.mean(1, keepdims=True), out.shape)
    return np.where(np.isneginf(lse)[..., None], mean, out)


def leaking(q, k, v, **options):
    """A little of every value reaches every row."""
    out = jattn.attention(q, k, v, mask=options.get("mask"))
    return out + 1e-3 * v.mean(1, keepdims=True)


@functools.partial(jax.custom_batching.custom_vmap)
def first_mask(q, k, v, mask):
    return jattn.attention(q, k, v, mask=mask)


@first_mask.def_vmap
def _(size, batched, q, k, v, mask):
    call = functools.partial(first_mask, mask=mask[0])
    return jax.vmap(call, in_axes=(0, None, None))(q, k, v), True


@jax.custom_jvp
def first_order(q, k, v):
    return jattn.attention(q, k, v)


@first_order.defjvp
def _(primals, tangents):
    primals = jax.lax.stop_gradient(primals)
    return jax.jvp(jattn.attention, primals, tangents)


def with_lse(change, attend=textbook):
    """The same function with another lse."""

    def changed(q, k, v, **options):
        out, lse = attend(q, k, v, **options)
        return out, change(lse)

    return changed


def row_by_row(q, k, v):
    return np.stack([textbook(*x) for x in zip(q, k, v, strict=True)])


def query_by_query(q, k, v):
    rows = [textbook(q[:, i : i + 1], k, v) for i in range(q.shape[1])]
    return np.concatenate(rows, 1)


def whole_blocks(q, k, v):
    whole = k.shape[1] // 8 * 8
    return textbook(q, k[:, :whole], v[:, :whole])


def other_in_jit(q, k, v):
    return jattn.attention(q, k, v) + 0.1 * isinstance(q, jax.core.Tracer)


def negative_window(q, k, v, *, local_window_size):
    nothing = np.zeros((1, 1, q.shape[1], k.shape[1]), bool)
    return mean_instead(q, k, v, mask=nothing)


def any_rate(q, k, v, *, dropout_rate, dropout_rng):
    return textbook(
        q, k, v, dropout_rate=np.clip(dropout_rate, 0, 0.9), dropout_rng=dropout_rng
    )


t, a, stop, key = textbook, jattn.attention, jax.lax.stop_gradient, jax.random.key

FAULTS = {
    "weights are a softmax of scores over root H": lambda q, k, v: t(
        q, k, v, scale=1.0
    ),
    "a scale replaces the default": lambda q, k, v, scale: t(
        q, k, v, scale=scale / 8**0.5
    ),
    "a scale of zero is a scale": lambda q, k, v, scale: t(
        q, k, v, scale=scale or None
    ),
    "large scores do not overflow": without_maximum,
    "the order of keys does not matter": lambda q, k, v: t(
        q, k, v, bias=np.arange(k.shape[1]) / 10
    ),
    "batch rows do not touch each other": lambda q, k, v: (
        t(q, k, v) + q.sum(0, keepdims=True) / 1000
    ),
    "query head n reads key head n over G": by_remainder,
    "heads that do not divide are refused": by_remainder,
    "arrays with heads first are refused": by_remainder,
    "a soft cap comes before the mask": capped_last,
    "the slopes of a score rule are learned": lambda q, k, v, score: a(
        q, k, v, score=stop(score)
    ),
    "a sink takes weight and has no value": lambda q, k, v, sinks: t(q, k, v),
    "True means may look": lambda q, k, v, mask: t(q, k, v, mask=~mask),
    "axes of one are broadcast": lambda q, k, v, mask: t(q, k, v, mask=mask[:, :1]),
    "no score is low enough for a masked key to win": lambda q, k, v, mask: t(
        q, k, v, bias=np.where(mask, 0, -1e4)
    ),
    "a bias cannot revive a masked key": lambda q, k, v, mask, bias: t(
        q, k, v, bias=bias + np.where(mask, 0, -1e4)
    ),
    "padding of keys is not padding of queries": lambda q, k, v, mask: t(
        q, k, v, mask=np.swapaxes(mask, 2, 3)
    ),
    "a query without keys gets zero": mean_instead,
    "a bias of minus infinity is a mask": naive,
    "a mask of two axes is not guessed": lambda q, k, v, mask: t(
        q, k, v, mask=mask[None, None]
    ),
    "a mask of three axes is not guessed": lambda q, k, v, mask: t(
        q, k, v, mask=mask[None]
    ),
    "a mask of zeros and ones is read as one": lambda q, k, v, mask: t(
        q, k, v, bias=mask
    ),
    "a Boolean bias is not added": lambda q, k, v, bias: t(q, k, v, bias=1 * bias),
    "packed documents do not see each other": lambda q, k, v, mask, is_causal: t(
        q, k, v, is_causal=is_causal
    ),
    "causal is the lower triangle": lambda q, k, v, is_causal: t(
        q, k, v, local_window_size=(99, 1)
    ),
    "causal and padding hold together": lambda q, k, v, mask, is_causal: t(
        q, k, v, mask=mask
    ),
    "causal with fewer queries than keys is aligned": lambda q, k, v, is_causal: t(
        q, k, v, is_causal=True, query_positions=np.arange(3, 8)[None]
    ),
    "the past does not depend on the future": leaking,
    "lengths hide the keys after them": lambda q, k, v, key_value_seq_lengths: t(
        q, k, v, key_value_seq_lengths=key_value_seq_lengths + 1
    ),
    "a sequence of length zero gives zero": mean_instead,
    "queries after their length get zero": lambda q, k, v, query_seq_lengths: t(
        q, k, v
    ),
    "a window counts the keys beside the query": lambda q, k, v, local_window_size: t(
        q, k, v, local_window_size=(local_window_size[0] - 1, local_window_size[1])
    ),
    "a negative window is refused": negative_window,
    "the last queries of a sequence see its past": (
        lambda q, k, v, is_causal, query_positions, local_window_size=None: t(
            q, k, v, is_causal=is_causal, local_window_size=local_window_size
        )
    ),
    "positions decide and not the order of slots": (
        lambda q, k, v, is_causal, query_positions, key_positions: t(
            q, k, v, is_causal=is_causal, query_positions=query_positions
        )
    ),
    "gradients are those of the formula": lambda q, k, v: a(q, stop(k), v),
    "gradients stop at masked keys": leaking,
    "a query without keys has no gradient": functools.partial(a, empty_rows="mean"),
    "no gradient reaches the future": leaking,
    "a bias of minus infinity leaves gradients finite": naive,
    "a broadcast bias collects its gradient": lambda q, k, v, bias: a(
        q, k, v, bias=stop(bias)
    ),
    "a scale that is an array is learned": lambda q, k, v, scale: a(
        q, k, v, scale=stop(scale)
    ),
    "NaN in a masked key stays there": naive,
    "NaN in a masked value stays there": naive,
    "NaN in a masked key reaches no gradient": naive,
    "NaN in a masked value reaches no gradient": naive,
    "NaN in a padding query reaches no gradient": naive,
    "NaN in the future stays there": naive,
    "NaN in a padding document stays there": naive,
    "NaN in slots not yet written stays there": naive,
    "NaN that may be seen is shown": lambda q, k, v, mask: t(
        q, np.nan_to_num(k), v, mask=mask
    ),
    "lse is the log of the denominator": with_lse(lambda lse: lse / np.log(2)),
    "lse of a query without keys is minus infinity": with_lse(np.nan_to_num),
    "lse has a gradient": with_lse(stop, a),
    "parts merge by their lse": with_lse(np.abs),
    "lse is not rounded to bfloat16": with_lse(lambda lse: lse.astype(jnp.bfloat16)),
    "float64 is computed in float64": lambda q, k, v: t(
        *(x.astype(np.float32) for x in (q, k, v))
    ).astype(np.float64),
    "bfloat16 comes out as bfloat16": lambda q, k, v: t(q, k, v).astype(np.float32),
    "float16 comes out as float16": lambda q, k, v: t(q, k, v).astype(np.float32),
    "float16 has room for a mask": half,
    "float16 scores do not overflow": half,
    "a float32 bias does not widen bfloat16": lambda q, k, v, bias: a(
        q, k, v, bias=bias
    ).astype(np.float32),
    "integer vectors are refused": lambda q, k, v: t(
        *(x.astype(np.float32) for x in (q, k, v))
    ).astype(np.int32),
    "without batch rows there is no output": row_by_row,
    "without queries there is no output": query_by_query,
    "without keys the output is zero": naive,
    "one key gives its value": lambda q, k, v: t(q, k, v, sinks=np.zeros(q.shape[2])),
    "one query sees every key": lambda q, k, v: (
        a(q, k, v) if q.shape[1] > 1 else a(q, k[:, :1], v[:, :1])
    ),
    "odd lengths fit any block": whole_blocks,
    "a value has a width of its own": lambda q, k, v: t(
        q, k, v, scale=v.shape[-1] ** -0.5
    ),
    "the batch axis may be absent": lambda q, k, v: t(q[None], k[None], v[None]),
    "jit changes nothing": other_in_jit,
    "vmap maps vectors and mask": lambda q, k, v, mask: first_mask(q, k, v, mask),
    "vmap of grad is the gradient of each": lambda q, k, v: a(q, stop(k), v),
    "forward mode is the covariance": lambda q, k, v: a(stop(q), k, v),
    "second derivatives are right": first_order,
    "a rate outside zero to one is refused": any_rate,
    "a rate needs a key": lambda q, k, v, dropout_rate: t(q, k, v),
    "without dropout nothing is dropped": lambda q, k, v, dropout_rate: t(
        q, k, v, dropout_rate=0.5, dropout_rng=key(0)
    ),
    "the key decides what is dropped": lambda q, k, v, dropout_rate, dropout_rng: t(
        q, k, v, dropout_rate=dropout_rate, dropout_rng=key(0)
    ),
    "dropout keeps the mean": lambda q, k, v, dropout_rate, dropout_rng: (
        t(q, k, v, dropout_rate=dropout_rate, dropout_rng=dropout_rng)
        * (1 - dropout_rate)
    ),
    "dropout leaves masked keys masked": (
        lambda q, k, v, mask, is_causal, dropout_rate, dropout_rng: t(
            q, k, v, dropout_rate=dropout_rate, dropout_rng=dropout_rng
        )
    ),
}
"""For each claim a function about which it is wrong."""
