"""The weights of attention: recovered from a function, or given as an array."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jattn.core.boundary import check_floating, check_vectors
from jattn.foreign import check_returned

WEIGHT_TOLERANCE = {
    "float64": 1e-11,
    "float32": 2e-5,
    "float16": 4e-3,
    "bfloat16": 2e-2,
}
"""Largest error of a weight against float64, by dtype."""

NUM_UNITS = 11
"""1 to 1024: so many powers of two are exact in every dtype, beside any weight."""


def recovered(
    attention_fn: Callable[..., Any], query: jax.Array, key: jax.Array
) -> np.ndarray:
    """By calls with values that are one-hot, H columns of the weights in each."""
    sizes = check_vectors("rows", query, key)
    *batch, S, K, H = key.shape
    N, parts = sizes.N, []
    if sizes.T == 0 or S == 0:
        raise ValueError(
            f"rows: there must be a query and a key, but got T={sizes.T}, {S=}. "
            "Give longer arrays."
        )
    # By them, values of another batch row or head show in the sums.
    units = 2.0 ** (np.arange(math.prod(batch) * K) % NUM_UNITS)
    unit = units.reshape(*batch, 1, K, 1)
    with jax.default_matmul_precision("highest"):
        for start in range(0, S, H):
            value = np.eye(S, H, -start)[:, None, :] * unit
            out = attention_fn(query, key, jnp.asarray(value, key.dtype))
            check_returned("rows", out, query.shape)
            parts.append(np.asarray(out, np.float64))
    weights = np.concatenate(parts, axis=-1)[..., :S] / np.repeat(unit, N // K, -2)
    return np.moveaxis(weights, -2, -3)


def given(weights: Any, query: Any, key: Any) -> tuple[np.ndarray, str]:
    """Weights that were given, checked, in float64; and the dtype of their errors."""
    check_floating("rows", "attention_fn, if it is no function,", weights)
    if weights.ndim < 3 or 0 in weights.shape:
        raise ValueError(
            f"rows: weights must be (*B, N, T, S), and not empty, but got "
            f"{weights.shape}. Give a single head its axis: weights[None]."
        )
    if (query is None) != (key is None):
        raise ValueError(
            "rows: query and key go together, but got only one of them. Give both, or "
            "none to leave the logits out."
        )
    used = str(weights.dtype)
    if query is not None:
        sizes = check_vectors("rows", query, key)
        if weights.shape != (*sizes.batch, sizes.N, sizes.T, sizes.S):
            raise ValueError(
                "rows: weights must be (*B, N, T, S) of query and key, here "
                f"{(*sizes.batch, sizes.N, sizes.T, sizes.S)}, but got {weights.shape}."
                " Give the query and key that the weights were made of."
            )
        # A softmax in float32 of vectors in bfloat16 is as exact as they are.
        of_vectors = str(jnp.result_type(query, key))
        used = max(used, of_vectors, key=WEIGHT_TOLERANCE.__getitem__)
    return np.asarray(weights, np.float64), used
