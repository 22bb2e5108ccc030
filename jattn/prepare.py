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
from jattn.core.dropout import Shared
from jattn.core.rules import Array, Mask, Score, as_array
from jattn.core.tile import Pairs
from jattn.masks.by_array import Dense
from jattn.scores.by_value import Additive


class Call(NamedTuple):
    """Who was called, with arrays of which sizes, for which backend.

    None is that of the process.
    """

    caller: str
    sizes: Sizes
    backend: str | None = None


def prepare(
    call: Call,
    *,
    mask: Any = None,
    score: Any = None,
    bias: Any = None,
    scale: Any = None,
    sinks: Any = None,
    query_positions: Any = None,
    key_positions: Any = None,
) -> tuple[Pairs, str]:
    """The checked rules of a call, and where its queries stand if that is static."""
    caller, sizes, _ = call
    mask = rule_of(caller, mask)
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
    pairs = Pairs(per_head(call, "scale", scale), scores, mask)
    pairs = dataclasses.replace(pairs, sink=per_head(call, "sinks", sinks))
    return _with_positions(call, pairs, query_positions, key_positions)


def rule_of(caller: str, mask: Any) -> Mask | None:
    """The rule that a mask is, if there is one: an array allows what it holds.

    Raises:
        TypeError: it is neither a rule nor a Boolean array.
    """
    if mask is None or isinstance(mask, Mask):
        return mask
    return Dense(_array(caller, "mask", mask, np.bool_))


def _with_positions(
    call: Call, pairs: Pairs, query_positions: Any, key_positions: Any
) -> tuple[Pairs, str]:
    """Adds positions that are data; those that are static are named."""
    caller, sizes, _ = call
    align = "start"
    if key_positions is not None:
        k_pos = check_positions(caller, "key_positions", key_positions, "S", sizes)
        pairs = dataclasses.replace(pairs, k_pos=k_pos)
    if query_positions is None:
        if not any(rule.positional for rule in pairs.walk()):
            return dataclasses.replace(pairs, k_pos=None), align
        if sizes.T != sizes.S:
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


def per_head(call: Call, name: str, given: Any) -> Array | None:
    """A number or one for each head, as an array: another value is no new trace.

    Raises:
        TypeError: it is not made of numbers.
        ValueError: its shape is neither () nor (1,) nor (N,).
    """
    if given is None:
        return None
    array = as_array(given)
    kinds = (jnp.floating, jnp.integer)
    if not any(jnp.issubdtype(array.dtype, kind) for kind in kinds):
        raise TypeError(
            f"{call.caller}: {name} must be a number or an array of numbers, but got "
            f"{array.dtype}. Cast it, or leave it out for "
            f"{'1/sqrt(H)' if name == 'scale' else 'none'}."
        )
    if array.shape not in ((), (1,), (call.sizes.N,)):
        raise ValueError(
            f"{call.caller}: {name} must be a number or (N,), but got shape "
            f"{array.shape} with N={call.sizes.N}. Give one for each query head."
        )
    return array if isinstance(array, jax.Array) else array.astype(np.float64)


def check_rate(caller: str, rate: Any) -> float:
    """The rate of dropout, a number in [0, 1).

    Raises:
        TypeError: it is no Python number.
        ValueError: it is not in [0, 1).
    """
    if not isinstance(rate, (int, float, np.number)) or isinstance(rate, bool):
        raise TypeError(
            f"{caller}: dropout_rate must be a number, but got {type(rate).__name__}. "
            "It is static: a traced rate cannot be used."
        )
    if not 0 <= rate < 1:
        raise ValueError(
            f"{caller}: dropout_rate must be in [0, 1), but got {rate}. It is the "
            "share of weights that are dropped."
        )
    return float(rate)


def check_dropout(call: Call, rate: Any, rng: Any) -> float:
    """The rate of dropout, for which there is a key if it is not 0.

    Raises:
        TypeError: the rate is no Python number, or the key is no key.
        ValueError: the rate is not in [0, 1), the key is missing, or there are several.
    """
    rate = check_rate(call.caller, rate)
    if isinstance(rng, Shared):
        rng = rng.rng
    if rng is None:
        if rate:
            raise ValueError(
                f"{call.caller}: dropout needs dropout_rng, but got "
                f"dropout_rate={rate} and dropout_rng=None. Give jax.random.key(seed), "
                "or a rate of 0."
            )
        return rate
    dtype = getattr(rng, "dtype", None)
    is_key = dtype is not None and jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key)
    if not is_key and dtype != np.uint32:
        raise TypeError(
            f"{call.caller}: dropout_rng must be a key of jax.random, but got "
            f"{type(rng).__name__}{'' if dtype is None else f' of {dtype}'}. Make one "
            "with jax.random.key(seed)."
        )
    if is_key and rng.shape == ():  # the usual case, in which nothing is traced
        return rate
    raw = jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0))).shape
    if is_key or rng.shape != raw:
        raise ValueError(
            f"{call.caller}: dropout_rng must be one key, of shape () from "
            f"jax.random.key or {raw} from jax.random.PRNGKey, but got {rng.dtype} of "
            f"shape {rng.shape}. Heads and batch rows get patterns of their own from "
            "it; jax.random.wrap_key_data makes a key of another kind."
        )
    return rate


def _array(caller: str, name: str, value: Any, kind: type) -> Array:
    if isinstance(value, (jax.Array, np.ndarray)):
        return array_of(caller, name, value, kind)
    rule = " or a rule of jattn.masks" if name == "mask" else ""
    cure = " Convert a list with numpy.asarray." if np.iterable(value) else ""
    if name == "mask" and callable(value) and not isinstance(value, Score):
        cure = " A function becomes one by jattn.masks.rule(fn)."
    raise TypeError(
        f"{caller}: {name} must be an array{rule}, but got "
        f"{type(value).__name__}.{cure}"
    )
