"""Attention tile by tile: O(T + S) memory, in every derivative.

The primal is a fold of `SoftmaxState` over the live tiles of a row of tiles. Its
derivative is written once, forwards, as a second fold over the same tiles of the
tangent of the tile function; JAX transposes that fold into the backward pass and
differentiates it again for higher orders. The checkpoints around it keep nothing of
size T x S.

Keys and values are held transposed, (H, S) and (D, S): the products of the backward
pass then have the small operand first, where they are more than twice as fast on a CPU.

Source: Rabe & Staats 2021, arXiv:2112.05682 (linear memory); Dao 2023,
arXiv:2307.08691, section 3.1 (weights recomputed from the log-sum-exp).
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jattn.algorithms.tiling import Arrays, Tiling, tiling_of
from jattn.core.plan import Grid, Plan, make_plan
from jattn.core.softmax import SoftmaxState
from jattn.core.spec import AttentionSpec
from jattn.core.tile import Pairs, accumulator, poison

BLOCK_SIZES = (256, 256)


def attend(
    q: jax.Array, k: jax.Array, v: jax.Array, pairs: Pairs, spec: AttentionSpec
) -> tuple[jax.Array, jax.Array]:
    """Attention of one head; arguments and results as in `reference.attend`."""
    block_q, block_k = spec.block_sizes or BLOCK_SIZES
    num_queries, num_keys = q.shape[0], k.shape[0]
    grid = Grid(
        num_queries, num_keys, min(block_q, num_queries), min(block_k, num_keys)
    )
    plan = make_plan(pairs, grid)
    # In a narrow dtype, sums over tiles and differences of products would be rounded.
    dtype = accumulator(q.dtype)
    q, k, v = (x.astype(dtype) for x in poison(q, k, v))
    tiling, others, floats = tiling_of(q, k, v, pairs, grid, spec.precision)
    out, shift, log_sum = _attend(tiling, others, floats, plan)
    return out, shift + log_sum


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _attend(
    tiling: Tiling, others: Arrays, floats: Arrays, plan: Plan
) -> tuple[jax.Array, ...]:
    """`SoftmaxState.normalised` of every row."""
    dtype = accumulator(floats[0].dtype)
    value_dim = tiling.operands(others, floats)[2].shape[0]

    def row(x: tuple) -> tuple[jax.Array, ...]:
        start, (columns, _, full, live) = x
        in_row = tiling.row(start, others, floats)

        def add_tile(full: bool, slot: jax.Array, state: SoftmaxState) -> SoftmaxState:
            j = columns[slot]
            tile = tiling.column(j, *in_row)
            s = tiling.logits(j, tile[0], tile[1], full)
            v_t = tiling.operands(*tile)[2]
            return state.add(s, v_t.T, tiling.precision)

        empty = SoftmaxState.empty((tiling.grid.block_q,), value_dim, dtype)
        state = _varying(empty, in_row)
        state = lax.fori_loop(0, full, functools.partial(add_tile, True), state)
        state = lax.fori_loop(full, live, functools.partial(add_tile, False), state)
        return state.normalised()

    plan = jax.tree.map(jnp.asarray, plan)
    rows = lax.map(row, (tiling.grid.row_starts, plan))
    return jax.tree.map(tiling.join, rows)


@_attend.defjvp
def _attend_jvp(tiling: Tiling, primals: tuple, tangents: tuple) -> tuple:
    """The tangents of the output and of the log-sum-exp, all of it in `log_sum`.

    With weights p = exp(s - shift - log_sum), and ds the tangent of the logits:
        d log_sum = sum p ds          d out = p ds v + p dv - (d log_sum) out
    """
    others, floats, plan = primals
    dfloats = tangents[1]
    out, shift, log_sum = _attend(tiling, others, floats, plan)
    # Of a row without keys no tile has a weight, whatever stands here.
    norm = shift, jnp.where(jnp.isneginf(log_sum), 0, log_sum)

    @jax.checkpoint
    def row(x: tuple) -> tuple[jax.Array, jax.Array]:
        start, (columns, verdicts, _, _), norm = x
        in_row = tiling.row(start, others, floats, dfloats)
        block = tiling.grid.block_q
        zeros = jnp.zeros((block, out.shape[1]), out.dtype), jnp.zeros(block, out.dtype)
        zeros = _varying(zeros, [in_row, norm])

        # The checkpoint encloses the slicing too: what is kept is not sliced.
        @jax.checkpoint
        def visit(
            j: jax.Array, verdict: jax.Array, in_row: list[Arrays], norm: tuple
        ) -> tuple[jax.Array, jax.Array]:
            parts = tiling.column(j, *in_row)
            branches: list[Callable[..., Any]] = [
                lambda *_: zeros,  # EMPTY
                functools.partial(_tile_tangent, tiling, False),  # PARTIAL
                functools.partial(_tile_tangent, tiling, True),  # FULL
            ]
            return lax.switch(verdict, branches, j, parts, norm)

        def add_tile(sums: Any, slot: tuple) -> tuple[Any, None]:
            return jax.tree.map(jnp.add, sums, visit(*slot, in_row, norm)), None

        return lax.scan(add_tile, zeros, (columns, verdicts))[0]

    starts = tiling.grid.row_starts
    rows = starts[:, None] + np.arange(tiling.grid.block_q)[None, :]
    plan = jax.tree.map(jnp.asarray, plan)
    sums = lax.map(row, (starts, plan, tuple(x[rows] for x in norm)))
    acc, dlog_sum = jax.tree.map(tiling.join, sums)
    dout = acc - dlog_sum[:, None] * out
    return (out, shift, log_sum), (dout, jnp.zeros_like(shift), dlog_sum)


def _tile_tangent(
    tiling: Tiling, full: bool, j: jax.Array, parts: list[Arrays], norm: tuple
) -> tuple[jax.Array, jax.Array]:
    """A tile's part of p ds v + p dv, (T, D), and of sum p ds, (T,)."""
    others, floats, dfloats = parts
    shift, log_sum = norm
    s, ds = jax.jvp(lambda x: tiling.logits(j, others, x, full), (floats,), (dfloats,))
    v_t, dv_t = (tiling.operands(others, x)[2] for x in (floats, dfloats))
    p = jnp.exp(s - shift[:, None] - log_sum[:, None])
    pds = p * ds
    if not full:
        # Of a row with a NaN every weight is NaN, also that of a forbidden key.
        forbidden = jnp.isneginf(s)
        p, pds = jnp.where(forbidden, 0, p), jnp.where(forbidden, 0, pds)
    matmul = functools.partial(jnp.matmul, precision=tiling.precision)
    acc = matmul(pds, v_t.T) + matmul(p, dv_t.T)
    if not full:
        # A cotangent of NaN times a weight of 0 would reach forbidden keys; the NaN of
        # the weights reaches the others without it, and d log_sum carries it on.
        acc = jnp.where(jnp.isnan(shift)[:, None], 0, acc)
    return acc, jnp.sum(pds, axis=-1)


def _varying(start: Any, like: Any) -> Any:
    """The start of a loop, marked as different on the devices where `like` is.

    Inside `jax.shard_map` the type of an array says so, and a loop must keep types. A
    sum has the marks of all its terms; its value is not used.
    """
    terms = (jnp.sum(x, dtype=jnp.float32) for x in jax.tree.leaves(like))
    mark = functools.reduce(jnp.add, terms)
    return jax.tree.map(lambda x: x + jnp.zeros_like(mark, x.dtype, x.shape), start)
