"""Masks that follow from where a query and a key stand."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jattn.core.arguments import array_of, integer
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


class Prefix(Mask):
    """See `prefix`."""

    lengths: int | Array = leaf("B")

    def allowed(self, q_pos: Array, k_pos: Array) -> Any:
        return k_pos < self.lengths

    def verdict(self, q_range: Range, k_range: Range) -> Any:
        return verdict_of(k_range.lo < self.lengths, k_range.hi < self.lengths)


def prefix(lengths: int | Array) -> Prefix:
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
        >>> mask = causal() | prefix(2)
        >>> mask.allowed(np.arange(4)[:, None], np.arange(4)[None]).astype(int)
        array([[1, 1, 0, 0],
               [1, 1, 0, 0],
               [1, 1, 1, 0],
               [1, 1, 1, 1]])
    """
    return Prefix(integer("prefix", "lengths", lengths))


class BlockSparse(Mask):
    """See `block_sparse`."""

    layout: Array = leaf("N..")
    block_size: int

    def allowed(self, q_pos: Array, k_pos: Array) -> Any:
        if 0 in self.layout.shape:
            return np.False_
        rows, columns = (
            jnp.asarray(x).ravel() // self.block_size for x in (q_pos, k_pos)
        )
        # Rows first, then columns: on a CPU three times as fast as pair by pair.
        outside: Any = dict(mode="fill", fill_value=False, wrap_negative_indices=False)
        of_queries = jnp.asarray(self.layout).at[..., rows, :].get(**outside)
        return of_queries.at[..., columns].get(**outside)

    def verdict(self, q_range: Range, k_range: Range) -> Any:
        # The allowed blocks above and left of a corner, so that four corners give the
        # number in any rectangle of blocks.
        counts = jnp.asarray(self.layout, jnp.int32).cumsum(-2).cumsum(-1)
        counts = jnp.pad(counts, [(0, 0)] * (counts.ndim - 2) + [(1, 0), (1, 0)])
        (top, bottom), q_inside = self._edges(q_range, -2)
        (left, right), k_inside = self._edges(k_range, -1)
        count = (
            counts[..., bottom, right]
            - counts[..., top, right]
            - counts[..., bottom, left]
            + counts[..., top, left]
        )
        whole = count == (bottom - top) * (right - left)
        return verdict_of(count > 0, whole & q_inside & k_inside)

    def _edges(
        self, positions: Range, axis: int
    ) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
        """A range in blocks, from and up to, and whether the layout has it all."""
        size = self.layout.shape[axis]
        first, last = (jnp.asarray(x) // self.block_size for x in positions)
        edges = jnp.clip(first, 0, size), jnp.clip(last + 1, 0, size)
        return edges, (first >= 0) & (last < size)


def block_sparse(layout: Array, block_size: int) -> BlockSparse:
    """Allows the blocks of pairs that a layout allows.

    layout[q_pos // block_size, k_pos // block_size]

    The blocks are those of the mask; the tiles that are computed may have other sizes.
    A position outside the layout, negative or beyond its last block, sees nothing and
    is not seen: T positions from 0 on need ceil(T / block_size) blocks.

    Args:
        layout: Boolean, (query blocks, key blocks), or (N, query blocks, key blocks)
            with one for each head; N may be 1.
        block_size: how many positions a block has, an int.

    Raises:
        ValueError: the layout has other axes, or block_size is not positive.
        TypeError: the layout is not Boolean, or block_size is not an int.

    Source: Child et al. 2019, arXiv:1904.10509, section 5.5.

    Example:
        >>> mask = block_sparse(np.array([[True, False], [True, True]]), 2)
        >>> mask
        block_sparse(bool[1,2,2], 2)
        >>> pairs = mask.allowed(np.arange(4)[:, None], np.arange(4)[None])
        >>> np.asarray(pairs)[0].astype(int)
        array([[1, 1, 0, 0],
               [1, 1, 0, 0],
               [1, 1, 1, 1],
               [1, 1, 1, 1]])
    """
    layout = array_of("block_sparse", "layout", layout, np.bool_)
    if layout.ndim not in (2, 3):
        raise ValueError(
            "block_sparse: layout must be (query blocks, key blocks), or with N in "
            f"front, but got shape {layout.shape}. Give one entry for each block."
        )
    if type(block_size) is not int:
        raise TypeError(
            f"block_sparse: block_size must be an int, but got {block_size!r}. It is "
            "static; only the layout may be data."
        )
    if block_size < 1:
        raise ValueError(
            f"block_sparse: block_size must be 1 or more, but got {block_size}. It "
            "counts the positions in a block."
        )
    return BlockSparse(layout if layout.ndim == 3 else layout[None], block_size)
