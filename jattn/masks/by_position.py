"""Masks that follow from where a query and a key stand."""

from typing import Any

import numpy as np

from jattn.core.arguments import integer, static_int
from jattn.core.letters import leaf
from jattn.core.rules import Array, Mask, Range, verdict_of


class Causal(Mask):
    """See `causal`."""

    def allowed(self, q_pos: Array, k_pos: Array) -> Any:
        return k_pos <= q_pos

    def verdict(self, q_range: Range, k_range: Range) -> Any:
        return verdict_of(k_range.lo <= q_range.hi, k_range.hi <= q_range.lo)


def causal() -> Mask:
    """Allows a query the keys at its own position and before.

    k_pos <= q_pos

    Source: Vaswani et al. 2017, arXiv:1706.03762, section 3.2.3.

    Example:
        >>> import jattn
        >>> jattn.show(causal(), 6, block_sizes=(2, 2))
        causal(), T=6, S=6
          0 1 2 3 4 5
        0 # . . . . .
        1 # # . . . .
        2 # # # . . .
        3 # # # # . .
        4 # # # # # .
        5 # # # # # #
        live tiles: 6 of 9 (67%), 3 full, at block sizes (2, 2)
    """
    return Causal()


class SlidingWindow(Mask):
    """See `sliding_window`."""

    left: int | Array | None = leaf("N", kw_only=True)
    right: int | Array | None = leaf("N", default=0, kw_only=True)

    def allowed(self, q_pos: Array, k_pos: Array) -> Any:
        near: Any = np.True_
        if self.left is not None:
            near = near & (q_pos - k_pos <= self.left)
        if self.right is not None:
            near = near & (k_pos - q_pos <= self.right)
        return near

    def verdict(self, q_range: Range, k_range: Range) -> Any:
        some: Any = np.True_
        every: Any = np.True_
        if self.left is not None:
            some = some & (q_range.lo - k_range.hi <= self.left)
            every = every & (q_range.hi - k_range.lo <= self.left)
        if self.right is not None:
            some = some & (k_range.lo - q_range.hi <= self.right)
            every = every & (k_range.hi - q_range.lo <= self.right)
        return verdict_of(some, every)


def sliding_window(left: int | Array | None, right: int | Array | None = 0) -> Mask:
    """Allows the `left` keys before a query, itself, and the `right` keys after it.

    q_pos - left <= k_pos <= q_pos + right

    That is left + right + 1 keys. A window of "w keys, the query's own included" is
    `sliding_window(w - 1)`.

    Args:
        left: how far back; an int, or integers: a scalar, or one per head (N,). None
            is unbounded.
        right: how far ahead, likewise.

    Raises:
        ValueError: a bound is negative.
        TypeError: a bound is not an integer.

    Source: Beltagy et al. 2020, arXiv:2004.05150, section 3.1.

    Example:
        >>> import jattn
        >>> jattn.show(sliding_window(left=2, right=1), 7)
        sliding_window(left=2, right=1), T=7, S=7
          0 1 2 3 4 5 6
        0 # # . . . . .
        1 # # # . . . .
        2 # # # # . . .
        3 . # # # # . .
        4 . . # # # # .
        5 . . . # # # #
        6 . . . . # # #
        live tiles: 1 of 1 (100%), 0 full, at block sizes (7, 7)
    """
    bounds = {
        name: None if bound is None else integer("sliding_window", name, bound)
        for name, bound in (("left", left), ("right", right))
    }
    return SlidingWindow(**bounds)


class Prefix(Mask):
    """See `prefix`."""

    lengths: int | Array = leaf("B")

    def allowed(self, q_pos: Array, k_pos: Array) -> Any:
        return k_pos < self.lengths

    def verdict(self, q_range: Range, k_range: Range) -> Any:
        return verdict_of(k_range.lo < self.lengths, k_range.hi < self.lengths)


def prefix(lengths: int | Array) -> Mask:
    """Allows the keys whose positions lie before a length, to every query.

    k_pos < lengths

    A prefix LM is `causal() | prefix(n)`; a window that never forgets the first keys is
    `causal() & (sliding_window(w) | prefix(4))`. To count places in the arrays instead
    of positions, as for padding, use `lengths`.

    Args:
        lengths: an int, or integers: a scalar, or one per batch row (*B,).

    Raises:
        ValueError: a length is negative.
        TypeError: a length is not an integer.

    Source: Raffel et al. 2020, arXiv:1910.10683, section 3.2.1 (prefix LM); Xiao et al.
        2023, arXiv:2309.17453, section 3.2 (attention sinks).

    Example:
        >>> import jattn
        >>> jattn.show(causal() | prefix(3), 6)
        causal() | prefix(3), T=6, S=6
          0 1 2 3 4 5
        0 # # # . . .
        1 # # # . . .
        2 # # # . . .
        3 # # # # . .
        4 # # # # # .
        5 # # # # # #
        live tiles: 1 of 1 (100%), 0 full, at block sizes (6, 6)
    """
    return Prefix(integer("prefix", "lengths", lengths))


class Dilated(Mask):
    """See `dilated`."""

    rate: int

    def allowed(self, q_pos: Array, k_pos: Array) -> Any:
        return q_pos % self.rate == k_pos % self.rate

    def verdict(self, q_range: Range, k_range: Range) -> Any:
        least, most = q_range.lo - k_range.hi, q_range.hi - k_range.lo
        # The first multiple from the least difference on, and the last up to the most.
        first, last = -(-least // self.rate), most // self.rate
        some = first <= last
        return verdict_of(some, some & ((least == most) | (self.rate == 1)))


def dilated(rate: int) -> Mask:
    """Allows every key whose distance from the query is a multiple of a rate.

    (q_pos - k_pos) % rate == 0

    A window of w keys with holes is `sliding_window((w - 1) * rate) & dilated(rate)`.

    Args:
        rate: the distance between two keys that a query sees, an int.

    Raises:
        ValueError: rate is not positive.
        TypeError: rate is not an int.

    Source: Child et al. 2019, arXiv:1904.10509, section 4.3 (strided attention);
        Beltagy et al. 2020, arXiv:2004.05150, section 3.1.

    Example:
        >>> import jattn
        >>> jattn.show(causal() & dilated(3), 8)
        causal() & dilated(3), T=8, S=8
          0 1 2 3 4 5 6 7
        0 # . . . . . . .
        1 . # . . . . . .
        2 . . # . . . . .
        3 # . . # . . . .
        4 . # . . # . . .
        5 . . # . . # . .
        6 # . . # . . # .
        7 . # . . # . . #
        live tiles: 1 of 1 (100%), 0 full, at block sizes (8, 8)
    """
    return Dilated(static_int("dilated", "rate", rate, 1))
