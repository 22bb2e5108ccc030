"""Positions decide, not places in arrays: caches, rings, pieces, shuffled shards."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracle import assert_close, dense_attention, dense_jax, exact, jit

import jattn
from jattn import masks

# A cache has S slots; a text has T tokens, of which a ring keeps the last S.
DIMS = chex.Dimensions(B=2, T=13, S=9, N=4, K=2, H=3, D=5)
QUERY, KEY = exact(1, *DIMS["BTNH"]), exact(2, *DIMS["BTKH"])
VALUE = exact(3, *DIMS["BTKD"])
OPTIONS = {
    "reference": dict(implementation="reference"),
    "blockwise": dict(implementation="blockwise", block_sizes=(2, 4)),
}
each = pytest.mark.parametrize("algorithm", OPTIONS)
UNBOUNDED = np.int32(99)


@functools.cache
def compiled(algorithm):
    """One program for every window, every content of the cache and every place."""

    def attend(query, key, value, written, query_positions, key_positions, left):
        return jattn.attention(
            query,
            key,
            value,
            mask=masks.sliding_window(left) & masks.padding(written),
            query_positions=query_positions,
            key_positions=key_positions,
            **OPTIONS[algorithm],
        )

    return jit(attend)


class Cache:
    """Slots that hold NaN, and the position of another token, until they are written.

    Token t of a text goes to slot t % S.
    """

    def __init__(self):
        self.key = np.full(DIMS["BSKH"], np.nan, np.float32)
        self.value = np.full(DIMS["BSKD"], np.nan, np.float32)
        self.written = np.zeros(DIMS["BS"], bool)
        self.positions = np.zeros(DIMS["BS"], np.int32)

    def write(self, row, token):
        slot = token % DIMS.S
        self.key[row, slot], self.value[row, slot] = KEY[row, token], VALUE[row, token]
        self.written[row, slot], self.positions[row, slot] = True, token

    def attend(self, algorithm, tokens, left):
        """What the queries of `tokens`, (B, n), see of it."""
        query = np.take_along_axis(QUERY, tokens[..., None, None], axis=1)
        out = compiled(algorithm)(
            query.astype(np.float32),
            self.key,
            self.value,
            self.written,
            tokens.astype(np.int32),
            self.positions,
            left,
        )
        return np.asarray(out)  # waits, before the slots are written anew


def in_pieces(algorithm, sizes, left):
    """A text that comes piece by piece, each written before it attends."""
    cache, outs, start = Cache(), [], 0
    for size in sizes:
        tokens = np.arange(start, start + size)
        for token in tokens:
            for row in range(DIMS.B):
                cache.write(row, token)
        outs.append(cache.attend(algorithm, np.tile(tokens, (DIMS.B, 1)), left))
        start += size
    return np.concatenate(outs, axis=1)


def in_one_piece(length, left):
    offset = np.subtract.outer(np.arange(length), np.arange(length))
    arrays = (x[:, :length] for x in (QUERY, KEY, VALUE))
    return dense_attention(*arrays, (offset >= 0) & (offset <= left)).out


@pytest.mark.parametrize("left", [UNBOUNDED, np.int32(2), np.int32(0)])
@pytest.mark.parametrize("sizes", [(1,) * 9, (3, 3, 1), (1, 3, 1, 3)])
@each
def test_a_text_in_pieces_is_the_text_in_one_piece(algorithm, sizes, left):
    want = in_one_piece(sum(sizes), left)
    assert_close(in_pieces(algorithm, sizes, left), want)


@pytest.mark.parametrize("sizes", [(1,) * 13, (3, 3, 1, 3, 1, 1, 1)])
@each
def test_a_ring_is_a_window_also_after_it_is_full(algorithm, sizes):
    left = np.int32(DIMS.S - max(sizes))
    assert_close(in_pieces(algorithm, sizes, left), in_one_piece(DIMS.T, left))


@each
def test_texts_of_different_lengths_share_a_cache(algorithm):
    last = np.array([7, 2])
    cache = Cache()
    for row, token in enumerate(last):
        for earlier in range(token + 1):
            cache.write(row, earlier)
    for left in (UNBOUNDED, np.int32(1)):
        got = cache.attend(algorithm, last[:, None], left)
        want = in_one_piece(DIMS.T, left)[np.arange(DIMS.B), last]
        assert_close(got[:, 0], want)


@pytest.mark.parametrize(
    "algorithm", ["reference", pytest.param("blockwise", marks=pytest.mark.slow)]
)
def test_shards_in_zigzag_order_merge_to_the_whole(algorithm, x64):
    """Device d of 3 holds chunks d and 5 - d of a text of 6 chunks of 2."""
    chunks = np.arange(12).reshape(6, 2)
    order = np.stack([np.r_[chunks[d], chunks[5 - d]] for d in range(3)])
    there = np.argsort(order.ravel())
    vectors = [x[0, :12] for x in (QUERY, KEY, VALUE)]
    cotangent = exact(4, 12, DIMS.N, DIMS.D)

    def part(query, key, value, query_positions, key_positions):
        return jattn.attention(
            query,
            key,
            value,
            mask=masks.causal(),
            query_positions=query_positions,
            key_positions=key_positions,
            return_lse=True,
            **OPTIONS[algorithm],
        )

    def merged(query, key, value):
        query, key, value = query[order], key[order], value[order]
        of_keys = jax.vmap(part, (None, 0, 0, None, 0))
        of_both = jax.vmap(of_keys, (0, None, None, 0, None))
        outs, lses = of_both(query, key, value, order, order)  # (queries, keys, ...)
        lse = jax.nn.logsumexp(lses, axis=1, keepdims=True)
        out = (jnp.exp(lses - lse)[..., None] * outs).sum(1)
        return out.reshape(-1, *out.shape[2:])[there]

    def whole(query, key, value):
        return dense_jax(query, key, value, np.tril(np.ones((12, 12), bool)))[0]

    def with_gradients(fn):
        out, pull = jax.vjp(fn, *vectors)
        return out, *pull(cotangent)

    got, want = (jit(functools.partial(with_gradients, fn))() for fn in (merged, whole))
    for a, b in zip(got, want, strict=True):
        assert_close(a, b, jnp.float64)
