"""A sum over live tiles stays one in every derivative and under every map."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracle import assert_close, exact, jit

import jattn
from jattn.algorithms.cuts import Cut, cut_of
from jattn.algorithms.tile_sum import tile_sum
from jattn.core.plan import Grid, Plan
from jattn.core.rules import EMPTY, FULL, PARTIAL

T, S, H = 7, 11, 3
OVERLAPPING = Grid(T, S, 3, 4)  # rows from 0, 3 and 4; columns from 0, 4 and 7
CUTS = [Cut(0, None), Cut(None, 1), Cut(0, 1), Cut(None, None)]
NAMES = ["queries", "keys", "pairs", "whole"]
VERDICTS = np.array(
    [[EMPTY, EMPTY, EMPTY], [EMPTY, FULL, EMPTY], [PARTIAL, EMPTY, FULL]]
)


def arrays(seed=0):
    shapes = (T, H), (H, S), (T, S), (H,)
    return [jnp.asarray(exact(seed + n, *shape)) for n, shape in enumerate(shapes)]


def body(full, i, j, tile):
    """Something that depends on all it is given, with one result of every cut."""
    queries, keys, pairs, whole = tile
    s = ((queries * whole[None, :]) @ keys) ** 3 * pairs + 1.0 + full
    s = s * (1.0 + i + 3.0 * j)
    return s @ keys.T, queries.T @ s, s * pairs, whole * s.sum()


def plan_of(verdicts, slots=None):
    columns = np.argsort(-verdicts, axis=1, stable=True).astype(np.int32)
    ordered = np.take_along_axis(verdicts, columns, axis=1)
    full, live = (ordered == FULL).sum(1), (ordered != EMPTY).sum(1)
    slots = max(1, live.max()) if slots is None else slots
    return Plan(columns[:, :slots], full, live)


def ours(*arrays, plan=None, grid=OVERLAPPING):
    plan = plan_of(VERDICTS) if plan is None else plan
    return tile_sum(body, plan, grid, list(arrays), CUTS, CUTS)


def loop(*arrays, verdicts=VERDICTS, grid=OVERLAPPING):
    """The same, tile after tile."""
    sums = [jnp.zeros_like(x) for x in arrays]
    for i, row in enumerate(grid.row_starts):
        for j, column in enumerate(grid.column_starts):
            if verdicts[i, j] == EMPTY:
                continue
            t, s = slice(row, row + grid.block_q), slice(column, column + grid.block_k)
            places = [(t, slice(None)), (slice(None), s), (t, s), (slice(None),)]
            tile = [x[place] for x, place in zip(arrays, places, strict=True)]
            parts = body(verdicts[i, j] == FULL, i, j, tile)
            sums = [
                x.at[place].add(part)
                for x, place, part in zip(sums, places, parts, strict=True)
            ]
    return sums


def tangent(fn, x, dx, g):
    return jax.jvp(fn, x, dx)[1]


def gradient(fn, x, dx, g):
    return jax.vjp(fn, *x)[1](g)


def tangent_of_gradient(fn, x, dx, g):
    return jax.jvp(lambda *x: gradient(fn, x, dx, g), x, dx)


def gradient_of_gradient(fn, x, dx, g):
    pull = jax.vjp(lambda x, g: gradient(fn, x, dx, g), x, g)[1]
    return pull(dx)


def gradient_of_tangent(fn, x, dx, g):
    primal, pull = jax.vjp(lambda x, dx: tangent(fn, x, dx, g), x, dx)
    return primal, pull(g)


def assert_all_close(got, want):
    def compare(a, b):
        assert a.shape == b.shape
        size = max(1.0, np.abs(b).max())
        assert_close(a / size, b / size, jnp.float64)

    jax.tree.map(compare, got, want)


@pytest.mark.parametrize(
    "grid, verdicts",
    [
        (OVERLAPPING, VERDICTS),
        (Grid(T, S, 7, 11), np.array([[PARTIAL]])),
        (Grid(T, S, 1, 11), np.array([[FULL]] * 3 + [[EMPTY]] * 2 + [[PARTIAL]] * 2)),
    ],
    ids=["overlapping", "one tile", "rows"],
)
def test_every_live_tile_is_added_where_it_lies(grid, verdicts, x64):
    got = jit(functools.partial(ours, plan=plan_of(verdicts), grid=grid))(*arrays())
    want = jit(functools.partial(loop, verdicts=verdicts, grid=grid))(*arrays())
    assert_all_close(got, want)


def test_a_plan_may_be_traced_and_have_slots_to_spare(x64):
    fn = jit(lambda plan, *x: ours(*x, plan=plan))
    for verdicts in (VERDICTS, np.full((3, 3), PARTIAL)):
        plan = jax.tree.map(jnp.asarray, plan_of(verdicts, slots=3))
        want = jit(functools.partial(loop, verdicts=verdicts))(*arrays())
        assert_all_close(fn(plan, *arrays()), want)
    assert fn._cache_size() == 1


@pytest.mark.parametrize(
    "derivative", [tangent_of_gradient, gradient_of_gradient, gradient_of_tangent]
)
def test_derivatives_of_two_orders_are_those_of_the_loop(derivative, x64):
    x, dx, g = tuple(arrays()), tuple(arrays(10)), arrays(20)
    got, want = (
        jit(functools.partial(derivative, fn))(x, dx, g) for fn in (ours, loop)
    )
    assert_all_close(got, want)


def with_slow(everyday, others):
    """The cases of every run, and those that differ least from them."""
    slow = [pytest.param(x, marks=pytest.mark.slow) for x in others]
    return [*everyday, *slow]


@pytest.mark.parametrize("moving", with_slow([1], [0, 2, 3]))
def test_the_derivative_in_one_argument_alone(moving, x64):
    """The others have no tangent, and three results no cotangent."""
    x, dx, g = arrays(), arrays(10), arrays(20)

    def along(fn, a):
        return fn(*x[:moving], a, *x[moving + 1 :])[(moving + 1) % 4]

    def both(fn, a, da, g):
        one = functools.partial(along, fn)
        return jax.jvp(one, (a,), (da,))[1], jax.vjp(one, a)[1](g)

    got, want = (
        jit(functools.partial(both, fn))(x[moving], dx[moving], g[(moving + 1) % 4])
        for fn in (ours, loop)
    )
    assert_all_close(got, want)


def with_gradient(fn, g, *x):
    return fn(*x), gradient(fn, x, None, g)


alone = jit(functools.partial(with_gradient, loop))


@pytest.mark.parametrize("mapped", with_slow([0, "all"], [1, 2, 3]))
def test_it_may_be_mapped_over_each_argument_and_so_may_its_gradient(mapped, x64):
    names = range(4) if mapped == "all" else [mapped]
    x, g, axes = arrays(), arrays(20), [None] * 4
    for n in names:
        axes[n] = n % x[n].ndim
        x[n] = jnp.stack([x[n], x[n] / 2 - 1], axes[n])

    mapped = jax.vmap(functools.partial(with_gradient, ours, g), axes)
    got = jit(mapped)(*x)

    def entry(n):
        pairs = zip(x, axes, strict=True)
        return [a if axis is None else jnp.take(a, n, axis) for a, axis in pairs]

    each = [alone(g, *entry(n)) for n in range(2)]
    want = jax.tree.map(lambda *rows: jnp.stack(rows), *each)
    assert_all_close(got, want)


def test_it_may_be_mapped_within_a_derivative(x64):
    x, g = arrays(), arrays(20)
    batch = jnp.stack([x[0], x[0] - 1, 2 * x[0]])

    def loss(fn, batch, rest):
        outs = jax.vmap(fn, (0, None, None, None))(batch, *rest)
        pairs = zip(outs, g, strict=True)
        return sum(jnp.vdot(out[n], b) * n for out, b in pairs for n in range(3))

    got, want = (
        jit(jax.grad(functools.partial(loss, fn), (0, 1)))(batch, x[1:])
        for fn in (ours, loop)
    )
    assert_all_close(got, want)


def test_each_of_a_batch_can_have_a_plan_of_its_own():
    plans = [plan_of(v, VERDICTS.shape[1]) for v in (VERDICTS, VERDICTS[::-1])]
    stacked = jax.tree.map(lambda *x: jnp.stack(list(map(jnp.asarray, x))), *plans)
    got = jit(jax.vmap(lambda plan: ours(*arrays(), plan=plan)))(stacked)
    for n, plan in enumerate(plans):
        one = jit(functools.partial(ours, plan=plan))
        for x, want in zip(got, one(*arrays()), strict=True):
            assert_close(x[n], want)


def test_a_branch_that_differs_in_a_batch_has_its_gradient():
    x = jnp.asarray(exact(3, 3, 8, 1, 4), jnp.float32)

    def loss(x, yes):
        def attend(x):
            mask = jattn.masks.causal()
            return jattn.attention(x, x, x, mask=mask, block_sizes=(4, 4))

        return (jax.lax.cond(yes, attend, lambda x: 2 * x, x) ** 2).sum()

    yes = jnp.array([True, False, True])
    got = jit(jax.vmap(jax.grad(loss)))(x, yes)
    one = jit(jax.grad(loss))
    for n in range(3):
        assert_close(got[n], one(x[n], yes[n]))


@pytest.mark.parametrize("traced", [False, True], ids=["static", "traced"])
def test_without_live_tiles_all_is_zero(traced, x64):
    plan = plan_of(np.full((3, 3), EMPTY))
    plan = jax.tree.map(jnp.asarray, plan) if traced else plan
    x = [jnp.full_like(a, jnp.nan) for a in arrays()]
    fn = functools.partial(ours, plan=plan)
    results, gradients = jit(lambda x, g: (fn(*x), gradient(fn, x, None, g)))(
        x, arrays()
    )
    for got, like in zip([*results, *gradients], 2 * x, strict=True):
        np.testing.assert_array_equal(got, jnp.zeros_like(like))


def test_no_tile_that_is_not_live_is_read_or_written():
    """Queries and keys of no live tile may be NaN: so in every derivative."""
    verdicts = np.array([[EMPTY, EMPTY, EMPTY], [EMPTY] * 3, [EMPTY, PARTIAL, EMPTY]])
    seen = np.zeros((T, S), bool)
    seen[4:7, 4:8] = True
    x = arrays()
    x[0] = jnp.where(seen.any(1)[:, None], x[0], jnp.nan)
    x[1] = jnp.where(seen.any(0)[None, :], x[1], jnp.nan)
    x[2] = jnp.where(seen, x[2], jnp.nan)
    fn = functools.partial(ours, plan=plan_of(verdicts))

    def derivatives(x, dx, g):
        return fn(*x), tangent(fn, x, dx, g), *tangent_of_gradient(fn, x, dx, g)

    everything = jit(derivatives)(tuple(x), tuple(arrays(10)), arrays(20))
    for results in everything:
        for got, name in zip(results, NAMES, strict=True):
            assert np.isfinite(got).all() and np.any(got), name
        assert not np.asarray(results[0])[~seen.any(1)].any()
        assert not np.asarray(results[1])[:, ~seen.any(0)].any()
        assert not np.asarray(results[2])[~seen].any()


def test_a_body_runs_once_for_every_live_tile():
    runs = []

    def counted(full, i, j, tile):
        def note(i, j):
            runs.append((int(i), int(j), bool(full)))
            return np.float32(1)

        like = jax.ShapeDtypeStruct((), jnp.float32)
        return [tile[0] * jax.pure_callback(note, like, i, j)]

    whole = [Cut(None, None)]
    plan = plan_of(VERDICTS)
    got = tile_sum(counted, plan, OVERLAPPING, [jnp.ones(H)], whole, whole)
    np.testing.assert_array_equal(got[0], np.full(H, 3.0))
    where = zip(*np.nonzero(VERDICTS), strict=True)
    assert sorted(runs) == [(i, j, VERDICTS[i, j] == FULL) for i, j in where]


def test_axes_of_one_entry_and_of_other_letters_are_not_cut():
    shape = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)  # noqa: E731
    assert cut_of("TH", shape(T, H)) == Cut(0, None)
    assert cut_of("HS", shape(H, S)) == Cut(None, 1)
    assert cut_of("TS", shape(1, S)) == Cut(None, 1)
    assert cut_of("TS", shape(T, 1)) == Cut(0, None)
    assert cut_of("", shape(T, S)) == Cut(None, None)
    assert cut_of("BNTS", shape(T, S)) == Cut(0, 1)
    assert cut_of("TS", shape(2, 3, T, S)) == Cut(2, 3)
