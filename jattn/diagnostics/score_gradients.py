"""Whether gradients reach the scores, row by row."""

from typing import Any, Literal

import jax
import jax.numpy as jnp

from jattn import execute
from jattn.choice import block_sizes_of
from jattn.core.boundary import check_floating, check_vectors
from jattn.core.rules import Array, Mask, Score
from jattn.core.spec import AttentionSpec
from jattn.prepare import Call, check_dropout, prepare

NAME = "score_gradient_rows"


def score_gradient_rows(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    out_gradient: jax.Array,
    *,
    lse_gradient: jax.Array | None = None,
    mask: Mask | Array | None = None,
    score: Score | tuple[Score, ...] | None = None,
    bias: Array | None = None,
    scale: float | Array | None = None,
    sinks: Array | None = None,
    dropout_rate: float = 0.0,
    dropout_rng: jax.Array | None = None,
    query_positions: Array | Literal["start", "end"] | None = None,
    key_positions: Array | None = None,
    block_sizes: tuple[int, int] | None = None,
    precision: jax.lax.PrecisionLike = None,
) -> jax.Array:
    """The norm of the gradient of a loss with respect to the logits of each query.

        |dL/ds|   with   dL/ds = p (v dL/dout - out dL/dout + dL/dlse)

    It is 0 for a query whose softmax is saturated: no gradient reaches the projections
    of queries and keys from there, however large the gradients of others are. Memory is
    O(T + S), as that of `attention`.

    Args:
        query: (*B, T, N, H), as given to `attention`, as are the following.
        key: (*B, S, K, H).
        value: (*B, S, K, D).
        out_gradient: the gradient of the loss with respect to attention's output,
            (*B, T, N, D): for example that of zeros which a model adds to it.
        lse_gradient: that with respect to its lse, (*B, T, N), if the loss uses it.
        mask: as in `attention`, as are the following.
        score: a rule or a tuple of them.
        bias: (*B, N, T, S), each axis full or 1.
        scale: a number or (N,).
        sinks: a number or (N,).
        dropout_rate: in [0, 1).
        dropout_rng: the very key that was given to `attention`.
        query_positions: "start", "end" or integers.
        key_positions: integers.
        block_sizes: (queries, keys) of a tile.
        precision: of the matrix products.

    Returns:
        (*B, T, N), float32 (float64 if a vector is); a constant to derivatives.

    Raises:
        ValueError: shapes, positions or options do not fit, named in letters.
        TypeError: an argument is of the wrong kind.

    Source: Dao et al. 2022, arXiv:2205.14135, appendix B.2 (the gradient tile by tile).

    Example:
        >>> import jax, jattn
        >>> x = jax.random.normal(jax.random.key(0), (2, 5, 4, 8))  # (B, T, N, H)
        >>> causal = jattn.masks.causal()
        >>> def loss(extra):
        ...     return jnp.sum((jattn.attention(x, x, x, mask=causal) + extra) ** 2)
        >>> out_gradient = jax.grad(loss)(jnp.zeros_like(x))
        >>> rows = score_gradient_rows(x, x, x, out_gradient, mask=causal)
        >>> rows.shape, bool(rows[:, 0].max() < 1e-5)  # the first query has no choice
        ((2, 5, 4), True)
    """
    sizes = check_vectors(NAME, query, key, value)
    call = Call(NAME, sizes)
    rows = (*sizes.batch, sizes.T, sizes.N)
    _check_gradient("out_gradient", out_gradient, (*rows, value.shape[-1]))
    if lse_gradient is not None:
        _check_gradient("lse_gradient", lse_gradient, rows)
    pairs, align = prepare(
        call,
        mask=mask,
        score=score,
        bias=bias,
        scale=scale,
        sinks=sinks,
        query_positions=query_positions,
        key_positions=key_positions,
    )
    spec = AttentionSpec(
        implementation="blockwise",
        dtype=str(jnp.result_type(query, key, value)),
        block_sizes=block_sizes_of(call, block_sizes),
        adapt_blocks=block_sizes is None,
        align=align,
        precision=precision,
        dropout_rate=check_dropout(call, dropout_rate, dropout_rng),
    )
    return execute.score_gradient_rows(
        query, key, value, out_gradient, lse_gradient, pairs, dropout_rng, spec=spec
    )


def _check_gradient(name: str, given: Any, want: tuple[int, ...]) -> None:
    check_floating(NAME, name, given)
    if given.shape != want:
        letters = "(*B, T, N, D)" if name == "out_gradient" else "(*B, T, N)"
        raise ValueError(
            f"{NAME}: {name} must be {letters}, here {want}, but got {given.shape}. "
            "It is the gradient with respect to what attention returns."
        )
