"""The report's tables of runs."""

import math
from collections.abc import Sequence
from statistics import fmean

from experiments import story
from experiments.evidence import describe
from experiments.page import Cell, Table
from experiments.results import MEASURES, Results, Run, group, loss_by_seed

GAP = (
    "Validation loss with scale none minus that with sqrt, in nats per byte: the mean "
    "over pairs of runs with the same seed (same data, same random draws), and in "
    "brackets the 95 % Student-t interval of that mean, each row for itself. Above "
    "zero, leaving the factor out costs; not resolved: the interval contains zero, or "
    "there is none. lr: learning rate."
)
BEST = (
    " The best learning rate has the least mean validation loss, on the same "
    "evaluation set; if it is the smallest or largest tried, a better one may exist."
)
FLATTERS = (
    "A diverged run has no loss, so its gap is taken over the other seeds, which "
    "flatters its arm"
)
TWINS = (
    " Runs of one seed that differ in nothing that is computed count as one, with "
    "their mean."
)


def losses(results: Results) -> Table:
    """The validation loss of every run, and those of the n-gram tables."""
    runs = results.runs
    seeds = sorted({run.seed for run in runs})
    rows: list[list[Cell]] = []
    twins = False
    for members in group(runs, "label", "d_k", "lr", "scale").values():
        known = loss_by_seed(members)
        twins = twins or len(known) < len(members)
        finished = [loss for loss in known.values() if loss is not None]
        cells = [
            ("diverged" if known[s] is None else known[s]) if s in known else None
            for s in seeds
        ]
        below = sum(loss < members[0].baselines["bigram"] for loss in finished)
        mean = fmean(finished) if finished else None
        beaten = f"{below} of {len(known)}"
        bits = mean / math.log(2) if mean is not None else None
        place = [*_place(members[0]), members[0].lr_text]
        rows.append([*place, *cells, mean, bits, beaten])
    for (label,), members in group(runs, "label").items():
        for name, loss in members[0].baselines.items():
            bits = loss / math.log(2)
            rows.append([label, "", name, "", *[""] * len(seeds), loss, bits, ""])
    tokens = results.first["config"]["evaluation"]["tokens"]
    caption = (
        f"Nats per byte, of the models on a fixed sample of at least {tokens:,} tokens "
        "of the validation split, of the n-gram tables (last rows) on all of it. mean: "
        "over seeds that did not diverge; bits: the same in bits per byte. beat "
        "bigram: how many seeds ended below the bigram table. lr: learning rate."
    )
    columns = ["setting", "d_k", "scale", "lr", *(f"seed {s}" for s in seeds)]
    columns += ["mean", "bits", "beat bigram"]
    return _table("Validation loss", columns, rows, caption + TWINS * twins)


def gaps(runs: Sequence[Run]) -> list[Table]:
    """The gaps at the best learning rates and at equal ones, if both arms ran."""
    every, best = story.gaps(runs), story.best_gaps(runs)
    several = len({run.lr for run in runs}) > 1
    tables = []
    if several and best:
        title = "Gap, each arm at its best learning rate"
        tables.append(_gap_table(title, best, GAP + BEST))
    if every:
        caption = "As above." if tables else GAP
        tables.append(_gap_table("Gap at equal learning rates", every, caption))
    return tables


def _gap_table(title: str, found: Sequence[story.Gap], caption: str) -> Table:
    rows = [
        (
            gap.label,
            gap.d_k,
            f"{gap.none[0].lr_text} / {gap.sqrt[0].lr_text}",
            describe(gap.interval),
        )
        for gap in found
    ]
    columns = ("setting", "d_k", "lr none / sqrt", "gap")
    return _table(title, columns, rows, caption)


def diverged(runs: Sequence[Run]) -> Table:
    """Which runs diverged, and why."""
    rows = [(*_place(r), r.lr_text, r.seed, r.reason, r.id) for r in runs]
    columns = ("setting", "d_k", "scale", "lr", "seed", "reason", "run")
    caption = f"{FLATTERS}; its learning rate cannot be the best."
    return _table("Diverged runs", columns, rows, caption)


def measures(
    title: str, groups: dict[tuple, list[Run]], when: str, caption: str
) -> Table:
    """One row of the probe's measures per group, averaged over its runs."""
    rows = [
        [
            *_place(runs[0]),
            runs[0].lr_text if when == "final" else None,
            *(fmean(getattr(run, when)[name] for run in runs) for name in MEASURES),
            len(runs),
        ]
        for runs in groups.values()
    ]
    columns = ("setting", "d_k", "scale", "lr", *MEASURES.values(), "runs")
    return _table(title, columns, rows, caption)


def _place(run: Run) -> tuple[Cell, ...]:
    return run.label, run.d_k, run.scale


def _table(
    title: str, columns: Sequence[str], rows: Sequence[Sequence[Cell]], caption: str
) -> Table:
    """A table about arms, without the columns that are empty in every row."""
    names = sum(column in ("setting", "d_k", "scale", "lr") for column in columns)
    return Table(title, columns, rows, caption, names).without_empty_columns()
