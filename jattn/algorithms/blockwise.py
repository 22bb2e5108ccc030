"""Attention tile by tile: O(T + S) memory, in every derivative.

The primal is a fold of `SoftmaxState` over the live tiles of a row of tiles. Its
derivative is written once, forwards, as a sum over the same tiles of the tangent of the
tile function; `tile_sum` says how JAX turns that into a backward pass and into
derivatives of higher order. Logits and weights are computed anew in each: what is kept
is a maximum and a sum for every query.

Source: Rabe & Staats 2021, arXiv:2112.05682 (linear memory); Dao 2023,
arXiv:2307.08691, section 3.1 (weights recomputed from the log-sum-exp).
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero

from jattn.algorithms.block_sizes import plan_of
from jattn.algorithms.cuts import Cut
from jattn.algorithms.partition import merge, partition
from jattn.algorithms.tile_sum import tile_sum
from jattn.algorithms.tiling import Arrays, Tiling, tiling_of
from jattn.core.plan import Plan
from jattn.core.softmax import SoftmaxState
from jattn.core.spec import AttentionSpec
from jattn.core.stats import Moments, Stats, stats_of
from jattn.core.tile import Pairs, accumulator, poison
from jattn.core.varying import varying


def attend(
    q: jax.Array, k: jax.Array, v: jax.Array, pairs: Pairs, spec: AttentionSpec
) -> tuple[jax.Array, jax.Array, Stats | None]:
    """Attention of one head; arguments and results as in `reference.attend`."""
    out, shift, log_sum, *moments = attend_tiles(*tiled(q, k, v, pairs, spec))
    stats = stats_of(shift, log_sum, *moments) if spec.stats else None
    return out, shift + log_sum, stats


def tiled(
    q: jax.Array, k: jax.Array, v: jax.Array, pairs: Pairs, spec: AttentionSpec
) -> tuple[Tiling, Arrays, Arrays, Plan]:
    """The arguments of `attend_tiles`."""
    grid, plan = plan_of(pairs, q.shape[0], k.shape[0], spec)
    # In a narrow dtype, sums over tiles and differences of products would be rounded.
    dtype = accumulator(q.dtype)
    q, k, v = (x.astype(dtype) for x in poison(q, k, v))
    return *tiling_of(q, k, v, pairs, grid, spec), plan


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def attend_tiles(
    tiling: Tiling, others: Arrays, floats: Arrays, plan: Plan
) -> tuple[jax.Array, ...]:
    """`SoftmaxState.normalised` of every row, and `Moments.finish` if wanted."""
    _, _, v_t, pairs = tiling.operands(others, floats)
    shape, dtype = (tiling.grid.block_q,), floats[0].dtype
    if pairs.sink is None:
        state = SoftmaxState.empty(shape, v_t.shape[-2], dtype)
    else:
        sink = jnp.asarray(pairs.sink, dtype)
        state = SoftmaxState.of_sink(sink, shape, v_t.shape[-2])
    moments = Moments.of_start(state) if tiling.spec.stats else None

    def row(x: tuple) -> tuple[jax.Array, ...]:
        i, (columns, full, live) = x
        in_row = tiling.row(i, others, floats)

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
    rows = lax.map(row, (np.arange(tiling.grid.num_rows, dtype=np.int32), plan))
    return jax.tree.map(tiling.join, rows)


def normaliser(shift: jax.Array, log_sum: jax.Array) -> list[jax.Array]:
    """What to subtract from the logits of rows for the logarithms of their weights.

    Of a row without keys no tile has a weight, whatever stands here.
    """
    return [shift, jnp.where(jnp.isneginf(log_sum), 0, log_sum)]


@functools.partial(attend_tiles.defjvp, symbolic_zeros=True)
def _attend_jvp(tiling: Tiling, primals: tuple, tangents: tuple) -> tuple:
    """The tangents of the output and of the log-sum-exp, all of it in `log_sum`.

    With weights p = exp(s - shift - log_sum), and ds the tangent of the logits:
        d log_sum = sum p ds          d out = sum p ds v + p dv - (d log_sum) out
    """
    others, floats, plan = primals
    out, shift, log_sum, *moments = attend_tiles(tiling, others, floats, plan)
    # With these kept, `jax.checkpoint` does not run the fold above once more.
    out = checkpoint_name(out, "attention_out")
    shift, log_sum = checkpoint_name((shift, log_sum), "attention_lse")
    moves = [not isinstance(dx, SymbolicZero) for dx in tangents[1]]
    dfloats, _ = partition(moves, tangents[1])
    moving_cuts, _ = partition(moves, tiling.float_cuts)
    norm = normaliser(shift, log_sum)
    rows = Cut(queries=0)
    acc, dlog_sum = tile_sum(
        functools.partial(_tile_tangent, tiling, moves),
        plan,
        tiling.grid,
        [others, floats, dfloats, norm],
        [*tiling.cuts, moving_cuts, [rows, rows]],
        [rows, rows],
    )
    sink = tiling.operands(others, floats)[3].sink
    dsink = tiling.operands(others, tangents[1])[3].sink
    if sink is not None and not isinstance(dsink, SymbolicZero):
        dlog_sum += jnp.exp(sink - norm[0] - norm[1]) * dsink
    dout = acc - dlog_sum[:, None] * out
    dshift, *dmoments = (jnp.zeros_like(x) for x in (shift, *moments))
    return (out, shift, log_sum, *moments), (dout, dshift, dlog_sum, *dmoments)


def _tile_tangent(
    tiling: Tiling,
    moves: list[bool],
    full: bool,
    i: jax.Array,
    j: jax.Array,
    tile: list[Arrays],
) -> tuple[jax.Array, jax.Array]:
    """A tile's part of p ds v + p dv, (T, D), and of sum p ds, (T,)."""
    others, floats, dfloats, (shift, log_sum) = tile
    moving, rest = partition(moves, floats)

    def of_moving(moving: Arrays) -> tuple[jax.Array, jax.Array]:
        merged = merge(moves, moving, rest)
        s = tiling.logits(j, others, merged, full)
        return s, tiling.operands(others, merged)[2]

    (s, v_t), (ds, dv_t) = jax.jvp(of_moving, (moving,), (dfloats,))
    p = jnp.exp(s - shift[:, None] - log_sum[:, None])
    pds = p * ds
    if not full:
        # Of a row with a NaN every weight is NaN, also that of a forbidden key.
        forbidden = jnp.isneginf(s)
        p, pds = jnp.where(forbidden, 0, p), jnp.where(forbidden, 0, pds)
    kept = tiling.operands(others, floats)[3].kept
    acc = tiling.weigh(kept(pds), v_t) + tiling.weigh(kept(p), dv_t)
    if not full:
        # A cotangent of NaN times a weight of 0 would reach forbidden keys; the NaN of
        # the weights reaches the others without it, and d log_sum carries it on.
        acc = jnp.where(jnp.isnan(shift)[:, None], 0, acc)
    return tiling.own_rows(i, acc), tiling.own_rows(i, jnp.sum(pds, axis=-1))
