"""Sequences of symbols, and an encoder-decoder that is to write them backwards."""

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import jattn
from experiments.fit import mean_loss
from experiments.studies.sequences import sequences
from jattn.masks import lengths
from jattn.nnx import EncoderDecoder

Batch = dict[str, Any]


def draw(*, symbols: int, longest: int, **sizes: int) -> Batch:
    """What is to be written backwards; all arguments are those of `sequences`.

    Returns:
        source: the sequences, (B, longest).
        lengths: of them, (B,).
        seen: how much of its source a decoder may look at, (B,): all.
        targets: the source backwards, and an end, (B, longest + 1): one symbol more,
            as in the padding.
        inputs: a beginning, which is the same one, and the targets without the last.
        real: which of the targets are no padding.
    """
    source, size = sequences(symbols=symbols, longest=longest, **sizes)
    place = np.arange(longest)
    within, ends = place < size, np.full_like(size, symbols)
    backwards = np.take_along_axis(source, np.maximum(size - 1 - place, 0), axis=1)
    backwards = np.where(within, backwards, symbols)
    arrays = {
        "source": source,
        "lengths": size[:, 0],
        "seen": size[:, 0],
        "targets": np.concatenate([backwards, ends], axis=1),
        "inputs": np.concatenate([ends, backwards], axis=1),
    }
    arrays = {name: x.astype(np.int32) for name, x in arrays.items()}
    return arrays | {"real": np.arange(longest + 1) <= size}


def blind(batch: Batch) -> Batch:
    """The batch for a decoder that may look at nothing of its source.

    As that is data, it is the same program.
    """
    return batch | {"seen": np.zeros_like(batch["seen"])}


def is_new(test: Batch, batches: Iterable[Batch]) -> np.ndarray:
    """Which sources of a test are in none of the batches, (B,)."""
    known = {row.tobytes() for batch in batches for row in batch["source"]}
    return np.array([row.tobytes() not in known for row in test["source"]])


def predict(model: EncoderDecoder, batch: Batch) -> jax.Array:
    """Logits of the targets, (B, longest + 1, symbols + 1)."""
    return model(
        batch["source"],
        batch["inputs"],
        source_mask=lengths(batch["lengths"]),
        memory_mask=lengths(batch["seen"]),
    )


def loss(model: EncoderDecoder, batch: Batch) -> jax.Array:
    """The mean cross-entropy of the targets, in nats."""
    return mean_loss(predict(model, batch), batch["targets"], batch["real"])


def least_loss(*, symbols: int, shortest: int, longest: int) -> float:
    """The mean loss that no decoder can beat without its source, in nats a target.

    Per sequence, the entropy of its length and symbols, E n log(symbols) + log(number
    of lengths), for E n + 1 targets; nearly what a mean over batches is.
    """
    mean = (shortest + longest) / 2
    of_lengths = np.log(longest - shortest + 1)
    return float((mean * np.log(symbols) + of_lengths) / (mean + 1))


@nnx.jit
def write(model: EncoderDecoder, batch: Batch) -> jax.Array:
    """What the model writes, each time the most probable symbol, (B, longest + 1)."""
    memory = model.encode(batch["source"], mask=lengths(batch["lengths"]))
    memory_mask = lengths(batch["seen"])
    size = batch["targets"].shape[1]

    def step(carry: Any, _: None) -> Any:
        token, cache = carry
        logits, cache = model.decode(token, cache=cache, memory_mask=memory_mask)
        token = jnp.argmax(logits, axis=-1).astype(token.dtype)
        return (token, cache), token[:, 0]

    begin = jnp.asarray(batch["inputs"][:, :1]), model.init_cache(memory, size)
    return jax.lax.scan(step, begin, length=size)[1].T


def is_exact(model: EncoderDecoder, batch: Batch) -> np.ndarray:
    """Which sequences the model writes without a fault, their ends included, (B,)."""
    right = np.asarray(write(model, batch)) == batch["targets"]
    return (right | ~batch["real"]).all(axis=1)


@nnx.jit
def cross_weights(model: EncoderDecoder, batch: Batch) -> jax.Array:
    """The weights of cross-attention on the way to the targets, (layer, B, N, T, S).

    The blocks are pre-LN.
    """
    known = lengths(batch["lengths"])
    memory = model.encode(batch["source"], mask=known)
    x = model.decoder.embed(batch["inputs"])
    found = []
    for block in model.decoder.blocks:
        y = x + block.attention(block.attention_norm(x), is_causal=True)
        query, _, _ = block.cross_attention.project(block.cross_attention_norm(y))
        key = block.project_memory(memory).key
        found.append(jattn.attention_weights(query, key, mask=known))
        x = block(x, memory, memory_mask=known)
    return jnp.stack(found)


def mirrored(weights: np.ndarray, size: np.ndarray) -> np.ndarray:
    """The mean weight of the symbol to be written next, (layer, N).

    Args:
        weights: (layer, B, N, T, S).
        size: lengths of the sources, (B,); what follows after them does not count.
    """
    place, size = np.arange(weights.shape[-1]), size[:, None]
    mirror = np.maximum(size - 1 - place, 0)[None, :, None, :, None]
    weights = weights[..., : len(place), :]
    picked = np.take_along_axis(weights, mirror, axis=-1)[..., 0]
    return np.mean(picked, axis=(1, 3), where=(place < size)[:, None])
