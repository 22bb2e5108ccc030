"""From the options of a call to its spec: which algorithm, in which tiles."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from jattn.algorithms import decode
from jattn.algorithms.block_sizes import default_block_sizes
from jattn.core.arguments import int_of
from jattn.core.boundary import Sizes, one_of
from jattn.core.spec import AttentionSpec
from jattn.core.tile import Pairs
from jattn.prepare import Call, check_dropout, prepare

EMPTY_ROWS = ("zero", "mean")

ONE_TILE = 256
"""Up to this many queries and keys, one tile is all there is: `reference`."""

FEW = 64
"""Up to this many rows of queries, those of all heads of a key head, `decode`."""

MANY = 512
"""So many rows stand in one tile of `decode`; further ones come one tile later."""


class Choice(NamedTuple):
    """An algorithm, and why it and none of the others.

    Attributes:
        implementation: its name.
        block_sizes: (queries, keys) of a tile.
        reasons: for every algorithm, why it was taken or not.
    """

    implementation: str
    block_sizes: tuple[int, int]
    reasons: dict[str, str]


def _reference(call: Call, block_sizes: Any) -> tuple[bool, str]:
    if block_sizes is not None:
        return False, f"block sizes are given, {block_sizes}, and whole rows have none"
    shown = f"T={call.sizes.T} and S={call.sizes.S}"
    if max(call.sizes.T, call.sizes.S) > ONE_TILE:
        return False, f"{shown} are more than one tile of {ONE_TILE} x {ONE_TILE}"
    return True, f"{shown} fit one tile of {ONE_TILE} x {ONE_TILE}"


def _decode(call: Call, block_sizes: Any) -> tuple[bool, str]:
    if block_sizes is not None:
        return False, f"block sizes are given, {block_sizes}, and its queries have none"
    T, S, N, K = (getattr(call.sizes, letter) for letter in "TSNK")
    shown = f"T={T} with N // K = {N // max(K, 1)}"
    if rows_of(call.sizes) > FEW:
        return False, f"{shown} are more than {FEW} rows of queries for a key head"
    return True, f"{shown} are few rows of queries for S={S} keys, which are split"


def rows_of(sizes: Sizes) -> int:
    """T G: how many queries read a key head."""
    return sizes.T * (sizes.N // max(sizes.K, 1))


def _blockwise(call: Call, block_sizes: Any) -> tuple[bool, str]:
    return True, "it takes any lengths, in memory that grows like T + S"


ACCEPTS: dict[str, Callable[[Call, Any], tuple[bool, str]]] = {
    "reference": _reference,
    "decode": _decode,
    "blockwise": _blockwise,
}
"""Whether each takes a call that names none, and why; the first that does is chosen."""


def choose(call: Call, implementation: str | None, block_sizes: Any) -> Choice:
    """The algorithm of a call.

    Raises:
        ValueError: there is no such algorithm, or block sizes do not fit it.
    """
    if implementation is not None:
        one_of(call.caller, "implementation", implementation, tuple(ACCEPTS))
    if block_sizes is not None and implementation == "reference":
        raise ValueError(
            f"{call.caller}: implementation='reference' has no tiles, but got "
            f"{block_sizes=}. Leave one of them out."
        )
    chosen, reasons = implementation, {}
    for name, accepts in ACCEPTS.items():
        if implementation is not None:
            asked = "" if name == implementation else "not "
            reasons[name] = f"{asked}asked for: {implementation=}"
        elif chosen is not None:
            reasons[name] = f"{chosen} comes first"
        else:
            taken, reasons[name] = accepts(call, block_sizes)
            chosen = name if taken else None
    assert chosen is not None  # blockwise takes every call
    blocks = block_sizes_of(call, block_sizes)
    if chosen == "decode":
        block_k = blocks[1] if block_sizes else decode.block_keys(_backend(call))
        most = max(MANY * call.sizes.T // max(rows_of(call.sizes), 1), 1)
        blocks = max(min(call.sizes.T, most), 1), block_k
    return Choice(chosen, blocks, reasons)


def block_sizes_of(call: Call, given: Any) -> tuple[int, int]:
    """The block sizes (queries, keys) of a tile, by default those of the backend.

    Raises:
        ValueError: they are not two positive ints.
    """
    if given is None:
        groups = max(call.sizes.N // max(call.sizes.K, 1), 1)
        return default_block_sizes(_backend(call), groups)
    pair = tuple(map(int_of, given)) if isinstance(given, (tuple, list)) else ()
    if len(pair) != 2 or any(type(n) is not int or n < 1 for n in pair):
        raise ValueError(
            f"{call.caller}: block_sizes must be two positive ints (queries, keys), "
            f"but got {given!r}. jattn.tune finds good ones."
        )
    return pair


def _backend(call: Call) -> str:
    return call.backend or jax.default_backend()


def empty_rows_of(call: Call, empty_rows: str, sinks: Any) -> str:
    """What a query without keys gets.

    Raises:
        ValueError: there is no such option, or no such query.
    """
    if empty_rows == "mean" and sinks is not None:
        raise ValueError(
            f"{call.caller}: with sinks every query sees something, but got sinks and "
            "empty_rows='mean'. Leave one of them out."
        )
    return one_of(call.caller, "empty_rows", empty_rows, EMPTY_ROWS)


def arrange(
    call: Call,
    dtype: Any,
    *,
    sinks: Any,
    implementation: Any,
    block_sizes: Any,
    empty_rows: str,
    precision: Any,
    return_lse: bool,
    stats: bool,
    dropout_rate: Any,
    dropout_rng: Any,
    **rules: Any,
) -> tuple[Pairs, AttentionSpec, dict[str, str]]:
    """What all arguments of `attention` but the vectors come to.

    Returns:
        The rules, what is static, and for every algorithm why it was taken or not.

    Raises:
        ValueError: options do not fit.
        TypeError: an option is of the wrong kind.
    """
    for name, flag in (("return_lse", return_lse), ("stats", stats)):
        if not isinstance(flag, (bool, np.bool_)):
            raise TypeError(
                f"{call.caller}: {name} must be True or False, but got {flag!r}. It "
                "decides what is returned, so it is static."
            )
    if return_lse and stats:
        raise ValueError(
            f"{call.caller}: return_lse and stats must not both be True, but got both. "
            "Stats holds lse too."
        )
    pairs, align = prepare(call, sinks=sinks, **rules)
    choice = choose(call, implementation, block_sizes)
    spec = AttentionSpec(
        implementation=choice.implementation,
        dtype=str(dtype),
        block_sizes=choice.block_sizes,
        adapt_blocks=block_sizes is None and choice.implementation != "decode",
        empty_rows=empty_rows_of(call, empty_rows, sinks),
        align=align,
        precision=precision,
        stats=bool(stats),
        dropout_rate=check_dropout(call, dropout_rate, dropout_rng),
    )
    return pairs, spec, choice.reasons
