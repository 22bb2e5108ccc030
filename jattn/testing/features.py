"""What an attention function offers: read from its signature, or found by trying.

A feature is a keyword by the name it has in the wild ("mask", "local_window_size"), or
an ability that no signature shows ("grad", "value_dim"), which is tried.
"""

import itertools
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp

from jattn.core.boundary import one_of
from jattn.foreign import in_one_line, parameters_of

KEYWORDS = {
    "mask": ("mask",),
    "bias": ("bias",),
    "scale": ("scale",),
    "is_causal": ("is_causal",),
    "query_seq_lengths": ("query_seq_lengths",),
    "key_value_seq_lengths": ("key_value_seq_lengths",),
    "local_window_size": ("local_window_size",),
    "query_positions": ("query_positions",),
    "key_positions": ("key_positions",),
    "sinks": ("sinks",),
    "score": ("score",),
    "logits_soft_cap": ("logits_soft_cap", "logit_soft_cap"),
    "return_lse": ("return_lse", "return_residual"),
    "dropout": ("dropout_rate",),
    "deterministic": ("deterministic",),
}
"""Features that are arguments, each with the names it goes by; "dropout" has its key in
dropout_rng."""

Vectors = tuple[Any, Any, Any]


def _vectors(*shapes: tuple[int, ...], dtype: Any = jnp.float32) -> Vectors:
    query, key, value = shapes[0], shapes[1], shapes[-1]
    return jnp.ones(query, dtype), jnp.ones(key, dtype), jnp.ones(value, dtype)


def _plain(*shapes: tuple[int, ...], dtype: Any = jnp.float32) -> Callable:
    return lambda fn: fn(*_vectors(*shapes, dtype=dtype))


def _scalar(fn: Callable, vectors: Vectors) -> Callable[[Any], Any]:
    query, key, value = vectors
    return lambda x: jnp.sum(fn(x, key, value) ** 2)


def _grad(fn: Callable) -> Any:
    vectors = _vectors(*_SMALL)
    return jax.grad(_scalar(fn, vectors))(vectors[0])


def _jvp(fn: Callable) -> Any:
    vectors = _vectors(*_SMALL)
    return jax.jvp(fn, vectors, vectors)


def _hvp(fn: Callable) -> Any:
    vectors = _vectors(*_SMALL)
    gradient = jax.grad(_scalar(fn, vectors))
    return jax.jvp(gradient, vectors[:1], vectors[:1])


def _vmap(fn: Callable) -> Any:
    return jax.vmap(fn)(*(x[None] for x in _vectors(*_SMALL)))


_SMALL = ((2, 3, 2, 4), (2, 5, 2, 4))

TRIALS: dict[str, Callable[[Callable], Any]] = {
    "jit": lambda fn: jax.eval_shape(fn, *_vectors(*_SMALL)),
    "grad": _grad,
    "jvp": _jvp,
    "hvp": _hvp,
    "vmap": _vmap,
    "gqa": _plain((2, 3, 4, 4), (2, 5, 2, 4)),
    "value_dim": _plain((2, 3, 2, 4), (2, 5, 2, 4), (2, 5, 2, 7)),
    "no_batch": _plain((3, 2, 4), (5, 2, 4)),
    "float16": _plain(*_SMALL, dtype=jnp.float16),
    "bfloat16": _plain(*_SMALL, dtype=jnp.bfloat16),
    "float64": _plain(*_SMALL, dtype=jnp.float64),
}
"""Features that are abilities, each with a call that fails where there is none."""


class Features:
    """What a function offers; abilities are tried when they are first asked for.

    Raises:
        ValueError: supports holds an unknown name.
        TypeError: supports is a string.
    """

    def __init__(
        self, attention_fn: Callable[..., Any], supports: Iterable[str] | None = None
    ) -> None:
        self.fn = attention_fn
        self.keywords: dict[str, str] = {}
        """From a feature that is an argument to the name by which it is asked for."""
        self._missing: dict[str, str | None] = {}
        parameters = parameters_of(attention_fn)
        named = parameters if supports is None else _checked(supports)
        for feature, names in KEYWORDS.items():
            if named & ({*names} if supports is None else {feature, *names}):
                found = max(names, key=lambda x: (x in parameters, x in named))
                self.keywords[feature] = found
                self._missing[feature] = None
            else:
                self._missing[feature] = f"no argument {' or '.join(names)}"
        if supports is not None:
            for feature in TRIALS:
                self._missing[feature] = None if feature in named else "not in supports"

    def missing(self, feature: str) -> str | None:
        """Why it does not offer this feature; None if it does."""
        if feature not in self._missing:
            self._missing[feature] = self._tried(feature)
        return self._missing[feature]

    def _tried(self, feature: str) -> str | None:
        trial = TRIALS[feature]
        traced = feature != "jit" and self.missing("jit") is None
        try:
            with jax.enable_x64(True):  # for float64; the others name their dtype
                if traced:  # not run, nor compiled; lowered, or a jvp may seem to work
                    jax.jit(lambda: trial(self.fn)).lower()
                else:
                    trial(self.fn)
        except Exception as error:  # whatever it says, it cannot
            return f"{feature}: {in_one_line(error)}"
        return None


def _checked(supports: Iterable[str]) -> set[str]:
    if isinstance(supports, str):
        raise TypeError(
            f"conformance: supports must be names of features, but got {supports!r}. "
            f"Write supports=[{supports!r}]."
        )
    known = {*KEYWORDS, *itertools.chain(*KEYWORDS.values()), *TRIALS}
    named = set(supports)
    for name in named - known:
        one_of("conformance", "a name in supports", name, tuple(sorted(known)))
    return named
