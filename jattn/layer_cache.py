"""The cache that Flax's attention layers keep themselves: slots, and an index."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jattn.core.arguments import known
from jattn.core.rules import Mask
from jattn.layer import key_positions_of


def places_of(
    caller: str,
    start: jax.Array | None,
    inputs_q: jax.Array,
    inputs_k: jax.Array | None,
    query_positions: Any,
    key_positions: Any,
) -> tuple[Any, Any]:
    """Where queries and keys stand: those of a cache, if `start` is given, count on."""
    if start is None:
        keys = key_positions_of(inputs_q, inputs_k, query_positions, key_positions)
        return query_positions, keys
    place = place_after(caller, start, inputs_q, inputs_k, query_positions)
    return place, place


def place_after(
    caller: str,
    start: jax.Array,
    inputs_q: jax.Array,
    inputs_k: jax.Array | None,
    given: Any = None,
) -> Any:
    """Where T new tokens of a cache stand: by default they count on.

    Args:
        caller: the class that an error names.
        start: how many tokens there are: (), or (B, 1).
        inputs_q: (*B, T, _).
        inputs_k: (*B, T, _), if given.
        given: positions that were given.

    Returns:
        `given`, or (T,), or (B, T), as `start`.

    Raises:
        ValueError: positions are a name, keys are not of the queries' tokens, or the
            cache is of another batch.
    """
    num_tokens = inputs_q.shape[-2]
    if start.ndim and inputs_q.shape[:-2] != start.shape[:1]:
        raise ValueError(
            f"{caller}: with a cache of B rows inputs_q must be (B, T, _), but got "
            f"B={start.shape[0]}, inputs_q {inputs_q.shape}. Make a cache for this "
            "batch."
        )
    if inputs_k is not None and inputs_k.shape[-2:-1] != (num_tokens,):
        raise ValueError(
            f"{caller}: with a cache inputs_k must be of the T tokens of inputs_q, but "
            f"got inputs_q {inputs_q.shape}, inputs_k {inputs_k.shape}. Leave out the "
            "cache to attend to other tokens."
        )
    if isinstance(given, str):
        raise ValueError(
            f"{caller}: with a cache query_positions must be integers, but got "
            f"{given!r}. Leave them out to count on."
        )
    if given is not None:
        return given
    steps = np.arange(num_tokens, dtype=np.int32)
    return start + steps.reshape((1,) * (start.ndim - 1) + (-1,))


def written(
    caller: str,
    cached_key: jax.Array,
    cached_value: jax.Array,
    index: jax.Array,
    key: jax.Array,
    value: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The cache of Flax's modules with T more tokens, at `index` and after.

    Args:
        caller: the class that an error names.
        cached_key: (*B, S, K, H).
        cached_value: (*B, S, K, D).
        index: (), how many tokens it holds.
        key: (*B, T, K, H), cast to the dtype of the cache.
        value: (*B, T, K, D), likewise.

    Returns:
        Keys and values of all slots, and those of the T tokens, (T,).

    Raises:
        ValueError: the shapes do not fit, or it is known that there are too few slots.
            Where that is not known, what does not fit is not written.
    """
    *batch, capacity, num_heads, head_dim = cached_key.shape
    num_tokens = key.shape[-3]
    want = (*batch, num_tokens, num_heads, head_dim)
    if key.shape != want or value.shape[:-1] != want[:-1]:
        raise ValueError(
            f"{caller}: while decoding keys and values must have the *B and K of the "
            f"cache, here {want}, but got {key.shape}, {value.shape}. Make a cache "
            "for this batch."
        )
    held = known(index)
    if (0 if held is None else held) + num_tokens > capacity:
        filled = "" if held is None else f", index={held}"
        raise ValueError(
            f"{caller}: the cache must have a slot for every token, but got {capacity} "
            f"slots, {num_tokens} tokens{filled}. Make a longer one."
        )
    slots = index + np.arange(num_tokens, dtype=np.int32)

    def put(cached: jax.Array, new: jax.Array) -> jax.Array:
        new = new.astype(cached.dtype)
        return cached.at[..., slots, :, :].set(new, mode="drop", unique_indices=True)

    return put(cached_key, key), put(cached_value, value), slots


def token_mask(
    caller: str, mask: Any, slots: jax.Array, query: jax.Array, key: jax.Array
) -> Any:
    """An array that allows each token the slots up to its own, and what `mask` allows.

    For functions that know of arrays only.

    Args:
        caller: the class that an error names.
        mask: (*B, N, T, S), each axis full or 1, or None.
        slots: of the tokens, (T,).
        query: (*B, T, N, H).
        key: (*B, S, K, H).

    Raises:
        TypeError: the mask is a rule.
    """
    if isinstance(mask, Mask):
        raise TypeError(
            f"{caller}: while decoding with an attention_fn that takes no "
            f"query_positions mask must be an array, but got {mask}. Rules need "
            "jattn.attention, the default."
        )
    seen = jnp.arange(key.shape[-3])[None, :] <= slots[:, None]
    seen = jnp.broadcast_to(seen, (*query.shape[:-3], 1, *seen.shape))
    return seen if mask is None else jnp.logical_and(mask, seen)


def nan_beyond(out: jax.Array, slots: jax.Array, capacity: int) -> jax.Array:
    """Outputs (*B, T, N, D), NaN for the tokens whose slot, of (T,), does not exist."""
    beyond = (slots >= capacity).reshape((1,) * (out.ndim - 3) + (-1, 1, 1))
    return jnp.where(beyond, jnp.nan, out)
