"""Where two arrays differ, and by how much."""

import numpy as np


def differences(got: np.ndarray, want: np.ndarray) -> np.ndarray:
    """|got - want| in float64; 0 where both are NaN or the same Inf, else Inf there."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    same = (got == want) | (np.isnan(got) & np.isnan(want))
    with np.errstate(invalid="ignore", over="ignore"):
        apart = np.abs(got - want)
    return np.where(same, 0, np.where(np.isnan(apart), np.inf, apart))


def first_index(where: np.ndarray) -> tuple[int, ...] | None:
    """The index of the first True, or None."""
    places = np.argwhere(where)
    return tuple(places[0].tolist()) if len(places) else None
