"""Sequences of symbols, padded on the right."""

import numpy as np

from experiments.data import rng_of


def sequences(
    *, symbols: int, shortest: int, longest: int, batch: int, seed: int, step: int
) -> tuple[np.ndarray, np.ndarray]:
    """Symbols drawn evenly, of lengths drawn evenly; a function of the arguments.

    Args:
        symbols: how many there are; the number itself is padding.
        shortest: the least length.
        longest: the largest length.
        batch: B.
        seed: of a run.
        step: of that run.

    Returns:
        The sequences, (B, longest), and their lengths, (B, 1).
    """
    rng = rng_of(seed, step)
    lengths = rng.integers(shortest, longest + 1, (batch, 1))
    drawn = rng.integers(symbols, size=(batch, longest))
    return np.where(np.arange(longest) < lengths, drawn, symbols), lengths
