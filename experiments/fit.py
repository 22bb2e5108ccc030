"""Training of a small model, from its loss and its batches alone."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from experiments.config import ConfigError, Optim
from experiments.progress import Progress, Silent
from experiments.step import (
    Total,
    TrainState,
    learning_rates,
    start,
    static_settings,
    token_losses,
    update,
)

Loss = Callable[[Any, Any], jax.Array]
"""`loss(model, batch)`, a number."""


class Fitted(NamedTuple):
    """What came of a training.

    Attributes:
        model: after the last update.
        curve: the loss of each update, up to the last that is finite.
        records: (updates done, what `record` said of the model).
        diverged: whether a loss or a parameter was not finite; the model is then of
            no use.
    """

    model: Any
    curve: list[float]
    records: list[tuple[int, Any]]
    diverged: bool


def fit(
    loss: Loss,
    model: nnx.Module,
    batches: Callable[[int], Any],
    optim: Optim,
    *,
    record: Callable[[Any], Any] | None = None,
    every: int = 50,
    may_diverge: bool = False,
    progress: Progress | None = None,
) -> Fitted:
    """Lowers a loss, by the same updates whenever it is called with the same.

    A batch and the learning rate are data: where models have one structure, batches
    one shape and `loss` is one function, as a function of a module is, there is one
    compilation.

    Args:
        loss: of a model and a batch.
        model: whose parameters to begin with; it stays as it is.
        batches: the next batch, of the number of updates done and of nothing else.
        optim: the optimiser, the learning rates and the number of updates.
        record: what to keep of the model, every so often and at the end.
        every: how many updates to make between looks at the losses, and records.
        may_diverge: whether a training that diverges is a result, and no error.
        progress: where to say how far it is.

    Raises:
        ConfigError: it diverges, and may_diverge is False; or a batch is to be
            accumulated from parts, whose tokens a plain mean cannot count.
    """
    if optim.accumulate > 1:
        raise ConfigError(f"optim.accumulate = {optim.accumulate} must be 1 here")
    progress = Silent() if progress is None else progress
    progress.start("train", optim.steps)
    graph, state = start(model, optim)
    rates, static = learning_rates(optim), static_settings(optim)
    curve: list[float] = []
    records: list[tuple[int, Any]] = []
    for first in range(0, optim.steps, every):
        end = min(first + every, optim.steps)
        losses = []
        for step in range(first, end):
            batch = batches(step)
            state, numbers = _step(loss, graph, static, state, batch, rates[step])
            losses.append(numbers["loss"])
        finite = np.isfinite(jax.device_get(losses))
        good = len(losses) if finite.all() else int(finite.argmin())
        curve += [float(x) for x in losses[:good]]
        model = nnx.merge(graph, state.params)
        reason = None
        if good < len(losses):
            reason = f"the loss is {losses[good]} at update {len(curve) + 1}"
        elif not is_finite(state.params):
            reason = f"a parameter is not finite after update {end}"
        if reason is not None:
            if not may_diverge:
                raise ConfigError(f"{reason}; lower the learning rate {optim.lr:g}")
            progress.finish(reason)
            return Fitted(model, curve, records, diverged=True)
        progress.update(end, loss=curve[-1])
        if record is not None:
            records.append((end, record(model)))
    progress.finish(f"loss {curve[-1]:.4f}")
    return Fitted(model, curve, records, diverged=False)


def is_finite(params: Any) -> bool:
    """Whether no parameter is infinite or NaN."""
    leaves = jax.tree.leaves(jax.device_get(params))
    return all(np.isfinite(leaf).all() for leaf in leaves)


def mean_loss(logits: jax.Array, targets: jax.Array, real: jax.Array) -> jax.Array:
    """The mean cross-entropy of real tokens, in nats; 0 if there is none.

    Args:
        logits: (*B, T, V). Those of padding may be NaN, and get the gradient 0.
        targets: integers, (*B, T).
        real: which of them count, (*B, T).
    """
    return token_losses(logits, targets, real).mean


@functools.partial(jax.jit, static_argnames=("loss", "graph", "optim"))
def _step(
    loss: Loss, graph: Any, optim: Optim, state: TrainState, batch: Any, rate: Any
) -> tuple[TrainState, dict[str, jax.Array]]:
    def loss_of(params: Any, batch: Any) -> Total:
        return Total(loss(nnx.merge(graph, params), batch), jnp.float32(1))

    return update(loss_of, optim, state, batch, rate)
