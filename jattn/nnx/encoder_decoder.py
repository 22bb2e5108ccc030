"""From one sequence to another."""

from typing import Any

import jax
from flax import nnx

from jattn.core.letters import sizes_along
from jattn.core.rules import Array, Mask
from jattn.layer import module_mask
from jattn.nnx.axes import names_axes
from jattn.nnx.config import TransformerConfig
from jattn.nnx.decoder import Decoder
from jattn.nnx.encoder import Encoder
from jattn.prepare import rule_of


class EncoderDecoder(nnx.Module):
    """Logits of the next token of a target, given a source.

    Args:
        config: the sizes and options of the decoder.
        encoder: those of the encoder; default `config`. Its d_model is the same.
        rngs: source of the random keys.

    Raises:
        ValueError: the two have different d_model.

    Source: Vaswani et al. 2017, arXiv:1706.03762, section 3.1.

    Example:
        >>> import jax.numpy as jnp, jattn
        >>> config = TransformerConfig(vocab_size=256, num_layers=2, d_model=64)
        >>> model = EncoderDecoder(config, rngs=nnx.Rngs(0))
        >>> source, target = jnp.ones((2, 7), int), jnp.ones((2, 5), int)
        >>> known = jattn.masks.lengths(jnp.array([7, 4]))
        >>> model(source, target, source_mask=known).shape
        (2, 5, 256)
        >>> cache = model.init_cache(model.encode(source, mask=known), capacity=5)
        >>> logits, cache = model.decode(target[:, :1], cache=cache, memory_mask=known)
    """

    @names_axes
    def __init__(
        self,
        config: TransformerConfig,
        encoder: TransformerConfig | None = None,
        *,
        rngs: nnx.Rngs,
    ):
        encoder = config if encoder is None else encoder
        if encoder.d_model != config.d_model:
            raise ValueError(
                "EncoderDecoder: encoder and decoder must have the same d_model, but "
                f"got {encoder.d_model} and {config.d_model}. Other sizes may differ."
            )
        self.encoder = Encoder(encoder, rngs=rngs)
        self.decoder = Decoder(config, cross_attention=True, rngs=rngs)

    def __call__(
        self,
        source: Array,
        target: Array,
        *,
        source_mask: Mask | Array | None = None,
        memory_mask: Mask | Array | None = None,
        mask: Mask | Array | None = None,
        source_positions: Array | None = None,
        positions: Array | None = None,
        deterministic: bool | None = None,
    ) -> jax.Array:
        """Predicts.

        Args:
            source: tokens, (B, S).
            target: tokens, (B, T).
            source_mask: which of the source the encoder may look at, as in
                `jattn.attention`.
            memory_mask: which of it the decoder may look at; default source_mask, if
                that names keys only, as `jattn.masks.lengths` and `padding` do.
            mask: which of the target may look at which, besides causality.
            source_positions: where the source's tokens stand, that broadcast to (B, S).
            positions: where the target's stand, that broadcast to (B, T).
            deterministic: whether to drop nothing; default that of `train` and `eval`.

        Returns:
            (B, T, vocab_size), float32 at least.

        Raises:
            ValueError: shapes do not fit, or memory_mask does not follow from
                source_mask.
            TypeError: tokens or positions are not integers.
        """
        if memory_mask is None and source_mask is not None:
            memory_mask = _of_keys(
                source_mask, source.shape[-1], self.encoder.config.num_heads
            )
        memory = self.encode(
            source,
            mask=source_mask,
            positions=source_positions,
            deterministic=deterministic,
        )
        return self.decode(
            target,
            memory,
            mask=mask,
            memory_mask=memory_mask,
            positions=positions,
            deterministic=deterministic,
        )

    def encode(self, source: Array, **options: Any) -> jax.Array:
        """What the decoder reads, (B, S, d_model); options as of `Encoder`."""
        return self.encoder(source, **options)

    def decode(
        self, target: Array, memory: jax.Array | None = None, **options: Any
    ) -> Any:
        """Logits, and with a cache also the cache after it; options as of `Decoder`."""
        return self.decoder(target, memory, **options)

    def init_cache(self, memory: jax.Array, capacity: int, **options: Any) -> Any:
        """A cache that holds the memory, projected once, and no token of the target.

        Args:
            memory: what `encode` returned.
            capacity: how many tokens of the target a row can hold.
            **options: window and dtype, as of `Decoder.init_cache`.
        """
        return self.decoder.init_cache(
            memory.shape[0], capacity, memory=memory, **options
        )


def _of_keys(mask: Any, num_keys: int, num_heads: int) -> Any:
    """A mask of the encoder as one of cross-attention, whose queries are others."""
    rule: Any = rule_of("EncoderDecoder", module_mask(mask))
    rule = rule.bind(num_keys, num_keys, num_heads)
    of_queries = any(size != 1 for size in sizes_along(rule, "T"))
    if of_queries or any(part.positional for part in rule.walk()):
        raise ValueError(
            "EncoderDecoder: source_mask is that of cross-attention only if it names "
            f"keys alone, but got {mask if isinstance(mask, Mask) else mask.shape}. "
            "Give memory_mask: for example jattn.masks.lengths(source_lengths), or "
            "everything()."
        )
    return mask
