"""What each mask means, against plain loops; and its mistakes."""

import jax
import numpy as np
import pytest
from test_rules import allowed

from jattn import masks

T, S = 11, 13
random = np.random.default_rng(7)
VALID, QUERY_VALID = random.random(S) < 0.6, random.random(T) < 0.6
IDS, KEY_IDS = random.integers(0, 3, T), random.integers(0, 3, S)
DENSE = random.random((T, S)) < 0.5


def near_in_time(q_pos, k_pos, times, key_times):
    return abs(times - key_times) < 4


TIMES, KEY_TIMES = random.integers(0, 20, T), random.integers(0, 20, S)

MEANINGS = [
    (masks.causal(), lambda i, j: j <= i),
    (masks.sliding_window(3), lambda i, j: i - 3 <= j <= i),
    (masks.sliding_window(3, 2), lambda i, j: i - 3 <= j <= i + 2),
    (masks.sliding_window(0), lambda i, j: j == i),
    (masks.sliding_window(2, None), lambda i, j: j >= i - 2),
    (masks.sliding_window(np.int32(1), np.int32(4)), lambda i, j: i - 1 <= j <= i + 4),
    (masks.padding(VALID), lambda i, j: VALID[j]),
    (masks.padding(VALID, QUERY_VALID), lambda i, j: VALID[j] and QUERY_VALID[i]),
    (masks.lengths(5), lambda i, j: j < 5),
    (masks.lengths(0), lambda i, j: False),
    (masks.lengths(99, 4), lambda i, j: i < 4),
    (masks.lengths(np.int32(5), np.int32(0)), lambda i, j: False),
    (
        masks.segments(IDS, KEY_IDS),
        lambda i, j: IDS[i] == KEY_IDS[j] and KEY_IDS[j] != 0,
    ),
    (
        masks.segments(IDS, KEY_IDS, padding_id=2),
        lambda i, j: IDS[i] == KEY_IDS[j] and KEY_IDS[j] != 2,
    ),
    (masks.segments(IDS, KEY_IDS, padding_id=None), lambda i, j: IDS[i] == KEY_IDS[j]),
    (masks.segments(IDS + 7, KEY_IDS), lambda i, j: False),
    (masks.dense(DENSE), lambda i, j: DENSE[i, j]),
    (masks.dense(DENSE[:1]), lambda i, j: DENSE[0, j]),
    (masks.dense(DENSE[:, :1]), lambda i, j: DENSE[i, 0]),
    (
        masks.rule(lambda q_pos, k_pos: (q_pos + k_pos) % 3 == 0),
        lambda i, j: not (i + j) % 3,
    ),
    (
        masks.rule(near_in_time, TIMES, KEY_TIMES, axes=["T", "S"]),
        lambda i, j: abs(TIMES[i] - KEY_TIMES[j]) < 4,
    ),
    (
        masks.rule(lambda q_pos, k_pos, table: table[k_pos] > 9, KEY_TIMES),
        lambda i, j: KEY_TIMES[j] > 9,
    ),
    (masks.everything(), lambda i, j: True),
    (masks.nothing(), lambda i, j: False),
    (masks.causal() & ~masks.lengths(3), lambda i, j: 3 <= j <= i),
]


@pytest.mark.parametrize("mask, meaning", MEANINGS, ids=lambda x: str(x)[:40])
def test_a_mask_allows_what_its_loop_allows(mask, meaning):
    want = [[bool(meaning(i, j)) for j in range(S)] for i in range(T)]
    np.testing.assert_array_equal(allowed(mask), want)


def test_positions_and_not_indices_decide():
    q_pos, k_pos = random.permutation(T) + 3, random.permutation(S)
    got = allowed(masks.causal() & masks.sliding_window(4), q_pos, k_pos)
    want = [[q - 4 <= k <= q for k in k_pos] for q in q_pos]
    np.testing.assert_array_equal(got, want)
    # Lengths count places in the arrays.
    got = allowed(masks.lengths(5), q_pos, k_pos)
    np.testing.assert_array_equal(got, np.arange(S)[None] < np.full((T, 1), 5))


@pytest.mark.parametrize("left, right", [(0, 0), (2, 0), (3, 2)])
def test_a_window_has_left_plus_right_plus_one_keys(left, right):
    counts = allowed(masks.sliding_window(left, right)).sum(1)
    assert (counts[left : T - right] == left + right + 1).all()
    assert allowed(masks.sliding_window(2)).sum(1).tolist() == [1, 2] + [3] * (T - 2)


def test_keys_and_queries_of_padding_are_not_confused():
    by_key, by_query = (
        masks.padding(VALID),
        masks.padding(np.ones(S, bool), QUERY_VALID),
    )
    assert (allowed(by_key) == VALID[None, :]).all()
    assert (allowed(by_query) == QUERY_VALID[:, None]).all()
    assert (allowed(by_key & by_query) == VALID & QUERY_VALID[:, None]).all()


def test_segments_takes_the_queries_ids_for_the_keys():
    mask = masks.segments(IDS)
    assert mask.key_ids is mask.query_ids


@pytest.mark.parametrize("left", [3, None])
def test_none_is_a_window_without_a_bound(left):
    mask = masks.sliding_window(left, None)
    want = np.arange(S)[None] >= np.arange(T)[:, None] - (
        T + S if left is None else left
    )
    np.testing.assert_array_equal(allowed(mask), want)


@pytest.mark.parametrize(
    "make, kind, text",
    [
        (
            lambda: masks.sliding_window(-1),
            ValueError,
            "left must not be negative.*-1.*None",
        ),
        (lambda: masks.sliding_window(1, -2), ValueError, "right must not be negative"),
        (lambda: masks.sliding_window(np.array([1, -1])), ValueError, "negative"),
        (
            lambda: masks.sliding_window(1.5),
            TypeError,
            "left must be integers.*float64",
        ),
        (lambda: masks.sliding_window(True), TypeError, "left must be integers.*bool"),
        (lambda: masks.lengths(-1), ValueError, "key_lengths must not be negative"),
        (
            lambda: masks.lengths(1, -1),
            ValueError,
            "query_lengths must not be negative",
        ),
        (lambda: masks.lengths(np.ones(2)), TypeError, "key_lengths.*astype"),
        (lambda: masks.padding(np.ones((2, 3))), TypeError, "key_valid.*!= 0"),
        (lambda: masks.padding(VALID, IDS), TypeError, "query_valid must be Boolean"),
        (lambda: masks.segments(np.ones(3)), TypeError, "query_ids must be integers"),
        (
            lambda: masks.segments(IDS, VALID),
            TypeError,
            "key_ids must be integers.*bool",
        ),
        (lambda: masks.dense(IDS), TypeError, r"array must be Boolean.*int64.*\(11,\)"),
        (lambda: masks.rule(max, IDS, axes=[]), ValueError, r"axes=\[\] for 1 arrays"),
        (lambda: masks.rule(max, IDS, axes="T"), ValueError, "one string of letters"),
        (
            lambda: masks.rule(max, IDS, axes=["H"]),
            ValueError,
            "'BNTS'.*'H'.*Transpose",
        ),
        (lambda: masks.rule(max, IDS, axes=["TB"]), ValueError, "in that order.*'TB'"),
    ],
)
def test_a_bad_argument_is_refused_with_the_cure(make, kind, text):
    with pytest.raises(kind, match="(?s)" + text):
        make()


def test_traced_bounds_are_not_checked():
    jax.jit(lambda n: masks.sliding_window(n).left)(np.int32(-1))


def test_module_lists_its_public_names():
    for name in masks.__all__:
        assert getattr(masks, name) is not None
