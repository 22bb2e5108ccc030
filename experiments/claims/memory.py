"""Whether attention needs memory that grows with the square of the length.

Programs of dense and of blockwise attention and of their derivatives are compiled at
growing lengths; how much memory they take is what the compiler plans. Times are
measured beside it, and for a TPU the compiler's plan is all there is.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

import jax
import numpy as np
from flax import nnx

from experiments.cases import Case
from experiments.claims.checks import check_ascending
from experiments.claims.claim import Answer, Claim
from experiments.claims.store import Store
from experiments.config import ConfigError
from experiments.evidence import decide, together
from experiments.page import Figure, Part, Table
from experiments.settings import Count, Name, Positive, Seed, Text
from experiments.studies.planned import (
    FORWARD,
    GRADIENT,
    HVP,
    OURS,
    Row,
    measured,
    planned,
)
from experiments.svg import Curve, curves
from experiments.timing import slope
from jattn.nnx import MultiHeadAttention

DERIVATIVES = (FORWARD, GRADIENT, HVP)
BLOCK = 512  # tokens in a block of blockwise attention, at most
LINEAR, SQUARE = 1.2, 1.7  # powers of n: at most the one, at least the other
MIB = 2**20
HERE, TPU = "this machine", "v5e"
KEPT = {
    True: "Keys are visited in blocks, and what a derivative needs of a block is "
    "computed again; nothing is kept for a pair.",
    False: "In some of these programs memory grows faster than the length.",
    None: "How memory grows is not known of all of these programs.",
}
NO_TPU = (
    "The same table for a TPU is not here: libtpu, its compiler, is not installed. It "
    "comes with pip install -e '.[tpu-aot]'."
)


@dataclass(frozen=True)
class Memory:
    """Causal self-attention of one layer at growing lengths."""

    name: Name = "memory"  # directory of the experiment, inside out
    out: Text = "runs"  # directory of all experiments
    lengths: tuple[Count, ...] = (256, 1024, 4096)  # queries, and keys, ascending
    tpu_lengths: tuple[Count, ...] = (2048, 8192)  # for a TPU; compiled and not run
    heads: Count = 1  # attention heads
    head_dim: Count = 64  # size of one
    memory_limit_gb: Positive = 0.9  # what needs more memory is not run
    rounds: Count = 3  # times that programs are timed, in turns
    seed: Seed = 0  # of the inputs


Powers = dict[tuple[str, str], float | None]
"""Of each implementation and derivative the power of n; None if it is not known."""


def measure(settings: Memory, store: Store) -> dict[str, Any]:
    """A row for each derivative, length and implementation, here and for a TPU."""
    for name in ("lengths", "tpu_lengths"):
        lengths = getattr(settings, name)
        check_ascending(name, lengths)
        if lengths[-1] < 2 * lengths[0]:
            raise ConfigError(
                f"{name} = {list(lengths)} must end with twice the first or more, to "
                "tell how memory grows"
            )
        if lengths[-2] < BLOCK:
            raise ConfigError(
                f"{name} = {list(lengths)} must have two of {BLOCK} or more: in a "
                "single block blockwise attention is dense, too"
            )
    numbers: dict[str, Any] = {"heads": settings.heads, "head_dim": settings.head_dim}
    numbers |= {x: version(x) for x in ("jax", "jaxlib")}
    timing: dict[str, Any] = dict(
        seed=settings.seed, rounds=settings.rounds, limit_gb=settings.memory_limit_gb
    )
    here = timing | {"backend": jax.default_backend()}
    work: dict[str, Any] = {HERE: (settings.lengths, here, partial(measured, **timing))}
    if find_spec("libtpu") is not None:
        there = {"libtpu": version("libtpu")}
        work[TPU] = (settings.tpu_lengths, there, partial(planned, generation=TPU))
    total = len(DERIVATIVES) * sum(len(lengths) for lengths, *_ in work.values())
    store.progress.start("programs", total=total)
    rows: dict[str, list[Row]] = {HERE: [], TPU: []}
    done = 0
    for place, (lengths, given, compute) in work.items():
        for derivative, n in itertools.product(DERIVATIVES, lengths):
            case = Case("causal", True, n, settings.heads, settings.head_dim)
            key = [derivative, n, numbers | given]
            found = store.piece(place, key, partial(compute, derivative, case))
            rows[place] += found["rows"]
            done += 1
            store.progress.update(done, length=n)
    return {"parameters": parameters(settings), "rows": rows}


def parameters(settings: Memory) -> int:
    """How many parameters a layer of this attention has, at any length."""
    width = settings.heads * settings.head_dim
    layer = nnx.eval_shape(
        lambda: MultiHeadAttention(settings.heads, width, rngs=nnx.Rngs(0))
    )
    return sum(x.size for x in jax.tree.leaves(nnx.state(layer, nnx.Param)))


def by_program(rows: list[Row]) -> dict[tuple[str, str], list[Row]]:
    """The rows of each implementation and derivative."""
    lines: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        lines.setdefault((row["implementation"], row["derivative"]), []).append(row)
    return lines


def growth(rows: list[Row], what: str) -> Powers:
    """The power of n that bytes or ms of a program grow with."""
    found = {}
    for key, line in by_program(rows).items():
        known = [row for row in line if row[what] is not None]
        found[key] = slope([x["length"] for x in known], [x[what] for x in known])
    return found


def answers(results: dict[str, Any]) -> list[Answer]:
    """Whether memory grows with the square of the length, here and on a TPU."""
    rows = results["rows"]
    here = _answers(rows[HERE], "the compiler's plan of temporary memory")
    if not rows[TPU]:
        return here
    _, there = _answers(rows[TPU], f"the plan of the compiler for a TPU {TPU}")
    claim = f"On a TPU {TPU} exact attention needs no memory for pairs of tokens."
    sentence = f"By the word of the compiler of a TPU {TPU}, which has not run it: "
    sentence += there.sentence[0].lower() + there.sentence[1:]
    return [*here, replace(there, claim=claim, sentence=sentence)]


def _answers(rows: list[Row], plan: str) -> list[Answer]:
    powers = growth(rows, "bytes")
    dense = {k: x for k, x in powers.items() if k[0] != OURS}
    tiled = {k: x for k, x in powers.items() if k[0] == OURS}
    square = [together(_each(x, lambda p: p >= SQUARE)) for x in (dense, tiled)]
    linear = _each(tiled, lambda p: p <= LINEAR)
    longest = max(row["length"] for row in rows)
    largest = ", ".join(
        f"{row['implementation']} {_mib(row)}"
        for row in rows
        if row["length"] == longest and row["derivative"] == HVP
    )
    return [
        Answer(
            claim="Attention needs memory that grows with the square of the length.",
            source="Child et al. 2019, arXiv:1904.10509, abstract",
            number=f"Dense: like n to the power {_range(dense)}; blockwise: "
            f"{_range(tiled)}. By {plan}.",
            rule=f"the power is {SQUARE:g} or more, dense and blockwise, for the "
            "output, its gradient and a Hessian-vector product",
            outcome=decide(square),
            sentence="The memory of dense attention grows with the square of the "
            "length; attention need not be dense."
            if square == [True, False]
            else "These programs do not show that dense attention needs it and "
            "blockwise attention does not.",
        ),
        Answer(
            claim="Exact attention needs no memory for pairs of tokens, nor do its "
            "derivatives.",
            source="Rabe & Staats 2021, arXiv:2112.05682; Dao et al. 2022, "
            "arXiv:2205.14135",
            number=f"Blockwise: {_powers(tiled)}. A Hessian-vector product at "
            f"n = {longest}: {largest}. By {plan}.",
            rule=f"the power is {LINEAR:g} or less for the output, its gradient and a "
            "Hessian-vector product",
            outcome=decide(linear),
            sentence=KEPT[together(linear)],
        ),
    ]


def _each(powers: Powers, rule: Callable[[float], bool]) -> list[bool | None]:
    """Whether the rule is true of each; None where the power is not known."""
    return [None if x is None else rule(x) for x in powers.values()]


def _powers(powers: Powers) -> str:
    return ", ".join(f"{k[1]} n^{x:.2f}" for k, x in powers.items() if x is not None)


def _range(powers: Powers) -> str:
    found = [x for x in powers.values() if x is not None]
    return f"{min(found):.2f} to {max(found):.2f}" if found else "not known"


def _mib(row: Row) -> str:
    return row["reason"] if row["bytes"] is None else f"{row['bytes'] / MIB:,.0f} MiB"


def parts(results: dict[str, Any]) -> list[Part]:
    """Memory against length, and the tables of each place."""
    rows = results["rows"]
    found: dict[str, dict[str, Curve]] = {x: {} for x in DERIVATIVES}
    for (name, derivative), line in by_program(rows[HERE]).items():
        known = [row for row in line if row["bytes"]]
        logs = [np.log10(row["bytes"] / MIB) for row in known]
        if logs:
            lengths = [row["length"] for row in known]
            found[derivative][name] = Curve(lengths, logs)
    figure = curves("Memory", found, x_label="n", log_x=True)
    shown: list[Part] = [
        Figure(
            lambda: figure,
            "log10 of the temporary memory in MiB, as the compiler plans it, without "
            "arguments and results. None is not shown.",
        ),
        *_tables(
            results,
            HERE,
            "MiB: temporary memory, as the compiler plans it. ms: median time of a "
            "call, on a CPU that of all threads; it is measured, and comes out "
            "otherwise each time. Parameters: of the layer; they do not grow with n.",
        ),
    ]
    if not rows[TPU]:
        return [*shown, NO_TPU]
    caption = (
        f"The word of the compiler for a TPU {TPU}, ahead of time: the most that is "
        "held at once, arguments and results included. No TPU has run it."
    )
    return [*shown, *_tables(results, TPU, caption)]


def _tables(results: dict[str, Any], place: str, caption: str) -> list[Table]:
    """Every program, and how programs grow."""
    rows = results["rows"][place]
    cells = [
        [row["derivative"], row["length"], row["implementation"]]
        + [results["parameters"], row["bytes"] and row["bytes"] / MIB, row["ms"]]
        + [row["reason"]]
        for row in rows
    ]
    powers, times = growth(rows, "bytes"), growth(rows, "ms")
    slopes = [[y, x, powers[x, y], times[x, y]] for x, y in powers]
    columns = (
        "derivative",
        "n",
        "implementation",
        "parameters",
        "MiB",
        "ms",
        "why not timed",
    )
    growing = ("derivative", "implementation", "memory", "time")
    where = "here" if place == HERE else f"on a TPU {TPU}"
    tables = [
        Table(f"Programs {where}", columns, cells, caption, 3),
        Table(f"Powers of n {where}", growing, slopes, "p of n^p, by slopes.", 2),
    ]
    return [table.without_empty_columns() for table in tables]


CLAIM = Claim(
    title="How much memory does attention need?",
    design="Causal self-attention, its gradient and a Hessian-vector product are "
    "compiled at growing lengths n: blockwise, dense as in a textbook, and as in "
    "jax.nn, which is dense too. The compiler says how much memory each program will "
    "take; the slope of its logarithm against log n is the power of n. Values are "
    "compared and times are measured beside it.",
    settings=Memory,
    measure=measure,
    answers=answers,
    parts=parts,
)
