"""The suite: every probe held against one function."""

import contextlib
import dataclasses
import textwrap
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import numpy as np

from jattn.core.arguments import check_callable
from jattn.core.boundary import one_of
from jattn.reports import Report, Verdict, shown_verdict
from jattn.testing import probes as probes
from jattn.testing.features import Features
from jattn.testing.probe import PROBES, Probe
from jattn.testing.subject import Subject

COUNTED: tuple[Verdict, ...] = ("wrong", "right", "refused", "not offered")


@dataclasses.dataclass(frozen=True)
class Conformance(Report):
    """What `conformance` found; `str` of it has what is wrong first.

    Attributes:
        function: its name.
    """

    function: str

    @property
    def ok(self) -> bool:
        """Whether no claim is wrong, and some are right, or refused as they should."""
        return self.verdict in ("right", "refused")

    def summary(self) -> str:
        """The counts in one line."""
        counts = [f"{len(self.having(verdict))} {verdict}" for verdict in COUNTED]
        return f"{self.function}: {', '.join(counts)}"

    def __str__(self) -> str:
        width = max((len(found.check) for found in self), default=0)
        lines = []
        for found in sorted(self, key=lambda x: COUNTED.index(x.verdict)):
            line = f"{shown_verdict(found.verdict):<12} {found.check:<{width}}"
            detail = "" if found.verdict == "right" else found.detail
            lines.append(f"{line}  {textwrap.shorten(detail, 160)}".rstrip())
        return "\n".join([*lines, self.summary()])


def conformance(
    attention_fn: Callable[..., Any],
    *,
    supports: Iterable[str] | None = None,
    only: Iterable[str] | None = None,
) -> Conformance:
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
            Flax pass as they are; so does a function of numpy arrays. A function that
            takes `**kwargs` shows no names: give `supports`.
        supports: names of the features that it offers, in place of those found:
            keywords as "mask" and "return_lse", and abilities as "grad" and
            "value_dim". What is named here may not be declined.
        only: names of the claims to check; default all.

    Returns:
        A finding for each claim: "right", "wrong", "refused" (a call without a meaning
        was answered by an error, which is right too: a ValueError, TypeError,
        RuntimeError, NotImplementedError or AssertionError) or "not offered"; by name
        in `report[claim]`.

    Raises:
        ValueError: supports or only holds an unknown name, or only holds none.
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
        >>> report[claim].verdict
        'wrong'
    """
    check_callable("conformance", "attention_fn", attention_fn)
    chosen = _chosen(only)
    with _neutral():
        subject = Subject(Features(attention_fn, supports))
        findings = tuple(probe(subject) for probe in chosen)
    return Conformance(findings, _name(attention_fn))


def _chosen(only: Iterable[str] | None) -> list[Probe]:
    if only is None:
        return list(PROBES.values())
    if isinstance(only, str):
        raise TypeError(
            f"conformance: only must be names of claims, but got {only!r}. Write "
            f"only=[{only!r}]."
        )
    names = list(only)
    if not names:
        raise ValueError(
            "conformance: only must name a claim, but got none. Leave it out to check "
            "all."
        )
    for name in names:
        one_of("conformance", "a name in only", name, tuple(PROBES))
    return [PROBES[name] for name in names]


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
