"""What a call of the attention module does between its projections."""

import inspect
import warnings
from typing import Any

import flax.linen as nn
import jax

from jattn import layer_cache, layer_call
from jattn.core.arguments import check_callable
from jattn.core.softmax import accumulator
from jattn.layer import flags, module_mask
from jattn.prepare import check_rate

CALLER = "MultiHeadDotProductAttention"

OF_PROJECTIONS = ("dtype", "precision")
"""What an attention_fn need not name: the vectors that it gets were made with these."""

OF_ROPE = ("query_positions", "key_positions")
"""And with these, if there is a rope."""

OF_DROPOUT = ("dropout_rate", "dropout_rng", "broadcast_dropout", "deterministic")
"""And these, without dropout."""


def check_fields(module: Any) -> None:
    """Checks those fields that the parts of the module do not.

    Raises:
        ValueError: the rate of dropout is not one.
        TypeError: a function is none.
        NotImplementedError: there is an einsum for `jattn.attention`.
    """
    check_rate(CALLER, module.dropout_rate)
    flags(CALLER, sinks=module.sinks)
    for name in ("rope", "attention_fn"):
        if getattr(module, name) is not None:
            check_callable(CALLER, name, getattr(module, name))
    for name in ("qk_attn_weights_einsum_cls", "attn_weights_value_einsum_cls"):
        if getattr(module, name) is not None and module.attention_fn is None:
            raise NotImplementedError(
                f"{CALLER}: {name} needs an attention_fn that makes its products with "
                "it, but got attention_fn=None, jattn.attention, which makes them tile "
                "by tile. Give attention_fn=flax.linen.dot_product_attention."
            )


def key_inputs(inputs_k: Any, inputs_v: Any, inputs_kv: Any) -> tuple[Any, Any]:
    """What keys and values are made of, None where that is the default.

    Raises:
        ValueError: it is given twice, or for values alone.
    """
    if inputs_kv is not None:
        if inputs_k is not None or inputs_v is not None:
            raise ValueError(
                f"{CALLER}: If either `inputs_k` or `inputs_v` is not None, "
                f"`inputs_kv` must be None, but got {inputs_kv.shape}. It stands for "
                "both of them."
            )
        warnings.warn(
            f"{CALLER}: The inputs_kv arg will be deprecated soon, by Flax. Give it as "
            "inputs_k.",
            DeprecationWarning,
            stacklevel=3,
        )
        return inputs_kv, None
    if inputs_v is None:
        return inputs_k, None
    if inputs_k is None:
        raise ValueError(
            f"{CALLER}: `inputs_k` cannot be None if `inputs_v` is not None, but got "
            f"inputs_v {inputs_v.shape} alone. Give what keys are made of too."
        )
    if inputs_v.shape[:-1] != inputs_k.shape[:-1]:
        warnings.warn(
            f"{CALLER}: inputs_v {inputs_v.shape} does not stand beside inputs_k "
            f"{inputs_k.shape}. If it is a mask, give it as mask=: since Flax 0.7.4 "
            f"the function signature of {CALLER}'s `__call__` method has changed.",
            DeprecationWarning,
            stacklevel=3,
        )
    return inputs_k, inputs_v


def dropout_key(module: Any, deterministic: bool | None, rng: Any) -> Any:
    """The key of dropout, or None to drop nothing."""
    if module.dropout_rate == 0:
        return None
    if nn.merge_param("deterministic", module.deterministic, deterministic):
        return None
    return module.make_rng("dropout") if rng is None else rng


def attend(
    module: Any,
    vectors: tuple[jax.Array, jax.Array, jax.Array],
    *,
    decode: bool,
    mask: Any,
    is_causal: bool,
    rng: Any,
    sow_weights: bool,
    stats: bool,
    cache: Any,
    **rules: Any,
) -> jax.Array:
    """The heads' outputs, (*B, T, N, D); NaN for a token the cache has no slot for.

    Args:
        module: whose attention it is.
        vectors: query, key and value; with `decode` those of all slots.
        decode: whether they are from the module's cache: positions are slots.
        mask: as in the call.
        is_causal: whether to allow what `jattn.masks.causal()` allows only.
        rng: the key of dropout; None drops nothing.
        sow_weights: whether to sow the weights.
        stats: whether to sow the statistics.
        cache: what to attend to in place of key and value.
        **rules: score, bias, scale, sinks, query_positions and key_positions.
    """
    slots = rules["query_positions"]
    options: dict[str, Any] = dict(
        dropout_rate=module.dropout_rate,
        dropout_rng=rng,
        broadcast_dropout=module.broadcast_dropout,
        precision=module.precision,
    )
    if module.attention_fn is not None:
        if decode and layer_call.knows_rules(module.attention_fn):
            mask = module_mask(mask, is_causal=True)
        elif decode:
            mask = layer_cache.token_mask(CALLER, mask, slots, *vectors[:2])
            rules["query_positions"] = None
        rules["is_causal"] = True if is_causal and not decode else None
        options |= {name: rule for name, rule in rules.items() if rule is not None}
        out = _call(module, vectors, sow_weights, mask=mask, **options)
    else:
        rules["mask"] = module_mask(mask, is_causal or decode)
        options |= dict(cache=cache, stats=stats, sow_weights=sow_weights, **rules)
        if module.force_fp32_for_softmax:
            options["weights_dtype"] = accumulator(vectors[0].dtype)
        out = layer_call.attend(CALLER, module, *vectors, **options)
    return layer_cache.nan_beyond(out, slots, vectors[1].shape[-3]) if decode else out


def _call(module: Any, vectors: Any, sow_weights: bool, **options: Any) -> jax.Array:
    """`module.attention_fn`, with those options that it names, as Linen finds them.

    Raises:
        TypeError: one that it does not name is neither None nor Flax's default.
    """
    qk, pv = module.qk_attn_weights_einsum_cls, module.attn_weights_value_einsum_cls
    options |= dict(
        deterministic=options["dropout_rng"] is None,
        dtype=module.dtype,
        force_fp32_for_softmax=module.force_fp32_for_softmax,
        qk_attn_weights_einsum=qk() if qk else None,
        attn_weights_value_einsum=pv() if pv else None,
    )
    named, flaxs = _named(module.attention_fn), _named(nn.dot_product_attention)
    unneeded = OF_PROJECTIONS + (OF_ROPE if module.rope is not None else ())
    if options["deterministic"]:
        unneeded += OF_DROPOUT
    lost = [
        name
        for name, option in options.items()
        if name not in (*named, *unneeded)
        and option is not None
        and option is not getattr(flaxs.get(name), "default", None)
    ]
    if lost:
        raise TypeError(
            f"{CALLER}: attention_fn must name the arguments that are to reach it, but "
            f"got {', '.join(lost)} for {module.attention_fn}. Linen passes nothing to "
            "**kwargs; jattn.attention_fn names all that this module has."
        )
    taken = {name: option for name, option in options.items() if name in named}
    if sow_weights:
        taken["module"] = module
    return module.attention_fn(*vectors, **taken)


def _named(fn: Any) -> Any:
    return inspect.signature(fn).parameters
