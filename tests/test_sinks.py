"""A sink is a logit that every query sees, and that has no value."""

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
SINKS = exact(4, DIMS.N)
LENGTHS = np.array([0, 8])  # the first batch row sees no key
ALLOWED = (LENGTHS[:, None, None, None] > np.arange(DIMS.S)) & np.tril(
    np.ones(DIMS["TS"], bool), 4
)
OPTIONS = dict(mask=masks.lengths(LENGTHS) & masks.causal(), query_positions="end")


def vectors(dtype=jnp.float32):
    shapes = DIMS["BTNH"], DIMS["BSKH"], DIMS["BSKD"]
    return [jnp.asarray(exact(n, *shape), dtype) for n, shape in enumerate(shapes)]


def attend(algorithm, *arrays, sinks, blocks=(4, 3), **options):
    blocks = blocks if algorithm == "blockwise" else None
    return jattn.attention(
        *arrays,
        sinks=sinks,
        implementation=algorithm,
        block_sizes=blocks,
        return_lse=True,
        **options,
    )


def run(algorithm, *arrays, sinks, **options):
    """`attend`, compiled faster."""
    fn = functools.partial(attend, algorithm, **options)
    return jit(lambda arrays, sinks: fn(*arrays, sinks=sinks))(arrays, sinks)


def with_vjp(fn, arguments, cotangents=None):
    """Results of fn, and gradients of its arguments; cotangents are 1 if not given."""

    def both(arguments, cotangents):
        results, pull = jax.vjp(fn, *arguments)
        if cotangents is None:
            cotangents = jax.tree.map(jnp.ones_like, results)
        return results, pull(cotangents)

    return jit(both)(arguments, cotangents)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_values_and_gradients_are_those_of_one_more_logit(algorithm, x64):
    arrays = (*vectors(jnp.float64), jnp.asarray(SINKS))

    def ours(q, k, v, sinks):
        return attend(algorithm, q, k, v, sinks=sinks, **OPTIONS)

    def dense(q, k, v, sinks):
        return dense_jax(q, k, v, ALLOWED, sinks=sinks)

    cotangents = tuple(jnp.asarray(exact(7, *DIMS[x])) for x in ("BTND", "BTN"))
    (out, lse), gradients = with_vjp(ours, arrays, cotangents)
    want = dense_attention(*arrays[:3], ALLOWED, sinks=SINKS)
    assert_close(out, want.out, jnp.float64)
    assert_close(lse, want.lse, jnp.float64)
    _, dense_gradients = with_vjp(dense, arrays, cotangents)
    for a, b in zip(gradients, dense_gradients, strict=True):
        assert_gradient_close(a, b, jnp.float64)
    assert np.abs(gradients[3]).min() > 0.1


def test_weights_are_what_the_sink_leaves(x64):
    q, k, _ = vectors(jnp.float64)
    weights = jattn.attention_weights(q, k, sinks=SINKS, **OPTIONS)
    want = dense_attention(*vectors(), ALLOWED, sinks=SINKS).weights
    assert weights.shape == DIMS["BNTS"]
    assert_close(weights, want, jnp.float64)
    assert (weights[1].sum(-1) < 0.999).all()


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_sink_of_minus_infinity_is_no_sink(algorithm):
    arrays = (*vectors(), jnp.full(DIMS.N, -jnp.inf))
    (out, lse), (*_, dsinks) = with_vjp(
        lambda *x: attend(algorithm, *x[:3], sinks=x[3], **OPTIONS), arrays
    )
    want = dense_attention(*vectors(), ALLOWED)
    assert_close(out, want.out)
    assert_close(lse, want.lse)
    assert np.isneginf(lse[0]).all()
    np.testing.assert_array_equal(dsinks, np.zeros(DIMS.N))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_sink_far_above_all_logits_takes_all_and_does_not_overflow(algorithm):
    q, k, v = vectors()
    (out, lse), (dsinks, dv) = with_vjp(
        lambda sinks, v: attend(algorithm, q, k, v, sinks=sinks),
        (jnp.full(DIMS.N, 100.0), v),
    )
    assert_close(lse, np.full(DIMS["BTN"], 100.0))
    assert np.abs(out).max() < 1e-30
    assert_close(dsinks, np.full(DIMS.N, DIMS.B * DIMS.T))
    assert np.isfinite(dv).all()


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_query_without_keys_gets_zero_and_its_lse_is_the_sink(algorithm):
    sinks = jnp.asarray(SINKS, jnp.float32).at[1].set(-jnp.inf)
    out, lse = run(algorithm, *vectors(), sinks=sinks, mask=masks.nothing())
    assert_same_bits(out, np.zeros(DIMS["BTND"], np.float32))
    assert_same_bits(lse, np.broadcast_to(sinks, DIMS["BTN"]))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_without_any_key_too_and_the_gradient_counts_the_queries(algorithm):
    q, k, v = vectors()
    fn = functools.partial(attend, algorithm, q, k[:, :0], v[:, :0], blocks=None)
    sinks = jnp.asarray(SINKS, jnp.float32)
    (out, lse), (dsinks,) = with_vjp(lambda sinks: fn(sinks=sinks), (sinks,))
    assert_same_bits(out, np.zeros(DIMS["BTND"], np.float32))
    assert_same_bits(lse, np.broadcast_to(sinks, DIMS["BTN"]))
    np.testing.assert_array_equal(dsinks, np.full(DIMS.N, DIMS.B * DIMS.T))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_one_key_of_logit_0_beside_a_sink_of_0_weighs_one_half(algorithm):
    zero, one = jnp.zeros((1, 1, 4)), jnp.ones((1, 1, 4))
    out, lse = run(algorithm, zero, zero, one, sinks=jnp.zeros(1))
    assert_close(out, np.full((1, 1, 4), 0.5))
    assert_close(lse, np.full((1, 1), np.log(2)))


@pytest.mark.parametrize("algorithm, shape", [("reference", ()), ("blockwise", (1,))])
def test_one_number_is_the_sink_of_every_head(algorithm, shape):
    arrays, want = vectors(), dense_attention(*vectors(), sinks=np.full(DIMS.N, 0.75))
    (out, lse), (dsinks, *_) = with_vjp(
        lambda sinks, *x: attend(algorithm, *x, sinks=sinks),
        (jnp.full(shape, 0.75), *arrays),
        (jnp.zeros(DIMS["BTND"]), jnp.ones(DIMS["BTN"])),
    )
    assert_close(out, want.out)
    assert_close(lse, want.lse)
    on_sink = 1 - want.weights.sum(-1)
    assert_gradient_close(dsinks, np.full(shape, on_sink.sum()))


def test_a_number_may_be_one_of_python():
    want = dense_attention(*vectors(), sinks=np.full(DIMS.N, 2.0))
    for sinks in (2, 2.0, np.float64(2)):
        assert_close(jattn.attention(*vectors(), sinks=sinks), want.out)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_map_over_sinks_is_each_of_them(algorithm):
    arrays = vectors()
    sinks = jnp.asarray(exact(8, 3, DIMS.N), jnp.float32)

    def both(fn):
        def loss(sinks):
            out, lse = fn(*arrays, sinks=sinks)
            return jnp.sum(out**2) + jnp.sum(lse)

        return jit(jax.vmap(jax.value_and_grad(loss)))(sinks)

    got, want = both(functools.partial(attend, algorithm)), both(dense_jax)
    jax.tree.map(assert_gradient_close, got, want)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_sinks_of_narrow_inputs_have_gradients_that_are_not_rounded(algorithm):
    """Their gradient is a sum over queries of terms that cancel."""
    q, k, v, w = (exact(n, 1, 64, 2, 8) for n in range(4))
    sinks, causal = np.array([0.7, -0.3], np.float32), np.tril(np.ones((64, 64), bool))

    def loss(sinks):
        x = (jnp.asarray(x, jnp.bfloat16) for x in (q, k, v))
        out, _ = attend(
            algorithm, *x, sinks=sinks, blocks=(32, 16), mask=masks.causal()
        )
        return jnp.vdot(out.astype(jnp.float32), jnp.asarray(w, jnp.float32))

    out, _, weights, _ = dense_attention(q, k, v, causal, sinks=sinks)
    terms = (1 - weights.sum(-1)) * np.einsum("btnh,btnh->bnt", w, out)
    want = -terms.sum((0, 2))
    assert (np.abs(terms).sum((0, 2)) > 3 * np.abs(want)).all()
    gradient = jit(jax.grad(loss))(sinks)
    assert gradient.dtype == jnp.float32
    np.testing.assert_allclose(gradient, want, rtol=1e-3)


def test_narrow_sinks_are_summed_wide_and_get_narrow_gradients():
    arrays, sinks = vectors(jnp.bfloat16), jnp.asarray(SINKS, jnp.bfloat16)
    want = dense_attention(*vectors(), sinks=SINKS)
    on_sink = 1 - want.weights.sum(-1)  # (B, N, T)
    for algorithm in ALGORITHMS:
        fn = functools.partial(attend, algorithm, *arrays)
        lse, (dsinks,) = with_vjp(lambda sinks, fn=fn: fn(sinks=sinks)[1], (sinks,))
        assert (lse.dtype, dsinks.dtype) == (jnp.float32, jnp.bfloat16)
        np.testing.assert_allclose(lse, want.lse, rtol=0, atol=1e-4)
        assert_gradient_close(dsinks, on_sink.sum((0, 2)), jnp.bfloat16)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_nan_under_a_sink_reaches_the_queries_that_see_it_only(algorithm):
    q, k, v = vectors()
    spoilt = k.at[1, 7, 0].set(jnp.nan)
    sinks = jnp.asarray(SINKS, jnp.float32)
    fn = jit(functools.partial(attend, algorithm, **OPTIONS))
    results = fn(q, spoilt, v, sinks=sinks)
    clean = fn(q, k, v, sinks=sinks)
    sees = np.zeros(DIMS["BTN"], bool)
    sees[1, 3:, :2] = True  # from position 7 on, the heads of key head 0
    for a, b in zip(results, clean, strict=True):
        a, b, where = np.asarray(a), np.asarray(b), sees
        where = where if a.ndim == 3 else np.broadcast_to(where[..., None], a.shape)
        assert np.isnan(a[where]).all()
        assert_same_bits(a[~where], b[~where])


def test_sinks_leave_no_row_empty_so_mean_is_refused():
    with pytest.raises(ValueError, match="every query sees something.*Leave one"):
        jattn.attention(*vectors(), sinks=SINKS, empty_rows="mean")
    with pytest.raises(ValueError, match="^attention_weights: with sinks"):
        jattn.attention_weights(*vectors()[:2], sinks=0.0, empty_rows="mean")


@pytest.mark.parametrize(
    "sinks, kind, text",
    [
        (np.zeros(DIMS.K), ValueError, r"\(3,\) with N=6"),
        (np.zeros((DIMS.N, 1)), ValueError, r"\(6, 1\)"),
        (np.zeros((DIMS.B, DIMS.N)), ValueError, r"\(2, 6\)"),
        (np.zeros(DIMS.N, bool), TypeError, "bool"),
        (True, TypeError, "bool"),
        ("0", TypeError, "number"),
        (np.zeros(DIMS.N, complex), TypeError, "complex"),
    ],
    ids=str,
)
@pytest.mark.parametrize("caller", ["attention", "attention_weights"])
def test_sinks_that_are_not_one_number_per_head_are_refused(caller, sinks, kind, text):
    arrays = vectors() if caller == "attention" else vectors()[:2]
    with pytest.raises(kind, match=rf"^{caller}: sinks must be .*{text}"):
        getattr(jattn, caller)(*arrays, sinks=sinks)


def test_other_sinks_are_other_data_and_no_other_program():
    q, k, v = vectors()
    traces = []

    def counting(s, q_pos, k_pos):
        traces.append(s.shape)
        return s

    rule = jattn.scores.rule(counting)
    for n in range(3):
        jattn.attention(q, k, v, sinks=SINKS + n, score=rule, query_positions="end")
        if n == 0:
            assert traces
            traces.clear()
    assert not traces


@pytest.mark.parametrize("blocks", [None, (2, 3)])
def test_sinks_of_any_dtype_count_in_that_of_the_logits(blocks, x64):
    q = jnp.float32(exact(1, 5, 2, 4))
    attend = functools.partial(jattn.attention, q, block_sizes=blocks, return_lse=True)
    whole, wide = jnp.array([1, 2]), jnp.array([1.0, 2.0])  # int64 and float64
    for keys in (q, q[:0]):
        results = attend(keys, keys, sinks=whole), attend(keys, keys, sinks=wide)
        jax.tree.map(assert_same_bits, *results)
        assert results[0][1].dtype == jnp.float32
    gradient = jit(jax.grad(lambda s: sum(x.sum() for x in attend(q, q, sinks=s))))(
        wide
    )
    assert gradient.dtype == jnp.float64
