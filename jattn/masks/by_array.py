"""Masks that are written down: arrays with an entry for each query or key."""

from typing import Any

import numpy as np

from jattn.core.arguments import array_of, int_of, integer
from jattn.core.letters import leaf
from jattn.core.rules import Array, Mask, Range, verdict_of


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


def padding(key_valid: Array, query_valid: Array | None = None) -> Mask:
    """Allows the keys that are marked as valid: left padding, right padding, holes.

    Args:
        key_valid: Boolean, (*B, S).
        query_valid: Boolean, (*B, T); other queries see nothing.

    Raises:
        TypeError: an array is not Boolean.

    Example:
        >>> import jattn
        >>> jattn.show(padding(np.array([[False, True, False, True, True]])), 5)
        padding(bool[1,5]), T=5, S=5
          0 1 2 3 4
        0 . # . # #
        1 . # . # #
        2 . # . # #
        3 . # . # #
        4 . # . # #
        live tiles: 1 of 1 (100%), 0 full, at block sizes (5, 5)
    """
    if query_valid is not None:
        query_valid = array_of("padding", "query_valid", query_valid, np.bool_)
    return Padding(array_of("padding", "key_valid", key_valid, np.bool_), query_valid)


class Lengths(Mask):
    """See `lengths`. It becomes a `Padding` once T and S are known."""

    positional = False

    key_lengths: int | Array = leaf("B")
    query_lengths: int | Array | None = leaf("B", default=None)

    def bind(self, num_queries: int, num_keys: int, num_heads: int) -> Mask:
        def below(length: int | Array, size: int) -> Array:
            index = np.arange(size).reshape((1,) * np.ndim(length) + (size,))
            return index < (length if isinstance(length, int) else length[..., None])

        queries = self.query_lengths
        return Padding(
            below(self.key_lengths, num_keys),
            None if queries is None else below(queries, num_queries),
        )


def lengths(key_lengths: int | Array, query_lengths: int | Array | None = None) -> Mask:
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
        >>> import jattn
        >>> jattn.show(lengths(np.array([3, 5]), query_lengths=4), 5, batch=0)
        lengths(int32[2], query_lengths=4), T=5, S=5, batch=0 of 2
          0 1 2 3 4
        0 # # # . .
        1 # # # . .
        2 # # # . .
        3 # # # . .
        4 . . . . .
        live tiles: 1 of 1 (100%), 0 full, at block sizes (5, 5)
    """
    if query_lengths is not None:
        query_lengths = integer("lengths", "query_lengths", query_lengths)
    return Lengths(integer("lengths", "key_lengths", key_lengths), query_lengths)


class Segments(Mask):
    """See `segments`."""

    positional = False

    query_ids: Array = leaf("BT")
    key_ids: Array = leaf("BS", default=None)
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

    def __repr__(self) -> str:
        if self.key_ids is self.query_ids:
            return repr(Segments(self.query_ids, padding_id=self.padding_id))
        return super().__repr__()


def segments(
    query_ids: Array, key_ids: Array | None = None, *, padding_id: int | None = 0
) -> Mask:
    """Allows the keys of a query's own segment, as in a packed batch.

    query_ids == key_ids, and neither is padding_id

    Args:
        query_ids: integers, (*B, T).
        key_ids: integers, (*B, S); by default `query_ids`.
        padding_id: the id of padding, which sees nothing and is not seen. None: there
            is none.

    Raises:
        TypeError: ids are not integers.

    Source: Raffel et al. 2020, arXiv:1910.10683, section 3.1.2 (packing).

    Example:
        >>> import jattn
        >>> jattn.show(segments(np.array([[1, 1, 1, 2, 2, 0]])), 6)
        segments(int32[1,6]), T=6, S=6
          0 1 2 3 4 5
        0 # # # . . .
        1 # # # . . .
        2 # # # . . .
        3 . . . # # .
        4 . . . # # .
        5 . . . . . .
        live tiles: 1 of 1 (100%), 0 full, at block sizes (6, 6)
    """
    query_ids = array_of("segments", "query_ids", query_ids, np.integer)
    if key_ids is None:
        key_ids = query_ids
    padding_id = int_of(padding_id)
    if padding_id is not None and type(padding_id) is not int:
        raise TypeError(
            f"segments: padding_id must be an int or None, but got {padding_id!r}. It "
            "is static, a part of the program: int(x) makes one of an array."
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


def dense(array: Array) -> Mask:
    """Allows what a Boolean array allows.

    Args:
        array: Boolean, (*B, N, T, S), each axis full or 1; True where a query may
            look. It has the rank of query; nothing is broadcast from fewer axes.

    Raises:
        TypeError: the array is not Boolean.

    Example:
        >>> import jattn
        >>> crossed = np.eye(5, dtype=bool) | np.eye(5, dtype=bool)[::-1]
        >>> jattn.show(dense(crossed[None, None]), 5)
        dense(bool[1,1,5,5]), T=5, S=5
          0 1 2 3 4
        0 # . . . #
        1 . # . # .
        2 . . # . .
        3 . # . # .
        4 # . . . #
        live tiles: 1 of 1 (100%), 0 full, at block sizes (5, 5)
    """
    return Dense(array_of("dense", "array", array, np.bool_))
