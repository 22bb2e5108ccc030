"""Whether the weights of an attention function are what they should be."""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np

from jattn.core.boundary import check_vectors, one_of
from jattn.core.rules import Array, Mask, Score
from jattn.diagnostics.allowed_pairs import allowed_pairs
from jattn.diagnostics.places import differences, first_index
from jattn.diagnostics.recovered import WEIGHT_TOLERANCE, given, recovered
from jattn.diagnostics.suspects import Recipe, suspect
from jattn.prepare import Call, per_head
from jattn.reports import Finding, Report
from jattn.testing.compare import normal

USUAL = (2, 7, 2, 7)
"""Of query and key: where sizes are equal, axes are confused in silence."""


@dataclasses.dataclass(frozen=True)
class Rows(Report):
    """What `rows` found.

    Attributes:
        weights: as recovered or given, (*B, N, T, S), float64.
        expected: as computed in float64; None where nothing is known of the logits.
    """

    weights: np.ndarray
    expected: np.ndarray | None


def rows(
    attention_fn: Callable[..., Any] | Array,
    *,
    query: Array | None = None,
    key: Array | None = None,
    mask: Mask | Array | None = None,
    query_positions: Any = None,
    scale: float | Array | None = None,
    score: Callable[[np.ndarray], np.ndarray] | None = None,
    empty_rows: Literal["zero", "mean"] = "zero",
    dtype: Any = jnp.float32,
    tolerance: float | None = None,
) -> Rows:
    """Whether attention's weights are a softmax over the keys a query may see.

    The weights of a function are its output for values that are one-hot, in units that
    differ between any eleven neighbours in batch row and head. They must be finite,
    positive where the mask allows and exactly 0 elsewhere, sum to one in every row that
    sees something, and agree with softmax(score(query key^T scale)) in float64 numpy.
    If they do not, they are compared with what common mistakes give.

    Args:
        attention_fn: `attention_fn(query, key, value)`, of (*B, T, N, H), (*B, S, K, H)
            and (*B, S, K, H), which returns (*B, T, N, H); or an array of weights (*B,
            N, T, S).
        query: (*B, T, N, H). For a function, by default (2, 7, 2, 7) of normal
            numbers: where sizes are equal, axes are confused in silence. For an array,
            what it was made of; without it, logits are not compared, and a weight of
            0 that is allowed is no fault: it may have been rounded.
        key: (*B, S, K, H), likewise.
        mask: what the function, or the array, should have applied: a rule or a Boolean
            array as in `jattn.attention`. None allows all.
        query_positions: where T queries stand beside S keys, as in `attention`.
        scale: what it should have: a number or (N,). Default 1/sqrt(H).
        score: what it should do to scaled scores (*B, N, T, S): a function in numpy, as
            a second opinion on a soft cap or a bias.
        empty_rows: what a query without keys should get: "zero", or "mean".
        dtype: of the vectors that are made here.
        tolerance: the largest error of a weight; by default by the dtype of the
            vectors, with products at the highest precision.

    Returns:
        Findings "finite", "sign", "forbidden", "allowed", "sum" and "softmax", each
        with the index (*B, N, T, S) of the first place that is wrong.

    Raises:
        ValueError: shapes do not fit.
        TypeError: `attention_fn` is neither a function nor an array of floats, or
            `score` is a rule.

    Example:
        >>> import jax, jattn
        >>> def own(query, key, value):
        ...     return jattn.attention(query, key, value, mask=jattn.masks.causal())
        >>> rows(own, mask=jattn.masks.causal()).ok
        True
        >>> rows(own).first.detail
        'weight (0, 0, 0, 1) is 0, but the mask allows it'
    """
    one_of("rows", "empty_rows", empty_rows, ("zero", "mean"))
    _check_score(score)
    if callable(attention_fn):
        query = jnp.asarray(normal(0, *USUAL, dtype=dtype) if query is None else query)
        key = jnp.asarray(normal(1, *USUAL, dtype=dtype) if key is None else key)
        weights = recovered(attention_fn, query, key)
        used = str(jnp.result_type(query, key))
    else:
        weights, used = given(attention_fn, query, key)
    *batch, N, T, S = weights.shape
    atol = WEIGHT_TOLERANCE[used] if tolerance is None else tolerance
    allowed = allowed_pairs("rows", mask, tuple(batch), T, S, N, query_positions)
    recipe, expected = None, None
    if query is not None and key is not None:
        call = Call("rows", check_vectors("rows", query, key))
        q, k = (np.asarray(x, np.float64) for x in (query, key))
        recipe = Recipe(q, k, per_head(call, "scale", scale), score)
        expected = recipe.weights(allowed)
        if empty_rows == "mean":
            expected = np.where(allowed.any(-1, keepdims=True), expected, 1 / S)
    elif scale is not None or score is not None:
        raise ValueError(
            "rows: scale and score are of the logits of query and key, but got neither "
            "of these. Give both, or leave scale and score out."
        )
    findings = _entries(weights, expected, allowed, empty_rows, atol)
    findings.append(_sums(weights, allowed, empty_rows, atol))
    if recipe is not None and expected is not None:
        findings.append(_agreement(weights, expected, recipe, allowed, atol))
    return Rows(tuple(findings), weights, expected)


def _entries(
    weights: np.ndarray,
    expected: np.ndarray | None,
    allowed: np.ndarray,
    empty_rows: str,
    atol: float,
) -> list[Finding]:
    """Which weights are there that must not be, and the other way round."""
    forbidden = ~allowed
    if empty_rows == "mean":
        forbidden = forbidden & allowed.any(-1, keepdims=True)
    hidden = allowed & (weights == 0)
    if expected is not None:
        hidden = hidden & (expected > atol)  # the others may have been rounded to 0

    def finding(check: str, wrong: np.ndarray, right: str, what: str) -> Finding:
        at = first_index(wrong)
        if at is None:
            return Finding(check, "right", right)
        detail = f"weight {at} is {weights[at]:.4g}{what}"
        return Finding(check, "wrong", detail, at, None, float(weights[at]))

    seen = finding("allowed", hidden, "none of them is 0", ", but the mask allows it")
    if expected is None and seen.verdict == "wrong":
        why = f"{hidden.sum()} are 0, rounded or hidden: give query and key"
        seen = Finding("allowed", "not run", why)
    nonzero = forbidden & (weights != 0)
    zeros = f"{forbidden.sum()} weights are exactly 0"
    return [
        finding("finite", ~np.isfinite(weights), "all are", ""),
        finding("sign", weights < 0, "none is negative", ""),
        finding("forbidden", nonzero, zeros, ", but the mask forbids it"),
        seen,
    ]


def _sums(
    weights: np.ndarray, allowed: np.ndarray, empty_rows: str, atol: float
) -> Finding:
    empty = np.logical_not(allowed.any(-1))
    sums, columns = weights.sum(-1), weights.sum(-2)
    want = np.where(empty & (empty_rows == "zero"), 0.0, 1.0)
    limit = atol * weights.shape[-1] ** 0.5
    at = first_index(~(np.abs(sums - want) <= limit))
    if at is None:
        return Finding("sum", "right", "one in each row, 0 in those that see nothing")
    detail = f"row {at} sums to {sums[at]:.4g}, not {want[at]:.0f}"
    if empty[at]:
        detail += ", and it may see nothing"
    elif np.allclose(columns, 1, rtol=0, atol=10 * limit):
        detail += "; columns sum to one: a softmax over queries"
    return Finding("sum", "wrong", detail, at, None, float(sums[at]))


def _agreement(
    weights: np.ndarray,
    expected: np.ndarray,
    recipe: Recipe,
    allowed: np.ndarray,
    atol: float,
) -> Finding:
    errors = differences(weights, expected)
    at = first_index(errors > atol)
    if at is None:
        return Finding("softmax", "right", f"within {errors.max(initial=0):.2g}")
    detail = f"weight {at} is {weights[at]:.4g}, not {expected[at]:.4g}"
    name = suspect(weights, recipe, allowed, 10 * atol)
    if name:
        detail += f"; all are those of {name}"
    return Finding("softmax", "wrong", detail, at, None, float(errors[at]))


def _check_score(score: Any) -> None:
    if score is not None and (isinstance(score, Score) or not callable(score)):
        raise TypeError(
            "rows: score must be a function of scaled scores in numpy, but got "
            f"{type(score).__name__}. For scores.soft_cap(2.0), for example, write "
            "lambda s: 2 * np.tanh(s / 2)."
        )
