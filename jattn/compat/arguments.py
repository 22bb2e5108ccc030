"""The arguments of `dot_product_attention`: checked, and with all their axes.

What `jax.nn` refuses with a ValueError is one here too.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jattn import masks
from jattn.core.arguments import array_of, integer
from jattn.core.boundary import Sizes, check_rule, check_vectors
from jattn.prepare import Call, per_head
from jattn.scores import additive

CALLER = "dot_product_attention"


def vectors_of(query: Any, key: Any, value: Any) -> tuple[list[jax.Array], Sizes]:
    """query, key and value with an axis for the batch, and their sizes.

    Raises:
        ValueError: shapes or dtypes do not fit.
        TypeError: one is not a floating-point array.
    """
    given = dict(query=query, key=key, value=value)
    arrays = {name: _array(name, x) for name, x in given.items()}
    shown = ", ".join(f"{name} {x.dtype} {x.shape}" for name, x in arrays.items())

    def refuse(rule: str, cure: str) -> ValueError:
        return ValueError(f"{CALLER}: {rule}, but got {shown}. {cure}")

    if any(x.ndim not in (3, 4) for x in arrays.values()):
        raise refuse(
            "query (B, T, N, H), key and value (B, S, K, H) must have these axes, or "
            "all but B",
            "Give a single head its axis, x[..., None, :]; jattn.attention takes any "
            "leading axes.",
        )
    vectors = [x if x.ndim == 4 else x[None] for x in arrays.values()]
    sizes = check_vectors(CALLER, *vectors)
    _, k, v = vectors
    if v.shape != k.shape:
        raise refuse(
            "value must have the shape (B, S, K, H) of key",
            "jattn.attention takes values of another width.",
        )
    if len({x.dtype for x in vectors}) > 1:
        raise refuse(
            "query, key and value must have one dtype",
            "Cast them, or use jattn.attention, which promotes.",
        )
    return vectors, sizes


def pairs_of(
    name: str, given: Any, kind: type, sizes: Sizes, batched: bool
) -> jax.Array | None:
    """A bias or a mask with its four axes, those that are missing in front.

    Args:
        name: of the argument.
        given: its value, or None.
        kind: np.floating or np.bool_.
        sizes: of the vectors.
        batched: whether query has an axis for the batch. Then an array whose first axis
            may be that one is refused.

    Raises:
        ValueError: the shape does not fit, or a mask is not Boolean.
        TypeError: a bias is not floating point.
    """
    if given is None:
        return None
    array = _array(name, given)
    if kind is np.bool_ and array.dtype != np.bool_:
        raise ValueError(
            f"{CALLER}: {name} must be Boolean, but got {array.dtype} of shape "
            f"{array.shape}. For numbers, write `array != 0`; what is added to the "
            "logits goes to bias."
        )
    array_of(CALLER, name, array, kind)
    (batch,) = sizes.batch
    if batched and array.ndim in (2, 3) and array.shape[0] == batch > 1:
        mine, other = ("B, T, S", "N, T, S") if array.ndim == 3 else ("B, S", "T, S")
        missing = ", ".join(["None"] * (4 - array.ndim))
        raise ValueError(
            f"{CALLER}: {name} must be (B, N, T, S), each axis full or 1, but got "
            f"{array.shape} with B={batch}. For ({mine}) write x[:, {missing}]; for "
            f"({other}), x[{missing}]."
        )
    array = array.reshape((1,) * (4 - array.ndim) + array.shape)
    rule = masks.dense(array) if kind is np.bool_ else additive(array)
    check_rule(CALLER, name, rule, sizes)
    return array


def lengths_of(name: str, given: Any, sizes: Sizes, batched: bool) -> jax.Array | None:
    """Lengths (B,).

    Raises:
        ValueError: they have another shape, are no integers, or are known to be below
            0.
    """
    if given is None:
        return None
    array = _array(name, given)
    lengths = array if batched or array.ndim else array[None]
    integers = jnp.issubdtype(array.dtype, jnp.integer)
    if lengths.shape != sizes.batch or not integers:
        raise ValueError(
            f"{CALLER}: {name} must be integers (B,), here {sizes.batch}, but got "
            f"{array.dtype} of shape {array.shape}. Give one for each batch row."
        )
    return integer(CALLER, name, lengths)


def window_of(given: Any) -> tuple[Any, Any] | None:
    """How many keys are seen before a query, and how many after it.

    Raises:
        ValueError: it is not one number or two, or one is known to be below 0.
        TypeError: they are no integers.
    """
    if given is None:
        return None
    pair = tuple(given) if isinstance(given, (tuple, list)) else (given, given)
    if len(pair) != 2 or any(np.ndim(bound) for bound in pair):
        raise ValueError(
            f"{CALLER}: local_window_size must be an int or two, (left, right), but "
            f"got {given!r}. For one per head use jattn.masks.sliding_window."
        )
    left, right = pair
    name = "local_window_size"
    return integer(CALLER, name, left), integer(CALLER, name, right)


def check_scale(scale: Any, sizes: Sizes) -> None:
    """Raises ValueError unless `scale` is a number or None, or TypeError."""
    if np.ndim(scale):
        raise ValueError(
            f"{CALLER}: scale must be a number, but got shape {np.shape(scale)}. For "
            "one per head use jattn.attention."
        )
    per_head(Call(CALLER, sizes), "scale", scale)


def _array(name: str, given: Any) -> jax.Array:
    try:
        return jnp.asarray(given)
    except TypeError as error:
        raise TypeError(
            f"{CALLER}: {name} must be an array, but got {type(given).__name__}. A "
            "rule of jattn.masks goes to jattn.attention."
        ) from error
