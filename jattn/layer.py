"""What attention layers share, whichever library holds their parameters."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jattn import masks
from jattn.core.arguments import static_int
from jattn.core.boundary import one_of, positions_beside, unplaced
from jattn.core.rules import Array, Mask
from jattn.core.softmax import accumulator

Rope = Callable[[jax.Array, Array], jax.Array]
"""`rope(x, positions)`, of x (*B, T, N, H) and positions (*B, T)."""


class Heads(NamedTuple):
    """How many heads a layer has, and of which sizes: N, K, H and D."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int


def head_sizes(
    caller: str,
    num_heads: int,
    in_features: int,
    *,
    qkv_features: int | None = None,
    num_kv_heads: int | None = None,
    head_dim: int | None = None,
    v_head_dim: int | None = None,
) -> Heads:
    """The heads of a layer from the arguments of its constructor.

    Raises:
        ValueError: they do not divide, or contradict each other.
    """
    positive(caller, num_heads=num_heads, in_features=in_features)
    if head_dim is None:
        width = in_features if qkv_features is None else qkv_features
        if width % num_heads:
            raise ValueError(
                f"{caller}: num_heads must divide qkv_features (by default "
                f"in_features), but got {num_heads=}, qkv_features={width}. Or give "
                "head_dim."
            )
        head_dim = width // num_heads
    elif qkv_features not in (None, num_heads * head_dim):
        raise ValueError(
            f"{caller}: qkv_features must be num_heads * head_dim, but got "
            f"{qkv_features=}, {num_heads=}, {head_dim=}. Give one of them."
        )
    num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
    v_head_dim = head_dim if v_head_dim is None else v_head_dim
    heads = Heads(num_heads, num_kv_heads, head_dim, v_head_dim)
    positive(caller, **heads._asdict())
    if num_heads % num_kv_heads:
        raise ValueError(
            f"{caller}: num_heads must be a multiple of num_kv_heads, but got "
            f"{num_heads=}, {num_kv_heads=}. Give each key head the same number of "
            "query heads."
        )
    return heads


def positive(caller: str, **counts: int) -> None:
    """Raises unless every count is an int, and 1 or more."""
    for name, count in counts.items():
        static_int(caller, name, count, 1)


def flags(caller: str, **given: Any) -> None:
    """Raises TypeError unless each is True or False, which a string is not."""
    for name, value in given.items():
        if not isinstance(value, (bool, np.bool_)):
            raise TypeError(
                f"{caller}: {name} must be True or False, but got {value!r}. It is "
                "static, a part of the program."
            )


def check_arrays(caller: str, **given: Any) -> None:
    """Raises TypeError unless each is an array, or None."""
    for name, x in given.items():
        if x is not None and not (hasattr(x, "shape") and hasattr(x, "dtype")):
            raise TypeError(
                f"{caller}: {name} must be an array, but got {type(x).__name__}. "
                "Convert it with jnp.asarray."
            )


def qk_norm_of(caller: str, qk_norm: str | None, normalize_qk: bool) -> str | None:
    """How queries and keys are normalised: "layer", "rms", "l2" or None.

    Raises:
        ValueError: it is something else, or Flax's normalize_qk contradicts it.
    """
    if qk_norm is not None:
        one_of(caller, "qk_norm", qk_norm, ("layer", "rms", "l2"))
    if not normalize_qk:
        return qk_norm
    if qk_norm not in (None, "layer"):
        raise ValueError(
            f'{caller}: normalize_qk=True is qk_norm="layer", but got {qk_norm=}. Give '
            "one of them."
        )
    return "layer"


def unit_vectors(
    query: jax.Array, key: jax.Array, scale: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Queries and keys whose scores, divided by sqrt(H), are scale[n] cos(q, k).

    Args:
        query: (*B, T, N, H).
        key: (*B, S, K, H).
        scale: (N,).
    """

    def unit(x: jax.Array) -> jax.Array:
        wide = x.astype(accumulator(x.dtype))
        square = jnp.sum(jnp.square(wide), axis=-1, keepdims=True)
        return wide * jax.lax.rsqrt(square + 1e-6)

    scale = scale.astype(accumulator(query.dtype)) * query.shape[-1] ** 0.5
    scale = scale.reshape((1,) * (query.ndim - 2) + (-1, 1))
    return (unit(query) * scale).astype(query.dtype), unit(key).astype(key.dtype)


def promoted(
    query: jax.Array, key: jax.Array, value: jax.Array, dtype: Any = None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The vectors in one dtype, by default that of all together, as Flax does."""
    dtype = jnp.result_type(query, key, value) if dtype is None else dtype
    return query.astype(dtype), key.astype(dtype), value.astype(dtype)


def inputs_of(
    caller: str,
    inputs_q: jax.Array,
    inputs_k: jax.Array | None,
    inputs_v: jax.Array | None,
) -> tuple[jax.Array, jax.Array]:
    """What keys and values are made of: by default what queries and keys are made of.

    Raises:
        ValueError: inputs_v is given without inputs_k.
    """
    if inputs_k is None and inputs_v is not None:
        raise ValueError(
            f"{caller}: inputs_v must not be given without inputs_k, but got inputs_v "
            f"{inputs_v.shape} and inputs_k=None. If keys and values are made of the "
            "same, give it as inputs_k."
        )
    inputs_k = inputs_q if inputs_k is None else inputs_k
    return inputs_k, inputs_k if inputs_v is None else inputs_v


def check_width(caller: str, name: str, x: jax.Array, width: int) -> None:
    """Raises unless x is an array (*B, T, width), or (*B, S, width)."""
    check_arrays(caller, **{name: x})
    if x.ndim < 2 or x.shape[-1] != width:
        letter = "T" if name == "inputs_q" else "S"
        raise ValueError(
            f"{caller}: {name} must be (*B, {letter}, {width}), but got {x.shape}. "
            "Give the axes and the width that the module was made for."
        )


def key_positions_of(
    inputs_q: jax.Array,
    inputs_k: jax.Array | None,
    query_positions: Any,
    key_positions: Any,
) -> Any:
    """The positions of the keys; those of self-attention stand where its queries do.

    It is self-attention if inputs_k is left out, or the very array inputs_q.
    """
    if key_positions is not None:
        return key_positions
    of_others = inputs_k is not None and inputs_k is not inputs_q
    if of_others or isinstance(query_positions, str):
        return None
    return query_positions


def turned(
    caller: str,
    rope: Rope | None,
    query: jax.Array,
    key: jax.Array,
    query_positions: Any,
    key_positions: Any,
) -> tuple[jax.Array, jax.Array]:
    """Queries (*B, T, N, H) and keys (*B, S, K, H), turned where they stand.

    Raises:
        ValueError: T != S, and nobody said where the queries stand.
    """
    if rope is None:
        return query, key
    num_queries, num_keys = query.shape[-3], key.shape[-3]
    if query_positions is None and num_queries != num_keys:
        raise unplaced(caller, "rope", num_queries, num_keys)
    if query_positions is None or isinstance(query_positions, str):
        query_positions = positions_beside(
            caller, key_positions, num_queries, num_keys, query_positions or "start"
        )
    if key_positions is None:
        key_positions = np.arange(num_keys)
    return rope(query, query_positions), rope(key, key_positions)


def module_mask(mask: Any, is_causal: bool = False) -> Any:
    """The mask of a call, of which numbers are read as Flax reads them: 0 forbids."""
    if isinstance(mask, (jax.Array, np.ndarray)):
        mask = masks.dense(mask if mask.dtype == np.bool_ else mask != 0)
    if not is_causal:
        return mask
    causal: Mask = masks.causal()
    return causal if mask is None else causal & mask
