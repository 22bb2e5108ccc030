"""Transformer blocks: attention and a feed-forward network on a residual stream.

Source: Vaswani et al. 2017, arXiv:1706.03762, section 3.1; Xiong et al. 2020,
    arXiv:2002.04745, figure 1.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jattn.cache import KVCache
from jattn.layer import Rope
from jattn.nnx.axes import names_axes
from jattn.nnx.config import TransformerConfig
from jattn.nnx.feed_forward import FeedForward
from jattn.nnx.multi_head import MultiHeadAttention


class Block(nnx.Module):
    """What all blocks have: self-attention and a feed-forward network.

        x + f(norm(x)), or with norm_first=False norm(x + f(x)), for each f

    Args:
        config: the sizes and options.
        rngs: source of the random keys.
    """

    @names_axes
    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs):
        config = config.resolve()
        self.norm_first = config.norm_first
        self.attention_norm = make_norm(config, rngs)
        self.attention = make_attention(config, rngs, rope=config.rope)
        self.feed_forward_norm = make_norm(config, rngs)
        self.feed_forward = FeedForward(config, rngs=rngs)
        rate = config.dropout_rate
        self.dropout = nnx.Dropout(rate, rngs=rngs if rate else None)

    def _before(self, norm: Any, x: jax.Array) -> jax.Array:
        return norm(x) if self.norm_first else x

    def _after(
        self, norm: Any, x: jax.Array, y: jax.Array, deterministic: bool | None
    ) -> jax.Array:
        x = x + self.dropout(y, deterministic=deterministic)
        return x if self.norm_first else norm(x).astype(x.dtype)

    def _attend(
        self, x: jax.Array, deterministic: bool | None, **attention: Any
    ) -> tuple[jax.Array, Any]:
        """The stream after self-attention, and its cache."""
        y = self._before(self.attention_norm, x)
        y = self.attention(y, deterministic=deterministic, **attention)
        y, cache = y if attention.get("cache") is not None else (y, None)
        return self._after(self.attention_norm, x, y, deterministic), cache

    def _feed_forward(self, x: jax.Array, deterministic: bool | None) -> jax.Array:
        y = self.feed_forward(self._before(self.feed_forward_norm, x))
        return self._after(self.feed_forward_norm, x, y, deterministic)


class EncoderBlock(Block):
    """A block in which every token may look at every other.

    Args:
        config: the sizes and options.
        rngs: source of the random keys.

    Example:
        >>> import jattn
        >>> config = TransformerConfig(vocab_size=256, d_model=96, num_heads=4)
        >>> block = EncoderBlock(config, rngs=nnx.Rngs(0))
        >>> block(jnp.ones((2, 5, 96)), mask=jattn.masks.lengths(3)).shape
        (2, 5, 96)
    """

    def __call__(
        self, x: jax.Array, *, deterministic: bool | None = None, **attention: Any
    ) -> jax.Array:
        """The residual stream after this block.

        Args:
            x: (B, T, d_model).
            deterministic: whether to drop nothing; default that of `train` and `eval`.
            **attention: what else `MultiHeadAttention` takes: mask, score, scale,
                query_positions, ...

        Returns:
            The shape and dtype of x.

        Raises:
            ValueError: there is a cache.
        """
        if attention.get("cache") is not None:
            raise ValueError(
                "EncoderBlock: an encoder sees all tokens at once and has no cache, "
                "but got cache. Use DecoderBlock(...)(x, is_causal=False, cache=cache)."
            )
        x, _ = self._attend(x, deterministic, **attention)
        return self._feed_forward(x, deterministic)


class DecoderBlock(Block):
    """A block in which a token may look at itself and at those before it.

    Args:
        config: the sizes and options.
        rngs: source of the random keys.

    Example:
        >>> config = TransformerConfig(vocab_size=256, d_model=96, num_heads=4)
        >>> DecoderBlock(config, rngs=nnx.Rngs(0))(jnp.ones((2, 5, 96))).shape
        (2, 5, 96)
    """

    def __call__(
        self,
        x: jax.Array,
        *,
        is_causal: bool = True,
        cache: KVCache | None = None,
        deterministic: bool | None = None,
        **attention: Any,
    ) -> Any:
        """The residual stream after this block.

        Args:
            x: (B, T, d_model).
            is_causal: False leaves it to `mask` alone what a token may look at.
            cache: the keys and values of the tokens before.
            deterministic: whether to drop nothing; default that of `train` and `eval`.
            **attention: what else `MultiHeadAttention` takes: mask, score, scale,
                query_positions, lengths, ...

        Returns:
            The shape and dtype of x; with a cache also the cache after it.
        """
        x, cache = self._attend(
            x, deterministic, is_causal=is_causal, cache=cache, **attention
        )
        x = self._feed_forward(x, deterministic)
        return x if cache is None else (x, cache)


def make_norm(config: TransformerConfig, rngs: nnx.Rngs) -> Any:
    """A norm over d_model that computes in float32 at least, and returns it.

    Source: Zhang & Sennrich 2019, arXiv:1910.07467 (RMSNorm).
    """
    options = dict(
        epsilon=config.norm_epsilon,
        dtype=jnp.promote_types(config.param_dtype, jnp.float32),
        param_dtype=config.param_dtype,
        use_fast_variance=False,
        rngs=rngs,
    )
    if config.norm == "rms":
        return nnx.RMSNorm(config.d_model, **options)
    return nnx.LayerNorm(config.d_model, use_bias=config.use_bias, **options)


def make_attention(
    config: TransformerConfig, rngs: nnx.Rngs, *, rope: Rope | None
) -> MultiHeadAttention:
    """Attention with the options of a config; that to a memory is not turned."""
    return MultiHeadAttention(
        config.num_heads,
        config.d_model,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        v_head_dim=config.v_head_dim,
        rope=rope,
        qk_norm=config.qk_norm,
        sinks=config.sinks,
        dtype=config.dtype,
        param_dtype=config.param_dtype,
        broadcast_dropout=False,
        dropout_rate=config.dropout_rate,
        deterministic=False,
        kernel_init=config.kernel_init,
        out_kernel_init=config.out_kernel_init,
        use_bias=config.use_bias,
        rngs=rngs,
    )
