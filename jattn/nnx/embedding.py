"""From tokens to the residual stream, and from it to logits."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jattn.core.boundary import Sizes, check_positions
from jattn.core.rules import Array
from jattn.nnx.axes import names_axes
from jattn.nnx.config import TransformerConfig


class Embedding(nnx.Module):
    """A vector for each token, plus one for where it stands.

    Args:
        config: vocab_size, d_model, positions, max_length, scale_embeddings,
            dropout_rate, embedding_init and dtypes.
        rngs: source of the random keys.

    Source: Vaswani et al. 2017, arXiv:1706.03762, sections 3.4 and 3.5.

    Example:
        >>> config = TransformerConfig(
        ...     vocab_size=256, d_model=96, positions="learned", max_length=32
        ... )
        >>> Embedding(config, rngs=nnx.Rngs(0))(jnp.array([[7, 8, 9]])).shape
        (1, 3, 96)
    """

    @names_axes
    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs):
        self.config = config = config.resolve()

        def table(rows: int) -> nnx.Param:
            shape = (rows, config.d_model)
            return nnx.Param(
                config.embedding_init(rngs.params(), shape, config.param_dtype)
            )

        self.embedding = table(config.vocab_size)
        self.position_embedding = nnx.data(None)
        if config.max_length is not None:
            self.position_embedding = table(config.max_length)
        rate = config.dropout_rate
        self.dropout = nnx.Dropout(rate, rngs=rngs if rate else None)

    def __call__(
        self,
        tokens: Array,
        positions: Array | None = None,
        *,
        deterministic: bool | None = None,
    ) -> jax.Array:
        """What the first block gets.

        Args:
            tokens: integers from 0 to vocab_size - 1, (B, T). The vector of any other
                is NaN.
            positions: integers that broadcast to (B, T); default 0 to T - 1. The vector
                of a learned position that is not below max_length is NaN.
            deterministic: as in `flax.nnx.Dropout`.

        Returns:
            (B, T, d_model).

        Raises:
            TypeError: tokens or positions are not integers.
            ValueError: shapes do not fit, there is no token, or there are more than
                learned positions.
        """
        config = self.config
        check_tokens("Embedding", tokens)
        x = _rows(self.embedding[...], tokens).astype(config.dtype)
        if config.scale_embeddings:
            x = x * np.asarray(config.d_model**0.5, x.dtype)
        if config.positions in ("learned", "sinusoidal"):
            x = x + self._of_positions(positions, tokens.shape).astype(x.dtype)
        return self.dropout(x, deterministic=deterministic)

    def attend(self, x: jax.Array) -> jax.Array:
        """Dot products with the vectors of all tokens, accumulated in float32 at least.

        Source: Press & Wolf 2017, arXiv:1608.05859.
        """
        table = self.embedding[...].astype(self.config.dtype)
        x = x.astype(self.config.dtype)
        dtype = jnp.promote_types(x.dtype, jnp.float32)
        return jnp.einsum("...d,vd->...v", x, table, preferred_element_type=dtype)

    def _of_positions(self, positions: Any, shape: tuple[int, ...]) -> jax.Array:
        if positions is None:
            positions = np.arange(shape[-1])
            if (
                self.config.max_length is not None
                and shape[-1] > self.config.max_length
            ):
                raise ValueError(
                    "Embedding: there are max_length learned positions, but got tokens "
                    f"{shape}, max_length={self.config.max_length}. Cut the tokens, or "
                    "use rotary positions."
                )
        sizes = Sizes(shape[:-1], shape[-1], shape[-1], 1, 1, 1)
        positions = check_positions("Embedding", "positions", positions, "T", sizes)
        if self.position_embedding is None:
            return sinusoidal(positions, self.config.d_model)
        return _rows(self.position_embedding[...], positions)


def sinusoidal(positions: Array, width: int) -> jax.Array:
    """Sines and cosines of each position, at frequencies in a geometric series.

        sin(p / 10000^(2i/width)) in channel 2i, cos of the same in 2i + 1

    Args:
        positions: integers, (*B, T).
        width: an even number of channels.

    Returns:
        (*B, T, width), float32.

    Source: Vaswani et al. 2017, arXiv:1706.03762, section 3.5.

    Example:
        >>> sinusoidal(np.arange(2), 4)
        Array([[0.        , 1.        , 0.        , 1.        ],
               [0.84147096, 0.5403023 , 0.00999983, 0.99995   ]], dtype=float32)
    """
    frequencies = (10_000.0 ** (-np.arange(0, width, 2) / width)).astype(np.float32)
    frequencies = frequencies.reshape((1,) * np.ndim(positions) + (-1,))
    angles = positions[..., None].astype(np.float32) * frequencies
    pairs = jnp.stack([jnp.sin(angles), jnp.cos(angles)], axis=-1)
    return pairs.reshape(*positions.shape, width)


def check_tokens(caller: str, tokens: Any) -> None:
    """Raises unless tokens are integers, (B, T), with at least one in a row."""
    kind: Any = getattr(tokens, "dtype", type(tokens))
    if not (hasattr(tokens, "dtype") and jnp.issubdtype(kind, jnp.integer)):
        raise TypeError(
            f"{caller}: tokens must be an array of integers, but got {kind}. Cast them "
            "with jnp.asarray(tokens, int)."
        )
    if tokens.ndim != 2 or tokens.shape[1] == 0:
        raise ValueError(
            f"{caller}: tokens must be (B, T), T at least 1, but got {tokens.shape}. "
            "Give one sequence its axis, tokens[None], and an empty prompt a first "
            "token."
        )


def _rows(table: jax.Array, indices: Any) -> jax.Array:
    """NaN where there is no such row; counting from the end is no way to mean one."""
    indices = jnp.where(indices < 0, table.shape[0], indices)
    return jnp.take(table, indices, axis=0, mode="fill")
