"""What an experiment has left in its directory, read and grouped."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from experiments.config import NOT_PART_OF_A_RUN
from experiments.files import read_json, read_lines

SCALES = ("none", "sqrt", "inv", "init")
# The measures of the probe, and what they are called.
MEASURES = {
    "row_norm_median": "row norm, median",
    "row_norm_rms": "row norm, rms",
    "dead_share": "dead rows",
    "entropy": "entropy / ln n",
    "max_probability": "max p",
    "saturated_share": "saturated rows",
    "softmax_derivative": "1 - sum p²",
    "logit_std": "logit std",
    "logit_max": "logit max",
    "wq_gradient_norm": "W_Q gradient",
    "wk_gradient_norm": "W_K gradient",
}
# What tells runs apart besides these becomes a run's label.
_NOT_IN_LABEL = ("seed", "model.scale", "model.d_k", "optim.lr", *NOT_PART_OF_A_RUN)
_TOKENS_READ = ("optim.steps", "data.batch", "data.context")


@dataclass(frozen=True)
class Run:
    """One finished or diverged run; losses in nats per byte."""

    id: str
    label: str  # the settings that vary, besides those below; often empty
    scale: str
    d_k: int
    lr: float
    seed: int
    step: int
    loss: float | None  # on the evaluation set; None if diverged
    reason: str  # why it diverged
    initial: dict[str, float]  # the probe's means over all heads
    final: dict[str, float]  # empty if diverged
    curve: list[tuple[int, float]]  # (step, training loss)
    baselines: dict[str, float]  # of n-gram tables, on the whole validation split
    bytes_fitted: int  # by these tables: the training split
    bytes_read: int  # in all steps of training: windows may overlap

    @property
    def lr_text(self) -> str:
        """The learning rate as it was written."""
        return f"{self.lr:g}"


@dataclass(frozen=True)
class Results:
    """Everything a directory holds; an absent file is an empty dict."""

    sweep: dict[str, Any]
    theory: dict[str, Any]
    coord: dict[str, Any]
    runs: list[Run]
    unfinished: list[str]
    first: dict[str, Any]  # summary of the first run, or what is known without one


def read_results(*directories: Path) -> Results:
    """Read the directory of a sweep, that of a single run, or the runs of several.

    Theory and coordinate check are parts of a sweep: of several, none is read.
    """
    places = [directory.resolve() for directory in directories]  # "." has no name
    of_sweep = places[0] if len(places) == 1 else None
    sweep = _read_if_there(of_sweep, "sweep.json")
    claims = [
        claim
        for place in places
        for pattern in ("config.json", "*/config.json")
        for claim in place.glob(pattern)
    ]
    there = {path.parent.name: path.parent for path in claims}
    ids = sweep.get("runs", sorted(there))
    files = {id: there[id] / "summary.json" for id in ids if id in there}
    summaries = {id: read_json(path) for id, path in files.items() if path.exists()}
    settings = {id: flatten(summary["config"]) for id, summary in summaries.items()}
    varying = _varying(list(settings.values()))
    runs = [_run(there[id], summaries[id], settings[id], varying) for id in summaries]
    first = next(iter(files), None)
    return Results(
        sweep=sweep,
        theory=_read_if_there(of_sweep, "theory.json"),
        coord=_read_if_there(of_sweep, "coord.json"),
        runs=sorted(runs, key=_order),
        unfinished=[id for id in ids if id not in summaries],
        first=next(iter(summaries.values()), _claimed(there[first]) if first else {}),
    )


def flatten(table: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested tables as one, by dotted paths."""
    flat: dict[str, Any] = {}
    for key, value in table.items():
        deeper = isinstance(value, dict)
        flat |= flatten(value, f"{prefix}{key}.") if deeper else {prefix + key: value}
    return flat


def group(runs: Iterable[Run], *names: str) -> dict[tuple, list[Run]]:
    """Runs by the values of these fields, in order of appearance."""
    groups: dict[tuple, list[Run]] = {}
    for run in runs:
        groups.setdefault(tuple(getattr(run, name) for name in names), []).append(run)
    return groups


def best_of(arm: list[Run]) -> list[Run]:
    """The runs at the learning rate of least mean validation loss.

    A learning rate at which a seed diverged or is missing cannot be the best.
    """
    seeds = {run.seed for run in arm}
    complete = [
        (fmean(losses), runs)
        for runs in group(arm, "lr").values()
        if len(losses := [r.loss for r in runs if r.loss is not None]) == len(seeds)
    ]
    return min(complete, key=lambda pair: pair[0])[1] if complete else []


def initial_mean(
    runs: Iterable[Run], label: str, scale: str, measure: str
) -> dict[int, float]:
    """The probe's measure at initialisation by d_k, averaged over runs."""
    chosen = (run for run in runs if (run.label, run.scale) == (label, scale))
    return {
        d_k: fmean(run.initial[measure] for run in members)
        for (d_k,), members in sorted(group(chosen, "d_k").items())
    }


def _run(directory: Path, summary: dict, settings: dict, varying: list[str]) -> Run:
    probe, metrics = summary["probe"], summary["metrics"]
    size, loss = summary["corpus"]["bytes"], metrics["validation_loss"]
    bytes_per_token = metrics["bytes_per_token"]
    tokens_read = math.prod(settings[path] for path in _TOKENS_READ)
    return Run(
        id=summary["id"],
        label=", ".join(f"{p.split('.')[-1]} {settings[p]}" for p in varying),
        scale=settings["model.scale"],
        d_k=settings["model.d_k"],
        lr=settings["optim.lr"],
        seed=settings["seed"],
        step=metrics["step"],
        loss=loss / bytes_per_token if summary["status"] == "finished" else None,
        reason=summary.get("reason", ""),
        initial=probe["initial"]["mean"],
        final=probe["final"]["mean"] if probe["final"] else {},
        curve=_read_curve(directory / "metrics.jsonl", bytes_per_token),
        baselines=summary["baselines"],
        bytes_fitted=size - round(size * settings["data.validation_fraction"]),
        bytes_read=round(tokens_read * bytes_per_token),
    )


def _claimed(directory: Path) -> dict[str, Any]:
    """What an unfinished run says of itself, in the form of a summary."""
    claim = read_json(directory / "config.json")
    return {"config": claim["config"], "corpus": {"sha256": claim["sha256"]}}


def _order(run: Run) -> tuple:
    return run.label, run.d_k, run.lr, SCALES.index(run.scale), run.seed


def _varying(settings: list[dict[str, Any]]) -> list[str]:
    """Paths of the settings that differ between runs and have no field in `Run`."""
    return [
        path
        for path in dict.fromkeys(path for flat in settings for path in flat)
        if path not in _NOT_IN_LABEL
        and path.split(".")[0] not in NOT_PART_OF_A_RUN
        and len({str(flat.get(path)) for flat in settings}) > 1
    ]


def _read_if_there(directory: Path | None, name: str) -> dict[str, Any]:
    path = None if directory is None else directory / name
    return read_json(path) if path is not None and path.exists() else {}


def _read_curve(path: Path, bytes_per_token: float) -> list[tuple[int, float]]:
    lines = read_lines(path) if path.exists() else []
    return [(line["step"], line["loss"] / bytes_per_token) for line in lines]
