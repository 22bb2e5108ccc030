"""Which inputs to change, and which outputs must not notice."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np


class Change(NamedTuple):
    """Inputs to change together, (B, S), and outputs that may see none, (B, T)."""

    inputs: np.ndarray
    outputs: np.ndarray


def reach(allowed: np.ndarray, layers: int, residual: bool) -> np.ndarray:
    """What may reach an output, (B, T, S), from what one layer lets it see."""
    square = allowed.shape[-1] == allowed.shape[-2]
    if residual and square:
        allowed = allowed | np.eye(allowed.shape[-1], dtype=bool)
    seen = allowed
    for _ in range(layers - 1):
        seen = seen.astype(np.float32) @ allowed.astype(np.float32) > 0
    return seen


def blind_changes(allowed: np.ndarray, limit: int) -> list[Change]:
    """What some output must not see, changed all together; row by row of the mask.

    Outputs that see the same share one, so a causal mask over T places needs T - 1 and
    documents one each. Up to `limit` of them every forbidden pair is covered;
    beyond it they are spread evenly.
    """
    hidden = [
        list({row.tobytes(): row for row in ~seen if row.any()}.values())
        for seen in allowed
    ]
    number = max(map(len, hidden))
    chosen = np.unique(np.linspace(0, number - 1, min(number, limit)).round())
    changes = []
    for i in chosen.astype(int):
        rows = [h[i] if i < len(h) else np.zeros_like(allowed[0, 0]) for h in hidden]
        changes.append(_change(np.stack(rows), allowed))
    return changes


def row_changes(allowed: np.ndarray) -> Iterator[Change]:
    """Changes of whole batch rows, by which any two are told apart."""
    batch = len(allowed)
    for bit in range((batch - 1).bit_length()):
        for side in (0, 1):
            changed = (np.arange(batch) >> bit) % 2 == side
            inputs = np.repeat(changed[:, None], allowed.shape[2], axis=1)
            outputs = np.repeat(~changed[:, None], allowed.shape[1], axis=1)
            yield Change(inputs, outputs)


def control_changes(allowed: np.ndarray) -> Iterator[Change]:
    """Changes of every second input; the other outputs may see some of it."""
    places = np.arange(max(allowed.shape[1:])) % 2
    for side in (0, 1):
        changed = places == side
        inputs = np.broadcast_to(
            changed[: allowed.shape[2]], (len(allowed), allowed.shape[2])
        )
        seen = (allowed & inputs[:, None]).any(-1)
        own = changed[: allowed.shape[1]] & (allowed.shape[1] == allowed.shape[2])
        yield Change(inputs, seen & ~own)


def _change(inputs: np.ndarray, allowed: np.ndarray) -> Change:
    seen = (allowed & inputs[:, None]).any(-1)
    return Change(inputs, ~seen & inputs.any(-1, keepdims=True))


def covered(changes: Sequence[Change], allowed: np.ndarray) -> int:
    """How many of the forbidden pairs the changes cover."""
    pairs = np.zeros_like(allowed)
    for change in changes:
        pairs |= change.outputs[:, :, None] & change.inputs[:, None]
    return int(pairs.sum())


def narrow(candidates: np.ndarray, test: Callable[[np.ndarray], bool]) -> np.ndarray:
    """Halves the candidates while `test` is true of one half alone."""
    while len(candidates) > 1:
        halves = np.array_split(candidates, 2)
        left = [half for half in halves if test(half)]
        if not left:
            return candidates
        candidates = left[0]
    return candidates


def spread(x: np.ndarray, like: Any, axis: int) -> np.ndarray:
    """(B, T), flat, as it broadcasts against an array (*B, T, ...)."""
    return x.reshape(*like.shape[: axis + 1], *(1,) * (like.ndim - axis - 1))


def other_values(
    x: np.ndarray, far: bool, rng: np.random.Generator, num_tokens: int | None
) -> np.ndarray:
    """Values to put in place of others: of their size, or large and of other sign."""
    if num_tokens is not None and jnp.issubdtype(x.dtype, jnp.integer):
        shift = rng.integers(1, num_tokens, x.shape)
        return ((x.astype(np.int64) + shift) % num_tokens).astype(x.dtype)
    old = x.astype(np.float64)
    size = np.sqrt(np.mean(old**2)) or 1.0
    new = rng.standard_normal(x.shape) * size
    if far:
        new = -(old + new) * (30 if x.dtype == np.float16 else 100)
    return new.astype(x.dtype)
