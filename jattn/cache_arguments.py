"""The arguments of a cache's methods, checked before anything is stored."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import checkify

from jattn.core.arguments import array_of, is_known, known
from jattn.core.boundary import FLOATS, check_floating
from jattn.core.rules import Mask
from jattn.dispatch import attention
from jattn.masks.by_array import Lengths


def check_tokens(
    caller: str, key: Any, value: Any, key_t: jax.Array, stored: jax.Array
) -> None:
    """Raises unless keys (B, t, K, H) and values (B, t, K, D) fit those stored."""
    batch, K, H, _ = key_t.shape
    for name, x, size in (
        ("key", key, H),
        ("value", value, stored.shape[-1]),
    ):
        check_floating(caller, name, x)
        if x.ndim != 4 or (x.shape[0], *x.shape[2:]) != (batch, K, size):
            letter = "H" if name == "key" else "D"
            raise ValueError(
                f"{caller}: {name} must be (B, t, K, {letter}), here "
                f"({batch}, t, {K}, {size}), but got {x.shape}. Make a cache of "
                "these sizes with KVCache.init."
            )
    if value.shape[1] != key.shape[1]:
        raise ValueError(
            f"{caller}: key and value must have the same number t of tokens, but "
            f"got key {key.shape}, value {value.shape}. Append both together."
        )


def check_window(caller: str, window: int | None, t: int, capacity: int) -> None:
    """Raises unless the first of t new tokens still has its window after the last."""
    if window is not None and window + t - 1 > capacity:
        raise ValueError(
            f"{caller}: t tokens at once need window + t - 1 slots, but got {window=}, "
            f"{t=}, {capacity=}. Append at most {capacity - window + 1} at once, or "
            "make the cache larger."
        )


def counts_of(
    caller: str, lengths: Any, batch: int, t: int
) -> tuple[jax.Array, jax.Array]:
    """How many of t tokens count, (B,), and where a wrong number was given, (B,).

    Raises if it is known that one is wrong; under `checkify` a check does.
    """
    if lengths is None:
        return jnp.full(batch, t, jnp.int32), jnp.zeros(batch, jnp.bool_)
    lengths = array_of(caller, "lengths", lengths, np.integer)
    if lengths.shape != (batch,):
        raise ValueError(
            f"{caller}: lengths must be (B,), here ({batch},), but got "
            f"{lengths.shape}. Give one for each row."
        )
    given = known(lengths)
    if given is not None and batch:
        least, most = given.min(), given.max()
        if least < 0 or most > t:
            raise ValueError(
                f"{caller}: lengths must be from 0 to t, but got {least} to {most} "
                f"with {t=}. They say how many of the t tokens count."
            )
    counts = jnp.clip(lengths, 0, t)
    right = counts == lengths
    checkify.debug_check(right.all(), f"{caller}: lengths are not from 0 to {t=}")
    return counts.astype(jnp.int32), ~right


def check_overflow(
    caller: str, length: jax.Array, counts: jax.Array, capacity: int
) -> None:
    """Raises if tokens are known not to fit; under `checkify` a check does."""
    fits = length + counts <= capacity
    checkify.debug_check(
        fits.all(), f"{caller}: more tokens than slots, with {capacity=}"
    )
    if is_known(fits) and not fits.all():
        row = int(jnp.argmin(fits))
        raise ValueError(
            f"{caller}: there must be a slot for every token, length + t <= capacity, "
            f"but got length={int(length[row])}, t={int(counts[row])} in {row=}, with "
            f"{capacity=}. Make the cache larger, or give it a window."
        )


def options_of(caller: str, given: dict[str, Any]) -> dict[str, Any]:
    """All options of `attention`, of those that have a meaning here."""
    defaults = attention.__kwdefaults__ or {}
    for name in given:
        if name == "key_positions":
            raise TypeError(
                f"{caller}: key_positions are those of the cache, but got some. Give "
                "positions to append."
            )
        if name not in defaults:
            raise TypeError(
                f"{caller}: options must be those of attention, but got {name!r}. See "
                "help(jattn.attention)."
            )
    if isinstance(given.get("query_positions"), str):
        raise TypeError(
            f"{caller}: query_positions must be integers, but got "
            f"{given['query_positions']!r}. Leave them out: the cache knows where its "
            "last tokens stand."
        )
    if given.get("empty_rows", "zero") != "zero":
        raise ValueError(
            f"{caller}: empty_rows must be 'zero', but got "
            f"{given['empty_rows']!r}. Slots that are not written have no mean."
        )
    return defaults | given


def check_places(caller: str, mask: Mask | None, window: int | None) -> None:
    """Raises if a rule counts keys, in a cache where they change their places."""
    counting = isinstance(mask, Mask) and any(
        isinstance(rule, Lengths) for rule in mask.walk()
    )
    if counting and window is not None:
        raise ValueError(
            f"{caller}: lengths counts slots, which a cache with a window uses again, "
            f"but got {mask} with {window=}. Use masks.prefix, which counts positions."
        )


def dtype_of(caller: str, given: Any) -> np.dtype:
    """The dtype that is stored.

    Raises:
        TypeError: it is none, not floating point, or not enabled.
    """
    try:
        dtype = None if given is None else jnp.dtype(given)
    except TypeError:
        dtype = None
    if dtype is None:
        raise TypeError(
            f"{caller}: dtype must be floating point ({', '.join(FLOATS)}), but got "
            f"{given!r}. Give that of the keys."
        )
    check_floating(caller, "dtype", jax.ShapeDtypeStruct((), dtype))
    if jax.dtypes.canonicalize_dtype(dtype) != dtype:
        raise TypeError(
            f"{caller}: dtype must be enabled, but got {dtype} without jax_enable_x64. "
            "Enable that, or use float32."
        )
    return dtype
