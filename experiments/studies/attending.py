"""The language model with another attention than its own."""

from collections.abc import Callable

import jax

from experiments.model import CausalLM

Attend = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
"""From query (B, T, N, H), key (B, T, N, H) and value (B, T, N, D) to (B, T, N, D)."""


def logits_with(model: CausalLM, x: jax.Array, attend: Attend) -> jax.Array:
    """What the model predicts of embedded tokens if every layer attends so.

    Args:
        model: of pre-LN blocks.
        x: `model.embed(tokens)`, (B, T, d_model).
        attend: called once a layer, from the first on; mask, scale and score are its
            own.

    Returns:
        (B, T, vocabulary).
    """
    for block in model.blocks:
        vectors = block.attention.project(block.attention_norm(x))
        x = x + block.attention.out(attend(*vectors))
        x = x + block.feed_forward(block.feed_forward_norm(x))
    return model.head(model.norm(x))
