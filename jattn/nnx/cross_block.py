"""The block of a decoder that reads what an encoder returned."""

from typing import Any, NamedTuple

import jax
from flax import nnx

from jattn import layer_cache
from jattn.cache import KVCache
from jattn.core.rules import Array, Mask
from jattn.dispatch import attention
from jattn.layer import check_arrays, module_mask
from jattn.nnx import calling
from jattn.nnx.axes import names_axes
from jattn.nnx.blocks import Block, make_attention, make_norm
from jattn.nnx.config import TransformerConfig

CALLER = "EncoderDecoderBlock"


class Memory(NamedTuple):
    """What cross-attention reads of a source, projected once.

    Attributes:
        key: (B, S, K, H).
        value: (B, S, K, D).
    """

    key: jax.Array
    value: jax.Array


class BlockCache(NamedTuple):
    """What an `EncoderDecoderBlock` keeps from call to call.

    Attributes:
        tokens: the keys and values of the tokens before.
        memory: those of the source.
    """

    tokens: KVCache
    memory: Memory


class EncoderDecoderBlock(Block):
    """A decoder block that also looks at a source, between its two other parts.

    Args:
        config: the sizes and options.
        rngs: source of the random keys.

    Example:
        >>> import jax.numpy as jnp
        >>> config = TransformerConfig(vocab_size=256, d_model=96, num_heads=4)
        >>> block = EncoderDecoderBlock(config, rngs=nnx.Rngs(0))
        >>> block(jnp.ones((2, 5, 96)), jnp.ones((2, 7, 96))).shape
        (2, 5, 96)
    """

    @names_axes
    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs):
        config = config.resolve()
        super().__init__(config, rngs=rngs)
        self.cross_attention_norm = make_norm(config, rngs)
        self.cross_attention = make_attention(config, rngs, rope=None)

    def __call__(
        self,
        x: jax.Array,
        memory: jax.Array | None = None,
        *,
        memory_mask: Mask | Array | None = None,
        is_causal: bool = True,
        cache: BlockCache | None = None,
        deterministic: bool | None = None,
        **attention: Any,
    ) -> Any:
        """The residual stream after this block.

        Args:
            x: (B, T, d_model).
            memory: what an encoder returned, (B, S, d_model); with a cache it is there.
            memory_mask: which of the S each token may look at, as in
                `jattn.attention`. The tokens stand where those of the self-attention
                do, the memory at 0 to S - 1.
            is_causal: False leaves it to `mask` alone what a token may look at.
            cache: made of a `KVCache` and of `project_memory(memory)`.
            deterministic: whether to drop nothing; default that of `train` and `eval`.
            **attention: what else the self-attention takes: mask, score, scale,
                query_positions, lengths, ...

        Returns:
            The shape and dtype of x; with a cache also the cache after it.

        Raises:
            ValueError: memory and cache are both given, or neither.
        """
        tokens: Any
        if memory is not None and cache is None:
            tokens, source = None, self.project_memory(memory)
        elif memory is None and cache is not None:
            tokens, source = cache
        else:
            raise ValueError(
                f"{CALLER}: memory must be given, or a cache that holds it, "
                f"but got {'neither' if cache is None else 'both'}. Project the memory "
                "once with project_memory(memory)."
            )
        places: Any = attention.get("query_positions")
        if tokens is not None:
            start = tokens.length[:, None]
            places = layer_cache.place_after(CALLER, start, x, None, places)
        elif places is None or isinstance(places, str):
            places = "start"
        x, tokens = self._attend(
            x, deterministic, is_causal=is_causal, cache=tokens, **attention
        )
        y = self._before(self.cross_attention_norm, x)
        y = self._attend_to(source, y, memory_mask, places, deterministic)
        x = self._after(self.cross_attention_norm, x, y, deterministic)
        x = self._feed_forward(x, deterministic)
        return x if cache is None else (x, BlockCache(tokens, source))

    def project_memory(self, memory: jax.Array) -> Memory:
        """The keys and values of a source (B, S, d_model), for every call on it."""
        check_memory(CALLER, memory, self.cross_attention.in_features)
        # Under jit the queries, which nobody reads, are not computed.
        _, key, value = self.cross_attention.project(memory)
        return Memory(key, value)

    def _attend_to(
        self,
        memory: Memory,
        x: jax.Array,
        mask: Any,
        places: Any,
        deterministic: bool | None,
    ) -> jax.Array:
        layer = self.cross_attention
        rng = calling.dropout_rng(layer, deterministic, None)
        out = attention(
            layer.project(x)[0],
            memory.key,
            memory.value,
            mask=module_mask(mask),
            query_positions=places,
            sinks=None if layer.sinks is None else layer.sinks[...],
            dropout_rate=0.0 if rng is None else layer.dropout_rate,
            dropout_rng=rng,
        )
        return layer.out(out)


def check_memory(
    caller: str, memory: Any, width: int, batch: int | None = None
) -> None:
    """Raises unless it is what an encoder returned, (B, S, width)."""
    check_arrays(caller, memory=memory)
    shape = memory.shape
    if len(shape) != 3 or shape[-1] != width or batch not in (None, shape[0]):
        rows = "" if batch is None else f"B={batch}, "
        raise ValueError(
            f"{caller}: memory must be (B, S, d_model), here {rows}d_model={width}, "
            f"but got {shape}. Give what the encoder returned for these rows."
        )
