"""Draws from logits: against a plain float64 model of what is kept."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracle import assert_close

from experiments.config import ConfigError
from experiments.draw import Drawing, check, draw, ranked

V = 13
LOGITS = np.random.default_rng(0).normal(size=V).astype(np.float32)
TIED = np.float32([2, 5, 1, 5, 5, 0, 2, 5, 1, 2, 2, 0, 1])
rank = jax.jit(ranked)


def keep(logits, *drawing):
    """The tokens that are kept, from the most probable on, and their logits."""
    tokens, logits = map(np.asarray, rank(logits, Drawing(*drawing)))
    count = np.isfinite(logits).sum()
    assert sorted(tokens) == list(range(V)) and (logits[count:] == -np.inf).all()
    return tokens[:count].tolist(), np.float64(logits[:count])


def counted(logits, temperature, top_k, top_p):
    """The tokens that are kept, and their probabilities, one after another."""
    logits = np.float64(logits) / temperature
    order = sorted(range(V), key=lambda i: (-logits[i], i))[:top_k]
    p = np.exp(logits - logits.max())
    p /= p[order].sum()
    tokens = []
    while order and sum(p[tokens]) < top_p:
        tokens.append(order.pop(0))
    return tokens, p[tokens] / p[tokens].sum()


@pytest.mark.parametrize("logits", [LOGITS, TIED])
def test_what_is_kept_is_what_counting_keeps(logits):
    for temperature in (0.3, 1.0, 4.0):
        for top_k in (1, 2, 5, V, 2 * V):
            for top_p in (1e-9, 0.31, 0.87, 1.0):
                drawing = temperature, top_k, top_p
                tokens, p = counted(logits, *drawing)
                got, kept = keep(logits, *drawing)
                assert got == tokens
                assert_close(np.exp(kept) / np.exp(kept).sum(), p)
    assert rank._cache_size() == 1  # settings are data


def test_temperature_0_keeps_the_first_of_the_largest_whatever_else_is_asked_for():
    assert keep(TIED, 0.0, V, 1.0) == keep(TIED, 0.0, 3, 0.2) == ([1], [0.0])


@pytest.mark.parametrize("temperature", [1e-38, 1e38])
def test_no_temperature_makes_a_nan(temperature):
    tokens, logits = keep(LOGITS, temperature, V, 1.0)
    assert tokens[0] == LOGITS.argmax() and logits[0] == 0


def test_a_share_of_1_keeps_what_rounding_would_leave_out():
    logits = np.float32([0.0] + [-17.0] * (V - 1))  # 4e-8 each
    assert len(keep(logits, 1.0, V, 1.0)[0]) == V


def test_tokens_are_drawn_as_often_as_they_are_probable():
    drawing, count = Drawing(0.7, 6, 0.9), 20_000
    rngs = jax.random.split(jax.random.key(0), count)
    got = jax.jit(jax.vmap(draw, (0, None, None)))(rngs, jnp.asarray(LOGITS), drawing)
    tokens, p = counted(LOGITS, *drawing)
    share = np.bincount(got, minlength=V) / count
    assert 1 < len(tokens) < 6 and share[tokens].sum() == 1
    assert (abs(share[tokens] - p) < 4 * np.sqrt(p * (1 - p) / count)).all()


def test_a_top_k_beyond_int32_is_refused():
    check(Drawing(1.0, 2**31 - 1, 1.0), 0)
    with pytest.raises(ConfigError, match=r"top_k must be below 2\*\*31, but got 3000"):
        check(Drawing(1.0, 3_000_000_000, 1.0), 0)
