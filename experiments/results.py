"""What an experiment has left in its directory, read and grouped."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from experiments.files import read_json, read_lines
from experiments.runs import (
    NOT_COMPUTED,
    differing,
    effective_settings,
    flatten,
    read_summaries,
    run_directories,
    run_names,
    short_names,
)

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
_NOT_IN_LABEL = ("seed", "model.scale", "model.d_k", "optim.lr", *NOT_COMPUTED)
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
    bytes_fitted: int  # by these tables, about: the training split, whole characters
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
    known: list[dict[str, Any]]  # summaries, then what unfinished runs say of them

    @property
    def first(self) -> dict[str, Any]:
        """The summary of the first run, or what is known without one."""
        return next(iter(self.known), {})

    @property
    def scales(self) -> set[str]:
        """All values of model.scale, those of runs that are to come too."""
        wanted = self.sweep.get("sweep", {}).get("model.scale", ())
        told = (flatten(run["config"]).get("model.scale") for run in self.known)
        return {str(scale) for scale in (*told, *wanted)}

    @property
    def is_about_the_factor(self) -> bool:
        """Whether the runs can tell what 1/sqrt(d_k) does."""
        return tell_the_factor(self.scales)


def tell_the_factor(scales: Iterable[str]) -> bool:
    """Whether arms of these scales tell what 1/sqrt(d_k) does."""
    return {"none", "sqrt"} <= set(scales)


def read_results(*directories: Path) -> Results:
    """Read the directory of a sweep, that of a single run, or the runs of several.

    Theory and coordinate check are parts of a sweep: of several, none is read.
    """
    places = [directory.resolve() for directory in directories]  # "." has no name
    of_sweep = places[0] if len(places) == 1 else None
    sweep = _read_if_there(of_sweep, "sweep.json")
    found = dict.fromkeys(run for place in places for run in run_directories(place))
    there = [run for run in found if run.name in sweep.get("runs", [run.name])]
    summaries = read_summaries(there)
    settings = effective_settings(summaries)
    names = short_names(settings.values())
    varying = {x: names[x] for x in differing(settings.values(), _NOT_IN_LABEL)}
    runs = [_run(x, summaries[x], settings[x], varying) for x in summaries]
    unfinished = [run for run in there if run not in summaries]
    claims = [_claimed(run) for run in unfinished if (run / "config.json").exists()]
    return Results(
        sweep=sweep,
        theory=_read_if_there(of_sweep, "theory.json"),
        coord=_read_if_there(of_sweep, "coord.json"),
        runs=sorted(runs, key=_order),
        unfinished=run_names(unfinished, parts=1),
        known=[*summaries.values(), *claims],
    )


def group(runs: Iterable[Run], *names: str) -> dict[tuple, list[Run]]:
    """Runs by the values of these fields, in order of appearance."""
    groups: dict[tuple, list[Run]] = {}
    for run in runs:
        groups.setdefault(tuple(getattr(run, name) for name in names), []).append(run)
    return groups


def by_seed(losses: Iterable[tuple[int, float | None]]) -> dict[int, float | None]:
    """The mean of the runs of each seed; None if one of them diverged.

    Several runs of a seed do not differ in what is computed: they count as one.
    """
    runs: dict[int, list[float | None]] = {}
    for seed, loss in losses:
        runs.setdefault(seed, []).append(loss)
    means: dict[int, float | None] = {}
    for seed, members in runs.items():
        known = [loss for loss in members if loss is not None]
        means[seed] = fmean(known) if len(known) == len(members) else None
    return means


def loss_by_seed(runs: Iterable[Run]) -> dict[int, float | None]:
    """The validation loss of each seed; None if it diverged."""
    return by_seed((run.seed, run.loss) for run in runs)


def best_of(arm: list[Run]) -> list[Run]:
    """The runs at the learning rate of least mean validation loss.

    A learning rate at which a seed diverged or is missing cannot be the best.
    """
    seeds = {run.seed for run in arm}
    complete = []
    for runs in group(arm, "lr").values():
        losses = [x for x in loss_by_seed(runs).values() if x is not None]
        if len(losses) == len(seeds):
            complete.append((fmean(losses), runs))
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


def _run(
    directory: Path, summary: dict, settings: dict, varying: dict[str, str]
) -> Run:
    probe, metrics = summary["probe"], summary["metrics"]
    size, loss = summary["corpus"]["bytes"], metrics["validation_loss"]
    bytes_per_token = metrics["bytes_per_token"]
    tokens_read = math.prod(settings[path] for path in _TOKENS_READ)
    return Run(
        id=summary["id"],
        label=", ".join(f"{name} {settings.get(p)}" for p, name in varying.items()),
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


def _read_if_there(directory: Path | None, name: str) -> dict[str, Any]:
    path = None if directory is None else directory / name
    return read_json(path) if path is not None and path.exists() else {}


def _read_curve(path: Path, bytes_per_token: float) -> list[tuple[int, float]]:
    lines = read_lines(path) if path.exists() else []
    return [(line["step"], line["loss"] / bytes_per_token) for line in lines]
