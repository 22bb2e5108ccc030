"""The operands of one head, cut into tiles."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jattn.algorithms.cuts import Cut, cut_keys, cut_of, cut_queries
from jattn.algorithms.partition import merge, partition
from jattn.core.letters import letters_of
from jattn.core.plan import Grid
from jattn.core.product import product
from jattn.core.spec import AttentionSpec
from jattn.core.tile import Pairs, logits, scores

Arrays = list[Any]


class Tiling(NamedTuple):
    """What is static: how the operands are put together, and the grid of tiles.

    The operands, (q, k_t, v_t, pairs), are kept as a list of floating-point arrays,
    which have tangents, and a list of the others. Arrays that the rules close over
    follow at the ends of the lists.

    Attributes:
        structure: the pytree structure of the operands.
        is_float: for each array of theirs, in which list it is.
        float_cuts: how the arrays in the first list are cut.
        other_cuts: those in the second.
        grid: the tiles.
        spec: the static options.
        traced: `logits`, not full and full, with what they close over taken out: the
            jaxpr, and where its constants stand in the lists. Empty if there is none.
    """

    structure: Any
    is_float: tuple[bool, ...]
    float_cuts: tuple[Cut, ...]
    other_cuts: tuple[Cut, ...]
    grid: Grid
    spec: AttentionSpec
    traced: tuple[tuple[Any, tuple[tuple[bool, int], ...]], ...] = ()

    @property
    def cuts(self) -> list[tuple[Cut, ...]]:
        """How the arrays of the others and of the floats are cut."""
        return [self.other_cuts, self.float_cuts]

    def operands(self, others: Arrays, floats: Arrays) -> tuple:
        """(q, k_t, v_t, pairs) from the two lists."""
        return self.structure.unflatten(merge(self.is_float, floats, others))

    def row(self, i: jax.Array, others: Arrays, floats: Arrays) -> list[Arrays]:
        """The lists' parts for row `i` of the tiles."""
        return [
            cut_queries(others, self.other_cuts, i, self.grid),
            cut_queries(floats, self.float_cuts, i, self.grid),
        ]

    def column(self, j: jax.Array, others: Arrays, floats: Arrays) -> list[Arrays]:
        """The lists' parts for column `j` of the tiles."""
        return [
            cut_keys(others, self.other_cuts, j, self.grid),
            cut_keys(floats, self.float_cuts, j, self.grid),
        ]

    def logits(
        self, j: jax.Array, others: Arrays, floats: Arrays, full: bool
    ) -> jax.Array:
        """The logits of a tile in column `j`."""
        if self.traced:
            jaxpr, places = self.traced[full]
            consts = [(floats if kind else others)[i] for kind, i in places]
            num_floats = sum(self.is_float)
            num_others = len(self.is_float) - num_floats
            tile = *others[:num_others], *floats[:num_floats]
            return jax.core.eval_jaxpr(jaxpr, consts, j, *tile)[0]
        q, k_t, _, pairs = self.operands(others, floats)
        if full:
            return scores(q, k_t, pairs, self.spec)
        s = logits(q, k_t, pairs, self.spec)
        if self.grid.shared_keys == 0:
            return s
        new = jnp.maximum(0, (j + 1) * self.grid.block_k - self.grid.num_keys)
        return jnp.where(jnp.arange(self.grid.block_k)[None, :] < new, -jnp.inf, s)

    def weigh(self, p: jax.Array, v_t: jax.Array) -> jax.Array:
        """The product of weights (T, S) with values (D, S)."""
        dtype, precision = self.spec.dtype, self.spec.precision
        return product("ts,ds->td", p, v_t, dtype, precision)

    def own_rows(self, i: jax.Array, x: jax.Array) -> jax.Array:
        """Results of a tile in row `i`, (block_q, ...), 0 of queries of other rows."""
        grid = self.grid
        if grid.shared_queries == 0:
            return x
        shared = jnp.where(i == grid.num_rows - 1, grid.shared_queries, 0)
        mine = jnp.arange(grid.block_q) >= shared
        return jnp.where(mine.reshape(-1, *(1,) * (x.ndim - 1)), x, 0)

    def join(self, x: jax.Array) -> jax.Array:
        """The rows of tiles (rows, block_q, ...) as rows (T, ...)."""
        shared = self.grid.shared_queries
        whole = x[:-1].reshape((x.shape[0] - 1) * x.shape[1], *x.shape[2:])
        return jnp.concatenate([whole, x[-1, shared:]])


def tiling_of(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    pairs: Pairs,
    grid: Grid,
    spec: AttentionSpec,
) -> tuple[Tiling, Arrays, Arrays]:
    """The tiling of one head, and its two lists: the others and the floats."""
    tiles = _in_tiles(k, grid), _in_tiles(v, grid)
    arrays, structure = jax.tree.flatten((q, *tiles, pairs))
    of_pairs = zip(letters_of(pairs), jax.tree.leaves(pairs), strict=True)
    cuts = [
        Cut(queries=0),
        Cut(columns=0),
        Cut(columns=0),
        *(cut_of(letters, array) for letters, array in of_pairs),
    ]
    is_float = tuple(_is_float(x) for x in arrays)
    floats, others = partition(is_float, arrays)
    float_cuts, other_cuts = map(tuple, partition(is_float, cuts))
    tiling = Tiling(structure, is_float, float_cuts, other_cuts, grid, spec)
    return _without_closures(tiling, others, floats)


def _in_tiles(x: jax.Array, grid: Grid) -> jax.Array:
    """Keys or values (S, H) as transposed tiles, (columns, H, block_k).

    A tile in one piece of memory is read faster than the same part of (H, S).
    """
    if grid.shared_keys == 0:
        tiles = x.reshape(grid.num_columns, grid.block_k, x.shape[1])
    else:
        tiles = x[grid.column_starts[:, None] + np.arange(grid.block_k)[None, :]]
    return jnp.swapaxes(tiles, 1, 2)


def _without_closures(
    tiling: Tiling, others: Arrays, floats: Arrays
) -> tuple[Tiling, Arrays, Arrays]:
    """Makes operands of the arrays that rules close over.

    Whatever is traced outside must come in as an argument, to have a derivative.
    """

    def tile_at(j: jax.Array) -> list[Arrays]:
        return tiling.column(j, *tiling.row(j, others, floats))

    j = jax.ShapeDtypeStruct((), jnp.int32)
    tile = jax.eval_shape(tile_at, j)
    closed = [
        jax.make_jaxpr(functools.partial(tiling.logits, full=full))(j, *tile)
        for full in (False, True)
    ]
    if not any(isinstance(x, jax.core.Tracer) for c in closed for x in c.consts):
        return tiling, others, floats
    lists = {False: list(others), True: list(floats)}
    traced = []
    for jaxpr in closed:
        places = []
        for const in jaxpr.consts:
            kind = _is_float(const)
            places.append((kind, len(lists[kind])))
            lists[kind].append(const)
        traced.append((jaxpr.jaxpr, tuple(places)))
    tiling = tiling._replace(
        float_cuts=_padded(tiling.float_cuts, lists[True]),
        other_cuts=_padded(tiling.other_cuts, lists[False]),
        traced=tuple(traced),
    )
    return tiling, lists[False], lists[True]


def _padded(cuts: tuple[Cut, ...], arrays: Arrays) -> tuple[Cut, ...]:
    return cuts + (Cut(),) * (len(arrays) - len(cuts))


def _is_float(x: Any) -> bool:
    return bool(jnp.issubdtype(jnp.result_type(x), jnp.inexact))
