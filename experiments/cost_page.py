"""The tables of what attention costs."""

from collections.abc import Callable, Sequence
from typing import Any

from experiments.page import Cell, Part, Section, Table, format_cell

Row = dict[str, Any]
PASS = {False: "forward", True: "forward + backward"}
KEYS: dict[str, Callable[[Row], Cell]] = {
    "mask": lambda row: row["mask"],
    "pass": lambda row: PASS[row["backward"]],
    "n": lambda row: row["length"],
    "N": lambda row: row["heads"],
    "H": lambda row: row["head_dim"],
}
RATIO = (
    "blockwise: the median time of a call. Others: their time over that of blockwise, "
    "the median of the rounds of a pair and in brackets the least and the largest; "
    "above 1 blockwise is faster. noise: blockwise over blockwise. –: not timed, see "
    "below."
)
MEASURE = {
    "cpu": "CPU time of the process, on all its threads",
    "wall": "time on the wall, until the results are there",
}


def sections(results: dict[str, Any]) -> list[Section]:
    """Times, memory, head counts, values, and what was not timed."""
    lengths = results["length"]
    times: list[Part] = [_facts(results)]
    caption = RATIO
    for backward, title in PASS.items():
        if rows := [row for row in lengths if row["backward"] == backward]:
            times.append(_ratios(f"Time, {title}", rows, ("mask", "n"), caption))
            caption = "As above."
    keys = ("mask", "pass", "H")
    times.append(_ratios("Other head sizes", results["head_size"], keys, caption))
    times.append(_head_counts(results["head_count"]))
    memory: list[Part] = [_memory(lengths + results["memory"])]
    memory.append(_slopes(results["slopes"]))
    rest: list[Part] = [_checks(results["checks"])]
    if missing := _not_timed(results):
        rest.append(missing)
    return [
        Section("time", "Time", times),
        Section("memory", "Memory and growth", memory),
        Section("values", "Values", rest),
    ]


def _facts(results: dict[str, Any]) -> Table:
    machine, settings = results["machine"], results["settings"]
    rows: list[tuple[str, Cell]] = [
        ("command", results["command"]),
        ("measure", MEASURE[results["measure"]]),
        *((key.replace("_", " "), value) for key, value in machine.items()),
        *((key, settings[key]) for key in ("dtype", "batch", "heads", "head_dim")),
        *((key, settings[key]) for key in ("window", "documents")),
    ]
    return Table("Facts", ("what", "value"), rows)


def _ratios(
    title: str, rows: Sequence[Row], keys: Sequence[str], caption: str
) -> Table:
    """A row for each case: the time of ours, and the ratios of the others."""
    cases, names = _by_case(rows, keys)
    lines = []
    for key, found in cases.items():
        ours = found[names[0]]
        ratios = [_ratio(found.get(name, {})) for name in names[1:]]
        lines.append([*key, _ms(ours), *ratios, _ratio(ours)])
    columns = [*keys, f"{names[0]}, ms", *names[1:], "noise"]
    if len({row["length"] for row in rows}) == 1:
        title += f", n={rows[0]['length']}"
    return Table(title, columns, lines, caption, names=len(keys))


def _head_counts(rows: Sequence[Row]) -> Table:
    keys = ("N", "H")
    cases, names = _by_case(rows, keys)
    lines = [
        [*key, *(cell for x in names for cell in (_ms(found[x]), _mb(found[x])))]
        for key, found in cases.items()
    ]
    first = rows[0]
    columns = [*keys, *(x for name in names for x in (f"{name}, ms", "MB"))]
    title = f"Heads at constant width {first['heads'] * first['head_dim']}"
    caption = (
        f"{first['mask']}, {PASS[first['backward']]}, n={first['length']}. ms: median "
        "time of a call; MB: temporary memory, which torch does not tell."
    )
    table = Table(title, columns, lines, caption, names=2)
    return table.without_empty_columns()


def _memory(rows: Sequence[Row]) -> Table:
    keys = ("mask", "pass", "n")
    cases, names = _by_case(rows, keys)
    lines = [
        [*key, *(_mb(found.get(name, {})) for name in names)]
        for key, found in cases.items()
    ]
    caption = (
        "Temporary memory in MB beside arguments and results, as the compiler plans it "
        "for the program that is timed; of the largest lengths programs were compiled, "
        "but not run. –: not compiled; torch does not tell."
    )
    table = Table("Memory", [*keys, *names], lines, caption, names=3)
    return table.without_empty_columns()


def _slopes(rows: Sequence[Row]) -> Table:
    keys = ("mask", "pass")
    cases, names = _by_case(rows, keys)
    lines = [
        [*key, *(_powers(found.get(name, {})) for name in names)]
        for key, found in cases.items()
    ]
    caption = (
        "The power of n by which time / memory grow: least-squares slope of the "
        "logarithms over the lengths above."
    )
    return Table("Growth", [*keys, *names], lines, caption, names=2)


def _checks(rows: Sequence[Row]) -> Table:
    names = list(dict.fromkeys(row["implementation"] for row in rows))
    lines: list[list[Cell]] = []
    for name in names:
        mine = [row for row in rows if row["implementation"] == name]
        known = [row["differs"] for row in mine if row["differs"] is not None]
        reasons = {f"{x['reason']} ({x['mask']})": 0 for x in mine if x["reason"]}
        verdict = "; ".join(reasons) or "equal"
        lines.append([name, max(known, default=None), verdict])
    first = rows[0]
    caption = (
        "Outputs and gradients under every mask against those of reference in float32 "
        f"at n={first['length']}: the largest difference of a vector, over its size. "
        f"Up to {first['tolerance']:g} counts as equal."
    )
    columns = ("implementation", "largest difference", "values")
    return Table("Values, before anything was timed", columns, lines, caption)


def _not_timed(results: dict[str, Any]) -> Table | None:
    """Who was left out, where and why."""
    found: dict[tuple[str, str], list[str]] = {}
    for name in ("length", "head_size", "head_count", "memory"):
        for row in results[name]:
            if row["reason"]:
                words = [f"{key} {get(row)}" for key, get in KEYS.items()]
                place = found.setdefault((row["implementation"], row["reason"]), [])
                place.append(", ".join(words[:3]))
    lines = [[*key, _few(places)] for key, places in found.items()]
    columns = ("implementation", "why", "where")
    return Table("Not timed", columns, lines) if lines else None


def _few(places: Sequence[str]) -> str:
    first, *rest = dict.fromkeys(places)
    more = f" and {len(rest)} other case{'s' * (len(rest) > 1)}"
    return first + more * bool(rest)


def _by_case(
    rows: Sequence[Row], keys: Sequence[str]
) -> tuple[dict[tuple[Cell, ...], dict[str, Row]], list[str]]:
    """Rows by case and implementation, and the names of all implementations."""
    masks = list(dict.fromkeys(row["mask"] for row in rows))

    def place(row: Row) -> tuple[int, ...]:
        sizes = (row.get(key, 0) for key in ("backward", "length", "heads", "head_dim"))
        return masks.index(row["mask"]), *sizes

    cases: dict[tuple[Cell, ...], dict[str, Row]] = {}
    for row in sorted(rows, key=place):
        case = tuple(KEYS[key](row) for key in keys)
        cases.setdefault(case, {})[row["implementation"]] = row
    return cases, list(dict.fromkeys(row["implementation"] for row in rows))


def _ms(row: Row) -> Cell:
    return row.get("ms")


def _mb(row: Row) -> Cell:
    size = row.get("temp_bytes")
    return None if size is None else size / 1e6 if size < 1e8 else round(size / 1e6)


def _ratio(row: Row) -> Cell:
    if "ratio" not in row:
        return None
    middle, low, high = map(format_cell, row["ratio"])
    return f"{middle} ({low} to {high})"


def _powers(row: Row) -> Cell:
    powers = (row.get("time"), row.get("memory"))
    texts = ["–" if x is None else f"{x:.2f}" for x in powers]
    return None if set(texts) == {"–"} else " / ".join(texts)
