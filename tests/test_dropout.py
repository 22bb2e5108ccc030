"""Dropout: which weights are kept follows from the key and their place alone."""

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
from jattn.core.dropout import Shared

DIMS = chex.Dimensions(B=2, T=7, S=11, N=6, K=3, H=5)
RNG = jax.random.key(5)
RATE = 0.4
PATHS = [
    ("reference", None),
    ("blockwise", (4, 3)),
    ("blockwise", (1, 11)),
    ("blockwise", (7, 2)),
]
BOTH = PATHS[:2]


def vectors(dtype=jnp.float32):
    """Values are the rows of the identity, so the output is the weights."""
    q, k = (exact(n, *DIMS[x]) for n, x in enumerate(("BTNH", "BSKH")))
    v = np.broadcast_to(np.eye(DIMS.S)[:, None], (DIMS.B, DIMS.S, DIMS.K, DIMS.S))
    return [jnp.asarray(x, dtype) for x in (q, k, v)]


def attend(path, *arrays, rate=RATE, rng=RNG, **options):
    algorithm, blocks = path
    return jattn.attention(
        *arrays,
        implementation=algorithm,
        block_sizes=blocks,
        dropout_rate=rate,
        dropout_rng=rng,
        **options,
    )


def run(path, *arrays, rng=RNG, **options):
    """`attend`, compiled faster."""
    fn = functools.partial(attend, path, **options)
    return jit(lambda arrays, rng: fn(*arrays, rng=rng))(arrays, rng)


def weights_of(out):
    """The output for values from `vectors`, as (*B, N, T, S)."""
    return np.moveaxis(np.asarray(out), -3, -2)


@functools.cache
def compiled_weights(rate):
    """`attention_weights` of query, key and a key of dropout."""
    fn = jattn.attention_weights
    return jit(lambda q, k, rng: fn(q, k, dropout_rate=rate, dropout_rng=rng))


def kept_of(rng=RNG, rate=RATE, dims=DIMS):
    """Which weights are kept of (B, N, T, S), if all are equal."""
    q, k = (np.zeros(dims[x], np.float32) for x in ("BTNH", "BSKH"))
    return np.asarray(compiled_weights(rate)(q, k, rng)) > 0


@pytest.mark.parametrize("path", PATHS, ids=str)
def test_the_pattern_is_the_same_on_every_path(path):
    arrays = vectors()
    want = jattn.attention_weights(*arrays[:2], dropout_rate=RATE, dropout_rng=RNG)
    got = weights_of(run(path, *arrays))
    np.testing.assert_array_equal(got > 0, kept_of())
    assert_close(got, want)


def test_those_that_are_kept_are_divided_by_the_share_that_is_kept(x64):
    arrays = vectors(jnp.float64)
    weights = dense_attention(*arrays).weights
    for rate in (0.1, 0.4, 0.9):
        kept = kept_of(rate=rate)
        got = compiled_weights(rate)(*arrays[:2], RNG)
        assert_close(got, kept * weights / (1 - rate), jnp.float64)
        assert kept.any() and not kept.all()


def test_only_place_and_key_decide():
    """Not lengths, what follows in the batch, vectors, masks or the kind of key."""
    kept = kept_of()
    smaller = chex.Dimensions(B=1, T=4, S=5, N=6, K=3, H=5)
    np.testing.assert_array_equal(kept_of(dims=smaller), kept[:1, :, :4, :5])
    one_key_head = chex.Dimensions(B=2, T=7, S=11, N=6, K=1, H=2)
    np.testing.assert_array_equal(kept_of(dims=one_key_head), kept)
    q, k, _ = vectors()
    options = dict(dropout_rate=RATE, dropout_rng=RNG, mask=masks.causal())
    weights = jattn.attention_weights(q, k, query_positions="end", **options)
    seen = np.tril(np.ones(DIMS["TS"], bool), DIMS.S - DIMS.T)
    np.testing.assert_array_equal(np.asarray(weights) > 0, kept & seen)
    np.testing.assert_array_equal(kept_of(rng=jax.random.PRNGKey(5)), kept)
    assert not np.array_equal(kept_of(rng=jax.random.key(6)), kept)


@pytest.mark.parametrize("path", BOTH, ids=str)
def test_a_shared_key_gives_every_head_and_row_the_pattern_of_the_first(path):
    kept = weights_of(run(path, *vectors(), rng=Shared(RNG))) > 0
    np.testing.assert_array_equal(kept, np.broadcast_to(kept_of()[:1, :1], kept.shape))


def test_the_pattern_survives_jit_checkpoint_and_scan():
    q, k, v = vectors()
    g = jnp.asarray(exact(7, *v.shape[:1], DIMS.T, DIMS.N, DIMS.S), jnp.float32)
    one = jax.checkpoint(functools.partial(attend, BOTH[1]))

    def scanned(v, rng):
        def step(total, _):
            return total + one(q, k, v, rng=rng), None

        return jax.lax.scan(step, jnp.zeros_like(g), None, 2)[0]

    def both(v, rng):
        out, pull = jax.vjp(lambda v: scanned(v, rng), v)
        return out, pull(g)[0]

    out, gradient = jit(both)(v, RNG)
    weights = weights_of(out) / 2
    np.testing.assert_array_equal(weights > 0, kept_of())
    shares = weights.reshape(DIMS.B, DIMS.K, -1, *weights.shape[2:])
    parts = np.asarray(g).reshape(DIMS.B, DIMS.T, DIMS.K, -1, DIMS.S)
    want = 2 * np.einsum("bkgts,btkgd->bskd", shares, parts)
    assert_gradient_close(gradient, want)


@pytest.mark.parametrize("path", BOTH[1:], ids=str)
def test_a_map_gives_each_key_its_pattern_and_one_key_the_same_to_all(path):
    q, k, v = (x[:1] for x in vectors())
    rngs = jax.random.split(RNG, 3)
    one = functools.partial(attend, path, q, k, v)
    got = jit(jax.vmap(lambda rng: one(rng=rng)))(rngs)
    small = chex.Dimensions(B=1, T=7, S=11, N=6, K=3, H=5)
    for n in range(3):
        want = kept_of(rngs[n], dims=small)
        np.testing.assert_array_equal(weights_of(got[n]) > 0, want)
    stacked = [jnp.stack([x, -x / 2]) for x in (q, k)]
    fn = jax.vmap(functools.partial(attend, path), (0, 0, None))
    for out in jit(fn)(*stacked, v):
        np.testing.assert_array_equal(weights_of(out) > 0, kept_of(dims=small))


def everything(fn, floats, tangents, cotangents):
    """Results, gradients, tangents, and the tangents of the gradients."""

    def gradients(floats):
        results, pull = jax.vjp(fn, floats)
        return results, pull(cotangents)[0]

    (results, gradient), (tangent, second) = jax.jvp(gradients, (floats,), (tangents,))
    return dict(results=results, gradient=gradient, tangent=tangent, second=second)


@pytest.mark.parametrize("path", BOTH, ids=str)
def test_every_derivative_is_that_of_the_same_pattern(path, x64):
    q, k, _ = vectors(jnp.float64)
    v = jnp.asarray(exact(3, DIMS.B, DIMS.S, DIMS.K, 4))
    floats = dict(q=q, k=k, v=v, sinks=jnp.asarray(exact(4, DIMS.N)))
    tangents = {n: jnp.asarray(exact(9, *x.shape)) for n, x in floats.items()}
    shapes = (DIMS.B, DIMS.T, DIMS.N, 4), DIMS["BTN"]
    cotangents = tuple(jnp.asarray(exact(7, *shape)) for shape in shapes)
    kept = kept_of() / (1 - RATE)

    def ours(x):
        options = dict(mask=masks.lengths(9), return_lse=True, sinks=x["sinks"])
        return attend(path, x["q"], x["k"], x["v"], **options)

    def dense(x):
        seen = np.arange(DIMS.S) < 9
        sinks = x["sinks"]
        return dense_jax(x["q"], x["k"], x["v"], seen, sinks=sinks, kept=kept)

    got, want = (
        jit(functools.partial(everything, fn))(floats, tangents, cotangents)
        for fn in (ours, dense)
    )
    jax.tree.map(lambda a, b: assert_gradient_close(a, b, jnp.float64), got, want)


def z_score(total, expected, variance):
    return abs(total - expected) / np.sqrt(variance)


LONG = chex.Dimensions(B=3, T=101, S=103, N=4, K=1, H=1)


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
def test_the_share_that_is_dropped_is_the_rate(rate):
    dropped = ~kept_of(rate=rate, dims=LONG)

    def assert_share(count, n):
        assert np.max(z_score(count, n * rate, n * rate * (1 - rate))) < 4

    assert_share(dropped.sum(), dropped.size)
    for axis in range(4):  # of each batch row, head, query and key
        counts = dropped.sum(tuple({0, 1, 2, 3} - {axis}))
        assert_share(counts, dropped.size / len(counts))


def centred(rng, rate):
    """1 where a weight is kept, with mean 0 and variance 1."""
    return (kept_of(rng, rate, LONG) - (1 - rate)) / np.sqrt(rate * (1 - rate))


def assert_uncorrelated(*arrays):
    products = functools.reduce(np.multiply, arrays)
    assert z_score(products.sum(), 0, products.size) < 4


def shifted(x, **steps):
    """The part of x that has a neighbour at these steps, and the neighbours."""
    here, there = x, x
    for axis, letter in enumerate("BNTS"):
        step, size = steps.get(letter, 0), x.shape[axis]
        here = np.take(here, range(size - step), axis)
        there = np.take(there, range(step, size), axis)
    return here, there


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
def test_neighbours_are_dropped_independently(rate):
    x = centred(RNG, rate)
    for letter, steps in dict(
        B=[1, 2], N=[1, 2, 3], T=[1, 2, 64], S=[1, 2, 64]
    ).items():
        for step in steps:
            assert_uncorrelated(*shifted(x, **{letter: step}))
    for steps in (dict(T=1, S=1), dict(B=1, N=1), dict(N=1, T=1), dict(B=1, S=1)):
        assert_uncorrelated(*shifted(x, **steps))
    t, s = np.triu_indices(LONG.T, 1)
    assert_uncorrelated(x[:, :, t, s], x[:, :, s, t])


@pytest.mark.parametrize("step", [1, 2, 3, 16, 64])
def test_four_corners_of_a_rectangle_are_dropped_independently(step):
    """A hash of separate words of query and key would fail here."""
    x = centred(RNG, 0.5)
    near, far = shifted(x, T=step)
    for width in (1, 2, 32):
        a, b = shifted(near, S=width)
        c, d = shifted(far, S=width)
        assert_uncorrelated(a, b, c, d)
    for letter in ("B", "N"):
        a, b = shifted(near, **{letter: 1})
        c, d = shifted(far, **{letter: 1})
        assert_uncorrelated(a, b, c, d)


def test_keys_that_are_neighbours_drop_independently():
    rngs = [RNG, jax.random.key(6), jax.random.key(4), *jax.random.split(RNG)]
    rngs += [jax.random.fold_in(RNG, n) for n in (7, 8)]
    patterns = [centred(rng, 0.5) for rng in rngs]
    for n, x in enumerate(patterns):
        for other in patterns[:n]:
            assert_uncorrelated(x, other)
            assert_uncorrelated(x[:, 1:], other[:, :-1])


@pytest.mark.parametrize("path", BOTH, ids=str)
def test_the_mean_over_keys_is_the_output_without_dropout(path):
    q, k, _ = vectors()
    v = jnp.asarray(exact(3, DIMS.B, DIMS.S, DIMS.K, 2), jnp.float32)
    rngs = jax.random.split(jax.random.key(1), 500)
    outs = jit(jax.vmap(lambda rng: attend(path, q, k, v, rng=rng)))(rngs)
    outs = np.asarray(outs, np.float64)
    error = outs.mean(0) - dense_attention(q, k, v).out
    z = error / (outs.std(0) / np.sqrt(len(outs)))
    assert np.abs(z).max() < 4.5  # of 336 numbers
    assert 0.8 < np.mean(z**2) < 1.2


@pytest.mark.parametrize("path", BOTH, ids=str)
def test_rows_that_lose_every_key_are_zero_and_have_finite_gradients(path):
    q, k, v = vectors()
    mask = masks.lengths(3)

    def both(*arrays):
        out, pull = jax.vjp(lambda *x: attend(path, *x, rate=0.9, mask=mask), *arrays)
        return out, pull(jnp.ones_like(out))

    out, gradients = jit(both)(q, k, v)
    lost = ~kept_of(rate=0.9)[..., :3].any(-1)
    assert 0 < lost.sum() < lost.size
    np.testing.assert_array_equal((weights_of(out) == 0).all(-1), lost)
    assert np.isfinite(out).all() and all(np.isfinite(x).all() for x in gradients)
    # A row's sum of weights is no constant any more.
    assert np.abs(gradients[0]).max() > 0.1


def test_a_row_that_loses_every_key_is_no_row_without_keys():
    arrays, options = vectors(), dict(empty_rows="mean", mask=masks.lengths(3))
    out = run(PATHS[0], *arrays, rate=0.9, **options)
    lost = ~kept_of(rate=0.9)[..., :3].any(-1)
    assert not weights_of(out)[lost].any()
    weights = jattn.attention_weights(
        *arrays[:2], dropout_rate=0.9, dropout_rng=RNG, **options
    )
    assert_close(weights, weights_of(out))


@pytest.mark.parametrize("path", BOTH, ids=str)
def test_lse_and_statistics_are_those_before_dropout(path):
    sinks = np.arange(6.0) - 3
    out, stats = run(path, *vectors(), sinks=sinks, stats=True)
    want = dense_attention(*vectors(), sinks=sinks)
    assert not np.allclose(out, want.out)
    p = np.concatenate([want.weights, 1 - want.weights.sum(-1, keepdims=True)], -1)
    rows = (want.logits.max(-1), -(p * np.log(p)).sum(-1), p.max(-1), (p**2).sum(-1))
    assert_close(stats.lse, want.lse)
    for name, got, row in zip(stats._fields[1:], stats[1:], rows, strict=True):
        assert_close(got, np.swapaxes(row, 1, 2), name=name)


@pytest.mark.parametrize("path", BOTH, ids=str)
def test_at_a_rate_of_0_no_bit_changes_with_or_without_a_key(path):
    arrays = vectors()
    options = dict(implementation=path[0], block_sizes=path[1])
    want = jit(functools.partial(jattn.attention, **options))(*arrays)
    assert_same_bits(run(path, *arrays, rate=0.0), want)
    weights = functools.partial(jattn.attention_weights, *arrays[:2])
    assert_same_bits(weights(dropout_rate=0.0, dropout_rng=RNG), weights())


@pytest.mark.parametrize("path", BOTH, ids=str)
def test_a_nan_reaches_the_rows_that_may_see_it_dropped_or_not(path):
    q, k, v = vectors()
    v = v.at[0, 6, 0].set(jnp.nan)  # the last key that the first queries may not see
    mask, options = masks.causal(), dict(query_positions="start")

    def both(*arrays):
        out, pull = jax.vjp(
            lambda *x: attend(path, *x, mask=mask, rate=0.6, **options), *arrays
        )
        return out, pull(jnp.ones_like(out))

    fn = jit(both)
    (out, spoilt), (clean, gradients) = fn(q, k, v), fn(*vectors())
    rows = np.zeros(DIMS["BTN"], bool)
    rows[0, 6, :2] = True
    assert np.isnan(np.asarray(out)[rows]).all()
    assert_same_bits(np.asarray(out)[~rows], np.asarray(clean)[~rows])
    # Of keys and values: those of what the rows may see, and of values that they kept.
    keys = np.zeros(DIMS["BSK"], bool)
    keys[0, :7, 0] = True
    values = keys.copy()
    values[0, :7, 0] = kept_of(rate=0.6)[0, :2, 6, :7].any(0)
    places = zip(spoilt[1:], gradients[1:], (keys, values), strict=True)
    for a, b, where in places:
        a, b = np.asarray(a), np.asarray(b)
        assert np.isnan(a[where]).all()
        assert_same_bits(a[~where], b[~where])


def test_other_keys_are_other_data_and_other_rates_other_programs():
    traces = []

    def counting(s, q_pos, k_pos):
        traces.append(s.shape)
        return s

    arrays, rule = vectors(), jattn.scores.rule(counting)
    fn = functools.partial(
        attend, BOTH[0], *arrays, score=rule, query_positions="start"
    )
    fn()
    assert traces
    traces.clear()
    fn(rng=jax.random.key(8))
    assert not traces
    fn(rate=0.25)
    assert traces


TWO_KEYS = jax.random.split(RNG)
WRONG = [
    (dict(dropout_rate=-0.5), ValueError, r"in \[0, 1\), but got -0.5"),
    (dict(dropout_rate=float("nan")), ValueError, r"\[0, 1\), but got nan"),
    (dict(dropout_rate=1.0), ValueError, r"\[0, 1\), but got 1.0"),
    (dict(dropout_rate=1.5), ValueError, r"\[0, 1\), but got 1.5"),
    (dict(dropout_rate=True), TypeError, "must be a number.*bool"),
    (dict(dropout_rate="0.5"), TypeError, "must be a number.*str"),
    (dict(dropout_rate=None), TypeError, "must be a number.*NoneType"),
    (dict(dropout_rate=jnp.float32(0.5)), TypeError, "must be a number.*traced"),
    (dict(dropout_rng=None), ValueError, r"needs dropout_rng.*jax.random.key\(seed\)"),
    (dict(dropout_rng=TWO_KEYS), ValueError, r"one key.*\(2,\)"),
    (dict(dropout_rng=jax.random.PRNGKey(0)[None]), ValueError, r"one key.*\(1, 2\)"),
    (dict(dropout_rng=3), TypeError, "must be a key of jax.random.*int"),
    (dict(dropout_rng=np.arange(2.0)), TypeError, "must be a key.*float64"),
    (dict(dropout_rng=jnp.arange(2)), TypeError, "must be a key.*int32"),
    (dict(dropout_rng="0"), TypeError, "must be a key.*str"),
    (dict(dropout_rng=Shared(TWO_KEYS)), ValueError, r"one key.*\(2,\)"),
]


@pytest.mark.parametrize("options, kind, text", WRONG)
@pytest.mark.parametrize("caller", ["attention", "attention_weights"])
def test_a_rate_or_a_key_that_cannot_be_is_named(caller, options, kind, text):
    arrays = vectors() if caller == "attention" else vectors()[:2]
    options = dict(dropout_rate=0.5, dropout_rng=RNG) | options
    with pytest.raises(kind, match=f"^{caller}: dropout.*{text}"):
        getattr(jattn, caller)(*arrays, **options)


def test_a_traced_rate_is_refused_and_a_traced_key_is_not():
    q, k, v = vectors()
    with pytest.raises(TypeError, match="dropout_rate must be a number.*traced"):
        jax.jit(lambda rate: attend(BOTH[0], q, k, v, rate=rate))(0.5)
    jax.eval_shape(lambda rng: attend(BOTH[0], q, k, v, rng=rng), RNG)
