"""The operands of one head, cut into tiles."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jattn.core.letters import letters_of, take_leaves
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
        float_letters: the letters of the arrays in the first list.
        other_letters: of those in the second.
        grid: the tiles.
        spec: the static options.
        traced: `logits`, not full and full, with what they close over taken out: the
            jaxpr, and where its constants stand in the lists. Empty if there is none.
    """

    structure: Any
    is_float: tuple[bool, ...]
    float_letters: tuple[str, ...]
    other_letters: tuple[str, ...]
    grid: Grid
    spec: AttentionSpec
    traced: tuple[tuple[Any, tuple[tuple[bool, int], ...]], ...] = ()

    def operands(self, others: Arrays, floats: Arrays) -> tuple:
        """(q, k_t, v_t, pairs) from the two lists."""
        sources = {True: iter(floats), False: iter(others)}
        return self.structure.unflatten([next(sources[f]) for f in self.is_float])

    def row(self, start: jax.Array, others: Arrays, *floats: Arrays) -> list[Arrays]:
        """The lists' parts for the row of tiles whose first query is `start`."""
        return self._take("T", start, self.grid.block_q, others, *floats)

    def column(self, j: jax.Array, others: Arrays, *floats: Arrays) -> list[Arrays]:
        """The lists' parts for column `j` of the tiles."""
        last = self.grid.num_keys - self.grid.block_k
        start = jnp.minimum(j * self.grid.block_k, last)
        return self._take("S", start, self.grid.block_k, others, *floats)

    def _take(
        self, letter: str, start: Any, size: int, others: Arrays, *floats: Arrays
    ) -> list[Arrays]:
        letters = [self.other_letters, *[self.float_letters] * len(floats)]
        return [
            take_leaves(arrays, names, letter, start, size)
            for arrays, names in zip([others, *floats], letters, strict=True)
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
        shared = jnp.where(i == len(grid.row_starts) - 1, grid.shared_queries, 0)
        mine = jnp.arange(grid.block_q) >= shared
        return jnp.where(mine.reshape(-1, *(1,) * (x.ndim - 1)), x, 0)

    def join(self, x: jax.Array) -> jax.Array:
        """The rows of tiles (rows, block_q, ...) as rows (T, ...)."""
        shared = x.shape[0] * self.grid.block_q - self.grid.num_queries
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
    arrays, structure = jax.tree.flatten((q, k.T, v.T, pairs))
    letters = ["TH", "HS", "DS", *letters_of(pairs)]
    is_float = [_is_float(x) for x in arrays]

    def pick(items: list, kind: bool) -> list:
        return [x for x, f in zip(items, is_float, strict=True) if f is kind]

    tiling = Tiling(
        structure,
        tuple(is_float),
        tuple(pick(letters, True)),
        tuple(pick(letters, False)),
        grid,
        spec,
    )
    return _without_closures(tiling, pick(arrays, False), pick(arrays, True))


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
        float_letters=_padded(tiling.float_letters, lists[True]),
        other_letters=_padded(tiling.other_letters, lists[False]),
        traced=tuple(traced),
    )
    return tiling, lists[False], lists[True]


def _padded(letters: tuple[str, ...], arrays: Arrays) -> tuple[str, ...]:
    return letters + ("",) * (len(arrays) - len(letters))


def _is_float(x: Any) -> bool:
    return bool(jnp.issubdtype(jnp.result_type(x), jnp.inexact))
