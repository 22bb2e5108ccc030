"""What heads look at: the keys that are meant, and the weight on them."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from oracle import assert_close, dense_attention

from experiments.config import ConfigError, Model
from experiments.model import causal_lm, logit_scale
from experiments.studies.patterns import (
    PATTERNS,
    divergence,
    keys_of,
    look,
    repeats,
    weight_on,
)

pytestmark = pytest.mark.usefixtures("quick_compiler")
TOKENS = np.array([[7, 3, 7, 7, 3, 9, 2], [1, 2, 3, 4, 5, 6, 8]], np.int32)


def meant(name, row, t, s):
    """Whether key s of query t belongs to a pattern."""
    if name == "previous token":
        return s == t - 1
    if name == "same token":
        return s < t and row[s] == row[t]
    return 0 < s < t and row[s - 1] == row[t]


def test_keys_are_those_that_a_pattern_means():
    found = keys_of(jnp.asarray(TOKENS))
    assert list(found) == list(PATTERNS)
    for name, keys in found.items():
        want = [
            [[meant(name, row, t, s) for s in range(7)] for t in range(7)]
            for row in TOKENS
        ]
        assert np.array_equal(keys, want), name


def share(name, weights):
    """The mean weight of one head, (B, T, S), on the keys of a pattern."""
    on = [
        sum(weights[b, t, s] for s in keys)
        for b, row in enumerate(TOKENS)
        for t in range(7)
        if (keys := [s for s in range(7) if meant(name, row, t, s)])
    ]
    return np.mean(on)


def test_what_a_head_gives_to_keys_is_a_mean_over_queries_that_have_any():
    model = causal_lm(
        Model(layers=1, d_model=12, heads=3, d_k=4, d_v=5, d_ff=7), rngs=nnx.Rngs(1)
    )
    scale = 3 * logit_scale(Model(d_k=4))
    found = look(model, jnp.float32(scale), TOKENS)
    block = model.blocks[0]
    vectors = block.attention.project(block.attention_norm(model.embed(TOKENS)))
    query, key, value = (np.asarray(x, np.float64) for x in vectors)
    causal = np.tri(7, dtype=bool)[None, None]
    weights = dense_attention(query, key, value, causal, scale).weights
    even = np.broadcast_to(causal[0] / np.arange(1, 8)[:, None], (2, 7, 7))
    for name in PATTERNS:
        want = [share(name, weights[:, head]) for head in range(3)]
        assert_close(found["heads"][name], [want])
        assert_close(found["even"][name], share(name, even))
    assert_close(found["divergence"], [js_divergence(weights)])


def js_divergence(weights):
    """By its other definition: the mean divergence of heads from their mean."""
    rows = weights[:, :, 1:]
    mean = np.broadcast_to(rows.mean(axis=1, keepdims=True), rows.shape)
    some = rows > 0
    terms = rows[some] * np.log(rows[some] / mean[some])
    return terms.sum() / (rows.shape[0] * rows.shape[1] * rows.shape[2])


def test_no_query_with_such_keys_gives_zero():
    weights = jnp.full((2, 3, 7, 7), 1 / 7)
    assert np.array_equal(weight_on(weights, jnp.zeros((2, 7, 7), bool)), [0, 0, 0])


def test_divergence_is_0_for_equal_heads_and_ln_n_for_heads_apart():
    apart = jnp.tile(jnp.eye(3)[None, :, None], (2, 1, 5, 1))
    assert_close(divergence(apart), np.log(3))
    assert_close(divergence(jnp.tile(apart[:, :1], (1, 3, 1, 1))), 0)


def test_the_most_frequent_tokens_come_once_and_then_all_again():
    text = np.repeat(np.arange(20), np.arange(1, 21))
    found = repeats(text, count=50, context=13, seed=5)
    assert found.shape == (50, 12)
    assert np.array_equal(found[:, :6], found[:, 6:])
    assert all(len(set(row)) == 6 for row in found)
    assert set(found.ravel()) == set(range(7, 20))
    assert np.array_equal(found, repeats(text, count=50, context=13, seed=5))
    assert not np.array_equal(found, repeats(text, count=50, context=13, seed=6))
    few = repeats(text, count=9, context=40, seed=5)
    assert few.shape == (9, 40) and set(few.ravel()) == set(range(20))
    with pytest.raises(ConfigError, match="20 different tokens, but 21 are"):
        repeats(text, count=9, context=42, seed=5)
