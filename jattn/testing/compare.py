"""How results are compared, and how a difference is put into words."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

TOLERANCE = {
    jnp.dtype(jnp.float64): dict(rtol=1e-11, atol=1e-12),
    jnp.dtype(jnp.float32): dict(rtol=1e-4, atol=2e-5),
    jnp.dtype(jnp.float16): dict(rtol=1e-2, atol=1e-2),
    jnp.dtype(jnp.bfloat16): dict(rtol=6e-2, atol=6e-2),
}
"""Largest error by the dtype of the inputs: some roundings of sums of a few terms."""


class Difference(Exception):
    """A claim does not hold; the message says what was got and what was wanted."""


def close(
    name: str, got: Any, want: Any, dtype: Any = jnp.float32, because: str = ""
) -> None:
    """Equal up to rounding; NaN and Inf equal themselves.

    A gradient is a sum of terms of either sign, so errors are measured in units of
    the largest entry if that is above one.
    """
    got = shaped(name, got, want)
    want = np.asarray(want, np.float64)
    size = max(1.0, np.max(np.abs(want[np.isfinite(want)]), initial=0.0))
    with np.errstate(invalid="ignore"):
        right = np.isclose(
            got / size, want / size, equal_nan=True, **TOLERANCE[jnp.dtype(dtype)]
        )
    _raise_at(name, ~right, got, want, because)


def all_close(
    got: Mapping[str, Any],
    want: Mapping[str, Any],
    dtype: Any = jnp.float32,
    because: str = "",
) -> None:
    """`close` for an output and gradients, by name; `want` may hold more."""
    for name in got:
        what = name if name == "out" else f"gradient of {name}"
        close(what, got[name], want[name], dtype, because)


def exactly(name: str, got: Any, want: Any, because: str = "") -> None:
    """Equal numbers, without rounding."""
    got = shaped(name, got, want)
    want = np.asarray(want, np.float64)
    _raise_at(
        name, ~((got == want) | (np.isnan(got) & np.isnan(want))), got, want, because
    )


def finite(name: str, got: Any, rows: Any = True) -> None:
    """No NaN and no Inf, where `rows` is True."""
    got = np.asarray(got, np.float64)
    _raise_at(name, ~np.isfinite(got) & rows, got, None, "must be finite")


def check(holds: Any, words: str) -> None:
    """Raise a difference in these words unless it holds."""
    if not holds:
        raise Difference(words)


def shaped(name: str, got: Any, want: Any) -> np.ndarray:
    """`got` in float64, of the shape of `want`."""
    check(
        np.shape(got) == np.shape(want),
        f"{name} has shape {np.shape(got)}, not {np.shape(want)}",
    )
    return np.asarray(got, np.float64)


def _raise_at(name: str, wrong: Any, got: Any, want: Any, because: str) -> None:
    places = np.argwhere(wrong)
    if not len(places):
        return
    first = tuple(map(int, places[0]))
    at = f"{name}[{', '.join(map(str, first))}]" if first else name
    wanted = "" if want is None else f", not {want[first]:.5g}"
    if wanted == f", not {got[first]:.5g}":
        wanted += f", off by {abs(got[first] - want[first]):.2g}"
    count = f" ({len(places)} of {np.size(wrong)} entries)"
    reason = f"; {because}" if because else ""
    raise Difference(f"{at} is {got[first]:.5g}{wanted}{count}{reason}")


def normal(seed: int, *shape: int, dtype: Any = np.float32) -> np.ndarray:
    """Standard normal numbers of this dtype, the same in every run."""
    drawn = np.random.default_rng(seed).standard_normal(shape)
    return drawn.astype(jax.dtypes.canonicalize_dtype(dtype))
