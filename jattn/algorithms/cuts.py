"""Arrays cut into tiles."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
from jax import lax

from jattn.core.plan import Grid


class Cut(NamedTuple):
    """Along which axes an array is cut into tiles; None: along none.

    Attributes:
        queries: the axis that has T entries.
        keys: the axis that has S entries.
        columns: the axis that has an entry for every column of tiles, which a tile does
            not have: these arrays are cut already.
    """

    queries: int | None = None
    keys: int | None = None
    columns: int | None = None


def cut_of(letters: str, array: Any) -> Cut:
    """The cut of an array with these axes, counted from the right; not of axes of 1."""

    def axis(letter: str) -> int | None:
        place = array.ndim - len(letters) + letters.find(letter)
        found = letter in letters and place >= 0 and array.shape[place] != 1
        return place if found else None

    return Cut(axis("T"), axis("S"))


def cut_queries(
    arrays: Sequence[Any], cuts: Sequence[Cut], i: Any, grid: Grid
) -> list[jax.Array]:
    """The parts of arrays that belong to row `i` of the tiles."""
    start = grid.row_start(i)
    return [
        x
        if cut.queries is None
        else lax.dynamic_slice_in_dim(x, start, grid.block_q, cut.queries)
        for x, cut in zip(arrays, cuts, strict=True)
    ]


def cut_keys(
    arrays: Sequence[Any], cuts: Sequence[Cut], j: Any, grid: Grid
) -> list[jax.Array]:
    """The parts of arrays that belong to column `j` of the tiles."""
    start = grid.column_start(j)

    def part(x: Any, cut: Cut) -> Any:
        if cut.columns is not None:
            return lax.dynamic_index_in_dim(x, j, cut.columns, keepdims=False)
        if cut.keys is None:
            return x
        return lax.dynamic_slice_in_dim(x, start, grid.block_k, cut.keys)

    return [part(*x) for x in zip(arrays, cuts, strict=True)]
