"""The tokens so far in Linen's collection "cache", under Flax's names.

cached_key (*B, S, K, H), cached_value (*B, S, K, D), and cache_index (), how many of
the S slots hold a token.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp

from jattn.layer_cache import written
from jattn.linen.calling import CALLER


def make(module: nn.Module, key: jax.Array, value: jax.Array) -> None:
    """Makes an empty cache, with a slot for each of these keys and values."""
    module.variable("cache", "cached_key", jnp.zeros_like, key)
    module.variable("cache", "cached_value", jnp.zeros_like, value)
    module.variable("cache", "cache_index", jnp.zeros, (), jnp.int32)


def num_cached(module: nn.Module) -> jax.Array:
    """How many tokens the cache holds, ().

    Raises:
        ValueError: the module has none.
    """
    if not module.has_variable("cache", "cache_index"):
        raise ValueError(
            f"{CALLER}: decode=True needs a cache, but got variables without the "
            "collection 'cache'. It comes from init(rng, inputs)['cache'], with a slot "
            "for each token of inputs, and goes to apply with mutable=['cache']."
        )
    return jnp.asarray(module.get_variable("cache", "cache_index"))


def append(
    module: nn.Module, key: jax.Array, value: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Puts T new keys and values into the cache.

    Returns:
        Those of all slots, and the slots of the new ones, (T,).
    """
    names = ("cached_key", "cached_value", "cache_index")
    keys, values, index = (module.get_variable("cache", name) for name in names)
    keys, values, slots = written(CALLER, keys, values, index, key, value)
    updated = keys, values, index + key.shape[-3]
    for name, x in zip(names, updated, strict=True):
        module.put_variable("cache", name, x)
    return keys, values, slots
