"""From the arguments of a call to the rules that the algorithms take."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jattn.core.arguments import array_of
from jattn.core.boundary import (
    Sizes,
    check_positions,
    check_rule,
    one_of,
    positions_beside,
    unplaced,
)
from jattn.core.rules import Array, Mask, Score, as_array
from jattn.core.tile import Pairs
from jattn.masks import Dense
from jattn.scores import Additive


class Call(NamedTuple):
    """Who was called, with arrays of which sizes."""

    caller: str
    sizes: Sizes


def prepare(
    call: Call,
    *,
    mask: Any,
    score: Any,
    bias: Any,
    scale: Any,
    query_positions: Any,
    key_positions: Any,
) -> tuple[Pairs, str]:
    """The checked rules of a call, and where its queries stand if that is static."""
    caller, sizes = call
    if mask is not None and not isinstance(mask, Mask):
        mask = Dense(_array(caller, "mask", mask, np.bool_))
    scores = () if score is None else score if isinstance(score, tuple) else (score,)
    for rule in scores:
        if not isinstance(rule, Score):
            raise TypeError(
                f"{caller}: score must be a rule of jattn.scores or a tuple of them, "
                f"but got {type(rule).__name__}. A function becomes one by "
                "jattn.scores.rule(fn)."
            )
    for i, rule in enumerate(scores):
        check_rule(caller, f"score[{i}]", rule, sizes)
    if bias is not None:
        bias = Additive(_array(caller, "bias", bias, np.floating))
        scores = (*scores, bias)
    check_rule(caller, "mask", mask, sizes)
    check_rule(caller, "bias", bias, sizes)
    pairs = Pairs(check_scale(call, scale), scores, mask)
    return _with_positions(call, pairs, query_positions, key_positions)


def _with_positions(
    call: Call, pairs: Pairs, query_positions: Any, key_positions: Any
) -> tuple[Pairs, str]:
    """Adds positions that are data; those that are static are named."""
    caller, sizes = call
    align = "start"
    if key_positions is not None:
        k_pos = check_positions(caller, "key_positions", key_positions, "S", sizes)
        pairs = dataclasses.replace(pairs, k_pos=k_pos)
    if query_positions is None:
        if sizes.T != sizes.S and any(rule.positional for rule in pairs.walk()):
            raise unplaced(caller, "a rule that uses positions", sizes.T, sizes.S)
    elif isinstance(query_positions, str):
        align = one_of(caller, "query_positions", query_positions, ("start", "end"))
    else:
        q_pos = check_positions(caller, "query_positions", query_positions, "T", sizes)
        pairs = dataclasses.replace(pairs, q_pos=q_pos)
    if pairs.k_pos is not None and pairs.q_pos is None:
        q_pos = positions_beside(caller, pairs.k_pos, sizes.T, sizes.S, align)
        pairs = dataclasses.replace(pairs, q_pos=q_pos)
    return pairs, align


def check_scale(call: Call, scale: Any) -> Array | None:
    """The scale as an array, so that another value is other data and no new trace.

    Raises:
        TypeError: it is not made of numbers.
        ValueError: its shape is neither () nor (1,) nor (N,).
    """
    if scale is None:
        return None
    array = as_array(scale)
    kinds = (jnp.floating, jnp.integer)
    if not any(jnp.issubdtype(array.dtype, kind) for kind in kinds):
        raise TypeError(
            f"{call.caller}: scale must be a number or an array of numbers, but got "
            f"{array.dtype}. Cast it, or leave it out for 1/sqrt(H)."
        )
    if array.shape not in ((), (1,), (call.sizes.N,)):
        raise ValueError(
            f"{call.caller}: scale must be a number or (N,), but got shape "
            f"{array.shape} with N={call.sizes.N}. Give one for each query head."
        )
    return array if isinstance(array, jax.Array) else array.astype(np.float64)


def _array(caller: str, name: str, value: Any, kind: type) -> Array:
    if isinstance(value, (jax.Array, np.ndarray)):
        return array_of(caller, name, value, kind)
    rule = " or a rule of jattn.masks" if name == "mask" else ""
    is_function = name == "mask" and callable(value) and not isinstance(value, Score)
    cure = " A function becomes one by jattn.masks.rule(fn)." if is_function else ""
    raise TypeError(
        f"{caller}: {name} must be an array{rule}, but got "
        f"{type(value).__name__}.{cure}"
    )
