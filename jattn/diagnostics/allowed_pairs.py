"""A mask as the pairs that it allows."""

from typing import Any

import jax.numpy as jnp
import numpy as np

from jattn import execute
from jattn.core.boundary import check_vectors
from jattn.core.letters import sizes_along
from jattn.core.spec import AttentionSpec
from jattn.prepare import Call, prepare, rule_of


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
    mask = rule_of(caller, mask)
    if num_heads is None:
        num_heads = max([1, *sizes_along(mask, "N")])
    query = jnp.zeros((*batch, num_queries, num_heads, 1))
    key = jnp.zeros((*batch, num_keys, num_heads, 1))
    call = Call(caller, check_vectors(caller, query, key))
    pairs, align = prepare(call, mask=mask, query_positions=query_positions)
    # Equal scores: a weight is positive where the pair is allowed, and 0 elsewhere.
    spec = AttentionSpec(dtype="float32", align=align)
    return np.asarray(execute.weights(query, key, pairs, None, spec=spec)) > 0
