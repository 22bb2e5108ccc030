"""What an audit returns: findings, each with a verdict and the place it is about."""

import dataclasses
from typing import Literal, NamedTuple, TypeAlias

import numpy as np

Verdict: TypeAlias = Literal["right", "WRONG", "inconclusive", "refused", "not run"]

TOLERANCE = {"float64": 1e-11, "float32": 2e-5, "float16": 4e-3, "bfloat16": 2e-2}
"""Largest error of a weight against float64, by dtype."""


class Finding(NamedTuple):
    """What one check of an audit found.

    Attributes:
        check: what was checked.
        verdict: "right", "WRONG", "inconclusive" (the check could not see anything),
            "refused" (the function raised an error, which is safe) or "not run".
        detail: how it was checked or what is wrong, in words.
        output: the index of the first place that is wrong, if there is one.
        input: the index of what it must not depend on, if that is known.
        size: by how much.
    """

    check: str
    verdict: Verdict
    detail: str
    output: tuple[int, ...] | None = None
    input: tuple[int, ...] | None = None
    size: float | None = None


@dataclasses.dataclass(frozen=True)
class Report:
    """The findings of an audit; `str` of it fits one screen.

    Attributes:
        findings: one for each check, in the order in which they were made.
    """

    findings: tuple[Finding, ...]

    @property
    def ok(self) -> bool:
        """Whether something was found right, nothing wrong, and nothing is open."""
        return self.verdict == "right"

    @property
    def verdict(self) -> Verdict:
        """That of the whole: the worst of the findings."""
        found = {finding.verdict for finding in self.findings}
        worst: tuple[Verdict, ...] = ("WRONG", "inconclusive", "right", "refused")
        return next((verdict for verdict in worst if verdict in found), "not run")

    @property
    def first(self) -> Finding | None:
        """The first finding that is wrong or inconclusive; None if all is well."""
        bad = (x for x in self.findings if x.verdict in ("WRONG", "inconclusive"))
        return next(bad, None)

    def __str__(self) -> str:
        width = max((len(finding.check) for finding in self.findings), default=0)
        lines = [f"{type(self).__name__}: {self.verdict}"]
        for check, verdict, detail, *_ in self.findings:
            lines.append(f"  {verdict:<12}  {check:<{width}}  {detail}")
        return "\n".join(lines)


def differences(got: np.ndarray, want: np.ndarray) -> np.ndarray:
    """|got - want| in float64; 0 where both are NaN or the same Inf, else Inf there."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    same = (got == want) | (np.isnan(got) & np.isnan(want))
    with np.errstate(invalid="ignore", over="ignore"):
        apart = np.abs(got - want)
    return np.where(same, 0, np.where(np.isnan(apart), np.inf, apart))


def first_index(where: np.ndarray) -> tuple[int, ...] | None:
    """The index of the first True, or None."""
    places = np.argwhere(where)
    return tuple(places[0].tolist()) if len(places) else None
