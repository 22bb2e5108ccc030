"""What a sweep shows: paired gaps, intervals, and verdicts by rules that are printed.

The arms are scale "none" (no factor) and "sqrt" (1/sqrt(d_k)), paired by seed: same
data in the same order and the same random draws.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np
from scipy import stats

from experiments.files import read_json

HOLDS, PART, FAILS, OPEN = "holds", "holds in part", "does not hold", "not resolved"
SLOPE_TOLERANCE = 0.05
OUTCOME_RULE = (
    "A claim holds if all its conditions are met, holds in part if some are, does not "
    "hold if none is met and at least one is refuted, and is not resolved otherwise. "
    "A gap whose interval contains zero, or a missing measurement, decides nothing."
)
# What tells runs apart besides these becomes a run's label.
_NOT_IN_LABEL = ("name", "out", "seed", "model.scale", "model.d_k", "optim.lr")


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
    loss: float | None  # on the validation set; None if diverged
    reason: str  # why it diverged
    initial: dict[str, float]  # the probe's means over all heads
    final: dict[str, float]  # empty if diverged
    curve: list[tuple[int, float]]  # (step, training loss)
    baselines: dict[str, float]  # of n-gram tables, on the same validation set

    @property
    def lr_text(self) -> str:
        """The learning rate as it was written."""
        return f"{self.lr:g}"


@dataclass(frozen=True)
class Results:
    """Everything a sweep directory holds; an absent file is an empty dict."""

    sweep: dict[str, Any]
    theory: dict[str, Any]
    coord: dict[str, Any]
    runs: list[Run]
    unfinished: list[str]
    first: dict[str, Any]  # summary of the first run: corpus, baselines, config


def read_results(directory: Path) -> Results:
    """Read a sweep's directory, or that of a single run."""
    sweep = _read_if_there(directory / "sweep.json")
    paths = [*directory.glob("summary.json"), *directory.glob("*/summary.json")]
    there = {path.parent.name: path for path in paths}
    ids = sweep.get("runs", sorted(there))
    summaries = {id: read_json(there[id]) for id in ids if id in there}
    settings = {id: flatten(summary["config"]) for id, summary in summaries.items()}
    varying = _varying(list(settings.values()))
    runs = [_run(there[id], summaries[id], settings[id], varying) for id in summaries]
    return Results(
        sweep=sweep,
        theory=_read_if_there(directory / "theory.json"),
        coord=_read_if_there(directory / "coord.json"),
        runs=sorted(runs, key=_order),
        unfinished=[id for id in ids if id not in there],
        first=next(iter(summaries.values()), {}),
    )


def flatten(table: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested tables as one, by dotted paths."""
    flat: dict[str, Any] = {}
    for key, value in table.items():
        deeper = isinstance(value, dict)
        flat |= flatten(value, f"{prefix}{key}.") if deeper else {prefix + key: value}
    return flat


class Interval(NamedTuple):
    """Mean with the half-width of its 95 % interval; None for a single value."""

    mean: float
    half_width: float | None
    pairs: int

    @property
    def sign(self) -> int | None:
        """1 or -1 if the interval excludes zero on that side, else None."""
        if self.half_width is None or abs(self.mean) <= self.half_width:
            return None
        return 1 if self.mean > 0 else -1


def t_interval(values: Sequence[float]) -> Interval:
    """Student-t 95 % interval of the mean: mean +- t_{.975, n-1} s / sqrt(n)."""
    count = len(values)
    if count < 2:
        return Interval(values[0], None, 1)
    error = np.std(values, ddof=1) / np.sqrt(count)
    half_width = stats.t.ppf(0.975, count - 1) * error
    return Interval(fmean(values), float(half_width), count)


class Gap(NamedTuple):
    """Validation loss without the factor minus with it, paired by seed."""

    label: str
    d_k: int
    none: list[Run]
    sqrt: list[Run]
    interval: Interval | None  # None without a finished pair


def group(runs: Iterable[Run], *names: str) -> dict[tuple, list[Run]]:
    """Runs by the values of these fields, in order of appearance."""
    groups: dict[tuple, list[Run]] = {}
    for run in runs:
        groups.setdefault(tuple(getattr(run, name) for name in names), []).append(run)
    return groups


def gaps(runs: Iterable[Run]) -> list[Gap]:
    """The gap at each setting and learning rate where both arms ran."""
    groups = group(runs, "label", "d_k", "lr").values()
    pairs = [[_arm(rs, scale) for scale in ("none", "sqrt")] for rs in groups]
    return [_gap(none, sqrt) for none, sqrt in pairs if none and sqrt]


def best_gaps(runs: Iterable[Run]) -> list[Gap]:
    """The gap between the arms, each at its own best learning rate."""
    groups = group(runs, "label", "d_k").values()
    pairs = [[best_of(_arm(rs, scale)) for scale in ("none", "sqrt")] for rs in groups]
    return [_gap(none, sqrt) for none, sqrt in pairs if none and sqrt]


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


def mean_measure(
    runs: Iterable[Run], label: str, scale: str, measure: str
) -> dict[int, float]:
    """The probe's measure at initialisation by d_k, averaged over runs."""
    chosen = (run for run in runs if (run.label, run.scale) == (label, scale))
    return {
        d_k: fmean(run.initial[measure] for run in members)
        for (d_k,), members in sorted(group(chosen, "d_k").items())
    }


class Verdict(NamedTuple):
    """A claim, the rule that decides it, the numbers, and how it came out."""

    claim: str
    rule: str
    numbers: str  # whole sentences; empty without a measurement
    outcome: str


def verdicts(results: Results) -> list[Verdict]:
    """The steps of the usual story, each decided by its own rule."""
    runs = results.runs
    return [
        _logits_grow(results.coord),
        _collapse(runs, "The softmax saturates", entropy="entropy / ln n"),
        _collapse(
            runs, "The typical row's gradient dies", row_norm_median="median row norm"
        ),
        _collapse(
            runs,
            "The gradients of W_Q and W_K vanish",
            wq_gradient_norm="gradient norm of W_Q",
            wk_gradient_norm="gradient norm of W_K",
        ),
        _training_is_worse(runs),
    ]


def decide(conditions: Iterable[bool | None]) -> str:
    """OUTCOME_RULE, with True for met, False for refuted and None for undecided."""
    seen = list(conditions)
    if True in seen:
        return HOLDS if all(seen) else PART
    return FAILS if False in seen else OPEN


def combine(outcomes: Sequence[str]) -> str:
    """The outcome of the whole story: as its steps if they agree, else in part."""
    if len(set(outcomes)) == 1:
        return outcomes[0]
    return PART if {HOLDS, PART} & set(outcomes) else FAILS


def paradox(runs: Sequence[Run]) -> str | None:
    """Why weight gradients grow while the typical row dies, if the numbers show both.

    They do if, from the smallest to the largest d_k, the median row norm at least
    halves while both weights' gradient norms and rms / median at least double.
    """
    for label in dict.fromkeys(run.label for run in runs):
        names = ("row_norm_median", "row_norm_rms", "wq_gradient_norm")
        median, rms, w_q, w_k = (
            mean_measure(runs, label, "none", name)
            for name in (*names, "wk_gradient_norm")
        )
        if len(median) < 2:
            continue
        low, high = min(median), max(median)
        ratio = {d_k: rms[d_k] / max(median[d_k], 1e-30) for d_k in (low, high)}
        grows = all(2 * x[low] <= x[high] for x in (w_q, w_k, ratio))
        if grows and 2 * median[high] <= median[low]:
            return (
                "Why the gradient norms of W_Q and W_K grow while the typical row "
                "dies: a norm adds up squares, so a few large rows decide it. Without "
                f"the factor the rms of the row norms is {ratio[low]:.3g} times their "
                f"median at d_k {low} and {ratio[high]:.3g} times at d_k {high}: the "
                "gradient comes from ever fewer rows. Rows whose largest logits nearly "
                "tie still have a derivative, and what they pass on is a difference of "
                "keys, sqrt(d_k) times as long as with the factor. The norms tell that "
                "some rows still learn; only the rows themselves tell how few."
            )
    return None


def _logits_grow(coord: dict[str, Any]) -> Verdict:
    slopes = {}
    if 0 in coord.get("steps", ()):
        start = coord["steps"].index(0)
        slopes = {k: v["slope"][start] for k, v in coord["scales"].items()}
    expected = {"none": 0.5, "sqrt": 0.0}
    measured = {k: slopes[k] for k in expected if slopes.get(k) is not None}
    return Verdict(
        "Without the factor, logits grow like sqrt(d_k)",
        f"slope of log std against log d_k before training within {SLOPE_TOLERANCE} "
        "of 0.5 without the factor, and of 0 with it",
        "".join(f"Slope with {k}: {v:.3g}. " for k, v in measured.items()).strip(),
        decide(
            abs(measured[scale] - slope) <= SLOPE_TOLERANCE
            if scale in measured
            else None
            for scale, slope in expected.items()
        ),
    )


def _collapse(runs: Sequence[Run], claim: str, **measures: str) -> Verdict:
    """Before training a measure falls by half with d_k, and to half the other arm's."""
    conditions: list[bool | None] = []
    numbers = []
    for label in dict.fromkeys(run.label for run in runs):
        for measure, name in measures.items():
            none = mean_measure(runs, label, "none", measure)
            sqrt = mean_measure(runs, label, "sqrt", measure)
            if not none:
                continue
            low, high = min(none), max(none)
            conditions += [
                none[high] < none[low] / 2 if high > low else None,
                none[high] < sqrt[high] / 2 if high in sqrt else None,
            ]
            values = "; ".join(
                f"{scale} " + ", ".join(f"{v[d]:.3g}" for d in (low, high) if d in v)
                for scale, v in (("none", none), ("sqrt", sqrt))
                if v
            )
            where = "With " + _join(label, f"d_k {low} and {high}")
            numbers.append(f"{where}, {name}: {values}.")
    return Verdict(
        claim,
        "before training and without the factor, at the largest d_k: "
        f"{' and '.join(measures.values())} below half of the value at the smallest "
        "d_k, and below half of the value with the factor",
        " ".join(numbers),
        decide(conditions),
    )


def _training_is_worse(runs: Sequence[Run]) -> Verdict:
    found = best_gaps(runs)
    signs = [gap.interval.sign if gap.interval else None for gap in found]
    scales = [{run.scale for run in rs} for rs in group(runs, "label", "d_k").values()]
    # A size at which an arm diverged at every learning rate stays undecided.
    signs += [None] * (sum({"none", "sqrt"} <= s for s in scales) - len(found))
    return Verdict(
        "Training without the factor ends worse",
        "for every d_k, each arm at its best learning rate: the 95 % interval of the "
        "gap in validation loss, none - sqrt, lies above zero",
        " ".join(
            f"With {_join(g.label, f'd_k {g.d_k}')}: {describe(g.interval)}."
            for g in found
        ),
        decide(None if sign is None else sign > 0 for sign in signs),
    )


def describe(interval: Interval | None) -> str:
    """The interval in words."""
    if interval is None:
        return "no finished pair: not resolved"
    if interval.half_width is None:
        return f"{interval.mean:.3g}, one seed: not resolved"
    text = f"{interval.mean:.3g} ± {interval.half_width:.2g}"
    return text if interval.sign else f"{text}: not resolved"


def _join(label: str, text: str) -> str:
    return f"{label}, {text}" if label else text


def _arm(runs: list[Run], scale: str) -> list[Run]:
    return [run for run in runs if run.scale == scale]


def _gap(none: list[Run], sqrt: list[Run]) -> Gap:
    losses = {run.seed: run.loss for run in sqrt}
    differences = [
        run.loss - other
        for run in none
        if run.loss is not None and (other := losses.get(run.seed)) is not None
    ]
    interval = t_interval(differences) if differences else None
    return Gap(none[0].label, none[0].d_k, none, sqrt, interval)


def _run(path: Path, summary: dict, settings: dict, varying: list[str]) -> Run:
    probe, metrics = summary["probe"], summary["metrics"]
    return Run(
        id=summary["id"],
        label=", ".join(f"{p.split('.')[-1]} {settings[p]}" for p in varying),
        scale=settings["model.scale"],
        d_k=settings["model.d_k"],
        lr=settings["optim.lr"],
        seed=settings["seed"],
        step=metrics["step"],
        loss=metrics["validation_loss"] if summary["status"] == "finished" else None,
        reason=summary.get("reason", ""),
        initial=probe["initial"]["mean"],
        final=probe["final"]["mean"] if probe["final"] else {},
        curve=_read_curve(path.with_name("metrics.jsonl")),
        baselines=summary["baselines"],
    )


def _order(run: Run) -> tuple:
    scales = ("none", "sqrt", "inv", "init")
    return run.label, run.d_k, run.lr, scales.index(run.scale), run.seed


def _varying(settings: list[dict[str, Any]]) -> list[str]:
    """Paths of the settings that differ between runs and have no field in `Run`."""
    return [
        path
        for path in dict.fromkeys(path for flat in settings for path in flat)
        if path not in _NOT_IN_LABEL
        and not path.startswith(("theory.", "coord."))
        and len({str(flat.get(path)) for flat in settings}) > 1
    ]


def _read_if_there(path: Path) -> dict[str, Any]:
    return read_json(path) if path.exists() else {}


def _read_curve(path: Path) -> list[tuple[int, float]]:
    lines = path.read_text().splitlines() if path.exists() else []
    points = [json.loads(line) for line in lines]
    return [(p["step"], p["loss"]) for p in points if p["loss"] is not None]
