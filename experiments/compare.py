"""Runs beside each other: what they differ in, how they ended, and by how much."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from experiments.config import NOT_PART_OF_A_RUN, ConfigError
from experiments.evidence import describe, t_interval
from experiments.page import Cell, Finding, Part, Section, Table
from experiments.results import by_seed
from experiments.runs import (
    NOT_COMPUTED,
    differing,
    effective_settings,
    read_summaries,
    run_directories,
    run_names,
    short_names,
)
from experiments.tables import FLATTERS, TWINS

METRICS = {
    "step": "steps done",
    "parameters": "parameters",
    "train_loss": "train loss",
    "validation_loss": "validation loss",
    "bits_per_byte": "bits per byte",
}
COLUMNS = ("run", "status", *METRICS.values())
# Arms differ in other settings than these.
NOT_OF_AN_ARM = ("seed", "probe", *NOT_COMPUTED)


class Entry(NamedTuple):
    """A run that has ended.

    Attributes:
        name: the last two parts of its directory, or more if two have the same.
        settings: by their dotted paths.
        metrics: of its summary.
        status: "finished" or "diverged".
        sha256: of its text.
    """

    name: str
    settings: dict[str, Any]
    metrics: dict[str, Any]
    status: str
    sha256: str


class Entries(NamedTuple):
    """Runs, in the order in which they are shown.

    Attributes:
        ended: by arm and seed.
        unfinished: the names of those that have not ended.
    """

    ended: list[Entry]
    unfinished: list[str]


def read_entries(directories: Sequence[Path]) -> Entries:
    """The runs that are in these directories, or are these directories.

    Arms are in the order of the directories; those in one are in the order of its
    sweep.json, or else of their settings.

    Raises:
        ConfigError: a directory has no run that has ended.
    """
    summaries: dict[Path, dict[str, Any]] = {}
    runs: dict[Path, None] = {}
    for directory in directories:
        found = run_directories(directory.resolve())
        if not found:
            raise ConfigError(f"{directory} holds no run")
        summaries |= read_summaries(found)
        runs |= dict.fromkeys(found)
    if not summaries:
        raise ConfigError(f"{', '.join(map(str, directories))}: no run has ended")
    names = dict(zip(runs, run_names([*runs]), strict=True))
    settings = effective_settings(summaries)
    entries = [
        Entry(
            name=names[run],
            settings=settings[run],
            metrics=summary["metrics"],
            status=summary["status"],
            sha256=summary["corpus"]["sha256"],
        )
        for run, summary in summaries.items()
    ]
    arms = _arms(entries).values()
    return Entries(
        ended=[entry for arm in arms for entry in sorted(arm, key=_seed)],
        unfinished=[names[run] for run in runs if run not in summaries],
    )


def sections(entries: Entries) -> list[Section]:
    """Settings, metrics, and differences over pairs of seeds."""
    ended, unfinished = entries
    settings = [entry.settings for entry in ended]
    names = short_names(settings, COLUMNS)
    differ = differing(settings, NOT_PART_OF_A_RUN)
    rows: list[list[Cell]] = [
        [
            entry.name,
            *(_cell(entry.settings.get(path)) for path in differ),
            entry.status,
            *(entry.metrics.get(name) for name in METRICS),
        ]
        for entry in ended
    ]
    caption = (
        "One row for each run, with the settings that are not the same in all of them. "
        "Losses are in nats per token; only bits per byte can be compared where the "
        "tokens differ."
    )
    run, *others = COLUMNS
    columns = (run, *(names[path] for path in differ), *others)
    table = Table("Runs", columns, rows, caption).without_empty_columns()
    parts: list[Part] = [table, _differences(ended)]
    if unfinished:
        left_out = f"{len(unfinished)}, left out: {', '.join(unfinished)}."
        parts.append(Finding("Runs not finished", left_out))
    return [Section("compare", "Runs beside each other", parts)]


def _differences(entries: Sequence[Entry]) -> Table | Finding:
    """Each arm against the first one, or why there is no difference to take."""
    title = "Differences"
    if len({entry.sha256 for entry in entries}) > 1:
        why = "The runs saw different texts: their losses cannot be compared."
        return Finding(title, why)
    arms = _arms(entries)
    if len(arms) < 2:
        why = "All runs are of one arm: there is nothing to compare."
        return Finding(title, why)
    (first, base), *others = ((name, _bits(arm)) for name, arm in arms.items())
    rows: list[list[Cell]] = []
    for name, arm in others:
        pairs = [(x, base[seed]) for seed, x in arm.items() if seed in base]
        gaps = [x - y for x, y in pairs if x is not None and y is not None]
        interval = t_interval(gaps) if gaps else None
        rows.append([name, describe(interval), len(pairs) - len(gaps)])
    caption = (
        f"Bits per byte minus those of {first}: the mean over pairs of runs with the "
        "same seed, and in brackets its 95 % Student-t interval. Above zero, the arm "
        "is worse; not resolved: the interval contains zero, or there is none."
    )
    if any(dropped for *_, dropped in rows):
        caption += f" {FLATTERS}. Pairs dropped: those in which a run diverged."
    if any(len(_bits(arm)) < len(arm) for arm in arms.values()):
        caption += TWINS
    columns = ("arm", "bits per byte", "pairs dropped")
    return Table(title, columns, rows, caption)


def _arms(entries: Sequence[Entry]) -> dict[str, list[Entry]]:
    """The runs that differ in their seeds alone, by what tells them from others."""
    settings = [entry.settings for entry in entries]
    names = short_names(settings, COLUMNS)
    differ = differing(settings, NOT_OF_AN_ARM)
    arms: dict[str, list[Entry]] = {}
    for entry in entries:
        own = (f"{names[path]} {_cell(entry.settings.get(path))}" for path in differ)
        arms.setdefault(", ".join(own), []).append(entry)
    return arms


def _seed(entry: Entry) -> int:
    return entry.settings["seed"]


def _bits(arm: Sequence[Entry]) -> dict[int, float | None]:
    """Bits per byte of each seed; None if it diverged."""
    return by_seed((_seed(x), x.metrics.get("bits_per_byte")) for x in arm)


def _cell(value: Any) -> Cell:
    """A setting as it was written."""
    return f"{value:g}" if isinstance(value, float) else str(value)
