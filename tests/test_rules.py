"""Masks as an algebra: laws, identity, and verdicts that are never wrong."""

import functools
import itertools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, seed, settings
from hypothesis import strategies as st

import jattn
from jattn import masks, scores
from jattn.core.letters import take
from jattn.masks import EMPTY, FULL, PARTIAL, Range

T, S = 11, 13
random = np.random.default_rng(5)
PADDING = masks.padding(random.random(S) < 0.7, random.random(T) < 0.8)
IDS = np.sort(random.integers(0, 4, T))
KEY_IDS = np.sort(random.integers(0, 4, S))


def multiple_of_three(q_pos, k_pos):
    return (q_pos + k_pos) % 3 == 0


def same_remainder(q_pos, k_pos, q, k):
    return q % 2 == k % 2


STATIC = [
    masks.causal(),
    masks.sliding_window(2),
    masks.sliding_window(0, 3),
    masks.sliding_window(None, 1),
    masks.prefix(5),
    masks.chunked(4),
    masks.dilated(3),
    masks.everything(),
    masks.nothing(),
]
WITH_DATA = [
    masks.lengths(7, 9),
    masks.lengths(np.array(4)),
    PADDING,
    masks.segments(IDS, KEY_IDS),
    masks.segments(IDS, KEY_IDS, padding_id=None),
    masks.dense(random.random((T, S)) < 0.5),
    masks.dense(random.random((1, S)) < 0.5),
    masks.dense(np.repeat(np.repeat(np.eye(4, dtype=bool), 3, 0), 4, 1)[:T, :S]),
    masks.sliding_window(np.array(3), np.array(1)),
    masks.prefix(np.array(4)),
    masks.rule(multiple_of_three),
    masks.rule(same_remainder, np.arange(T), np.arange(S) // 3, axes=["T", "S"]),
]


BLOCKS_OF_TWO = jax.tree.map(
    lambda x: x[0], masks.block_sparse(random.random((6, 7)) < 0.7, 2)
)


def expressions(leaves):
    def compose(inner):
        pairs = st.tuples(st.sampled_from("&|"), inner, inner)
        both = pairs.map(lambda x: x[1] & x[2] if x[0] == "&" else x[1] | x[2])
        return both | inner.map(lambda x: ~x)

    return st.recursive(st.sampled_from(leaves), compose, max_leaves=5)


def allowed(mask, q_pos=None, k_pos=None):
    """What a mask allows one head, as (T, S)."""
    q_pos = np.arange(T) if q_pos is None else q_pos
    k_pos = np.arange(S) if k_pos is None else k_pos
    pairs = mask.bind(T, S, 1).allowed(q_pos[:, None], k_pos[None])
    return np.broadcast_to(np.asarray(pairs), (T, S))


def tiles(mask, q_pos, k_pos, blocks):
    """(verdict, allowed pairs) of every tile, made from the tile's own arrays."""
    mask = mask.bind(T, S, 1)
    for row, column in itertools.product(
        range(0, T, blocks[0]), range(0, S, blocks[1])
    ):
        q_start, k_start = min(row, T - blocks[0]), min(column, S - blocks[1])
        tile = take(take(mask, "T", q_start, blocks[0]), "S", k_start, blocks[1])
        q = q_pos[q_start : q_start + blocks[0]]
        k = k_pos[k_start : k_start + blocks[1]]
        verdict = tile.verdict(Range(q.min(), q.max()), Range(k.min(), k.max()))
        pairs = tile.allowed(q[:, None], k[None])
        yield int(verdict), np.broadcast_to(np.asarray(pairs), blocks)


BLOCKS = st.tuples(st.sampled_from([1, 3, 5]), st.sampled_from([2, 4, 13]))


@seed(0)
@settings(max_examples=100, deadline=None, derandomize=True, database=None)
@given(expressions(STATIC + WITH_DATA), BLOCKS, st.randoms(use_true_random=False))
def test_a_verdict_is_never_wrong(mask, blocks, shuffle):
    q_pos, k_pos = np.arange(T) + shuffle.choice([0, 2]), np.arange(S)
    if shuffle.random() < 0.3:  # positions in any order, as in a ring of zigzags
        q_pos, k_pos = (np.array(shuffle.sample(range(n), n)) for n in (T, S))
    for verdict, pairs in tiles(mask, q_pos, k_pos, blocks):
        assert verdict in (EMPTY, PARTIAL, FULL)
        assert verdict != EMPTY or not pairs.any(), mask
        assert verdict != FULL or pairs.all(), mask


@pytest.mark.parametrize(
    "mask",
    [
        masks.causal(),
        ~masks.causal(),
        masks.causal() & masks.sliding_window(2),
        masks.causal() & ~masks.sliding_window(4, S),
        masks.sliding_window(1, 1) | (masks.causal() & ~masks.sliding_window(6, S)),
        masks.segments(IDS, KEY_IDS, padding_id=None) & masks.causal(),
        masks.lengths(4) & masks.causal(),
        masks.causal() | masks.prefix(4),
        masks.causal() & (masks.sliding_window(2) | masks.prefix(4)),
        masks.causal() & BLOCKS_OF_TWO,
        masks.causal() & masks.chunked(4),
    ],
    ids=str,
)
def test_verdicts_find_nearly_all_empty_and_full_tiles(mask):
    found = list(tiles(mask, np.arange(T), np.arange(S), (2, 2)))
    empty = [verdict for verdict, pairs in found if not pairs.any()]
    full = [verdict for verdict, pairs in found if pairs.all()]
    assert len(empty) >= 8
    assert empty.count(EMPTY) >= 0.9 * len(empty)
    assert full.count(FULL) >= 0.9 * len(full)


A, B, C = masks.causal(), PADDING, masks.rule(multiple_of_three)


@pytest.mark.parametrize(
    "left, right",
    [
        (~~A, A),
        (~(A & B), ~A | ~B),
        (~(A | B), ~A & ~B),
        (A & (B | C), (A & B) | (A & C)),
        (A | (B & C), (A | B) & (A | C)),
        (A & (B & C), (A & B) & C),
        (A & B, B & A),
        (A | B, B | A),
        (A & A, A),
        (A | (A & B), A),
        (A & masks.everything(), A),
        (A | masks.nothing(), A),
        (A & masks.nothing(), masks.nothing()),
        (A | masks.everything(), masks.everything()),
        (A & ~A, masks.nothing()),
        (A | ~A, masks.everything()),
        (~masks.everything(), masks.nothing()),
    ],
    ids=str,
)
def test_masks_are_a_boolean_algebra(left, right):
    np.testing.assert_array_equal(allowed(left), allowed(right))


def test_verdicts_are_kleenes_three_valued_logic():
    verdicts = {
        EMPTY: masks.nothing(),
        PARTIAL: masks.rule(multiple_of_three),
        FULL: masks.everything(),
    }
    tile = Range(0, 3), Range(0, 3)
    for (x, a), (y, b) in itertools.product(verdicts.items(), repeat=2):
        assert (a & b).verdict(*tile) == min(x, y)
        assert (a | b).verdict(*tile) == max(x, y)
        assert (~a).verdict(*tile) == 2 - x


def test_a_custom_verdict_is_given_the_ranges_and_the_arrays():
    def verdict(q_range, k_range, n):
        return FULL if k_range.hi < n else PARTIAL

    mask = masks.rule(lambda q_pos, k_pos, n: k_pos < n, np.int32(4), verdict=verdict)
    assert mask.verdict(Range(0, 1), Range(2, 3)) == FULL
    assert mask.verdict(Range(0, 1), Range(2, 4)) == PARTIAL


def test_rules_without_arrays_are_equal_by_value():
    def make():
        return (masks.causal() & ~masks.sliding_window(3)) | masks.lengths(5)

    assert make() == make() and hash(make()) == hash(make())
    assert make() != masks.causal()
    assert masks.sliding_window(3) != masks.sliding_window(4)
    assert masks.sliding_window(3) != masks.sliding_window(3, 1)
    assert masks.causal() & masks.lengths(5) != masks.lengths(5) & masks.causal()
    assert masks.causal() != masks.everything()
    assert masks.causal() != "causal()"
    assert scores.soft_cap(2.0) == scores.soft_cap(2.0) != scores.soft_cap(3.0)
    assert scores.rule(max) == scores.rule(max) != scores.rule(min)


def test_rules_with_arrays_are_equal_to_themselves_only():
    mask, twin = masks.padding(np.ones(5, bool)), masks.padding(np.ones(5, bool))
    assert mask == mask and hash(mask) == hash(mask)
    assert mask != twin
    assert masks.causal() & mask != masks.causal() & mask


@pytest.mark.parametrize(
    "rule, text",
    [
        (
            masks.causal() & ~masks.sliding_window(3, 2),
            "causal() & ~sliding_window(left=3, right=2)",
        ),
        (masks.lengths(5) | masks.nothing(), "lengths(5) | nothing()"),
        (masks.lengths(5, 3), "lengths(5, query_lengths=3)"),
        (masks.sliding_window(None), "sliding_window(left=None)"),
        (
            masks.sliding_window(np.array(1), None),
            "sliding_window(left=int32[], right=None)",
        ),
        (masks.chunked(64) & masks.dilated(3), "chunked(64) & dilated(3)"),
        (masks.segments(np.ones((1, 5), np.int32)), "segments(int32[1,5])"),
        (
            masks.segments(np.ones(5, int), np.ones(4, int), padding_id=None),
            "segments(int32[5], key_ids=int32[4], padding_id=None)",
        ),
        (masks.padding(np.ones(5, bool)), "padding(bool[5])"),
        (
            masks.padding(np.ones(5, bool), np.ones(5, bool)),
            "padding(bool[5], query_valid=bool[5])",
        ),
        (masks.dense(np.ones((1, 1, 2, 3), bool)), "dense(bool[1,1,2,3])"),
        (
            masks.rule(same_remainder, np.ones((1, 2)), np.ones(3), axes=["BT", "S"]),
            "rule(same_remainder, float64[1,2], float64[3], axes=('BT', 'S'))",
        ),
        (
            masks.rule(max, np.ones(2), verdict=min),
            "rule(max, float64[2], verdict=min)",
        ),
        (masks.prefix(np.ones(2, np.int32)), "prefix(int32[2])"),
        (masks.block_sparse(np.ones((2, 3), bool), 8), "block_sparse(bool[1,2,3], 8)"),
        (scores.soft_cap(2.0), "soft_cap(2.0)"),
        (scores.additive(np.ones((1, 2, 3))), "additive(float64[1,2,3])"),
        (scores.alibi(), "alibi()"),
        (scores.alibi(np.ones(4, np.float32)), "alibi(slopes=float32[4])"),
        (scores.log_n_scale(512), "log_n_scale(512)"),
        (
            scores.relative_bias(np.ones((4, 2)), bidirectional=False),
            "relative_bias(float64[4,2], bidirectional=False)",
        ),
        (
            scores.relative_bias(np.ones((4, 2)), bidirectional=True, max_distance=9),
            "relative_bias(float64[4,2], bidirectional=True, max_distance=9)",
        ),
        (scores.rule(same_remainder), "rule(same_remainder)"),
    ],
    ids=str,
)
def test_repr_reads_like_the_expression(rule, text):
    assert repr(rule) == text


def test_repr_has_the_parentheses_that_it_needs_and_no_others():
    a, b, c = masks.causal(), masks.prefix(1), masks.chunked(2)
    one, two, three = map(str, (a, b, c))
    for mask, text in [
        (a & b & c, f"{one} & {two} & {three}"),
        (a & (b & c), f"{one} & ({two} & {three})"),
        (a | b | c, f"{one} | {two} | {three}"),
        (a | (b | c), f"{one} | ({two} | {three})"),
        (a & b | c, f"{one} & {two} | {three}"),
        (a | b & c, f"{one} | {two} & {three}"),
        (a & (b | c), f"{one} & ({two} | {three})"),
        ((a | b) & c, f"({one} | {two}) & {three}"),
        (~(a & b), f"~({one} & {two})"),
        (~a & b, f"~{one} & {two}"),
        (~~a | ~(b | c), f"~~{one} | ~({two} | {three})"),
    ]:
        assert repr(mask) == text


@seed(0)
@settings(max_examples=200, deadline=None, derandomize=True, database=None)
@given(expressions([*STATIC, masks.lengths(7, 9), masks.sliding_window(1, None)]))
def test_repr_is_the_expression(mask):
    assert eval(repr(mask), vars(masks)) == mask


@pytest.mark.parametrize("mask", [*STATIC, *WITH_DATA, BLOCKS_OF_TWO], ids=str)
def test_a_rule_survives_being_taken_apart_as_a_pytree(mask):
    mask = ~(mask & masks.causal())
    leaves, structure = jax.tree.flatten(mask)
    again = structure.unflatten(leaves)
    assert repr(again) == repr(mask)
    np.testing.assert_array_equal(allowed(again), allowed(mask))
    assert jax.tree.structure(again) == structure
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(mask)]
    assert len(set(paths)) == len(leaves)


def test_rules_are_frozen():
    with pytest.raises(AttributeError):
        masks.sliding_window(3).left = 4


def test_other_arrays_do_not_retrace_and_other_ints_do():
    @jax.jit
    @chex.assert_max_traces(3)
    def total(mask):
        pairs = mask.allowed(jnp.arange(T)[:, None], jnp.arange(S)[None])
        return jnp.sum(pairs)

    chex.clear_trace_counter()
    ids = jnp.asarray(IDS), jnp.asarray(KEY_IDS)
    for n in range(4):
        mask = masks.segments(ids[0] + n, ids[1] + n) & masks.sliding_window(3)
        assert total(mask) == allowed(mask).sum()
    for left in (3, 4, 4, 5):  # two more traces, for 4 and for 5
        total(masks.segments(*ids) & masks.sliding_window(left))
    with pytest.raises(AssertionError, match="traced > 3 times"):
        total(masks.segments(*ids) & masks.sliding_window(6))


@pytest.mark.parametrize("sign", ["&", "|"])
def test_an_array_beside_a_mask_is_refused_with_the_cure(sign):
    with pytest.raises(TypeError, match=r"between two masks.*jattn\.masks\.dense"):
        eval(
            f"mask {sign} array", dict(mask=masks.causal(), array=np.ones((2, 3), bool))
        )


def test_bind_and_walk_reach_every_part():
    mask = ~(masks.lengths(5) & masks.causal()) | masks.lengths(3)
    assert "lengths" not in repr(mask.bind(T, S, 1))
    kinds = [type(rule).__name__ for rule in mask.walk()]
    assert kinds == ["Or", "Not", "And", "Lengths", "Causal", "Lengths"]
    assert [rule.positional for rule in mask.walk()].count(True) == 1


def test_a_mask_class_of_ones_own_works_everywhere():
    class Parity(masks.Mask):
        positional = False

        odd: np.ndarray = jattn.leaf("S")

        def allowed(self, q_pos, k_pos):
            return self.odd[None, :]

    odd = np.arange(S) % 2 == 1
    x, k = jnp.ones((T, 1, 2)), jnp.ones((S, 1, 2))
    v = np.where(odd, 1.0, 50.0).astype(np.float32)[:, None, None]
    out = jattn.attention(x, k, v, mask=Parity(odd), block_sizes=(3, 4))
    np.testing.assert_allclose(out, np.ones((T, 1, 1)), rtol=1e-6)


def test_a_mask_class_that_does_not_say_so_is_taken_to_use_positions():
    class Before(masks.Mask):
        def allowed(self, q_pos, k_pos):
            return k_pos <= q_pos

    x, k = jnp.ones((T, 1, 2)), jnp.ones((S, 1, 2))
    with pytest.raises(ValueError, match="T != S"):
        jattn.attention(x, k, k, mask=Before())


def test_masks_have_no_truth_value_that_and_could_take():
    with pytest.raises(TypeError, match="Compose masks with &"):
        masks.causal() and masks.everything()


def test_an_array_that_names_no_axes_is_refused_when_the_rule_is_made():
    class Undeclared(masks.Mask):
        width: jax.Array

    with pytest.raises(TypeError, match="width holds an array and must name its axes"):
        Undeclared(jnp.ones(3))
    assert Undeclared(3) == Undeclared(3)


def test_a_custom_verdict_may_be_written_in_jnp():
    def verdict(q_range, k_range):
        return jnp.where(k_range.lo > q_range.hi, masks.EMPTY, masks.PARTIAL)

    x = jnp.asarray(np.random.default_rng(0).normal(size=(16, 1, 4)), jnp.float32)
    before = masks.rule(lambda q, k: k <= q, verdict=verdict)
    attend = functools.partial(jattn.attention, x, x, x, block_sizes=(4, 4))
    got, want = attend(mask=before), attend(mask=masks.causal())
    np.testing.assert_allclose(got, want, rtol=1e-6)
