"""From tokens to the residual stream, and from it to logits."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jattn.core.angles import cos_sin
from jattn.core.arguments import static_int
from jattn.core.boundary import Sizes, check_positions
from jattn.core.rotary import BASE, frequencies_of
from jattn.core.rules import Array
from jattn.core.softmax import accumulator
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
            longest = self.config.max_length
            if longest is not None and shape[-1] > longest:
                raise ValueError(
                    "Embedding: there are max_length learned positions, but got tokens "
                    f"{shape}, max_length={longest}. Cut the tokens, or use rotary "
                    "positions."
                )
        positions = check_places("Embedding", positions, shape)
        if self.position_embedding is None:
            config: Any = self.config
            return sinusoidal(positions, config.d_model, config.dtype)
        return _rows(self.position_embedding[...], positions)


def sinusoidal(positions: Array, width: int, dtype: Any = jnp.float32) -> jax.Array:
    """Sines and cosines of each position, at frequencies in a geometric series.

        sin(p / 10000^(2i/width)) in channel 2i, cos of the same in 2i + 1

    They are as exact at a large position as at a small one.

    Args:
        positions: integers, (*B, T), less than 2**30 in size.
        width: an even number of channels.
        dtype: of the result, float32 at least.

    Returns:
        (*B, T, width).

    Raises:
        ValueError: the width is not even, or a position is too large.
        TypeError: positions are not integers.

    Source: Vaswani et al. 2017, arXiv:1706.03762, section 3.5.

    Example:
        >>> sinusoidal(np.arange(2), 4)
        Array([[0.        , 1.        , 0.        , 1.        ],
               [0.84147096, 0.5403023 , 0.00999983, 0.99995   ]], dtype=float32)
    """
    if static_int("sinusoidal", "width", width, 2) % 2:
        raise ValueError(
            f"sinusoidal: width must be even, but got {width=}. Each frequency fills "
            "two channels."
        )
    positions = check_places("sinusoidal", positions, np.shape(positions))
    frequencies = tuple(frequencies_of(BASE, width).tolist())
    wide = accumulator(jax.dtypes.canonicalize_dtype(dtype))
    cos, sin = cos_sin(positions, frequencies, wide)
    pairs = jnp.stack([sin, cos], axis=-1)
    return pairs.reshape(*positions.shape, width)


def check_places(caller: str, positions: Any, shape: tuple[int, ...]) -> Any:
    """Positions of tokens of that shape, (*B, T): int32, of its rank, T in full."""
    sizes = Sizes(shape[:-1], shape[-1], shape[-1], 1, 1, 1)
    return check_positions(caller, "positions", positions, "T", sizes)


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
    if indices.dtype.itemsize < 4:
        indices = indices.astype(np.int32)
    outside = (indices < 0) | (indices >= table.shape[0])
    # In numpy, if they are numpy's: JAX would wrap int64 around before it compares.
    numpy: Any = np if isinstance(indices, np.ndarray) else jnp
    indices = numpy.where(outside, table.shape[0], indices).astype(np.int32)
    return jnp.take(table, indices, axis=0, mode="fill")
