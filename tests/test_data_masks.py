"""Masks that are data: one program for all, live tiles only, and no copies."""

import collections
import functools
import math
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracle import assert_close, assert_gradient_close, dense_jax, exact, jit

import jattn
from jattn import masks, scores
from jattn.diagnostics import score_gradient_rows

DIMS = chex.Dimensions(B=2, T=23, N=2, K=1, H=3)
BLOCKS = 5, 7
i, j = np.arange(DIMS.T)[:, None], np.arange(DIMS.T)[None, :]
X = jnp.asarray(exact(1, *DIMS["BTNH"]), jnp.float32)
SLOW = pytest.mark.slow
COTANGENT = exact(2, *DIMS["BTNH"]).astype(np.float32)


def integers(seed, low, high, *shape):
    return np.random.default_rng(seed).integers(low, high, shape).astype(np.int32)


def documents(seed):
    """The ids of documents in order, from 1 on, and none left out."""
    lengths = np.random.default_rng(seed).permutation([3, 8, 7, 5])
    return np.repeat(np.arange(1, 5), lengths).astype(np.int32)


DATA = {
    "segments": lambda n: np.stack([documents(2 * n), documents(2 * n + 1)]),
    "lengths": lambda n: integers(n, 5, DIMS.T + 1, DIMS.B),
    "prefix": lambda n: integers(n, 0, DIMS.T + 1, DIMS.B),
    "layout": lambda n: integers(n, 0, 2, DIMS.N, 4, 4) > 0,
}
MASKS = {
    "segments": masks.segments,
    "lengths": masks.lengths,
    "prefix": lambda n: masks.causal() | masks.prefix(n),
    "layout": lambda array: masks.block_sparse(array, 6),
    "all": lambda data: (
        (MASKS["segments"](data["segments"]) | MASKS["layout"](data["layout"]))
        & MASKS["lengths"](data["lengths"])
        & MASKS["prefix"](data["prefix"])
    ),
}
ALLOWED = {
    "segments": lambda ids: (ids[:, :, None] == ids[:, None, :])[:, None],
    "lengths": lambda n: j < n[:, None, None, None],
    "prefix": lambda n: (j <= i) | (j < n[:, None, None, None]),
    "layout": lambda array: array[:, i // 6, j // 6],
    "all": lambda data: (
        (ALLOWED["segments"](data["segments"]) | ALLOWED["layout"](data["layout"]))
        & ALLOWED["lengths"](data["lengths"])
        & ALLOWED["prefix"](data["prefix"])
    ),
}


def attend(name, x, data, score=None):
    mask, keys = MASKS[name](data), x[:, :, :1]
    return jattn.attention(x, keys, keys, mask=mask, score=score, block_sizes=BLOCKS)


def with_gradient(name, x, data):
    out, pull = jax.vjp(lambda x: attend(name, x, data), x)
    return out, pull(COTANGENT)[0]


@jit
def dense_with_gradient(x, allowed):
    def out(x):
        return dense_jax(x, x[:, :, :1], x[:, :, :1], allowed)[0]

    out, pull = jax.vjp(out, x)
    return out, pull(COTANGENT)[0]


def assert_is(got, want):
    (out, gradient), want = got, [np.asarray(x, np.float64) for x in want]
    assert_close(out, want[0])
    assert_gradient_close(gradient, want[1])


def test_other_data_is_no_other_program_forwards_or_backwards(compiled):
    """Without an outer jit, under which it could not be otherwise."""

    def data(n):
        return {name: make(n) for name, make in DATA.items()}

    with_gradient("all", X, data(0))
    assert compiled
    compiled.clear()
    results = [with_gradient("all", X, data(n)) for n in (1, 2)]
    assert not compiled
    for n, got in enumerate(results, 1):
        assert_is(got, dense_with_gradient(X, ALLOWED["all"](data(n))))


@pytest.mark.parametrize("blocks", [None, BLOCKS])
def test_a_hundred_arrays_of_ids_are_one_program(compiled, blocks):
    for n in range(100):
        jattn.attention(
            X, X, X, mask=MASKS["segments"](DATA["segments"](n)), block_sizes=blocks
        )
        assert bool(compiled) == (n == 0)
        compiled.clear()


@pytest.mark.parametrize(
    "name, x_axis", [("segments", None), pytest.param("lengths", 0, marks=SLOW)]
)
def test_a_map_over_data_is_each_of_them(name, x_axis):
    data = np.stack([DATA[name](n) for n in range(3)])
    x = X if x_axis is None else jnp.stack([X, -X, X / 2])
    one = functools.partial(with_gradient, name)
    got, one = jit(jax.vmap(one, (x_axis, 0)))(x, data), jit(one)
    for n in range(3):
        mine = jax.tree.map(lambda x, n=n: x[n], got)
        assert_is(mine, one(x if x_axis is None else x[n], data[n]))


def visits(fn, *arguments):
    """How often each tile is computed, by its first query and its first key."""
    seen = collections.Counter()

    def note(q, k):
        seen[int(q), int(k)] += 1
        return np.float32(0)

    def counted(s, q_pos, k_pos):
        nothing = jax.ShapeDtypeStruct((), s.dtype)
        return s + jax.pure_callback(note, nothing, q_pos[0, 0], k_pos[0, 0])

    fn = jit(functools.partial(fn, scores.rule(counted)))
    jax.block_until_ready(fn(*arguments))
    return seen


def live_tiles(allowed):
    """Those in which a pair of any head and batch row is allowed."""
    allowed = np.broadcast_to(allowed, DIMS["BNTT"]).any((0, 1))
    rows, columns = (
        np.minimum(np.arange(0, DIMS.T, block), DIMS.T - block) for block in BLOCKS
    )
    return {
        (q, k)
        for q in rows.tolist()
        for k in columns.tolist()
        if allowed[q : q + BLOCKS[0], k : k + BLOCKS[1]].any()
    }


def squares(name, rule, x, data):
    return jnp.sum(attend(name, x, data, rule) ** 2)


def gradient(name, rule, x, data):
    return jax.grad(functools.partial(squares, name, rule))(x, data)


def hessian_product(name, rule, x, data):
    of_x = functools.partial(gradient, name, rule, data=data)
    return jax.jvp(of_x, (x,), (x,))[1]


def measured(name, rule, x, data):
    keys, mask = x[:, :, :1], MASKS[name](data)
    options = dict(mask=mask, score=rule, block_sizes=BLOCKS)
    return score_gradient_rows(x, keys, keys, x, **options)


ONE = X[:1, :, :1]
OF_ONE = {
    "segments": documents(7)[None],
    "lengths": np.array([9], np.int32),
    "prefix": np.array([13], np.int32),
    "layout": np.eye(4)[None] > 0,
}


@pytest.mark.parametrize(
    "name",
    ["segments", *(pytest.param(x, marks=SLOW) for x in OF_ONE if x != "segments")],
)
def test_a_gradient_computes_live_tiles_twice_and_no_other_tile(name):
    live = live_tiles(ALLOWED[name](OF_ONE[name]))
    assert 0 < len(live) < 20
    forward, backward = (
        visits(functools.partial(fn, name), ONE, OF_ONE[name])
        for fn in (squares, gradient)
    )
    assert forward == dict.fromkeys(live, 1)
    assert backward == dict.fromkeys(live, 2)


@pytest.mark.parametrize("fn", [pytest.param(hessian_product, marks=SLOW), measured])
def test_no_other_tile_is_computed_by_other_derivatives(fn):
    got = visits(functools.partial(fn, "segments"), ONE, OF_ONE["segments"])
    live = live_tiles(ALLOWED["segments"](OF_ONE["segments"]))
    assert got == dict.fromkeys(live, 3 if fn is hessian_product else 2)


@pytest.mark.parametrize("fn", [gradient, pytest.param(measured, marks=SLOW)])
def test_under_a_map_the_tiles_that_any_of_it_needs_are_computed(fn):
    lengths = (5, 10, 8), (10, 5, 8), (5, 5, 13)
    ids = np.stack([np.repeat([1, 2, 3], n)[None] for n in lengths]).astype(np.int32)
    live = [live_tiles(ALLOWED["segments"](x)) for x in ids]

    def mapped(rule, x, ids):
        one = functools.partial(fn, "segments", rule)
        return jax.vmap(jax.vmap(one, (None, 0)), (None, 0))(x, ids)

    got = visits(mapped, ONE, ids[:, None])
    assert got == dict.fromkeys(set.union(*live), 2)
    assert max(map(len, live)) < len(got) < 20


def temporary(fn, *shapes):
    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    memory = jit(fn).lower(*shapes).compile().memory_analysis()
    return memory.temp_size_in_bytes


@pytest.mark.parametrize("T", [500, pytest.param(512, marks=SLOW)])
def test_a_bias_costs_no_copy_and_its_gradient_none_but_itself(T):
    B, N, K, S, H = 2, 4, 2, 512, 8
    shapes = (B, T, N, H), (B, S, K, H), (B, N, T, S)

    def loss(q, k, bias):
        return jattn.attention(q, k, k, bias=bias, block_sizes=(64, 64)).sum()

    # Beside the arguments and the results.
    array = 4 * B * N * T * S
    assert temporary(loss, *shapes) < 0.3 * array
    assert temporary(jax.grad(loss, (0, 1, 2)), *shapes) < 0.4 * array


@pytest.mark.parametrize("blocks", [None, (3, 19)])
@pytest.mark.parametrize("wanted", [pytest.param("result", marks=SLOW), "gradient"])
def test_no_key_and_no_value_is_repeated_for_the_heads_that_share_it(blocks, wanted):
    B, T, S, N, K, H = 2, 3, 97, 12, 2, 23
    shapes = (B, T, N, H), (B, S, K, H), (B, S, K, H)
    arrays = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]

    def loss(*arrays):
        return jattn.attention(*arrays, block_sizes=blocks).sum()

    fn = jax.grad(loss, (0, 1, 2)) if wanted == "gradient" else loss
    text = jit(fn).lower(*arrays).compile().as_text()
    sizes = {
        math.prod(map(int, shape.split(",")))
        for shape in re.findall(r"f32\[([\d,]+)\]", text)
    }
    assert B * S * K * H in sizes
    assert max(sizes) < B * S * N * H
