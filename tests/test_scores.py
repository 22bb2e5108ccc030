"""What each score rule does, and its mistakes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracle import assert_close, exact

import jattn
from jattn import masks, scores

T, S, N = 5, 7, 3
s = exact(1, T, S)
q_pos, k_pos = np.arange(T)[:, None], np.arange(S)[None]


@pytest.mark.parametrize("cap", [0.5, 3, jnp.float32(2.0)], ids=str)
def test_a_soft_cap_is_a_scaled_tanh(cap):
    got = scores.soft_cap(cap)(jnp.float32(s), q_pos, k_pos)
    assert_close(got, float(cap) * np.tanh(s / float(cap)))


def test_a_soft_cap_bounds_scores_and_keeps_small_ones():
    capped = scores.soft_cap(5.0)(jnp.float32([[-1e6, 0.0, 1e-3, 1e6]]), None, None)
    np.testing.assert_allclose(capped, [[-5.0, 0.0, 1e-3, 5.0]], rtol=1e-6)


def test_the_gradient_of_a_soft_cap_is_one_minus_tanh_squared():
    got = jax.grad(lambda x: scores.soft_cap(2.0)(x, None, None).sum())(jnp.float32(s))
    assert_close(got, 1 - np.tanh(s / 2) ** 2)


def test_the_soft_cap_comes_before_the_mask():
    q, k = jnp.zeros((1, 1, 2)), jnp.ones((4, 1, 2))
    v = jnp.eye(4)[:, None]
    out = jattn.attention(q, k, v, mask=masks.lengths(3), score=scores.soft_cap(1.0))
    assert_close(out[0, 0], np.array([1, 1, 1, 0]) / 3)


def test_rules_are_applied_in_the_order_written():
    q, k = exact(2, T, 1, 4).astype(np.float32), exact(3, S, 1, 4).astype(np.float32)
    add = scores.additive(exact(4, 1, T, S).astype(np.float32))
    cap = scores.soft_cap(1.0)
    raw = np.asarray(jattn.scaled_scores(q, k), np.float64)[0]
    bias = exact(4, T, S)
    for rules, want in [
        ((cap, add), np.tanh(raw) + bias),
        ((add, cap), np.tanh(raw + bias)),
        ((add, add, cap), np.tanh(raw + 2 * bias)),
    ]:
        exps = np.exp(want)
        weights = jattn.attention_weights(q, k, score=rules)
        assert_close(weights[0], exps / exps.sum(-1, keepdims=True))


def test_bias_comes_after_the_rules_and_is_the_additive_rule():
    q, k = exact(2, T, 1, 4).astype(np.float32), exact(3, S, 1, 4).astype(np.float32)
    bias = exact(4, 1, T, S).astype(np.float32)
    cap = scores.soft_cap(1.0)
    as_bias = jattn.attention_weights(q, k, score=cap, bias=bias)
    as_rule = jattn.attention_weights(q, k, score=(cap, scores.additive(bias)))
    np.testing.assert_array_equal(as_bias, as_rule)


@pytest.mark.parametrize("algorithm", ["reference", "blockwise"])
def test_no_bias_revives_a_forbidden_key(algorithm):
    x = jnp.ones((4, 1, 2))
    v = jnp.eye(4)[:, None]
    bias = jnp.where(jnp.arange(4) == 3, 1e30, 0.0)[None, None]
    options = dict(mask=masks.lengths(3), bias=bias, implementation=algorithm)
    out = jattn.attention(x, x, v, **options)
    assert_close(out[:, 0], np.array(4 * [[1, 1, 1, 0]]) / 3)


def shifted(s, q_pos, k_pos, table, per_query, per_key):
    return s + table[0] * (q_pos - k_pos) + per_query - per_key


def test_a_custom_rule_gets_the_positions_and_its_arrays_by_letters():
    table, per_query, per_key = exact(5, 2), exact(6, T), exact(7, S)
    rule = scores.rule(shifted, table, per_query, per_key, axes=["", "T", "S"])
    want = s + table[0] * (q_pos - k_pos) + per_query[:, None] - per_key[None]
    assert_close(rule(jnp.float32(s), q_pos, k_pos), want)


@pytest.mark.parametrize("algorithm", ["reference", "blockwise"])
def test_a_bias_for_a_whole_head_has_no_gradient(algorithm):
    # It shifts every score of a row; a bias per key sums what the full one gets.
    q, k, v = (exact(n, T, N, 4).astype(np.float32) for n in (8, 9, 10))
    blocks = (2, 3) if algorithm == "blockwise" else None

    def loss(bias):
        out = jattn.attention(
            q, k, v, bias=bias, implementation=algorithm, block_sizes=blocks
        )
        return jnp.sum(out * v)

    full = jax.grad(loss)(jnp.zeros((N, T, T)))
    per_head = jax.grad(loss)(jnp.zeros((N, 1, 1)))
    per_key = jax.grad(loss)(jnp.zeros((1, 1, T)))
    assert_close(per_head, np.zeros((N, 1, 1)))
    assert_close(per_key, np.asarray(full, np.float64).sum((0, 1), keepdims=True))


@pytest.mark.parametrize(
    "make, kind, text",
    [
        (
            lambda: scores.soft_cap(0.0),
            ValueError,
            "positive and finite.*cap=0.0.*leave",
        ),
        (lambda: scores.soft_cap(-1), ValueError, "cap=-1"),
        (lambda: scores.soft_cap(float("inf")), ValueError, "cap=inf"),
        (lambda: scores.soft_cap(float("nan")), ValueError, "cap=nan"),
        (lambda: scores.soft_cap(np.array([1, 2])), TypeError, "floating point.*1, 2"),
        (lambda: scores.soft_cap(None), TypeError, "cap must be a number"),
        (lambda: scores.additive(np.ones((1, 1), bool)), TypeError, "bool.*mask="),
        (lambda: scores.additive(np.ones((1, 1), int)), TypeError, "int64"),
        (lambda: scores.rule(shifted, s, axes=["ST"]), ValueError, "scores.rule.*'ST'"),
        (lambda: scores.rule(shifted, s, axes=["N", "T"]), ValueError, "for 1 arrays"),
    ],
)
def test_a_bad_argument_is_refused_with_the_cure(make, kind, text):
    with pytest.raises(kind, match="(?s)" + text):
        make()


def test_module_lists_its_public_names():
    for name in scores.__all__:
        assert getattr(scores, name) is not None


@pytest.mark.parametrize("cap", [1e39, 1e-46, np.float32(0), np.array([1.0, -1.0])])
def test_a_cap_must_be_positive_and_finite_in_float32(cap):
    with pytest.raises(ValueError, match="positive and finite in float32"):
        scores.soft_cap(cap)
