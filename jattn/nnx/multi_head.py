"""Multi-head attention as a Flax NNX module."""

import functools
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn.dtypes import promote_dtype
from flax.typing import DotGeneralT, Dtype, Initializer, PrecisionLike, PromoteDtypeFn

from jattn import layer, layer_cache, layer_call
from jattn.cache import KVCache
from jattn.core.arguments import check_callable
from jattn.core.rules import Array, Mask, Score
from jattn.nnx import calling
from jattn.nnx.axes import check_rngs
from jattn.nnx.calling import CALLER
from jattn.prepare import check_rate

Metadata = Mapping[str, Any]
NONE: Metadata = MappingProxyType({})


class MultiHeadAttention(nnx.Module):
    """Projections to heads, `jattn.attention`, and a projection back.

        out = concat_n(attention(x W_Q[n], y W_K[n], z W_V[n])) W_O

    It takes the place of `flax.nnx.MultiHeadAttention`: constructor and call take all
    of Flax's arguments, and parameters have Flax's names, paths, shapes and random
    draws, so that checkpoints load both ways. What differs from Flax:

    - Memory is O(T + S), with dropout too. A query that may see nothing gets 0, not
      the mean of the values. Logits and softmax are float32 at least.
    - A mask is a rule of `jattn.masks`, or an array of the axes (*B, N, T, S), each in
      full or 1. With T != S is_causal needs query_positions.
    - Dropout has the pattern of `jattn.attention`, not of `jax.random`, and a rate in
      [0, 1).
    - Without `decode`, here and in the call, nothing is decoded. Decoding takes any
      number of tokens at a time, casts them to the dtype of the cache, and overwrites
      nothing: a token without a slot is an error, inside `jit` its output is NaN.
      `is_causal` changes nothing there.
    - `set_view` with batch_size and max_length makes a new cache.

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
        qk_norm: normalise queries and keys over H before `rope`: "layer" (LayerNorm),
            "rms" (RMSNorm), or "l2": to length 1, so that the scores are
            qk_scale[n] cos(q, k), with a parameter `qk_scale` (N,), sqrt(H) at first,
            where "rms" starts too.
        normalize_qk: True is qk_norm="layer", as in Flax.
        sinks: whether there is a parameter `sinks` (N,), 0 at first: the logit of one
            more key without a value.
        dtype: of the computation; default that of inputs and parameters.
        param_dtype: of the parameters.
        broadcast_dropout: whether all batch rows and heads drop the same weights.
        dropout_rate: the share of weights that are dropped.
        deterministic: whether to drop none; to be given here or in the call if there is
            a rate.
        precision: of the matrix products.
        kernel_init: initialiser of the projections' kernels.
        out_kernel_init: of the output kernel; default kernel_init.
        bias_init: initialiser of the biases.
        out_bias_init: of the output bias; default bias_init.
        use_bias: whether the projections have biases.
        attention_fn: a function that Flax's module would take, called as Flax calls it,
            and with what was given beyond Flax. Default `jattn.attention`; a partial
            of `jattn.attention_fn` sets its options.
        decode: whether to append to the cache that `init_cache` made, and attend to it.
        qkv_promote_dtype: of the projections to heads: a function as in Flax.
        out_promote_dtype: of the output projection.
        ln_promote_dtype: of the norms of queries and keys.
        qkv_dot_general: of the projections to heads, in place of `jax.lax.dot_general`.
        out_dot_general: of the output projection.
        qkv_dot_general_cls: makes a qkv_dot_general at each call.
        out_dot_general_cls: likewise.
        rngs: source of the random keys.
        keep_rngs: whether a module with dropout keeps a fork of `rngs.dropout`.
        kernel_metadata: of the projections' kernels, for `nnx.Param`. Axes are named
            here: dict(out_sharding=("embed", "heads", "head_dim"), sharding_rules=...)
            shards the kernels of a module that is made under `jax.set_mesh`.
        out_kernel_metadata: of the output kernel; default kernel_metadata.
        bias_metadata: of the biases.
        out_bias_metadata: of the output bias; default bias_metadata.
        query_ln_scale_metadata: of the scale of the queries' norm.
        key_ln_scale_metadata: of the scale of the keys' norm.
        qk_scale_metadata: of `qk_scale`.
        sinks_metadata: of `sinks`.

    Raises:
        ValueError: sizes do not divide or contradict each other.
        TypeError: an argument is of the wrong kind.

    Source: Vaswani et al. 2017, arXiv:1706.03762, section 3.2.2; Ainslie et al. 2023,
        arXiv:2305.13245 (grouped heads); Dehghani et al. 2023, arXiv:2302.05442
        (normalised queries and keys); Henry et al. 2020, arXiv:2010.04245 ("l2"); Xiao
        et al. 2023, arXiv:2309.17453 (sinks).

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
        rope: layer.Rope | None = None,
        qk_norm: Literal["layer", "rms", "l2"] | None = None,
        normalize_qk: bool = False,
        sinks: bool = False,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        broadcast_dropout: bool = True,
        dropout_rate: float = 0.0,
        deterministic: bool | None = None,
        precision: PrecisionLike = None,
        kernel_init: Initializer = nnx.initializers.lecun_normal(),
        out_kernel_init: Initializer | None = None,
        bias_init: Initializer = nnx.initializers.zeros_init(),
        out_bias_init: Initializer | None = None,
        use_bias: bool = True,
        attention_fn: Callable[..., jax.Array] | None = None,
        decode: bool | None = None,
        qkv_promote_dtype: PromoteDtypeFn = promote_dtype,
        out_promote_dtype: PromoteDtypeFn = promote_dtype,
        ln_promote_dtype: PromoteDtypeFn = promote_dtype,
        qkv_dot_general: DotGeneralT | None = None,
        out_dot_general: DotGeneralT | None = None,
        qkv_dot_general_cls: Any = None,
        out_dot_general_cls: Any = None,
        rngs: nnx.Rngs,
        keep_rngs: bool = True,
        kernel_metadata: Metadata = NONE,
        out_kernel_metadata: Metadata = NONE,
        bias_metadata: Metadata = NONE,
        out_bias_metadata: Metadata = NONE,
        query_ln_scale_metadata: Metadata = NONE,
        key_ln_scale_metadata: Metadata = NONE,
        qk_scale_metadata: Metadata = NONE,
        sinks_metadata: Metadata = NONE,
    ):
        check_rngs(CALLER, rngs)
        layer.flags(CALLER, sinks=sinks)
        heads = layer.head_sizes(
            CALLER,
            num_heads,
            in_features,
            qkv_features=qkv_features,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            v_head_dim=v_head_dim,
        )
        self.num_heads, self.num_kv_heads, self.head_dim, self.v_head_dim = heads
        self.qkv_features = self.num_heads * self.head_dim
        self.in_features = in_features
        self.out_features = in_features if out_features is None else out_features
        self.in_kv_features = in_features if in_kv_features is None else in_kv_features
        layer.positive(
            CALLER, out_features=self.out_features, in_kv_features=self.in_kv_features
        )
        self.qk_norm = layer.qk_norm_of(CALLER, qk_norm, normalize_qk)
        self.normalize_qk = self.qk_norm == "layer"
        for name, function in (("rope", rope), ("attention_fn", attention_fn)):
            if function is not None:
                check_callable(CALLER, name, function)
        self.rope = rope
        self.attention_fn = attention_fn
        self.dtype = dtype
        self.precision = precision
        self.dropout_rate = check_rate(CALLER, dropout_rate)
        self.broadcast_dropout = broadcast_dropout
        self.deterministic = deterministic
        self.decode = decode

        shared: Any = dict(dtype=dtype, param_dtype=param_dtype, rngs=rngs)
        linear: Any = dict(use_bias=use_bias, precision=precision, **shared)
        to_heads = functools.partial(
            nnx.LinearGeneral,
            kernel_init=kernel_init,
            bias_init=bias_init,
            promote_dtype=qkv_promote_dtype,
            dot_general=qkv_dot_general,
            dot_general_cls=qkv_dot_general_cls,
            kernel_metadata=kernel_metadata,
            bias_metadata=bias_metadata,
            **linear,
        )
        self.query = to_heads(in_features, (self.num_heads, self.head_dim))
        self.key = to_heads(self.in_kv_features, (self.num_kv_heads, self.head_dim))
        self.value = to_heads(self.in_kv_features, (self.num_kv_heads, self.v_head_dim))
        self.query_ln = self.key_ln = nnx.data(None)
        norms: Any = {
            "layer": functools.partial(nnx.LayerNorm, use_bias=False),
            "rms": nnx.RMSNorm,
        }
        if self.qk_norm in norms:
            norm = functools.partial(
                norms[self.qk_norm],
                self.head_dim,
                promote_dtype=ln_promote_dtype,
                **shared,
            )
            self.query_ln = norm(scale_metadata=query_ln_scale_metadata)
            self.key_ln = norm(scale_metadata=key_ln_scale_metadata)
        self.out = nnx.LinearGeneral(
            (self.num_heads, self.v_head_dim),
            self.out_features,
            axis=(-2, -1),
            kernel_init=out_kernel_init or kernel_init,
            bias_init=out_bias_init or bias_init,
            promote_dtype=out_promote_dtype,
            dot_general=out_dot_general,
            dot_general_cls=out_dot_general_cls,
            kernel_metadata=out_kernel_metadata or kernel_metadata,
            bias_metadata=out_bias_metadata or bias_metadata,
            **linear,
        )

        def per_head(value: float, metadata: Metadata) -> nnx.Param:
            return nnx.Param(jnp.full(self.num_heads, value, param_dtype), **metadata)

        self.qk_scale = self.sinks = nnx.data(None)
        if self.qk_norm == "l2":
            self.qk_scale = per_head(self.head_dim**0.5, qk_scale_metadata)
        if sinks:
            self.sinks = per_head(0.0, sinks_metadata)
        keep_rngs = keep_rngs and self.dropout_rate > 0
        self.rngs = rngs.dropout.fork() if keep_rngs else None
        self.cached_key = self.cached_value = self.cache_index = nnx.data(None)

    def __call__(
        self,
        inputs_q: jax.Array,
        inputs_k: jax.Array | None = None,
        inputs_v: jax.Array | None = None,
        *,
        mask: Mask | Array | None = None,
        deterministic: bool | None = None,
        rngs: nnx.Rngs | nnx.RngStream | None = None,
        sow_weights: bool = False,
        decode: bool | None = None,
        is_causal: bool = False,
        out_sharding: Any = None,
        qkv_sharding: Any = None,
        input_positions: Array | None = None,
        score: Score | tuple[Score, ...] | None = None,
        bias: Array | None = None,
        scale: float | Array | None = None,
        query_positions: Array | Literal["start", "end"] | None = None,
        key_positions: Array | None = None,
        stats: bool = False,
        cache: KVCache | None = None,
        lengths: Array | None = None,
    ) -> Any:
        """Attends from inputs_q to inputs_k.

        Args:
            inputs_q: (*B, T, in_features).
            inputs_k: (*B, S, in_kv_features); default inputs_q (self-attention).
            inputs_v: (*B, S, in_kv_features); default inputs_k.
            mask: as in `jattn.attention`; numbers, as from Flax's `make_causal_mask`,
                allow if they are not 0.
            deterministic: whether to drop no weights; default the constructor's.
            rngs: source of the key of dropout; default what the module keeps.
            sow_weights: whether to sow `attention_weights` (*B, N, T, S), those before
                dropout, as `nnx.Intermediate`. They take O(T S) memory.
            decode: default the constructor's. The tokens come after those of earlier
                calls, each sees those up to itself, and S is the number of slots.
            is_causal: whether to allow only what `jattn.masks.causal()` allows too.
            out_sharding: of the output, as in `nnx.LinearGeneral`.
            qkv_sharding: of queries, keys and values, likewise.
            input_positions: query_positions, as Flax 0.12.12 calls them.
            score: as in `jattn.attention`, as are all that follow up to key_positions.
            bias: (*B, N, T, S), each axis full or 1.
            scale: default 1/sqrt(head_dim).
            query_positions: used by `rope` too. With a cache, where the new tokens
                stand; by default they count on.
            key_positions: used by `rope` too; of self-attention, where inputs_k is left
                out or the very array inputs_q, by default those of the queries.
            stats: whether to sow `attention_stats`, a `jattn.Stats`, likewise.
            cache: what the new keys and values are appended to; queries attend to all
                that it then holds, of which `mask` says what they may see.
            lengths: (*B,), how many of the T tokens of a row are appended to the cache.

        Returns:
            (*B, T, out_features), and with a cache the cache after it.

        Raises:
            ValueError: shapes do not fit, or options contradict each other.
        """
        decode = bool(self.decode if decode is None else decode)
        layer_call.check_options(
            CALLER,
            decode,
            self.attention_fn,
            cache=cache,
            lengths=lengths,
            query_positions=query_positions,
            key_positions=key_positions,
            input_positions=input_positions,
            stats=stats,
            sow_weights=sow_weights,
        )
        layer.flags(CALLER, is_causal=is_causal, sow_weights=sow_weights, stats=stats)
        layer.check_arrays(CALLER, inputs_k=inputs_k, inputs_v=inputs_v)
        layer.check_width(CALLER, "inputs_q", inputs_q, self.in_features)
        place: Any = query_positions if input_positions is None else input_positions
        start = cache.length[:, None] if cache is not None else None
        place, key_place = layer_cache.places_of(
            CALLER,
            calling.num_cached(self) if decode else start,
            inputs_q,
            inputs_k,
            place,
            key_positions,
        )
        query, key, value = self.project(
            inputs_q,
            inputs_k,
            inputs_v,
            query_positions=place,
            key_positions=key_place,
            qkv_sharding=qkv_sharding,
        )
        if cache is not None:
            cache, key_place = cache.append(key, value, lengths, positions=place), None
        elif decode:
            key, value, place = calling.append(self, key, value)
            key_place = None
        out = calling.attend(
            self,
            (query, key, value),
            decode=decode,
            rng=calling.dropout_rng(self, deterministic, rngs),
            mask=mask,
            is_causal=is_causal,
            sow_weights=sow_weights,
            stats=stats,
            cache=cache,
            input_positions=input_positions,
            score=score,
            bias=bias,
            scale=scale,
            query_positions=place,
            key_positions=key_place,
        )
        out = self.out(out, out_sharding=out_sharding)
        return out if cache is None else (out, cache)

    def project(
        self,
        inputs_q: jax.Array,
        inputs_k: jax.Array | None = None,
        inputs_v: jax.Array | None = None,
        *,
        query_positions: Array | Literal["start", "end"] | None = None,
        key_positions: Array | None = None,
        qkv_sharding: Any = None,
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """What `__call__` gives to `jattn.attention`.

        Returns:
            query: (*B, T, N, H), normalised and turned.
            key: (*B, S, K, H), likewise.
            value: (*B, S, K, D).
        """
        key_positions = layer.key_positions_of(
            inputs_q, inputs_k, query_positions, key_positions
        )
        inputs_k, inputs_v = layer.inputs_of(CALLER, inputs_q, inputs_k, inputs_v)
        layer.check_width(CALLER, "inputs_q", inputs_q, self.in_features)
        layer.check_width(CALLER, "inputs_k", inputs_k, self.in_kv_features)
        layer.check_width(CALLER, "inputs_v", inputs_v, self.in_kv_features)
        query = self.query(inputs_q, out_sharding=qkv_sharding)
        key = self.key(inputs_k, out_sharding=qkv_sharding)
        value = self.value(inputs_v, out_sharding=qkv_sharding)
        if self.query_ln is not None:
            query, key = self.query_ln(query), self.key_ln(key)
        elif self.qk_scale is not None:
            query, key = layer.unit_vectors(query, key, self.qk_scale[...])
        query, key = layer.turned(
            CALLER, self.rope, query, key, query_positions, key_positions
        )
        return layer.promoted(query, key, value, self.dtype)

    def init_cache(
        self, input_shape: tuple[int, ...], dtype: Dtype = jnp.float32
    ) -> None:
        """Makes an empty cache for `decode=True`.

        Args:
            input_shape: (*B, S, in_features), with S the number of slots.
            dtype: of what is stored, floating point.
        """
        shape = input_shape if isinstance(input_shape, Sequence) else ()
        if len(shape) < 2 or shape[-1] != self.in_features:
            raise ValueError(
                f"{CALLER}.init_cache: input_shape must be (*B, S, in_features), here "
                f"in_features={self.in_features}, but got {input_shape}. S is the "
                "number of slots."
            )
        calling.init_cache(self, tuple(shape[:-1]), dtype)

    def set_view(
        self,
        deterministic: bool | None = None,
        decode: bool | None = None,
        batch_size: int | tuple[int, ...] | None = None,
        max_length: int | None = None,
    ) -> None:
        """What `nnx.view` calls.

        Args:
            deterministic: whether to drop no weights.
            decode: whether to use the cache.
            batch_size: *B of a new, empty cache.
            max_length: S, the number of its slots; to be given with batch_size.
        """
        if deterministic is not None:
            self.deterministic = deterministic
        if decode is not None:
            self.decode = decode
        if batch_size is None and max_length is None:
            return
        if batch_size is None or max_length is None:
            raise TypeError(
                f"{CALLER}: batch_size and max_length must be given together, but got "
                f"{batch_size=}, {max_length=}. They are the shape of the cache."
            )
        batch = batch_size if isinstance(batch_size, tuple) else (batch_size,)
        calling.init_cache(self, (*batch, max_length), self.dtype or jnp.float32)
