"""One step of training, and the loss it lowers: pure functions of explicit state.

`start`, `update` and the optimiser know nothing of what is learned; the rest is about
the language model.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from experiments.config import Config, Optim
from experiments.model import causal_lm


class TrainState(NamedTuple):
    """What a step changes.

    Attributes:
        params: the model's parameters.
        moments: the optimiser's state.
    """

    params: Any
    moments: Any


def start(model: nnx.Module, optim: Optim) -> tuple[Any, TrainState]:
    """The structure of a model, and its state before the first step."""
    graph, params = nnx.split(model, nnx.Param)
    return graph, TrainState(params, optimiser(optim).init(params))


def initialise(config: Config, vocabulary: int = 256) -> tuple[Any, TrainState]:
    """The structure of the language model, and its state before the first step."""
    sizes = dict(vocabulary=vocabulary, context=config.data.context)
    model = causal_lm(config.model, **sizes, rngs=nnx.Rngs(config.seed))
    return start(model, config.optim)


def static_settings(optim: Optim) -> Optim:
    """The settings with those that become data at values that never differ."""
    return dataclasses.replace(optim, lr=1.0, steps=1, warmup_fraction=0.0)


def optimiser(optim: Optim) -> optax.GradientTransformation:
    """AdamW, or SGD with momentum, with clipping, without the learning rate.

    Source: Loshchilov & Hutter 2019, arXiv:1711.05101.
    """
    adam, sgd = optax.scale_by_adam(optim.b1, optim.b2), optax.trace(optim.b1)
    return optax.chain(
        optax.clip_by_global_norm(optim.clip_norm),
        {"adamw": adam, "sgd": sgd}[optim.name],
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


class Total(NamedTuple):
    """The losses of a batch.

    Attributes:
        losses: their sum.
        tokens: how many there are.
    """

    losses: jax.Array
    tokens: jax.Array

    @property
    def mean(self) -> jax.Array:
        """The mean loss; 0 if there is none."""
        return self.losses / jnp.maximum(self.tokens, 1)


def gradient_of(
    loss: Callable[[Any, Any], Total], params: Any, batch: Any, parts: int
) -> tuple[jax.Array, Any]:
    """The mean loss of a batch, and its gradient, computed part by part.

    Sums are added and divided by the number of tokens in all parts: a mean over means
    would give a token of a part with much padding more weight.

    Args:
        loss: of parameters and a part of the batch.
        params: where.
        batch: a tree of arrays, whose first axis is cut.
        parts: into how many; memory is that of one.
    """

    def of_part(part: Any) -> tuple[Total, Any]:
        def losses(params: Any) -> tuple[jax.Array, Total]:
            total = loss(params, part)
            return total.losses, total

        gradient, total = jax.grad(losses, has_aux=True)(params)
        return total, gradient

    def add(sums: Any, part: Any) -> tuple[Any, None]:
        return jax.tree.map(jnp.add, sums, of_part(part)), None

    if parts == 1:
        total, gradient = of_part(batch)
    else:
        cut = jax.tree.map(lambda x: x.reshape(parts, -1, *x.shape[1:]), batch)
        shapes = jax.eval_shape(of_part, jax.tree.map(lambda x: x[0], cut))
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
        (total, gradient), _ = jax.lax.scan(add, zeros, cut)
    tokens = jnp.maximum(total.tokens, 1)
    return total.mean, jax.tree.map(lambda x: x / tokens, gradient)


def update(
    loss: Callable[[Any, Any], Total],
    optim: Optim,
    state: TrainState,
    batch: Any,
    rate: jax.Array,
) -> tuple[TrainState, dict[str, jax.Array]]:
    """One update of whatever has a loss; the caller compiles it.

    Args:
        loss: of parameters and a batch.
        optim: what `static_settings` leaves of the optimiser's settings.
        state: parameters and moments.
        batch: what `loss` takes.
        rate: the learning rate.

    Returns:
        The new state; loss, learning rate and global gradient norm of this step.
    """
    value, gradient = gradient_of(loss, state.params, batch, optim.accumulate)
    updates, moments = optimiser(optim).update(gradient, state.moments, state.params)
    params = jax.tree.map(lambda p, u: p - rate * u, state.params, updates)
    norm = optax.tree.norm(gradient)
    metrics = {"loss": value, "learning_rate": rate, "gradient_norm": norm}
    return TrainState(params, moments), metrics


def token_losses(
    logits: jax.Array, targets: jax.Array, real: jax.Array | None = None
) -> Total:
    """The cross-entropy of tokens, in nats.

    Args:
        logits: (*B, T, V). Those of padding may be NaN, and get the gradient 0.
        targets: integers, (*B, T).
        real: which of them are no padding, (*B, T); default all.
    """
    if real is None:
        real = jnp.ones(targets.shape, bool)
    logits = jnp.where(real[..., None], logits, 0)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
    return Total(jnp.sum(losses, where=real), jnp.sum(real, dtype=losses.dtype))


@functools.partial(jax.jit, static_argnames=("graph", "optim"))
def train_step(
    graph: Any,
    optim: Optim,
    state: TrainState,
    tokens: jax.Array,
    rate: jax.Array,
    scale: jax.Array,
) -> tuple[TrainState, dict[str, jax.Array]]:
    """One update of the language model on tokens (B, T + 1).

    Learning rate and `scale`, the factor of the dot products, are data: whatever
    differs in them alone shares one compilation.
    """

    def loss(params: Any, tokens: jax.Array) -> Total:
        return _losses_of(graph, params, scale, tokens)

    return update(loss, optim, state, tokens, rate)


def evaluate(graph: Any, params: Any, scale: jax.Array, windows: np.ndarray) -> float:
    """The mean loss over (batches, B, T + 1), in nats per token."""
    totals = [_losses(graph, params, scale, tokens) for tokens in windows]
    return sum(float(x.mean) for x in totals) / len(totals)


def _losses_of(graph: Any, params: Any, scale: jax.Array, tokens: jax.Array) -> Total:
    logits = nnx.merge(graph, params)(tokens[:, :-1], scale=scale)
    return token_losses(logits, tokens[:, 1:])


_losses = jax.jit(_losses_of, static_argnames="graph")
