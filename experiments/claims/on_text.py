"""Short trainings of the language model on text, which leave nothing but numbers."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from experiments.claims.checks import check_text
from experiments.config import Config, Data, Evaluation, Model, Optim, check_together
from experiments.data import Corpus, batch, evaluation_batches, load_corpus, split_of
from experiments.fit import Fitted, fit
from experiments.model import CausalLM, logit_scale
from experiments.progress import Progress
from experiments.settings import Count, Even
from experiments.step import evaluate, initialise, token_losses

TEXT = Data().source


@dataclass(frozen=True)
class OnText:
    """Causal transformers that read bytes, and how long they are trained."""

    context: Count = 32  # bytes in a window
    batch: Count = 8  # windows in a batch
    layers: Count = 2  # transformer blocks
    d_model: Count = 64  # width of the residual stream
    heads: Count = 2  # attention heads of a layer
    d_k: Even = 64  # size of a query or key of one head
    d_v: Count = 32  # size of a value of one head
    d_ff: Count = 128  # hidden width of the feed-forward layer
    steps: Count = 100  # updates
    held_out: Count = 16384  # bytes of validation, at least


def config_of(
    models: OnText, seed: int, optimiser: str, lr: float, **arm: Any
) -> Config:
    """What a model is trained with.

    Args:
        models: what all have in common.
        seed: of the initial weights and of the order of the data.
        optimiser: as in `Optim.name`.
        lr: the peak learning rate.
        **arm: the settings of `Model` that make the arm.

    Raises:
        ConfigError: they do not fit together.
    """
    sizes = ("layers", "d_model", "heads", "d_k", "d_v", "d_ff")
    config = Config(
        seed=seed,
        data=Data(source=TEXT, context=models.context, batch=models.batch),
        model=Model(**{name: getattr(models, name) for name in sizes}, **arm),
        optim=Optim(name=optimiser, lr=lr, steps=models.steps),  # type: ignore[arg-type]
        evaluation=Evaluation(tokens=models.held_out),
    )
    check_together(config)
    return config


def load_text(models: OnText) -> Corpus:
    """The text that they read.

    Raises:
        ConfigError: it is too short to hold so much out.
    """
    corpus, data = load_corpus(TEXT), Data(context=models.context, batch=models.batch)
    setting = f"models.held_out = {models.held_out}"
    check_text(corpus, data, models.held_out, setting)
    return corpus


def initial(config: Config, corpus: Corpus) -> CausalLM:
    """The model before training."""
    vocabulary = split_of(corpus, config.data).tokenizer.vocabulary
    graph, state = initialise(config, vocabulary)
    return nnx.merge(graph, state.params)


def train(
    config: Config,
    corpus: Corpus,
    progress: Progress,
    *,
    record: Callable[[Any], Any] | None = None,
    every: int = 50,
) -> Fitted:
    """The model after training, which may have diverged; see `fit`.

    Models whose settings differ in seed, scale and learning rate share a compilation.
    """
    tokens, scale = split_of(corpus, config.data).train.tokens, scale_of(config)
    sizes = dict(batch=config.data.batch, context=config.data.context)

    def batches(step: int) -> dict[str, Any]:
        drawn = batch(tokens, seed=config.seed, step=step, **sizes)
        return {"tokens": drawn, "scale": scale}

    return fit(
        loss,
        initial(config, corpus),
        batches,
        config.optim,
        record=record,
        every=every,
        may_diverge=True,
        progress=progress,
    )


def loss(model: CausalLM, batch: dict[str, Any]) -> jax.Array:
    """The mean cross-entropy of the bytes that follow, in nats."""
    tokens = batch["tokens"]
    return token_losses(model(tokens[:, :-1], scale=batch["scale"]), tokens[:, 1:]).mean


def scale_of(config: Config) -> jax.Array:
    """The factor of the dot products, as data."""
    return jnp.float32(logit_scale(config.model))


def held_out(config: Config, corpus: Corpus) -> np.ndarray:
    """The windows to validate on, (batches, B, T + 1)."""
    return evaluation_batches(
        split_of(corpus, config.data).validation.tokens,
        tokens_wanted=config.evaluation.tokens,
        batch=config.data.batch,
        context=config.data.context,
    )


def validation_loss(config: Config, corpus: Corpus, model: CausalLM) -> float:
    """The mean loss of what is held out, in nats per byte."""
    graph, params = nnx.split(model, nnx.Param)
    return evaluate(graph, params, scale_of(config), held_out(config, corpus))
