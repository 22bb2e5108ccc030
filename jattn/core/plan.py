"""Which tiles to visit: the verdicts of a mask on a grid of tiles, in order.

Where the mask holds no arrays and the positions are static, a plan is made in numpy
while the call is traced; otherwise it is made of traced code, with the same type.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jattn.core.letters import take
from jattn.core.rules import EMPTY, FULL, PARTIAL, Array, Range
from jattn.core.tile import Pairs


class Grid(NamedTuple):
    """T queries and S keys cut into tiles.

    The last row and the last column of tiles start early enough to be whole, so that
    no array is padded. What they share with their neighbours is computed twice: such
    queries are dropped, such keys are forbidden in the last column.

    Attributes:
        num_queries: T.
        num_keys: S.
        block_q: queries in a tile.
        block_k: keys in a tile.
    """

    num_queries: int
    num_keys: int
    block_q: int
    block_k: int

    @classmethod
    def of(cls, num_queries: int, num_keys: int, block_q: int, block_k: int) -> "Grid":
        """With blocks that are cut to the arrays."""
        blocks = min(block_q, num_queries), min(block_k, num_keys)
        return cls(num_queries, num_keys, *blocks)

    @property
    def num_rows(self) -> int:
        """How many rows of tiles there are."""
        return -(-self.num_queries // self.block_q)

    @property
    def num_columns(self) -> int:
        """How many columns of tiles there are."""
        return -(-self.num_keys // self.block_k)

    def row_start(self, i: Any) -> Any:
        """The first query of row `i` of the tiles."""
        return jnp.minimum(i * self.block_q, self.num_queries - self.block_q)

    def column_start(self, j: Any) -> Any:
        """The first key of column `j` of the tiles."""
        return jnp.minimum(j * self.block_k, self.num_keys - self.block_k)

    @property
    def row_starts(self) -> np.ndarray:
        """The first query of every row of tiles."""
        starts = np.arange(self.num_rows, dtype=np.int32) * np.int32(self.block_q)
        return np.minimum(starts, self.num_queries - self.block_q)

    @property
    def column_starts(self) -> np.ndarray:
        """The first key of every column of tiles."""
        starts = np.arange(self.num_columns, dtype=np.int32) * np.int32(self.block_k)
        return np.minimum(starts, self.num_keys - self.block_k)

    @property
    def shared_queries(self) -> int:
        """How many queries the last row has in common with the one before it."""
        return -self.num_queries % self.block_q

    @property
    def shared_keys(self) -> int:
        """How many keys the last column has in common with the one before it."""
        return -self.num_keys % self.block_k


class Plan(NamedTuple):
    """The live tiles of every row of tiles: FULL ones first, then PARTIAL ones.

    Attributes:
        columns: (rows, slots), which column of tiles stands in a slot.
        full: (rows,), how many slots are FULL.
        live: (rows,), how many are not EMPTY.
    """

    columns: Array
    full: Array
    live: Array


def make_plan(pairs: Pairs, grid: Grid, verdicts: np.ndarray | None = None) -> Plan:
    """The plan for the mask and the positions of one head.

    Args:
        pairs: the mask and the positions.
        grid: the tiles.
        verdicts: `static_verdicts` of them, if they are known already.
    """
    if verdicts is None:
        verdicts = static_verdicts(pairs, grid)
    if verdicts is None:
        verdicts = _of_all(_traced_verdicts(pairs, grid))
    xp: Any = np if isinstance(verdicts, np.ndarray) else jnp
    if grid.shared_keys:
        last = np.arange(verdicts.shape[1]) == verdicts.shape[1] - 1
        verdicts = xp.where(last[None, :], xp.minimum(verdicts, PARTIAL), verdicts)
    full = (verdicts == FULL).sum(axis=1)
    live = (verdicts != EMPTY).sum(axis=1)
    if xp is jnp:
        columns = jnp.argsort(FULL - verdicts, axis=1, stable=True)
        return Plan(columns.astype(np.int32), full, live)
    # Row by row, since an argsort takes eight bytes for each tile.
    slots = max(1, live.max())
    order = (np.argsort(FULL - row, stable=True)[:slots] for row in verdicts)
    return Plan(np.stack([row.astype(np.int32) for row in order]), full, live)


def static_verdicts(pairs: Pairs, grid: Grid) -> np.ndarray | None:
    """The verdicts (rows, columns) in numpy, or None if they depend on data."""
    shape = grid.num_rows, grid.num_columns
    mask, q_pos, k_pos = pairs.mask, pairs.q_pos, pairs.k_pos
    if mask is None:
        return np.full(shape, FULL, np.int8)
    if jax.tree.leaves(mask) or not all(
        isinstance(x, np.ndarray) for x in (q_pos, k_pos)
    ):
        return None

    def ranges(positions: Any, starts: np.ndarray, block: int, axis: int) -> Range:
        tiles = [positions[start : start + block] for start in starts]
        return Range(
            np.expand_dims([tile.min() for tile in tiles], axis),
            np.expand_dims([tile.max() for tile in tiles], axis),
        )

    with jax.ensure_compile_time_eval():  # a custom verdict may be written in jnp
        verdicts = mask.verdict(
            ranges(q_pos, grid.row_starts, grid.block_q, 1),
            ranges(k_pos, grid.column_starts, grid.block_k, 0),
        )
    # A million keys have 10^7 tiles and more: one byte for each, and a radix sort.
    return np.broadcast_to(np.asarray(verdicts, np.int8), shape)


def _traced_verdicts(pairs: Pairs, grid: Grid) -> jax.Array:
    """The verdicts (rows, columns), from the arrays of each tile."""

    def verdict(row: Any, column: Any) -> jax.Array:
        tile = take(pairs, "T", row, grid.block_q)
        tile = take(tile, "S", column, grid.block_k)
        ranges = (Range(x.min(), x.max()) for x in (tile.q_pos, tile.k_pos))
        return jnp.asarray(tile.mask.verdict(*ranges), jnp.int32)

    across = jax.vmap(verdict, (None, 0))
    starts: Any = grid.row_starts, grid.column_starts
    return jax.vmap(across, (0, None))(*starts)


@jax.custom_batching.custom_vmap
def _of_all(verdicts: jax.Array) -> jax.Array:
    """The verdicts; under `vmap`, those that are sound for all of the batch.

    So a plan is never batched, and loops over it are loops rather than selections.
    """
    return verdicts


@_of_all.def_vmap
def _of_all_vmap(
    axis_size: int, batched: list[bool], verdicts: jax.Array
) -> tuple[jax.Array, bool]:
    if batched[0]:
        full = (verdicts == FULL).all(axis=0)
        live = (verdicts != EMPTY).any(axis=0)
        some = jnp.where(live, PARTIAL, EMPTY)
        verdicts = jnp.where(full, FULL, some).astype(verdicts.dtype)
    # Once more, for the maps around this one.
    return _of_all(verdicts), False
