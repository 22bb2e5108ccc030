"""A page as data, rendered as HTML, as Markdown, and for the terminal."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from html import escape

from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

Cell = str | int | float | None
NARROW = 4  # characters; see `_html_table`
LONG = 30  # characters; a longer cell may wrap


@dataclass(frozen=True)
class Table:
    """A table as data; cells are formatted when it is rendered."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    caption: str = ""  # what the columns mean
    names: int = 1  # how many columns, the first ones, say what a row is about
    folded: bool = False  # long and rarely read: closed in HTML, not printed

    def without_empty_columns(self) -> "Table":
        """The table without the columns that are empty in every row."""
        cells = zip(*self.rows, strict=True)
        keep = [i for i, column in enumerate(cells) if set(column) - {"", None}]
        names = sum(i < self.names for i in keep)
        return replace(_columns(self, keep), names=names)


@dataclass(frozen=True)
class Figure:
    """A figure, drawn as SVG on demand."""

    draw: Callable[[], str]
    caption: str


@dataclass(frozen=True)
class Finding:
    """What was found, the numbers, and in smaller type the rule that decided."""

    title: str
    text: str
    note: str = ""


Part = str | Figure | Table | Finding


@dataclass(frozen=True)
class Section:
    """A part of the page: paragraphs, figures, tables and findings, in their order."""

    id: str
    title: str
    parts: list[Part] = field(default_factory=list)


def html_page(title: str, answer: str, sections: Sequence[Section]) -> str:
    """A page that needs nothing beside it."""
    links = " ".join(f'<a href="#{s.id}">{escape(s.title)}</a>' for s in sections)
    nav = f"<nav>{links}</nav>"
    body = "\n".join(map(_html_section, sections))
    if len(sections) == 1:  # whose title is that of the page
        nav, body = "", "\n".join(map(_html, sections[0].parts))
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)}</title>
<style>{_CSS}</style>
</head>
<body>
<main>
<h1>{escape(title)}</h1>
<p class="answer">{escape(answer)}</p>
{nav}
{body}
</main>
</body>
</html>
"""


def print_section(section: Section, console: Console) -> None:
    """Print the findings and tables of a section; its paragraphs if it has no table."""
    console.print(Text(f"\n{section.title}", style="bold"))
    tables = [part for part in section.parts if isinstance(part, Table)]
    for part in section.parts:
        if isinstance(part, str) and not tables:
            console.print(Text(part))
        elif isinstance(part, Finding):
            console.print(Text(part.title, style="italic"))
            console.print(Text(part.text))
    for table in tables:
        if not table.folded:
            for piece in _fitting(table, console.width):
                console.print(_rich(piece))
            if table.caption:
                console.print(Text(table.caption, style="dim"))


def markdown(section: Section) -> str:
    """The paragraphs, findings and tables of a section, under its title."""
    return "\n".join([f"## {section.title}", "", *map(_markdown, section.parts)])


def _markdown(part: Part) -> str:
    if isinstance(part, Finding):
        return f"**{part.title}** {part.text}\n"
    if not isinstance(part, Table):
        return f"{part}\n" if isinstance(part, str) else ""
    head = [part.columns, ["---"] * len(part.columns)]
    cells = ([format_cell(x).replace("|", r"\|") for x in row] for row in part.rows)
    lines = [f"| {' | '.join(line)} |" for line in (*head, *cells)]
    return "\n".join([f"**{part.title}.** {part.caption}", "", *lines, ""])


def _html_section(section: Section) -> str:
    head = f'<section>\n<h2 id="{section.id}">{escape(section.title)}</h2>'
    return "\n".join([head, *map(_html, section.parts), "</section>"])


def _html(part: Part) -> str:
    if isinstance(part, Table):
        return _html_table(part)
    if isinstance(part, Figure):
        caption = f"<figcaption>{escape(part.caption)}</figcaption>"
        return f"<figure>{part.draw()}{caption}</figure>"
    if isinstance(part, Finding):
        text = f"\n<p>{escape(part.text)}</p>" * bool(part.text)
        return f"<h3>{escape(part.title)}</h3>{text}{_html_note(part.note)}"
    return f"<p>{escape(part)}</p>"


def _html_table(table: Table) -> str:
    """A table that scrolls sideways under its first columns, which stay in view.

    The second needs to know where the first one ends, so it stays only if that is
    narrow.
    """
    first = [table.columns[0], *(format_cell(row[0]) for row in table.rows)]
    two = table.names > 1 and max(map(len, first)) <= NARROW
    head = "".join(f"<th>{escape(column)}</th>" for column in table.columns)
    rows = "\n".join(
        f"<tr>{''.join(_html_cell(cell) for cell in row)}</tr>" for row in table.rows
    )
    box = f"""{_html_note(table.caption)}
<div class="scroll"><table{' class="two"' * two}>
<thead><tr>{head}</tr></thead>
<tbody>
{rows}
</tbody></table></div>"""
    if table.folded:
        return f"<details><summary>{escape(table.title)}</summary>{box}</details>"
    return f"<h3>{escape(table.title)}</h3>{box}"


def _html_note(text: str) -> str:
    return f'\n<p class="note">{escape(text)}</p>' * bool(text)


def _html_cell(cell: Cell) -> str:
    """Numbers keep together; long text may wrap."""
    text = format_cell(cell)
    return f"<td{' class=text' * (len(text) > LONG)}>{escape(text)}</td>"


def _rich(table: Table) -> RichTable:
    out = RichTable(title=table.title, title_justify="left", title_style="italic")
    for column in table.columns:
        out.add_column(Text(column), overflow="fold")
    for row in table.rows:
        out.add_row(*(Text(format_cell(cell)) for cell in row))
    return out


def _fitting(table: Table, width: int) -> list[Table]:
    """The table, or parts of it side by side, each as wide as a terminal at most."""
    lines = [
        table.columns,
        *([format_cell(cell) for cell in row] for row in table.rows),
    ]
    widths = [max(map(len, column)) + 3 for column in zip(*lines, strict=True)]
    first = list(range(table.names))
    parts = [first.copy()]
    for i in range(table.names, len(widths)):
        full = sum(widths[j] for j in (*parts[-1], i)) >= width
        if full and len(parts[-1]) > table.names:
            parts.append(first.copy())
        parts[-1].append(i)
    return [_columns(table, part) for part in parts]


def _columns(table: Table, chosen: Sequence[int]) -> Table:
    return replace(
        table,
        columns=[table.columns[i] for i in chosen],
        rows=[[row[i] for i in chosen] for row in table.rows],
    )


def format_cell(cell: Cell) -> str:
    """Three significant digits for a float, a dash for what is missing."""
    if cell is None:
        return "–"
    return f"{cell:#.3g}".rstrip(".") if isinstance(cell, float) else str(cell)


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
h3 { font-size: .95rem; margin: 1.75rem 0 .4rem; }
p { margin: 0 0 .9rem; max-width: 42rem; }
h3 + p { margin-bottom: .4rem; }
a { color: var(--link); }
nav { display: flex; flex-wrap: wrap; gap: .3rem 1.1rem; font-size: .9rem; }
.answer { padding: .8rem 1rem; background: var(--tint); border-radius: .4rem; }
figure { margin: 1.25rem 0; max-width: 34rem; }
figure svg { display: block; width: 100%; height: auto; }
svg text { font-family: system-ui, sans-serif !important; }
figcaption, summary, .note { color: var(--soft); font-size: .85rem; }
summary { margin-top: 1.75rem; cursor: pointer; }
.scroll { overflow-x: auto; border-bottom: 1px solid var(--line); }
.scroll + p { margin-top: 1.5rem; }
table { border-collapse: separate; border-spacing: 0; font-size: .85rem;
  line-height: 20px; min-width: 100%; font-variant-numeric: tabular-nums; }
th, td { padding: 5px .9rem 5px 0; text-align: left; vertical-align: top;
  white-space: nowrap; }
th { color: var(--soft); font-weight: 500; border-bottom: 1px solid var(--line); }
tbody tr + tr td { border-top: 1px solid var(--tint); }
td.text { white-space: normal; min-width: 9rem; overflow-wrap: anywhere; }
tr > :first-child, .two tr > :nth-child(2) { position: sticky; left: 0;
  background: var(--page); }
.two tr > :first-child { box-sizing: border-box; min-width: 3.2rem; }
.two tr > :nth-child(2) { left: 3.2rem; }
"""
