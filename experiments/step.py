"""One step of training, and the loss it lowers: pure functions of explicit state."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from experiments.config import Config, Optim
from experiments.model import CausalLM


class TrainState(NamedTuple):
    """What a step changes.

    Attributes:
        params: the model's parameters.
        moments: the optimiser's state.
    """

    params: Any
    moments: Any


def initialise(config: Config) -> tuple[Any, TrainState]:
    """The structure of the model, and its state before the first step."""
    model = CausalLM(config.model, rngs=nnx.Rngs(config.seed))
    # The factor is an argument of every call, so that arms that differ in it alone
    # have one structure and one compilation.
    model.scale = 1.0
    graph, params = nnx.split(model, nnx.Param)
    return graph, TrainState(params, optimiser(config.optim).init(params))


def static_settings(optim: Optim) -> Optim:
    """The settings with those that become data at values that never differ."""
    return dataclasses.replace(optim, lr=1.0, steps=1, warmup_fraction=0.0)


def optimiser(optim: Optim) -> optax.GradientTransformation:
    """AdamW with clipping, without the learning rate.

    Source: Loshchilov & Hutter 2019, arXiv:1711.05101.
    """
    return optax.chain(
        optax.clip_by_global_norm(optim.clip_norm),
        optax.scale_by_adam(optim.b1, optim.b2),
        optax.add_decayed_weights(optim.weight_decay),
    )


def learning_rates(optim: Optim) -> np.ndarray:
    """The learning rate of every update, (steps,).

    It rises linearly, from 1 / warmup at the first update so that none is wasted, and
    falls as a cosine that would reach 0 at update `steps`.
    """
    warmup = max(round(optim.warmup_fraction * optim.steps), 1)
    share = optax.warmup_cosine_decay_schedule(1 / warmup, 1.0, warmup - 1, optim.steps)
    return optim.lr * np.asarray(share(np.arange(optim.steps)), np.float32)


def next_byte_loss(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """The mean cross-entropy, in nats per byte, of (B, T, 256) against (B, T)."""
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
    return jnp.mean(losses)


@functools.partial(jax.jit, static_argnames=("graph", "optim"))
def train_step(
    graph: Any,
    optim: Optim,
    state: TrainState,
    tokens: jax.Array,
    rate: jax.Array,
    scale: jax.Array,
) -> tuple[TrainState, dict[str, jax.Array]]:
    """One update.

    Learning rate and factor are data: whatever differs in them alone shares one
    compilation.

    Args:
        graph: the structure of the model.
        optim: what `static_settings` leaves of the optimiser's settings.
        state: parameters and moments.
        tokens: (B, T + 1).
        rate: the learning rate.
        scale: the factor of the dot products.

    Returns:
        The new state; loss, learning rate and global gradient norm of this step.
    """

    def loss_fn(params: Any) -> jax.Array:
        logits = nnx.merge(graph, params)(tokens[:, :-1], scale=scale)
        return next_byte_loss(logits, tokens[:, 1:])

    loss, gradient = jax.value_and_grad(loss_fn)(state.params)
    updates, moments = optimiser(optim).update(gradient, state.moments, state.params)
    params = jax.tree.map(lambda p, u: p - rate * u, state.params, updates)
    norm = optax.tree.norm(gradient)
    metrics = {"loss": loss, "learning_rate": rate, "gradient_norm": norm}
    return TrainState(params, moments), metrics


def evaluate(graph: Any, params: Any, scale: jax.Array, windows: np.ndarray) -> float:
    """The mean loss over (batches, B, T + 1), in nats per byte."""
    losses = [float(_loss(graph, params, scale, window)) for window in windows]
    return sum(losses) / len(losses)


@functools.partial(jax.jit, static_argnames="graph")
def _loss(graph: Any, params: Any, scale: jax.Array, tokens: jax.Array) -> jax.Array:
    logits = nnx.merge(graph, params)(tokens[:, :-1], scale=scale)
    return next_byte_loss(logits, tokens[:, 1:])
