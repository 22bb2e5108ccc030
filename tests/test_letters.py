"""What follows from letters: tiles, vmap axes, shardings; and no collective."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from oracle import assert_close, dense_attention, exact, jit

import jattn
from jattn import masks, scores
from jattn.core.letters import (
    Lettered,
    axes,
    children,
    leaf,
    leaves_from,
    letters_of,
    lift,
    partition_specs,
    sizes_along,
    take,
)

B, N, T, S = 2, 3, 5, 7


class Everything(Lettered):
    """One leaf of every kind."""

    full: np.ndarray = leaf("BNTS")
    ones: np.ndarray = leaf("BNTS")
    rows: np.ndarray = leaf("BT")
    slopes: np.ndarray = leaf("N")
    scalar: np.ndarray = leaf("N")
    number: float | np.ndarray = leaf("N")
    tables: tuple = leaves_from("letters")
    inner: Lettered | None = children()
    nothing: np.ndarray | None = leaf("S", default=None)
    letters: tuple[str, ...] = ("", "S")


def tree(inner=None):
    return Everything(
        exact(1, B, N, T, S),
        exact(2, 1, N, 1, S),
        exact(3, B, T),
        exact(4, N),
        exact(5),
        0.5,
        (exact(6, 4, 4), exact(7, S)),
        inner,
    )


LETTERS = ["BNTS", "BNTS", "BT", "N", "N", "", "S"]


def test_every_array_has_letters_and_numbers_are_structure():
    assert letters_of(tree(tree())) == LETTERS + LETTERS
    assert len(jax.tree.leaves(tree(tree()))) == len(LETTERS) * 2
    assert letters_of((tree(), None, tree())) == LETTERS * 2
    assert axes(tree(), "T") == [2, 2, 1, None, None, None, None]
    assert axes(tree(), "S") == [3, 3, None, None, None, None, 0]
    assert sizes_along(tree(), "T") == [T, 1, T]
    assert sizes_along((tree(tree()), None), "N") == [N] * 6  # a scalar has none


@pytest.mark.parametrize("start, size", [(0, 2), (3, 2), (1, 4)])
def test_take_slices_what_has_the_letter_and_more_than_one(start, size):
    whole, part = tree(tree()), take(tree(tree()), "T", start, size)
    cut = slice(start, start + size)
    for a, b in ((whole, part), (whole.inner, part.inner)):
        assert_close(b.full, a.full[:, :, cut])
        assert_close(b.ones, a.ones)
        assert_close(b.rows, a.rows[:, cut])
        assert_close(b.slopes, a.slopes)
        assert_close(b.tables[0], a.tables[0])
        assert_close(b.tables[1], a.tables[1])
        assert b.number == 0.5 and b.nothing is None
    keys = take(whole, "S", start, size)
    assert_close(keys.full, whole.full[..., cut])
    assert_close(keys.ones, whole.ones[..., cut])
    assert_close(keys.tables[1], whole.tables[1][cut])


def test_take_counts_from_the_right_when_leading_letters_are_mapped_away():
    one_head = masks.dense(exact(1, T, S) > 0)
    assert_close(take(one_head, "T", 2, 3).array, one_head.array[2:5])
    assert_close(take(one_head, "N", 0, 1).array, one_head.array)


class Tables(Lettered):
    """Leaves with axes that have no letter."""

    per_head: np.ndarray = leaf("N..")
    buckets: np.ndarray = leaf(".N")
    times: np.ndarray = leaf("BT.")


TABLES = Tables(exact(1, N, 4, 6), exact(2, 4, N), exact(3, B, T, 2))


def test_an_axis_with_a_dot_is_passed_whole():
    assert letters_of(TABLES) == ["N..", ".N", "BT."]
    assert axes(TABLES, "N") == [0, 1, None]
    assert axes(TABLES, "T") == [None, None, 1]
    part = take(take(TABLES, "T", 1, 3), "S", 0, 2)
    assert_close(part.times, TABLES.times[:, 1:4])
    assert_close(part.per_head, TABLES.per_head)
    specs = partition_specs(TABLES, {"B": "data", "N": "model", "T": "rows"})
    assert specs.per_head == PartitionSpec("model", None, None)
    assert specs.buckets == PartitionSpec(None, "model")
    assert specs.times == PartitionSpec("data", "rows", None)
    two_leading = Tables(exact(1, 1, 4, 6), exact(2, 4, 1), exact(3, B, 3, T, 2))
    specs = partition_specs(two_leading, {"B": "data", "N": "model"})
    assert specs.per_head == PartitionSpec(None, None, None)
    assert specs.times == PartitionSpec("data", None, None, None)

    def fn(per_head, buckets, times):
        return per_head.sum() + buckets @ times[:4, 0]

    got = lift(fn, jax.tree.leaves(TABLES), letters_of(TABLES), "BN", {})
    want = [
        [fn(TABLES.per_head[n], TABLES.buckets[:, n], times) for n in range(N)]
        for times in TABLES.times
    ]
    assert_close(got, np.array(want))


def products(s, q_pos, k_pos, buckets, times, key_times):
    near = (times * key_times).sum(-1).astype(s.dtype)  # (T, 1, .), (1, S, .)
    return s + near + buckets.astype(s.dtype)[(q_pos + k_pos) % 4]


@pytest.mark.parametrize("blocks", [None, (2, 3)], ids=["reference", "blockwise"])
def test_a_rule_with_dots_gets_the_letters_of_its_tile_and_the_rest_whole(blocks):
    q, k = exact(1, B, T, N, 4), exact(2, B, S, N, 4)
    buckets, times, key_times = exact(3, 4, N), exact(4, B, T, 2), exact(5, 2, S)
    rule = scores.rule(
        lambda s, q_pos, k_pos, buckets, times, by_key: products(
            s, q_pos, k_pos, buckets, times, jnp.moveaxis(by_key, 0, -1)
        ),
        *(buckets, times, key_times),
        axes=[".N", "BT.", ".S"],
    )
    attend = functools.partial(
        jattn.attention,
        *(jnp.asarray(x, jnp.float32) for x in (q, k, k)),
        implementation="blockwise" if blocks else "reference",
        block_sizes=blocks,
        query_positions="start",
    )
    place = np.arange(T)[:, None] + np.arange(S)[None]
    bias = np.moveaxis(buckets[place % 4], -1, 0)[None]
    bias = bias + np.einsum("btd,ds->bts", times, key_times)[:, None]
    got = jit(lambda rule: attend(score=rule))(rule)
    assert_close(got, dense_attention(q, k, k, bias=bias).out)


@pytest.mark.parametrize(
    "rule, text",
    [
        (
            masks.block_sparse(np.ones((4, 2, 3), bool), 8),
            r"mask\.layout must be \(N, \., \.\), each axis full or 1 and '\.' of any "
            r"size, here \(3, \., \.\), but got \(4, 2, 3\)",
        ),
        (
            masks.rule(max, np.ones(3), axes=["N."]),
            r"must be \(N, \.\).*got \(3,\)\. Give it the missing axes",
        ),
        (masks.rule(max, np.ones(()), axes=["."]), r"must be \(\.\).*got \(\)"),
    ],
    ids=str,
)
def test_an_array_that_does_not_have_the_axes_beside_its_dots_is_refused(rule, text):
    x = jnp.ones((B, T, N, 4))
    with pytest.raises(ValueError, match="attention: .*" + text):
        jattn.attention(x, x, x, mask=rule)


def test_lift_is_a_loop_over_the_letters():
    full, ones, rows, scalar = exact(1, B, N, T), exact(2, 1, N, T), exact(3, B, T), 2.0

    def fn(full, ones, rows, scalar):
        return full * ones + rows * scalar

    arrays = [jnp.asarray(x) for x in (full, ones, rows)]
    got = lift(fn, [*arrays, scalar], ["BNT", "BNT", "BT", ""], "BN", {"N": 1})
    want = [
        [full[b, n] * ones[0, n] + rows[b] * scalar for n in range(N)] for b in range(B)
    ]
    assert_close(got, np.moveaxis(np.array(want), 1, 2))


@pytest.mark.parametrize("letters", ["TB", "NB", "ST", "BB", "X", "H", "b", ".TB", 3])
def test_letters_out_of_order_are_refused(letters):
    with pytest.raises(ValueError, match=r"'BNTS' in that order.*Transpose"):
        leaf(letters)


def test_partition_specs_name_the_mesh_axes_of_full_axes_only():
    specs = partition_specs(tree(tree()), {"B": "data", "N": "model"})
    for part in (specs, specs.inner):
        assert part.full == PartitionSpec("data", "model", None, None)
        assert part.ones == PartitionSpec(None, "model", None, None)
        assert part.rows == PartitionSpec("data", None)
        assert part.slopes == PartitionSpec("model")
        assert part.scalar == PartitionSpec()
        assert part.tables == (PartitionSpec(None, None), PartitionSpec(None))
    two_leading = partition_specs(
        masks.padding(np.ones((4, 2, S), bool)), {"B": "data"}
    )
    assert two_leading.key_valid == PartitionSpec("data", None, None)


COLLECTIVES = (
    "all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter|"
    "collective-broadcast"
)


def distance(s, q_pos, k_pos, slope):
    return s - slope * jnp.abs(q_pos - k_pos)


def packed():
    draw = np.random.default_rng(0).integers
    return masks.segments(draw(0, 3, (4, T)), draw(0, 3, (4, S)))


# The verdicts of a mask that is data are joined over the batch, so that every device
# visits the same tiles: one all-reduce of a few integers, where nothing else needs one.
@pytest.mark.parametrize(
    ("algorithm", "mask", "allowed"),
    [
        ("reference", packed(), set()),
        ("blockwise", masks.sliding_window(3), set()),
        ("blockwise", packed(), {"all-reduce"}),
        ("decode", masks.sliding_window(3), set()),
    ],
)
def test_batch_and_heads_on_a_mesh_need_no_collective(algorithm, mask, allowed):
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("data", "model"))
    mesh_axes = {"B": "data", "N": "model"}
    shapes = (4, T, 8, 3), (4, S, 4, 3), (4, S, 4, 5)
    vectors = [exact(n, *shape).astype(np.float32) for n, shape in enumerate(shapes)]
    slopes = np.arange(8, dtype=np.float32) / 8
    rule = scores.rule(distance, slopes, axes=["N"])
    cotangent = exact(9, 4, T, 8, 5).astype(np.float32)

    def step(vectors, mask, rule, cotangent):
        def attend(vectors, rule):
            return jattn.attention(
                *vectors,
                mask=mask & masks.causal(),
                score=rule,
                query_positions="end",
                implementation=algorithm,
                block_sizes=(2, 3) if algorithm == "blockwise" else None,
            )

        out, pull = jax.vjp(attend, vectors, rule)
        return out, *pull(cotangent)

    want = jit(step)(vectors, mask, rule, cotangent)
    by_batch_and_heads = PartitionSpec("data", None, "model", None)
    specs = (
        [by_batch_and_heads] * 3,
        partition_specs(mask, mesh_axes),
        partition_specs(rule, mesh_axes),
        by_batch_and_heads,
    )
    place = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)
    arguments = jax.device_put((vectors, mask, rule, cotangent), place)
    # The gradient of the slopes alone is a sum over the batch.
    alone = jit(lambda *x: step(*x)[:2]).lower(*arguments).compile()
    assert set(re.findall(COLLECTIVES, alone.as_text())) <= allowed
    out, gradients = alone(*arguments)
    assert out.sharding.is_equivalent_to(NamedSharding(mesh, by_batch_and_heads), 4)
    assert_close(out, np.asarray(want[0]))
    for got, expected in zip(gradients, want[1], strict=True):
        assert_close(got, np.asarray(expected))


def test_without_a_batch_axis_no_mesh_axis_is_moved():
    mesh_axes = {"B": "data", "N": "model", "T": "rows"}
    ids = partition_specs(masks.segments(np.zeros(T, int)), mesh_axes)
    assert ids.query_ids == PartitionSpec("rows")
    array = partition_specs(masks.dense(np.ones((N, T, S), bool)), mesh_axes).array
    assert array == PartitionSpec("model", "rows", None)
