"""What was found by an audit or a suite, as data and as text."""

import dataclasses
from collections.abc import Iterator
from typing import Literal, NamedTuple, TypeAlias

Verdict: TypeAlias = Literal[
    "right", "wrong", "inconclusive", "refused", "not run", "not offered"
]
RANKING: tuple[Verdict, ...] = (
    "wrong",
    "inconclusive",
    "right",
    "refused",
    "not offered",
    "not run",
)
"""A report has the first of these that one of its findings has."""


class Finding(NamedTuple):
    """What one check found.

    Attributes:
        check: what was checked: a word, or a claim.
        verdict: "right"; "wrong"; "inconclusive" (the check could not see anything);
            "refused" (the function answered by a clear error, which is safe); "not run"
            (the check does not apply); "not offered" (the function does not do it).
        detail: how it was checked, or what is wrong, refused or missing, in words.
        output: the index of the first place that is wrong, if there is one.
        input: the index of what it must not depend on, if that is known.
        size: the number at that place: an error, a value or a ratio, as `detail` says.
        topic: what the claim is about: "masks", "gradients", ...
    """

    check: str
    verdict: Verdict
    detail: str
    output: tuple[int, ...] | None = None
    input: tuple[int, ...] | None = None
    size: float | None = None
    topic: str = ""


@dataclasses.dataclass(frozen=True)
class Report:
    """Findings, in the order in which they were made; `str` of it is a table.

    Iterating gives the findings, and `report[check]` the one of that check.

    Attributes:
        findings: one for each check.
    """

    findings: tuple[Finding, ...]

    @property
    def ok(self) -> bool:
        """Whether something was found right, nothing wrong, and nothing is open."""
        return self.verdict == "right"

    @property
    def verdict(self) -> Verdict:
        """That of the whole.

        "wrong" or "inconclusive" if any finding is; else "right" if any is. What was
        refused, not offered or not run does not count beside those.
        """
        found = {finding.verdict for finding in self.findings}
        return next((verdict for verdict in RANKING if verdict in found), "not run")

    @property
    def first(self) -> Finding | None:
        """The first finding that is wrong or inconclusive; None if all is well."""
        bad = (x for x in self.findings if x.verdict in ("wrong", "inconclusive"))
        return next(bad, None)

    @property
    def wrong(self) -> tuple[Finding, ...]:
        """What is wrong: `assert not report.wrong, report`."""
        return self.having("wrong")

    def having(self, verdict: Verdict) -> tuple[Finding, ...]:
        """The findings of this verdict."""
        return tuple(found for found in self.findings if found.verdict == verdict)

    def __iter__(self) -> Iterator[Finding]:
        return iter(self.findings)

    def __getitem__(self, check: str) -> Finding:
        for found in self.findings:
            if found.check == check:
                return found
        raise KeyError(check)

    def __str__(self) -> str:
        width = max((len(found.check) for found in self.findings), default=0)
        lines = [f"{type(self).__name__}: {shown_verdict(self.verdict)}"]
        for found in self.findings:
            verdict = shown_verdict(found.verdict)
            lines.append(f"  {verdict:<12}  {found.check:<{width}}  {found.detail}")
        return "\n".join(lines)


def shown_verdict(verdict: Verdict) -> str:
    """As a table shows it: what is wrong is seen from afar."""
    return verdict.upper() if verdict == "wrong" else verdict


def shown_bytes(num_bytes: float) -> str:
    """In three digits and the unit that fits."""
    for unit in ("B", "kB", "MB", "GB"):
        if num_bytes < 1000:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.3g} TB"
