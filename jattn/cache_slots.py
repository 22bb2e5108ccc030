"""Writing to the slots of a cache, in place."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def put(
    begin: jax.Array, end: jax.Array, stored: jax.Array, new: jax.Array, axis: int
) -> jax.Array:
    """`stored` with the tokens from `begin` to `end` of each row in their slots.

    Token n of a row stands in slot n % S.

    Args:
        begin: (B,), which token of its row the first new one is.
        end: (B,), the one before which they end.
        stored: (B, ..., S, ...), with the slots along `axis`.
        new: (B, t, ...), `end - begin` of t at most.
        axis: of the slots.
    """
    batch, capacity = begin.shape[0], stored.shape[axis]
    new = new[:, :capacity]
    if batch * new.shape[1] == 1 < capacity:
        # XLA would make the write a part of what reads it, and copy the cache.
        new = jnp.pad(new, [(0, 0), (0, 1)] + [(0, 0)] * (new.ndim - 2))
    token = begin[:, None] + np.arange(new.shape[1], dtype=np.int32)[None, :]
    kept = (token < end[:, None]).reshape(*token.shape, *(1,) * (new.ndim - 2))
    # What is left out writes back what its slot holds, so that all slots exist.
    between = (slice(None),) * (axis - 1)
    slots = stored.at[(np.arange(batch)[:, None], *between, token % capacity)]
    how: Any = dict(mode="promise_in_bounds", unique_indices=True)
    return slots.set(jnp.where(kept, new, slots.get(**how)), **how)
