"""Attention on a few vectors, of which one may be spoilt."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jattn.foreign import check_returned, quick_jit

NAMES = ("query", "key", "value")
LENGTH = 6
"""T and S."""


class Bench:
    """An attention function, compiled once for each dtype, and what it is given."""

    def __init__(self, fn: Callable[..., Any], N: int, K: int, H: int):
        rng = np.random.default_rng(0)
        shapes = [(2, LENGTH, heads, H) for heads in (N, K, K)]
        self.vectors = [rng.standard_normal(shape) for shape in shapes]
        self.cotangent = rng.standard_normal(shapes[0])
        self.groups = N // K

        def checked(out: Any) -> Any:
            check_returned("nan_safety", out, shapes[0])
            return out

        def run(vectors: Any, cotangent: Any, options: Any) -> Any:
            out, pull = jax.vjp(lambda *x: checked(fn(*x, **options)), *vectors)
            return out, *pull(cotangent.astype(out.dtype))

        self.run = quick_jit(run)

    def __call__(
        self, dtype: Any, vectors: Any = None, cotangent: Any = None, **options: Any
    ) -> dict[str, np.ndarray]:
        """The output and the gradients of query, key and value, in float64."""
        vectors = self.vectors if vectors is None else vectors
        cotangent = self.cotangent if cotangent is None else cotangent
        given = [jnp.asarray(x, dtype) for x in (*vectors, cotangent)]
        results = self.run(given[:-1], given[-1], options)
        wide = (np.asarray(x, np.float64) for x in results)
        return dict(zip(("out", "d query", "d key", "d value"), wide, strict=True))

    def spoilt(self, name: str, place: tuple[int, ...], number: float) -> list[Any]:
        """The vectors with a number put into one of them."""
        vectors = [x.copy() for x in self.vectors]
        vectors[NAMES.index(name)][place] = number
        return vectors
