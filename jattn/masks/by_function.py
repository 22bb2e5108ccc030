"""Masks that a function gives, and the two that are the same for every pair."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jattn.core.arguments import check_callable, tile_views, with_axes
from jattn.core.letters import leaves_from
from jattn.core.rules import EMPTY, FULL, PARTIAL, Array, Mask, Range


class CustomMask(Mask):
    """See `rule`."""

    fn: Callable[..., Any]
    arrays: tuple[Array, ...] = leaves_from("axes")
    axes: tuple[str, ...] = ()
    verdict_: Callable[..., Any] | None = None

    called = "rule"

    def allowed(self, q_pos: Array, k_pos: Array) -> Any:
        return self.fn(q_pos, k_pos, *tile_views(self.arrays, self.axes))

    def verdict(self, q_range: Range, k_range: Range) -> Any:
        if self.verdict_ is None:
            return PARTIAL
        views = tile_views(self.arrays, self.axes)
        return self.verdict_(q_range, k_range, *views)


def rule(
    fn: Callable[..., Any],
    *arrays: Array,
    axes: Sequence[str] | None = None,
    verdict: Callable[..., Any] | None = None,
) -> Mask:
    """Allows what a function of the positions allows.

    Args:
        fn: `fn(q_pos, k_pos, *arrays) -> bool`, elementwise over (T, 1) and (1, S).
            It is compiled, and the function itself is part of the cache's key: use the
            same one again, not a fresh lambda, and let it read what varies from
            `arrays` only.
        *arrays: what else it needs.
        axes: the letters of each array, of "BNTS" and in that order, with a dot for
            any other axis. An array with T or S reaches `fn` as the tile's part of it,
            T as (T, 1) and S as (1, S); B and N are mapped away; a dot is passed
            whole. By default "", which passes all of it whole.
        verdict: `verdict(q_range, k_range, *arrays) -> EMPTY, PARTIAL or FULL` for a
            tile, given the `Range` of its positions: elementwise, since `lo` and `hi`
            are integers or arrays with one for each tile, possibly traced. Write
            `jnp.where`, not `if`. Without it no tile is skipped.

    Raises:
        ValueError: `axes` does not name the axes of each array.

    Example:
        >>> import jattn
        >>> def so_far(q_pos, k_pos, distances):
        ...     return abs(q_pos - k_pos) == distances
        >>> per_head = rule(so_far, np.array([1, 2]), axes=["N"])
        >>> jattn.show(per_head, 5, head=1)
        rule(so_far, int32[2], axes=('N',)), T=5, S=5, head=1 of 2
          0 1 2 3 4
        0 . . # . .
        1 . . . # .
        2 # . . . #
        3 . # . . .
        4 . . # . .
        live tiles: 1 of 1 (100%), 0 full, at block sizes (5, 5)
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
    """Allows every pair: the identity of `&`.

    True

    Example:
        >>> import jattn
        >>> jattn.show(everything(), 3)
        everything(), T=3, S=3
          0 1 2
        0 # # #
        1 # # #
        2 # # #
        live tiles: 1 of 1 (100%), 1 full, at block sizes (3, 3)
    """
    return Everything()


class Nothing(Mask):
    """See `nothing`."""

    positional = False

    def allowed(self, q_pos: Array, k_pos: Array) -> Any:
        return np.False_

    def verdict(self, q_range: Range, k_range: Range) -> Any:
        return EMPTY


def nothing() -> Mask:
    """Allows no pair: the identity of `|`.

    False

    Example:
        >>> import jattn
        >>> jattn.show(nothing(), 3)
        nothing(), T=3, S=3
          0 1 2
        0 . . .
        1 . . .
        2 . . .
        live tiles: 0 of 1 (0%), 0 full, at block sizes (3, 3)
    """
    return Nothing()
