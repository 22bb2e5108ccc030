"""What each mask means, against plain loops; and its mistakes."""

import itertools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracle import (
    assert_close,
    assert_gradient_close,
    dense_attention,
    dense_jax,
    exact,
    jit,
)
from test_rules import allowed

import jattn
from jattn import masks
from jattn.masks import Range

T, S = 11, 13
random = np.random.default_rng(7)
VALID, QUERY_VALID = random.random(S) < 0.6, random.random(T) < 0.6
SIGNS = np.array(list(itertools.product((-1, 1), repeat=4))).T.reshape(2, 2, -1)
IDS, KEY_IDS = random.integers(0, 3, T), random.integers(0, 3, S)
DENSE = random.random((T, S)) < 0.5


def near_in_time(q_pos, k_pos, times, key_times):
    return abs(times - key_times) < 4


TIMES, KEY_TIMES = random.integers(0, 20, T), random.integers(0, 20, S)
LAYOUT = random.random((4, 5)) < 0.5


def layout(array, block_size):
    """A layout of blocks as one head has it."""
    return jax.tree.map(lambda x: x[0], masks.block_sparse(array, block_size))


def in_block(array, i, j, size):
    inside = 0 <= i < array.shape[0] * size and 0 <= j < array.shape[1] * size
    return inside and array[i // size, j // size]


MEANINGS = [
    (masks.causal(), lambda i, j: j <= i),
    (masks.sliding_window(3), lambda i, j: i - 3 <= j <= i),
    (masks.sliding_window(3, 2), lambda i, j: i - 3 <= j <= i + 2),
    (masks.sliding_window(0), lambda i, j: j == i),
    (masks.sliding_window(2, None), lambda i, j: j >= i - 2),
    (masks.sliding_window(np.array(1), np.array(4)), lambda i, j: i - 1 <= j <= i + 4),
    (masks.prefix(5), lambda i, j: j < 5),
    (masks.prefix(0), lambda i, j: False),
    (masks.prefix(2**40), lambda i, j: True),
    (masks.prefix(np.array(5)), lambda i, j: j < 5),
    (masks.causal() | masks.prefix(4), lambda i, j: j <= i or j < 4),
    (
        masks.causal() & (masks.sliding_window(2) | masks.prefix(3)),
        lambda i, j: j <= i and (i - j <= 2 or j < 3),
    ),
    (masks.chunked(4), lambda i, j: i // 4 == j // 4),
    (masks.chunked(1), lambda i, j: i == j),
    (masks.chunked(2**40), lambda i, j: True),
    (masks.dilated(3), lambda i, j: not (i - j) % 3),
    (masks.dilated(1), lambda i, j: True),
    (masks.dilated(2**40), lambda i, j: i == j),
    (
        masks.causal() & masks.dilated(2) & masks.sliding_window(4),
        lambda i, j: i - j in (0, 2, 4),
    ),
    (layout(LAYOUT, 3), lambda i, j: in_block(LAYOUT, i, j, 3)),
    (layout(LAYOUT, 2), lambda i, j: in_block(LAYOUT, i, j, 2)),
    (layout(LAYOUT[None, :, :2], 5), lambda i, j: in_block(LAYOUT[:, :2], i, j, 5)),
    (layout(DENSE, 1), lambda i, j: DENSE[i, j]),
    (layout(np.ones((1, 1), bool), 64), lambda i, j: True),
    (layout(np.ones((0, 5), bool), 3), lambda i, j: False),
    (masks.padding(VALID), lambda i, j: VALID[j]),
    (masks.padding(VALID, QUERY_VALID), lambda i, j: VALID[j] and QUERY_VALID[i]),
    (masks.lengths(5), lambda i, j: j < 5),
    (masks.lengths(0), lambda i, j: False),
    (masks.lengths(99, 4), lambda i, j: i < 4),
    (masks.lengths(np.array(5), np.array(0)), lambda i, j: False),
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


@pytest.mark.parametrize(
    "mask, meaning", MEANINGS, ids=[str(mask) for mask, _ in MEANINGS]
)
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


def test_chunks_and_holes_go_on_below_zero():
    q_pos, k_pos = np.arange(-9, 2), np.arange(-7, 6)
    i, j = q_pos[:, None], k_pos[None]
    got = allowed(masks.chunked(4), q_pos, k_pos)
    np.testing.assert_array_equal(got, np.floor(i / 4) == np.floor(j / 4))
    got = allowed(masks.dilated(4), q_pos, k_pos)
    np.testing.assert_array_equal(got, abs(i - j) % 4 == 0)


def test_positions_outside_a_layout_see_nothing_and_are_not_seen():
    q_pos, k_pos = random.permutation(T) - 4, random.permutation(S) * 2 - 5
    got = allowed(layout(LAYOUT, 2), q_pos, k_pos)
    want = [[in_block(LAYOUT, q, k, 2) for k in k_pos] for q in q_pos]
    np.testing.assert_array_equal(got, want)
    np.testing.assert_array_equal(
        allowed(masks.prefix(3), q_pos, k_pos), np.broadcast_to(k_pos < 3, (T, S))
    )


def ranges_of(positions, sizes):
    """The range of every run of so many positions, and where the run starts."""
    runs = [(n, n + size) for size in sizes for n in range(len(positions) + 1 - size)]
    tiles = [positions[start:stop] for start, stop in runs]
    return runs, Range(*(np.array([f(x) for x in tiles]) for f in (np.min, np.max)))


@pytest.mark.parametrize("shuffled", [False, True], ids=["without gaps", "shuffled"])
@pytest.mark.parametrize(
    "mask",
    [
        masks.causal(),
        masks.sliding_window(2, 1),
        masks.prefix(5),
        masks.prefix(np.array(0)),
        masks.chunked(1),
        masks.chunked(4),
        masks.dilated(1),
        masks.dilated(3),
        masks.dilated(11),
        layout(LAYOUT, 1),
        layout(LAYOUT, 3),
        layout(np.ones((2, 2), bool), 3),
        layout(np.ones((3, 0), bool), 3),
    ],
    ids=str,
)
def test_a_verdict_is_sound_and_without_gaps_exact(mask, shuffled):
    """Also of ranges that lie partly or wholly outside a layout."""
    q_pos, k_pos = np.arange(-4, 13), np.arange(-3, 15)
    if shuffled:
        q_pos, k_pos = (np.random.default_rng(0).permutation(x) for x in (q_pos, k_pos))
    pairs = np.asarray(mask.allowed(q_pos[:, None], k_pos[None]))
    pairs = np.broadcast_to(pairs, (len(q_pos), len(k_pos)))
    rows, q_range = ranges_of(q_pos, (1, 2, 4, 9))
    columns, k_range = ranges_of(k_pos, (1, 3, 4, 7))
    ranges = Range(*(x[:, None] for x in q_range)), Range(*(x[None] for x in k_range))
    tiles = [[pairs[slice(*row), slice(*column)] for column in columns] for row in rows]
    some, every = (
        np.array([[f(x) for x in y] for y in tiles]) for f in (np.any, np.all)
    )
    for got in (mask.verdict(*ranges), jit(mask.verdict)(*ranges)):
        got = np.broadcast_to(got, some.shape)
        if shuffled:
            assert not some[got == masks.EMPTY].any() and every[got == masks.FULL].all()
        else:
            np.testing.assert_array_equal(got, 1 * some + every)


FAR = [
    masks.causal(),
    masks.sliding_window(2**29, 2**31),
    masks.prefix(2**29),
    *map(masks.chunked, (1, 7, 2**30, 2**31)),
    *map(masks.dilated, (1, 7, 3 * 2**29, 2**31)),
]


@pytest.mark.parametrize("mask", FAR, ids=str)
def test_far_positions_overflow_nothing(mask):
    """What int32 gives is what integers of any size give."""
    draw = np.random.default_rng(0)
    ends = draw.integers(-(2**30) + 1, 2**30, (2, 2, 200)), (2**30 - 1) * SIGNS
    ends = np.sort(np.concatenate(ends, axis=-1), axis=0)
    (q_lo, k_lo), (q_hi, k_hi) = ends.astype(np.int32)
    got = mask.verdict(Range(q_lo, q_hi), Range(k_lo, k_hi))
    tiles = np.stack([q_lo, q_hi, k_lo, k_hi], axis=-1).tolist()
    want = [mask.verdict(Range(a, b), Range(c, d)) for a, b, c, d in tiles]
    np.testing.assert_array_equal(got, np.broadcast_to(want, got.shape))
    pairs = np.broadcast_to(mask.allowed(q_lo, k_hi), q_lo.shape)
    want = [mask.allowed(q, k) for q, _, _, k in tiles]
    np.testing.assert_array_equal(pairs, want)


def test_a_range_as_wide_as_all_positions_overflows_no_count():
    mask, everywhere = layout(LAYOUT, 1), Range(-(2**30), 2**30)
    assert int(mask.verdict(everywhere, everywhere)) == masks.PARTIAL
    mask = layout(np.ones((300, 300), bool), 2**22)
    inside = Range(0, 2**30 - 1)
    assert int(mask.verdict(inside, inside)) == masks.FULL


def test_new_prefixes_and_layouts_are_other_data_and_no_other_program():
    attend = chex.assert_max_traces(
        lambda x, n, layout: jattn.attention(
            *(x, x, x),
            mask=(masks.causal() | masks.prefix(n)) & masks.block_sparse(layout, 3),
            block_sizes=(4, 4),
        ),
        n=1,
    )
    attend = jit(attend)
    x = jnp.asarray(exact(1, 2, T, 4, 3), jnp.float32)
    i, j = np.arange(T)[:, None], np.arange(T)[None]
    for seed in range(3):
        draw = np.random.default_rng(seed)
        n, array = draw.integers(0, T, 2), draw.random((4, 4, 4)) < 0.5
        seen = (j <= i) | (j < n[:, None, None, None])
        want = dense_attention(x, x, x, seen & array[:, i // 3, j // 3])
        assert_close(attend(x, n, array), want.out)


def test_a_gradient_of_many_prefixes_and_layouts_is_the_sum_of_theirs():
    x = jnp.asarray(exact(2, T, 2, 3), jnp.float32)
    n, array = np.array([3, 8]), random.random((2, 2, 4, 4)) < 0.5

    def mask_of(n, array):
        return (masks.causal() | masks.prefix(n)) & masks.block_sparse(array, 3)

    def loss(x, mask):
        return (jattn.attention(x, x, x, mask=mask, block_sizes=(4, 4)) ** 2).sum()

    def total(x, mask):
        return jax.vmap(loss, (None, 0))(x, mask).sum()

    got = jit(jax.grad(total))(x, jax.vmap(mask_of)(n, array))
    i, j = np.arange(T)[:, None], np.arange(T)[None]
    seen = ((j <= i) | (j < n[:, None, None, None])) & array[:, :, i // 3, j // 3]
    want = jax.grad(lambda x: sum((dense_jax(x, x, x, m)[0] ** 2).sum() for m in seen))
    assert_gradient_close(got, np.asarray(jit(want)(x), np.float64))


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
        (lambda: masks.prefix(-1), ValueError, "prefix: lengths must not be neg.*-1"),
        (lambda: masks.prefix(np.array([3, -2])), ValueError, "must not be negative"),
        (lambda: masks.prefix(2.0), TypeError, "lengths must be integers.*float64"),
        (lambda: masks.prefix(None), TypeError, "lengths must be integers"),
        (
            lambda: masks.block_sparse(LAYOUT * 1, 3),
            TypeError,
            "layout must be Boolean.*!= 0",
        ),
        (
            lambda: masks.block_sparse(LAYOUT[0], 3),
            ValueError,
            r"layout must be \(query blocks, key blocks\).*shape \(5,\)",
        ),
        (
            lambda: masks.block_sparse(LAYOUT, np.array(3)),
            TypeError,
            r"block_size must be an int.*array\(3\).*static",
        ),
        (lambda: masks.block_sparse(LAYOUT, True), TypeError, "must be an int.*True"),
        (lambda: masks.block_sparse(LAYOUT, 0), ValueError, "1 or more.*got 0"),
        (lambda: masks.chunked(0), ValueError, "chunked: size must.*1 or more.*got 0"),
        (lambda: masks.chunked(2.0), TypeError, "size must be an int.*got 2.0.*static"),
        (lambda: masks.chunked(True), TypeError, "size must be an int.*True"),
        (lambda: masks.dilated(-2), ValueError, "dilated: rate must.*1 or more.*-2"),
        (
            lambda: masks.dilated(np.array([1, 2])),
            TypeError,
            r"rate must be an int.*\[1, 2\].*static",
        ),
        (lambda: masks.dilated(None), TypeError, "rate must be an int.*None"),
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
