"""Attention and its gradients in float64 numpy: what every function is held against.

Whole rows, heads repeated, every gradient by its closed formula. Vectors are finite; a
query without keys has out 0 and lse -inf.
"""

from typing import Any, NamedTuple

import numpy as np


class Dense(NamedTuple):
    """The results of one call."""

    out: np.ndarray  # (B, T, N, D)
    lse: np.ndarray  # (B, T, N)
    weights: np.ndarray  # (B, N, T, S)


def attend(
    query: Any,
    key: Any,
    value: Any,
    *,
    mask: Any = True,
    bias: Any = 0.0,
    scale: float | None = None,
    sinks: Any = None,
    cap: float | None = None,
) -> Dense:
    """Scale, cap, bias, mask, softmax; mask and bias broadcast to (B, N, T, S)."""
    q, k, v = _repeated(query, key, value)
    scores = np.einsum("btnh,bsnh->bnts", q, k) * _scale(q, scale)
    if cap is not None:
        scores = cap * np.tanh(scores / cap)
    scores = np.where(mask, scores + np.asarray(bias, np.float64), -np.inf)
    sink = np.float64(-np.inf) if sinks is None else _per_head(sinks)
    top = np.maximum(scores.max(-1, keepdims=True, initial=-np.inf), sink)
    top = np.where(np.isfinite(top), top, 0.0)
    e = np.exp(scores - top)
    total = e.sum(-1, keepdims=True) + np.exp(sink - top)
    weights = e / np.where(total > 0, total, 1.0)
    with np.errstate(divide="ignore"):
        lse = (top + np.log(total))[..., 0]
    out = np.einsum("bnts,bsnd->btnd", weights, v)
    return Dense(out, np.swapaxes(lse, 1, 2), weights)


def gradients(
    query: Any,
    key: Any,
    value: Any,
    d_out: Any,
    d_lse: Any = 0.0,
    *,
    mask: Any = True,
    bias: Any = 0.0,
    scale: float | None = None,
    sinks: Any = None,
) -> dict[str, np.ndarray]:
    """Of sum(d_out * out) + sum(d_lse * lse), by argument; and the output, as "out".

    That of bias is (B, N, T, S), before it is summed over axes of one.
    """
    result = attend(query, key, value, mask=mask, bias=bias, scale=scale, sinks=sinks)
    weights, lse = result.weights, np.swapaxes(result.lse, 1, 2)[..., None]
    q, k, v = _repeated(query, key, value)
    d_out = np.asarray(d_out, np.float64)
    d_lse = np.asarray(d_lse, np.float64)
    d_lse = np.swapaxes(d_lse, 1, 2)[..., None] if d_lse.ndim else d_lse
    rows = np.einsum("btnd,btnd->bnt", result.out, d_out)[..., None]
    d_weights = np.einsum("btnd,bsnd->bnts", d_out, v)
    d_scores = weights * (d_weights - rows + d_lse)
    factor = _scale(q, scale)
    products = np.einsum("btnh,bsnh->bnts", q, k)
    d_query = factor * np.einsum("bnts,bsnh->btnh", d_scores, k)
    d_key = factor * np.einsum("bnts,btnh->bsnh", d_scores, q)
    d_value = np.einsum("bnts,btnd->bsnd", weights, d_out)
    d_sinks = np.zeros(q.shape[2])
    if sinks is not None:
        of_sink = np.exp(_per_head(sinks) - lse)
        d_sinks = (of_sink * (d_lse - rows)).sum((0, 2, 3))
    K = np.shape(key)[2]
    return {
        "out": result.out,
        "query": d_query,
        "key": _over_groups(d_key, K),
        "value": _over_groups(d_value, K),
        "bias": d_scores,
        "scale": (d_scores * products).sum(),
        "sinks": d_sinks,
    }


def _repeated(query: Any, key: Any, value: Any) -> tuple[np.ndarray, ...]:
    q, k, v = (np.asarray(x, np.float64) for x in (query, key, value))
    groups = q.shape[2] // k.shape[2]
    return q, np.repeat(k, groups, 2), np.repeat(v, groups, 2)


def _over_groups(x: np.ndarray, K: int) -> np.ndarray:
    B, S, N, D = x.shape
    return x.reshape(B, S, K, N // K, D).sum(3)


def _scale(q: np.ndarray, scale: float | None) -> float:
    return q.shape[-1] ** -0.5 if scale is None else scale


def _per_head(sinks: Any) -> np.ndarray:
    return np.asarray(sinks, np.float64)[:, None, None]
