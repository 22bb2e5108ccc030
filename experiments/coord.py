"""The coordinate check: how the logits of the first layers grow with d_k.

If the std of the logits within a row is to depend on d_k not at all, before and after
training steps, then log std against log d_k has a slope of 0. At initialisation the
slope is exactly 1/2 without a factor, 0 with 1/sqrt(d_k) and -1/2 with 1/d_k.

Source: Yang et al. 2022, arXiv:2203.03466, appendix D.1 (coordinate checking).
"""

import dataclasses
import math
from typing import Any

import jax.numpy as jnp
import numpy as np

from experiments.config import Config, ConfigError
from experiments.data import Corpus, batch, split_of
from experiments.model import logit_scale
from experiments.probe import probe
from experiments.progress import Progress
from experiments.step import initialise, static_settings, train_step


def coordinate_check(
    config: Config, corpus: Corpus, progress: Progress
) -> dict[str, Any]:
    """Measures the std of the logits for every d_k, factor and number of steps.

    Args:
        config: `config.coord` says what is varied; the rest is shared. The learning
            rate is constant.
        corpus: the text.
        progress: where to say how far it is.

    Returns:
        "lr", "d_k" and "steps" as in the config; "scales": for each factor, "std": for
        each step a value for each d_k, the geometric mean over seeds; "slope": for
        each step the least-squares slope of log std against log d_k, None for a
        single d_k.

    Raises:
        ConfigError: a std is not positive and finite, and so has no logarithm.
    """
    settings = config.coord
    tokenizer, text, _ = split_of(corpus, config.data)
    total = len(settings.d_k) * len(settings.scales) * settings.seeds
    progress.start("coord", total)
    log_std = np.zeros((len(settings.scales), len(settings.steps), len(settings.d_k)))
    done = 0
    # d_k outermost: the factors share its compilation.
    for column, d_k in enumerate(settings.d_k):
        for row, scale in enumerate(settings.scales):
            for seed in range(settings.seeds):
                model = dataclasses.replace(config.model, d_k=d_k, scale=scale)
                run = dataclasses.replace(config, model=model, seed=config.seed + seed)
                log_std[row, :, column] += np.log(
                    _logit_stds(run, text.tokens, tokenizer.vocabulary)
                )
                done += 1
                progress.update(done, d_k=d_k)
    log_std /= settings.seeds
    arms = {
        scale: {"std": np.exp(means).tolist(), "slope": _slopes(settings.d_k, means)}
        for scale, means in zip(settings.scales, log_std, strict=True)
    }
    return {
        "lr": settings.lr,
        "d_k": list(settings.d_k),
        "steps": list(settings.steps),
        "scales": arms,
    }


def _logit_stds(config: Config, text: np.ndarray, vocabulary: int) -> list[float]:
    """The std of the logits after each number of steps."""
    settings, data, model = config.coord, config.data, config.model
    graph, state = initialise(config, vocabulary)
    scale, rate = jnp.float32(logit_scale(model)), jnp.float32(settings.lr)
    static = static_settings(config.optim)

    def tokens(step: int) -> np.ndarray:
        sizes = dict(batch=data.batch, context=data.context)
        return batch(text, seed=config.seed, step=step, **sizes)

    def measure(step: int) -> float:
        sample = tokens(2**31 - 1)
        found = probe(
            graph, state.params, scale=scale, tokens=sample, settings=config.probe
        )
        std = found["mean"]["logit_std"]
        if not 0 < std < math.inf:
            raise ConfigError(
                "the std of the logits must be positive and finite, but at coord.lr = "
                f"{settings.lr:g}, d_k = {model.d_k} and scale = {model.scale!r} it is "
                f"{std} after {step} steps; lower coord.lr or change the model"
            )
        return std

    stds = {0: measure(0)}
    for step in range(max(settings.steps)):
        state, _ = train_step(graph, static, state, tokens(step), rate, scale)
        if step + 1 in settings.steps:
            stds[step + 1] = measure(step + 1)
    return [stds[step] for step in settings.steps]


def _slopes(d_k: tuple[int, ...], log_std: np.ndarray) -> list[float | None]:
    """The slope of every row of (steps, d_k)."""
    if len(set(d_k)) < 2:
        return [None] * len(log_std)
    return [float(np.polyfit(np.log(d_k), row, 1)[0]) for row in log_std]
