"""Which runs there are, and what tells them apart."""

import hashlib
from collections.abc import Container, Iterable, Sequence
from pathlib import Path
from typing import Any

from experiments.config import NOT_PART_OF_A_RUN
from experiments.files import read_json

# Settings, and tables of them, that change no number of a run. Those of `probe` change
# what is measured beside its training, and no more.
NOT_COMPUTED = (*NOT_PART_OF_A_RUN, "logging")
_ENDED = "summary.json"


def run_directories(place: Path) -> list[Path]:
    """A run itself, or the runs in it: as sweep.json lists them, then by settings.

    One that sweep.json lists may not be there yet.
    """
    files = ("config.json", _ENDED)
    if any((place / name).exists() for name in files):
        return [place]
    sweep = place / "sweep.json"
    listed = read_json(sweep)["runs"] if sweep.exists() else []
    runs = [place / str(id) for id in listed]
    found = {path.parent: path for name in files for path in place.glob(f"*/{name}")}
    others = {run: _rank(path) for run, path in found.items() if run not in runs}
    # Not by their names: these are hashes, which are in no order.
    return [*runs, *sorted(others, key=lambda run: (others[run], run))]


def run_names(runs: Sequence[Path], parts: int = 2) -> list[str]:
    """The last parts of directories: so many, or more if they tell them apart."""
    names = ["/".join(run.parts[-parts:]) for run in runs]
    unique = len({*names}) == len({*runs})
    return names if unique else run_names(runs, parts + 1)


def read_summaries(runs: Iterable[Path]) -> dict[Path, dict[str, Any]]:
    """The summaries of those runs that have ended, by their directories."""
    return {run: read_json(run / _ENDED) for run in runs if (run / _ENDED).exists()}


def effective_settings(
    summaries: dict[Path, dict[str, Any]],
) -> dict[Path, dict[str, Any]]:
    """Settings by their dotted paths, where a file counts by what was in it.

    A text or a tokenizer has one name in all runs, and another one another.
    """
    settings = {run: flatten(summary["config"]) for run, summary in summaries.items()}
    texts = {run: summary["corpus"]["sha256"] for run, summary in summaries.items()}
    _name_contents(settings, "data.source", texts)
    tokenizers = {run: _tokenizer(run, flat) for run, flat in settings.items()}
    _name_contents(settings, "data.tokenizer", tokenizers)
    return settings


def flatten(table: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested tables as one, by dotted paths."""
    flat: dict[str, Any] = {}
    for key, value in table.items():
        deeper = isinstance(value, dict)
        flat |= flatten(value, f"{prefix}{key}.") if deeper else {prefix + key: value}
    return flat


def differing(settings: Iterable[dict[str, Any]], without: Container[str]) -> list[str]:
    """The paths that are not the same in all, without these and these tables."""
    flats = list(settings)
    return [
        path
        for path in dict.fromkeys(path for flat in flats for path in flat)
        if not _is_one_of(path, without)
        and len({str(flat.get(path)) for flat in flats}) > 1
    ]


def short_names(
    settings: Iterable[dict[str, Any]], taken: Sequence[str] = ()
) -> dict[str, str]:
    """The last part of each path; all of it where that could mean something else."""
    known = dict.fromkeys(path for flat in settings for path in flat)
    last = {path: path.split(".")[-1] for path in known}
    of_runs = [n for x, n in last.items() if not _is_one_of(x, ("theory", "coord"))]
    names = [*of_runs, *taken]
    return {path: n if names.count(n) <= 1 else path for path, n in last.items()}


def _rank(path: Path) -> list[tuple[str, float, str]]:
    """The settings of the run in a file, but for its seed, as what can be sorted."""
    settings = flatten(read_json(path)["config"])
    return [
        (name, value, "") if isinstance(value, int | float) else (name, 0, str(value))
        for name, value in settings.items()
        if not _is_one_of(name, ("seed", *NOT_PART_OF_A_RUN))
    ]


def _is_one_of(path: str, names: Container[str]) -> bool:
    """Whether it, or its table, is named."""
    return path in names or path.split(".")[0] in names


def _tokenizer(run: Path, settings: dict[str, Any]) -> str:
    """What tells tokenizers apart: one from a file may have changed with it."""
    name, kept = str(settings.get("data.tokenizer")), run / "tokenizer.json"
    from_file = name.endswith(".json") and kept.exists()
    return hashlib.sha256(kept.read_bytes()).hexdigest() if from_file else name


def _name_contents(
    settings: dict[Path, dict[str, Any]], path: str, contents: dict[Path, str]
) -> None:
    """Sets a path to the first name that a content has, with its hash if not unique."""
    names: dict[str, str] = {}
    for run, flat in settings.items():
        names.setdefault(contents[run], str(flat.get(path)))
    taken = list(names.values())
    for run, flat in settings.items():
        name = names[contents[run]]
        unique = taken.count(name) == 1
        flat[path] = name if unique else f"{name} ({contents[run][:8]})"
