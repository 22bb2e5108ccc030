"""The figures of a sweep and of the cost, as SVG text."""

from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes

from experiments.results import Run, group, initial_mean
from experiments.svg import DOTTED, log_axes, panels

COLOURS = {"none": "#d1495b", "sqrt": "#3d84c6", "inv": "#7a9a3a", "init": "#a671bd"}
LINES = {"none": "-", "sqrt": "-", "inv": "--", "init": ":"}
COLOURS |= {"blockwise": "#d1495b", "reference": "#888888", "torch": "#7a9a3a"}
COLOURS |= {"jax.nn": "#3d84c6", "flax.nnx": "#a671bd", "jax.nn:cudnn": "#c98a2b"}
LINES |= dict.fromkeys(("flax.nnx", "reference"), "--")


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
        log_axes(axes, d_k)

    titles = {"trace": "E[tr J]", "entropy": "E[H], nats"}
    return panels("Theory against Monte Carlo", titles, draw)


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
        log_axes(axes, sorted({run.d_k for run in runs}), log_y=not share)
        if share:
            axes.set_ylim(-0.03, 1.03)

    return panels(f"Before training {label}", titles, draw)


def coord_figure(coord: dict[str, Any]) -> str:
    """Standard deviation of the logits against d_k, one panel per number of steps."""

    def draw(axes: Axes, index: str) -> None:
        for scale, curves in coord["scales"].items():
            _line(axes, scale, coord["d_k"], curves["std"][int(index)], marker="o")
        log_axes(axes, coord["d_k"])

    steps = {
        str(i): f"logit std, {step} step{'s' * (step != 1)}"
        for i, step in enumerate(coord["steps"])
    }
    return panels("Coordinate check", steps, draw, share_y=True)


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
            axes.axhline(loss, label="n-gram tables", **DOTTED)
        axes.set_ylim(0.95 * min(levels), 1.1 * max(levels))
        axes.set_xlabel("step")

    return panels("Loss, nats per byte", titles, draw, share_y=True)


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
        log_axes(axes, lengths, label="n")
        low, high = axes.get_ylim()
        axes.set_ylim(low, high * (high / low) ** 0.6)  # room for the legend
        if axes.lines:
            axes.legend(loc="upper left", fontsize=8)

    return panels(f"Cost, {settings['passes'][-1]}", titles, draw, own_legends=True)


def _line(
    axes: Axes, scale: str, x: Sequence[float], y: Sequence[float], **style: Any
) -> None:
    style = {
        "color": COLOURS[scale],
        "ls": LINES.get(scale, "-"),
        "label": scale,
    } | style
    axes.plot(x, y, **style)
