"""Statistics of the weights: the same numbers from whole rows and in parts."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracle import (
    assert_close,
    assert_gradient_close,
    assert_same_bits,
    dense_attention,
    dense_jax,
    exact,
    jit,
)

import jattn
from jattn import masks

DIMS = chex.Dimensions(B=2, T=7, S=11, N=6, K=3, H=5, D=13)
ALGORITHMS = ("reference", "blockwise")
random = np.random.default_rng(5)
ALLOWED = random.random(DIMS["BNTS"]) < 0.5
ALLOWED[0, 2, 3] = ALLOWED[1, :, 5] = False
BIAS = exact(5, DIMS.B, DIMS.N, DIMS.T, DIMS.S)
BIAS[random.random(BIAS.shape) < 0.3] = -np.inf
BIAS[1, 4, 0] = -np.inf
SINKS = exact(6, DIMS.N)
SINKS[1] = -np.inf


def vectors(dtype=jnp.float32):
    shapes = DIMS["BTNH"], DIMS["BSKH"], DIMS["BSKD"]
    return [jnp.asarray(exact(n, *shape), dtype) for n, shape in enumerate(shapes)]


def attend(algorithm, *arrays, stats=True, blocks=(4, 3), **options):
    blocks = blocks if algorithm == "blockwise" else None
    return jattn.attention(
        *arrays,
        implementation=algorithm,
        block_sizes=blocks,
        stats=stats,
        **options,
    )


def statistics(algorithm, *arrays, **options):
    return attend(algorithm, *arrays, **options)[1]


def run(algorithm, *arrays, blocks=(4, 3), **options):
    """`statistics`, compiled faster."""
    fn = functools.partial(statistics, algorithm, blocks=blocks)
    return jit(lambda arrays, options: fn(*arrays, **options))(arrays, options)


def dense_stats(logits):
    """The statistics of rows, (*B, N, T, S) to (*B, T, N), in float64."""
    top = logits.max(-1, keepdims=True, initial=-np.inf)
    e = np.exp(logits - np.where(np.isneginf(top), 0, top))
    total = e.sum(-1, keepdims=True)
    p = e / np.where(total > 0, total, 1)
    with np.errstate(divide="ignore"):
        lse = np.where(np.isneginf(top), 0, top) + np.log(total)
    log = np.log(np.where(p > 0, p, 1))
    parts = [
        lse[..., 0],
        top[..., 0],
        -(p * log).sum(-1),
        p.max(-1, initial=0),
        (p**2).sum(-1),
    ]
    return jattn.Stats(*(np.swapaxes(x, -1, -2) for x in parts))


def assert_stats(got, want, dtype=jnp.float32):
    for name, a, b in zip(jattn.Stats._fields, got, want, strict=True):
        assert_close(a, b, dtype, name)


def test_the_fields_are_what_the_documentation_says():
    names = ("lse", "max_logit", "entropy", "max_prob", "sum_p2")
    assert jattn.Stats._fields == names


SETTINGS = {
    "everything": (
        lambda a: dict(mask=a["mask"], bias=a["bias"], sinks=a["sinks"]),
        dict(allowed=ALLOWED, bias=BIAS, sinks=SINKS),
    ),
    "mask and bias": (
        lambda a: dict(mask=a["mask"], bias=a["bias"]),
        dict(allowed=ALLOWED, bias=BIAS),
    ),
}


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_each_is_that_of_its_row(algorithm, name, x64):
    options, meaning = SETTINGS[name]
    arrays = vectors(jnp.float64)
    given = dict(mask=jnp.asarray(ALLOWED), bias=jnp.asarray(BIAS), sinks=SINKS)
    fn = jit(lambda arrays, given: statistics(algorithm, *arrays, **options(given)))
    want = dense_stats(dense_attention(*arrays, **meaning).logits)
    assert_stats(fn(arrays, given), want, jnp.float64)
    assert np.isneginf(want.lse).any() and (want.entropy > 1).any()


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_those_of_narrow_inputs_are_wide(algorithm):
    fn = jit(functools.partial(statistics, algorithm))
    got = fn(*vectors(jnp.bfloat16), mask=jnp.asarray(ALLOWED))
    chex.assert_shape(list(got), DIMS["BTN"])
    assert {x.dtype for x in got} == {jnp.dtype(jnp.float32)}
    want = dense_stats(dense_attention(*vectors(), ALLOWED).logits)
    assert_stats(got, want)  # as exact as those of float32


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_of_a_query_without_keys_they_are_those_of_nothing(algorithm):
    q, k, v = vectors()
    nothing = jattn.Stats(-np.inf, -np.inf, 0.0, 0.0, 0.0)
    by_mask = run(algorithm, q, k, v, mask=masks.nothing())
    without = run(algorithm, q, k[:, :0], v[:, :0], blocks=None)
    for got in (by_mask, without):
        for name, x, want in zip(got._fields, got, nothing, strict=True):
            np.testing.assert_array_equal(x, np.full(DIMS["BTN"], want), name)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_sink_alone_has_all_the_weight(algorithm):
    q, k, v = vectors()
    by_mask = run(algorithm, q, k, v, sinks=0.75, mask=masks.nothing())
    none = k[:, :0], v[:, :0]
    without = run(algorithm, q, *none, sinks=0.75, blocks=None)
    for got in (by_mask, without):
        for x, want in zip(got, (0.75, 0.75, 0.0, 1.0, 1.0), strict=True):
            np.testing.assert_array_equal(x, np.full(DIMS["BTN"], want))


@pytest.mark.parametrize("sizes", [(1, 11), (7, 1)])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_equal_weights_have_the_entropy_of_ln_n(algorithm, sizes):
    T, S = sizes
    q, k, v = (x[:, :n] for x, n in zip(vectors(), (T, S, S), strict=True))
    got = run(algorithm, 0 * q, k, v)
    want = np.log(S), 0.0, np.log(S), 1 / S, 1 / S
    chex.assert_shape(list(got), (DIMS.B, T, DIMS.N))
    for name, x, number in zip(got._fields, got, want, strict=True):
        assert_close(x, np.full(x.shape, number), name=name)


def rows_of(*rows):
    """Keys whose logits, for queries of 1 and a scale of 1, are the numbers of a row.

    One row for each head; the numbers must have no rounding.
    """
    keys = jnp.asarray(np.asarray(rows).T[..., None], jnp.float32)  # (S, K, 1)
    query = jnp.ones((1, len(rows), 1))
    return query, keys, keys


@pytest.mark.parametrize(
    "algorithm, blocks",
    [("reference", None), ("blockwise", (1, 2)), ("blockwise", (1, 5))],
)
def test_large_logits_lose_no_digit(algorithm, blocks):
    near = np.array([-3.0, 0.0, -1.0, -0.5, -20.0, -1.0, -2.0])
    rows = [1e4 + near, -1e4 + near, 2.0**20 + near * 8, near * 1e4, near[::-1] - 2e4]
    got = run(algorithm, *rows_of(*rows), scale=1.0, blocks=blocks)
    assert_stats(got, dense_stats(np.stack(rows)[:, None, :]))


LOWEST = float(np.finfo(np.float32).min)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_low_bias_weighs_nothing_unless_it_is_all_there_is(algorithm):
    arrays = vectors()
    fn = jit(lambda arrays, bias: statistics(algorithm, *arrays, bias=bias))
    few = np.zeros((1, 1, DIMS.T, DIMS.S), np.float32)
    few[..., :3] = few[..., 7] = 1  # all of the first tile, and one key later
    for low in (-1e9, -1e30, LOWEST / 2, LOWEST):
        got = fn(arrays, few * low)
        assert_stats(got, dense_stats(dense_attention(*arrays, few == 0).logits))
        got = fn(arrays, np.full_like(few, low))
        assert_close(got.entropy, np.full(DIMS["BTN"], np.log(DIMS.S)))
        assert_close(got.max_prob, np.full(DIMS["BTN"], 1 / DIMS.S))
        assert_close(got.sum_p2, np.full(DIMS["BTN"], 1 / DIMS.S))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_nan_spoils_those_of_the_queries_that_see_it(algorithm):
    q, k, v = vectors()
    fn = jit(functools.partial(attend, algorithm, mask=jnp.asarray(ALLOWED)))
    clean = fn(q, k, v)[1]
    spoilt = np.moveaxis(ALLOWED[..., 4], 1, 2).copy()  # (B, T, N)
    spoilt[:, :, 2:] = spoilt[1] = False
    for poisoned in (
        (q, k.at[0, 4, 0].set(jnp.nan), v),
        (q, k, v.at[0, 4, 0, 2].set(jnp.inf)),
    ):
        got = fn(*poisoned)[1]
        for name, a, b in zip(got._fields, got, clean, strict=True):
            assert np.isnan(np.asarray(a)[spoilt]).all(), name
            assert_same_bits(np.asarray(a)[~spoilt], np.asarray(b)[~spoilt], name)
    assert spoilt.any()


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_lse_has_its_gradient_and_the_others_have_none(algorithm):
    arrays = (*vectors(), jnp.asarray(SINKS, jnp.float32))
    allowed = jnp.asarray(ALLOWED)
    shapes = DIMS["BTND"], DIMS["BTN"]
    g, h = (jnp.asarray(exact(9, *shape), jnp.float32) for shape in shapes)

    def ours(q, k, v, sinks):
        return attend(algorithm, q, k, v, sinks=sinks, mask=allowed)

    def dense(q, k, v, sinks):
        return dense_jax(q, k, v, allowed, sinks=sinks)

    def derivatives():
        all_of = jax.vjp(ours, *arrays)[1]((g, jattn.Stats(h, h, h, h, h)))
        others = jax.vjp(lambda *x: ours(*x)[1][1:], *arrays)[1]((h,) * 4)
        moving = tuple(jnp.ones_like(x) for x in arrays)
        tangents = jax.jvp(ours, arrays, moving)[1][1]
        return all_of, others, tangents, jax.vjp(dense, *arrays)[1]((g, h))

    all_of, others, tangents, want = jit(derivatives)()
    jax.tree.map(assert_gradient_close, all_of, want)
    assert np.abs(tangents.lse).max() > 0.1
    for x in (*others, *tangents[1:]):
        np.testing.assert_array_equal(x, jnp.zeros_like(x))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_asking_for_them_changes_no_output(algorithm):
    fn = functools.partial(attend, algorithm, mask=jnp.asarray(ALLOWED))
    out, stats = jit(fn)(*vectors())
    both = jit(functools.partial(fn, stats=False, return_lse=True))(*vectors())
    assert_close(out, both[0])
    assert_close(stats.lse, both[1])


@pytest.mark.slow
def test_they_are_mapped_like_the_output():
    arrays = vectors()
    want = run("blockwise", *arrays)
    got = jit(jax.vmap(functools.partial(statistics, "blockwise")))(*arrays)
    assert isinstance(got, jattn.Stats)
    jax.tree.map(assert_close, got, want)


def test_lse_is_returned_once():
    with pytest.raises(ValueError, match="^attention: return_lse and stats .*both"):
        jattn.attention(*vectors(), stats=True, return_lse=True)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["forward", "grad"])
def test_memory_is_linear_in_length(mode):
    def total(x):
        mask, blocks = masks.causal(), (64, 64)
        out, stats = jattn.attention(x, x, x, mask=mask, block_sizes=blocks, stats=True)
        return out.sum() + sum(field.sum() for field in stats)

    fn = total if mode == "forward" else jax.grad(total)

    def temporary(n):
        x = jax.ShapeDtypeStruct((n, 1, 16), jnp.float32)
        compiled = jax.jit(fn).lower(x).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    small, large = temporary(2048), temporary(16384)
    assert np.log(large / small) / np.log(8) <= 1.05
    assert large < 16384**2


@pytest.mark.parametrize("algorithm", ["reference", "blockwise"])
@pytest.mark.parametrize("num_keys", [8, 64, 300])
def test_every_statistic_of_a_row_that_sees_a_nan_is_nan(algorithm, num_keys):
    q, k = (jnp.asarray(exact(n, num_keys, 1, 4), jnp.float32) for n in (1, 2))
    k = k.at[-1].set(jnp.nan)
    stats = run(algorithm, q, k, k, blocks=None)
    for name, x in stats._asdict().items():
        assert np.isnan(x).all(), name
