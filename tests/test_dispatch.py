"""The front door: dtypes, what is traced when, and the whole-row functions."""

import functools
import os
import subprocess
import sys
import time

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracle import assert_close, assert_same_bits, dense_attention, exact, jit

import jattn
from jattn import masks, scores
from jattn.algorithms.block_sizes import default_block_sizes
from jattn.diagnostics import score_gradient_rows

DIMS = chex.Dimensions(B=2, T=5, S=7, N=6, K=3, H=4, D=8)


def vectors(dtype=jnp.float32):
    shapes = DIMS["BTNH"], DIMS["BSKH"], DIMS["BSKD"]
    return [jnp.asarray(exact(n, *shape), dtype) for n, shape in enumerate(shapes)]


@pytest.mark.parametrize("algorithm", ["reference", "blockwise"])
def test_out_has_querys_dtype_and_gradients_those_of_their_arguments(algorithm):
    dtype = jnp.bfloat16
    bias = jnp.zeros(DIMS["BNTS"], jnp.float32)
    scale = jnp.float32(0.5)

    def attend(q, k, v, bias, scale):
        return jattn.attention(
            q, k, v, bias=bias, scale=scale, implementation=algorithm, return_lse=True
        )

    @jit
    def with_gradients(*arguments):
        results, pull = jax.vjp(attend, *arguments)
        return results, pull(jax.tree.map(jnp.ones_like, results))

    arguments = (*vectors(dtype), bias, scale)
    (out, lse), gradients = with_gradients(*arguments)
    assert (out.dtype, lse.dtype) == (dtype, jnp.float32)
    chex.assert_shape((out, lse), (DIMS["BTND"], DIMS["BTN"]))
    chex.assert_trees_all_equal_shapes_and_dtypes(gradients, arguments)


def test_float64_stays_float64(x64):
    assert jattn.scaled_scores(*vectors(jnp.float64)[:2]).dtype == jnp.float64
    assert jattn.attention_weights(*vectors(jnp.float64)[:2]).dtype == jnp.float64


def test_a_numpy_float64_scale_does_not_promote():
    q, k, v = vectors(jnp.bfloat16)
    out, lse = jattn.attention(q, k, v, scale=np.float64(0.5), return_lse=True)
    assert (out.dtype, lse.dtype) == (jnp.bfloat16, jnp.float32)


def test_lse_of_narrow_inputs_is_not_rounded():
    for dtype in (jnp.bfloat16, jnp.float16):
        q, k, v = vectors(dtype)
        lse = jattn.attention(4 * q, k, v, return_lse=True)[1]
        want = dense_attention(4 * q, k, v).lse
        np.testing.assert_allclose(lse, want, rtol=0, atol=1e-4)


@pytest.mark.parametrize("algorithm", ["reference", "blockwise"])
def test_float16_scores_beyond_its_range_are_kept_in_float32(algorithm):
    x = jnp.asarray([[300.0, 300.0]], jnp.float16)[:, None]
    keys = jnp.concatenate([x, x - 4])
    values = jnp.asarray([1.0, 9.0], jnp.float16)[:, None, None]
    attend = jax.value_and_grad(
        lambda q: jattn.attention(q, keys, values, implementation=algorithm).sum()
    )
    out, gradient = attend(x)
    assert out == 1.0
    np.testing.assert_array_equal(gradient, np.zeros_like(x))


def counting(traces):
    def fn(s, q_pos, k_pos):
        traces.append(s.shape)
        return s

    return scores.rule(fn)


def test_a_second_eager_call_traces_nothing_whatever_the_data():
    traces = []
    rule = counting(traces)
    q, k, v = vectors()
    rng = np.random.default_rng(0)

    def call(n, left=3):
        return jattn.attention(
            q + n,
            k,
            v,
            mask=masks.padding(rng.random(DIMS["BS"]) < 0.5)
            & masks.sliding_window(left),
            score=rule,
            scale=0.5 + n,
            query_positions=np.arange(DIMS.T) + n,
            bias=exact(n, *DIMS["BNTS"]).astype(np.float32),
        )

    call(0)
    assert traces
    traces.clear()
    outs = [call(n) for n in range(1, 4)]
    assert not traces
    assert not np.array_equal(outs[0], outs[1])
    call(0, left=4)
    assert traces, "another static window is another program"


def test_equal_rules_without_arrays_are_one_program():
    traces = []
    rule = counting(traces)
    q, k, v = vectors()
    for _ in range(2):
        jattn.attention(
            q, k, v, score=(scores.soft_cap(2.0), rule), query_positions="end"
        )
    first = len(traces)
    jattn.attention(q, k, v, score=(scores.soft_cap(2.5), rule), query_positions="end")
    assert len(traces) == 2 * first > 0


def test_a_warm_eager_call_takes_less_than_5_ms():
    x = jnp.asarray(exact(1, 1, 128, 2, 16), jnp.float32)
    mask = masks.causal()
    jattn.attention(x, x, x, mask=mask).block_until_ready()
    durations = []
    for _ in range(20):
        start = time.perf_counter()
        jattn.attention(x, x, x, mask=mask).block_until_ready()
        durations.append(time.perf_counter() - start)
    assert np.median(durations) < 5e-3


def test_under_an_outer_jit_everything_may_be_traced():
    q, k, v = vectors()
    mask, positions = masks.lengths(jnp.array([3, 5])), jnp.arange(DIMS.T) + 2

    @jax.jit
    def attend(q, mask, scale, positions):
        mask = mask & masks.causal()
        return jattn.attention(
            q, k, v, mask=mask, scale=scale, query_positions=positions
        )

    want = jattn.attention(q, k, v, mask=mask & masks.causal(), query_positions="end")
    assert_close(attend(q, mask, 0.5, positions), want)


@pytest.mark.parametrize("algorithm", ["reference", "blockwise"])
def test_empty_rows_as_mean_are_those_of_jax_nn(algorithm):
    q, k, v = vectors()
    v = v[..., : DIMS.H]
    allowed = np.random.default_rng(1).random(DIMS["BNTS"]) < 0.5
    allowed[0, 1, 2] = allowed[1, :, 4] = False
    out, lse = jattn.attention(
        q,
        k,
        v,
        mask=allowed,
        empty_rows="mean",
        implementation=algorithm,
        return_lse=True,
    )
    assert_close(out, np.asarray(jax.nn.dot_product_attention(q, k, v, mask=allowed)))
    empty = ~allowed.any(-1).swapaxes(1, 2)
    np.testing.assert_array_equal(np.isneginf(lse), empty)
    weights = jattn.attention_weights(q, k, mask=allowed, empty_rows="mean")
    assert_close(weights.sum(-1), np.ones(DIMS["BNT"]))
    assert_close(weights[0, 1, 2], np.full(DIMS.S, 1 / DIMS.S))


def test_weights_times_values_is_attention():
    q, k, v = vectors()
    mask = masks.lengths(np.array([0, 5])) & masks.causal()
    options = dict(
        mask=mask, score=scores.soft_cap(1.5), scale=0.7, query_positions="end"
    )
    weights = jattn.attention_weights(q, k, **options)
    repeated = np.repeat(np.asarray(v), DIMS.N // DIMS.K, 2)
    want = np.einsum("bnts,bsnd->btnd", weights, repeated)
    assert_close(jattn.attention(q, k, v, **options), want)
    sums = np.broadcast_to(np.array([0.0, 1.0])[:, None, None], DIMS["BNT"])
    assert_close(weights.sum(-1), sums)
    assert not weights[:, :, :, 5:].any()


def test_the_whole_row_functions_compose_to_the_weights():
    q, k, _ = vectors()
    causal = np.tril(np.ones(DIMS["TS"], bool))[None, None]
    s = jattn.scaled_scores(q, k)
    want = np.einsum("btnh,bsnh->bnts", q, np.repeat(np.asarray(k), 2, 2)) / 2
    assert_close(s, want)
    chosen = jattn.masked_softmax(jattn.mask_scores(s, causal))
    assert_close(chosen, np.asarray(jattn.attention_weights(q, k, mask=causal)))
    assert_close(jattn.scaled_scores(q, k, np.arange(6.0)), want * 2 * head_factors())


def head_factors():
    return np.arange(6.0)[:, None, None]


@pytest.mark.parametrize("algorithm", ["reference", "blockwise"])
def test_a_scale_of_zero_gives_the_mean_and_one_replaces_the_default(algorithm):
    q, k, v = vectors()
    out = jattn.attention(q, k, v, scale=0.0, implementation=algorithm)
    mean = np.repeat(np.asarray(v).mean(1, keepdims=True), 2, 2)
    assert_close(out, np.broadcast_to(mean, out.shape))
    out = jattn.attention(q, k, v, scale=1.0, implementation=algorithm)
    assert_close(out, dense_attention(q, k, v, scale=1.0).out)


def test_every_option_alone_changes_the_result():
    q, k, v = vectors()
    options = [
        dict(mask=masks.causal(), query_positions="start"),
        dict(
            mask=masks.causal(), query_positions="end", key_positions=np.arange(7)[::-1]
        ),
        dict(mask=masks.causal(), query_positions=np.arange(5) + 1),
        dict(score=scores.soft_cap(0.5)),
        dict(bias=exact(9, 1, 6, 1, 7).astype(np.float32)),
        dict(scale=2.0),
        dict(mask=masks.nothing()),
        dict(mask=masks.nothing(), empty_rows="mean"),
    ]
    outs = []
    for option in ({}, *options):
        attend = functools.partial(jattn.attention, **option)
        outs.append(np.asarray(jit(attend)(q, k, v)))
    for n, out in enumerate(outs):
        assert not any(np.allclose(out, other) for other in outs[:n]), n


def test_small_calls_take_whole_rows_and_large_ones_tiles():
    def names(length, **options):
        x = jax.ShapeDtypeStruct((length, 1, 2), jnp.float32)
        attend = lambda x: jattn.attention(x, x, x, **options)  # noqa: E731
        return "while" in jax.jit(attend).lower(x).as_text()

    assert not names(256)
    assert names(257)
    assert names(16, block_sizes=(4, 4))
    assert not names(257, implementation="reference")


@pytest.mark.parametrize(
    "backend, groups, want",
    [
        ("cpu", 1, (256, 256)),
        ("cpu", 2, (128, 256)),
        ("cpu", 3, (85, 256)),
        ("cpu", 4, (64, 256)),
        ("cpu", 8, (64, 256)),
        ("gpu", 1, (512, 512)),
        ("gpu", 8, (64, 512)),
        ("tpu", 1, (512, 512)),
        ("tpu", 4, (128, 512)),
        ("tpu", 64, (64, 512)),
        ("another", 1, (512, 512)),
        ("another", 2, (256, 512)),
    ],
)
def test_query_heads_that_share_a_key_head_share_the_rows_of_a_tile(
    backend, groups, want, monkeypatch
):
    assert default_block_sizes(backend, groups) == want
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    tiles = []
    options = dict(score=counting(tiles), implementation="blockwise")
    x = jax.ShapeDtypeStruct((1024, groups, 2), jnp.float32)
    k = jax.ShapeDtypeStruct((1024, 1, 2), jnp.float32)
    jax.eval_shape(functools.partial(jattn.attention, **options), x, k, k)
    assert set(tiles) == {want}


def test_block_sizes_are_cut_to_the_arrays_and_to_nothing_else():
    q, k, v = vectors()
    for given, want in (((2, 3), (2, 3)), ((99, 3), (5, 3)), ((2, 99), (2, 7))):
        tiles = []
        options = dict(score=counting(tiles), query_positions="start")
        attend = functools.partial(jattn.attention, block_sizes=given, **options)
        jax.eval_shape(attend, q, k, v)
        assert set(tiles) == {want}


@pytest.mark.parametrize(
    "given", [(0, 4), (4, -1), (4.0, 4), (True, 4), [4, 0], (4,), "44", np.ones(2, int)]
)
def test_block_sizes_are_two_positive_ints_wherever_they_are_given(given):
    q, k, v = vectors()
    text = "block_sizes must be two positive ints .*but got .*jattn.tune"
    with pytest.raises(ValueError, match=f"^attention: {text}"):
        jattn.attention(q, k, v, block_sizes=given)
    with pytest.raises(ValueError, match=f"^score_gradient_rows: {text}"):
        score_gradient_rows(q, k, v, jnp.ones(DIMS["BTND"]), block_sizes=given)
    with pytest.raises(ValueError, match=f"^tune: {text}"):
        jattn.tune(q, k, v, candidates=[(2, 3), given])


LIGHT_IMPORT = """
import sys
import jattn
from jattn.masks import causal, sliding_window
print(causal() & ~sliding_window(3))
assert "flax" not in sys.modules
import jax
try:
    jax.devices()
except RuntimeError:
    print("no backend")
"""


def test_import_starts_no_backend_and_needs_no_flax():
    environment = dict(os.environ, JAX_PLATFORMS="nonexistent")
    done = subprocess.run(
        [sys.executable, "-c", LIGHT_IMPORT],
        env=environment,
        capture_output=True,
        text=True,
        cwd=os.path.dirname(os.path.dirname(os.path.abspath(__file__))),
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[:2] == [
        "causal() & ~sliding_window(left=3)",
        "no backend",
    ]


@pytest.mark.parametrize("blocks", [(1, 1), None])
def test_without_jit_it_is_the_same(blocks):
    x = jnp.asarray(exact(1, 3, 1, 2), jnp.float32)

    def loss(x):
        y = jattn.attention(x, x, x, mask=masks.causal(), block_sizes=blocks)
        return (y**2).sum()

    with jax.disable_jit():
        got = jax.grad(loss)(x)
    assert_close(got, jit(jax.grad(loss))(x))


@pytest.mark.parametrize("given", [[4, 3], (np.int64(4), np.int32(3))])
def test_block_sizes_may_come_from_a_config(given):
    x = jnp.asarray(exact(1, 5, 2, 4), jnp.float32)
    want = jattn.attention(x, x, x, block_sizes=(4, 3))
    assert_same_bits(jattn.attention(x, x, x, block_sizes=given), want)
