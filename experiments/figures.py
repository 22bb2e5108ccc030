"""The figures, as SVG text that takes its font and colour from the page."""

import io
import re
from collections.abc import Callable, Sequence
from html import escape
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullLocator

from experiments.results import Run, group, initial_mean

COLOURS = {"none": "#d1495b", "sqrt": "#3d84c6", "inv": "#7a9a3a", "init": "#a671bd"}
LINES = {"none": "-", "sqrt": "-", "inv": "--", "init": ":"}
COLOURS |= {"blockwise": "#d1495b", "reference": "#888888", "torch": "#7a9a3a"}
COLOURS |= {"jax.nn": "#3d84c6", "flax.nnx": "#a671bd", "jax.nn:cudnn": "#c98a2b"}
LINES |= dict.fromkeys(("flax.nnx", "reference"), "--")
_INK = "#010203"  # stands for the page's text colour, see `_svg`
_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "text.parse_math": False,  # labels may hold a user's path
    "font.size": 11,
    "axes.titlesize": 11,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": _INK,
    "grid.alpha": 0.12,
    "axes.edgecolor": _INK,
    "axes.labelcolor": _INK,
    "axes.titlecolor": _INK,
    "text.color": _INK,
    "xtick.color": _INK,
    "ytick.color": _INK,
    "legend.frameon": False,
    "lines.linewidth": 1.6,
    "lines.markersize": 4,
}
_DOTTED: dict[str, Any] = {"color": _INK, "lw": 1, "ls": ":", "alpha": 0.7}
_PANEL = (2.6, 2.4)  # inches


def theory_figure(theory: dict[str, Any]) -> str:
    """E[tr J] and E[H] against d_k: quadrature as lines, Monte Carlo as points."""

    def draw(axes: Axes, quantity: str) -> None:
        for scale in ("none", "sqrt"):
            rows = [row for row in theory["rows"] if row["scale"] == scale]
            d_k = [row["d_k"] for row in rows]
            cells = [row[quantity] for row in rows]
            _line(axes, scale, d_k, [c["quadrature"] for c in cells])
            mean = [c["monte_carlo"] for c in cells]
            error = [2 * c["standard_error"] for c in cells]
            axes.errorbar(d_k, mean, error, fmt="o", color=COLOURS[scale])
        _log_axes(axes, d_k)

    titles = {"trace": "E[tr J]", "entropy": "E[H], nats"}
    return _panels("Theory against Monte Carlo", titles, draw)


def initial_figure(runs: Sequence[Run]) -> str:
    """Row norms and weight-gradient norms before training, against d_k."""
    label = runs[0].label
    titles = {
        "row_norm_median": "median row norm of dL/dS",
        "dead_share": "share of dead rows",
        "wq_gradient_norm": "gradient norm of W_Q",
        "wk_gradient_norm": "gradient norm of W_K",
    }

    def draw(axes: Axes, measure: str) -> None:
        for scale in dict.fromkeys(run.scale for run in runs):
            values = initial_mean(runs, label, scale, measure)
            _line(axes, scale, [*values], [*values.values()], marker="o")
        share = measure == "dead_share"
        _log_axes(axes, sorted({run.d_k for run in runs}), log_y=not share)
        if share:
            axes.set_ylim(-0.03, 1.03)

    return _panels(f"Before training {label}", titles, draw)


def coord_figure(coord: dict[str, Any]) -> str:
    """Standard deviation of the logits against d_k, one panel per number of steps."""

    def draw(axes: Axes, index: str) -> None:
        for scale, curves in coord["scales"].items():
            _line(axes, scale, coord["d_k"], curves["std"][int(index)], marker="o")
        _log_axes(axes, coord["d_k"])

    steps = {
        str(i): f"logit std, {step} step{'s' * (step != 1)}"
        for i, step in enumerate(coord["steps"])
    }
    return _panels("Coordinate check", steps, draw, share_y=True)


def training_figure(runs: Sequence[Run]) -> str:
    """Training loss of every given run, its validation loss, and the n-gram tables."""
    groups = group(runs, "label", "d_k")
    titles = {
        str(i): ", ".join(filter(None, [label, f"d_k {d_k}"]))
        for i, (label, d_k) in enumerate(groups)
    }
    members = list(groups.values())
    finals = [run.loss for run in runs if run.loss is not None]
    levels = finals + [loss for run in runs for loss in run.baselines.values()]

    def draw(axes: Axes, index: str) -> None:
        for run in members[int(index)]:
            steps = [step for step, _ in run.curve]
            losses = [loss for _, loss in run.curve]
            _line(axes, run.scale, steps, losses, lw=1)
            if run.loss is not None:
                axes.plot(run.step, run.loss, "o", color=COLOURS[run.scale])
        for loss in members[int(index)][0].baselines.values():
            axes.axhline(loss, label="n-gram tables", **_DOTTED)
        axes.set_ylim(0.95 * min(levels), 1.1 * max(levels))
        axes.set_xlabel("step")

    return _panels("Loss, nats per byte", titles, draw, share_y=True)


def cost_figure(cost: dict[str, Any]) -> str:
    """Time and memory against the length, for each mask; slopes in the legends."""
    settings, rows = cost["settings"], cost["length"] + cost["memory"]
    backward = settings["passes"][-1] != "forward"
    kinds = {"ms": "time", "temp_bytes": "memory"}
    titles = {
        f"{mask} {column}": f"{mask}: {words}"
        for mask in settings["masks"]
        for column, words in (("ms", "ms"), ("temp_bytes", "temporary MB"))
    }

    def draw(axes: Axes, name: str) -> None:
        mask, column = name.split()
        for line in cost["slopes"]:
            who, slope = line["implementation"], line[kinds[column]]
            points = {
                row["length"]: row[column] / (1 if column == "ms" else 1e6)
                for row in rows
                if (row["mask"], row["backward"]) == (mask, backward)
                and row["implementation"] == who
                and row.get(column)
            }
            if points and (line["mask"], line["backward"]) == (mask, backward):
                label = who if slope is None else f"{who}  n^{slope:.2f}"
                _line(axes, who, [*points], [*points.values()], marker="o", label=label)
        lengths = sorted({row["length"] for row in rows if row.get(column)})
        _log_axes(axes, lengths, label="n")
        low, high = axes.get_ylim()
        axes.set_ylim(low, high * (high / low) ** 0.6)  # room for the legend
        if axes.lines:
            axes.legend(loc="upper left", fontsize=8)

    return _panels(f"Cost, {settings['passes'][-1]}", titles, draw, own_legends=True)


def svg_file(svg: str) -> str:
    """A figure as a file of its own, on white."""
    names = (
        'xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink"'
    )
    style = 'style="background: #fff; font-family: sans-serif"'
    return svg.replace("<svg", f"<svg {names} {style}", 1)


def _panels(
    title: str,
    titles: dict[str, str],
    draw: Callable[[Axes, str], None],
    share_y: bool = False,
    own_legends: bool = False,
) -> str:
    """One figure with a panel per entry of `titles`, two abreast, and a legend."""
    columns = min(2, len(titles))
    rows = -(-len(titles) // columns)
    with matplotlib.rc_context({**_STYLE, "svg.hashsalt": title}):
        width, height = (1.4 * x if own_legends else x for x in _PANEL)
        size = (2 * width, rows * height + 0.3)
        figure = Figure(figsize=size, layout="constrained")
        grid = figure.subplots(rows, columns, squeeze=False, sharey=share_y)
        for axes, (name, heading) in zip(grid.flat, titles.items(), strict=False):
            draw(axes, name)
            axes.set_title(heading)
        handles, labels = grid.flat[0].get_legend_handles_labels()
        legend = {} if own_legends else dict(zip(labels, handles, strict=True))
        entries = list(legend.values()), list(legend)
        if len(titles) < grid.size:  # the place of a missing panel is the legend's
            grid.flat[-1].set_axis_off()
            grid.flat[-1].legend(*entries, loc="upper left")
        elif legend:
            figure.legend(*entries, ncols=4, loc="outside upper left")
        return _svg(figure, title)


def _line(
    axes: Axes, scale: str, x: Sequence[float], y: Sequence[float], **style: Any
) -> None:
    style = {
        "color": COLOURS[scale],
        "ls": LINES.get(scale, "-"),
        "label": scale,
    } | style
    axes.plot(x, y, **style)


def _log_axes(
    axes: Axes, sizes: Sequence[int], log_y: bool = True, label: str = "d_k"
) -> None:
    axes.set_xscale("log")
    axes.set_xticks(sizes, [str(d) for d in sizes])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel(label)
    if log_y:
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.yaxis.set_minor_formatter(_minor_labels(axes))


def _minor_labels(axes: Axes) -> FuncFormatter:
    """Label 2 and 5 between the powers of ten where an axis spans less than two."""

    def text(value: float, _: int) -> str:
        low, high = axes.get_ylim()
        wanted = f"{value:.0e}"[0] in "25" and high < 100 * low
        return f"{value:g}" if wanted else ""

    return FuncFormatter(text)


def _svg(figure: Figure, title: str) -> str:
    """The figure as an <svg> element to be put into a page."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", transparent=True)
    text = buffer.getvalue()
    text = text[text.index("<svg") :].replace(_INK, "currentColor")
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    # In HTML the namespaces are implied; without a size the page decides the width.
    text = re.sub(r' xmlns(:\w+)?="[^"]*"', "", text)
    text = re.sub(r' (width|height)="[\d.]+pt"', "", text, count=2)
    text = re.sub(r' id="[\w.]+_\d+"', "", text)  # not unique in a page of figures
    return text.replace("<svg", f'<svg role="img" aria-label="{escape(title)}"', 1)
