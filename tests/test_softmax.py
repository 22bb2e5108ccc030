"""Softmax with forbidden keys: weights, and the monoid that every algorithm folds."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, seed, settings
from hypothesis import strategies as st
from oracle import assert_close, assert_same_bits, exact, jit

import jattn
from jattn.core.softmax import SoftmaxState, logsumexp

T, S, D = 3, 11, 5
SCORES = exact(1, T, S) * 4
SCORES[0, :4] = SCORES[1] = -np.inf  # row 1 sees nothing, row 0 not the first four
VALUES = exact(2, S, D)
pytestmark = pytest.mark.usefixtures("quick_compiler")
repeatable = settings(max_examples=40, deadline=None, derandomize=True, database=None)


from_scores = jit(SoftmaxState.from_scores)
finished = jit(lambda s, v: SoftmaxState.from_scores(s, v).finish())
softmax = jit(jattn.masked_softmax)


def state(keys):
    """The state after the keys of a slice (or of a list of indices), in float32."""
    s, v = np.float32(SCORES[:, keys]), np.float32(VALUES[keys])
    return from_scores(s, v)


EMPTY = SoftmaxState.empty((T,), D, jnp.float32)
PARTS = [state([0, 1]), state([2]), state([4, 5, 9]), state([3, 10]), state([]), EMPTY]
any_state = st.sampled_from(range(len(PARTS)))


def assert_equal_states(left, right):
    """Equal as what they stand for, and in every field."""
    for a, b in zip(left, right, strict=True):
        assert_close(a, np.asarray(b, np.float64))
    for a, b in zip(left.finish(), right.finish(), strict=True):
        assert_close(a, np.asarray(b, np.float64))


@seed(1)
@repeatable
@given(any_state, any_state, any_state)
def test_merge_is_associative(a, b, c):
    a, b, c = PARTS[a], PARTS[b], PARTS[c]
    assert_equal_states(a.merge(b).merge(c), a.merge(b.merge(c)))


@seed(2)
@repeatable
@given(any_state, any_state)
def test_merge_is_commutative(a, b):
    assert_equal_states(PARTS[a].merge(PARTS[b]), PARTS[b].merge(PARTS[a]))


@pytest.mark.parametrize("part", PARTS[:4], ids=["two", "one", "three", "others"])
def test_empty_is_the_identity(part):
    for merged in (part.merge(EMPTY), EMPTY.merge(part)):
        jax.tree.map(np.testing.assert_array_equal, merged, part)


def test_empty_is_the_identity_even_of_itself():
    jax.tree.map(assert_same_bits, EMPTY.merge(EMPTY), EMPTY)
    jax.tree.map(assert_same_bits, state([]), EMPTY)
    out, lse = EMPTY.merge(EMPTY).finish()
    assert_same_bits(out, np.zeros((T, D), np.float32))
    assert_same_bits(lse, np.full(T, -np.inf, np.float32))


@seed(3)
@repeatable
@given(st.lists(st.integers(0, S), min_size=0, max_size=4).map(sorted), st.booleans())
def test_any_split_of_the_keys_is_the_whole(cuts, backwards):
    bounds = [0, *cuts, S]
    states = [state(slice(a, b)) for a, b in zip(bounds, bounds[1:], strict=False)]
    if backwards:
        states = states[::-1]
    merged = functools.reduce(SoftmaxState.merge, states)
    assert_equal_states(merged, state(slice(None)))


def test_a_tree_of_merges_is_the_whole():
    states = [state(slice(n, n + 1)) for n in range(S)]
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *states)
    merge = jax.vmap(SoftmaxState.merge)
    total = jit(lambda states: jax.lax.associative_scan(merge, states))(stacked)
    assert_equal_states(jax.tree.map(lambda x: x[-1], total), state(slice(None)))


def test_the_state_of_all_keys_is_softmax_and_logsumexp():
    out, lse = state(slice(None)).finish()
    weights = jattn.masked_softmax(jnp.float32(SCORES))
    assert_close(out, np.asarray(weights, np.float64) @ VALUES)
    assert_close(lse, np.asarray(logsumexp(jnp.float32(SCORES)), np.float64))


@pytest.mark.parametrize("shift", [0.0, 1e4, -1e4, 3e38])
def test_scores_of_any_size_do_not_overflow(shift):
    s = np.float32([[0.0, 1.0, -np.inf], [2.0, -np.inf, 2.0]]) + np.float32(shift)
    weights = np.asarray(softmax(s))
    out, lse = finished(s, np.eye(3, dtype=np.float32))
    assert np.isfinite(lse).all()
    assert_close(out, weights.astype(np.float64))
    assert_close(weights.sum(-1), np.ones(2))
    assert weights[0, 2] == weights[1, 1] == 0


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_a_row_sums_to_one_over_allowed_keys_and_is_zero_elsewhere(dtype):
    allowed = np.random.default_rng(0).random((13, 29)) < 0.6
    allowed[4] = False
    scores = jnp.asarray(exact(3, 13, 29) * 8, dtype)
    masked = jattn.mask_scores(scores, allowed)
    assert masked.dtype == dtype
    weights = softmax(masked)
    assert weights.dtype == dtype
    weights = np.asarray(weights, np.float64)
    assert not weights[~allowed].any()
    assert not weights[4].any()
    rest = np.delete(weights, 4, axis=0)
    assert_close(rest.sum(-1), np.ones(12), dtype)
    exps = np.where(allowed, np.exp(np.asarray(scores, np.float64) - 30), 0)
    want = np.delete(exps / np.maximum(exps.sum(-1, keepdims=True), 1e-300), 4, axis=0)
    assert_close(rest, want, dtype)


@pytest.mark.parametrize("low", [-2e4, -1e30, float(np.finfo(np.float32).min)])
def test_no_allowed_score_is_low_enough_to_let_a_forbidden_key_in(low):
    s = jnp.float32([[low, low, 7.0]])
    masked = jattn.mask_scores(s, jnp.array([[True, True, False]]))
    np.testing.assert_array_equal(jattn.masked_softmax(masked), [[0.5, 0.5, 0.0]])


@pytest.mark.parametrize("row", [np.nan, np.inf])
def test_a_nan_in_a_row_leaves_its_forbidden_keys_and_other_rows_alone(row):
    s = jnp.float32([[row, 1.0, -jnp.inf], [0.0, 0.0, -jnp.inf]])
    weights = np.asarray(jattn.masked_softmax(s))
    assert weights[0, 2] == 0 and not np.isfinite(weights[0, :2]).all()
    np.testing.assert_array_equal(weights[1], [0.5, 0.5, 0.0])


def test_gradients_of_empty_rows_are_exactly_zero():
    s = jnp.float32(SCORES)
    weights = exact(4, T, S).astype(np.float32)

    def through_weights(s):
        return jnp.vdot(jattn.masked_softmax(s), weights)

    def through_state(s, v):
        out, lse = SoftmaxState.from_scores(s, v).finish()
        return jnp.sum(out**2), lse

    def total_lse(s):
        return jnp.sum(logsumexp(s))

    @jit
    def gradients(s, v):
        _, pull = jax.vjp(through_state, s, v)
        of_state = pull((jnp.float32(1), jnp.ones(T)))
        return jax.grad(through_weights)(s), jax.grad(total_lse)(s), *of_state

    of_weights, of_lse, ds, dv = gradients(s, jnp.float32(VALUES))
    for gradient in (of_weights, of_lse):
        assert np.isfinite(gradient).all()
        assert not np.asarray(gradient)[np.isneginf(SCORES)].any()
        assert np.asarray(gradient)[~np.isneginf(SCORES)].all()
    assert np.isfinite(ds).all() and np.isfinite(dv).all()
    assert not np.asarray(ds)[np.isneginf(SCORES)].any()


def test_the_gradient_of_logsumexp_is_the_softmax():
    s = jnp.float32(SCORES)
    gradient = jax.grad(lambda s: jnp.sum(logsumexp(s)))(s)
    assert_close(gradient, np.asarray(jattn.masked_softmax(s), np.float64))


@pytest.mark.parametrize(
    "query, scale, want",
    [
        ([1.0, 0.0], None, [0.4011, 0.1978, 0.4011]),
        ([0.0, 1.0], None, [0.1978, 0.4011, 0.4011]),
        ([1.0, 0.0], 1.0, [0.4223, 0.1554, 0.4223]),
    ],
)
def test_the_worked_example_of_three_keys(query, scale, want):
    q = jnp.asarray([[query]])  # (T, N, H)
    k = jnp.asarray([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])[:, None]
    weights = jattn.attention_weights(q, k, scale=scale)[0, 0]
    np.testing.assert_allclose(weights, want, atol=5e-5)
    by_hand = jattn.masked_softmax(jattn.scaled_scores(q, k, scale))
    np.testing.assert_allclose(by_hand[0, 0], want, atol=5e-5)
    for algorithm in ("reference", "blockwise"):
        v = jnp.eye(3)[:, None]
        out = jattn.attention(q, k, v, scale=scale, implementation=algorithm)
        np.testing.assert_allclose(out[0, 0], want, atol=5e-5)


def test_the_mask_comes_before_the_softmax():
    x, allowed = (
        jnp.array([[2.0, 1.0, 0.0, -1.0]]),
        jnp.array([[True, True, False, True]]),
    )
    weights = np.asarray(jattn.masked_softmax(jattn.mask_scores(x, allowed)))[0]
    exps = np.exp([2.0, 1.0, -1.0])
    assert_close(weights[[0, 1, 3]], exps / exps.sum())
    assert weights[2] == 0


def test_a_long_row_of_float16_sums_to_one():
    weights = softmax(np.zeros(70_000, np.float16))
    assert weights.dtype == jnp.float16
    total = np.asarray(weights).sum(dtype=np.float32)
    assert float(total) == pytest.approx(1, rel=4e-3)
