"""One page for one sweep: tables, figures and a conclusion, all from its JSON files.

Tables are built once, as data, and rendered twice: to HTML and to the terminal.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from html import escape
from pathlib import Path
from statistics import fmean

from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from experiments import evidence, figures
from experiments.evidence import Gap, Results, Run

Cell = str | int | float | None
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
ARMS = (
    "The arms differ in one thing, what becomes of the logits q·k: none leaves them, "
    "sqrt divides by sqrt(d_k), inv by d_k, and init puts 1/sqrt(d_k) into the initial "
    "W_Q and W_K instead."
)
AGREEMENT = 4  # standard errors


@dataclass(frozen=True)
class Table:
    """A table as data; cells are formatted when it is rendered."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    names: int = 1  # how many columns, the first ones, say what a row is about
    folded: bool = False  # long and rarely read: closed in HTML, not printed


@dataclass(frozen=True)
class Section:
    """A part of the report. A figure is drawn on demand and has a caption."""

    id: str
    title: str
    text: list[str] = field(default_factory=list)
    figures: list[tuple[Callable[[], str], str]] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)


def write_report(directory: Path) -> Path:
    """Write report.html, a page that needs nothing else, from a sweep's JSON files."""
    results = evidence.read_results(Path(directory))
    name = str(results.sweep.get("name") or Path(directory).resolve().name)
    path = Path(directory) / "report.html"
    path.write_text(_page(name, sections(results)), encoding="utf-8")
    return path


def print_tables(directory: Path, console: Console) -> None:
    """Print the tables of the report, and the text of a section that has none."""
    for section in sections(evidence.read_results(Path(directory))):
        console.print(Text(f"\n{section.title}", style="bold"))
        for line in [] if section.tables else section.text:
            console.print(Text(line))
        for table in section.tables:
            for part in [] if table.folded else _fitting(table, console.width):
                console.print(_rich(part))


def sections(results: Results) -> list[Section]:
    """All sections, each of which says so if its part of the sweep is missing."""
    return [
        what_was_run(results),
        theory(results),
        initialisation(results),
        coordinate_check(results),
        training(results),
        conclusion(results),
    ]


def what_was_run(results: Results) -> Section:
    """Corpus, machine, versions, command and settings."""
    sweep, first = results.sweep, results.first
    diverged = sum(run.loss is None for run in results.runs)
    facts: dict[str, Cell] = {"command": sweep.get("command", "not recorded")}
    facts |= {f"corpus {k}": v for k, v in first.get("corpus", {}).items()}
    facts |= sweep.get("machine", {})
    facts |= {
        "runs finished": len(results.runs) - diverged,
        "runs diverged": diverged,
        "runs not finished": ", ".join(results.unfinished) or "none",
    }
    tables = [Table("Facts", ("what", "value"), list(facts.items()))]
    if lists := sweep.get("sweep"):
        rows = [(path, ", ".join(map(str, values))) for path, values in lists.items()]
        tables.append(Table("Swept settings", ("setting", "values"), rows))
    if config := sweep.get("config") or first.get("config"):
        rows = [(path, str(value)) for path, value in evidence.flatten(config).items()]
        tables.append(Table("All settings", ("setting", "value"), rows, folded=True))
    text = [ARMS] if results.runs else ["No run has finished."]
    return Section("what-was-run", "What was run", text, [], tables)


def theory(results: Results) -> Section:
    """Quadrature beside Monte Carlo, and whether they agree."""
    section = Section("theory", "Theory against measurement")
    if not (rows := results.theory.get("rows")):
        section.text.append("theory.json is missing: the law was not computed.")
        return section
    table, distances = [], []
    for row in rows:
        cells: list[Cell] = [row["d_k"], row["scale"]]
        for q in (row["trace"], row["entropy"]):
            error = max(q["standard_error"], 1e-12)
            distances.append(abs(q["quadrature"] - q["monte_carlo"]) / error)
            cells += [q["quadrature"], f"{q['monte_carlo']:.4g} ± {error:.1g}"]
        table.append(cells)
    agree = sum(distance < AGREEMENT for distance in distances)
    section.text.append(
        "For random normal queries and keys the logits of a row follow an exact law, "
        "Derrida's random energy model, so the mean softmax derivative E[tr J] = "
        "1 - E[sum p²] and the mean entropy E[H] are known by quadrature. Monte Carlo "
        f"with true vectors and {results.theory['keys']} keys agrees within {AGREEMENT}"
        f" standard errors in {agree} of {len(distances)} comparisons; the largest "
        f"difference is {max(distances):.2g} standard errors."
    )
    caption = "Lines: quadrature. Points: Monte Carlo ± 2 standard errors."
    section.figures.append((partial(figures.theory_figure, results.theory), caption))
    columns = ("d_k", "scale", "E[tr J]", "sampled ± s.e.", "E[H]", "sampled ± s.e.")
    section.tables.append(Table("The mean row of a random softmax", columns, table))
    return section


def initialisation(results: Results) -> Section:
    """What the probe measured before the first step."""
    section = Section("initialisation", "At initialisation")
    if not results.runs:
        section.text.append("No run has finished: nothing was probed.")
        return section
    probe = results.first["config"]["probe"]
    section.text.append(
        "S are the logits, scaled as the arm says, and a row norm is that of one row "
        "of dL/dS: how hard the loss pulls at one query's logits. A row is dead if its "
        f"norm, times the number of rows, is below {probe['dead_below']:g}, and "
        f"saturated if its max p is above {probe['saturated_above']:g}. The gradient "
        "norms of W_Q and W_K sum over rows: they cannot replace these measures."
    )
    for (label,), runs in evidence.group(results.runs, "label").items():
        caption = "Before training" + (f", {label}." if label else ".")
        section.figures.append((partial(figures.initial_figure, runs), caption))
    groups = evidence.group(results.runs, "label", "d_k", "scale")
    section.tables.append(_measures("Before training, mean of runs", groups, "initial"))
    return section


def coordinate_check(results: Results) -> Section:
    """How the logits' spread depends on d_k, before and in the first steps."""
    section = Section("coordinate-check", "Coordinate check")
    if not (coord := results.coord):
        section.text.append("coord.json is missing: no coordinate check was made.")
        return section
    section.text.append(
        "Slope of log std of the logits against log d_k. Before training its expected "
        "value is 0.5 with scale none, 0 with sqrt and -0.5 with inv. How it changes "
        "with the steps is training's own part in the growth of the logits with d_k. "
        f"Adam, learning rate {coord['lr']:g}."
    )
    caption = "A flat line means that the logits do not depend on d_k."
    section.figures.append((partial(figures.coord_figure, coord), caption))
    columns = ["scale", *(f"step {step}" for step in coord["steps"])]
    rows = [[scale, *curves["slope"]] for scale, curves in coord["scales"].items()]
    section.tables.append(Table("Slopes", columns, rows))
    return section


def training(results: Results) -> Section:
    """Losses, baselines, paired gaps, and the probe after training."""
    section = Section("training", "Training")
    if not results.runs:
        section.text.append("No run has finished: there is nothing to compare.")
        return section
    section.text.append(_fitted_on(results))
    shown = [
        run
        for arm in evidence.group(results.runs, "label", "d_k", "scale").values()
        for run in evidence.best_of(arm) or arm
    ]
    caption = (
        "Lines: training loss, each arm at its best learning rate. Points: final "
        "validation loss. Dotted, from the top: unigram, bigram and trigram tables."
    )
    section.figures.append((partial(figures.training_figure, shown), caption))
    section.tables.append(_losses(results.runs))
    several = len({run.lr for run in results.runs}) > 1
    every, best = evidence.gaps(results.runs), evidence.best_gaps(results.runs)
    if several and best:
        section.tables.append(_gaps("Gap, each arm at its best learning rate", best))
    if every:
        section.tables.append(_gaps("Gap at equal learning rates", every))
    if every or best:
        section.text.append(
            "A gap is the validation loss without the factor minus that with it, paired"
            " by seed: positive means that leaving it out costs. Mean ± half-width of "
            "the 95 % Student-t interval, each for its row alone. A best learning rate "
            "is the one of least mean validation loss, on the same validation set; at "
            "the edge of those tried, it may not be the best there is."
        )
    else:
        section.text.append("Only one arm has runs: there is no gap to measure.")
    if finished := [run for run in results.runs if run.final]:
        groups = evidence.group(finished, "label", "d_k", "lr", "scale")
        table = _measures("After training, mean of runs", groups, "final")
        section.tables.append(table)
    if diverged := [run for run in results.runs if run.loss is None]:
        rows = [(*_place(r), r.lr_text, r.seed, r.reason, r.id) for r in diverged]
        columns = ("setting", "d_k", "scale", "lr", "seed", "reason", "run")
        section.tables.append(_table("Diverged runs", columns, rows))
        section.text.append(
            "A diverged run has no loss, so its gap is taken over the other seeds, "
            "which flatters its arm; its learning rate cannot be the best."
        )
    return section


def conclusion(results: Results) -> Section:
    """The verdicts, and why weight gradients may grow while rows die."""
    found = evidence.verdicts(results)
    why = evidence.paradox(results.runs)
    text = [
        _answer(found),
        *(f"{v.claim}: {v.outcome}. {v.numbers} Rule: {v.rule}." for v in found),
        evidence.OUTCOME_RULE,
        *([why] if why else []),
        "These are small models on one corpus and a short budget; the verdicts are "
        "about them.",
    ]
    rows = [(verdict.claim, verdict.outcome) for verdict in found]
    table = Table("In short", ("claim", "outcome"), rows)
    return Section("conclusion", "Conclusion", text, [], [table])


def _answer(found: list[evidence.Verdict]) -> str:
    outcomes = [verdict.outcome for verdict in found]
    counts = Counter(outcomes).items()
    return (
        "“Without 1/sqrt(d_k) the softmax saturates, gradients vanish and training "
        f"suffers”: {evidence.combine(outcomes)}. Of its {len(found)} steps: "
        f"{', '.join(f'{count} × {outcome}' for outcome, count in counts)}."
    )


def _fitted_on(results: Results) -> str:
    config, size = results.first["config"], results.first["corpus"]["bytes"]
    table = size * (1 - config["data"]["validation_fraction"])
    steps = config["optim"]["steps"]
    seen = steps * config["data"]["batch"] * config["data"]["context"]
    return (
        "Losses are in nats per byte on one fixed validation set. The n-gram tables "
        f"were fitted on {table:,.0f} bytes; {steps} steps of training read {seen:,}."
    )


def _place(run: Run) -> tuple[Cell, ...]:
    return run.label, run.d_k, run.scale


def _losses(runs: Sequence[Run]) -> Table:
    seeds = sorted({run.seed for run in runs})
    rows: list[list[Cell]] = []
    for members in evidence.group(runs, "label", "d_k", "lr", "scale").values():
        by_seed = {run.seed: run.loss for run in members}
        losses = [loss for loss in by_seed.values() if loss is not None]
        cells = [
            ("diverged" if by_seed[s] is None else by_seed[s]) if s in by_seed else None
            for s in seeds
        ]
        mean = fmean(losses) if losses else None
        rows.append([*_place(members[0]), members[0].lr_text, *cells, mean])
    for (label,), members in evidence.group(runs, "label").items():
        for name, loss in members[0].baselines.items():
            rows.append([label, "", name, "", *[""] * len(seeds), loss])
    columns = ["setting", "d_k", "scale", "lr", *(f"seed {s}" for s in seeds), "mean"]
    return _table("Validation loss", columns, rows)


def _gaps(title: str, found: list[Gap]) -> Table:
    rows = [
        (
            gap.label,
            gap.d_k,
            gap.none[0].lr_text,
            gap.sqrt[0].lr_text,
            gap.interval.pairs if gap.interval else 0,
            evidence.describe(gap.interval),
        )
        for gap in found
    ]
    columns = ("setting", "d_k", "lr none", "lr sqrt", "pairs", "gap none - sqrt")
    return _table(title, columns, rows)


def _measures(title: str, groups: dict[tuple, list[Run]], when: str) -> Table:
    """One row of the probe's measures per group, averaged over its runs."""
    rows = [
        [
            *_place(runs[0]),
            runs[0].lr_text if when == "final" else None,
            *(
                fmean(getattr(run, when)[measure] for run in runs)
                for measure in MEASURES
            ),
            len(runs),
        ]
        for runs in groups.values()
    ]
    columns = ("setting", "d_k", "scale", "lr", *MEASURES.values(), "runs")
    return _table(title, columns, rows)


def _table(title: str, columns: Sequence[str], rows: Sequence[Sequence[Cell]]) -> Table:
    """A table without the columns that are empty in every row."""
    keep = [
        i for i in range(len(columns)) if any(row[i] not in ("", None) for row in rows)
    ]
    names = sum(columns[i] in ("setting", "d_k", "scale", "lr") for i in keep)
    kept = [[row[i] for i in keep] for row in rows]
    return Table(title, [columns[i] for i in keep], kept, names)


def _format(cell: Cell) -> str:
    """Three significant digits for a float, a dash for what is missing."""
    if cell is None:
        return "–"
    return f"{cell:#.3g}".rstrip(".") if isinstance(cell, float) else str(cell)


def _fitting(table: Table, width: int) -> list[Table]:
    """The table, or parts of it side by side, each as wide as a terminal at most."""
    lines = [table.columns, *([_format(cell) for cell in row] for row in table.rows)]
    widths = [max(map(len, column)) + 3 for column in zip(*lines, strict=True)]
    first = list(range(table.names))
    parts = [first.copy()]
    for i in range(table.names, len(widths)):
        if (
            len(parts[-1]) > table.names
            and sum(widths[j] for j in (*parts[-1], i)) >= width
        ):
            parts.append(first.copy())
        parts[-1].append(i)
    return [
        replace(
            table,
            columns=[table.columns[i] for i in part],
            rows=[[row[i] for i in part] for row in table.rows],
        )
        for part in parts
    ]


def _rich(table: Table) -> RichTable:
    out = RichTable(title=table.title, title_justify="left", title_style="italic")
    for column in table.columns:
        out.add_column(Text(column), overflow="fold")
    for row in table.rows:
        out.add_row(*(Text(_format(cell)) for cell in row))
    return out


def _page(name: str, parts: Sequence[Section]) -> str:
    title = escape(f"{name}: does attention need 1/sqrt(d_k)?")
    links = " ".join(f'<a href="#{s.id}">{escape(s.title)}</a>' for s in parts)
    body = "\n".join(_html_section(section) for section in parts)
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>{_CSS}</style>
</head>
<body>
<main>
<h1>{title}</h1>
<p class="answer">{escape(parts[-1].text[0])}</p>
<nav>{links}</nav>
{body}
</main>
</body>
</html>
"""


def _html_section(section: Section) -> str:
    parts = [f'<section>\n<h2 id="{section.id}">{escape(section.title)}</h2>']
    parts += [f"<p>{escape(line)}</p>" for line in section.text]
    parts += [
        f"<figure>{draw()}<figcaption>{escape(caption)}</figcaption></figure>"
        for draw, caption in section.figures
    ]
    parts += [_html_table(table) for table in section.tables]
    return "\n".join([*parts, "</section>"])


def _html_table(table: Table) -> str:
    head = "".join(f"<th>{escape(column)}</th>" for column in table.columns)
    rows = "\n".join(
        f"<tr>{''.join(_html_cell(cell) for cell in row)}</tr>" for row in table.rows
    )
    box = f"""<div class="scroll"><table><thead><tr>{head}</tr></thead>
<tbody>
{rows}
</tbody></table></div>"""
    if table.folded:
        return f"<details><summary>{escape(table.title)}</summary>{box}</details>"
    return f"<h3>{escape(table.title)}</h3>\n{box}"


def _html_cell(cell: Cell) -> str:
    """Numbers keep together; long text may wrap."""
    text = _format(cell)
    return f"<td{' class=text' * (len(text) > 40)}>{escape(text)}</td>"


_CSS = """
:root { color-scheme: light dark; --ink: #1d2327; --soft: #5b666e; --line: #dfe3e6;
  --page: #fff; --tint: #f4f6f7; --link: #2465a0; }
@media (prefers-color-scheme: dark) { :root { --ink: #dfe4e7; --soft: #97a3ab;
  --line: #333b41; --page: #14181b; --tint: #1c2226; --link: #7fb4e6; } }
body { margin: 0; background: var(--page); color: var(--ink);
  font: 1rem/1.55 system-ui, sans-serif; }
main { max-width: 46rem; margin: 0 auto; padding: 1.5rem 1rem 4rem; }
h1 { font-size: 1.6rem; line-height: 1.25; margin: 0 0 1rem; }
h2 { font-size: 1.25rem; margin: 3rem 0 .75rem; padding-top: 1rem;
  border-top: 1px solid var(--line); }
h3 { font-size: .95rem; margin: 1.75rem 0 .5rem; }
p { margin: 0 0 .9rem; max-width: 42rem; }
a { color: var(--link); }
nav { display: flex; flex-wrap: wrap; gap: .3rem 1.1rem; font-size: .9rem; }
.answer { padding: .8rem 1rem; background: var(--tint); border-radius: .4rem; }
figure { margin: 1.25rem 0; max-width: 34rem; }
figure svg { display: block; width: 100%; height: auto; }
svg text { font-family: system-ui, sans-serif !important; }
figcaption, summary { color: var(--soft); font-size: .85rem; }
summary { margin-top: 1.75rem; cursor: pointer; }
.scroll { overflow-x: auto; border-bottom: 1px solid var(--line); }
table { border-collapse: collapse; font-size: .85rem; min-width: 100%;
  font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .9rem .3rem 0; text-align: left; vertical-align: top;
  white-space: nowrap; }
th { color: var(--soft); font-weight: 500; border-bottom: 1px solid var(--line); }
tbody tr + tr td { border-top: 1px solid var(--tint); }
td.text { white-space: normal; min-width: 13rem; overflow-wrap: anywhere; }
"""
