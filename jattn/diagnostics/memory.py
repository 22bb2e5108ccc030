"""How the memory of a function grows with the length of its inputs."""

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from jattn.core.arguments import check_callable
from jattn.core.boundary import one_of
from jattn.reports import Finding, Report, shown_bytes

GROWTH = {"constant": 0.3, "linear": 1.3, "superlinear": 1.7, "quadratic": 2.3}
"""The largest exponent that is called so; beyond them all it is "superquadratic"."""


@dataclasses.dataclass(frozen=True)
class MemoryGrowth(Report):
    """What `memory_against_length` found.

    Attributes:
        num_bytes: {length: what the compiler plans for temporaries and results}.
        slopes: of log bytes against log length, between each length and the next.
        order: the slope without a constant share: of what is added from length to
            length, for the last three of them, exactly if the lengths are a geometric
            series; with two lengths, or where it is larger, the slope of it all.
        growth: "constant", "linear", "superlinear", "quadratic" or "superquadratic",
            by the order.
    """

    num_bytes: dict[int, int]
    slopes: tuple[float, ...]
    order: float
    growth: str

    def at(self, length: int) -> float:
        """Bytes at any length, by the parabola through the last three lengths."""
        points = list(self.num_bytes.items())[-3:]
        return sum(
            y * math.prod((length - b) / (a - b) for b, _ in points if b != a)
            for a, y in points
        )


def memory_against_length(
    fn: Callable[..., Any],
    make: Callable[[int], Any],
    *,
    lengths: Sequence[int] = (512, 1024, 2048),
    derivative: Literal["none", "gradient", "hvp"] = "none",
    limit: Literal["constant", "linear", "superlinear", "quadratic"] = "linear",
) -> MemoryGrowth:
    """How the memory of a function grows with length, by the compiler's plan.

    The function is compiled for each length and never run, so lengths may be such that
    running would take long. An algorithm that keeps a score for every pair shows a
    slope of 2, however small the constant.

    Args:
        fn: a function of arrays.
        make: `make(length)` gives its arguments, a tuple of arrays or of
            `jax.ShapeDtypeStruct`, or of pytrees of them; a single one stands for
            itself.
        lengths: two or more, growing.
        derivative: of the sum of all results: "none", "gradient" with respect to all
            floating-point arguments, or "hvp", the Hessian times a vector (forward
            over reverse).
        limit: the fastest growth that is right.

    Returns:
        One finding; the bytes at each length, the slopes, and `at(length)`, which
        extrapolates.

    Raises:
        ValueError: lengths do not grow, or an option is unknown.
        NotImplementedError: the backend does not say how much memory it plans.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> make = lambda n: jax.ShapeDtypeStruct((n, 4), jnp.float32)
        >>> dense = lambda x: jax.nn.softmax(x @ x.T) @ x
        >>> found = memory_against_length(dense, make, lengths=(128, 256, 512))
        >>> found.ok, found.growth
        (False, 'quadratic')
    """
    for name, given in (("fn", fn), ("make", make)):
        check_callable("memory_against_length", name, given)
    one_of(
        "memory_against_length", "derivative", derivative, ("none", "gradient", "hvp")
    )
    one_of("memory_against_length", "limit", limit, tuple(GROWTH))
    grows = all(0 < m < n for m, n in itertools.pairwise(lengths))
    if len(lengths) < 2 or not grows:
        raise ValueError(
            "memory_against_length: lengths must be two or more, growing, but got "
            f"{lengths!r}. For example (512, 1024, 2048)."
        )
    num_bytes = {n: _planned(_derived(fn, derivative), make(n)) for n in lengths}
    slopes = tuple(
        math.log(max(num_bytes[n], 1) / max(num_bytes[m], 1)) / math.log(n / m)
        for m, n in itertools.pairwise(lengths)
    )
    order = _order(list(num_bytes.items())[-3:], slopes[-1])
    names = [*GROWTH, "superquadratic"]
    growth = names[sum(order > most for most in GROWTH.values())]
    right = names.index(growth) <= names.index(limit)
    shown = ", ".join(f"{n}: {shown_bytes(x)}" for n, x in num_bytes.items())
    detail = f"{growth}, like n^{order:.2f}: {shown}"
    finding = Finding("growth", "right" if right else "wrong", detail, size=order)
    return MemoryGrowth((finding,), num_bytes, slopes, order, growth)


def _order(points: list[tuple[int, int]], slope: float) -> float:
    """The exponent of growth: p of a + b n^p through three points."""
    if len(points) < 3:
        return slope
    (x0, y0), (x1, y1), (x2, y2) = points
    before, after = (y1 - y0) / (x1 - x0), (y2 - y1) / (x2 - x1)
    if before <= 0 or after <= 0:
        return slope
    # What grows ever slower is a root, and not a constant with a little beside it.
    p = 1 + math.log(after / before) / (math.log(x2 / x0) / 2)
    return max(p, math.log(y2 / max(y0, 1)) / math.log(x2 / x0))


def _planned(fn: Callable[..., Any], given: Any) -> int:
    arguments = given if isinstance(given, tuple) else (given,)
    memory: Any = jax.jit(fn).lower(*arguments).compile().memory_analysis()
    if memory is None:
        raise NotImplementedError(
            "memory_against_length: this backend does not say how much memory it "
            f"plans, but got {jax.default_backend()}. Run it on CPU, GPU or TPU."
        )
    return int(memory.temp_size_in_bytes + memory.output_size_in_bytes)


def _derived(fn: Callable[..., Any], derivative: str) -> Callable[..., Any]:
    if derivative == "none":
        return fn

    def gradient(*arguments: Any) -> Any:
        leaves, structure = jax.tree.flatten(arguments)
        moving = [
            i for i, x in enumerate(leaves) if jnp.issubdtype(x.dtype, np.floating)
        ]

        def loss(floats: list[Any]) -> Any:
            for i, x in zip(moving, floats, strict=True):
                leaves[i] = x
            results = jax.tree.leaves(fn(*jax.tree.unflatten(structure, leaves)))
            return sum(jnp.sum(x, dtype=jnp.float32) for x in results)

        floats = [leaves[i] for i in moving]
        if derivative == "gradient":
            return jax.grad(loss)(floats)
        return jax.jvp(jax.grad(loss), (floats,), (list(map(jnp.cos, floats)),))[1]

    return gradient
