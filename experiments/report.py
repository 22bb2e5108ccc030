"""One page for one sweep: tables, figures and a conclusion, all from its JSON files."""

from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from experiments import figures, story, tables
from experiments.evidence import OUTCOME_RULE, plus_minus
from experiments.files import write_text
from experiments.page import (
    Cell,
    Figure,
    Finding,
    Part,
    Section,
    Table,
    html_page,
    print_section,
)
from experiments.results import (
    Results,
    Run,
    best_of,
    group,
    read_results,
)
from experiments.runs import flatten

SCALES = (
    "The arms of the experiment differ in what becomes of the logits q·k, their scale: "
    "none leaves them as they are, sqrt divides them by sqrt(d_k), inv by d_k, and "
    "init leaves them but divides the initial logits by sqrt(d_k), through the initial "
    "weights W_Q and W_K. d_k is the size of a query or key of one head; the model's "
    "width and the size of a value do not change with it."
)
LIMITS = (
    "This is about small models, one text and a short budget. The thresholds of the "
    "rules are a choice, and no interval is corrected for looking at several."
)
PARADOX = "Why the gradient norms of W_Q and W_K grow while the typical row dies"
ABOUT_THE_FACTOR = ("theory", "coordinate-check", "conclusion")
ONE_ARM = "Only one arm has runs: there is no gap to measure."
AGREEMENT = 4  # standard errors


def write_report(directory: Path, *runs: Path) -> Path:
    """Write report.html, a page that needs nothing else, from JSON files.

    Args:
        directory: where to write it.
        *runs: where to read: runs, or directories of runs; default the directory.
    """
    results = read_results(*(runs or [directory]))
    names = (path.resolve().name for path in runs or [directory])
    name = str(results.sweep.get("name") or ", ".join(names))
    path, title, answer = directory / "report.html", name, _ended(results)
    if results.is_about_the_factor:
        title = f"{name}: does attention need 1/sqrt(d_k)?"
        answer = _answer(story.verdicts(results))
    write_text(path, html_page(title, answer, sections(results)))
    return path


def print_tables(console: Console, *runs: Path) -> None:
    """Print the tables of the report, and the text of a section that has none."""
    for section in sections(read_results(*runs)):
        print_section(section, console)


def sections(results: Results) -> list[Section]:
    """All sections, each of which says so if its part of the sweep is missing.

    Runs that cannot tell what the factor 1/sqrt(d_k) does have none about it.
    """
    found = [
        Section("what-was-run", "What was run", what_was_run(results)),
        Section("theory", "Theory against simulation", theory(results)),
        Section("initialisation", "Before training", initialisation(results)),
        Section("coordinate-check", "Coordinate check", coordinate_check(results)),
        Section("training", "Training", training(results)),
        Section("conclusion", "Conclusion", conclusion(results)),
    ]
    left_out = () if results.is_about_the_factor else ABOUT_THE_FACTOR
    return [section for section in found if section.id not in left_out]


def what_was_run(results: Results) -> list[Part]:
    """Corpus, machine, versions, command and settings."""
    sweep, first = results.sweep, results.first
    diverged = sum(run.loss is None for run in results.runs)
    facts: dict[str, Cell] = {"command": sweep.get("command") or "not recorded"}
    facts |= _texts(results)
    facts |= {k.replace("_", " "): v for k, v in sweep.get("machine", {}).items()}
    facts |= {
        "runs finished": len(results.runs) - diverged,
        "runs diverged": diverged,
        "runs not finished": ", ".join(results.unfinished) or "none",
    }
    parts: list[Part] = [] if results.runs else ["No run has finished."]
    if results.runs and len(results.scales) > 1:
        parts.append(SCALES)
    parts.append(Table("Facts", ("what", "value"), list(facts.items())))
    if lists := sweep.get("sweep"):
        rows = [(path, ", ".join(map(str, values))) for path, values in lists.items()]
        caption = "Each combination of these values is one run."
        parts.append(Table("Swept settings", ("setting", "values"), rows, caption))
    if config := sweep.get("config") or first.get("config"):
        rows = [(path, str(value)) for path, value in flatten(config).items()]
        of_first = "Of the first run." * (len(results.known) > 1)
        caption = "Of all runs, where they were not swept." if lists else of_first
        columns = ("setting", "value")
        parts.append(Table("All settings", columns, rows, caption, folded=True))
    return parts


def theory(results: Results) -> list[Part]:
    """Quadrature beside Monte Carlo, and whether they agree."""
    if not (rows := results.theory.get("rows")):
        return ["theory.json is missing: the law was not computed."]
    table, distances = [], []
    for row in rows:
        cells: list[Cell] = [row["d_k"], row["scale"]]
        for q in (row["trace"], row["entropy"]):
            error = max(q["standard_error"], 1e-12)
            distances.append(abs(q["quadrature"] - q["monte_carlo"]) / error)
            cells += [q["quadrature"], plus_minus(q["monte_carlo"], error)]
        table.append(cells)
    agree = sum(distance < AGREEMENT for distance in distances)
    keys = results.theory["keys"]
    text = (
        "If the entries of queries and keys are independent standard normal numbers, "
        "the logits of a row are independent normal numbers given the query, and the "
        "mean derivative and the mean entropy of their softmax are integrals that can "
        "be computed (Derrida's random energy model). Simulation agrees with them "
        f"within {AGREEMENT} standard errors in {agree} of {len(distances)} "
        f"comparisons; the largest difference is {max(distances):.2g} standard errors."
    )
    caption = (
        f"Means over rows of {keys} keys. tr J = 1 - sum p² is the trace of the "
        "derivative of the weights p by the logits, H the entropy of p in nats (at "
        f"most ln {keys}). Each integral is followed by the mean of a simulation ± its "
        "standard error."
    )
    draw = partial(figures.theory_figure, results.theory)
    columns = ("d_k", "scale", "E[tr J]", "simulated", "E[H]", "simulated")
    return [
        text,
        Figure(draw, "Lines: integrals. Points: simulation ± 2 standard errors."),
        Table("The mean row of a random softmax", columns, table, caption, names=2),
    ]


def initialisation(results: Results) -> list[Part]:
    """What the probe measured before the first step."""
    if not results.runs:
        return ["No run has finished: nothing was probed."]
    parts: list[Part] = [
        "A row is what one query sees: its logits S, scaled, and their softmax p. How "
        "hard the loss L pulls at the logits of a row is the norm of its part of "
        "dL/dS. The gradient norms of W_Q and W_K sum over all rows, so they cannot "
        "tell whether many rows learn a little or few rows learn a lot."
    ]
    for (label,), runs in group(results.runs, "label").items():
        caption = "Means over runs, before training" + (f", {label}." if label else ".")
        parts.append(Figure(partial(figures.initial_figure, runs), caption))
    probe = results.first["config"]["probe"]
    caption = (
        "Means over heads, layers and runs, of the rows with two keys or more. row "
        "norm: of dL/dS, times the number of rows; dead rows: the share whose row norm "
        f"is below {probe['dead_below']:g}; entropy / ln n: of p, over its largest "
        "value with n keys; max p: the largest weight; saturated rows: the share whose "
        f"max p is above {probe['saturated_above']:g}; 1 - sum p²: the trace of dp/dS; "
        "logit std: within a row; logit max: the largest absolute logit; W_Q and W_K "
        "gradient: norm of the gradient of L by the weights of one head."
    )
    groups = group(results.runs, "label", "d_k", "scale")
    return [
        *parts,
        tables.measures("Attention before training", groups, "initial", caption),
    ]


def coordinate_check(results: Results) -> list[Part]:
    """How the logits' spread depends on d_k, before and in the first steps."""
    if not (coord := results.coord):
        return ["coord.json is missing: no coordinate check was made."]
    text = (
        "How does the spread of the logits grow with d_k? Where it grows like a power "
        "of d_k, the slope of log std against log d_k is that power. Before training "
        "theory expects 0.5 with scale none, 0 with sqrt and init, and -0.5 with inv; "
        "how it changes in the first steps is training's own part."
    )
    caption = "Mean std of the logits within a row. Flat: it does not depend on d_k."
    columns = ["scale", *(f"step {step}" for step in coord["steps"])]
    rows = [[scale, *curves["slope"]] for scale, curves in coord["scales"].items()]
    columns_mean = (
        "Least-squares slope of log std against log d_k after so many steps of Adam at "
        f"the constant learning rate {coord['lr']:g}; step 0 is before training."
    )
    return [
        text,
        Figure(partial(figures.coord_figure, coord), caption),
        Table("Slopes", columns, rows, columns_mean),
    ]


def training(results: Results) -> list[Part]:
    """Losses, baselines, paired gaps, and the probe after training."""
    runs = results.runs
    if not runs:
        return ["No run has finished: there is nothing to compare."]
    arms = group(runs, "label", "d_k", "scale").values()
    caption = (
        "Lines: training loss, of single batches, each arm at its best learning rate. "
        "Points: final validation loss. Dotted: n-gram tables, from the top unigram, "
        "bigram and trigram."
    )
    diverged = [run for run in runs if run.loss is None]
    shown = [run for arm in arms for run in best_of(arm) or arm]
    return [
        *_bytes(runs),
        Figure(partial(figures.training_figure, shown), caption),
        tables.losses(results),
        *(tables.gaps(runs) or (ONE_ARM,) * results.is_about_the_factor),
        *_after(results),
        *([tables.diverged(diverged)] if diverged else []),
    ]


def conclusion(results: Results) -> list[Part]:
    """The verdicts, and why weight gradients may grow while rows die."""
    found = story.verdicts(results)
    rows = [(verdict.claim, verdict.outcome) for verdict in found]
    why = story.paradox(results.runs)
    return [
        Table("In short", ("claim", "outcome"), rows, _answer(found)),
        *(
            Finding(f"{v.claim}: {v.outcome}", v.numbers, f"Rule: {v.rule}.")
            for v in found
        ),
        *([Finding(PARADOX, why)] if why else []),
        Finding(
            "How to read the outcomes",
            f"{OUTCOME_RULE} {story.STORY_RULE} {LIMITS}",
        ),
    ]


def _answer(found: list[story.Verdict]) -> str:
    outcomes = [verdict.outcome for verdict in found]
    counts = Counter(outcomes).items()
    return (
        "“Without 1/sqrt(d_k) the softmax saturates, gradients vanish and training "
        f"suffers”: {story.combine(outcomes)}. Of its {len(found)} steps: "
        f"{', '.join(f'{count} × {outcome}' for outcome, count in counts)}."
    )


def _ended(results: Results) -> str:
    """How many runs have ended, and how."""
    diverged = sum(run.loss is None for run in results.runs)
    return (
        f"Runs finished: {len(results.runs) - diverged}; diverged: {diverged}; not "
        f"finished: {len(results.unfinished)}."
    )


def _texts(results: Results) -> dict[str, Cell]:
    """What is known of each text that a run has seen."""
    texts: dict[str, dict[str, Any]] = {}
    for run in results.known:
        texts.setdefault(run["corpus"]["sha256"], run["corpus"])
    kinds = dict.fromkeys(kind for text in texts.values() for kind in text)
    return {
        f"text, {kind}": ", ".join(str(x.get(kind, "–")) for x in texts.values())
        for kind in kinds
    }


def _bytes(runs: Sequence[Run]) -> list[Part]:
    """How much text the n-gram tables and the models have seen."""
    return [
        f"{f'With {label}, the' if label else 'The'} n-gram tables were fitted on the "
        f"whole training split, about {fitted:,} bytes; training reads {read:,} "
        "(steps × batch × context), so the tables know "
        f"{fitted / read:.2g} times as much text."
        for label, fitted, read in group(runs, "label", "bytes_fitted", "bytes_read")
    ]


def _after(results: Results) -> list[Part]:
    """The probe after training."""
    if not (finished := [run for run in results.runs if run.final]):
        return []
    groups = group(finished, "label", "d_k", "lr", "scale")
    caption = "Columns as in “Attention before training”; lr: learning rate."
    table = tables.measures("Attention after training", groups, "final", caption)
    told = story.typical_rows(results.runs) if results.is_about_the_factor else []
    return [*told, table]
