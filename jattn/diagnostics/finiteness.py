"""Whether a NaN, an Inf or an empty row stays where it belongs."""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np

from jattn.core.arguments import check_callable
from jattn.core.boundary import one_of
from jattn.diagnostics.bench import LENGTH, Bench
from jattn.diagnostics.places import differences, first_index
from jattn.foreign import (
    WrongShape,
    in_one_line,
    parameters_of,
    refuses,
)
from jattn.reports import Finding, Report

UNSEEN, SEEN, BLIND = (0, 2), (0, 1), (0, 4)
"""Places (b, s) of a key that nobody may see and of one that many do, and (b, t) of a
query that may see nothing."""


@dataclasses.dataclass(frozen=True)
class NanSafety(Report):
    """What `nan_safety` found."""


def nan_safety(
    attention_fn: Callable[..., Any],
    *,
    num_heads: int = 2,
    num_kv_heads: int | None = None,
    head_dim: int = 8,
    per_head_mask: bool = False,
    empty_rows: Literal["zero", "mean"] = "zero",
    dtype: Any = jnp.float32,
) -> NanSafety:
    """Whether a NaN or Inf reaches only what may see it, forwards and backwards.

    A weight of 0 times a NaN is NaN, so padding that holds one spoils whole rows unless
    it is kept out; and a row that may see nothing divides 0 by 0, or spreads over keys
    that are forbidden. Each probe is reported by itself: a function may be right in
    some and refuse others. `jattn.testing.conformance` claims as much of any function;
    here it is tried for one's own heads, dtype, kind of mask and choice of empty rows,
    in every bit, and each finding has the index of what is wrong.

    Args:
        attention_fn: `attention_fn(query, key, value, mask=mask)`, of (B, T, N, H), (B,
            T, K, H) twice and Boolean (B, 1, T, T), True where a query may look. It
            returns (B, T, N, H), and is traced. A `bias=` of (B, N, T, T) is tried if
            its signature names one.
        num_heads: N.
        num_kv_heads: K; by default N.
        head_dim: H.
        per_head_mask: whether to give the mask as (B, N, T, T).
        empty_rows: what a query without keys should get: "zero", or "mean".
        dtype: of the vectors.

    Returns:
        Findings for masked keys and values (bits of the output and of all gradients
        must not change), for a value that is seen (exactly its readers become NaN),
        for a query without keys, for a bias of -inf, and for float16.

    Raises:
        ValueError: sizes do not fit, or `attention_fn` returns another shape.

    Example:
        >>> import jax, jattn
        >>> def cleaned(query, key, value, mask):  # jattn.attention is right in all
        ...     value = jnp.nan_to_num(value)
        ...     return jax.nn.dot_product_attention(query, key, value, mask=mask)
        >>> found = nan_safety(cleaned)
        >>> found.first.check, found.first.detail
        ('masked key, gradient', 'nan there makes d query (0, 0, 0, 0) nan')
    """
    check_callable("nan_safety", "attention_fn", attention_fn)
    one_of("nan_safety", "empty_rows", empty_rows, ("zero", "mean"))
    kv_heads = num_heads if num_kv_heads is None else num_kv_heads
    if min(num_heads, kv_heads, head_dim) < 1 or num_heads % kv_heads:
        raise ValueError(
            "nan_safety: N must be a multiple of K, and H 1 or more, but got "
            f"N={num_heads}, K={kv_heads}, H={head_dim}. Grouped heads: N = 4, K = 2."
        )
    bench = Bench(attention_fn, num_heads, kv_heads, head_dim)
    heads = num_heads if per_head_mask else 1
    mask = np.tile(np.tri(LENGTH, dtype=bool), (2, heads, 1, 1))
    mask[UNSEEN[0], ..., UNSEEN[1]] = False
    holed = mask.copy()
    holed[BLIND[0], :, BLIND[1]] = False
    mean = empty_rows == "mean"
    probes: dict[str, Callable[[], list[Finding]]] = {
        "masked key": lambda: _unread(bench, mask, dtype, "key", UNSEEN),
        "masked value": lambda: _unread(bench, mask, dtype, "value", UNSEEN),
        "seen value": lambda: _read(bench, mask, dtype),
        "empty row": lambda: _empty(bench, mask, holed, dtype, mean),
        "its query": lambda: _unread(bench, holed, dtype, "query", BLIND),
        "bias of -inf": lambda: _biased(bench, mask, dtype, num_heads),
        "float16 empty row": lambda: _empty(bench, mask, holed, jnp.float16, mean),
        "float16 large": lambda: _large(bench, mask),
    }
    if "bias" not in parameters_of(attention_fn):
        del probes["bias of -inf"]
    findings = []
    for name, probe in probes.items():
        try:
            found = probe()
        except Exception as error:
            if isinstance(error, WrongShape) or not refuses(error):
                raise
            found = [Finding("", "refused", in_one_line(error, 60))]
        findings += [x._replace(check=f"{name}{x.check}") for x in found]
    return NanSafety(tuple(findings))


def _unread(
    bench: Bench, mask: np.ndarray, dtype: Any, name: str, place: tuple[int, int]
) -> list[Finding]:
    """Spoils a vector that nobody may read: nothing may change."""
    clean = bench(dtype, mask=mask)
    found = {
        number: bench(dtype, bench.spoilt(name, place, number), mask=mask)
        for number in (np.nan, np.inf)
    }
    return [
        _same(found, clean, ["out"], ""),
        _same(found, clean, list(clean)[1:], ", gradient"),
    ]


def _same(found: dict, clean: dict, names: list[str], check: str) -> Finding:
    for number, got in found.items():
        for name in names:
            at = first_index(differences(got[name], clean[name]) > 0)
            if at is not None:
                detail = f"{number} there makes {name} {at} {got[name][at]:.3g}"
                return Finding(check, "wrong", detail, at, None, float(got[name][at]))
            at = first_index(~np.isfinite(clean[name]))
            if at is not None:
                detail = f"{name} {at} is {clean[name][at]} even without one"
                return Finding(check, "wrong", detail, at)
    return Finding(check, "right", "no bit changes")


def _read(bench: Bench, mask: np.ndarray, dtype: Any) -> list[Finding]:
    """Spoils a value of one key head: exactly those that may see it become NaN."""
    clean = bench(dtype, mask=mask)["out"]
    readers = np.zeros(clean.shape[:3], bool)
    b, s = SEEN
    readers[b, :, : bench.groups] = mask[b, 0, :, s][:, None]
    for number in (np.nan, np.inf):
        vectors = bench.spoilt("value", (b, s, 0), number)
        got = bench(dtype, vectors, mask=mask)["out"]
        missed = readers & np.isfinite(got).any(-1)
        touched = ~readers & (differences(got, clean) > 0).any(-1)
        for wrong, what in ((touched, "reaches"), (missed, "does not reach")):
            at = first_index(wrong)
            if at is not None:
                may = "may not" if what == "reaches" else "may"
                detail = f"{number} {what} out {at}, which {may} see it"
                return [Finding("", "wrong", detail, at, (*SEEN, 0))]
    return [Finding("", "right", f"reaches exactly {readers.sum()} rows")]


def _empty(
    bench: Bench, mask: np.ndarray, holed: np.ndarray, dtype: Any, mean: bool
) -> list[Finding]:
    """A query that may see nothing, and its gradient."""
    before, got = bench(dtype, mask=mask)["out"], bench(dtype, mask=holed)
    others = np.ones(before.shape[:2], bool)
    others[BLIND] = False
    apart = first_index((differences(got["out"], before) > 0).any((-1, -2)) & others)
    values = np.asarray(jnp.asarray(bench.vectors[2], dtype), np.float64)
    average = np.repeat(values[BLIND[0]].mean(0), bench.groups, 0)
    row = got["out"][BLIND]
    right = False
    if apart is not None:
        what = f"another row, {apart}, changes because of row {BLIND}"
    elif not np.isfinite(row).all():
        what = f"row {BLIND} is {row[~np.isfinite(row)][0]}"
    elif not row.any():
        right, what = not mean, f"row {BLIND} is 0"
    elif np.allclose(row, average, rtol=0, atol=2e-2):
        right, what = mean, f"row {BLIND} is the mean of all values, forbidden or not"
    else:
        what = f"row {BLIND} is neither 0 nor the mean of all values"
    forward = Finding("", "right" if right else "wrong", what, None if right else BLIND)
    blinded = bench.cotangent.copy()
    blinded[BLIND] = 0
    quiet = got if mean else bench(dtype, cotangent=blinded, mask=holed)
    backward = Finding(", gradient", "right", "finite, and 0 from that row")
    for name in list(got)[1:]:
        wrong = (differences(got[name], quiet[name]) > 0) | ~np.isfinite(got[name])
        if name == "d query":
            wrong[BLIND] |= got[name][BLIND] != 0
        at = first_index(wrong)
        if at is not None:
            detail = f"{name} {at} is {got[name][at]:.3g} because of row {BLIND}"
            backward = Finding(", gradient", "wrong", detail, at)
            break
    return [forward, backward]


def _biased(
    bench: Bench, mask: np.ndarray, dtype: Any, num_heads: int
) -> list[Finding]:
    """A whole row of biases of -inf."""
    bias = np.zeros((2, num_heads, LENGTH, LENGTH))
    bias[BLIND[0], :, BLIND[1]] = -np.inf
    return [_finite(bench(dtype, mask=mask, bias=jnp.asarray(bias, dtype)))]


def _large(bench: Bench, mask: np.ndarray) -> list[Finding]:
    """Scores beyond 65504, the largest number of float16."""
    vectors = [200 * np.sign(x) for x in bench.vectors[:2]] + bench.vectors[2:]
    return [_finite(bench(jnp.float16, vectors, mask=mask))]


def _finite(got: dict[str, np.ndarray]) -> Finding:
    for name, array in got.items():
        at = first_index(~np.isfinite(array))
        if at is not None:
            return Finding("", "wrong", f"{name} {at} is {array[at]}", at)
    return Finding("", "right", "the output and all gradients are finite")
