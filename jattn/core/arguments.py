"""The arguments of masks and score rules: checked once, when a rule is made."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jattn.core.letters import check_letters
from jattn.core.rules import Array

_KINDS = {np.bool_: "Boolean", np.integer: "integers", np.floating: "floating point"}


def array_of(caller: str, name: str, value: Any, kind: type) -> Array:
    """`value` as an array, which must be of `kind`: np.bool_, np.integer, np.floating.

    Raises:
        TypeError: it is of another kind.
    """
    array = value if isinstance(value, jax.Array) else np.asarray(value)
    if not jnp.issubdtype(array.dtype, kind):
        cure = {
            np.bool_: "For numbers, write `array != 0`.",
            np.integer: "Cast it with `.astype(int)`.",
            np.floating: "A mask goes to mask=, where True means: may look.",
        }[kind]
        raise TypeError(
            f"{caller}: {name} must be {_KINDS[kind]}, but got {array.dtype} of shape "
            f"{array.shape}. {cure}"
        )
    return array


def integer(caller: str, name: str, value: Any) -> Any:
    """`value`, which must be an int or an array of integers that is not negative.

    Raises:
        TypeError: it is not made of integers.
        ValueError: it is known to be negative.
    """
    if isinstance(value, bool) or not isinstance(value, int):
        value = array_of(caller, name, value, np.integer)
    known = not isinstance(value, jax.core.Tracer)
    if known and np.size(value) and np.min(np.asarray(value)) < 0:
        raise ValueError(
            f"{caller}: {name} must not be negative, but got {value}. None, where "
            "it is accepted, means without a bound."
        )
    return value


def with_axes(
    caller: str, arrays: Sequence[Any], axes: Sequence[str] | None
) -> tuple[tuple[Array, ...], tuple[str, ...]]:
    """The arrays of a custom rule and the letters of each.

    Raises:
        ValueError: the letters are not one valid string per array.
    """
    given = tuple(x if isinstance(x, jax.Array) else np.asarray(x) for x in arrays)
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
        if "T" in letters and "S" not in letters:
            array = array[:, None]
        elif "S" in letters and "T" not in letters:
            array = array[None, :]
        views.append(array)
    return views
