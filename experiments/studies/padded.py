"""Padded sequences, and an encoder that is to say what is the most frequent in each."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from experiments.fit import mean_loss
from experiments.studies.sequences import sequences
from jattn.masks import lengths
from jattn.nnx import Encoder

Batch = dict[str, Any]


def draw(*, symbols: int, longest: int, **sizes: int) -> Batch:
    """What is to be counted; all arguments are those of `sequences`.

    Returns:
        tokens: the sequences, (B, longest).
        lengths: of them, (B,).
        targets: the most frequent symbol of the sequence, (B, longest).
        real: which tokens are asked, (B, longest): those of sequences in which one
            symbol is the most frequent.
    """
    tokens, length = sequences(symbols=symbols, longest=longest, **sizes)
    within = np.arange(longest) < length
    counts = (tokens[..., None] == np.arange(symbols)).sum(axis=1)
    decided = (counts == counts.max(axis=1, keepdims=True)).sum(axis=1) == 1
    return {
        "tokens": tokens.astype(np.int32),
        "lengths": length[:, 0].astype(np.int32),
        "targets": np.broadcast_to(counts.argmax(axis=1)[:, None], tokens.shape),
        "real": within & decided[:, None],
    }


def widen(batch: Batch, width: int, token: int) -> Batch:
    """The batch with all padding made of a token, up to a width; it is not asked."""
    old = batch["tokens"].shape[1]
    within = np.arange(old) < batch["lengths"][:, None]
    more = ((0, 0), (0, width - old))
    tokens = np.where(within, batch["tokens"], token)
    return batch | {
        "tokens": np.pad(tokens, more, constant_values=token).astype(np.int32),
        "targets": np.pad(batch["targets"], more),
        "real": np.pad(batch["real"], more),
    }


def predict(model: Encoder, batch: Batch) -> jax.Array:
    """Logits of the most frequent symbol, at every token, (B, T, symbols + 1)."""
    return model.embed.attend(model(batch["tokens"], mask=lengths(batch["seen"])))


def loss(model: Encoder, batch: Batch) -> jax.Array:
    """The mean cross-entropy of the tokens that are asked, in nats."""
    return mean_loss(predict(model, batch), batch["targets"], batch["real"])


logits_of = nnx.jit(predict)


@nnx.jit
def gradient_of(model: Encoder, batch: Batch) -> jax.Array:
    """The derivatives of the loss by all parameters, in one row."""
    gradient = nnx.grad(loss)(model, batch)
    return jnp.concatenate([x.ravel() for x in jax.tree.leaves(gradient)])
