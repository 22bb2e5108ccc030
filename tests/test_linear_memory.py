"""No rule makes anything of size T x S, whatever it is composed with."""

import functools
import operator
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jattn
from jattn import masks, scores

LENGTH, HEADS = 16384, 2
ROWS = np.zeros((1, LENGTH), np.int32)

MASKS = {
    "causal": masks.causal(),
    "sliding_window": masks.sliding_window(np.array([300, 700]), 5),
    "prefix": masks.prefix(np.array([900])),
    "padding": masks.padding(ROWS == 0, ROWS == 0),
    "lengths": masks.lengths(np.array([16000]), np.array([15000])),
    "segments": masks.segments(ROWS + 1),
    "chunked": masks.chunked(512),
    "dilated": masks.dilated(3),
    "block_sparse": masks.block_sparse(np.ones((HEADS, 16, 16), bool), 1024),
    "dense": masks.dense(np.ones((1, HEADS, 1, LENGTH), bool)),
    "rule": masks.rule(lambda q, k, m: (q * 7 + k) % 5 != m, ROWS, axes=["BT"]),
    "not": ~masks.chunked(64),
    "everything": masks.everything(),
    "nothing": masks.nothing(),
}
SCORES = {
    "soft_cap": scores.soft_cap(np.full(HEADS, 30.0)),
    "additive": scores.additive(np.zeros((1, HEADS, 1, LENGTH), np.float32)),
    "log_n_scale": scores.log_n_scale(512),
    "alibi": scores.alibi(),
    "relative_bias": scores.relative_bias(
        np.zeros((32, HEADS), np.float32), bidirectional=True
    ),
    "rule": scores.rule(lambda s, q, k, m: s + 0.1 * m, ROWS * 1.0, axes=["BS"]),
}
VECTORS = 3 * (jax.ShapeDtypeStruct((1, LENGTH, HEADS, 64), jnp.float32),)


def assert_linear(mask, rules):
    """What the compiler plans for the gradient, in every leaf of the rules too."""

    def loss(vectors, rules):
        out = jattn.attention(*vectors, mask=mask, score=rules)
        return jnp.sum(out, dtype=jnp.float32)

    gradient = jax.grad(loss, (0, 1), allow_int=True)
    fast = {"xla_backend_optimization_level": 0}
    compiled = jax.jit(gradient).lower(VECTORS, rules).compile(fast)
    shapes = re.findall(r"\[([\d,]+)\]", compiled.as_text())
    sizes = {tuple(map(int, shape.split(","))) for shape in shapes}
    assert (1, LENGTH, HEADS, 64) in sizes  # so the pattern finds what there is
    assert not [size for size in sizes if size.count(LENGTH) > 1]
    assert compiled.memory_analysis().temp_size_in_bytes < LENGTH**2 // 4


def test_all_rules_at_once():
    assert set(masks.__all__) - {"Mask", "Range", "EMPTY", "PARTIAL", "FULL"} < {*MASKS}
    assert set(scores.__all__) - {"Score"} == {*SCORES}
    every = functools.reduce(operator.or_, MASKS.values())
    some = functools.reduce(operator.and_, MASKS.values())
    assert_linear(~some & every, tuple(SCORES.values()))


@pytest.mark.slow
@pytest.mark.parametrize("name", MASKS)
def test_each_mask(name):
    assert_linear(MASKS[name], ())


@pytest.mark.slow
@pytest.mark.parametrize("name", SCORES)
def test_each_score_rule(name):
    assert_linear(None, (SCORES[name],))
