"""The network that a transformer applies to each token alone."""

import jax
from flax import nnx

from jattn.nnx.axes import names_axes
from jattn.nnx.config import TransformerConfig
from jattn.nnx.option_kinds import GATED, PLAIN


class FeedForward(nnx.Module):
    """Two layers, the first possibly gated.

        down(activation(up(x))), or with a gate down(activation(gate(x)) * up(x))

    Args:
        config: d_model, d_ff, activation, use_bias, initialisers and dtypes.
        rngs: source of the random keys.

    Source: Vaswani et al. 2017, arXiv:1706.03762, section 3.3; Shazeer 2020,
        arXiv:2002.05202, equation 6.

    Example:
        >>> import jax.numpy as jnp
        >>> config = TransformerConfig(vocab_size=256, d_model=96)
        >>> layer = FeedForward(config, rngs=nnx.Rngs(0))
        >>> layer(jnp.ones((2, 5, 96))).shape
        (2, 5, 96)
    """

    @names_axes
    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs):
        config = config.resolve()
        width, inner = config.d_model, config.d_ff
        options = dict(
            use_bias=config.use_bias,
            dtype=config.dtype,
            param_dtype=config.param_dtype,
            rngs=rngs,
        )
        into = dict(kernel_init=config.kernel_init, **options)
        self.gate = nnx.data(None)
        if config.activation in GATED:
            self.gate = nnx.Linear(width, inner, **into)
        self.up = nnx.Linear(width, inner, **into)
        self.down = nnx.Linear(
            inner, width, kernel_init=config.out_kernel_init, **options
        )
        self.activation = (GATED | PLAIN)[config.activation]

    def __call__(self, x: jax.Array) -> jax.Array:
        """Of each token alone, (*B, T, d_model) to (*B, T, d_model)."""
        if self.gate is None:
            return self.down(self.activation(self.up(x)))
        return self.down(self.activation(self.gate(x)) * self.up(x))
