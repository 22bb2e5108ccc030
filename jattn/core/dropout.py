"""Dropout of attention weights, whatever the tiles.

A weight is dropped or kept by a hash of a key of its batch row and head, the index of
its query and the index of its key. So every algorithm, every tiling, the backward pass
and a recomputation agree, and no pattern is stored. It is not that of `jax.random`.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jattn.core.letters import leaf
from jattn.core.rules import Array, Rule


class Shared(NamedTuple):
    """A key of `jax.random` for one pattern that all batch rows and heads share."""

    rng: jax.Array


class Dropout(Rule):
    """Which weights of a tile are kept.

    Attributes:
        rate: the share that is dropped.
        query_key: a 32-bit key for the queries of a head.
        key_key: another one for its keys.
        query_index: of each query, from 0 to T - 1, or what stands for it.
        key_index: of each key, from 0 to S - 1, likewise.
    """

    positional = False

    rate: float
    query_key: Array = leaf("BN")
    key_key: Array = leaf("BN")
    query_index: Array = leaf("BT")
    key_index: Array = leaf("BS")

    def kept(self, weights: jax.Array) -> jax.Array:
        """Weights (T, S), those that are kept divided by 1 - rate, others 0."""
        queries = _mixed(self.query_index ^ self.query_key)
        keys = _mixed(self.key_index ^ self.key_key)
        bits = _mixed(queries[:, None] ^ keys[None, :])
        threshold = np.uint32(min(round(self.rate * 2**32), 2**32 - 1))
        return jnp.where(bits >= threshold, weights / (1 - self.rate), 0)


def dropout_of(
    rate: float,
    rng: jax.Array | Shared,
    shape: tuple[int, ...],
    query_index: Array,
    key_index: Array,
) -> Dropout:
    """The dropout of T x S weights in each of `shape`, (*B, N).

    Args:
        rate: the share that is dropped, in [0, 1).
        rng: a key of `jax.random`; `Shared` gives all the pattern of the first.
        shape: (*B, N).
        query_index: integers, (T,) or (*B, T), by which queries are told apart.
        key_index: (S,) or (*B, S), likewise.
    """
    if isinstance(rng, Shared):
        rng, shape = rng.rng, (1,) * len(shape)
    seeds = jax.random.bits(rng, (2,), jnp.uint32)
    index = jnp.arange(math.prod(shape), dtype=jnp.uint32).reshape(shape)
    query_key = _mixed(index ^ seeds[0])
    return Dropout(
        rate,
        query_key,
        _mixed(query_key ^ seeds[1]),
        query_index.astype(np.uint32),
        key_index.astype(np.uint32),
    )


def _mixed(x: Any) -> jax.Array:
    """A bijection of 32-bit words in which every bit of `x` changes half of the result.

    Source: C. Wellons 2018, "Prospecting for Hash Functions" (lowbias32).
    """
    x = (x ^ (x >> 16)) * np.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * np.uint32(0x846CA68B)
    return x ^ (x >> 16)
