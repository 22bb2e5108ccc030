"""SVG figures that take their font and colour from the page that shows them."""

import io
import re
from collections.abc import Callable, Mapping, Sequence
from html import escape
from itertools import pairwise
from textwrap import fill
from typing import Any, NamedTuple

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullLocator
from numpy.typing import ArrayLike

PALETTE = ("#3d84c6", "#d1495b", "#7a9a3a", "#a671bd", "#c98a2b", "#4aa3a2", "#888888")
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
DOTTED: dict[str, Any] = {"color": _INK, "lw": 1, "ls": ":", "alpha": 0.7}
_PANEL = (2.6, 2.4)  # inches
_AXIS, _CHARACTER = 140, 6.6  # points: length of the x axis of a panel, and a digit


def svg_file(svg: str) -> str:
    """A figure as a file of its own, on white."""
    names = (
        'xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink"'
    )
    style = 'style="background: #fff; font-family: sans-serif"'
    return svg.replace("<svg", f"<svg {names} {style}", 1)


def panels(
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
            axes.set_title(fill(heading, int(width / 0.085)))
        handles, labels = grid.flat[0].get_legend_handles_labels()
        legend = {} if own_legends else dict(zip(labels, handles, strict=True))
        entries = list(legend.values()), list(legend)
        if len(titles) < grid.size:  # the place of a missing panel is the legend's
            grid.flat[-1].set_axis_off()
            grid.flat[-1].legend(*entries, loc="upper left")
        elif legend:
            # Columns are as wide as the longest label; what has no room is cut off.
            column = 0.6 + 0.08 * max(map(len, legend))
            ncols = min(4, max(1, int(size[0] / column)))
            lines = -(-len(legend) // ncols)
            figure.set_size_inches(size[0], size[1] + 0.22 * (lines - 1))
            figure.legend(*entries, ncols=ncols, loc="outside upper left")
        return _svg(figure, title)


class Curve(NamedTuple):
    """Points to be joined, with the half-widths of their intervals if they have any."""

    x: Sequence[float]
    y: Sequence[float]
    error: Sequence[float] | None = None


def curves(
    title: str,
    found: Mapping[str, Mapping[str, Curve]],
    *,
    x_label: str,
    log_x: bool = False,
    log_y: bool = False,
) -> str:
    """A panel for each key of `found`, which is its heading, and a line for each label.

    A label has the same colour in every panel.
    """
    labels = list(dict.fromkeys(label for panel in found.values() for label in panel))

    def draw(axes: Axes, heading: str) -> None:
        for label, (x, y, error) in found[heading].items():
            place = labels.index(label)
            style: dict[str, Any] = {"color": PALETTE[place % len(PALETTE)]}
            style |= {"ls": ("-", "--", ":")[place // len(PALETTE) % 3]}
            if error is None:
                axes.plot(x, y, marker="o", label=label, **style)
            else:
                axes.errorbar(x, y, error, marker="o", label=label, capsize=2, **style)
        if log_x:
            sizes = {x for curve in found[heading].values() for x in curve.x}
            log_axes(axes, sorted(sizes), log_y=False)
        if log_y:
            _log_y(axes)
        axes.set_xlabel(x_label)

    return panels(title, {heading: heading for heading in found}, draw)


def bars(
    title: str,
    found: Mapping[str, tuple[float, float | None]],
    *,
    label: str,
    reference: float | None = None,
) -> str:
    """A bar for each name: value and half-width of its interval, if it has one."""

    def draw(axes: Axes, _: str) -> None:
        values = [value for value, _ in found.values()]
        errors = [0.0 if error is None else error for _, error in found.values()]
        places = range(len(found))
        axes.barh(places, values, xerr=errors, color=PALETTE[0], ecolor=_INK)
        axes.set_yticks(places, list(found))
        axes.invert_yaxis()
        axes.set_xlabel(label)
        if reference is not None:
            axes.axvline(reference, **DOTTED)

    return panels(title, {"": ""}, draw)


def heat(
    title: str, found: Mapping[str, ArrayLike], *, x_label: str, y_label: str
) -> str:
    """A panel for each matrix, whose cells are the darker the nearer they are to 1."""
    shades = LinearSegmentedColormap.from_list("", [f"{PALETTE[0]}00", PALETTE[0]])

    def draw(axes: Axes, heading: str) -> None:
        cells = np.asarray(found[heading])
        edges = (np.arange(1, size + 2) - 0.5 for size in cells.shape[::-1])
        axes.pcolormesh(*edges, cells, cmap=shades, vmin=0, vmax=1)
        axes.grid(False)
        axes.invert_yaxis()
        axes.set_aspect("equal")
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_locator(MaxNLocator(integer=True))
        axes.set_xlabel(x_label)
        axes.set_ylabel(y_label)

    return panels(title, {heading: heading for heading in found}, draw)


def log_axes(
    axes: Axes, sizes: Sequence[float], log_y: bool = True, label: str = "d_k"
) -> None:
    """Logarithmic axes, with a tick at each size, and a label where it has room."""
    axes.set_xscale("log")
    axes.set_xticks(sizes, _labels_with_room(sizes))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel(label)
    if log_y:
        _log_y(axes)


def _labels_with_room(sizes: Sequence[float]) -> list[str]:
    """A label for each size or, so that none touch, for every second, third, ..."""
    texts = [str(size) for size in sizes]
    if len(texts) < 2:
        return texts
    logs = np.log(sizes)
    places = (logs - logs[0]) / (logs[-1] - logs[0]) * _AXIS
    halves = [_CHARACTER * (len(text) + 1) / 2 for text in texts]
    for step in range(1, len(texts) + 1):
        kept = range((len(texts) - 1) % step, len(texts), step)  # with the last
        if all(
            places[i] + halves[i] <= places[j] - halves[j] for i, j in pairwise(kept)
        ):
            break
    return [text if i in kept else "" for i, text in enumerate(texts)]


def _log_y(axes: Axes) -> None:
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
