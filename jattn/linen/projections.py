"""The parameters of the attention module, under Flax's names, and what is made of them.

Linen finds the module that they belong to by itself: the one whose method is running.
"""

import functools
from typing import Any

import flax.linen as nn
import jax

from jattn import layer
from jattn.linen.calling import CALLER


def to_heads(
    module: Any, inputs_q: jax.Array, inputs_k: jax.Array, inputs_v: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Queries (*B, T, N, H), keys (*B, S, K, H), both normalised, values (*B, S, K, D).

    Raises:
        ValueError: the sizes of heads do not divide or contradict each other.
    """
    layer.check_width(CALLER, "inputs_q", inputs_q, inputs_q.shape[-1])
    num_heads, num_kv_heads, head_dim, v_head_dim = layer.head_sizes(
        CALLER,
        module.num_heads,
        inputs_q.shape[-1],
        qkv_features=module.qkv_features,
        num_kv_heads=module.num_kv_heads,
        head_dim=module.head_dim,
        v_head_dim=module.v_head_dim,
    )
    linear = functools.partial(
        nn.DenseGeneral,
        kernel_init=module.kernel_init,
        bias_init=module.bias_init,
        dot_general=module.qkv_dot_general,
        dot_general_cls=module.qkv_dot_general_cls,
        **_linear(module),
    )
    query = linear((num_heads, head_dim), name="query")(inputs_q)
    key = linear((num_kv_heads, head_dim), name="key")(inputs_k)
    value = linear((num_kv_heads, v_head_dim), name="value")(inputs_v)
    return *_normalised(module, query, key), value


def from_heads(module: Any, heads: jax.Array, width: int) -> jax.Array:
    """The output, (*B, T, out_features), by default as wide as the input."""
    features = width if module.out_features is None else module.out_features
    layer.positive(CALLER, out_features=features)
    linear = nn.DenseGeneral(
        features,
        axis=(-2, -1),
        kernel_init=module.out_kernel_init or module.kernel_init,
        bias_init=module.out_bias_init or module.bias_init,
        dot_general=module.out_dot_general,
        dot_general_cls=module.out_dot_general_cls,
        name="out",
        **_linear(module),
    )
    return linear(heads)


def sinks(module: Any) -> jax.Array | None:
    """The logits of the sinks, (N,), if there are any."""
    return _per_head(module, "sinks", 0.0) if module.sinks else None


def _normalised(
    module: Any, query: jax.Array, key: jax.Array
) -> tuple[jax.Array, jax.Array]:
    kind = layer.qk_norm_of(CALLER, module.qk_norm, module.normalize_qk)
    if kind is None:
        return query, key
    if kind == "l2":
        scale = _per_head(module, "qk_scale", query.shape[-1] ** 0.5)
        return layer.unit_vectors(query, key, scale)
    norms: Any = {
        "layer": functools.partial(nn.LayerNorm, use_bias=False),
        "rms": nn.RMSNorm,
    }
    norm = functools.partial(
        norms[kind], dtype=module.dtype, param_dtype=module.param_dtype
    )
    return norm(name="query_ln")(query), norm(name="key_ln")(key)


def _per_head(module: Any, name: str, value: float) -> jax.Array:
    init = nn.initializers.constant(value)
    return module.param(name, init, (module.num_heads,), module.param_dtype)


def _linear(module: Any) -> dict[str, Any]:
    return dict(
        use_bias=module.use_bias,
        dtype=module.dtype,
        param_dtype=module.param_dtype,
        precision=module.precision,
    )
