"""Multi-head attention as a Flax Linen module."""

from collections.abc import Callable
from typing import Any, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.typing import DotGeneralT, Dtype, Initializer, PrecisionLike

from jattn import layer, layer_cache, layer_call
from jattn.cache import KVCache
from jattn.core.rules import Array, Mask, Score
from jattn.linen import calling, decoding, projections
from jattn.linen.calling import CALLER


class MultiHeadDotProductAttention(nn.Module):
    """Projections to heads, `jattn.attention`, and a projection back.

        out = concat_n(attention(x W_Q[n], y W_K[n], z W_V[n])) W_O

    It takes the place of `flax.linen.MultiHeadDotProductAttention`: its fields, the
    arguments of its call, its variables and their initial values are Flax's, so that
    checkpoints load both ways. It differs where Flax is silent about something:

    - Attention is `jattn.attention`: memory is O(T + S), with dropout too; a query that
      may see nothing gets 0, not the mean of the values; the softmax is float32; a NaN
      or an Inf reaches exactly the queries that may look at it.
    - A mask is a rule of `jattn.masks` or an array of the rank of the scores,
      (*B, N, T, S), each axis full or 1; numbers allow where they are not 0.
    - Dropout has the pattern of `jattn.attention`, not that of `jax.random`; its rate
      is in [0, 1).
    - Decoding takes any number of tokens at a time, casts them to the dtype of the
      cache, and never overwrites a slot: a token for which there is none is an error,
      and inside `jit` its output is NaN. `init` makes the cache, and `apply` without
      one is an error.
    - What an attention_fn does not name and would so miss, as a mask, is an error.
    - Complex numbers are refused, and so are einsums for `jattn.attention`.
    - That inputs_v may be a mask is said only where it cannot be values.

    Args:
        num_heads: N.
        dtype: of the computation; default that of inputs and parameters.
        param_dtype: of the parameters.
        qkv_features: N times the head size; default the width of inputs_q.
        out_features: width of the output; default that of inputs_q.
        broadcast_dropout: whether all batch rows and heads drop the same weights.
        dropout_rate: the share of weights that are dropped.
        deterministic: whether to drop none; to be given here or in the call if there is
            a rate.
        precision: of the matrix products.
        kernel_init: initialiser of the projections' kernels, as
            `nn.with_logical_partitioning(init, ("embed", "heads", "head_dim"))`.
        out_kernel_init: of the output kernel; default kernel_init.
        bias_init: initialiser of the biases.
        out_bias_init: of the output bias; default bias_init.
        use_bias: whether the projections have biases.
        attention_fn: a function that Flax's module would take, called as Flax calls it,
            and with what was given beyond Flax. Default `jattn.attention`; a partial
            of `jattn.attention_fn` sets its options.
        decode: whether to append to the collection "cache", and attend to it. The
            tokens come after those of the calls before, S is the number of slots, and
            each token sees those up to itself.
        normalize_qk: True is qk_norm="layer".
        force_fp32_for_softmax: the softmax is float32 always; True keeps it for the
            weights that are sown, which otherwise have the dtype of the computation.
        qkv_dot_general: of the projections to heads, in place of `jax.lax.dot_general`.
        out_dot_general: of the output projection.
        qkv_dot_general_cls: makes a qkv_dot_general at each call.
        out_dot_general_cls: likewise.
        qk_attn_weights_einsum_cls: makes an einsum for an attention_fn that takes it.
        attn_weights_value_einsum_cls: likewise.
        num_kv_heads: K, which must divide N; default N.
        head_dim: H, instead of qkv_features; it need not be a part of a width.
        v_head_dim: D, the width of a value; default H.
        rope: `rope(x, positions)`, applied to queries and keys (*B, T, N, H): for
            example `jattn.rotary`.
        qk_norm: normalise queries and keys over H before `rope`: "layer" (LayerNorm),
            "rms" (RMSNorm), or "l2": to length 1, so that the scores are
            qk_scale[n] cos(q, k), with a parameter `qk_scale` (N,), sqrt(H) at first,
            where "rms" starts too.
        sinks: whether there is a parameter `sinks` (N,), 0 at first: the logit of one
            more key without a value.

    Raises:
        ValueError: sizes do not divide or contradict each other.
        TypeError: an argument is of the wrong kind.
        NotImplementedError: `jattn.attention` is given an einsum.

    Source: Vaswani et al. 2017, arXiv:1706.03762, section 3.2.2; Ainslie et al. 2023,
        arXiv:2305.13245 (grouped heads); Dehghani et al. 2023, arXiv:2302.05442
        (normalised queries and keys); Henry et al. 2020, arXiv:2010.04245 ("l2"); Xiao
        et al. 2023, arXiv:2309.17453 (sinks).

    Example:
        >>> import jattn, jattn.linen
        >>> layer = jattn.linen.MultiHeadDotProductAttention(8, num_kv_heads=2)
        >>> x = jnp.ones((2, 5, 64))
        >>> variables = layer.init(jax.random.key(0), x)
        >>> layer.apply(variables, x, mask=jattn.masks.causal()).shape
        (2, 5, 64)
    """

    num_heads: int
    dtype: Dtype | None = None
    param_dtype: Dtype = jnp.float32
    qkv_features: int | None = None
    out_features: int | None = None
    broadcast_dropout: bool = True
    dropout_rate: float = 0.0
    deterministic: bool | None = None
    precision: PrecisionLike = None
    kernel_init: Initializer = nn.initializers.lecun_normal()
    out_kernel_init: Initializer | None = None
    bias_init: Initializer = nn.initializers.zeros_init()
    out_bias_init: Initializer | None = None
    use_bias: bool = True
    attention_fn: Callable[..., jax.Array] | None = None
    decode: bool = False
    normalize_qk: bool = False
    force_fp32_for_softmax: bool = False
    qkv_dot_general: DotGeneralT | None = None
    out_dot_general: DotGeneralT | None = None
    qkv_dot_general_cls: Any = None
    out_dot_general_cls: Any = None
    qk_attn_weights_einsum_cls: Callable[..., Callable[..., jax.Array]] | None = None
    attn_weights_value_einsum_cls: Callable[..., Callable[..., jax.Array]] | None = None
    num_kv_heads: int | None = None
    head_dim: int | None = None
    v_head_dim: int | None = None
    rope: layer.Rope | None = None
    qk_norm: Literal["layer", "rms", "l2"] | None = None
    sinks: bool = False

    @nn.compact
    def __call__(
        self,
        inputs_q: jax.Array,
        inputs_k: jax.Array | None = None,
        inputs_v: jax.Array | None = None,
        *,
        inputs_kv: jax.Array | None = None,
        mask: Mask | Array | None = None,
        deterministic: bool | None = None,
        dropout_rng: jax.Array | None = None,
        sow_weights: bool = False,
        is_causal: bool = False,
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
            inputs_q: (*B, T, features).
            inputs_k: (*B, S, features); default inputs_q (self-attention).
            inputs_v: (*B, S, features); default inputs_k.
            inputs_kv: an old name of both.
            mask: as in `jattn.attention`; numbers, as from Flax's `make_causal_mask`,
                allow if they are not 0.
            deterministic: whether to drop no weights; not if the field is given.
            dropout_rng: the key of dropout; default `make_rng("dropout")`.
            sow_weights: whether to sow "attention_weights" (*B, N, T, S), those before
                dropout, in "intermediates". They take O(T S) memory.
            is_causal: whether to allow only what `jattn.masks.causal()` allows too.
            score: as in `jattn.attention`, as are all that follow up to key_positions.
            bias: (*B, N, T, S), each axis full or 1.
            scale: default 1/sqrt(head_dim).
            query_positions: used by `rope` too. With a cache, where the new tokens
                stand; by default they count on.
            key_positions: used by `rope` too; of self-attention, where inputs_k is left
                out or the very array inputs_q, by default those of the queries.
            stats: whether to sow "attention_stats", a `jattn.Stats`, likewise.
            cache: what the new keys and values are appended to; queries attend to all
                that it then holds, of which `mask` says what they may see.
            lengths: (*B,), how many of the T tokens of a row are appended to the cache.

        Returns:
            (*B, T, out_features), and with a cache the cache after it.

        Raises:
            ValueError: shapes do not fit, or options contradict each other.
        """
        calling.check_fields(self)
        layer.flags(CALLER, is_causal=is_causal, sow_weights=sow_weights, stats=stats)
        layer.check_arrays(
            CALLER,
            inputs_q=inputs_q,
            inputs_k=inputs_k,
            inputs_v=inputs_v,
            inputs_kv=inputs_kv,
        )
        decode = self.decode and not self.is_initializing()
        layer_call.check_options(
            CALLER,
            decode,
            self.attention_fn,
            cache=cache,
            lengths=lengths,
            query_positions=query_positions,
            key_positions=key_positions,
            stats=stats,
            sow_weights=sow_weights,
        )
        inputs_k, inputs_v = calling.key_inputs(inputs_k, inputs_v, inputs_kv)
        start = cache.length[:, None] if cache is not None else None
        place, key_place = layer_cache.places_of(
            CALLER,
            decoding.num_cached(self) if decode else start,
            inputs_q,
            inputs_k,
            query_positions,
            key_positions,
        )
        query, key, value = self.project(
            inputs_q,
            inputs_k,
            inputs_v,
            query_positions=place,
            key_positions=key_place,
        )
        if cache is not None:
            cache, key_place = cache.append(key, value, lengths, positions=place), None
        elif decode:
            key, value, place = decoding.append(self, key, value)
            key_place = None
        elif self.decode:
            decoding.make(self, key, value)
        out = calling.attend(
            self,
            (query, key, value),
            decode=decode,
            mask=mask,
            is_causal=is_causal,
            rng=calling.dropout_key(self, deterministic, dropout_rng),
            sow_weights=sow_weights,
            stats=stats,
            cache=cache,
            score=score,
            bias=bias,
            scale=scale,
            sinks=projections.sinks(self),
            query_positions=place,
            key_positions=key_place,
        )
        out = projections.from_heads(self, out, inputs_q.shape[-1])
        return out if cache is None else (out, cache)

    def project(
        self,
        inputs_q: jax.Array,
        inputs_k: jax.Array | None = None,
        inputs_v: jax.Array | None = None,
        *,
        query_positions: Array | Literal["start", "end"] | None = None,
        key_positions: Array | None = None,
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """What `__call__` gives to `jattn.attention`, for a subclass to change.

        Returns:
            query: (*B, T, N, H), normalised and turned.
            key: (*B, S, K, H), likewise.
            value: (*B, S, K, D).
        """
        key_positions = layer.key_positions_of(
            inputs_q, inputs_k, query_positions, key_positions
        )
        inputs_k, inputs_v = layer.inputs_of(CALLER, inputs_q, inputs_k, inputs_v)
        query, key, value = projections.to_heads(self, inputs_q, inputs_k, inputs_v)
        query, key = layer.turned(
            CALLER, self.rope, query, key, query_positions, key_positions
        )
        return layer.promoted(query, key, value, self.dtype)
