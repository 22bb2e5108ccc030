"""How many tiles a call visits."""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from jattn.algorithms.block_sizes import plan_of
from jattn.core.arguments import is_known
from jattn.core.boundary import Sizes
from jattn.core.heads import over_heads
from jattn.core.letters import take
from jattn.core.plan import Grid, make_plan
from jattn.core.spec import AttentionSpec
from jattn.core.tile import Pairs


@dataclasses.dataclass(frozen=True)
class Tiles:
    """The tiles of one head, of which those that are not EMPTY are computed.

    Where the mask or the positions are data, one plan serves all batch rows and heads:
    a tile is computed for all if one of them needs it.

    Attributes:
        block_sizes: (queries, keys) of a tile.
        grid: (rows, columns) of tiles.
        full: how many are computed without the mask; None if that is known only at run
            time, as in the following.
        live: how many are computed.
        per_head: the fewest and the most that a head of a batch row needs by itself.
    """

    block_sizes: tuple[int, int]
    grid: tuple[int, int]
    full: int | None = None
    live: int | None = None
    per_head: tuple[int, int] | None = None

    @property
    def total(self) -> int:
        """How many there are."""
        return self.grid[0] * self.grid[1]

    @property
    def partial(self) -> int | None:
        """How many are computed with the mask."""
        known = self.live is not None and self.full is not None
        return self.live - self.full if known else None  # type: ignore[operator]

    @property
    def empty(self) -> int | None:
        """How many are left out."""
        return None if self.live is None else self.total - self.live


def tiles_of(sizes: Sizes, pairs: Pairs, spec: AttentionSpec) -> Tiles:
    """The tiles of `blockwise`, by its own plan; T and S are not 0.

    Args:
        sizes: of the call.
        pairs: its rules, of arrays, traced arrays or `jax.ShapeDtypeStruct`.
        spec: what is static about it.
    """
    # What else the rules hold makes no difference to a plan.
    given = pairs.mask, pairs.q_pos, pairs.k_pos
    data = [] if pairs.mask is None else jax.tree.leaves(given)
    grid = Grid.of(sizes.T, sizes.S, *spec.block_sizes)
    if not all(map(is_known, data)):
        return Tiles((grid.block_q, grid.block_k), (grid.num_rows, grid.num_columns))
    placed = Pairs(None, (), *given).placed(sizes.T, sizes.S, spec.align)
    bound = placed.bind(sizes.T, sizes.S, sizes.N)
    if data or jax.tree.leaves(bound.mask):
        with jax.ensure_compile_time_eval():
            found = _counts(placed, sizes=sizes, grid=grid)
            (full, live), alone = (np.asarray(x).tolist() for x in found)
        per_head = min(alone), max(alone)
    else:
        grid, plan = plan_of(bound, sizes.T, sizes.S, spec)
        full, live = int(plan.full.sum()), int(plan.live.sum())
        per_head = live, live
    shape = grid.num_rows, grid.num_columns
    return Tiles((grid.block_q, grid.block_k), shape, full, live, per_head)


@functools.partial(jax.jit, static_argnames=("sizes", "grid"))
def _counts(pairs: Pairs, *, sizes: Sizes, grid: Grid) -> tuple[jax.Array, jax.Array]:
    """FULL and live tiles of the plan for all, and live tiles of each by itself."""

    def counts(pairs: Pairs) -> jax.Array:
        # Row by row, since a plan of 10^8 tiles is larger than what it is to explain.
        def in_row(i: jax.Array) -> jax.Array:
            row = take(pairs, "T", grid.row_start(i), grid.block_q)
            plan = make_plan(row, grid._replace(num_queries=grid.block_q))
            return jnp.asarray([plan.full[0], plan.live[0]])

        return jax.lax.map(in_row, np.arange(grid.num_rows)).sum(axis=0)

    def over(fn: Callable[[Pairs], jax.Array]) -> jax.Array:
        def of_head(q: jax.Array, k: jax.Array, pairs: Pairs) -> jax.Array:
            return fn(pairs)

        q = jnp.zeros((*sizes.batch, sizes.T, sizes.N, 1))
        k = jnp.zeros((*sizes.batch, sizes.S, sizes.K, 1))
        return over_heads(of_head, (q,), (k,), pairs, "start", {}).reshape(-1, 2)

    def by_itself(pairs: Pairs) -> jax.Array:
        # In a map that is a loop, each head and batch row has a plan of its own.
        leaves, structure = jax.tree.flatten(pairs)
        of = jax.custom_batching.sequential_vmap(
            lambda *leaves: counts(jax.tree.unflatten(structure, leaves))
        )
        return of(*leaves)

    return over(counts)[0], over(by_itself)[:, 1]
