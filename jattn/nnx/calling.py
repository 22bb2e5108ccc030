"""What a call of the attention module does between its projections."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jattn import layer_cache, layer_call
from jattn.core.boundary import check_floating
from jattn.layer import module_mask, positive

CALLER = "MultiHeadAttention"


def init_cache(module: Any, shape: tuple[int, ...], dtype: Any) -> None:
    """Gives the module an empty cache for tokens (*B, S)."""
    positive(CALLER, **{"the number of slots": shape[-1] if shape else 0})
    check_floating(CALLER, "dtype", jax.ShapeDtypeStruct((), dtype))
    keys = (*shape, module.num_kv_heads, module.head_dim)
    values = (*shape, module.num_kv_heads, module.v_head_dim)
    module.cached_key = nnx.Cache(jnp.zeros(keys, dtype))
    module.cached_value = nnx.Cache(jnp.zeros(values, dtype))
    module.cache_index = nnx.Cache(jnp.zeros((), jnp.int32))


def num_cached(module: Any) -> jax.Array:
    """How many tokens the module's cache holds, ()."""
    if module.cache_index is None:
        raise ValueError(
            f"{CALLER}: decode=True needs a cache, but got none. Call "
            "init_cache((*B, number of slots, in_features)) first."
        )
    return module.cache_index[...]


def append(
    module: Any, key: jax.Array, value: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Puts T more tokens into the module's cache.

    Returns:
        Keys and values of all its slots, and in which ones the new tokens are, (T,).
    """
    index = module.cache_index[...]
    keys, values, slots = layer_cache.written(
        CALLER, module.cached_key[...], module.cached_value[...], index, key, value
    )
    module.cached_key[...] = keys
    module.cached_value[...] = values
    module.cache_index[...] = index + key.shape[-3]
    return keys, values, slots


def dropout_rng(module: Any, deterministic: bool | None, rngs: Any) -> Any:
    """The key of dropout, or None to drop nothing."""
    if module.dropout_rate == 0:
        return None
    deterministic = module.deterministic if deterministic is None else deterministic
    if deterministic is None:
        raise ValueError(
            f"{CALLER}: with dropout it must be known whether to drop, but got "
            f"dropout_rate={module.dropout_rate} and deterministic=None. Give it to "
            "the call or the constructor, or use module.train() and module.eval()."
        )
    if deterministic:
        return None
    rngs = module.rngs if rngs is None else rngs
    if isinstance(rngs, nnx.Rngs):
        rngs = rngs.dropout
    if isinstance(rngs, nnx.RngStream):
        return rngs()
    if rngs is None:
        raise ValueError(
            f"{CALLER}: dropout needs rngs, but got rngs=None and a module that keeps "
            "none (keep_rngs=False). Give rngs=nnx.Rngs(dropout=seed)."
        )
    raise TypeError(
        f"{CALLER}: rngs must be nnx.Rngs or nnx.RngStream, but got "
        f"{type(rngs).__name__}. Make one with nnx.Rngs(dropout=key)."
    )


def attend(
    module: Any,
    vectors: tuple[jax.Array, jax.Array, jax.Array],
    *,
    decode: bool,
    rng: Any,
    mask: Any,
    is_causal: bool,
    sow_weights: bool,
    stats: bool,
    cache: Any,
    input_positions: Any,
    **rules: Any,
) -> jax.Array:
    """The heads' outputs, (*B, T, N, D); NaN for a token the cache has no slot for.

    Args:
        module: whose attention it is.
        vectors: query, key and value; with `decode` those of all slots.
        decode: whether they are from the module's cache: positions are slots.
        rng: the key of dropout; None drops nothing.
        mask: as in the call, as are all that follow.
        is_causal: whether to allow what `jattn.masks.causal()` allows only.
        sow_weights: whether to sow the weights.
        stats: whether to sow the statistics.
        cache: what to attend to in place of key and value.
        input_positions: for a function that takes Flax's arguments.
        **rules: score, bias, scale, query_positions and key_positions.
    """
    if module.sinks is not None:
        rules["sinks"] = module.sinks[...]
    options: dict[str, Any] = dict(
        dropout_rate=module.dropout_rate,
        dropout_rng=rng,
        broadcast_dropout=module.broadcast_dropout,
        precision=module.precision,
    )
    slots = rules["query_positions"]
    if module.attention_fn is None:
        options |= dict(cache=cache, stats=stats, sow_weights=sow_weights, **rules)
        mask = module_mask(mask, is_causal or decode)
        out = layer_call.attend(CALLER, module, *vectors, mask=mask, **options)
    else:
        if input_positions is not None:
            rules |= dict(query_positions=None, key_positions=None)
            rules["input_positions"] = input_positions
        if decode and layer_call.knows_rules(module.attention_fn):
            mask = module_mask(mask, is_causal=True)
        elif decode:
            rules["query_positions"] = None
            mask = layer_cache.token_mask(CALLER, mask, slots, *vectors[:2])
        out = module.attention_fn(
            *vectors,
            mask=mask,
            deterministic=rng is None,
            dtype=module.dtype,
            module=module if sow_weights else None,
            is_causal=is_causal and not decode,
            **options,
            **{name: rule for name, rule in rules.items() if rule is not None},
        )
    return layer_cache.nan_beyond(out, slots, vectors[1].shape[-3]) if decode else out
