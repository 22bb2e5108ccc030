"""The lines of a picture: a mask of one head, with a sign for each cell of pairs."""

from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from jattn.core.letters import take
from jattn.core.rules import EMPTY, FULL, PARTIAL, Range, verdict_of
from jattn.core.tile import Pairs

SIGNS = {EMPTY: ".", PARTIAL: "+", FULL: "#"}
"""For no pair, some (or nobody knows), and every pair of a cell."""

SIDE = 32
"""How many cells a picture has at most, across and down."""

MOST_PAIRS = 2**20
"""Up to so many pairs each is looked at; beyond, the verdicts on cells must do."""


def lines(pairs: Pairs) -> Iterator[str]:
    """The lines of the picture of one head."""
    q_pos, k_pos = (x.ravel() for x in pairs.positions)
    rows, columns = _cells(q_pos.size), _cells(k_pos.size)
    few = q_pos.size * k_pos.size <= MOST_PAIRS
    cells = (_by_pairs if few else _by_verdict)(pairs, rows, columns)
    left = [str(q_pos[row.start]) for row in rows]
    above = [str(k_pos[column.start]) for column in columns]
    margin, width = (max(map(len, labels), default=1) for labels in (left, above))
    if width > 2 and len(above) > 1:  # no room for all of them
        first, last = above[0], above[-1]
        width, room = 1, 2 * len(above) - 1 - len(first)
        above = [first + last.rjust(max(room, len(last) + 1))]
    for label, line in zip(["", *left], [above, *cells], strict=True):
        yield " ".join([label.rjust(margin), *(x.rjust(width) for x in line)]).rstrip()


def _cells(size: int) -> list[slice]:
    """An axis cut into cells."""
    step = max(1, -(-size // SIDE))
    return [slice(start, start + step) for start in range(0, size, step)]


def _by_pairs(pairs: Pairs, rows: list[slice], columns: list[slice]) -> list[list[str]]:
    """The signs of cells, from all pairs."""
    assert pairs.mask is not None
    q_pos, k_pos = pairs.positions
    allowed = np.asarray(pairs.mask.allowed(q_pos, k_pos))
    allowed = np.broadcast_to(allowed, (q_pos.size, k_pos.size))
    cells = [[allowed[row, column] for column in columns] for row in rows]
    return [[SIGNS[int(verdict_of(x.any(), x.all()))] for x in line] for line in cells]


def _by_verdict(
    pairs: Pairs, rows: list[slice], columns: list[slice]
) -> list[list[str]]:
    """The signs of cells, from what the mask says of each as a whole."""
    q_pos, k_pos = (x.ravel() for x in pairs.positions)
    q_ranges = [Range(q_pos[row].min(), q_pos[row].max()) for row in rows]
    k_ranges = [Range(k_pos[column].min(), k_pos[column].max()) for column in columns]
    assert pairs.mask is not None
    verdict: Any = type(pairs.mask).verdict
    if jax.tree.leaves(pairs.mask):
        verdict = jax.jit(verdict)
    signs = []
    for row, q_range in zip(rows, q_ranges, strict=True):
        line = take(pairs.mask, "T", row.start, q_pos[row].size)
        cells = (take(line, "S", x.start, k_pos[x].size) for x in columns)
        verdicts = (
            verdict(x, q_range, k) for x, k in zip(cells, k_ranges, strict=True)
        )
        signs.append([SIGNS[int(x)] for x in verdicts])
    return signs
