"""What attention weights look like after common mistakes."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np


class Recipe(NamedTuple):
    """Weights in float64 numpy, from query (*B, T, N, H) and key (*B, S, K, H)."""

    query: np.ndarray
    key: np.ndarray
    scale: Any = None
    score: Callable[[np.ndarray], np.ndarray] | None = None

    @property
    def factor(self) -> np.ndarray:
        """The scale, (1,) or (N,)."""
        H = self.query.shape[-1]
        scale = H**-0.5 if self.scale is None else self.scale
        return np.reshape(np.asarray(scale, np.float64), -1)

    def logits(self, transposed: bool = True) -> np.ndarray:
        """(*B, N, T, S), also without transposing the keys."""
        q = self.query
        k = np.repeat(self.key, q.shape[-2] // self.key.shape[-2], -2)
        keys = "...snh" if transposed else "...hns"
        s = np.einsum(f"...tnh,{keys}->...nts", q, k) * self.factor[:, None, None]
        return s if self.score is None else self.score(s)

    def weights(self, allowed: np.ndarray) -> np.ndarray:
        """The right ones; 0 in a row that may see nothing."""
        return normalised(self.logits(), allowed)


def normalised(s: np.ndarray, allowed: Any, axis: int = -1) -> np.ndarray:
    """A softmax over what is allowed; 0 where nothing is."""
    s = np.where(allowed, s, -np.inf)
    top = s.max(axis, keepdims=True)
    e = np.exp(s - np.where(np.isfinite(top), top, 0))
    total = e.sum(axis, keepdims=True)
    return e / np.where(total > 0, total, 1)


def suspect(
    weights: np.ndarray, recipe: Recipe, allowed: np.ndarray, atol: float
) -> str | None:
    """The mistake that explains the weights, if one does."""
    right = recipe.weights(allowed)
    for name, candidate in _candidates(recipe, allowed):
        harmless = np.allclose(candidate, right, rtol=0, atol=atol)
        if not harmless and np.allclose(weights, candidate, rtol=0, atol=atol):
            return name
    return None


def _candidates(
    recipe: Recipe, allowed: np.ndarray
) -> Iterator[tuple[str, np.ndarray]]:
    s, H = recipe.logits(), recipe.query.shape[-1]
    T, S = s.shape[-2:]
    square, heads_by_batch = T == S, s.ndim == 4 and s.shape[0] == s.shape[1]
    yield "zeros", np.zeros_like(s)
    yield "a mean of all values", np.full_like(s, 1 / S)
    yield "no mask", normalised(s, True)
    yield "a mask after the softmax", normalised(s, True) * allowed
    yield "a softmax over queries", normalised(s, allowed, -2)
    yield "a softmax over heads", normalised(s, allowed, -3)
    yield "a scale of 1 instead", recipe._replace(scale=1.0).weights(allowed)
    twice = recipe._replace(scale=recipe.factor**2)
    yield "a scale applied twice", twice.weights(allowed)
    if S == H:
        yield "keys not transposed", normalised(recipe.logits(False), allowed)
    if square:
        further = np.pad(allowed, [(0, 0)] * (s.ndim - 1) + [(1, 0)])[..., :-1]
        own = np.eye(T, dtype=bool)
        yield "a mask transposed", normalised(s, allowed.swapaxes(-1, -2))
        yield "a mask that sees one key further", normalised(s, allowed | further)
        yield "a mask without a query's own key", normalised(s, allowed & ~own)
    if heads_by_batch:
        yield "a mask by heads instead of batch", normalised(s, allowed.swapaxes(0, 1))
