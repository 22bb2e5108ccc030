"""The suite: every probe held against one function."""

import contextlib
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import numpy as np

from jattn.testing import probes as probes
from jattn.testing.features import Features, unknown
from jattn.testing.probe import PROBES, Probe
from jattn.testing.report import Report
from jattn.testing.subject import Subject


def conformance(
    attention_fn: Callable[..., Any],
    *,
    supports: Iterable[str] | None = None,
    only: Iterable[str] | None = None,
) -> Report:
    """Holds an attention function against a suite of claims about edge cases.

    Masked rows, NaN in padding, gradients of what nobody sees, dtypes, empty axes:
    each claim is a small call whose answer is known in float64, in closed form.
    Nothing of the function is assumed but its layout; what it offers beyond query, key
    and value is read from its signature or found by trying, and the rest is not asked
    for. Takes some seconds.

    Args:
        attention_fn: called as `attention_fn(query, key, value, **options)` with
            query (B, T, N, H), key and value (B, S, K, H); returns (B, T, N, H).
            `jattn.attention`, `jax.nn.dot_product_attention` and the functions of
            Flax pass as they are; so does a function of numpy arrays.
        supports: names of the features that it offers, in place of those found:
            keywords as "mask" and "return_lse", and abilities as "grad" and
            "value_dim". What is named here may not be declined.
        only: names of the claims to check; default all.

    Returns:
        A finding for each claim: "right", "wrong", "refused" (a call without a meaning
        was answered by a clear error, which is right too) or "not offered".

    Raises:
        ValueError: supports or only holds an unknown name.
        TypeError: it is a string, or attention_fn cannot be called.

    Example:
        >>> import jax, jattn
        >>> claim = "a query without keys gets zero"
        >>> print(jattn.testing.conformance(jattn.attention, only=[claim]))
        right        a query without keys gets zero
        attention: 0 wrong, 1 right, 0 refused, 0 not offered
        >>> report = jattn.testing.conformance(
        ...     jax.nn.dot_product_attention, only=[claim]
        ... )
        >>> report[claim].status
        'wrong'
    """
    if not callable(attention_fn):
        raise TypeError(
            "conformance: attention_fn must be a function, but got "
            f"{type(attention_fn).__name__}. Give the function itself."
        )
    chosen = _chosen(only)
    with _neutral():
        subject = Subject(Features(attention_fn, supports))
        findings = tuple(probe(subject) for probe in chosen)
    return Report(_name(attention_fn), findings)


def _chosen(only: Iterable[str] | None) -> list[Probe]:
    if only is None:
        return list(PROBES.values())
    if isinstance(only, str):
        raise TypeError(
            f"conformance: only must be names of claims, but got {only!r}. Write "
            f"only=[{only!r}]."
        )
    for name in only:
        if name not in PROBES:
            raise unknown("only", name, PROBES)
    return [PROBES[name] for name in only]


@contextlib.contextmanager
def _neutral() -> Iterator[None]:
    """Settings of the process that would change what a function answers."""
    # Accelerators round float32 products to less, CPUs do not.
    precision = None if jax.default_backend() == "cpu" else "highest"
    with (
        warnings.catch_warnings(action="ignore"),
        np.errstate(all="ignore"),
        jax.enable_x64(False),
        jax.debug_nans(False),
        jax.numpy_rank_promotion("allow"),
        jax.default_matmul_precision(precision),
    ):
        yield


def _name(fn: Any) -> str:
    while hasattr(fn, "func"):  # functools.partial
        fn = fn.func
    return getattr(fn, "__name__", type(fn).__name__)
