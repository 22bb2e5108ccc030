"""What `show` prints is what is allowed, and what would be computed."""

import contextlib
import io

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jattn
from jattn import drawing, masks

pytestmark = pytest.mark.usefixtures("quick_compiler")
NEAR = masks.causal() & masks.sliding_window(left=1)


def picture(*arguments, **options):
    """What `show` prints."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        jattn.show(*arguments, **options)
    return printed.getvalue().removesuffix("\n")


def signs(text):
    """The cells of a picture, without labels and titles."""
    lines = text.split("\n")[2:-1]
    return [[x for x in line.split() if x in "#+."] for line in lines]


def drawn(allowed):
    return [["#" if x else "." for x in row] for row in allowed]


def test_show_prints_the_expression_the_pairs_and_the_live_tiles(capsys):
    jattn.show(NEAR, 3, 4, query_positions="end", block_sizes=(1, 2))
    assert capsys.readouterr().out == (
        "causal() & sliding_window(left=1), T=3, S=4\n"
        "  0 1 2 3\n"
        "1 # # . .\n"
        "2 . # # .\n"
        "3 . . # #\n"
        "live tiles: 4 of 6 (67%), 2 full, at block sizes (1, 2)\n"
    )


def test_labels_are_positions_and_the_outer_ones_where_there_is_no_room():
    places = dict(query_positions=[5, -1, 7], key_positions=np.arange(3) + 1000)
    lines = picture(~masks.causal(), 3, **places).split("\n")
    assert lines[1:-1] == ["   1000 1002", " 5 # # #", "-1 # # #", " 7 # # #"]
    lines = picture(masks.causal(), 330).split("\n")
    assert lines[1:3] == ["    0" + " " * 55 + "319", "  0 +" + " ." * 29]
    assert lines[-2] == "319" + " #" * 29 + " +"


def test_a_picture_of_many_pairs_has_cells():
    i = np.arange(65) // 3
    rows = signs(picture(masks.causal(), 65))
    assert len(rows) == len(rows[0]) == 22
    assert rows[7] == ["#"] * 7 + ["+"] + ["."] * 14
    assert signs(picture(masks.nothing(), 65)) == [["."] * 22] * 22
    assert signs(picture(masks.chunked(3), 65)) == drawn(i[::3, None] == i[None, ::3])


ROWS = np.repeat([[1, 2, 3, 0], [1, 1, 2, 3]], 20, axis=1)
EYE = np.eye(8, dtype=bool)


@pytest.mark.parametrize(
    "mask",
    [
        masks.causal() & ~masks.prefix(9),
        masks.sliding_window(left=20, right=3),
        masks.segments(ROWS) & masks.causal(),
        masks.lengths(np.array([30, 80])),
        masks.block_sparse(np.stack([EYE, ~EYE]), 10) | masks.prefix(np.array(7)),
    ],
    ids=str,
)
def test_verdicts_draw_what_the_pairs_draw(mask, monkeypatch):
    several = dict(head=1) if "block_sparse" in str(mask) else {}
    several |= dict(batch=1) if "int32[2" in str(mask) else {}
    by_pairs = picture(mask, 80, **several)
    monkeypatch.setattr(drawing, "MOST_PAIRS", 0)
    assert picture(mask, 80, **several) == by_pairs


def test_a_million_positions_are_drawn_and_counted():
    text = picture(masks.causal(), 10**6)
    assert signs(text) == [["#"] * i + ["+"] + ["."] * (31 - i) for i in range(32)]
    assert text.endswith(
        "(50%), 119315 full, at block sizes (2048, 2048) instead of (256, 256)"
    )


@pytest.mark.parametrize(
    "mask, T, options, line",
    [
        (
            masks.causal(),
            2048,
            {},
            "36 of 64 (56%), 28 full, at block sizes (256, 256)",
        ),
        # Halved, as for a static mask; data are not known when the sizes are chosen.
        (NEAR, 2048, {}, "31 of 256 (12%), 0 full, at block sizes (128, 128)"),
        (
            masks.prefix(np.array(9)),
            1024,
            {},
            "4 of 16 (25%), 0 full, at block sizes (256, 256)",
        ),
        (
            NEAR,
            1024,
            dict(query_positions=np.arange(1024)),
            "7 of 16 (44%), 0 full, at block sizes (256, 256)",
        ),
        (
            None,
            5,
            dict(block_sizes=(2, 3)),
            "6 of 6 (100%), 3 full, at block sizes (2, 3)",
        ),
        (
            masks.segments(ROWS[:, ::10]),
            8,
            dict(block_sizes=(2, 2)),
            # What either row needs, as one plan serves both; full where both are.
            "6 of 16 (38%), 3 full, at block sizes (2, 2)",
        ),
    ],
    ids=str,
)
def test_live_tiles_are_those_of_attention(mask, T, options, line):
    assert picture(mask, T, **options).split("\n")[-1] == f"live tiles: {line}"


def test_one_batch_row_and_head_is_shown_and_named():
    array = np.random.default_rng(0).random((2, 3, 2, 4, 5)) < 0.5
    places = dict(query_positions="start")
    text = picture(array, 4, 5, **places, batch=4, head=1)
    assert text.startswith(
        "dense(bool[2,3,2,4,5]), T=4, S=5, batch=4 of 6, head=1 of 2\n"
    )
    assert signs(text) == drawn(array[1, 1, 1])
    both = masks.dense(array[:1, :, :1]) & masks.sliding_window(np.array([0, 2]))
    text = picture(both, 4, 5, **places, batch=2, head=1)
    i, j = np.arange(4)[:, None], np.arange(5)[None]
    assert signs(text) == drawn(array[0, 2, 0] & (j <= i) & (i - j <= 2))
    text = picture(masks.causal(), 3, batch=1, query_positions=[[0, 1, 2], [2, 0, 1]])
    assert signs(text) == [["#", "#", "#"], ["#", ".", "."], ["#", "#", "."]]


@pytest.mark.parametrize("T, S", [(0, 4), (4, 0), (0, 0)])
def test_without_pairs_there_is_a_title(T, S):
    text = picture(masks.causal(), T, S, query_positions="start")
    assert text.startswith(f"causal(), T={T}, S={S}\n")
    assert text.endswith("\nlive tiles: none, as there are no pairs")


@pytest.mark.parametrize(
    "arguments, options, kind, text",
    [
        ((masks.causal(), 3, 4), {}, ValueError, "^show: with T != S.*query_positions"),
        (
            (masks.causal(), -1),
            {},
            ValueError,
            "^show: T must be an int, 0 or more.*-1",
        ),
        ((masks.causal(), 3, 2.5), {}, TypeError, "^show: S must be an int.*2.5"),
        (
            (np.ones((3, 3), bool), 3),
            {},
            ValueError,
            r"show: mask.*\(T, S\) array for all",
        ),
        ((np.ones((1, 3, 3)), 3), {}, TypeError, "show: mask must be Boolean.*float64"),
        (
            (NEAR.allowed, 3),
            {},
            TypeError,
            "show: mask must be an array or a rule.*rule",
        ),
        (
            (masks.padding(np.ones(4, bool)), 3),
            {},
            ValueError,
            r"show: mask.*\(3,\).*\(4,",
        ),
        (
            ([[True, False]], 1, 2),
            {},
            TypeError,
            "show: mask must.*list.*numpy.asarray",
        ),
        ((NEAR, 3), dict(batch=1), ValueError, "show: batch must.*below 1.*1. Count"),
        ((NEAR, 3), dict(head=-1), ValueError, "show: head must be an int below 1.*-1"),
        ((NEAR, 3), dict(head=True), ValueError, "show: head must be an int.*True"),
        (
            (NEAR, 3),
            dict(block_sizes=(0, 2)),
            ValueError,
            "show: block_sizes must be two",
        ),
    ],
)
def test_a_bad_argument_is_refused_with_the_cure(arguments, options, kind, text):
    with pytest.raises(kind, match="(?s)" + text):
        jattn.show(*arguments, **options)


def test_a_traced_mask_is_refused():
    with pytest.raises(TypeError, match="show: it prints.*outside jax.jit"):
        jax.jit(lambda n: jattn.show(masks.prefix(n), 4))(jnp.array(2))


def test_a_mask_of_shapes_only_is_refused():
    mask = jax.eval_shape(masks.prefix, jax.ShapeDtypeStruct((), np.int32))
    with pytest.raises(TypeError, match="show: it prints.*shapes only"):
        jattn.show(mask, 4)
