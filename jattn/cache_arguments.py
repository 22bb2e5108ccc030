"""The arguments of a cache's methods, checked before anything is stored."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import checkify

from jattn.core.arguments import array_of, is_known
from jattn.core.boundary import check_floating
from jattn.dispatch import attention


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


def counts_of(caller: str, lengths: Any, batch: int, t: int) -> jax.Array:
    """How many of t tokens count, (B,)."""
    if lengths is None:
        return jnp.full(batch, t, jnp.int32)
    lengths = array_of(caller, "lengths", lengths, np.integer)
    if lengths.shape != (batch,):
        raise ValueError(
            f"{caller}: lengths must be (B,), here ({batch},), but got "
            f"{lengths.shape}. Give one for each row."
        )
    if is_known(lengths) and batch:
        least, most = int(lengths.min()), int(lengths.max())
        if least < 0 or most > t:
            raise ValueError(
                f"{caller}: lengths must be from 0 to t, but got {least} to {most} "
                f"with {t=}. They say how many of the t tokens count."
            )
    return jnp.clip(lengths, 0, t).astype(jnp.int32)


def check_overflow(
    caller: str, length: jax.Array, counts: jax.Array, capacity: int
) -> None:
    """Raises if tokens are known not to fit; under `checkify` a check does."""
    fits = length + counts <= capacity
    checkify.debug_check(
        fits.all(), f"{caller}: more tokens than slots, with {capacity=}"
    )
    if is_known(fits) and not fits.all():
        raise ValueError(
            f"{caller}: there must be a slot for every token, length + t <= capacity, "
            f"but got length={int(length.max())}, t={int(counts.max())}, {capacity=}. "
            "Make the cache larger, or give it a window."
        )


def options_of(caller: str, given: dict[str, Any]) -> dict[str, Any]:
    """All options of `attention`, of those that have a meaning here."""
    defaults = attention.__kwdefaults__ or {}
    for name in given:
        if name not in defaults or name == "key_positions":
            raise TypeError(
                f"{caller}: options must be those of attention, but not "
                f"key_positions, which are stored; but got {name!r}. Positions are "
                "given to append."
            )
    if given.get("empty_rows", "zero") != "zero":
        raise ValueError(
            f"{caller}: empty_rows must be 'zero', but got "
            f"{given['empty_rows']!r}. Slots that are not written have no mean."
        )
    return defaults | given
