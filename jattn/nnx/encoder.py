"""Vectors of tokens that see one another."""

import jax
from flax import nnx

from jattn.core.rules import Array, Mask, Score
from jattn.nnx.axes import names_axes
from jattn.nnx.blocks import EncoderBlock, make_norm
from jattn.nnx.config import TransformerConfig
from jattn.nnx.embedding import Embedding, check_places, check_tokens
from jattn.nnx.layers import make_layers, run_layers


class Encoder(nnx.Module):
    """A vector for each token, made of all of them.

    Args:
        config: the sizes and options.
        rngs: source of the random keys.

    Source: Vaswani et al. 2017, arXiv:1706.03762, section 3.1.

    Example:
        >>> import jax.numpy as jnp, jattn
        >>> config = TransformerConfig(vocab_size=256, num_layers=2, d_model=64)
        >>> encoder = Encoder(config, rngs=nnx.Rngs(0))
        >>> tokens = jnp.array([[7, 8, 9, 0, 0], [1, 2, 3, 4, 5]])
        >>> encoder(tokens, mask=jattn.masks.lengths(jnp.array([3, 5]))).shape
        (2, 5, 64)
    """

    @names_axes
    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs):
        self.config = config = config.resolve()
        self.embed = Embedding(config, rngs=rngs)
        self.blocks = make_layers(
            lambda rngs: EncoderBlock(config, rngs=rngs), config, rngs
        )
        self.norm = make_norm(config, rngs) if config.norm_first else nnx.data(None)

    def __call__(
        self,
        tokens: Array,
        *,
        mask: Mask | Array | None = None,
        score: Score | tuple[Score, ...] | None = None,
        scale: float | Array | None = None,
        positions: Array | None = None,
        deterministic: bool | None = None,
        stats: bool = False,
    ) -> jax.Array:
        """Encodes.

        Args:
            tokens: integers, (B, T).
            mask: as in `jattn.attention`: `jattn.masks.lengths(lengths)` for padding on
                the right, `padding(valid)` for any.
            score: as in `jattn.attention`, as is scale.
            scale: default 1/sqrt(head_dim).
            positions: where the tokens stand, integers that broadcast to (B, T);
                default 0 to T - 1.
            deterministic: whether to drop nothing; default that of `train` and `eval`.
            stats: whether every self-attention sows its `attention_stats`, for
                `nnx.capture(model, nnx.Intermediate)(tokens, stats=True)`.

        Returns:
            (B, T, d_model), of the computation's dtype. The vectors of padding mean
            nothing.

        Raises:
            ValueError: shapes do not fit, or there is no token.
            TypeError: tokens or positions are not integers.
        """
        check_tokens("Encoder", tokens)
        if positions is not None:
            positions = check_places("Encoder", positions, tokens.shape)
        x = self.embed(tokens, positions, deterministic=deterministic)
        x, _ = run_layers(
            self.blocks,
            x,
            None,
            self.config,
            mask=mask,
            score=score,
            scale=scale,
            query_positions=positions,
            deterministic=deterministic,
            stats=stats,
        )
        return x if self.norm is None else self.norm(x).astype(x.dtype)
