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
CAUSAL = jattn.masks.causal()


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
        self, x: jax.Array, scale: jax.Array | float, shift: jax.Array | None = None
    ) -> jax.Array:
        """The residual stream after this block, (B, T, d_model).

        `shift`, (B, T, N, d_v), is added to what the heads return.
        """
        heads = jattn.attention(*self.project(x), mask=CAUSAL, scale=scale)
        x = x + self.attention.out(heads if shift is None else heads + shift)
        return x + self.down(nnx.gelu(self.up(self.mlp_norm(x))))

    def project(self, x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """The queries, keys and values of its attention, each (B, T, N, ...)."""
        return self.attention.project(self.attention_norm(x))


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
        shifts: Sequence[jax.Array] | None = None,
    ) -> jax.Array:
        """Predicts.

        Args:
            tokens: bytes, (B, T).
            scale: factor of the dot products, instead of the config's. As an argument
                it is data: models that differ in it alone share one compilation.
            shifts: one for each layer, (B, T, N, d_v), added to what its attention
                heads return. Their gradients are those of the heads.

        Returns:
            (B, T, 256).
        """
        scale = self.scale if scale is None else scale
        x = self.embed(tokens)
        for layer, block in enumerate(self.blocks):
            x = block(x, scale, None if shifts is None else shifts[layer])
        return self.head(self.norm(x))

    def projections(
        self, tokens: jax.Array, *, scale: jax.Array | float | None = None
    ) -> list[tuple[jax.Array, jax.Array, jax.Array]]:
        """For each layer, the queries, keys and values of its attention."""
        scale = self.scale if scale is None else scale
        x = self.embed(tokens)
        found = []
        for block in self.blocks:
            found.append(block.project(x))
            x = block(x, scale)
        return found


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
