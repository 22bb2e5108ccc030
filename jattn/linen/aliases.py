"""Flax's other names of the module."""

from typing import Any

import flax.linen as nn
import jax

from jattn.core.rules import Array, Mask
from jattn.linen.multi_head import MultiHeadDotProductAttention


class MultiHeadAttention(MultiHeadDotProductAttention):
    """`MultiHeadDotProductAttention`; only the names that Linen makes up differ."""


class SelfAttention(MultiHeadDotProductAttention):
    """`MultiHeadDotProductAttention` of one input, where the mask comes second."""

    @nn.compact
    def __call__(
        self,
        inputs_q: jax.Array,
        mask: Mask | Array | None = None,
        deterministic: bool | None = None,
        dropout_rng: jax.Array | None = None,
        sow_weights: bool = False,
        **options: Any,
    ) -> Any:
        """Attends from inputs_q to inputs_q.

        Args:
            inputs_q: (*B, T, features).
            mask: as in `MultiHeadDotProductAttention`, as are all that follow.
            deterministic: whether to drop no weights.
            dropout_rng: a key of `jax.random`.
            sow_weights: whether to sow the weights.
            **options: what it has beyond Flax.

        Returns:
            What `MultiHeadDotProductAttention` returns.
        """
        return super().__call__(
            inputs_q,
            mask=mask,
            deterministic=deterministic,
            dropout_rng=dropout_rng,
            sow_weights=sow_weights,
            **options,
        )
