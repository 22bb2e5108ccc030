"""Arrays inside `jax.shard_map`, whose types say where devices differ in them."""

import functools
from typing import Any

import jax
import jax.numpy as jnp


def varying(start: Any, like: Any) -> Any:
    """Arrays, marked as different on the devices where any array of `like` is.

    A loop must keep the types of what it carries, and the gradient of an array that is
    the same everywhere is summed over the devices where it was marked. A sum has the
    marks of all its terms; its value is not used.
    """
    terms = (jnp.sum(x, dtype=jnp.float32) for x in jax.tree.leaves(like))
    mark = functools.reduce(jnp.add, terms)
    return jax.tree.map(lambda x: x + jnp.zeros_like(mark, x.dtype, x.shape), start)


def alike(arrays: Any) -> Any:
    """Arrays, each marked where any of them is; as they are outside `jax.shard_map`."""
    if jax.sharding.get_abstract_mesh().empty:
        return arrays
    return varying(arrays, arrays)
