"""An attention function under test: the suite's options in its own words."""

import functools
import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jattn import masks
from jattn.foreign import quick_jit
from jattn.testing.features import Features


class Subject:
    """A function, how its features are asked for, and its compiled calls.

    Options of a call are `mask` (Boolean, (B, N, T, S), each axis full or 1), `causal`
    and `window` (left, right), which become an argument, a mask rule or a part of
    `mask`, whichever comes first; and features by their names. Calls of one kind, with
    arrays of the same shapes, share one compilation.
    """

    def __init__(self, features: Features) -> None:
        self.fn, self.features = features.fn, features
        self._programs: dict[Any, Callable[..., Any]] = {}

    def has(self, feature: str) -> bool:
        """Whether the function offers it."""
        return self.features.missing(feature) is None

    def call(self, query: Any, key: Any, value: Any, **options: Any) -> Any:
        """What the function returns."""
        static, traced = self._arguments(query, key, options)

        def forward(vectors: Any, traced: Any) -> Any:
            return self.fn(*vectors, **static, **traced)

        run = self._once("call", static, forward)
        return run((query, key, value), traced)

    def out(self, query: Any, key: Any, value: Any, **options: Any) -> np.ndarray:
        """The output alone."""
        return np.asarray(self.call(query, key, value, **options))

    def results(
        self, query: Any, key: Any, value: Any, d_out: Any, **options: Any
    ) -> dict[str, np.ndarray]:
        """`gradients` where there are any, otherwise the output alone."""
        if self.has("grad"):
            return self.gradients(query, key, value, d_out, **options)
        return {"out": self.out(query, key, value, **options)}

    def with_lse(
        self, query: Any, key: Any, value: Any, **options: Any
    ) -> tuple[np.ndarray, np.ndarray]:
        """The output, and the log-sum-exp as (B, T, N)."""
        out, lse = self.call(query, key, value, return_lse=True, **options)
        return np.asarray(out), np.asarray(_rows_first(lse, query))

    def gradients(
        self,
        query: Any,
        key: Any,
        value: Any,
        d_out: Any,
        d_lse: Any = None,
        **options: Any,
    ) -> dict[str, np.ndarray]:
        """Of sum(d_out * out) + sum(d_lse * lse), by argument; the output as "out".

        In query, key, value and the options that are floating-point arrays.
        """
        if d_lse is not None:
            options["return_lse"] = True
        static, traced = self._arguments(query, key, options)

        def program(vectors: Any, traced: Any, d_out: Any, d_lse: Any) -> Any:
            floats, rest = _floats(traced)

            def loss(vectors: Any, floats: Any) -> Any:
                result = self.fn(*vectors, **static, **floats, **rest)
                out, lse = (result, None) if d_lse is None else result
                total = jnp.sum(out.astype(d_out.dtype) * d_out)
                if lse is not None:
                    total += jnp.sum(_rows_first(lse, vectors[0]) * d_lse)
                return total, out

            gradient = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)
            (_, out), grads = gradient(vectors, floats)
            return out, grads

        run = self._once("gradients", static, program)
        out, (vectors, floats) = run((query, key, value), traced, d_out, d_lse)
        named = dict(zip(("query", "key", "value"), vectors, strict=True))
        found = {"out": out, **named, **floats}
        return {name: np.asarray(array) for name, array in found.items()}

    def program(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function`, compiled where the subject can be; else as it is."""
        return quick_jit(function) if self.has("jit") else function

    def _once(
        self, kind: str, static: dict[str, Any], function: Callable[..., Any]
    ) -> Callable[..., Any]:
        """The program of the first call of this kind with these static options."""
        name = (kind, *sorted(static.items()))
        if name not in self._programs:
            self._programs[name] = self.program(function)
        return self._programs[name]

    def _arguments(
        self, query: Any, key: Any, options: dict[str, Any]
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """The keywords of the function: those that are static, and the arrays."""
        options = self._allowing(query.shape[-3], key.shape[-3], options)
        named = {}
        for feature, given in options.items():
            named[self.features.keywords.get(feature, feature)] = given
        static = {k: v for k, v in named.items() if _is_static(v)}
        return static, {k: v for k, v in named.items() if k not in static}

    def _allowing(self, T: int, S: int, options: dict[str, Any]) -> dict[str, Any]:
        """Options in which `causal` and `window` are said as the function wants it."""
        options = dict(options)
        mask = options.pop("mask", None)
        causal, window = options.pop("causal", False), options.pop("window", None)
        positions = self.has("query_positions")  # whoever has them takes rules
        parts: list[Any] = []
        if causal and self.has("is_causal"):
            options["is_causal"] = True
        elif causal:
            tri = np.tri(T, S, dtype=bool)[None, None]
            parts.append(masks.causal() if positions else tri)
        if window is not None and self.has("local_window_size"):
            options["local_window_size"] = window
        elif window is not None:
            distance = np.arange(T)[:, None] - np.arange(S)
            inside = (distance <= window[0]) & (distance >= -window[1])
            rule = masks.sliding_window(*window)
            parts.append(rule if positions else inside[None, None])
        if parts and mask is not None:
            parts.append(masks.dense(mask) if positions else mask)
        mask = functools.reduce(operator.and_, parts) if parts else mask
        return options if mask is None else options | {"mask": mask}


def _is_static(value: Any) -> bool:
    return isinstance(value, (bool, int, float, str, tuple, np.generic))


def _floats(traced: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The options that are floating-point arrays, and the others."""
    floats = {
        name: array
        for name, array in traced.items()
        if jnp.issubdtype(getattr(array, "dtype", np.bool_), jnp.floating)
    }
    return floats, {name: x for name, x in traced.items() if name not in floats}


def _rows_first(lse: Any, query: Any) -> Any:
    """(B, T, N), also from a function that returns (B, N, T); T is not N."""
    rows = query.shape[:-1]
    return jnp.swapaxes(lse, -1, -2) if lse.shape != rows else lse
