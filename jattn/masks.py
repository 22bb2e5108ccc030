"""Masks: which query may look at which key.

Each is a rule over positions; arrays that belong to it are data, Python numbers are
static. Compose them with `&`, `|` and `~`:

    >>> causal() & sliding_window(256)
    (causal() & sliding_window(256))
    >>> prefix_lm = causal() | rule(lambda q_pos, k_pos: k_pos < 10)
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jattn.core.arguments import (
    array_of,
    check_callable,
    integer,
    tile_views,
    with_axes,
)
from jattn.core.letters import leaf, leaves_from
from jattn.core.rules import EMPTY, FULL, PARTIAL, Array, Mask, Range, verdict_of

__all__ = [
    "EMPTY",
    "FULL",
    "PARTIAL",
    "Mask",
    "Range",
    "causal",
    "dense",
    "everything",
    "lengths",
    "nothing",
    "padding",
    "rule",
    "segments",
    "sliding_window",
]


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
        >>> causal().allowed(np.arange(3)[:, None], np.arange(3)[None]).astype(int)
        array([[1, 0, 0],
               [1, 1, 0],
               [1, 1, 1]])
    """
    return Causal()


class SlidingWindow(Mask):
    """See `sliding_window`."""

    left: int | Array | None = leaf("N")
    right: int | Array | None = leaf("N", default=0)

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


def sliding_window(
    left: int | Array | None, right: int | Array | None = 0
) -> SlidingWindow:
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
        >>> mask = sliding_window(1)
        >>> mask.allowed(np.arange(3)[:, None], np.arange(3)[None]).astype(int)
        array([[1, 0, 0],
               [1, 1, 0],
               [0, 1, 1]])
    """
    bounds = {
        name: None if bound is None else integer("sliding_window", name, bound)
        for name, bound in (("left", left), ("right", right))
    }
    return SlidingWindow(**bounds)


class Padding(Mask):
    """See `padding`."""

    positional = False

    key_valid: Array = leaf("BS")
    query_valid: Array | None = leaf("BT", default=None)

    def allowed(self, q_pos: Array, k_pos: Array) -> Any:
        valid = self.key_valid[None, :]
        return valid if self.query_valid is None else valid & self.query_valid[:, None]

    def verdict(self, q_range: Range, k_range: Range) -> Any:
        some, every = self.key_valid.any(), self.key_valid.all()
        if self.query_valid is not None:
            some, every = some & self.query_valid.any(), every & self.query_valid.all()
        return verdict_of(some, every)


def padding(key_valid: Array, query_valid: Array | None = None) -> Padding:
    """Allows the keys that are marked as valid: left padding, right padding, holes.

    Args:
        key_valid: Boolean, (*B, S).
        query_valid: Boolean, (*B, T); other queries see nothing.

    Raises:
        TypeError: an array is not Boolean.

    Example:
        >>> padding(np.array([[False, True, True]]))
        padding(bool[1,3])
    """
    if query_valid is not None:
        query_valid = array_of("padding", "query_valid", query_valid, np.bool_)
    return Padding(array_of("padding", "key_valid", key_valid, np.bool_), query_valid)


class Lengths(Mask):
    """See `lengths`. It becomes a `Padding` once T and S are known."""

    positional = False

    key_lengths: int | Array = leaf("B")
    query_lengths: int | Array | None = leaf("B", default=None)

    def bind(self, num_queries: int, num_keys: int) -> Mask:
        def below(length: int | Array, size: int) -> Array:
            index = np.arange(size).reshape((1,) * np.ndim(length) + (size,))
            return index < (length if isinstance(length, int) else length[..., None])

        queries = self.query_lengths
        return Padding(
            below(self.key_lengths, num_keys),
            None if queries is None else below(queries, num_queries),
        )


def lengths(
    key_lengths: int | Array, query_lengths: int | Array | None = None
) -> Lengths:
    """Allows the first so many keys: right padding.

    key index < key_lengths, and query index < query_lengths if given

    Indices count places in the arrays, whatever the positions are.

    Args:
        key_lengths: an int, or integers of shape (*B,).
        query_lengths: likewise; queries from there on see nothing.

    Raises:
        ValueError: a length is negative.
        TypeError: a length is not an integer.

    Example:
        >>> lengths(np.array([3, 5])).bind(5, 5).key_valid.astype(int)
        array([[1, 1, 1, 0, 0],
               [1, 1, 1, 1, 1]])
    """
    if query_lengths is not None:
        query_lengths = integer("lengths", "query_lengths", query_lengths)
    return Lengths(integer("lengths", "key_lengths", key_lengths), query_lengths)


class Segments(Mask):
    """See `segments`."""

    positional = False

    query_ids: Array = leaf("BT")
    key_ids: Array = leaf("BS")
    padding_id: int | None = 0

    def allowed(self, q_pos: Array, k_pos: Array) -> Any:
        q, k = self.query_ids[:, None], self.key_ids[None, :]
        return q == k if self.padding_id is None else (q == k) & (k != self.padding_id)

    def verdict(self, q_range: Range, k_range: Range) -> Any:
        q, k = self.query_ids, self.key_ids
        some = (q.min() <= k.max()) & (k.min() <= q.max())
        every = (q.min() == k.max()) & (k.min() == q.max())
        if self.padding_id is not None:
            real = k != self.padding_id
            some = some & real.any() & (q != self.padding_id).any()
            every = every & real.all()
        return verdict_of(some, every)


def segments(
    query_ids: Array, key_ids: Array | None = None, *, padding_id: int | None = 0
) -> Segments:
    """Allows the keys of a query's own segment, as in a packed batch.

    query_ids == key_ids, and neither is padding_id

    Args:
        query_ids: integers, (*B, T).
        key_ids: integers, (*B, S); by default `query_ids`.
        padding_id: the id of padding, which sees nothing and is not seen. None: there
            is none.

    Raises:
        TypeError: ids are not integers.

    Source: Raffel et al. 2020, arXiv:1910.10683, section 2.1 (packing).

    Example:
        >>> segments(np.array([[1, 1, 2, 2, 0]]))
        segments(int32[1,5], int32[1,5])
    """
    query_ids = array_of("segments", "query_ids", query_ids, np.integer)
    if key_ids is None:
        key_ids = query_ids
    if padding_id is not None and type(padding_id) is not int:
        raise TypeError(
            f"segments: padding_id must be an int or None, but got {padding_id!r}."
        )
    return Segments(
        query_ids, array_of("segments", "key_ids", key_ids, np.integer), padding_id
    )


class Dense(Mask):
    """See `dense`."""

    positional = False

    array: Array = leaf("BNTS")

    def allowed(self, q_pos: Array, k_pos: Array) -> Any:
        return self.array

    def verdict(self, q_range: Range, k_range: Range) -> Any:
        return verdict_of(self.array.any(), self.array.all())


def dense(array: Array) -> Dense:
    """Allows what a Boolean array allows.

    Args:
        array: Boolean, (*B, N, T, S), each axis full or 1; True where a query may
            look. It has the rank of query; nothing is broadcast from fewer axes.

    Raises:
        TypeError: the array is not Boolean.

    Example:
        >>> dense(np.tril(np.ones((1, 1, 4, 4), bool)))
        dense(bool[1,1,4,4])
    """
    return Dense(array_of("dense", "array", array, np.bool_))


class CustomMask(Mask):
    """See `rule`."""

    fn: Callable[..., Any]
    arrays: tuple[Array, ...] = leaves_from("axes")
    axes: tuple[str, ...] = ()
    verdict_fn: Callable[..., Any] | None = None

    called = "rule"

    def allowed(self, q_pos: Array, k_pos: Array) -> Any:
        return self.fn(q_pos, k_pos, *tile_views(self.arrays, self.axes))

    def verdict(self, q_range: Range, k_range: Range) -> Any:
        if self.verdict_fn is None:
            return PARTIAL
        views = tile_views(self.arrays, self.axes)
        return self.verdict_fn(q_range, k_range, *views)


def rule(
    fn: Callable[..., Any],
    *arrays: Array,
    axes: Sequence[str] | None = None,
    verdict: Callable[..., Any] | None = None,
) -> CustomMask:
    """Allows what a function of the positions allows.

    Args:
        fn: `fn(q_pos, k_pos, *arrays) -> bool`, elementwise over (T, 1) and (1, S).
            It is compiled, and the function itself is part of the cache's key: use the
            same one again, not a fresh lambda, and let it read what varies from
            `arrays` only.
        *arrays: what else it needs.
        axes: the letters of each array, of "BNTS" and in that order. An array with T
            or S reaches `fn` as the tile's part of it, T as (T, 1) and S as (1, S);
            B and N are mapped away. By default "", which passes it whole.
        verdict: `verdict(q_range, k_range, *arrays) -> EMPTY, PARTIAL or FULL` for a
            tile, given the `Range` of its positions: elementwise, since `lo` and `hi`
            are integers or arrays with one for each tile, possibly traced. Write
            `jnp.where`, not `if`. Without it no tile is skipped.

    Raises:
        ValueError: `axes` does not name the axes of each array.

    Example:
        >>> every_third = rule(lambda q_pos, k_pos: (q_pos - k_pos) % 3 == 0)
        >>> per_head = rule(
        ...     lambda q_pos, k_pos, w: q_pos - k_pos < w, np.array([1, 4]), axes=["N"]
        ... )
    """
    check_callable("masks.rule", "fn", fn)
    if verdict is not None:
        check_callable("masks.rule", "verdict", verdict)
    return CustomMask(fn, *with_axes("masks.rule", arrays, axes), verdict)


class Everything(Mask):
    """See `everything`."""

    positional = False

    def allowed(self, q_pos: Array, k_pos: Array) -> Any:
        return np.True_

    def verdict(self, q_range: Range, k_range: Range) -> Any:
        return FULL


def everything() -> Mask:
    """Allows every pair: the identity of `&`."""
    return Everything()


class Nothing(Mask):
    """See `nothing`."""

    positional = False

    def allowed(self, q_pos: Array, k_pos: Array) -> Any:
        return np.False_

    def verdict(self, q_range: Range, k_range: Range) -> Any:
        return EMPTY


def nothing() -> Mask:
    """Allows no pair: the identity of `|`."""
    return Nothing()
