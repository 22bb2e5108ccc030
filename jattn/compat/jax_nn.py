"""`dot_product_attention`, to stand in the place of that of `jax.nn`."""

import functools
import operator
from typing import Any, Literal

import jax
import numpy as np
from jax.typing import ArrayLike

from jattn import masks
from jattn.compat.arguments import (
    CALLER,
    check_scale,
    lengths_of,
    pairs_of,
    vectors_of,
    window_of,
)
from jattn.core.boundary import one_of
from jattn.core.rules import Mask
from jattn.dispatch import attend_as


def dot_product_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    query_seq_lengths: ArrayLike | None = None,
    key_value_seq_lengths: ArrayLike | None = None,
    local_window_size: int | tuple[int, int] | None = None,
    implementation: Literal["xla", "cudnn"] | None = None,
    return_residual: bool = False,
) -> Any:
    """`jax.nn.dot_product_attention` in linear memory, and right where that is not.

        out = softmax(query key^T scale + bias, forbidden pairs at -inf) value

    The parameters are those of `jax.nn`, and so are the results, but for the
    differences below. Whatever forbids pairs does so together with the rest, and tiles
    in which no pair is left are not computed.

    Args:
        query: (B, T, N, H), or (T, N, H), which is a batch of one.
        key: (B, S, K, H) or (S, K, H), dtype of query; N a multiple of K.
        value: shape and dtype of key.
        bias: floating point, (B, N, T, S), each axis full or 1; added to the logits.
            Missing axes are the first ones, so (N, T, S) or (T, S).
        mask: Boolean, True where a query may look; the shapes of bias.
        scale: factor of the dot products, a number. Default 1/sqrt(H).
        is_causal: query t sees key s only if s <= t, also where T != S.
        query_seq_lengths: integers (B,); queries from there on see nothing.
        key_value_seq_lengths: integers (B,); keys from there on are not seen. Beside
            (T, N, H) lengths may be scalars.
        local_window_size: (left, right): query t sees key s only if t - left <= s <=
            t + right. An int is both.
        implementation: None and "xla" are jattn. "cudnn" is that of `jax.nn` on a GPU,
            after the same checks; its results do not differ from those of `jax.nn`.
        return_residual: whether to return the log-sum-exp too.

    Returns:
        out: shape and dtype of query; alone, or as (out, lse) with `return_residual`.
        lse: (B, T, N) or (T, N), float32 (float64 for float64 inputs), differentiable:
            natural log of the softmax's denominator.

    Raises:
        ValueError: shapes, dtypes or options do not fit, named in letters.
        TypeError: an argument is of the wrong kind.
        NotImplementedError: implementation is "cudnn", and the backend is no GPU.

    Differences from `jax.nn` 0.10.2 to 0.12.0, with what that does in brackets:
        - A query that may look at nothing gets 0, and an lse of -inf. [The mean of all
          values, those behind the mask too, and -2.4e38.]
        - No bias makes a forbidden key look better than an allowed one. [Forbidden is
          -2.4e38. Where all keys that a query may look at have a lower bias, such as
          `jnp.finfo(jnp.float32).min`, it looks at the others, in the future too.]
        - A NaN or an Inf that no query may look at reaches no output and no gradient.
          [One in value reaches all outputs; one in query or key, gradients.]
        - lse has gradients. [They are 0.]
        - lse is not rounded. [It has the dtype of key.]
        - float64 inputs give float64 results. [The softmax is in float32.]

    Refused, where `jax.nn` gives an answer:
        - A bias or a mask of three axes (B, T, S) or two (B, S): by its shape it may be
          one with the first axes missing. [It is, if B = N or B = T.]
        - A Boolean bias [it adds 1], and one of integers.
        - A window below 0. [Not unbounded: not even the query's own key is seen.]
        - Lengths that are known to be below 0. [As 0.]
        - Integers as query, key and value. [The weights are rounded to integers.]
        - A scale with axes. [One for each key.]
        - A query (N, H). [T = 1.]
        - A head size of 0, and True as a window.

    Accepted, where `jax.nn` raises: lengths of any integer type, numpy integers as a
    window and traced ones, lengths without an axis, N = 0. A window beyond every key,
    as 2**31 - 1, is one; in `jax.nn` it wraps around.

    Source: Vaswani et al. 2017, arXiv:1706.03762, section 3.2; Dao 2023,
        arXiv:2307.08691, section 3.1 (lse).

    Example:
        >>> import jax, jattn
        >>> x = jax.random.normal(jax.random.key(0), (2, 5, 4, 8))  # (B, T, N, H)
        >>> options = dict(key_value_seq_lengths=np.array([3, 0]), is_causal=True)
        >>> want = jax.nn.dot_product_attention(x, x, x, **options)
        >>> out, lse = jattn.dot_product_attention(
        ...     x, x, x, return_residual=True, **options
        ... )
        >>> abs(out - want).max((1, 2, 3)) < 1e-6  # without keys: 0, and there a mean
        Array([ True, False], dtype=bool)
        >>> lse[1, 0]
        Array([-inf, -inf, -inf, -inf], dtype=float32)
    """
    if implementation is not None:
        one_of(CALLER, "implementation", implementation, ("xla", "cudnn"))
    shape = np.shape(query)
    vectors, sizes = vectors_of(query, key, value)
    batched = len(shape) == 4
    bias = pairs_of("bias", bias, np.floating, sizes, batched)
    mask = pairs_of("mask", mask, np.bool_, sizes, batched)
    of_queries = lengths_of("query_seq_lengths", query_seq_lengths, sizes, batched)
    of_keys = lengths_of("key_value_seq_lengths", key_value_seq_lengths, sizes, batched)
    window = window_of(local_window_size)
    check_scale(scale, sizes)
    if implementation == "cudnn":
        results = _cudnn(
            *vectors,
            bias,
            mask,
            scale=scale,
            is_causal=is_causal,
            query_seq_lengths=of_queries,
            key_value_seq_lengths=of_keys,
            local_window_size=window,
            return_residual=return_residual,
        )
    else:
        lengths = (of_queries, of_keys, sizes.S)
        results = attend_as(
            CALLER,
            *vectors,
            mask=_all_of(mask, bool(is_causal), window, *lengths),
            bias=bias,
            scale=scale,
            query_positions="start",
            return_lse=bool(return_residual),
        )
    if not return_residual:
        return results.reshape(shape)
    out, lse = results
    return out.reshape(shape), lse.reshape(shape[:-1])


def _all_of(
    mask: jax.Array | None,
    is_causal: bool,
    window: tuple[Any, Any] | None,
    of_queries: jax.Array | None,
    of_keys: jax.Array | None,
    num_keys: int,
) -> Mask | None:
    """One rule of all that forbids pairs."""
    rules: list[Mask] = []
    if is_causal:
        rules.append(masks.causal())
    if window is not None:
        rules.append(masks.sliding_window(*window))
    if of_queries is not None or of_keys is not None:
        rules.append(
            masks.lengths(num_keys if of_keys is None else of_keys, of_queries)
        )
    if mask is not None:
        rules.append(masks.dense(mask))
    return functools.reduce(operator.and_, rules) if rules else None


def _cudnn(*arrays: Any, **options: Any) -> Any:
    backend = jax.default_backend()
    if backend != "gpu":
        raise NotImplementedError(
            f"{CALLER}: implementation='cudnn' needs a GPU with cuDNN, but got the "
            f"backend {backend!r}. Use implementation=None, which runs everywhere."
        )
    return jax.nn.dot_product_attention(*arrays, **options, implementation="cudnn")
