"""A mask as the pairs that it allows."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jattn import execute
from jattn.core.boundary import check_vectors
from jattn.core.letters import letters_of
from jattn.core.rules import Mask
from jattn.core.spec import AttentionSpec
from jattn.prepare import Call, prepare


def allowed_pairs(
    caller: str,
    mask: Any,
    batch: tuple[int, ...],
    num_queries: int,
    num_keys: int,
    num_heads: int | None = None,
    query_positions: Any = None,
) -> np.ndarray:
    """Which query may look at which key, Boolean (*B, N, T, S).

    Args:
        caller: the function that an error names.
        mask: a rule, or a Boolean array (*B, N, T, S), each axis full or 1; None
            allows all.
        batch: *B.
        num_queries: T.
        num_keys: S.
        num_heads: N; by default as many as the mask's arrays have.
        query_positions: as in `attention`.

    Raises:
        ValueError: the mask has other sizes, or needs positions that are not given.
        TypeError: it is neither a rule nor a Boolean array.
    """
    heads = num_heads or _heads_of(mask, len(batch))
    query = jnp.zeros((*batch, num_queries, heads, 1))
    key = jnp.zeros((*batch, num_keys, heads, 1))
    pairs, align = prepare(
        Call(caller, check_vectors(caller, query, key)),
        mask=mask,
        score=None,
        bias=None,
        scale=None,
        sinks=None,
        query_positions=query_positions,
        key_positions=None,
    )
    # Equal scores: a weight is positive where the pair is allowed, and 0 elsewhere.
    spec = AttentionSpec(dtype="float32", align=align)
    return np.asarray(execute.weights(query, key, pairs, None, spec=spec)) > 0


def _heads_of(mask: Any, batch_rank: int) -> int:
    if not isinstance(mask, Mask):
        shape = np.shape(mask)
        return shape[-3] if len(shape) == batch_rank + 3 else 1
    sizes = [1]
    for array, letters in zip(jax.tree.leaves(mask), letters_of(mask), strict=True):
        behind = len(letters) - letters.index("N") if "N" in letters else np.inf
        if np.ndim(array) >= behind:
            sizes.append(np.shape(array)[-int(behind)])
    return max(sizes)
