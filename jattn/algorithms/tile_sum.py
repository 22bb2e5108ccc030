"""A sum over tiles that stays one under every transformation.

    out[tile] += body(arrays[tile])          for every live tile of a plan

Its tangent is the sum over the same tiles of the body's tangent, its transpose that of
the body's transpose, and its batch that of the body's batch. So a body is all that has
to be written; JAX derives the rest. Nothing is kept from one tile to the next, and the
loops run over live tiles only, in derivatives of any order.

`lax.scan` could say the same, but its reverse mode needs a number of steps that is
known, checkpoints, and a gradient as large as all keys for every row of tiles.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr, Primitive, jaxpr_as_fun
from jax.interpreters import ad, batching, mlir
from jax.sharding import NamedSharding, PartitionSpec

from jattn.algorithms.cuts import Cut, cut_keys, cut_queries
from jattn.algorithms.partition import merge, partition
from jattn.core.plan import Grid, Plan
from jattn.core.varying import alike, varying


def tile_sum(
    body: Callable[..., Sequence[jax.Array]],
    plan: Plan,
    grid: Grid,
    arrays: Any,
    cuts: Any,
    out_cuts: Sequence[Cut],
) -> list[jax.Array]:
    """Sums `body` over the live tiles.

    Args:
        body: `body(full, i, j, tile) -> results`, for the tile in row i and column j:
            whether its verdict is FULL, and its part of `arrays`. It closes over no
            array that is traced.
        plan: the live tiles.
        grid: where they lie.
        arrays: lists of arrays that are cut into tiles.
        cuts: how, for each.
        out_cuts: how each result is put together. Where tiles overlap they are added.

    Returns:
        The sums, T and S long along the axes of `out_cuts`.
    """
    indices = [jnp.asarray(x) for x in (plan.columns, plan.full, plan.live)]
    # A sort forgets where its results differ.
    indices = varying(indices, indices)
    flat, structure = jax.tree.flatten(arrays)
    flat = alike(flat)
    flat_cuts = jax.tree.leaves(cuts, is_leaf=lambda x: isinstance(x, Cut))

    def of(full: bool) -> Callable[..., Any]:
        return lambda i, j, *x: body(full, i, j, jax.tree.unflatten(structure, x))

    bodies = [of(full) for full in (False, True)]
    return _bind(bodies, indices, flat, flat_cuts, out_cuts, grid)


_tile_sum = Primitive("tile_sum")
_tile_sum.multiple_results = True
_PLAN = 3  # its first operands: columns, full, live

Bodies = tuple[ClosedJaxpr, ClosedJaxpr]  # for PARTIAL and for FULL tiles


def _bind(
    bodies: Sequence[Callable[..., Any]],
    plan: Sequence[jax.Array],
    arrays: Sequence[jax.Array],
    cuts: Sequence[Cut],
    out_cuts: Sequence[Cut],
    grid: Grid,
) -> list[jax.Array]:
    def first_tile(columns: jax.Array, *arrays: jax.Array) -> list[jax.Array]:
        i, j = jnp.int32(0), columns[0, 0].astype(jnp.int32)
        in_row = cut_queries(arrays, cuts, i, grid)
        return [i, j, *cut_keys(in_row, cuts, j, grid)]

    tile = jax.make_jaxpr(first_tile)(plan[0], *arrays).out_avals
    return _tile_sum.bind(
        *plan,
        *arrays,
        bodies=tuple(jax.make_jaxpr(body)(*tile) for body in bodies),
        cuts=tuple(cuts),
        out_cuts=tuple(out_cuts),
        grid=grid,
    )


def _run(
    columns: jax.Array,
    full: jax.Array,
    live: jax.Array,
    *arrays: jax.Array,
    bodies: Bodies,
    cuts: tuple[Cut, ...],
    out_cuts: tuple[Cut, ...],
    grid: Grid,
) -> list[jax.Array]:
    """The loops: over rows of tiles, and over the live tiles of each."""
    # A result that stays in its place along a row is summed apart and then put there.
    apart = [cut.keys is None and cut.columns is None for cut in out_cuts]

    def add_row(i: jax.Array, sums: list[jax.Array]) -> list[jax.Array]:
        i = jnp.asarray(i, jnp.int32)
        in_row = cut_queries(arrays, cuts, i, grid)

        def add_tile(is_full: bool, slot: jax.Array, sums: list) -> list[jax.Array]:
            j = columns[i, slot].astype(jnp.int32)
            tile = cut_keys(in_row, cuts, j, grid)
            parts = jaxpr_as_fun(bodies[is_full])(i, j, *tile)
            return [
                x + part if alone else _added(x, part, cut, i, j, grid)
                for x, part, cut, alone in zip(
                    sums, parts, out_cuts, apart, strict=True
                )
            ]

        mine = [
            _zeros_like(part) if alone else x
            for x, part, alone in zip(sums, bodies[0].out_avals, apart, strict=True)
        ]
        mine = varying(mine, (columns, arrays))
        mine = lax.fori_loop(0, full[i], functools.partial(add_tile, True), mine)
        mine = lax.fori_loop(full[i], live[i], functools.partial(add_tile, False), mine)
        return [
            _added(x, part, cut, i, i, grid) if alone else part
            for x, part, cut, alone in zip(sums, mine, out_cuts, apart, strict=True)
        ]

    sums = _zeros(columns, *arrays, parts=bodies[0].out_avals, cuts=out_cuts, grid=grid)
    return lax.fori_loop(0, grid.num_rows, add_row, sums)


def _zeros(
    columns: jax.Array,
    *arrays: jax.Array,
    parts: Sequence[Any],
    cuts: Sequence[Cut],
    grid: Grid,
) -> list[jax.Array]:
    """The sums before anything is added."""

    def zeros(part: Any, cut: Cut) -> jax.Array:
        sizes = {cut.queries: grid.num_queries, cut.keys: grid.num_keys}
        shape = [sizes.get(axis, n) for axis, n in enumerate(part.shape)]
        names = [*part.sharding.spec]
        if cut.columns is not None:
            shape.insert(cut.columns, grid.num_columns)
            names.insert(cut.columns, None)
        return _zeros_like(part, tuple(shape), names)

    sums = [zeros(*x) for x in zip(parts, cuts, strict=True)]
    return varying(sums, (columns, arrays))


def _zeros_like(
    part: Any, shape: tuple[int, ...] | None = None, names: Sequence | None = None
) -> jax.Array:
    """Zeros of the type of a part, which has a sharding if a mesh has explicit axes.

    Args:
        part: the type of an array.
        shape: another shape than that of the part.
        names: the mesh axes along which it is sharded, if it has another shape.
    """
    mesh, spec = part.sharding.mesh, part.sharding.spec
    if names is not None:
        spec = PartitionSpec(*names)
    return lax.full(
        part.shape if shape is None else shape,
        0,
        part.dtype,
        sharding=None if mesh.empty else NamedSharding(mesh, spec),
    )


def _added(
    total: jax.Array, part: jax.Array, cut: Cut, i: Any, j: Any, grid: Grid
) -> jax.Array:
    """The total with the part of the tile in row i and column j added in its place."""
    at: list[Any] = [np.int32(0)] * total.ndim
    if cut.queries is not None:
        at[cut.queries] = grid.row_start(i)
    if cut.keys is not None:
        at[cut.keys] = grid.column_start(j)
    if cut.columns is not None:
        at[cut.columns] = j
        part = jnp.expand_dims(part, cut.columns)
    part = part + lax.dynamic_slice(total, at, part.shape)
    return lax.dynamic_update_slice(total, part, at)


def _jvp(
    operands: Sequence, tangents: Sequence, *, bodies: Bodies, **how: Any
) -> tuple[list, list]:
    plan, arrays, dots = operands[:_PLAN], operands[_PLAN:], tangents[_PLAN:]
    moves = [type(dot) is not ad.Zero for dot in dots]

    def tangent_of(body: ClosedJaxpr) -> Callable[..., Any]:
        def tangent(i: jax.Array, j: jax.Array, *tiles: jax.Array) -> list[jax.Array]:
            tile, dots = tiles[: len(arrays)], tiles[len(arrays) :]
            moving, rest = partition(moves, tile)

            def of_moving(*moving: jax.Array) -> list[jax.Array]:
                return jaxpr_as_fun(body)(i, j, *merge(moves, moving, rest))

            return jax.jvp(of_moving, moving, list(dots))[1]

        return tangent

    out = _tile_sum.bind(*operands, bodies=bodies, **how)
    how["cuts"] += tuple(partition(moves, how["cuts"])[0])
    given = [*arrays, *partition(moves, dots)[0]]
    return out, _bind([tangent_of(body) for body in bodies], plan, given, **how)


def _transpose(
    cotangents: Sequence,
    *operands: Any,
    bodies: Bodies,
    cuts: tuple[Cut, ...],
    out_cuts: tuple[Cut, ...],
    grid: Grid,
) -> list:
    plan, arrays = operands[:_PLAN], operands[_PLAN:]
    linear = [ad.is_undefined_primal(x) for x in arrays]
    given = [type(x) is not ad.Zero for x in cotangents]
    known = partition(linear, arrays)[1]

    def transpose_of(body: ClosedJaxpr) -> Callable[..., Any]:
        def transpose(i: jax.Array, j: jax.Array, *tiles: jax.Array) -> tuple:
            tile, cotangents = tiles[: len(known)], tiles[len(known) :]

            def of_linear(*moving: jax.Array) -> list[jax.Array]:
                results = jaxpr_as_fun(body)(i, j, *merge(linear, moving, tile))
                return partition(given, results)[0]

            # As it is linear in these, the derivative is the same anywhere.
            avals = partition(linear, body.in_avals[2:])[0]
            zeros = [_zeros_like(x) for x in avals]
            return jax.vjp(of_linear, *varying(zeros, tiles))[1](list(cotangents))

        return transpose

    linear_cuts, known_cuts = partition(linear, cuts)
    results = _bind(
        [transpose_of(body) for body in bodies],
        plan,
        [*known, *partition(given, cotangents)[0]],
        [*known_cuts, *partition(given, out_cuts)[0]],
        linear_cuts,
        grid,
    )
    return [None] * _PLAN + merge(linear, results, [None] * len(known))


def _batch(
    operands: Sequence, axes: Sequence, *, bodies: Bodies, **how: Any
) -> tuple[list, list]:
    if any(axis is not None for axis in axes[:_PLAN]):
        out = _one_by_one(operands, axes, bodies=bodies, **how)
        return out, [0] * len(out)
    axes = axes[_PLAN:]
    arrays = [
        x if axis is None else jnp.moveaxis(x, axis, 0)
        for x, axis in zip(operands[_PLAN:], axes, strict=True)
    ]
    in_axes = (None, None, *(None if axis is None else 0 for axis in axes))
    size = next(
        x.shape[0] for x, axis in zip(arrays, axes, strict=True) if axis is not None
    )
    how["cuts"] = [
        cut if axis is None else _shifted(cut)
        for cut, axis in zip(how["cuts"], axes, strict=True)
    ]
    how["out_cuts"] = [_shifted(cut) for cut in how["out_cuts"]]
    batched = [jax.vmap(jaxpr_as_fun(body), in_axes, axis_size=size) for body in bodies]
    out = _bind(batched, operands[:_PLAN], arrays, **how)
    return out, [0] * len(out)


def _one_by_one(operands: Sequence, axes: Sequence, **how: Any) -> list:
    """A batch in which each has a plan of its own, as after `lax.cond`, in a loop."""
    mapped = [axis is not None for axis in axes]
    moving, rest = partition(mapped, operands)
    places, _ = partition(mapped, axes)
    moving = [jnp.moveaxis(x, axis, 0) for x, axis in zip(moving, places, strict=True)]

    def one(moving: list) -> list:
        return _tile_sum.bind(*merge(mapped, moving, rest), **how)

    return lax.map(one, moving)


def _shifted(cut: Cut) -> Cut:
    """The cut of an array with a new axis in front."""
    return Cut(*(axis if axis is None else axis + 1 for axis in cut))


@_tile_sum.def_abstract_eval
def _avals(
    columns: Any,
    full: Any,
    live: Any,
    *arrays: Any,
    bodies: Bodies,
    cuts: tuple[Cut, ...],
    out_cuts: tuple[Cut, ...],
    grid: Grid,
) -> Sequence[Any]:
    # As the loops start, so they end.
    how = dict(parts=bodies[0].out_avals, cuts=out_cuts, grid=grid)
    return jax.make_jaxpr(functools.partial(_zeros, **how))(columns, *arrays).out_avals


_tile_sum.def_impl(_run)
mlir.register_lowering(_tile_sum, mlir.lower_fun(_run, multiple_results=True))
ad.primitive_jvps[_tile_sum] = _jvp
ad.primitive_transposes[_tile_sum] = _transpose
batching.primitive_batchers[_tile_sum] = _batch
