"""A mask means the same on every path, and nothing passes it in either direction."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracle import assert_close, assert_same_bits, dense_jax, exact, jit
from paths import PATHS, with_gradients

DIMS = chex.Dimensions(B=2, T=5, S=7, N=3, H=2)
QUERY = exact(1, *DIMS["BTNH"])
KEY, VALUE = exact(2, *DIMS["BSNH"]), exact(3, *DIMS["BSNH"])
COTANGENT = exact(4, *DIMS["BTNH"])

t, s = np.arange(DIMS.T)[:, None], np.arange(DIMS.S)
OF_QUERIES, OF_KEYS = np.array([5, 3])[:, None, None], np.array([7, 2])[:, None, None]
QUERY_IDS = np.array([[1, 1, 2, 2, 0], [3, 4, 4, 7, 7]])
KEY_IDS = np.array([[1, 1, 1, 2, 2, 0, 0], [3, 3, 4, 4, 5, 5, 0]])
SAME = (QUERY_IDS[:, :, None] == KEY_IDS[:, None]) & (KEY_IDS[:, None] != 0)
MASKS = {
    "a query without keys": ~((t == 1) & (np.arange(DIMS.B)[:, None, None] == 0)),
    "a batch row without keys": s < np.array([0, 4])[:, None, None],
    "padding of keys": s < OF_KEYS,
    "padding of queries": t < OF_QUERIES,
    "padding of both": (s < OF_KEYS) & (t < OF_QUERIES),
    "causal, of keys with padding": (s <= t) & (s < OF_KEYS),
    "causal, the last query beside the last key": s <= t + 2,
    "a window": (t - 1 <= s) & (s <= t + 2),
    "a window of later keys only": (t + 2 <= s) & (s <= t + 4),
    "documents with padding": SAME,
    "causal in documents with padding": SAME & (s <= t),
    "the keys of a cache that are written": s < np.array([1, 6])[:, None, None],
    "no key for any query": np.zeros((1, 1, 1), bool),
}
MASKS = {name: np.broadcast_to(x, DIMS["BTS"])[:, None] for name, x in MASKS.items()}
MASKS["heads that see other keys"] = np.random.default_rng(5).random(DIMS["BNTS"]) < 0.5


@functools.cache
def compiled(path):
    """One program for all masks, which are data."""
    return jit(functools.partial(with_gradients, PATHS[path]))


def run(path, allowed, query=QUERY, key=KEY, value=VALUE):
    allowed = np.broadcast_to(allowed, DIMS["BNTS"])
    with jax.enable_x64(True):
        got = compiled(path)(query, key, value, COTANGENT, allowed)
    return {name: np.asarray(x) for name, x in got.items()}


@functools.cache
def dense():
    def attend(*vectors):
        return dense_jax(*vectors)[0]

    return jit(functools.partial(with_gradients, attend))


def unseen(allowed):
    """Queries (B, T) that see nothing, and keys (B, S) that no query sees."""
    allowed = np.broadcast_to(allowed, DIMS["BNTS"])
    return ~allowed.any((1, 3)), ~allowed.any((1, 2))


each_path = pytest.mark.parametrize("path", PATHS)


@each_path
def test_results_and_gradients_are_those_of_the_pairs_that_are_allowed(path):
    for name, mask in MASKS.items():
        got = run(path, mask)
        assert got["out"].dtype == np.float64
        with jax.enable_x64(True):
            allowed = np.broadcast_to(mask, DIMS["BNTS"])
            want = dense()(QUERY, KEY, VALUE, COTANGENT, allowed)
        for part, x in want.items():
            assert_close(got[part], x, jnp.float64, f"{part} with {name}")


@each_path
def test_what_sees_nothing_and_what_is_not_seen_get_exactly_zero(path):
    for name, mask in MASKS.items():
        got, (queries, keys) = run(path, mask), unseen(mask)
        where = dict(out=queries, query=queries, key=keys, value=keys)
        for part, rows in where.items():
            assert not got[part][rows].any(), f"{part} with {name}"


@pytest.mark.parametrize("number", [np.nan, np.inf, 1e300])
@each_path
def test_no_bit_depends_on_what_stands_where_nothing_is_seen(path, number):
    for name, mask in MASKS.items():
        queries, keys = unseen(mask)
        query, key, value = QUERY.copy(), KEY.copy(), VALUE.copy()
        query[queries] = key[keys] = value[keys] = number
        got, clean = run(path, mask, query, key, value), run(path, mask)
        for part, x in got.items():
            assert_same_bits(x, clean[part], f"{part} with {name}")


@pytest.mark.parametrize("number", [np.nan, np.inf, 3.0])
@each_path
def test_no_earlier_bit_depends_on_a_later_key(path, number):
    causal = np.broadcast_to(s <= t, DIMS["BNTS"])
    clean = run(path, causal)["out"]
    for first in range(1, DIMS.T):
        key, value = KEY.copy(), VALUE.copy()
        key[:, first:] = value[:, first:] = number
        got = run(path, causal, QUERY, key, value)["out"]
        assert_same_bits(got[:, :first], clean[:, :first], f"before key {first}")
        assert (got[:, first:] != clean[:, first:]).any()
