"""What a mask looks like, in text."""

import dataclasses
import math
from collections.abc import Iterable
from typing import Any

import jax
import numpy as np

from jattn.choice import block_sizes_of
from jattn.core.arguments import int_of, is_known, static_int
from jattn.core.boundary import Sizes
from jattn.core.letters import letters_of, sizes_along
from jattn.core.rules import Array, Mask
from jattn.core.spec import AttentionSpec
from jattn.core.tile import Pairs
from jattn.counting import tiles_of
from jattn.drawing import lines
from jattn.masks import everything
from jattn.prepare import Call, prepare, rule_of

MOST_TILES = 2**18
"""Larger tiles are counted where there would be more, so that it takes no second."""


def show(
    mask: Mask | Array | None,
    T: int,
    S: int | None = None,
    *,
    query_positions: Any = None,
    key_positions: Any = None,
    batch: int = 0,
    head: int = 0,
    block_sizes: tuple[int, int] | None = None,
) -> None:
    """Prints which query may look at which key, and how many tiles `attention` visits.

    A line for each query and a sign for each key: # may be looked at, a dot may not.
    Beyond 32 of either, each sign stands for a cell of pairs: # all of them, + some, a
    dot none. Beyond 2**20 pairs none is looked at: the mask judges cells as a whole, as
    `attention` has it judge tiles, and + may also mean that it does not know.

    Live tiles are those that are computed, for all batch rows and heads in one. In full
    ones no pair is forbidden. Where they are too many to count, larger ones are.

    Args:
        mask: what `attention` takes: a rule of `jattn.masks`, or a Boolean array
            (*B, N, T, S), each axis full or 1.
        T: how many queries.
        S: how many keys; by default T.
        query_positions: as in `attention`.
        key_positions: as in `attention`.
        batch: which batch row is shown, of a mask that has several, counted over all
            leading axes.
        head: which head, likewise.
        block_sizes: (queries, keys) of a tile; by default those that `attention` takes
            where each query head has a key head of its own.

    Raises:
        ValueError: an array does not fit T and S, there is no such batch row or head,
            or positions must be chosen.
        TypeError: the mask is of the wrong kind, or the call is traced.

    Example:
        >>> import jattn
        >>> streaming = jattn.masks.sliding_window(left=2) | jattn.masks.prefix(1)
        >>> show(jattn.masks.causal() & streaming, 8, block_sizes=(2, 2))
        causal() & (sliding_window(left=2) | prefix(1)), T=8, S=8
          0 1 2 3 4 5 6 7
        0 # . . . . . . .
        1 # # . . . . . .
        2 # # # . . . . .
        3 # # # # . . . .
        4 # . # # # . . .
        5 # . . # # # . .
        6 # . . . # # # .
        7 # . . . . # # #
        live tiles: 9 of 16 (56%), 0 full, at block sizes (2, 2)
    """
    T = static_int("show", "T", T, 0)
    S = T if S is None else static_int("show", "S", S, 0)
    mask = everything() if mask is None else rule_of("show", mask)
    positions = query_positions, key_positions
    if not all(map(is_known, jax.tree.leaves((mask, positions)))):
        raise TypeError(
            "show: it prints and must be called with arrays, but got traced ones, or "
            "shapes only. Call it outside jax.jit."
        )
    sizes = _sizes(mask, positions, T, S)
    call = Call("show", sizes)
    pairs, align = prepare(
        call, mask=mask, query_positions=query_positions, key_positions=key_positions
    )
    title = f"{mask}, {T=}, {S=}"
    num_rows = math.prod(sizes.batch)
    for name, index, size in (("batch", batch, num_rows), ("head", head, sizes.N)):
        if type(int_of(index)) is not int or not 0 <= index < size:
            raise ValueError(
                f"show: {name} must be an int below {size}, as the mask and the "
                f"positions have {size}, but got {index!r}. Count from 0."
            )
        title += f", {name}={index} of {size}" if size > 1 else ""
    spec = AttentionSpec(
        block_sizes=block_sizes_of(call, block_sizes),
        adapt_blocks=block_sizes is None,
        align=align,
    )
    one = _of_head(pairs, sizes, align, batch, head)
    print(title, *lines(one), _live_tiles(pairs, sizes, spec), sep="\n")


def _sizes(rule: Any, positions: tuple[Any, ...], T: int, S: int) -> Sizes:
    """Sizes for which the mask and the positions may have been made.

    What does not fit them is refused by `prepare`, with its name.
    """
    batches = [np.shape(x)[:-1] for x in positions]
    for array, letters in zip(jax.tree.leaves(rule), letters_of(rule), strict=True):
        shape = np.shape(array)
        if "B" in letters:
            batches.append(shape[: max(0, len(shape) - len(letters) + 1)])
    rank = max(map(len, batches))
    padded = [(1,) * (rank - len(x)) + x for x in batches]
    batch = tuple(map(_widest, zip(*padded, strict=True)))
    heads = max([1, *sizes_along(rule, "N")])
    return Sizes(batch, T, S, heads, heads, 1)


def _widest(sizes: Iterable[int]) -> int:
    return max(sizes, key=lambda n: (n != 1, n))


def _of_head(pairs: Pairs, sizes: Sizes, align: str, batch: int, head: int) -> Pairs:
    """The rules of one head, in numpy, and its positions."""
    bound = pairs.bind(sizes.T, sizes.S, sizes.N)
    row = np.unravel_index(batch, sizes.batch)

    def chosen(array: Any, letters: str) -> np.ndarray:
        array = np.asarray(array)
        if "B" in letters and array.ndim >= len(letters):
            places = zip(row, array.shape, strict=False)
            array = array[tuple(0 if n == 1 else i for i, n in places)]
        if "N" in letters and array.ndim:
            axis = letters.replace("B", "").index("N")
            array = array.take(0 if array.shape[axis] == 1 else head, axis)
        return array

    arrays, structure = jax.tree.flatten(bound)
    one = jax.tree.unflatten(structure, map(chosen, arrays, letters_of(bound)))
    return one.placed(sizes.T, sizes.S, align)


def _live_tiles(pairs: Pairs, sizes: Sizes, spec: AttentionSpec) -> str:
    """How many tiles are visited, by the plan that `attention` makes."""
    if 0 in (sizes.T, sizes.S):
        return "live tiles: none, as there are no pairs"
    (block_q, block_k), note = spec.block_sizes, ""
    while -(-sizes.T // block_q) * -(-sizes.S // block_k) > MOST_TILES:
        block_q, block_k = 2 * block_q, 2 * block_k
        note = f" instead of {spec.block_sizes}"
    if note:
        spec = dataclasses.replace(
            spec, block_sizes=(block_q, block_k), adapt_blocks=False
        )
    tiles = tiles_of(sizes, pairs, spec)
    assert tiles.live is not None  # nothing is traced
    return (
        f"live tiles: {tiles.live} of {tiles.total} ({tiles.live / tiles.total:.0%}), "
        f"{tiles.full} full, at block sizes {tiles.block_sizes}{note}"
    )
