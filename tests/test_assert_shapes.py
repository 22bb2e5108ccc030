"""Shape assertions in letters."""

import sys

import numpy as np
import pytest

from jattn.testing import assert_attention_shapes

pytest.importorskip("chex")

RIGHT = dict(
    query=(2, 3, 5, 4, 8),
    key=(2, 3, 7, 2, 8),
    value=(2, 3, 7, 2, 6),
    out=(2, 3, 5, 4, 6),
)


def check(**shapes):
    assert_attention_shapes(**{name: np.empty(x) for name, x in shapes.items()})


def test_right_shapes_pass_with_any_leading_axes():
    check(**RIGHT)
    check(**RIGHT, lse=(2, 3, 5, 4))
    check(**{name: shape[2:] for name, shape in RIGHT.items()}, lse=(5, 4))


@pytest.mark.parametrize(
    ("name", "shape", "words"),
    [
        (
            "key",
            (2, 3, 7, 2, 9),
            "key must be (*B, S, K, H) with *B=(2, 3), S=7, K=2, H=8",
        ),
        ("key", (2, 7, 2, 8), "key must be (*B, S, K, H) with *B=(2, 3)"),
        ("value", (2, 3, 8, 2, 6), "value must be (*B, S, K, D)"),
        ("value", (1, 3, 7, 2, 6), "value must be (*B, S, K, D) with *B=(2, 3)"),
        (
            "out",
            (2, 3, 4, 5, 6),
            "out must be (*B, T, N, D) with *B=(2, 3), T=5, N=4, D=6",
        ),
        ("out", (2, 3, 5, 4, 8), "out must be (*B, T, N, D)"),
        ("lse", (2, 3, 4, 5), "lse must be (*B, T, N)"),
        ("query", (5, 8), "query must be (*B, T, N, H), but got query (5, 8)"),
    ],
)
def test_a_wrong_shape_is_named_in_letters_beside_what_was_got(name, shape, words):
    shapes = RIGHT | {"lse": (2, 3, 5, 4), name: shape}
    with pytest.raises(AssertionError) as error:
        check(**shapes)
    assert f"assert_attention_shapes: {words}" in str(error.value)
    assert f"{name} {shape}" in str(error.value)


def test_query_heads_are_a_multiple_of_key_heads():
    shapes = dict(query=(5, 4, 8), key=(7, 3, 8), value=(7, 3, 8), out=(5, 4, 8))
    with pytest.raises(AssertionError, match="N must be a multiple .* N=4 and K=3"):
        check(**shapes)


def test_without_chex_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "chex", None)
    with pytest.raises(ModuleNotFoundError, match="pip install chex"):
        check(**RIGHT)
