"""The arguments of masks and score rules: checked once, when a rule is made."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jattn.core.letters import check_letters
from jattn.core.rules import Array, as_array

_KINDS = {np.bool_: "Boolean", np.integer: "integers", np.floating: "floating point"}


def is_known(x: Any) -> bool:
    """Whether there are values, and not a shape and a dtype only."""
    return not isinstance(x, (jax.core.Tracer, jax.ShapeDtypeStruct))


def known(x: Any) -> np.ndarray | None:
    """The values in numpy, if there are any.

    In a traced function too, where JAX's operations on values from outside are traced.
    """
    return np.asarray(x) if is_known(x) else None


def int_of(value: Any) -> Any:
    """An integer scalar of numpy as an int, and so static; anything else as it is."""
    return int(value) if isinstance(value, np.integer) else value


def array_of(caller: str, name: str, value: Any, kind: type) -> Array:
    """`value` as an array, which must be of `kind`: np.bool_, np.integer, np.floating.

    Raises:
        TypeError: it is of another kind.
    """
    array = as_array(value)
    if not jnp.issubdtype(array.dtype, kind):
        cure = {
            np.bool_: "For numbers, write `array != 0`.",
            np.integer: "Cast it with `.astype(int)`.",
            np.floating: "Cast numbers with .astype(jnp.float32); a Boolean mask goes "
            "to mask=, where True means: may look.",
        }[kind]
        raise TypeError(
            f"{caller}: {name} must be {_KINDS[kind]}, but got {array.dtype} of shape "
            f"{array.shape}. {cure}"
        )
    return to_int32(caller, name, array) if kind is np.integer else array


def to_int32(caller: str, name: str, array: Array) -> Array:
    """Numpy integers as int32 where they fit; JAX arrays as they are.

    Without this, JAX would cut them off silently.

    Raises:
        ValueError: a number does not fit, and 64-bit types are not enabled.
    """
    info = np.iinfo(np.int32)
    if isinstance(array, jax.Array) or array.dtype == np.int32:
        return array
    if not array.size or (info.min <= array.min() and array.max() <= info.max):
        return array.astype(np.int32)
    if jax.dtypes.canonicalize_dtype(np.int64) == np.int64:
        return array
    raise ValueError(
        f"{caller}: {name} must fit int32, but got {array.dtype} from {array.min()} to "
        f"{array.max()}. Renumber them, or enable jax_enable_x64."
    )


def integer(caller: str, name: str, value: Any) -> Any:
    """`value`, which must be an int or an array of integers that is not negative.

    An int, of Python or numpy, beyond int32 becomes its largest.

    Raises:
        TypeError: it is not made of integers.
        ValueError: it is known to be negative.
    """
    value = int_of(value)
    if isinstance(value, bool) or not isinstance(value, int):
        value = array_of(caller, name, value, np.integer)
    elif value > np.iinfo(np.int32).max:
        value = int(np.iinfo(np.int32).max)  # beyond every position
    if is_known(value) and np.size(value) and np.min(np.asarray(value)) < 0:
        raise ValueError(
            f"{caller}: {name} must not be negative, but got {value}. None, where "
            "it is accepted, means without a bound."
        )
    return value


def static_int(caller: str, name: str, value: Any, least: int) -> int:
    """`value`, which must be an int of at least `least`; it selects code, not data.

    Beyond int32 it becomes its largest.

    Raises:
        TypeError: it is not an int.
        ValueError: it is less.
    """
    value = int_of(value)
    if type(value) is not int or value < least:
        error = ValueError if type(value) is int else TypeError
        raise error(
            f"{caller}: {name} must be an int, {least} or more, but got {value!r}. It "
            "is static, a part of the program: int(x) makes one of an array."
        )
    return min(value, int(np.iinfo(np.int32).max))


def check_callable(caller: str, name: str, value: Any) -> None:
    """Raises TypeError unless `value` can be called."""
    if not callable(value):
        raise TypeError(
            f"{caller}: {name} must be a function, but got {value!r}. Give the "
            "function itself."
        )


def with_axes(
    caller: str, arrays: Sequence[Any], axes: Sequence[str] | None
) -> tuple[tuple[Array, ...], tuple[str, ...]]:
    """The arrays of a custom rule and the letters of each.

    Raises:
        ValueError: the letters are not one valid string per array.
    """
    given = tuple(
        to_int32(caller, f"array {i}", x) if jnp.issubdtype(x.dtype, jnp.integer) else x
        for i, x in enumerate(map(as_array, arrays))
    )
    letters = ("",) * len(given) if axes is None else tuple(axes)
    if isinstance(axes, str) or len(letters) != len(given):
        raise ValueError(
            f"{caller}: axes must hold one string of letters per array, but got "
            f"axes={axes!r} for {len(given)} arrays. For example axes=['N', 'BS']."
        )
    for item in letters:
        check_letters(caller, item)
    return given, letters


def tile_views(arrays: Sequence[Array], axes: Sequence[str]) -> list[Array]:
    """Arrays of a tile as a custom rule sees them: T as (T, 1), S as (1, S)."""
    views = []
    for array, letters in zip(arrays, axes, strict=True):
        if ("T" in letters) != ("S" in letters):
            of_head = letters.replace("B", "").replace("N", "")
            axis = of_head.index("S") if "S" in letters else of_head.index("T") + 1
            array = array[(slice(None),) * axis + (None,)]
        views.append(array)
    return views


def positive(caller: str, name: str, value: Any) -> float:
    """`value` as a float, which must be a positive and finite number.

    Raises:
        TypeError: it is not a number.
        ValueError: it is not positive and finite.
    """
    if isinstance(value, bool) or not isinstance(
        value, (int, float, np.integer, np.floating)
    ):
        raise TypeError(
            f"{caller}: {name} must be a number, but got {value!r}. It is static, a "
            "part of the program: float(x) makes one of an array."
        )
    if not 0 < value < math.inf:
        raise ValueError(
            f"{caller}: {name} must be positive and finite, but got {name}={value}."
        )
    return float(value)
