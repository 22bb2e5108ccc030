"""What models make of tokens in another order."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from experiments.claims.one_width import Trained
from experiments.model import CausalLM
from experiments.step import token_losses
from jattn.masks import causal
from jattn.nnx import Encoder, TransformerConfig

KINDS: tuple[Any, ...] = ("none", "learned", "sinusoidal", "rotary")
MASKED = "none, causal mask"


def permuted(sequences: int, length: int, seed: int) -> dict[str, float]:
    """How outputs of encoders at initialisation differ when tokens are permuted.

    At least one of the tokens, of which there are two or more, moves.

    Returns:
        For each kind of positions, and under a causal mask, the largest difference
        between outputs of permuted tokens and permuted outputs; "in place": between
        outputs at the same place, without positions. All over the outputs' rms.
    """
    rng = np.random.default_rng(seed)
    tokens = rng.integers(256, size=(sequences, length), dtype=np.int32)
    turn = unmoved = np.arange(length)
    while np.array_equal(turn, unmoved):
        turn = rng.permutation(length)
    found = {}
    for kind in KINDS:
        config = TransformerConfig(
            vocab_size=256,
            num_layers=2,
            d_model=64,
            num_heads=2,
            positions=kind,
            max_length=length if kind == "learned" else None,
        )
        encode = nnx.jit(Encoder(config, rngs=nnx.Rngs(seed)))
        before, after = encode(tokens), encode(tokens[:, turn])
        found[kind] = moved(after, before[:, turn])
        if kind == "none":
            found["in place"] = moved(after, before)
            options = {"mask": causal()}
            before, after = (encode(x, **options) for x in (tokens, tokens[:, turn]))
            found[MASKED] = moved(after, before[:, turn])
    return found


def moved(got: jax.Array, want: jax.Array) -> float:
    """The largest difference, over the rms of what is wanted."""
    return float(jnp.abs(got - want).max() / jnp.sqrt(jnp.mean(want**2)))


def past_shuffled(trained: Trained, wanted: int) -> dict[str, float]:
    """The loss of the last token of windows, as they are and with the past shuffled.

    Of the tokens that a prediction is made from, the last one keeps its place; a model
    that knows the others as a bag predicts the same.
    """
    model, text = trained.model(), trained.split().validation
    windows = trained.windows(text.tokens, wanted)
    rng = np.random.default_rng(trained.config.seed)
    others = windows.copy()
    rng.permuted(windows[..., :-2], axis=-1, out=others[..., :-2])
    return {
        name: float(np.mean([last_loss(model, x, trained.scale) for x in found]))
        for name, found in (("in order", windows), ("shuffled", others))
    }


@nnx.jit
def last_loss(model: CausalLM, tokens: jax.Array, scale: jax.Array) -> jax.Array:
    """The mean loss of the last of the tokens, (B, T + 1)."""
    logits = model(tokens[:, :-1], scale=scale)
    return token_losses(logits[:, -1:], tokens[:, -1:]).mean
