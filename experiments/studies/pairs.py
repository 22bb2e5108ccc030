"""Pairs of a key and a value, then questions for the values of keys.

A reader sees a pair at a time. One with attention looks back at all of them, one with a
recurrent state has to carry them along.

Source: Ba et al. 2016, arXiv:1610.06258, section 4.1 (associative recall); Arora et al.
2023, arXiv:2312.04927 (several questions a sequence).
"""

import bisect
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from experiments.data import rng_of
from experiments.fit import mean_loss
from jattn.nnx import DecoderBlock, TransformerConfig

Batch = dict[str, np.ndarray]


def draw(
    *,
    keys: int,
    values: int,
    pairs: int,
    questions: int,
    batch: int,
    seed: int,
    step: int,
) -> Batch:
    """Sequences, a function of (seed, step) alone.

    Returns:
        keys: of the pairs, all different, then of the questions, (B, pairs +
            questions).
        values: at the questions `values`, which is none.
        asked: the place of the pair that is asked for, (B, questions).
        targets: its value, (B, questions).
    """
    rng = rng_of(seed, step)
    every = np.tile(np.arange(keys), (batch, 1))
    known = rng.permuted(every, axis=1)[:, :pairs]
    values_of = rng.integers(values, size=(batch, pairs))
    asked = rng.integers(pairs, size=(batch, questions))
    blank = np.full_like(asked, values)
    arrays = {
        "keys": np.concatenate([known, np.take_along_axis(known, asked, 1)], axis=1),
        "values": np.concatenate([values_of, blank], axis=1),
        "asked": asked,
        "targets": np.take_along_axis(values_of, asked, 1),
    }
    return {name: x.astype(np.int32) for name, x in arrays.items()}


class Blocks(nnx.Module):
    """A causal transformer without embedding and head.

    Args:
        width: of the residual stream.
        layers: how many blocks.
        heads: of each.
        rngs: source of the random keys.
    """

    def __init__(self, width: int, *, layers: int, heads: int, rngs: nnx.Rngs):
        config = TransformerConfig(
            vocab_size=1, num_layers=layers, d_model=width, num_heads=heads
        )
        self.blocks = nnx.List(DecoderBlock(config, rngs=rngs) for _ in range(layers))
        self.norm = nnx.RMSNorm(width, rngs=rngs)
        self.out_features = width

    def __call__(self, x: jax.Array) -> jax.Array:
        """From (B, T, width) to the same."""
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


class Recurrent(nnx.Module):
    """A gated recurrent unit.

    Args:
        width: of what it reads.
        state: size of its state.
        rngs: source of the random keys.

    Source: Cho et al. 2014, arXiv:1406.1078.
    """

    def __init__(self, width: int, *, state: int, rngs: nnx.Rngs):
        self.cell = nnx.GRUCell(width, state, rngs=rngs)
        self.out_features = state

    def __call__(self, x: jax.Array) -> jax.Array:
        """The states, (B, T, state), of x, (B, T, width)."""
        first = jnp.zeros((x.shape[0], self.out_features), x.dtype)
        _, states = jax.lax.scan(self.cell, first, jnp.moveaxis(x, 1, 0))
        return jnp.moveaxis(states, 0, 1)


class Reader(nnx.Module):
    """Reads pairs, and answers questions.

    Args:
        body: what reads, from vectors to vectors.
        keys: how many there are.
        values: as well.
        width: of the vector of a pair.
        rngs: source of the random keys.
    """

    def __init__(
        self,
        body: Blocks | Recurrent,
        *,
        keys: int,
        values: int,
        width: int,
        rngs: nnx.Rngs,
    ):
        self.key = nnx.Embed(keys, width, rngs=rngs)
        self.value = nnx.Embed(values + 1, width, rngs=rngs)
        self.body = body
        self.head = nnx.Linear(body.out_features, values, rngs=rngs)

    def __call__(self, batch: Batch) -> jax.Array:
        """The logits of the answers, (B, questions, values)."""
        states = self.body(self.key(batch["keys"]) + self.value(batch["values"]))
        return self.head(states[:, -batch["targets"].shape[1] :])


def loss(model: Reader, batch: Batch) -> jax.Array:
    """The mean cross-entropy of the answers, in nats."""
    targets = jnp.asarray(batch["targets"])
    return mean_loss(model(batch), targets, jnp.ones(targets.shape, bool))


@nnx.jit
def is_right(model: Reader, batch: Batch) -> jax.Array:
    """Which questions the most probable value answers, (B, questions)."""
    return jnp.argmax(model(batch), axis=-1) == batch["targets"]


def by_place(
    right: np.ndarray, asked: np.ndarray, pairs: int, parts: int
) -> list[float]:
    """The share of right answers about each part of the pairs, from the first on.

    Args:
        right: which answers are right.
        asked: what place the pair had, the same shape.
        pairs: how many there are; `parts` at least.
        parts: of how many pairs alike.
    """
    part = asked * parts // pairs
    return [float(right[part == i].mean()) for i in range(parts)]


def most_frequent(batch: Batch, values: int) -> float:
    """The share of right answers of who knows which values there are, not whose.

    It always names the most frequent one.
    """
    known = batch["values"][:, : -batch["asked"].shape[1]]
    counts = (known[..., None] == np.arange(values)).sum(axis=1)
    return float(counts.max(axis=1).mean() / known.shape[1])


def parameters(make: Callable[[], nnx.Module]) -> int:
    """How many parameters a model would have; it is not made."""
    state = nnx.state(nnx.eval_shape(make), nnx.Param)
    return sum(x.size for x in jax.tree.leaves(state))


def smallest(count: Callable[[int], int], wanted: int, largest: int = 4096) -> int:
    """The smallest size from 1 to `largest` for which `count` is at least `wanted`."""
    return bisect.bisect_left(range(1, largest), wanted, key=count) + 1
