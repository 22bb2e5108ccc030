"""A function under audit, with its inputs and where their positions stand."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jattn.core.arguments import check_callable
from jattn.diagnostics.leak_changes import other_values, spread


@dataclasses.dataclass(frozen=True)
class Audited:
    """A function of inputs (*B, S, ...) with outputs (*B, T, ...).

    Attributes:
        caller: the audit that an error names.
        fn: the function.
        leaves: the arrays of its inputs, in numpy: changing them compiles nothing.
        structure: of the inputs.
        axis: where S and T stand.
    """

    caller: str
    fn: Callable[..., Any]
    leaves: tuple[np.ndarray, ...]
    structure: Any
    axis: int

    @property
    def batch(self) -> tuple[int, ...]:
        """The leading axes *B."""
        return self.leaves[0].shape[: self.axis]

    @property
    def rows(self) -> int:
        """How many batch rows there are."""
        return math.prod(self.batch)

    @property
    def num_inputs(self) -> int:
        """S."""
        return self.leaves[0].shape[self.axis]

    @property
    def floating(self) -> list[int]:
        """Which of the leaves are floating point."""
        kinds = (jnp.issubdtype(x.dtype, jnp.floating) for x in self.leaves)
        return [i for i, is_floating in enumerate(kinds) if is_floating]

    def __call__(self, leaves: Any) -> list[jax.Array]:
        """The arrays of the outputs, checked."""
        arrays = [jnp.asarray(x) for x in leaves]
        outputs = jax.tree.leaves(self.fn(jax.tree.unflatten(self.structure, arrays)))
        wanted = leaves[0].shape[: self.axis]
        shapes = [np.shape(x) for x in outputs]
        lengths = {shape[self.axis : self.axis + 1] for shape in shapes}
        fits = len(lengths) == 1 and lengths != {()}
        if not fits or any(shape[: self.axis] != wanted for shape in shapes):
            raise ValueError(
                f"{self.caller}: every output must be (*B, T, ...), here *B={wanted} "
                f"and T on axis {self.axis}, but got {shapes} from inputs "
                f"{[x.shape for x in leaves]}. Return such arrays only, or set axis."
            )
        return outputs

    def values(self, leaves: Any) -> list[np.ndarray]:
        """The outputs in float64, each (B, T, width)."""
        return [self.flat(x) for x in self(leaves)]

    def flat(self, x: Any) -> np.ndarray:
        """An array (*B, T, ...) in float64, (B, T, width)."""
        shape = (self.rows, x.shape[self.axis], math.prod(x.shape[self.axis + 1 :]))
        return np.asarray(x).astype(np.float64).reshape(shape)

    def others(self, num_tokens: int | None, seed: int) -> list[list[np.ndarray]]:
        """Other values for all inputs: some of their size, and some far away."""
        rng = np.random.default_rng(seed)
        return [
            [other_values(x, far, rng, num_tokens) for x in self.leaves]
            for far in (False, True)
        ]

    def changed(self, inputs: np.ndarray, others: list[np.ndarray]) -> list[np.ndarray]:
        """The inputs with those that are marked, (B, S), replaced."""
        pairs = zip(self.leaves, others, strict=True)
        return [np.where(spread(inputs, x, self.axis), y, x) for x, y in pairs]

    def prefix(self, length: int) -> list[np.ndarray]:
        """The inputs cut to the first positions."""
        cut = (slice(None),) * self.axis + (slice(length),)
        return [x[cut] for x in self.leaves]

    def index(self, place: Any) -> tuple[int, ...]:
        """The index (*B, t) of a place (b, t)."""
        row, position = map(int, place)
        batch = tuple(map(int, np.unravel_index(row, self.batch))) if self.batch else ()
        return (*batch, position)


def as_audited(caller: str, fn: Any, inputs: Any, axis: int) -> Audited:
    """The function and its inputs, checked.

    Raises:
        TypeError: fn cannot be called, or an input is neither floats nor integers.
        ValueError: the inputs do not have the same leading axes and positions.
    """
    check_callable(caller, "fn", fn)
    if type(axis) is not int or axis < 0:
        raise ValueError(
            f"{caller}: axis must be an int from 0 on, but got {axis!r}. It is the "
            "number of leading axes *B: 1 for (B, T, ...), 0 without batch."
        )
    given, structure = jax.tree.flatten(inputs)
    leaves = tuple(np.asarray(jnp.asarray(x)) for x in given)
    for x in leaves:
        if not any(jnp.issubdtype(x.dtype, k) for k in (jnp.floating, jnp.integer)):
            raise TypeError(
                f"{caller}: inputs must be floats or integers, but got {x.dtype} of "
                f"shape {x.shape}. Let fn close over what is not to be changed."
            )
    shapes = [x.shape for x in leaves]
    starts = {shape[: axis + 1] for shape in shapes}
    if len(starts) != 1 or len(next(iter(starts))) != axis + 1:
        raise ValueError(
            f"{caller}: all inputs must be (*B, T, ...) with the same *B and T, here "
            f"T on {axis=}, but got shapes {shapes}. Set axis, or let fn close over "
            "the others."
        )
    start = next(iter(starts))
    if 0 in start or start[axis] < 2:
        raise ValueError(
            f"{caller}: there must be two positions and one batch row at least, but "
            f"got shapes {shapes} with positions on {axis=}. Give longer inputs."
        )
    return Audited(caller, fn, leaves, structure, axis)
