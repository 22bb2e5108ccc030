"""Score rules of where a query and a key stand.

Distances are exact integers; they become floating point last.
"""

import bisect
import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np

from jattn.core.arguments import array_of, is_known, static_int
from jattn.core.letters import leaf
from jattn.core.rules import Array, Score


class Alibi(Score):
    """See `alibi`."""

    slopes: float | Array | None = leaf("N", default=None)

    def bind(self, num_queries: int, num_keys: int, num_heads: int) -> "Alibi":
        return (
            Alibi(jnp.asarray(alibi_slopes(num_heads))) if self.slopes is None else self
        )

    def __call__(self, s: jax.Array, q_pos: Array, k_pos: Array) -> jax.Array:
        distance = jnp.asarray(abs(q_pos - k_pos), s.dtype)
        return s - jnp.asarray(self.slopes, s.dtype) * distance


def alibi_slopes(num_heads: int) -> np.ndarray:
    """The paper's slopes for N heads, (N,), float64.

    2^(-8 i / N) for i from 1 to N, a power of two. For another N, the slopes of the
    largest power of two below it, and then every other one of twice that power.
    """

    def of(power: int) -> np.ndarray:
        return 2.0 ** (-8 * np.arange(1, power + 1) / power)

    power = 1 << max(num_heads.bit_length() - 1, 0)
    return np.concatenate([of(power), of(2 * power)[::2]])[:num_heads]


def alibi(slopes: float | Array | None = None) -> Score:
    """Lowers scores in proportion to the distance, by a slope for each head.

    s -> s - slope * |q_pos - k_pos|

    Args:
        slopes: a number, or floating point: a scalar, or one per head (N,); gradients
            reach them. None takes the paper's for the N heads of the call, so give
            them where heads are spread by hand, as in `jax.shard_map`.

    Raises:
        ValueError: a slope is known to be NaN or infinite.
        TypeError: slopes are not numbers or floating point.

    Source: Press et al. 2021, arXiv:2108.12409, section 3; the slopes of any N, from
        the code that goes with it.

    Example:
        >>> positions = np.arange(4)
        >>> alibi(0.5)(jnp.zeros((4, 4)), positions[:, None], positions[None])
        Array([[ 0. , -0.5, -1. , -1.5],
               [-0.5,  0. , -0.5, -1. ],
               [-1. , -0.5,  0. , -0.5],
               [-1.5, -1. , -0.5,  0. ]], dtype=float32)
    """
    if isinstance(slopes, bool) or not isinstance(slopes, (int, float, type(None))):
        slopes = array_of("alibi", "slopes", slopes, np.floating)
    if slopes is not None and is_known(slopes):
        if not np.all(np.isfinite(np.asarray(slopes, np.float64))):
            raise ValueError(
                f"alibi: slopes must be finite, but got {slopes}. To forbid keys, give "
                "a mask."
            )
    return Alibi(slopes)


class RelativeBias(Score):
    """See `relative_bias`."""

    table: Array = leaf(".N")
    _: dataclasses.KW_ONLY
    bidirectional: bool
    max_distance: int = 128

    def __call__(self, s: jax.Array, q_pos: Array, k_pos: Array) -> jax.Array:
        end = self.max_distance
        distance = jnp.clip(k_pos - q_pos, -end, end)
        biases = jnp.asarray(self.table, s.dtype)[
            self.buckets(np.arange(-end, end + 1))
        ]
        return s + biases[distance + end]

    def buckets(self, distance: np.ndarray) -> np.ndarray:
        """The row of the table for each of some distances k_pos - q_pos."""
        size = self.table.shape[0] // (2 if self.bidirectional else 1)
        ahead = (distance > 0) * size if self.bidirectional else 0
        away = abs(distance) if self.bidirectional else -np.minimum(distance, 0)
        starts = _bucket_starts(size, self.max_distance)
        return ahead + np.searchsorted(starts, away, side="right") - 1


def _bucket_starts(num_buckets: int, max_distance: int) -> list[int]:
    """The least distance of each bucket, exact.

    The first half has a bucket for each distance; bucket e + i of the L others, with
    e = num_buckets // 2, is that of the distances from e (max_distance / e)^(i / L) on:
    of those n with n^L >= e^(L - i) max_distance^i, which is a claim about integers.
    """
    exact = num_buckets // 2
    wide = num_buckets - exact
    bounds = (exact ** (wide - i) * max_distance**i for i in range(wide))
    return list(range(exact)) + [
        bisect.bisect_left(range(max_distance), bound, key=lambda n: n**wide)
        for bound in bounds
    ]


def relative_bias(
    table: Array, *, bidirectional: bool, max_distance: int = 128
) -> RelativeBias:
    """Adds a learned bias for the bucket that the distance falls into.

    s -> s + table[bucket(k_pos - q_pos)]

    With n = |k_pos - q_pos| and e = num_buckets // 2, the bucket is n below e, and from
    there on grows like its logarithm,

        min(e + floor(log(n / e) / log(max_distance / e) (num_buckets - e)),
            num_buckets - 1)

    `bidirectional` gives the first half of the table to keys up to the query and the
    second half to keys after it, each as above with half as many buckets; without it
    all keys after the query are in bucket 0. No bucket depends on rounding.

    Args:
        table: floating point, (num_buckets, N), N full or 1; gradients reach it.
        bidirectional: whether keys after a query have buckets of their own.
        max_distance: the distance from which on all are in the last bucket.

    Raises:
        ValueError: the table has other axes, too few buckets, or an odd number of them
            where they are halved; or max_distance is not beyond the exact buckets.
        TypeError: the table is not floating point, or an option not a bool or an int.

    Source: Raffel et al. 2020, arXiv:1910.10683, section 2.1.

    Example:
        >>> rule = relative_bias(np.zeros((8, 1)), bidirectional=True, max_distance=8)
        >>> rule.buckets(np.arange(7)[None] - np.arange(7)[:, None])
        array([[0, 5, 6, 6, 7, 7, 7],
               [1, 0, 5, 6, 6, 7, 7],
               [2, 1, 0, 5, 6, 6, 7],
               [2, 2, 1, 0, 5, 6, 6],
               [3, 2, 2, 1, 0, 5, 6],
               [3, 3, 2, 2, 1, 0, 5],
               [3, 3, 3, 2, 2, 1, 0]])
    """
    table = array_of("relative_bias", "table", table, np.floating)
    if type(bidirectional) is not bool:
        raise TypeError(
            f"relative_bias: bidirectional must be a bool, but got {bidirectional!r}. "
            "True where a query sees keys after it."
        )
    halves = 2 if bidirectional else 1
    if table.ndim != 2 or table.shape[0] < 2 * halves or table.shape[0] % halves:
        raise ValueError(
            "relative_bias: table must be (num_buckets, N), with num_buckets "
            f"{'even and 4' if bidirectional else '2'} or more, but got shape "
            f"{table.shape} and {bidirectional=}. Give one row for each bucket."
        )
    exact = table.shape[0] // halves // 2
    end = static_int("relative_bias", "max_distance", max_distance, exact + 1)
    return RelativeBias(table, bidirectional=bidirectional, max_distance=end)


class LogNScale(Score):
    """See `log_n_scale`."""

    reference_length: int

    def __call__(self, s: jax.Array, q_pos: Array, k_pos: Array) -> jax.Array:
        n = jnp.asarray(q_pos + 1)
        longer = n > self.reference_length
        log_n = jnp.log(jnp.where(longer, n, self.reference_length).astype(s.dtype))
        return s * jnp.where(longer, log_n / math.log(self.reference_length), 1)


def log_n_scale(reference_length: int) -> Score:
    """Raises the scores of queries far from the start, so that they stay as selective.

    s -> s * max(1, log(n) / log(reference_length)), with n = q_pos + 1

    n is how many keys a causal query sees, whatever is cached or cut into tiles. Up to
    the reference length nothing changes, as for a model that was trained up to there.
    One that learns with log n from the start takes a reference length of 2, for log2 n,
    and puts what it learns into `scale`; a first query sees one key only, so its factor
    does not matter. In an encoder every query sees S keys: put log S into `scale`.

    Args:
        reference_length: the n from which on the factor exceeds 1, an int.

    Raises:
        ValueError: reference_length is less than 2.
        TypeError: reference_length is not an int.

    Source: Su 2021, kexue.fm/archives/8823; Chiang & Cholak 2022, arXiv:2202.12172;
        Nakanishi 2025, arXiv:2501.19399 (learned, from the start).

    Example:
        >>> log_n_scale(4)(jnp.ones((4, 1)), np.array([[0], [3], [7], [15]]), None)
        Array([[1. ],
               [1. ],
               [1.5],
               [2. ]], dtype=float32)
    """
    return LogNScale(static_int("log_n_scale", "reference_length", reference_length, 2))
