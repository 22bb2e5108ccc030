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

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero

from jattn.algorithms.tile_sum import Cut, cut_of, tile_sum, varying
from jattn.algorithms.tiling import Arrays, Tiling, tiling_of
from jattn.core.plan import Grid, Plan, make_plan
from jattn.core.product import product
from jattn.core.softmax import SoftmaxState
from jattn.core.spec import AttentionSpec
from jattn.core.stats import Moments, Stats, stats_of
from jattn.core.tile import Pairs, accumulator, poison

BLOCK_SIZES = {"cpu": (256, 256), "gpu": (512, 512), "tpu": (512, 512)}
"""(queries, keys) of a tile, by backend.

For a CPU as measured; for a TPU by the compiler's own estimate of cycles, which is half
of that of (256, 256), with as much memory; for a GPU a guess.
"""


def default_block_sizes(backend: str, groups: int) -> tuple[int, int]:
    """The block sizes where none are given.

    The queries of all heads that share a key head stand in one tile, so each has a part
    of its rows.

    Args:
        backend: as `jax.default_backend()` names it.
        groups: G, query heads a key head.
    """
    block_q, block_k = BLOCK_SIZES.get(backend, BLOCK_SIZES["gpu"])
    return max(block_q // groups, 64), block_k


def attend(
    q: jax.Array, k: jax.Array, v: jax.Array, pairs: Pairs, spec: AttentionSpec
) -> tuple[jax.Array, jax.Array, Stats | None]:
    """Attention of one head; arguments and results as in `reference.attend`."""
    out, shift, log_sum, *moments = _attend(*_tiled(q, k, v, pairs, spec))
    stats = stats_of(shift, log_sum, *moments) if spec.stats else None
    return out, shift + log_sum, stats


def score_gradient_rows(
    q: jax.Array,
    out_gradient: jax.Array,
    lse_gradient: jax.Array,
    k: jax.Array,
    v: jax.Array,
    pairs: Pairs,
    spec: AttentionSpec,
) -> jax.Array:
    """The norm of the gradient of the logits of every query of one head.

    dL/ds = p (v dL/dout - out dL/dout + dL/dlse)

    Args:
        q: queries, (T, H).
        out_gradient: dL/dout, (T, D).
        lse_gradient: dL/dlse, (T, 1).
        k: keys, (S, H).
        v: values, (S, D).
        pairs: as in `attend`.
        spec: the static options.

    Returns:
        (T,).

    Source: Dao et al. 2022, arXiv:2205.14135, appendix B.2.
    """
    tiling, others, floats, plan = _tiled(q, k, v, pairs, spec)
    out, shift, log_sum, *_ = _attend(tiling, others, floats, plan)
    out_gradient = out_gradient.astype(out.dtype)
    less = jnp.sum(out * out_gradient, axis=1) - lse_gradient[:, 0]
    lists = [others, floats, [out_gradient, *_norm(shift, log_sum), less]]
    letters = [*tiling.other_letters, *tiling.float_letters, "TD", "T", "T", "T"]

    def squares(full: bool, i: jax.Array, j: jax.Array, *tile: jax.Array) -> tuple:
        items = iter(tile)
        others, floats, rows = ([next(items) for _ in x] for x in lists)
        out_gradient, shift, log_sum, less = rows
        _, _, v_t, pairs = tiling.operands(others, floats)
        s = tiling.logits(j, others, floats, full)
        p = jnp.exp(s - shift[:, None] - log_sum[:, None])
        dp = product("td,ds->ts", out_gradient, v_t, spec.dtype, spec.precision)
        ds = p * (pairs.kept(dp) - less[:, None])
        if not full:
            ds = jnp.where(jnp.isneginf(s), 0, ds)
        return (tiling.own_rows(i, jnp.sum(ds**2, axis=1)),)

    arrays = [x for items in lists for x in items]
    cuts = [cut_of(x, array) for x, array in zip(letters, arrays, strict=True)]
    return jnp.sqrt(*tile_sum(squares, plan, tiling.grid, arrays, cuts, [Cut(0, None)]))


def _tiled(
    q: jax.Array, k: jax.Array, v: jax.Array, pairs: Pairs, spec: AttentionSpec
) -> tuple[Tiling, Arrays, Arrays, Plan]:
    """The arguments of `_attend`."""
    block_q, block_k = spec.block_sizes or BLOCK_SIZES["cpu"]
    num_queries, num_keys = q.shape[0], k.shape[0]
    grid = Grid(
        num_queries, num_keys, min(block_q, num_queries), min(block_k, num_keys)
    )
    plan = make_plan(pairs, grid)
    # In a narrow dtype, sums over tiles and differences of products would be rounded.
    dtype = accumulator(q.dtype)
    q, k, v = (x.astype(dtype) for x in poison(q, k, v))
    return *tiling_of(q, k, v, pairs, grid, spec), plan


def _norm(shift: jax.Array, log_sum: jax.Array) -> tuple[jax.Array, jax.Array]:
    """What to subtract from logits to have the logarithms of weights.

    Of a row without keys no tile has a weight, whatever stands here.
    """
    return shift, jnp.where(jnp.isneginf(log_sum), 0, log_sum)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _attend(
    tiling: Tiling, others: Arrays, floats: Arrays, plan: Plan
) -> tuple[jax.Array, ...]:
    """`SoftmaxState.normalised` of every row, and `Moments.finish` if wanted."""
    _, _, v_t, pairs = tiling.operands(others, floats)
    shape, dtype = (tiling.grid.block_q,), floats[0].dtype
    if pairs.sink is None:
        state = SoftmaxState.empty(shape, v_t.shape[0], dtype)
    else:
        sink = jnp.asarray(pairs.sink, dtype)
        state = SoftmaxState.of_sink(sink, shape, v_t.shape[0])
    moments = Moments.of_start(state) if tiling.spec.stats else None

    def row(x: tuple) -> tuple[jax.Array, ...]:
        start, (columns, _, full, live) = x
        in_row = tiling.row(start, others, floats)

        def add_tile(full: bool, slot: jax.Array, before: tuple) -> tuple:
            state, moments = before
            j = columns[slot]
            tile = tiling.column(j, *in_row)
            _, _, v_t, pairs = tiling.operands(*tile)
            s = tiling.logits(j, tile[0], tile[1], full)
            after = state.add(s, lambda p: tiling.weigh(pairs.kept(p), v_t))
            return after, moments and moments.add(state, after, s)

        start = varying((state, moments), in_row)
        start = lax.fori_loop(0, full, functools.partial(add_tile, True), start)
        end, ended = lax.fori_loop(
            full, live, functools.partial(add_tile, False), start
        )
        return (*end.normalised(), *(ended.finish(end) if ended else ()))

    plan = jax.tree.map(jnp.asarray, plan)
    rows = lax.map(row, (tiling.grid.row_starts, plan))
    return jax.tree.map(tiling.join, rows)


@functools.partial(_attend.defjvp, symbolic_zeros=True)
def _attend_jvp(tiling: Tiling, primals: tuple, tangents: tuple) -> tuple:
    """The tangents of the output and of the log-sum-exp, all of it in `log_sum`.

    With weights p = exp(s - shift - log_sum), and ds the tangent of the logits:
        d log_sum = sum p ds          d out = sum p ds v + p dv - (d log_sum) out
    """
    others, floats, plan = primals
    out, shift, log_sum, *moments = _attend(tiling, others, floats, plan)
    moves = [not isinstance(dx, SymbolicZero) for dx in tangents[1]]
    dfloats = [dx for dx, moved in zip(tangents[1], moves, strict=True) if moved]
    norm = [*_norm(shift, log_sum)]
    names = tiling.float_letters
    moving = [x for x, moved in zip(names, moves, strict=True) if moved]
    lists = [others, floats, dfloats, norm]
    letters = [*tiling.other_letters, *names, *moving, "T", "T"]
    arrays = [x for items in lists for x in items]

    def tangent(full: bool, i: jax.Array, j: jax.Array, *tile: jax.Array) -> tuple:
        items = iter(tile)
        others, floats, dfloats, norm = ([next(items) for _ in x] for x in lists)
        sums = _tile_tangent(tiling, full, j, others, floats, moves, dfloats, norm)
        return tuple(tiling.own_rows(i, x) for x in sums)

    cuts = [cut_of(x, array) for x, array in zip(letters, arrays, strict=True)]
    rows = [Cut(0, None), Cut(0, None)]
    acc, dlog_sum = tile_sum(tangent, plan, tiling.grid, arrays, cuts, rows)
    sink = tiling.operands(others, floats)[3].sink
    dsink = tiling.operands(others, tangents[1])[3].sink
    if sink is not None and not isinstance(dsink, SymbolicZero):
        dlog_sum += jnp.exp(sink - norm[0] - norm[1]) * dsink
    dout = acc - dlog_sum[:, None] * out
    constants = [jnp.zeros_like(x) for x in (shift, *moments)]
    return (
        (out, shift, log_sum, *moments),
        (dout, constants[0], dlog_sum, *constants[1:]),
    )


def _tile_tangent(
    tiling: Tiling,
    full: bool,
    j: jax.Array,
    others: Arrays,
    floats: Arrays,
    moves: list[bool],
    dfloats: Arrays,
    norm: Arrays,
) -> tuple[jax.Array, jax.Array]:
    """A tile's part of p ds v + p dv, (T, D), and of sum p ds, (T,)."""

    def of_moving(moving: Arrays) -> tuple[jax.Array, jax.Array]:
        new = iter(moving)
        all_floats = [
            next(new) if moved else x for x, moved in zip(floats, moves, strict=True)
        ]
        s = tiling.logits(j, others, all_floats, full)
        return s, tiling.operands(others, all_floats)[2]

    pairs = tiling.operands(others, floats)[3]

    moving = [x for x, moved in zip(floats, moves, strict=True) if moved]
    (s, v_t), (ds, dv_t) = jax.jvp(of_moving, (moving,), (dfloats,))
    shift, log_sum = norm
    p = jnp.exp(s - shift[:, None] - log_sum[:, None])
    pds = p * ds
    if not full:
        # Of a row with a NaN every weight is NaN, also that of a forbidden key.
        forbidden = jnp.isneginf(s)
        p, pds = jnp.where(forbidden, 0, p), jnp.where(forbidden, 0, pds)
    acc = tiling.weigh(pairs.kept(pds), v_t) + tiling.weigh(pairs.kept(p), dv_t)
    if not full:
        # A cotangent of NaN times a weight of 0 would reach forbidden keys; the NaN of
        # the weights reaches the others without it, and d log_sum carries it on.
        acc = jnp.where(jnp.isnan(shift)[:, None], 0, acc)
    return acc, jnp.sum(pds, axis=-1)
