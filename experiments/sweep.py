"""A whole experiment: every training run, and the report.

Where arms of `model.scale` tell what the factor 1/sqrt(d_k) does, theory and coordinate
check are parts of it. What is finished is never computed again: an interrupted
experiment continues where it stopped when it is started again.
"""

import os
import platform
from collections.abc import Callable
from datetime import UTC, datetime
from operator import attrgetter
from pathlib import Path
from typing import Any

import jax

from experiments.config import Config, ConfigError, grid, run_id, to_dict
from experiments.coord import coordinate_check
from experiments.data import Corpus, check_length, load_corpus, split_of
from experiments.files import read_json, write_json
from experiments.progress import Prefixed, Progress
from experiments.report import write_report
from experiments.results import tell_the_factor
from experiments.theory import theory_table
from experiments.trackers import check_tracker
from experiments.train import train

# Settings that the coordinate check depends on.
COORD_SETTINGS = ("seed", "data", "model", "optim", "coord")


def sweep(
    config: Config, lists: dict[str, list[Any]], progress: Progress, command: str = ""
) -> Path:
    """Compute what is missing of an experiment. A diverged run is a result like others.

    Theory and coordinate check come first, if "none" and "sqrt" are both among the
    runs' values of model.scale: they are about that factor only.

    Args:
        config: the settings that all runs share.
        lists: what is varied, as in `grid`.
        progress: where to say what is being done.
        command: what was typed to get here, for the report.

    Returns:
        The path of the report.

    Raises:
        ConfigError: a setting or a text does not fit, or the directory holds another
            experiment; nothing has been computed or written then.
    """
    points = grid(config, lists)
    about_factor = tell_the_factor(point.model.scale for point in points)
    used = [config, *points] if about_factor else points
    sources = {point.data.source for point in used}
    corpora = {source: load_corpus(source) for source in sources}
    for point in used:
        check_length(corpora[point.data.source], point)
        check_tracker(point.logging.tracker)
    directory = experiment_directory(config)
    description = _description(config, lists, points) | {"command": command}
    _refuse_another(directory, description["runs"])
    directory.mkdir(parents=True, exist_ok=True)
    write_json(directory / "sweep.json", description)
    if about_factor:
        theory(config, progress)
        coord(config, corpora[config.data.source], progress)
    for number, point in enumerate(points, start=1):
        varied = [f"{p.split('.')[-1]}={attrgetter(p)(point)}" for p in lists]
        prefix = " ".join([f"{number}/{len(points)}", *varied])
        run(point, corpora[point.data.source], Prefixed(progress, prefix))
    return write_report(directory)


def run(config: Config, corpus: Corpus, progress: Progress) -> dict[str, Any]:
    """The summary of a training run, which is trained unless it is finished.

    Raises:
        ConfigError: the finished run has seen another text than `corpus`, or other
            tokens.
    """
    directory = run_directory(config)
    if not (directory / "summary.json").exists():
        return train(config, corpus, directory, progress)
    summary = read_json(directory / "summary.json")
    if summary["corpus"]["sha256"] != corpus.sha256:
        raise ConfigError(f"{directory} holds a run on another text; set another name")
    split_of(corpus, config.data).tokenizer.keep(directory)
    progress.finish(f"{summary['status']} before")
    return summary


def theory(config: Config, progress: Progress) -> dict[str, Any]:
    """The table of `theory_table`, kept in theory.json."""
    path = experiment_directory(config) / "theory.json"
    settings = to_dict(config)["theory"]

    def compute() -> dict[str, Any]:
        progress.start("theory", total=1)
        return theory_table(config.theory)

    return _kept(path, settings, compute, progress)


def coord(config: Config, corpus: Corpus, progress: Progress) -> dict[str, Any]:
    """The table of `coordinate_check`, kept in coord.json."""
    path = experiment_directory(config) / "coord.json"
    table = to_dict(config)
    settings = {key: table[key] for key in COORD_SETTINGS} | {"sha256": corpus.sha256}
    return _kept(
        path, settings, lambda: coordinate_check(config, corpus, progress), progress
    )


def experiment_directory(config: Config) -> Path:
    """Where an experiment keeps its results."""
    return Path(config.out) / config.name


def run_directory(config: Config) -> Path:
    """Where a run of it keeps its own."""
    return experiment_directory(config) / run_id(config)


def _refuse_another(directory: Path, runs: list[str]) -> None:
    """Lists may be extended; what an experiment has listed stays in it."""
    path = directory / "sweep.json"
    if path.exists() and not set(read_json(path)["runs"]) <= set(runs):
        raise ConfigError(f"{directory} holds another experiment; set another --name")


def _kept(
    path: Path,
    settings: dict[str, Any],
    compute: Callable[[], dict[str, Any]],
    progress: Progress,
) -> dict[str, Any]:
    """Read a result from its file, or compute it if it is of other settings."""
    if path.exists():
        result = read_json(path)
        if result.get("settings") == settings:
            progress.finish(f"{path.stem}  finished before")
            return result
    path.parent.mkdir(parents=True, exist_ok=True)  # fails before the computation
    result = compute() | {"settings": settings}
    write_json(path, result)
    progress.finish(f"{path.stem}  finished")
    return result


def _description(
    config: Config, lists: dict[str, list[Any]], points: list[Config]
) -> dict[str, Any]:
    """What sweep.json holds."""
    return {
        "name": config.name,
        "runs": [run_id(point) for point in points],
        "config": to_dict(config),
        "sweep": lists,
        "machine": {
            "python": platform.python_version(),
            "jax": jax.__version__,
            "platform": f"{platform.platform()}, {jax.default_backend()}",
            "cpu_count": os.cpu_count(),
            "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        },
    }
