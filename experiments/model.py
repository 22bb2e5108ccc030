"""A small causal language model over bytes, on jattn's attention.

Pre-LN blocks with rotary positions. The size of a key, d_k, depends on nothing else
and the size of a value is fixed, so that models of different d_k differ in what the
factor of the logits has to deal with, and in nothing else.

Source: Xiong et al. 2020, arXiv:2002.04745 (pre-LN); Su et al. 2021, arXiv:2104.09864.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import nnx
from flax.typing import Initializer

import jattn
import jattn.nnx
from experiments.config import Model

VOCABULARY = 256


def logit_scale(config: Model) -> float:
    """The factor of the dot products that `config.scale` stands for."""
    return {"sqrt": config.d_k**-0.5, "inv": 1 / config.d_k}.get(config.scale, 1.0)


class Block(nnx.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: Model, *, rngs: nnx.Rngs):
        kernel_init, projection_init = _initializers(config)
        width = config.d_model
        self.attention_norm = nnx.LayerNorm(width, rngs=rngs)
        self.attention = jattn.nnx.MultiHeadAttention(
            config.heads,
            width,
            head_dim=config.d_k,
            v_head_dim=config.d_v,
            rope=jattn.rotary,
            qk_norm="layer" if config.qk_norm else None,
            use_bias=False,
            kernel_init=kernel_init,
            rngs=rngs,
        )
        for projection in (self.attention.query, self.attention.key):
            shape = projection.kernel.shape
            projection.kernel[...] = projection_init(rngs.params(), shape, jnp.float32)
        self.mlp_norm = nnx.LayerNorm(width, rngs=rngs)
        self.up = nnx.Linear(width, config.d_ff, kernel_init=kernel_init, rngs=rngs)
        self.down = nnx.Linear(config.d_ff, width, kernel_init=kernel_init, rngs=rngs)

    def __call__(
        self, x: jax.Array, scale: jax.Array | float, bias: jax.Array | None = None
    ) -> jax.Array:
        """The residual stream after this block, (B, T, d_model)."""
        x = x + self.attention(
            self.attention_norm(x), mask=jattn.masks.causal(), scale=scale, bias=bias
        )
        return x + self.down(nnx.gelu(self.up(self.mlp_norm(x))))


class CausalLM(nnx.Module):
    """Logits of the next byte for every position.

    Args:
        config: the sizes, the factor of the dot products and the initialisation.
        rngs: source of the random keys.
    """

    def __init__(self, config: Model, *, rngs: nnx.Rngs):
        kernel_init, _ = _initializers(config)
        self.scale = logit_scale(config)
        self.embed = nnx.Embed(VOCABULARY, config.d_model, rngs=rngs)
        self.blocks = nnx.List([Block(config, rngs=rngs) for _ in range(config.layers)])
        self.norm = nnx.LayerNorm(config.d_model, rngs=rngs)
        self.head = nnx.Linear(
            config.d_model, VOCABULARY, kernel_init=kernel_init, rngs=rngs
        )

    def __call__(
        self,
        tokens: jax.Array,
        *,
        scale: jax.Array | float | None = None,
        biases: Sequence[jax.Array] | None = None,
    ) -> jax.Array:
        """Predicts.

        Args:
            tokens: bytes, (B, T).
            scale: factor of the dot products, instead of the config's. As an argument
                it is data: models that differ in it alone share one compilation.
            biases: one for each layer, (B, N, T, T), added to its attention logits.

        Returns:
            (B, T, 256).
        """
        scale = self.scale if scale is None else scale
        x = self.embed(tokens)
        for layer, block in enumerate(self.blocks):
            x = block(x, scale, None if biases is None else biases[layer])
        return self.head(self.norm(x))

    def queries_and_keys(
        self, tokens: jax.Array, *, scale: jax.Array | float | None = None
    ) -> list[tuple[jax.Array, jax.Array]]:
        """For each layer, the queries and keys it scores, (B, T, N, d_k)."""
        scale = self.scale if scale is None else scale
        x = self.embed(tokens)
        scored = []
        for block in self.blocks:
            query, key, _ = block.attention.project(block.attention_norm(x))
            scored.append((query, key))
            x = block(x, scale)
        return scored


def _initializers(config: Model) -> tuple[Initializer, Initializer]:
    """Of kernels in general, and of W_Q and W_K."""
    if config.init == "gpt2":
        kernel_init = nnx.initializers.normal(0.02)
    else:
        kernel_init = nnx.initializers.lecun_normal()
    factor = config.d_k**-0.25 if config.scale == "init" else 1.0

    def projection_init(
        key: jax.Array, shape: Sequence[int], dtype: jnp.dtype
    ) -> jax.Array:
        # As the kernels of jattn.nnx: (width, heads, size), with fan-in width.
        flat = kernel_init(key, (shape[0], shape[1] * shape[2]), dtype)
        return factor * flat.reshape(shape)

    return kernel_init, projection_init
