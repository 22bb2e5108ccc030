"""Time and peak memory of blockwise attention against its peers.

Everything is measured in one process. Before anything is timed, outputs and gradients
are compared with those of the textbook; an implementation with other values is not
timed, and neither is one that is missing or needs too much. Each says so in its row.
"""

import dataclasses
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax

from experiments import figures
from experiments.cases import Case, Inputs, case_of, tables_of
from experiments.config import to_dict
from experiments.cost_page import sections
from experiments.files import write_json, write_text
from experiments.machine import describe, load_average
from experiments.page import markdown
from experiments.peers import FAILURES, Declined, Program, build, words
from experiments.progress import Progress
from experiments.settings import Cost
from experiments.svg import svg_file
from experiments.timing import (
    Clock,
    Ready,
    clock_here,
    difference,
    slope,
    start,
    time_pair,
)

# How far the values of an implementation may be off, see `difference`.
TOLERANCE = {"float32": 1e-4, "bfloat16": 3e-2}
OURS = "blockwise"
Row = dict[str, Any]


def measure_cost(
    settings: Cost, progress: Progress, threads: str, command: str = ""
) -> dict[str, Any]:
    """Measure everything, and write cost.json, cost.md and cost.svg.

    Args:
        settings: what is measured.
        progress: where to say how far it is.
        threads: how many CPU threads there are, in words.
        command: what was typed to get here.

    Returns:
        What cost.json holds: "checks" (values against those of reference), "length",
        "head_size" and "head_count" (rows of times), "memory" (rows of programs that
        were compiled only), "slopes", "machine", "settings", and whether it is
        "finished". The file is written after every case; nothing of it is read again.

    Raises:
        ConfigError: a number of heads does not divide the width.
    """
    tables = tables_of(settings)
    directory = Path(settings.out) / settings.name
    directory.mkdir(parents=True, exist_ok=True)
    clock = clock_here(
        settings.rounds, settings.round_seconds, settings.sample_ms / 1e3
    )
    results: dict[str, Any] = {
        "command": command,
        "settings": to_dict(settings),
        "machine": describe(threads),
        "measure": clock.measure,
        "finished": False,
        "checks": [],
        **{name: [] for name in tables},
    }
    cases = [(name, *case) for name, found in tables.items() for case in found]
    cases.sort(key=lambda x: x[1].length)  # if the time runs out, for the longest ones
    end = time.monotonic() + 60 * settings.minutes
    progress.start("cost", total=len(settings.masks) + len(cases))
    for done, mask in enumerate(settings.masks, start=1):
        results["checks"] += check(mask, settings)
        progress.update(done)
    wrong = _wrong(results["checks"])
    for name, case, peers in cases:
        names = (OURS, *peers)
        if time.monotonic() > end:
            late = {"reason": f"not begun within {settings.minutes:g} minutes"}
            rows = [_row(case, x) | late for x in names]
        elif name == "memory":
            rows = [compile_only(case, x) for x in names if x != "torch"]
        else:
            rows = measure(case, names, settings, clock, wrong)
        results[name] += rows
        write_json(directory / "cost.json", results)
        done += 1
        progress.update(done, length=case.length)
    results["slopes"] = list(slopes(results))
    results["machine"]["load_average_after"] = load_average()
    results["finished"] = True
    _write(directory, results)
    progress.finish("cost  finished")
    return results


def check(mask: str, settings: Cost) -> list[Row]:
    """Compare outputs and gradients of all with those of reference in float32."""
    length = settings.check_length
    case = case_of(settings, mask, True, length, settings.heads, settings.head_dim)
    case = dataclasses.replace(case, window=min(case.window, -(-length // 4)))
    inputs = Inputs(case, settings.seed)
    with jax.default_matmul_precision("highest"):
        exact = build("reference", dataclasses.replace(case, dtype="float32"))
    want = start(exact, inputs).results
    parts = settings, settings.head_count, settings.head_size
    names = dict.fromkeys((OURS, *(peer for part in parts for peer in part.peers)))
    rows = []
    for name in names:
        row: Row = {"implementation": name, **dataclasses.asdict(case)}
        row |= {"differs": None, "tolerance": TOLERANCE[case.dtype], "reason": None}
        try:
            row["differs"] = difference(start(build(name, case), inputs).results, want)
            _refuse_other_values(row, f"reference at n={length}")
        except (Declined, *FAILURES) as error:
            row["reason"] = words(error)
        rows.append(row)
    return rows


def measure(
    case: Case,
    names: Sequence[str],
    settings: Cost,
    clock: Clock,
    wrong: dict[tuple[str, str], str],
) -> list[Row]:
    """Time a case by all; the first is what the others are compared with.

    It is compared with itself, too: the spread of that ratio is that of measuring.
    """
    inputs = Inputs(case, settings.seed)
    ours: Ready | None = None
    rows = []
    for name in names:
        row = _row(case, name) | {"differs": None, "tolerance": TOLERANCE[case.dtype]}
        try:
            program = build(name, case)
            row["temp_bytes"] = program.temp_bytes
            if reason := wrong.get((name, case.mask)):
                raise Declined(reason)
            _refuse_too_large(program, settings)
            theirs = start(program, inputs)
            _refuse_too_slow(theirs, settings)
            if name == names[0]:
                ours = theirs
            if ours is None:
                raise Declined(f"{names[0]} was not timed")
            row["differs"] = difference(theirs.results, ours.results)
            _refuse_other_values(row, names[0])
            row |= time_pair(ours, theirs, clock)
        except (Declined, *FAILURES) as error:
            row["reason"] = words(error)
        rows.append(row)
    return rows


def compile_only(case: Case, name: str) -> Row:
    """The memory that a case would need."""
    row = _row(case, name)
    try:
        row["temp_bytes"] = build(name, case).temp_bytes
    except Declined as error:
        row["reason"] = str(error)
    return row


def slopes(results: dict[str, Any]) -> Iterator[Row]:
    """How time and memory grow with the length."""
    rows = results["length"] + results["memory"]
    names = ("mask", "backward", "implementation")
    lines: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        lines.setdefault(tuple(row[name] for name in names), []).append(row)
    for key, line in lines.items():
        found = {}
        for name, column in (("time", "ms"), ("memory", "temp_bytes")):
            known = [row for row in line if row.get(column)]
            lengths = [row["length"] for row in known]
            found[name] = slope(lengths, [row[column] for row in known])
        yield dict(zip(names, key, strict=True)) | found


def _wrong(checks: Sequence[Row]) -> dict[tuple[str, str], str]:
    """Who has other values under which mask, and in which words."""
    return {
        (row["implementation"], row["mask"]): row["reason"]
        for row in checks
        if row["differs"] is not None and row["reason"]
    }


def _write(directory: Path, results: dict[str, Any]) -> None:
    """The results as data, as tables and as a figure."""
    write_json(directory / "cost.json", results)
    page = "\n".join(map(markdown, sections(results)))
    write_text(directory / "cost.md", page)
    write_text(directory / "cost.svg", svg_file(figures.cost_figure(results)))


def _row(case: Case, name: str) -> Row:
    empty = {"temp_bytes": None, "reason": None}
    return {"implementation": name, **dataclasses.asdict(case), **empty}


def _refuse_other_values(row: Row, reference: str) -> None:
    if row["differs"] > row["tolerance"]:
        raise Declined(f"differs by {row['differs']:.2g} from {reference}")


def _refuse_too_large(program: Program, settings: Cost) -> None:
    needed, limit = program.needed_bytes / 1e9, settings.memory_limit_gb
    if needed > limit:
        raise Declined(f"needs {needed:.2g} GB, over the limit of {limit:g} GB")


def _refuse_too_slow(ready: Ready, settings: Cost) -> None:
    seconds, limit = ready.seconds, settings.call_limit_s
    if seconds > limit:
        raise Declined(f"one call takes {seconds:.2g} s, over the limit of {limit:g} s")
