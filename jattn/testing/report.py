"""What the suite found, as data and as text."""

import dataclasses
import textwrap
from collections.abc import Iterator
from typing import Literal

Status = Literal["right", "wrong", "refused", "not offered"]
ORDER: tuple[Status, ...] = ("wrong", "right", "refused", "not offered")


@dataclasses.dataclass(frozen=True)
class Finding:
    """How a function did in one probe."""

    name: str
    """The claim, in a few words."""
    topic: str
    """What it is about: "masks", "gradients", ..."""
    status: Status
    """"refused": the call makes no sense and was answered by a clear error, which is as
    good as right. "not offered": the function does not do what the claim is about."""
    detail: str
    """What was got and what was wanted; or the error; or what is missing."""


@dataclasses.dataclass(frozen=True)
class Report:
    """What `conformance` found, in the order of its probes.

    `str` is a table with what is wrong first; iterating gives the findings.
    """

    function: str
    findings: tuple[Finding, ...]

    @property
    def wrong(self) -> tuple[Finding, ...]:
        """What is wrong: `assert not report.wrong, report`."""
        return self.having("wrong")

    def having(self, status: Status) -> tuple[Finding, ...]:
        """The findings of this status."""
        return tuple(found for found in self if found.status == status)

    def __iter__(self) -> Iterator[Finding]:
        return iter(self.findings)

    def __len__(self) -> int:
        return len(self.findings)

    def __getitem__(self, name: str) -> Finding:
        for found in self:
            if found.name == name:
                return found
        raise KeyError(name)

    def summary(self) -> str:
        """The counts in one line."""
        counts = [f"{len(self.having(status))} {status}" for status in ORDER]
        return f"{self.function}: {', '.join(counts)}"

    def __str__(self) -> str:
        width = max((len(found.name) for found in self), default=0)
        lines = []
        for found in sorted(self, key=lambda x: ORDER.index(x.status)):
            mark = found.status.upper() if found.status == "wrong" else found.status
            line = f"{mark:<12} {found.name:<{width}}"
            detail = "" if found.status == "right" else found.detail
            lines.append(f"{line}  {textwrap.shorten(detail, 160)}".rstrip())
        return "\n".join([*lines, self.summary()])

    def markdown(self) -> str:
        """A table of Markdown, in the order of the probes."""
        lines = ["| topic | claim | status | detail |", "|---|---|---|---|"]
        for found in self:
            status = f"**{found.status}**" if found.status == "wrong" else found.status
            detail = "" if found.status == "right" else found.detail.replace("|", "\\|")
            lines.append(f"| {found.topic} | {found.name} | {status} | {detail} |")
        return "\n".join([*lines, "", self.summary()])
