"""Language models of one width with any number of heads, which experiments share."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from experiments.checkpoint import restore_parameters
from experiments.claims.store import Store
from experiments.config import Config, ConfigError, Data, Model, Optim
from experiments.data import Split, evaluation_batches, load_corpus, split_of
from experiments.model import CausalLM, logit_scale
from experiments.settings import Count, Seed
from experiments.step import initialise


@dataclass(frozen=True)
class OneWidth:
    """Causal transformers; d_k and d_v are the width over the number of heads."""

    layers: Count = 2  # transformer blocks
    d_model: Count = 64  # width of the residual stream, which the heads share
    data: Data = Data()
    optim: Optim = Optim()
    seeds: Count = 3  # models of each number of heads
    seed: Seed = 0  # of the first one; the others count on


class Trained(NamedTuple):
    """A model that is there; nothing of it is read before it is needed.

    Attributes:
        config: its settings.
        summary: what `experiments.train.train` returned.
        directory: of the run.
    """

    config: Config
    summary: dict[str, Any]
    directory: Path

    @property
    def given(self) -> dict[str, str]:
        """What identifies it, for pieces that are computed from it."""
        return {"run": self.summary["id"], "text": self.summary["corpus"]["sha256"]}

    @property
    def loss(self) -> float:
        """Of validation, in nats per token."""
        return self.summary["metrics"]["validation_loss"]

    @property
    def scale(self) -> jax.Array:
        """The factor of the dot products."""
        return jnp.float32(logit_scale(self.config.model))

    def split(self) -> Split:
        """The text in tokens."""
        return split_of(load_corpus(self.config.data.source), self.config.data)

    def model(self) -> CausalLM:
        """As training left it."""
        return restore_parameters(self.directory)[1]

    def initial(self) -> CausalLM:
        """As training found it."""
        graph, state = initialise(self.config, self.split().tokenizer.vocabulary)
        return nnx.merge(graph, state.params)

    def windows(self, tokens: np.ndarray, wanted: int) -> np.ndarray:
        """Windows spread evenly over tokens, (batches, B, T + 1)."""
        data = self.config.data
        sizes = dict(batch=data.batch, context=data.context)
        return evaluation_batches(tokens, tokens_wanted=wanted, **sizes)


def config_of(models: OneWidth, heads: int, seed: int) -> Config:
    """What a model is trained with.

    Raises:
        ConfigError: the width cannot be shared so.
    """
    size, rest = divmod(models.d_model, heads)
    if rest or size % 2:
        raise ConfigError(
            f"{heads} heads cannot share d_model = {models.d_model}: each needs an "
            "equal and even part (RoPE rotates pairs)"
        )
    return Config(
        seed=seed,
        data=models.data,
        model=Model(
            layers=models.layers,
            d_model=models.d_model,
            heads=heads,
            d_k=size,
            d_v=size,
            d_ff=4 * models.d_model,
        ),
        optim=models.optim,
    )


def train(models: OneWidth, heads: int, store: Store) -> list[Trained]:
    """A model of so many heads for every seed.

    Raises:
        ConfigError: the width cannot be shared so, or a training diverged.
    """
    trained = []
    for seed in range(models.seed, models.seed + models.seeds):
        config = config_of(models, heads, seed)
        trained.append(Trained(config, *store.train(config)))
    return trained
