"""A causal language model, by itself or of what an encoder has read."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jattn.cache import KVCache
from jattn.cache_arguments import check_overflow, counts_of
from jattn.core.rules import Array, Mask, Score
from jattn.nnx.axes import names_axes
from jattn.nnx.blocks import DecoderBlock, make_norm
from jattn.nnx.config import TransformerConfig
from jattn.nnx.cross_block import BlockCache, EncoderDecoderBlock, check_memory
from jattn.nnx.embedding import Embedding, check_places, check_tokens
from jattn.nnx.layers import each_layer, make_layers, run_layers


class Decoder(nnx.Module):
    """Logits of the next token at every position.

    Args:
        config: the sizes and options.
        cross_attention: whether the blocks also look at a memory, as those of an
            `EncoderDecoder` do.
        rngs: source of the random keys.

    Source: Vaswani et al. 2017, arXiv:1706.03762, section 3.1; Press & Wolf 2017,
        arXiv:1608.05859 (tied embeddings).

    Example:
        >>> config = TransformerConfig(vocab_size=256, num_layers=2, d_model=64)
        >>> decoder = Decoder(config, rngs=nnx.Rngs(0))
        >>> tokens = jnp.array([[7, 8, 9, 10, 11]])
        >>> decoder(tokens).shape
        (1, 5, 256)
        >>> cache = decoder.init_cache(batch=1, capacity=16)
        >>> logits, cache = decoder(tokens[:, :3], cache=cache)  # the prompt
        >>> logits, cache = decoder(tokens[:, 3:], cache=cache)  # two more
    """

    @names_axes
    def __init__(
        self,
        config: TransformerConfig,
        *,
        cross_attention: bool = False,
        rngs: nnx.Rngs,
    ):
        self.config = config = config.resolve()
        dtype: Any = config.dtype
        self.cross_attention = cross_attention
        block: Any = EncoderDecoderBlock if cross_attention else DecoderBlock
        self.embed = Embedding(config, rngs=rngs)
        self.blocks = make_layers(lambda rngs: block(config, rngs=rngs), config, rngs)
        self.norm = make_norm(config, rngs) if config.norm_first else nnx.data(None)
        self.head = nnx.data(None)
        if not config.tie_embeddings:
            self.head = nnx.Linear(
                config.d_model,
                config.vocab_size,
                use_bias=False,
                dtype=dtype,
                param_dtype=config.param_dtype,
                kernel_init=config.kernel_init,
                preferred_element_type=jnp.promote_types(dtype, jnp.float32),
                rngs=rngs,
            )

    def __call__(
        self,
        tokens: Array,
        memory: jax.Array | None = None,
        *,
        mask: Mask | Array | None = None,
        is_causal: bool = True,
        score: Score | tuple[Score, ...] | None = None,
        scale: float | Array | None = None,
        positions: Array | None = None,
        memory_mask: Mask | Array | None = None,
        cache: Any = None,
        lengths: Array | None = None,
        deterministic: bool | None = None,
        stats: bool = False,
    ) -> Any:
        """Predicts.

        Args:
            tokens: integers, (B, T).
            memory: of a decoder with cross-attention, and unless a cache holds it: what
                the encoder returned, (B, S, d_model).
            mask: which tokens may look at which, besides causality: for example
                `jattn.masks.sliding_window(255)`, or `segments(ids)` for packed rows.
            is_causal: False leaves it to `mask` alone: `causal() | prefix(n)`.
            score: of the self-attention, as in `jattn.attention`, as is scale.
            scale: default 1/sqrt(head_dim); a number or an array, which is data.
            positions: where the tokens stand, integers that broadcast to (B, T); packed
                rows and padding on the left need them. Default 0 to T - 1, or with a
                cache, counting on.
            memory_mask: which of the S, at 0 to S - 1, each token may look at.
            cache: of the tokens before: what `init_cache` or the last call returned.
                These tokens are appended to it.
            lengths: with a cache, how many of the T tokens of each row are appended,
                (B,); the others are padding on the right.
            deterministic: whether to drop nothing; default that of `train` and `eval`.
            stats: whether every self-attention sows its `attention_stats`, for
                `nnx.capture(model, nnx.Intermediate)(tokens, stats=True)`.

        Returns:
            (B, T, vocab_size), float32 at least; with a cache also the cache after it.

        Raises:
            ValueError: shapes do not fit, there is no token, or the cache is not of
                this model.
            TypeError: tokens or positions are not integers.
        """
        check_tokens("Decoder", tokens)
        batch, num_tokens = tokens.shape
        self._check_memory("Decoder", batch, memory, memory_mask)
        if positions is not None:
            positions = check_places("Decoder", positions, tokens.shape)
        if cache is not None:
            start = self._start(cache, tokens.shape, lengths)
            count = np.arange(num_tokens, dtype=np.int32)
            positions = start + count[None, :] if positions is None else positions
        elif lengths is not None:
            raise ValueError(
                "Decoder: lengths are for a cache, but got lengths and cache=None. For "
                "padding, give mask=jattn.masks.lengths(lengths)."
            )
        options: dict[str, Any] = dict(
            mask=mask,
            is_causal=is_causal,
            score=score,
            scale=scale,
            query_positions=positions,
            lengths=lengths,
            deterministic=deterministic,
            stats=stats,
        )
        if self.cross_attention:
            options |= dict(memory=memory, memory_mask=memory_mask)
        x = self.embed(tokens, positions, deterministic=deterministic)
        x, updated = run_layers(self.blocks, x, cache, self.config, **options)
        x = x if self.norm is None else self.norm(x)
        logits = self.embed.attend(x) if self.head is None else self.head(x)
        return logits if cache is None else (logits, updated)

    def init_cache(
        self,
        batch: int,
        capacity: int,
        *,
        window: int | None = None,
        dtype: Any = None,
        memory: jax.Array | None = None,
    ) -> Any:
        """An empty cache of the keys and values of every block.

        Args:
            batch: B.
            capacity: how many tokens a row can hold.
            window: a token sees so many, itself the last, and slots are used again; the
                cache of a model whose mask is `sliding_window(window - 1)`.
            dtype: of what is stored; default that of the computation.
            memory: of a decoder with cross-attention: what the encoder returned,
                (B, S, d_model). It is projected here, once.

        Returns:
            A tuple with a `KVCache` for each block, of stacked ones too.
        """
        config: Any = self.config
        self._check_memory("Decoder.init_cache", batch, memory)
        if self.cross_attention and memory is None:
            raise ValueError(
                "Decoder.init_cache: with cross-attention memory must be (B, S, "
                "d_model), but got memory=None. Encode a source for each row."
            )

        def of(block: Any) -> Any:
            tokens = KVCache.init(
                batch,
                capacity,
                config.num_kv_heads,
                config.head_dim,
                v_head_dim=config.v_head_dim,
                window=window,
                dtype=config.dtype if dtype is None else dtype,
            )
            if memory is None:
                return tokens
            return BlockCache(tokens, block.project_memory(memory))

        return tuple(map(of, each_layer(self.blocks, config)))

    def _start(
        self, cache: Any, shape: tuple[int, ...], lengths: Array | None
    ) -> jax.Array:
        """How many tokens each row of the cache has, (B, 1)."""
        layers = self.config.num_layers
        kind = BlockCache if self.cross_attention else KVCache
        known = isinstance(cache, tuple) and all(isinstance(x, kind) for x in cache)
        if not known or len(cache) != layers:
            raise ValueError(
                f"Decoder: cache must be that of a model with num_layers={layers}, "
                f"cross_attention={self.cross_attention}, but got that of another, "
                f"{jax.tree.map(jnp.shape, cache)}. Make it with the init_cache of "
                "this model."
            )
        first: Any = cache[0].tokens if self.cross_attention else cache[0]
        batch, num_tokens = shape
        if first.length.shape != (batch,):
            raise ValueError(
                "Decoder: cache must have a row for each row of tokens, but got tokens "
                f"{shape}, a cache of B={first.length.shape[0]}. Make one for this "
                "batch with init_cache."
            )
        # Once, here, where numbers may be known that are not within a loop.
        counts, _ = counts_of("Decoder", lengths, batch, num_tokens)
        if first.window is None:
            check_overflow("Decoder", first.length, counts, first.capacity)
        return first.length[:, None]

    def _check_memory(
        self, caller: str, batch: int, memory: Any, memory_mask: Any = None
    ) -> None:
        if self.cross_attention and memory is not None:
            check_memory(caller, memory, self.config.d_model, batch)
        elif not self.cross_attention and not (memory is memory_mask is None):
            raise ValueError(
                f"{caller}: memory and memory_mask are for cross-attention, but got "
                "cross_attention=False. Make the model with cross_attention=True."
            )
