"""Which factor an attention function puts before the dot product."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jattn.core.arguments import check_callable
from jattn.core.boundary import FLOATS, one_of
from jattn.foreign import check_returned
from jattn.reports import Finding, Report

MAGNITUDES = ((0.0, 0.0), (1.0, 0.5), (1.0, 4.0), (4.0, 1.0), (8.0, 8.0))
"""Of query and key, in units in which 1/sqrt(H) makes a logit of their product."""

FACTOR_TOLERANCE = {"float64": 1e-9, "float32": 1e-4, "float16": 2e-2, "bfloat16": 5e-2}
"""Relative, of a factor, by dtype."""

KNOWN: dict[str, Callable[[int, int], float]] = {
    "no scaling": lambda H, N: 1.0,
    "1/H, or scaled twice": lambda H, N: 1 / H,
    "1/sqrt(N H), by the width of the model": lambda H, N: (N * H) ** -0.5,
    "1/sqrt(N)": lambda H, N: N**-0.5,
    "sqrt(H), multiplied instead of divided": lambda H, N: H**0.5,
}


@dataclasses.dataclass(frozen=True)
class MeasuredScale(Report):
    """What `measured_scale` found.

    Attributes:
        scales: {(H, T): the factor of each head, (N,)}; NaN where there is none.
        ratios: the same in units of what was expected.
    """

    scales: dict[tuple[int, int], np.ndarray]
    ratios: dict[tuple[int, int], np.ndarray]


def measured_scale(
    attention_fn: Callable[..., Any],
    *,
    head_dims: Sequence[int] = (8, 32),
    lengths: Sequence[int] = (2, 9),
    num_heads: int = 4,
    num_kv_heads: int | None = None,
    expected: float | Callable[[int], float] | None = None,
    dtype: Any = jnp.float32,
) -> MeasuredScale:
    """The factor of the dot products that is in force in an attention function.

        log(out_own / out_others) = scale |q| |k| + offset

    The last query is a multiple of e1, as is the key in its own place; all other keys
    are 0, and the values are one-hot. So the output is the odds of its own key, and
    several magnitudes of query and key tell a constant factor from a soft cap or from
    normalised queries and keys. Causal masks, rotary positions and biases of distance
    change nothing of it.

    Args:
        attention_fn: `attention_fn(query, key, value)` of arrays (B, T, N, H), which
            returns (B, T, N, H). The last query must see its own key and another.
        head_dims: the values of H to try, of 2 at least.
        lengths: the values of T to try, of 2 at least.
        num_heads: N.
        num_kv_heads: K; by default N.
        expected: the right factor, or a function of H. Default 1/sqrt(H).
        dtype: of the arrays. In float16 a cap far above 16 can't be seen.

    Returns:
        Findings "H=.., T=..", with the factor and what it looks like if it is not the
        expected one, and "length" if it depends on T.

    Raises:
        ValueError: sizes do not fit, or `attention_fn` returns another shape.

    Source: Vaswani et al. 2017, arXiv:1706.03762, section 3.2.1.

    Example:
        >>> import jattn
        >>> print(measured_scale(jattn.attention, lengths=[2]))
        MeasuredScale: right
          right         H=8, T=2   0.35355 = 1 x expected
          right         H=32, T=2  0.17678 = 1 x expected
        >>> def unscaled(query, key, value):
        ...     return jattn.attention(query, key, value, scale=1.0)
        >>> measured_scale(unscaled, lengths=[2]).first.detail
        '1 = 2.8284 x expected: no scaling'
    """
    check_callable("measured_scale", "attention_fn", attention_fn)
    kv_heads = num_heads if num_kv_heads is None else num_kv_heads
    heads_fit = num_heads > 0 and kv_heads > 0 and num_heads % kv_heads == 0
    if not heads_fit or min(*head_dims, *lengths, 2) < 2 or not (head_dims and lengths):
        raise ValueError(
            "measured_scale: H and T must be 2 or more and N a multiple of K, but got "
            f"{head_dims=}, {lengths=}, N={num_heads}, K={kv_heads}. Give for "
            "example head_dims=[8], lengths=[2], num_heads=4."
        )
    rtol = FACTOR_TOLERANCE[
        one_of("measured_scale", "dtype", str(jnp.dtype(dtype)), FLOATS)
    ]
    # All H at the first T, and all T at the first H: every call compiles.
    sizes = [(H, lengths[0]) for H in head_dims]
    sizes += [(head_dims[0], T) for T in lengths[1:]]
    scales, constant = {}, {}
    for H, T in sizes:
        odds = _log_odds(attention_fn, H, T, num_heads, kv_heads, dtype)
        scales[H, T], constant[H, T] = _factor(odds, H, rtol)
    wanted = {H: _expected(expected, H) for H in head_dims}
    ratios = {(H, T): scale / wanted[H] for (H, T), scale in scales.items()}
    look = _looks_like(scales, num_heads, rtol)
    findings = [
        _finding(
            f"H={H}, T={T}", scales[H, T], ratios[H, T], constant[H, T], look, rtol
        )
        for H, T in sizes
    ]
    by_length = {T: scales[head_dims[0], T] for T in lengths}
    first = by_length[lengths[0]]
    apart = [T for T, x in by_length.items() if not np.allclose(x, first, rtol)]
    if apart and all(constant.values()):
        detail = f"the factor at T={apart[0]} is not that at T={lengths[0]}"
        findings.append(Finding("length", "wrong", detail))
    return MeasuredScale(tuple(findings), scales, ratios)


def _log_odds(
    fn: Callable[..., Any], H: int, T: int, N: int, K: int, dtype: Any
) -> np.ndarray:
    """The logit of a key against the rest, (magnitude, N)."""
    unit = H**0.25  # both factors of it give sqrt(H)
    query = np.zeros((len(MAGNITUDES), T, N, H))
    key, value = (np.zeros((len(MAGNITUDES), T, K, H)) for _ in range(2))
    for i, (of_query, of_key) in enumerate(MAGNITUDES):
        query[i, -1, :, 0], key[i, -1, :, 0] = of_query * unit, of_key * unit
    value[:, -1, :, 0] = value[:, :-1, :, 1] = 1
    with jax.default_matmul_precision("highest"):
        out = fn(*(jnp.asarray(x, dtype) for x in (query, key, value)))
    check_returned("measured_scale", out, query.shape)
    own, others = np.moveaxis(np.asarray(out, np.float64)[:, -1, :, :2], -1, 0)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.log(own) - np.log(others)


def _factor(odds: np.ndarray, H: int, rtol: float) -> tuple[np.ndarray, bool]:
    """The factor of each head, (N,), and whether it is the same at all magnitudes."""
    with np.errstate(invalid="ignore"):
        logits = odds[1:] - odds[0]
    products = np.array([q * k for q, k in MAGNITUDES[1:]])[:, None] * H**0.5
    factors = logits / products
    factors = np.where(np.isfinite(factors), factors, factors[:1])  # beyond the dtype
    # Of logits near 0, rounding is not small beside the factor.
    atol = rtol / H**0.5
    constant = bool(np.allclose(factors, factors[:1], rtol, atol))
    return factors[0], constant


def _expected(expected: Any, H: int) -> float:
    if expected is None:
        return H**-0.5
    return float(expected(H) if callable(expected) else expected)


def _looks_like(scales: dict, num_heads: int, rtol: float) -> str:
    for name, formula in KNOWN.items():
        fits = (
            np.allclose(x, formula(H, num_heads), rtol) for (H, _), x in scales.items()
        )
        if all(fits):
            return f": {name}"
    return ""


def _finding(
    check: str,
    scale: np.ndarray,
    ratio: np.ndarray,
    constant: bool,
    look: str,
    rtol: float,
) -> Finding:
    shown, times = _short(scale), _short(ratio)
    if not np.all(np.isfinite(scale)):
        why = "no weight is between 0 and 1: NaN, overflow, or a key that is not seen"
        return Finding(check, "inconclusive", why)
    if not constant:
        why = f"{shown} near 0, but no constant factor: a cap, or vectors normalised"
        return Finding(check, "wrong", why)
    wrong = np.abs(ratio - 1) > rtol
    detail = f"{shown} = {times} x expected"
    if not wrong.any():
        return Finding(check, "right", detail)
    head = int(np.argmax(wrong))
    return Finding(check, "wrong", detail + look, (head,), None, float(ratio[head]))


def _short(values: np.ndarray) -> str:
    """One number if all heads agree to five digits."""
    shown = [f"{x:.5g}" for x in values]
    return shown[0] if len(set(shown)) == 1 else f"[{', '.join(shown)}] by head"
