"""What follows from letters: tiles, vmap axes, shardings; and no collective."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from oracle import assert_close, exact

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


@pytest.mark.parametrize("letters", ["TB", "NB", "ST", "BB", "X", "H", "b", 3])
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

    want = jax.jit(step)(vectors, mask, rule, cotangent)
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
    alone = jax.jit(lambda *x: step(*x)[:2]).lower(*arguments).compile()
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
