"""Which tiles are visited: all that are needed, and no other."""

import functools
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracle import assert_close, dense_attention, exact, jit
from test_data_masks import visits

import jattn
from jattn import masks
from jattn.core.plan import Grid, make_plan
from jattn.core.rules import EMPTY, FULL, PARTIAL
from jattn.core.tile import Pairs

T, S = 37, 41
GRID = Grid(T, S, 8, 11)
IDS = np.repeat([1, 2, 3, 0], [13, 11, 9, 8]).astype(np.int32)


LAYOUT = np.kron(np.array([[1, 0], [1, 1]]), np.ones((4, 4))) > 0


def head_of(mask):
    return jax.tree.map(lambda x: x[0], mask)


def pairs_of(mask, num_queries=T, num_keys=S):
    q_pos = np.arange(num_queries, dtype=np.int32)
    k_pos = np.arange(num_keys, dtype=np.int32)
    return Pairs(1.0, (), mask, q_pos, k_pos).bind(num_queries, num_keys, 1)


def visited(plan):
    """The verdict of every tile of the grid, as the plan has it."""
    table = np.zeros((len(plan.columns), len(GRID.column_starts)), int)
    for i, columns in enumerate(plan.columns):
        for slot in range(int(plan.live[i])):
            table[i, columns[slot]] = FULL if slot < plan.full[i] else PARTIAL
    return table


@pytest.mark.parametrize(
    "mask",
    [
        None,
        masks.causal(),
        masks.sliding_window(5, 3),
        masks.causal() & masks.segments(IDS[:T], IDS),
        masks.lengths(17) | masks.sliding_window(2),
        masks.nothing(),
        masks.causal() | masks.prefix(20),
        masks.causal() & head_of(masks.block_sparse(LAYOUT, 5)),
        masks.dense(np.arange(T)[:, None] // 8 == np.arange(S)[None] // 11),
    ],
    ids=str,
)
def test_a_plan_has_every_live_tile_once_and_no_empty_one(mask):
    plan = jit(lambda mask: make_plan(pairs_of(mask), GRID))(mask)
    plan = jax.tree.map(np.asarray, plan)
    table = visited(plan)
    everything = masks.everything() if mask is None else pairs_of(mask).mask
    position = np.arange(T)[:, None], np.arange(S)[None, :]
    allowed = np.broadcast_to(np.asarray(everything.allowed(*position)), (T, S))
    for i, row in enumerate(GRID.row_starts):
        for j, column in enumerate(GRID.column_starts):
            tile = allowed[row : row + 8, column : column + 11]
            if table[i, j] == EMPTY:
                assert not tile.any()
            if table[i, j] == FULL:
                assert tile.all() and j < len(GRID.column_starts) - 1
    assert (table == EMPTY).any() == (mask is not None)


def test_a_layout_is_summed_up_once_for_all_tiles():
    mask = masks.block_sparse(jnp.asarray(LAYOUT), 5)
    plan = str(jax.make_jaxpr(lambda mask: make_plan(pairs_of(mask), GRID))(mask))
    assert set(re.findall(r"(\w+\[\S+\]) = cumsum", plan)) == {"i32[1,8,8]"}


def test_a_plan_without_data_is_made_while_tracing():
    for mask in (masks.causal(), masks.causal() | masks.prefix(20)):
        plan = make_plan(pairs_of(mask), GRID)
        assert all(isinstance(x, np.ndarray) for x in plan)
    traced = make_plan(
        pairs_of(masks.segments(jnp.asarray(IDS[:T]), jnp.asarray(IDS))), GRID
    )
    assert all(isinstance(x, jax.Array) for x in traced)


@pytest.mark.parametrize(
    "mask",
    [masks.sliding_window(3, 3), masks.block_sparse(np.eye(16, dtype=bool), 4)],
    ids=str,
)
def test_a_tile_that_is_empty_is_never_computed(mask):
    x = jnp.asarray(exact(0, 64, 1, 4), jnp.float32)

    def attend(rule, x):
        return jattn.attention(x, x, x, mask=mask, score=rule, block_sizes=(8, 8))

    allowed = pairs_of(mask, 64, 64).mask.allowed(*np.ogrid[:64, :64])
    tiles = np.asarray(allowed).reshape(8, 8, 8, 8).any((1, 3))
    live = [(8 * int(i), 8 * int(j)) for i, j in np.argwhere(tiles)]
    assert visits(attend, x) == dict.fromkeys(live, 1)
    assert 8 <= len(live) <= 22


def test_the_verdict_of_a_custom_mask_is_honoured():
    x = jnp.ones((8, 1, 4))
    lying = masks.rule(lambda q, k: k <= q, verdict=lambda q, k: EMPTY)
    out = jattn.attention(x, x, x, mask=lying, block_sizes=(4, 4))
    np.testing.assert_array_equal(out, np.zeros_like(x))


def test_other_documents_are_other_data_and_no_other_program():
    attend = chex.assert_max_traces(
        lambda x, ids: jattn.attention(
            x, x, x, mask=masks.causal() & masks.segments(ids), block_sizes=(8, 8)
        ),
        n=1,
    )
    attend = jax.jit(attend)
    x = jnp.asarray(exact(1, 2, 32, 2, 4), jnp.float32)
    for seed in range(5):
        ids = np.sort(np.random.default_rng(seed).integers(0, 4, (2, 32)))
        same = (ids[:, :, None] == ids[:, None]) & (ids[:, None] != 0)
        allowed = same & np.tril(np.ones((32, 32), bool))
        assert_close(attend(x, ids), dense_attention(x, x, x, allowed[:, None]).out)


@pytest.mark.parametrize(
    "mode", ["grad", "jvp", "forward over reverse", "twice reverse"]
)
def test_memory_is_linear_in_length_in_every_derivative(mode):
    def attend(x):
        return jattn.attention(x, x, x, mask=masks.causal(), block_sizes=(64, 64)).sum()

    gradient = jax.grad(attend)
    derivative = {
        "grad": gradient,
        "jvp": lambda x: jax.jvp(attend, (x,), (x,)),
        "forward over reverse": lambda x: jax.jvp(gradient, (x,), (x,))[1],
        "twice reverse": jax.grad(lambda x: (gradient(x) * x).sum()),
    }[mode]

    def temporary(n):
        x = jax.ShapeDtypeStruct((n, 1, 16), jnp.float32)
        compiled = jit(derivative).lower(x).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    small, large = temporary(2048), temporary(16384)
    assert np.log(large / small) / np.log(8) <= 1.05
    assert large < 16384**2  # a quarter of one float32 score matrix


def test_narrow_inputs_have_gradients_as_exact_as_their_rounding():
    """Values that share an offset: differences of large products decide."""
    q, k, v, cotangent = (exact(n, 1, 64, 1, 16) for n in range(4))
    arrays = [jnp.asarray(x, jnp.bfloat16) for x in (q, k, v + 100)]

    def gradients(arrays, algorithm):
        def attend(*arrays):
            blocks = (32, 32) if algorithm == "blockwise" else None
            return jattn.attention(
                *arrays, implementation=algorithm, block_sizes=blocks
            )

        out, pull = jax.vjp(attend, *arrays)
        return pull(jnp.asarray(cotangent, out.dtype))

    gradients = jit(gradients, static_argnums=1)

    want = gradients([x.astype(jnp.float32) for x in arrays], "reference")
    for got, exactly in zip(gradients(arrays, "blockwise"), want, strict=True):
        error = np.abs(np.asarray(got, np.float32) - exactly).max()
        assert error <= 2e-2 * np.abs(exactly).max()


def test_blockwise_runs_inside_shard_map():
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("data")
    x = jnp.asarray(exact(2, 2, 16, 2, 4), jnp.float32)
    ids = jnp.asarray(np.sort(np.random.default_rng(0).integers(1, 4, (2, 16))))

    def attend(x, ids):
        mask = masks.causal() & masks.segments(ids)
        return jattn.attention(x, x, x, mask=mask, block_sizes=(4, 4))

    sharded = jax.shard_map(attend, mesh=mesh, in_specs=spec, out_specs=spec)
    for fn in (
        lambda f, x: f(x, ids),
        jax.grad(lambda f, x: (f(x, ids) ** 2).sum(), 1),
    ):
        got, want = (jit(functools.partial(fn, f))(x) for f in (sharded, attend))
        assert_close(got, want)


@pytest.mark.parametrize("options", [dict(block_sizes=(4, 4)), {}])
def test_what_all_devices_share_in_shard_map_has_a_summed_gradient(options):
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    spec, same = jax.sharding.PartitionSpec("data"), jax.sharding.PartitionSpec()
    x = jnp.asarray(exact(2, 2, 8, 2, 4), jnp.float32)
    shared = [jnp.asarray(exact(n, 2), jnp.float32) for n in (3, 4, 5)]

    def attend(x, sinks, scale, slopes):
        fade = jattn.scores.rule(fading, slopes, axes=["N"])
        rules = dict(sinks=sinks, scale=scale, score=fade)
        return jattn.attention(x, x, x, **rules, **options)

    def gradient(f):
        return jax.grad(lambda *shared: (f(x, *shared) ** 2).sum(), (0, 1, 2))

    specs = (spec, same, same, same)
    sharded = jax.shard_map(attend, mesh=mesh, in_specs=specs, out_specs=spec)
    got = jit(gradient(sharded))(*shared)
    for g, want in zip(got, jit(gradient(attend))(*shared), strict=True):
        assert_close(g, want)


def test_gradients_of_arrays_on_a_mesh_with_explicit_axes():
    explicit = (jax.sharding.AxisType.Explicit,) * 2
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=explicit)
    spec = jax.sharding.PartitionSpec("data", None, "model")
    x = jnp.asarray(exact(2, 4, 10, 2, 4), jnp.float32)

    def loss(x):
        y = jattn.attention(x, x, x, mask=masks.causal(), block_sizes=(4, 4))
        return (y**2).sum()

    with jax.set_mesh(mesh):
        there = jax.device_put(x, jax.sharding.NamedSharding(mesh, spec))
        got = jit(jax.grad(loss))(there)
    assert_close(got, jit(jax.grad(loss))(x))


def fading(s, q_pos, k_pos, slope):
    return s - slope * jnp.abs(q_pos - k_pos)


def test_queries_are_sharded_beside_keys_that_all_devices_share():
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    spec, same = jax.sharding.PartitionSpec("data"), jax.sharding.PartitionSpec()
    q, k, v = (jnp.asarray(exact(n, 8, 2, 4), jnp.float32) for n in (2, 3, 4))

    def attend(q, k, v):
        return jattn.attention(q, k, v, block_sizes=(4, 4))

    def gradient(f):
        return jax.grad(lambda *x: (f(*x) ** 2).sum(), (0, 1, 2))

    specs = (spec, same, same)
    sharded = jax.shard_map(attend, mesh=mesh, in_specs=specs, out_specs=spec)
    got = jit(gradient(sharded))(q, k, v)
    for g, want in zip(got, jit(gradient(attend))(q, k, v), strict=True):
        assert_close(g, want)


@pytest.mark.parametrize("blocks", [(4, 4), None])
def test_arrays_that_a_rule_closes_over_have_gradients(blocks):
    x = jnp.asarray(exact(3, 8, 2, 4), jnp.float32)

    def closed(slope, limit):
        fade = jattn.scores.rule(lambda s, q, k: s - slope * jnp.abs(q - k))
        mask = masks.rule(lambda q, k: k < limit)
        return (
            jattn.attention(x, x, x, mask=mask, score=fade, block_sizes=blocks) ** 2
        ).sum()

    def passed(slope, limit):
        fade = jattn.scores.rule(lambda s, q, k, a: s - a * jnp.abs(q - k), slope)
        mask = masks.rule(lambda q, k, n: k < n, limit)
        return (
            jattn.attention(x, x, x, mask=mask, score=fade, block_sizes=blocks) ** 2
        ).sum()

    for derivative in (jax.grad, jax.hessian):
        slope, limit = jnp.float32(0.1), jnp.int32(5)
        got, want = (jit(derivative(f))(slope, limit) for f in (closed, passed))
        assert_close(got, np.asarray(want, np.float64))
