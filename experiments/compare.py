"""Runs beside each other: what they differ in, how they ended, and by how much."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from experiments.config import NOT_PART_OF_A_RUN, ConfigError
from experiments.evidence import describe, t_interval
from experiments.files import read_json
from experiments.page import Cell, Part, Section, Table
from experiments.results import flatten

METRICS = {
    "step": "steps",
    "parameters": "parameters",
    "train_loss": "train loss",
    "validation_loss": "validation loss",
    "bits_per_byte": "bits per byte",
}


class Entry(NamedTuple):
    """A run.

    Attributes:
        name: the last two parts of its directory.
        settings: by their dotted paths, those that change what a run computes.
        metrics: of its summary.
        status: "finished" or "diverged".
        sha256: of its text.
    """

    name: str
    settings: dict[str, Any]
    metrics: dict[str, Any]
    status: str
    sha256: str


def read_entries(directories: Sequence[Path]) -> list[Entry]:
    """The runs that are in these directories, or are these directories.

    Raises:
        ConfigError: a directory has no run that has ended.
    """
    files: dict[Path, None] = {}
    for directory in directories:
        own = directory / "summary.json"
        found = [own] if own.exists() else sorted(directory.glob("*/summary.json"))
        if not found:
            raise ConfigError(f"{directory} holds no run that has ended")
        files |= dict.fromkeys(path.resolve() for path in found)
    entries = [_entry(path) for path in files]
    # Runs are named by hashes, which are in no order.
    return [
        entry for arm in _arms(entries).values() for entry in sorted(arm, key=_seed)
    ]


def sections(entries: Sequence[Entry]) -> list[Section]:
    """Settings, metrics, and differences over pairs of seeds."""
    names = _short(differing(entries))
    rows: list[list[Cell]] = [
        [
            entry.name,
            *(_cell(entry.settings.get(path)) for path in names),
            entry.status,
            *(entry.metrics.get(name) for name in METRICS),
        ]
        for entry in entries
    ]
    caption = (
        "One row for each run, with the settings that are not the same in all of them. "
        "Losses are in nats per token; only bits per byte can be compared where the "
        "tokens differ."
    )
    table = Table(
        "Runs", ("run", *names.values(), "", *METRICS.values()), rows, caption
    )
    parts: list[Part] = [table.without_empty_columns(), *_differences(entries)]
    return [Section("compare", "Runs beside each other", parts)]


def differing(entries: Sequence[Entry]) -> list[str]:
    """The paths of the settings that are not the same in all runs."""
    known = dict.fromkeys(path for entry in entries for path in entry.settings)
    return [
        path
        for path in known
        if len({str(entry.settings.get(path)) for entry in entries}) > 1
    ]


def _differences(entries: Sequence[Entry]) -> list[Part]:
    """Each arm against the first one."""
    arms = _arms(entries)
    if len(arms) < 2:
        return ["The runs differ in their seeds alone: there is nothing to compare."]
    if len({entry.sha256 for entry in entries}) > 1:
        return ["The runs saw different texts: their losses cannot be compared."]
    (first, base), *others = arms.items()
    known = _by_seed(base)
    rows = []
    for label, arm in others:
        gaps = [x - known[seed] for seed, x in _by_seed(arm).items() if seed in known]
        rows.append((label, describe(t_interval(gaps) if gaps else None)))
    caption = (
        f"Bits per byte minus those of {first}: the mean over pairs of runs with the "
        "same seed, and in brackets its 95 % Student-t interval. Above zero, the arm "
        "is worse; not resolved: the interval contains zero, or there is none."
    )
    return [Table("Differences", ("arm", "bits per byte"), rows, caption)]


def _arms(entries: Sequence[Entry]) -> dict[str, list[Entry]]:
    """The runs that differ in their seeds alone, by what tells them from others."""
    names = _short([path for path in differing(entries) if path != "seed"])
    arms: dict[str, list[Entry]] = {}
    for entry in entries:
        settings = (f"{x} {_cell(entry.settings.get(p))}" for p, x in names.items())
        arms.setdefault(", ".join(settings), []).append(entry)
    return arms


def _seed(entry: Entry) -> int:
    return entry.settings["seed"]


def _by_seed(arm: Sequence[Entry]) -> dict[int, float]:
    """Bits per byte of the runs that did not diverge."""
    return {
        _seed(entry): bits
        for entry in arm
        if (bits := entry.metrics.get("bits_per_byte")) is not None
    }


def _entry(path: Path) -> Entry:
    summary = read_json(path)
    settings = {
        name: value
        for name, value in flatten(summary["config"]).items()
        if not {name, name.split(".")[0]} & set(NOT_PART_OF_A_RUN)
    }
    return Entry(
        name="/".join(path.parent.parts[-2:]),
        settings=settings,
        metrics=summary["metrics"],
        status=summary["status"],
        sha256=summary["corpus"]["sha256"],
    )


def _short(paths: Sequence[str]) -> dict[str, str]:
    """The last part of each path; all of it where two have the same."""
    last = [path.split(".")[-1] for path in paths]
    return {
        path: name if last.count(name) == 1 else path
        for path, name in zip(paths, last, strict=True)
    }


def _cell(value: Any) -> Cell:
    """A setting as it was written."""
    return f"{value:g}" if isinstance(value, float) else str(value)
