"""Multi-head attention as a Flax NNX module."""

from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.typing import Dtype, Initializer, PrecisionLike

from jattn import masks
from jattn.core.boundary import one_of, positions_beside, unplaced
from jattn.core.rules import Array, Mask, Score
from jattn.dispatch import attention

Rope = Callable[[jax.Array, Array], jax.Array]


class MultiHeadAttention(nnx.Module):
    """Projections to heads, `jattn.attention`, and a projection back.

        out = concat_n(attention(x W_Q[n], y W_K[n], z W_V[n])) W_O

    Arguments and parameters have the names, paths and shapes of
    `flax.nnx.MultiHeadAttention`, without its dropout, `decode`, `sow_weights`,
    `attention_fn`, and the arguments that end in `_dot_general`, `_promote_dtype`,
    `_metadata` and `_sharding`. Beyond it, head sizes are free and mask and score rules
    are call arguments.

    Args:
        num_heads: N.
        in_features: width of inputs_q.
        qkv_features: N times the head size; default in_features.
        out_features: width of the output; default in_features.
        num_kv_heads: K, which must divide N; default N.
        in_kv_features: width of inputs_k and inputs_v; default in_features.
        head_dim: H, instead of qkv_features; it need not be in_features / N.
        v_head_dim: D, the width of a value; default H.
        rope: `rope(x, positions)`, applied to queries and keys (*B, T, N, H): for
            example `jattn.rotary`.
        qk_norm: normalise queries and keys over H before `rope`: "layer" (LayerNorm)
            or "rms" (RMSNorm).
        normalize_qk: True is qk_norm="layer", as in Flax.
        dtype: of the computation; default that of inputs and parameters.
        param_dtype: of the parameters.
        precision: of the matrix products.
        kernel_init: initialiser of the projections' kernels.
        out_kernel_init: of the output kernel; default kernel_init.
        bias_init: initialiser of the biases.
        out_bias_init: of the output bias; default bias_init.
        use_bias: whether the projections have biases.
        rngs: source of the random keys.

    Raises:
        ValueError: sizes do not divide or contradict each other.

    Source: Vaswani et al. 2017, arXiv:1706.03762, section 3.2.2; Ainslie et al. 2023,
        arXiv:2305.13245 (grouped heads); Dehghani et al. 2023, arXiv:2302.05442
        (normalised queries and keys).

    Example:
        >>> import jattn, jattn.nnx
        >>> from flax import nnx
        >>> layer = jattn.nnx.MultiHeadAttention(
        ...     8, 64, head_dim=16, num_kv_heads=2, rope=jattn.rotary, rngs=nnx.Rngs(0)
        ... )
        >>> layer(jnp.ones((2, 5, 64)), mask=jattn.masks.causal()).shape
        (2, 5, 64)
    """

    def __init__(
        self,
        num_heads: int,
        in_features: int,
        qkv_features: int | None = None,
        out_features: int | None = None,
        num_kv_heads: int | None = None,
        in_kv_features: int | None = None,
        *,
        head_dim: int | None = None,
        v_head_dim: int | None = None,
        rope: Rope | None = None,
        qk_norm: Literal["layer", "rms"] | None = None,
        normalize_qk: bool = False,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        precision: PrecisionLike = None,
        kernel_init: Initializer = nnx.initializers.lecun_normal(),
        out_kernel_init: Initializer | None = None,
        bias_init: Initializer = nnx.initializers.zeros_init(),
        out_bias_init: Initializer | None = None,
        use_bias: bool = True,
        rngs: nnx.Rngs,
    ):
        self.num_heads = num_heads
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.in_features = in_features
        self.in_kv_features = in_features if in_kv_features is None else in_kv_features
        self.out_features = in_features if out_features is None else out_features
        self.head_dim = _head_dim(num_heads, in_features, qkv_features, head_dim)
        self.v_head_dim = self.head_dim if v_head_dim is None else v_head_dim
        self.qkv_features = num_heads * self.head_dim
        self.rope = rope
        self.qk_norm = _qk_norm(qk_norm, normalize_qk)
        self.precision = precision
        self._check_counts()

        shared: dict[str, Any] = dict(dtype=dtype, param_dtype=param_dtype, rngs=rngs)
        linear: dict[str, Any] = dict(use_bias=use_bias, precision=precision, **shared)

        def heads(width: int, num: int, size: int) -> nnx.LinearGeneral:
            inits = dict(kernel_init=kernel_init, bias_init=bias_init)
            return nnx.LinearGeneral(width, (num, size), **inits, **linear)

        self.query = heads(in_features, num_heads, self.head_dim)
        self.key = heads(self.in_kv_features, self.num_kv_heads, self.head_dim)
        self.value = heads(self.in_kv_features, self.num_kv_heads, self.v_head_dim)
        self.query_ln = self.key_ln = nnx.data(None)
        if self.qk_norm == "layer":
            self.query_ln = nnx.LayerNorm(self.head_dim, use_bias=False, **shared)
            self.key_ln = nnx.LayerNorm(self.head_dim, use_bias=False, **shared)
        elif self.qk_norm == "rms":
            self.query_ln = nnx.RMSNorm(self.head_dim, **shared)
            self.key_ln = nnx.RMSNorm(self.head_dim, **shared)
        self.out = nnx.LinearGeneral(
            (num_heads, self.v_head_dim),
            self.out_features,
            axis=(-2, -1),
            kernel_init=out_kernel_init or kernel_init,
            bias_init=out_bias_init or bias_init,
            **linear,
        )

    def __call__(
        self,
        inputs_q: jax.Array,
        inputs_k: jax.Array | None = None,
        inputs_v: jax.Array | None = None,
        *,
        mask: Mask | Array | None = None,
        is_causal: bool = False,
        score: Score | tuple[Score, ...] | None = None,
        bias: Array | None = None,
        scale: float | Array | None = None,
        query_positions: Array | Literal["start", "end"] | None = None,
        key_positions: Array | None = None,
    ) -> jax.Array:
        """Attends from inputs_q to inputs_k.

        Args:
            inputs_q: (*B, T, in_features).
            inputs_k: (*B, S, in_kv_features); default inputs_q (self-attention).
            inputs_v: (*B, S, in_kv_features); default inputs_k.
            mask: as in `jattn.attention`.
            is_causal: whether to allow only what `jattn.masks.causal()` allows too.
            score: as in `jattn.attention`, as are all that follow.
            bias: (*B, N, T, S), each axis full or 1.
            scale: default 1/sqrt(head_dim).
            query_positions: used by `rope` too.
            key_positions: used by `rope` too; of self-attention, by default those of
                the queries.

        Returns:
            (*B, T, out_features).

        Raises:
            ValueError: shapes do not fit.
        """
        key_positions = _key_positions(inputs_k, query_positions, key_positions)
        query, key, value = self.project(
            inputs_q,
            inputs_k,
            inputs_v,
            query_positions=query_positions,
            key_positions=key_positions,
        )
        if is_causal:
            if isinstance(mask, (jax.Array, np.ndarray)):
                mask = masks.dense(mask)
            mask = masks.causal() if mask is None else masks.causal() & mask
        out = attention(
            query,
            key,
            value,
            mask=mask,
            score=score,
            bias=bias,
            scale=scale,
            query_positions=query_positions,
            key_positions=key_positions,
            precision=self.precision,
        )
        return self.out(out)

    def project(
        self,
        inputs_q: jax.Array,
        inputs_k: jax.Array | None = None,
        inputs_v: jax.Array | None = None,
        *,
        query_positions: Array | Literal["start", "end"] | None = None,
        key_positions: Array | None = None,
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """What `__call__` gives to `jattn.attention`.

        Returns:
            query: (*B, T, N, H), normalised and turned.
            key: (*B, S, K, H), likewise.
            value: (*B, S, K, D).
        """
        key_positions = _key_positions(inputs_k, query_positions, key_positions)
        inputs_k = inputs_q if inputs_k is None else inputs_k
        inputs_v = inputs_k if inputs_v is None else inputs_v
        self._check_inputs(inputs_q=inputs_q, inputs_k=inputs_k, inputs_v=inputs_v)
        query, key = self.query(inputs_q), self.key(inputs_k)
        if self.query_ln is not None and self.key_ln is not None:
            query, key = self.query_ln(query), self.key_ln(key)
        if self.rope is not None:
            num_queries, num_keys = query.shape[-3], key.shape[-3]
            if query_positions is None and num_queries != num_keys:
                raise unplaced("MultiHeadAttention", "rope", num_queries, num_keys)
            place: Any = query_positions
            if query_positions is None or isinstance(query_positions, str):
                align = query_positions or "start"
                place = positions_beside(
                    "MultiHeadAttention", key_positions, num_queries, num_keys, align
                )
            query = self.rope(query, place)
            key = self.rope(
                key, np.arange(num_keys) if key_positions is None else key_positions
            )
        return query, key, self.value(inputs_v)

    def _check_counts(self) -> None:
        names = ("num_heads", "num_kv_heads", "head_dim", "v_head_dim")
        for name in (*names, "in_features", "in_kv_features", "out_features"):
            if getattr(self, name) < 1:
                raise ValueError(
                    f"MultiHeadAttention: {name} must be 1 or more, but got "
                    f"{name}={getattr(self, name)}. Leave it out for its default."
                )
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                "MultiHeadAttention: num_heads must be a multiple of num_kv_heads, but "
                f"got num_heads={self.num_heads}, num_kv_heads={self.num_kv_heads}. "
                "Give each key head the same number of query heads."
            )

    def _check_inputs(self, **inputs: jax.Array) -> None:
        for name, x in inputs.items():
            width = self.in_features if name == "inputs_q" else self.in_kv_features
            if x.ndim < 2 or x.shape[-1] != width:
                raise ValueError(
                    f"MultiHeadAttention: {name} must be (*B, "
                    f"{'T' if name == 'inputs_q' else 'S'}, {width}), but got "
                    f"{x.shape}. The width was fixed when the module was made."
                )


def _key_positions(
    inputs_k: jax.Array | None,
    query_positions: Array | str | None,
    key_positions: Array | None,
) -> Array | None:
    """Of self-attention, by default those of the queries."""
    if key_positions is not None:
        return key_positions
    if inputs_k is not None or isinstance(query_positions, str):
        return None
    return query_positions


def _head_dim(
    num_heads: int, in_features: int, qkv_features: int | None, head_dim: int | None
) -> int:
    if head_dim is not None:
        if qkv_features not in (None, num_heads * head_dim):
            raise ValueError(
                "MultiHeadAttention: qkv_features must be num_heads * head_dim, but "
                f"got {qkv_features=}, {num_heads=}, {head_dim=}. Give one of them."
            )
        return head_dim
    width = in_features if qkv_features is None else qkv_features
    if num_heads < 1 or width % num_heads:
        raise ValueError(
            "MultiHeadAttention: num_heads must divide qkv_features (by default "
            f"in_features), but got {num_heads=}, qkv_features={width}. Or give "
            "head_dim."
        )
    return width // num_heads


def _qk_norm(qk_norm: str | None, normalize_qk: bool) -> str | None:
    if qk_norm is not None:
        one_of("MultiHeadAttention", "qk_norm", qk_norm, ("layer", "rms"))
    if not normalize_qk:
        return qk_norm
    if qk_norm not in (None, "layer"):
        raise ValueError(
            'MultiHeadAttention: normalize_qk=True is qk_norm="layer", but got '
            f"{qk_norm=}. Give one of them."
        )
    return "layer"
