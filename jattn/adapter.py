"""jattn's attention inside Flax's own modules."""

from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp

from jattn.core.boundary import Sizes, check_positions, check_vectors
from jattn.core.dropout import Shared
from jattn.core.rules import Array, Mask, Score
from jattn.dispatch import attend_as, attention_weights
from jattn.layer import module_mask
from jattn.prepare import check_rate

CALLER = "attention_fn"


def attention_fn(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: Array | None = None,
    mask: Mask | Array | None = None,
    broadcast_dropout: bool = True,
    dropout_rng: jax.Array | None = None,
    dropout_rate: float = 0.0,
    deterministic: bool = False,
    dtype: Any = None,
    precision: jax.lax.PrecisionLike = None,
    module: Any = None,
    *,
    force_fp32_for_softmax: bool = False,
    einsum_dot_general: Callable[..., Any] | None = None,
    qk_attn_weights_einsum: Callable[..., Any] | None = None,
    attn_weights_value_einsum: Callable[..., Any] | None = None,
    promote_dtype: Callable[..., Any] | None = None,
    is_causal: bool = False,
    input_positions: Array | None = None,
    score: Score | tuple[Score, ...] | None = None,
    scale: float | Array | None = None,
    sinks: Array | None = None,
    query_positions: Array | Literal["start", "end"] | None = None,
    key_positions: Array | None = None,
    empty_rows: Literal["zero", "mean"] = "zero",
    implementation: Literal["reference", "blockwise"] | None = None,
    block_sizes: tuple[int, int] | None = None,
) -> jax.Array:
    """`attention` as the `attention_fn` of a module of `flax.nnx` or `flax.linen`.

    It takes what `flax.nnx.dot_product_attention` and that of `flax.linen` take, and
    options of `attention` by `functools.partial`. What a module passes itself, as the
    mask, overrides a partial: mask rules are arguments of the module's call, except
    with `decode=True`, where Flax combines masks as arrays.

    It differs where Flax's depends on the path it takes or on what is masked. Memory is
    O(T + S) with dropout too; a query without keys gets 0; a NaN or an Inf reaches
    exactly the queries that may look at it; logits and softmax are float32 at least.

    Args:
        query: (*B, T, N, H).
        key: (*B, S, K, H); N a multiple of K.
        value: (*B, S, K, D).
        bias: as in `attention`.
        mask: a rule from `jattn.masks`, or an array (*B, N, T, S), each axis full or 1:
            Boolean, or numbers as from Flax's `make_causal_mask`, allowed if not 0.
        broadcast_dropout: whether all batch rows and heads drop the same weights.
        dropout_rng: a key of `jax.random`. The pattern is that of `attention`.
        dropout_rate: the share of weights that are dropped.
        deterministic: whether to drop none.
        dtype: of the computation; default that of the vectors together.
        precision: of the matrix products.
        module: where to sow the weights before dropout, (*B, N, T, S), under the name
            "attention_weights". They take O(T S) memory; the output is the same.
        force_fp32_for_softmax: the softmax is float32 always; True keeps it for the
            weights that are sown, which otherwise have the dtype of the computation.
        einsum_dot_general: None or `jax.lax.dot_general`; others are refused.
        qk_attn_weights_einsum: None or `jnp.einsum`, likewise.
        attn_weights_value_einsum: None or `jnp.einsum`, likewise.
        promote_dtype: `promote_dtype((query, key, value), dtype=dtype)`, in place of
            the cast to one dtype.
        is_causal: whether to allow only what `jattn.masks.causal()` allows too.
        input_positions: integers that broadcast to (*B, T): where the queries stand,
            and if T == S the keys too; with T != S, as in a cache, keys are 0 to S - 1.
        score: as in `attention`, as are all that follow.
        scale: default 1/sqrt(H).
        sinks: a number, or (N,).
        query_positions: default "start", also with T != S, which is Flax's alignment.
            Where Flax passes is_causal on while decoding (0.12.8), give "end".
        key_positions: default 0 to S - 1.
        empty_rows: "mean" is Flax's.
        implementation: "reference" or "blockwise".
        block_sizes: (queries, keys) of a tile.

    Returns:
        (*B, T, N, D), of the dtype of the computation.

    Raises:
        ValueError: shapes, positions or options do not fit, named in letters.
        TypeError: an argument is of the wrong kind.
        NotImplementedError: a product is not that of JAX.

    Example:
        >>> import functools, jattn
        >>> from flax import nnx
        >>> layer = nnx.MultiHeadAttention(
        ...     4,
        ...     8,
        ...     decode=False,
        ...     rngs=nnx.Rngs(0),
        ...     attention_fn=functools.partial(
        ...         jattn.attention_fn, score=jattn.scores.soft_cap(50.0)
        ...     ),
        ... )
        >>> layer(jnp.ones((2, 5, 8)), mask=jattn.masks.sliding_window(2)).shape
        (2, 5, 8)
    """
    _check_product("einsum_dot_general", einsum_dot_general, jax.lax.dot_general)
    _check_product("qk_attn_weights_einsum", qk_attn_weights_einsum, jnp.einsum)
    _check_product("attn_weights_value_einsum", attn_weights_value_einsum, jnp.einsum)
    query, key, value = (promote_dtype or _promoted)((query, key, value), dtype=dtype)
    sizes = check_vectors(CALLER, query, key, value)
    options: dict[str, Any] = dict(
        mask=module_mask(mask, is_causal),
        score=score,
        bias=bias,
        scale=scale,
        sinks=sinks,
        empty_rows=empty_rows,
        precision=precision,
    )
    options |= _positions(
        sizes,
        "is_causal" if is_causal else _positional(score),
        input_positions,
        query_positions,
        key_positions,
    )
    rate = check_rate(CALLER, dropout_rate)  # Flax reads one below 0, and NaN, as none
    dropout: dict[str, Any] = {}
    if rate and not deterministic:
        rng: Any = dropout_rng
        rng = Shared(rng) if broadcast_dropout else rng
        dropout = dict(dropout_rate=rate, dropout_rng=rng)
    out = attend_as(
        CALLER,
        query,
        key,
        value,
        implementation=implementation,
        block_sizes=block_sizes,
        **options,
        **dropout,
    )
    if module is not None:
        weights = attention_weights(query, key, **options)
        _sow(module, weights if force_fp32_for_softmax else weights.astype(query.dtype))
    return out


def _positions(
    sizes: Sizes,
    counting: str | None,
    input_positions: Any,
    query_positions: Any,
    key_positions: Any,
) -> dict[str, Any]:
    """Where queries and keys stand, as options of `attention`.

    Args:
        sizes: of the vectors.
        counting: which argument counts from the first key, if any does.
        input_positions: as in the call, as are the others.
        query_positions: likewise.
        key_positions: likewise.
    """
    if input_positions is not None:
        if query_positions is not None or key_positions is not None:
            raise ValueError(
                f"{CALLER}: input_positions are those of queries and keys, but got "
                "query_positions or key_positions too. Leave out one or the other."
            )
        places = check_positions(CALLER, "input_positions", input_positions, "T", sizes)
        query_positions, key_positions = places, places if sizes.T == sizes.S else None
    if counting and sizes.T == 1 < sizes.S and query_positions is None:
        cures = {
            "is_causal": "Leave it out there, since the mask of the cache is causal, ",
            "score": "Use the module of jattn.linen or jattn.nnx there, ",
        }
        raise ValueError(
            f"{CALLER}: {counting} counts from the first key, but got T=1 query and "
            f"S={sizes.S} keys, as in Flax's decode=True. {cures[counting]}or give "
            "query_positions."
        )
    if query_positions is None:
        query_positions = "start"
    return dict(query_positions=query_positions, key_positions=key_positions)


def _positional(score: Any) -> str | None:
    """Whether a score rule depends on positions."""
    rules = score if isinstance(score, tuple) else (score,)
    walks = (rule.walk() for rule in rules if isinstance(rule, Score))
    return "score" if any(part.positional for walk in walks for part in walk) else None


def _sow(module: Any, weights: jax.Array) -> None:
    # The collection of Linen, and NNX's name of nnx.Intermediate.
    module.sow("intermediates", "attention_weights", weights)


def _check_product(name: str, given: Any, default: Callable[..., Any]) -> None:
    if given is not None and given is not default:
        raise NotImplementedError(
            f"{CALLER}: {name} must be None, since the products are made tile by tile "
            f"and differentiated by jattn, but got {given!r}. Leave it out, or "
            "use flax.linen.dot_product_attention with it."
        )


def _promoted(arrays: tuple[Any, ...], dtype: Any) -> tuple[jax.Array, ...]:
    dtype = jnp.result_type(*arrays) if dtype is None else dtype
    return tuple(jnp.asarray(x, dtype) for x in arrays)
