"""What each score rule does, and its mistakes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracle import assert_close, assert_gradient_close, dense_jax, exact, jit

import jattn
from jattn import masks, scores
from jattn.scores.by_position import alibi_slopes

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


PAPER = {
    1: [2**-8],
    4: [2**-2, 2**-4, 2**-6, 2**-8],
    8: [2**-n for n in range(1, 9)],
    12: [2**-n for n in range(1, 9)] + [2**-0.5, 2**-1.5, 2**-2.5, 2**-3.5],
    3: [2**-4, 2**-8, 2**-2],
}


@pytest.mark.parametrize("num_heads", PAPER)
def test_alibi_takes_the_slopes_of_the_paper_for_the_heads_of_the_call(num_heads):
    assert_close(alibi_slopes(num_heads), PAPER[num_heads], jnp.float64)
    x = np.zeros((2, num_heads, 4), np.float32)
    weights = jattn.attention_weights(x, x, score=scores.alibi())
    got = np.log(np.asarray(weights, np.float64))
    assert_close(got[:, 0, 0] - got[:, 0, 1], PAPER[num_heads])


def test_the_papers_slopes_reach_grouped_heads_in_tiles():
    q, k = (jnp.float32(exact(i, 5, n, 4)) for i, n in ((1, 4), (2, 2)))
    by_rows, by_tiles = (
        jattn.attention(q, k, k, score=scores.alibi(), block_sizes=blocks)
        for blocks in (None, (3, 2))
    )
    assert_close(by_tiles, np.float64(by_rows))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_gradients_of_narrow_arrays_are_summed_over_tiles_in_float32(dtype):
    """They differ from those of the same numbers in float32 by one rounding."""
    n, table = 64, 0.1 * exact(3, 8, 1)
    q, v = jnp.float32(exact(1, n, 1, 4)), jnp.float32(exact(2, n, 1, 4))
    cotangent = jnp.float32(exact(4, n, 1, 4)) + 0.5

    def loss(table, slope, bias):
        rules = scores.relative_bias(table, bidirectional=False), scores.alibi(slope)
        out = jattn.attention(q, q, v, score=rules, bias=bias, block_sizes=(4, 4))
        return (out * cotangent).sum()

    given = [jnp.asarray(x, dtype) for x in (table, [0.25], exact(5, 1, 1, n) / 8)]
    narrow, wide = (
        jit(jax.grad(loss, (0, 1, 2)))(*(x.astype(kind) for x in given))
        for kind in (dtype, jnp.float32)
    )
    for got, want in zip(narrow, wide, strict=True):
        assert got.dtype == dtype
        np.testing.assert_array_equal(got, want.astype(dtype))


@pytest.mark.parametrize("slopes", [0.5, 2, np.float32(0.25), jnp.float32(-0.5)])
def test_alibi_lowers_scores_by_the_distance_on_either_side(slopes):
    got = scores.alibi(slopes)(jnp.float32(s), q_pos - 2, k_pos)
    assert_close(got, s - float(slopes) * abs(q_pos - 2 - k_pos))


def test_distances_are_exact_at_any_position(x64):
    far = np.array([[2**30 - 1, 3 - 2**30]], np.int32)
    got = scores.alibi(1.0)(jnp.zeros((2, 2)), far.T, far)
    np.testing.assert_array_equal(got, [[0, 4 - 2**31], [4 - 2**31, 0]])
    table = exact(1, 8, 1)[:, 0]
    rule = jax.tree.map(
        lambda x: x[:, 0],
        scores.relative_bias(np.stack([table], 1), bidirectional=True, max_distance=9),
    )
    got = rule(jnp.zeros((2, 2)), far.T, far)
    np.testing.assert_array_equal(got, [[table[0], table[3]], [table[7], table[0]]])


def test_neighbours_far_away_differ_by_the_slope_in_narrow_dtypes():
    q, k = (jnp.zeros((n, 8, 4), jnp.bfloat16) for n in (1, 4096))
    weights = jattn.attention_weights(q, k, score=scores.alibi(), query_positions="end")
    got = np.log(np.asarray(weights[6:, 0, :2], np.float64))
    assert_close(got[:, 1] - got[:, 0], PAPER[8][6:])


BUCKETS = [
    (32, True, 128),
    (32, False, 128),
    (8, True, 8),
    (3, False, 2),
    (16, False, 9),
]


@pytest.mark.parametrize("num_buckets, bidirectional, max_distance", BUCKETS)
def test_buckets_are_those_of_t5(num_buckets, bidirectional, max_distance):
    """Where the logarithm is a whole number, in 64 bits and rounded up a little."""
    distance = np.arange(-300, 301)
    n = abs(distance) if bidirectional else np.maximum(-distance, 0)
    size = num_buckets // 2 if bidirectional else num_buckets
    near = size // 2
    growth = np.log(np.maximum(n, 1) / near) / np.log(max_distance / near)
    far = np.minimum(near + np.floor(growth * (size - near) + 1e-9), size - 1)
    want = np.where(n < near, n, far) + (size if bidirectional else 0) * (distance > 0)
    rule = scores.relative_bias(
        np.zeros((num_buckets, 1)),
        bidirectional=bidirectional,
        max_distance=max_distance,
    )
    np.testing.assert_array_equal(rule.buckets(distance), want)


def test_buckets_begin_exactly_at_powers():
    rule = scores.relative_bias(np.zeros((32, 1)), bidirectional=True)
    starts = np.array([8, 16, 32, 64])  # 8 * 16^(i / 8) for i = 0, 2, 4, 6
    assert rule.buckets(-starts).tolist() == [8, 10, 12, 14]
    assert rule.buckets(1 - starts).tolist() == [7, 9, 11, 13]
    assert rule.buckets(starts).tolist() == [24, 26, 28, 30]


def test_log_n_changes_nothing_up_to_the_reference_length():
    rule = scores.log_n_scale(4)
    place = np.array([[-5], [0], [2], [3], [7], [15], [2**30 - 1]])
    got = rule(jnp.ones((7, 2)), place, None)
    np.testing.assert_array_equal(got[:4], np.ones((4, 2)))
    assert_close(got[4:], np.array([[1.5, 1.5], [2, 2], [15, 15]]))


def test_log_n_with_a_reference_of_two_is_the_logarithm():
    got = scores.log_n_scale(2)(jnp.ones((9, 1)), np.arange(9)[:, None], None)
    assert_close(got[1:, 0], np.log2(np.arange(2, 10)))


@pytest.mark.parametrize(
    "rule",
    [
        scores.alibi(),
        scores.log_n_scale(3),
        scores.relative_bias(exact(1, 8, N), bidirectional=True, max_distance=6),
    ],
    ids=str,
)
def test_the_last_queries_score_alone_as_they_do_among_all(rule):
    q, k = (exact(n, S, N, 4).astype(np.float32) for n in (1, 2))
    whole = jattn.attention_weights(q, k, score=rule)
    last = jattn.attention_weights(q[-2:], k, score=rule, query_positions="end")
    assert_close(last, np.asarray(whole[:, -2:], np.float64))


SHIFT = np.array([0, 1, 2, 3, 5, 6, 20], np.int32)  # positions with gaps


def of_positions(vectors, slopes, table, **how):
    """The output under all score rules of positions, at `SHIFT`."""
    rules = (
        scores.log_n_scale(3),
        scores.alibi(slopes),
        scores.relative_bias(table, bidirectional=True, max_distance=7),
    )
    places = dict(query_positions=SHIFT, key_positions=SHIFT)
    mask = masks.causal() | masks.chunked(4)
    return jattn.attention(*vectors, score=rules, mask=mask, **places, **how)


def of_positions_dense(vectors, slopes, table):
    i, j = SHIFT[None, :, None], SHIFT[None, None]
    factor = np.maximum(1, np.log(i + 1) / np.log(3))
    near = np.array([0, 1, 2, 2, 3, 3, 3, 3])  # the last from sqrt(2 * 7) on
    bucket = near[np.minimum(abs(i - j), 7)] + 4 * (j > i)

    def score(s):
        s = s * factor - slopes[:, None, None] * abs(i - j)
        return s + jnp.moveaxis(table[bucket[0]], -1, 0)

    allowed = (j <= i) | (i // 4 == j // 4)
    return dense_jax(*vectors, allowed, score=score)[0]


@pytest.mark.parametrize(
    "how",
    [dict(implementation="reference"), dict(block_sizes=(3, 2))],
    ids=["reference", "blockwise"],
)
def test_gradients_reach_slopes_and_tables_in_every_order(how, x64):
    vectors = tuple(jnp.asarray(exact(n, S, N, 4)) for n in (1, 2, 3))
    args = vectors, jnp.asarray(exact(4, N)), jnp.asarray(exact(5, 8, N))
    along = jax.tree.map(lambda x: jnp.asarray(exact(6, *x.shape)), args)

    def both(attend):
        def loss(*args):
            return jnp.sum(jnp.sin(attend(*args)))

        return jit(lambda: jax.jvp(jax.value_and_grad(loss, (0, 1, 2)), args, along))()

    got = both(lambda *args: of_positions(*args, **how))
    want = both(of_positions_dense)
    assert all(abs(x).max() > 1e-3 for x in jax.tree.leaves(want))
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert_gradient_close(x, np.asarray(y), jnp.float64)


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

    shapes = (N, T, T), (N, 1, 1), (1, 1, T)
    biases = [np.zeros(shape, np.float32) for shape in shapes]
    gradients = jit(lambda biases: [jax.grad(loss)(bias) for bias in biases])
    full, per_head, per_key = gradients(biases)
    assert_close(per_head, np.zeros((N, 1, 1)))
    assert_close(per_key, np.asarray(full, np.float64).sum((0, 1), keepdims=True))


def bias_of(*shape, both=True, dtype=float, **options):
    return scores.relative_bias(np.ones(shape, dtype), bidirectional=both, **options)


@pytest.mark.parametrize(
    "make, kind, text",
    [
        (
            lambda: scores.soft_cap(0.0),
            ValueError,
            "positive.*cap=0.0.*leave",
        ),
        (lambda: scores.soft_cap(-1), ValueError, "cap=-1"),
        (lambda: scores.soft_cap(float("inf")), ValueError, "cap=inf"),
        (lambda: scores.soft_cap(float("nan")), ValueError, "cap=nan"),
        (lambda: scores.soft_cap(np.array([1, 2])), TypeError, "floating point.*1, 2"),
        (lambda: scores.soft_cap(None), TypeError, "cap must be a number"),
        (lambda: scores.additive(np.ones((1, 1), bool)), TypeError, "bool.*mask="),
        (lambda: scores.additive(np.ones((1, 1), int)), TypeError, "int64"),
        (lambda: scores.alibi(np.array([1, 2])), TypeError, "slopes must be floating"),
        (lambda: scores.alibi(True), TypeError, "alibi: slopes.*bool"),
        (lambda: scores.alibi(float("nan")), ValueError, "must be finite.*got nan"),
        (lambda: scores.alibi(np.array([np.inf])), ValueError, "finite.*inf.*mask"),
        (lambda: scores.log_n_scale(1), ValueError, "an int, 2 or more, but got 1"),
        (lambda: scores.log_n_scale(512.0), TypeError, "an int, 2 or more.*512.0"),
        (lambda: bias_of(8, 1, dtype=int), TypeError, "table must be floating.*int"),
        (lambda: bias_of(8), ValueError, r"\(num_buckets, N\).*shape \(8,\)"),
        (lambda: bias_of(1, 3, both=False), ValueError, "2 or more.*shape \\(1, 3"),
        (lambda: bias_of(2, 3), ValueError, "even and 4 or more.*shape \\(2, 3"),
        (lambda: bias_of(7, 3), ValueError, "even and 4 or more.*bidirectional=True"),
        (lambda: bias_of(8, 1, both=1), TypeError, "bidirectional must be a bool.*1"),
        (lambda: bias_of(8, 1, max_distance=2), ValueError, "an int, 3 or more.*2"),
        (lambda: bias_of(8, 1, max_distance=9.0), TypeError, "an int, 3 or more"),
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


@pytest.mark.parametrize("cap", [1e31, 1e-10, np.float32(0), np.array([1.0, -1.0])])
def test_a_cap_must_lie_where_float32_can_divide_by_it(cap):
    with pytest.raises(ValueError, match="positive, from 1e-9 to 1e30"):
        scores.soft_cap(cap)


@pytest.mark.parametrize("cap", [1e-9, 1e30])
def test_the_smallest_and_the_largest_cap_have_values_and_gradients(cap):
    x = jnp.float32(s)
    capped = lambda x, cap: scores.soft_cap(cap)(x, None, None)  # noqa: E731
    assert_close(capped(x, cap), cap * np.tanh(s / cap))
    of_x, of_cap = jax.grad(lambda *a: capped(*a).sum(), (0, 1))(x, jnp.float32(cap))
    slope = 1 - np.tanh(s / cap) ** 2
    assert_close(of_x, slope)
    assert_close(of_cap, (np.tanh(s / cap) - s / cap * slope).sum())
