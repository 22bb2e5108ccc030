"""The table of letters, and what follows from arrays that name their axes in it.

    B  batch: every leading axis       T  queries
    N  query heads                     S  keys
    K  key and value heads             H  head size
    G  query heads a key head, N // K  D  width of a value

Public arrays are laid out (*B, T, N, H) and (*B, S, K, H), as in `jax.nn`; inside,
a function sees one head, (T, H) and (S, H). An array that belongs to a mask or a
score rule is declared as `leaf("BT")`, or as `leaf("N..")` with a dot for each axis
that has no letter. From the letters alone follow the slice that a tile needs (`take`),
the axes that `vmap` maps (`axes`, `lift`) and the sharding on a mesh
(`partition_specs`), so that no mask needs code for any of them.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, dataclass_transform

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

LETTERS = "BNTS"
"""The letters that a leaf may name, in the order in which it must name them."""

WHOLE = "."
"""Stands for an axis without a letter, of any size, that is passed whole."""


def leaf(letters: str, **kwargs: Any) -> Any:
    """Declares a field whose value is an array with these axes.

    An axis with a letter is full or 1; one with a dot has any size, and every tile
    gets all of it. A leaf of B and N only may also be a scalar. A Python number or
    None in its place is static: part of the pytree's structure, not data. A class of
    one's own, of `jattn.masks.Mask` or `jattn.scores.Score`, declares every array so.

    Args:
        letters: a subsequence of "BNTS", for example "BT", with dots among them, as
            "N.." for a table per head.
        **kwargs: passed on to `dataclasses.field`, as `default=None`.

    Returns:
        A field of a dataclass.

    Raises:
        ValueError: a letter is unknown, or the letters are out of order.

    Example:
        >>> from jattn.masks import Mask
        >>> class Marked(Mask):
        ...     marks: jax.Array = leaf("BS")
        ...
        ...     def allowed(self, q_pos, k_pos):
        ...         return self.marks[None, :]
    """
    check_letters("leaf", letters)
    return dataclasses.field(metadata={"letters": letters}, **kwargs)


def leaves_from(field: str, **kwargs: Any) -> Any:
    """Declares a tuple of arrays; `field` names the tuple of their letters."""
    return dataclasses.field(metadata={"letters_from": field}, **kwargs)


def children(**kwargs: Any) -> Any:
    """Declares a field that holds lettered objects: one, a tuple of them, or None."""
    return dataclasses.field(metadata={"children": True}, **kwargs)


def check_letters(caller: str, letters: str) -> None:
    """Raises ValueError unless `letters` without dots is a part of `LETTERS`."""
    named = letters.replace(WHOLE, "") if isinstance(letters, str) else letters
    if named != "".join(x for x in LETTERS if x in str(named)):
        raise ValueError(
            f"{caller}: axes must be letters of {LETTERS!r} in that order, and a dot "
            f"for any other axis, but got {letters!r}. Transpose the array, or declare "
            "it as '' to get it whole."
        )


@dataclass_transform(
    frozen_default=True, field_specifiers=(leaf, leaves_from, children)
)
class Lettered:
    """A pytree whose arrays name their axes.

    A subclass is made a frozen dataclass and a pytree by being defined. Two objects
    without arrays are equal, and hash alike, when their structures are equal; with
    arrays each is equal to itself only.

    Example:
        >>> class Slopes(Lettered):
        ...     slopes: jax.Array | float = leaf("N")
        >>> jax.tree.leaves(Slopes(np.ones(3))), jax.tree.leaves(Slopes(0.5))
        ([array([1., 1., 1.])], [])
    """

    def __init_subclass__(cls) -> None:
        dataclasses.dataclass(frozen=True, eq=False, repr=False)(cls)
        jax.tree_util.register_pytree_with_keys(
            cls,
            lambda self: _flatten(self, jax.tree_util.GetAttrKey),
            lambda static, data: _unflatten(cls, static, tuple(data)),
            lambda self: _flatten(self),
        )

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            value = getattr(self, field.name)
            if not field.metadata and isinstance(value, (jax.Array, np.ndarray)):
                raise TypeError(
                    f"{type(self).__name__}: {field.name} holds an array and must name "
                    f"its axes, but got shape {value.shape}. Write {field.name}: "
                    'jax.Array = jattn.leaf("BS"), with its letters.'
                )

    def __eq__(self, other: object) -> bool:
        if self is other or type(self) is not type(other):
            return self is other
        same: Any = jax.tree.structure(self) == jax.tree.structure(other)  # type: ignore[operator]
        return bool(same and not jax.tree.leaves(self))

    def __hash__(self) -> int:
        data, structure = jax.tree.flatten(self)
        return id(self) if data else hash(structure)


def _is_data(field: dataclasses.Field, value: Any) -> bool:
    static = value is None or isinstance(value, (bool, int, float))
    return bool(field.metadata) and not static


def _flatten(self: Any, key: Callable[[str], Any] | None = None) -> tuple[list, tuple]:
    static, data = [], []
    for field in dataclasses.fields(self):
        value = getattr(self, field.name)
        if _is_data(field, value):
            data.append((key(field.name), value) if key else value)
        else:
            static.append((field.name, value))
    return data, tuple(static)


def _unflatten(cls: type, static: tuple, data: Sequence[Any]) -> Any:
    # Not through __init__: JAX puts placeholders where arrays belong.
    self: Any = object.__new__(cls)
    known = dict(static)
    names = [f.name for f in dataclasses.fields(cls) if f.name not in known]
    for name, value in (known | dict(zip(names, data, strict=True))).items():
        object.__setattr__(self, name, value)
    return self


def letters_of(tree: Any) -> list[str]:
    """The letters of every array of `tree`, in the order of `jax.tree.leaves`."""
    if isinstance(tree, tuple):
        return [letters for item in tree for letters in letters_of(item)]
    found: list[str] = []
    for field in dataclasses.fields(tree) if tree is not None else ():
        value = getattr(tree, field.name)
        if not _is_data(field, value):
            continue
        if "letters" in field.metadata:
            found.append(field.metadata["letters"])
        elif "letters_from" in field.metadata:
            found += getattr(tree, field.metadata["letters_from"])
        else:
            found += letters_of(value)
    return found


def take_leaves(
    arrays: Sequence[Any], letters: Sequence[str], letter: str, start: Any, size: int
) -> list[Any]:
    """The part of each array from `start` on, `size` long, along `letter`.

    Letters are counted from the right, so arrays whose leading letters `lift` has
    mapped away need no other treatment. An axis of 1 is left for broadcasting.
    """
    taken = []
    for array, names in zip(arrays, letters, strict=True):
        axis = _axis_of(array, names, letter)
        if axis is not None and np.shape(array)[axis] != 1:
            array = lax.dynamic_slice_in_dim(array, start, size, axis)
        taken.append(array)
    return taken


def _axis_of(array: Any, names: str, letter: str) -> int | None:
    """The axis of `letter`, below 0; None if the array has none."""
    axis = names.index(letter) - len(names) if letter in names else 0
    return axis if axis < 0 and np.ndim(array) >= -axis else None


def take(tree: Any, letter: str, start: Any, size: int) -> Any:
    """The tile of `tree` from `start` on, `size` long, along `letter`."""
    arrays, structure = jax.tree.flatten(tree)
    arrays = take_leaves(arrays, letters_of(tree), letter, start, size)
    return jax.tree.unflatten(structure, arrays)


def sizes_along(tree: Any, letter: str) -> list[int]:
    """The size of the axis `letter` in every array of `tree` that has it."""
    lettered = zip(jax.tree.leaves(tree), letters_of(tree), strict=True)
    found = [(np.shape(x), _axis_of(x, names, letter)) for x, names in lettered]
    return [shape[axis] for shape, axis in found if axis is not None]


def axes(tree: Any, letter: str) -> list[int | None]:
    """For every array of `tree`, the axis to `vmap` over for `letter`, or None."""
    return [n.index(letter) if letter in n else None for n in letters_of(tree)]


def partition_specs(tree: Any, mesh_axes: Mapping[str, Any]) -> Any:
    """The `PartitionSpec` of every array of `tree`.

    Args:
        tree: a mask, a score rule, or any other lettered object.
        mesh_axes: letter to mesh axis, for example {"B": "data", "N": "model"}.
            B shards the first leading axis.

    Returns:
        `tree` with a PartitionSpec in the place of every array.

    Example:
        >>> from jattn.masks import segments
        >>> mask = segments(np.zeros((8, 128), int))
        >>> tuple(partition_specs(mask, {"B": "data"}).query_ids)
        ('data', None)
    """
    arrays, structure = jax.tree.flatten(tree)
    specs = []
    for array, names in zip(arrays, letters_of(tree), strict=True):
        leading = max(0, np.ndim(array) - len(names.replace("B", "")))
        names = names.replace("B", "B".ljust(leading, WHOLE)[:leading])
        names = names.rjust(np.ndim(array), WHOLE)
        placed = zip(np.shape(array), names, strict=False)
        specs.append(
            PartitionSpec(*(mesh_axes.get(x) if n != 1 else None for n, x in placed))
        )
    return jax.tree.unflatten(structure, specs)


def lift(
    fn: Callable[..., Any],
    arrays: Sequence[Any],
    names: Sequence[str],
    order: str,
    out_axes: Mapping[str, int],
) -> Any:
    """Calls `fn(*arrays)` under one `vmap` for each letter of `order`.

    One for each, and no loop, keeps an axis that is sharded over devices as it is.

    Args:
        fn: what to do for one of each mapped letter.
        arrays: its arguments, arrays or scalars.
        names: the axes of each argument, a letter per axis.
        order: the letters to map, outermost first. An argument that has 1 of a letter
            of which others have more is the same for all.
        out_axes: where a mapped letter stands in the results; 0 if not given.
    """
    operands, left = [], []
    for array, letters in zip(arrays, names, strict=True):
        sizes = list(zip(letters, np.shape(array), strict=True))
        ones = [i for i, (x, n) in enumerate(sizes) if x in order and n == 1]
        operands.append(lax.squeeze(array, ones) if ones else array)
        left.append("".join(x for i, x in enumerate(letters) if i not in ones))
    for depth in reversed(range(len(order))):
        outer, letter = order[:depth], order[depth]
        inside = ["".join(x for x in letters if x not in outer) for letters in left]
        in_axes = tuple(x.index(letter) if letter in x else None for x in inside)
        out_axis = out_axes.get(letter, 0)
        if any(axis is not None for axis in in_axes):
            fn = jax.vmap(fn, in_axes, out_axis)
        else:  # There is one of it, and an axis of 1 in every product has its price.
            fn = _with_axis(fn, out_axis)
    return fn(*operands)


def _with_axis(fn: Callable[..., Any], axis: int) -> Callable[..., Any]:
    def with_axis(*arrays: Any) -> Any:
        return jax.tree.map(lambda x: jnp.expand_dims(x, axis), fn(*arrays))

    return with_axis
