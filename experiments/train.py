"""Training of one model: every step a function of (config, seed, step) alone.

A run is resumed from its last checkpoint and ends with the very numbers, bit for bit,
of a run that was never interrupted. So nothing that depends on the clock is written
among the metrics.
"""

import functools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from experiments.checkpoint import claim
from experiments.config import Config, run_id, to_dict
from experiments.data import (
    Corpus,
    batch,
    check_length,
    evaluation_batches,
    ngram_losses,
    split_of,
)
from experiments.files import write_json
from experiments.lock import hold
from experiments.model import logit_scale
from experiments.onlookers import Onlookers
from experiments.probe import probe
from experiments.progress import Progress
from experiments.record import Record
from experiments.step import (
    TrainState,
    evaluate,
    initialise,
    learning_rates,
    static_settings,
    train_step,
)
from experiments.tokens import Text
from experiments.trackers import package_of


def train(
    config: Config, corpus: Corpus, directory: Path, progress: Progress
) -> dict[str, Any]:
    """Trains one model, from its last checkpoint if there is one.

    Writes config.json, metrics.jsonl, checkpoints and, last of all, summary.json; as
    the config wants it also tokenizer.json, watch.jsonl and a trace.

    Args:
        config: what to train.
        corpus: the text.
        directory: of this run.
        progress: where to say how far it is.

    Returns:
        The summary. Losses are in nats per token; those of `baselines` per byte.

    Raises:
        ConfigError: another process is training in the directory, it holds another
            run, or a damaged one, the text is too short, or a package is missing.
        KeyboardInterrupt: passed on, after a checkpoint was written.
    """
    check_length(corpus, config)
    package_of(config.logging.tracker)
    with hold(directory):
        claim(directory, config, corpus)
        split_of(corpus, config.data).tokenizer.keep(directory)
        return _train(config, corpus, directory, progress)


class _End(NamedTuple):
    """How the steps ended.

    Attributes:
        step: how many were done.
        state: after them.
        loss: on the last logged batch, None if there was none.
        reason: why there are no more if there should be.
    """

    step: int
    state: TrainState
    loss: float | None
    reason: str | None = None


def _train(
    config: Config, corpus: Corpus, directory: Path, progress: Progress
) -> dict[str, Any]:
    data, parts = config.data, split_of(corpus, config.data)
    graph, initial = initialise(config, parts.tokenizer.vocabulary)
    windows, ends = (
        evaluation_batches(
            part,
            tokens_wanted=config.evaluation.tokens,
            batch=data.batch,
            context=data.context,
        )
        for part in parts.validation
    )
    scale = jnp.float32(logit_scale(config.model))
    probed = windows.reshape(-1, data.context + 1)[: config.probe.batch]
    measure = functools.partial(
        probe, graph, scale=scale, tokens=probed, settings=config.probe
    )

    step, state, train_loss, reason = _run_steps(
        config, parts.train, directory, progress, graph, initial, measure
    )
    summary: dict[str, Any] = {
        "id": run_id(config),
        "config": to_dict(config),
        "status": "finished" if reason is None else "diverged",
        "metrics": {
            "step": step,
            "train_loss": None,
            "validation_loss": None,
            "bits_per_byte": None,
            "bytes_per_token": float(_bytes_per_token(ends)),
            "parameters": sum(x.size for x in jax.tree.leaves(state.params)),
        },
        "corpus": {
            "name": corpus.name,
            "bytes": len(corpus.data),
            "sha256": corpus.sha256,
        },
        "baselines": ngram_losses(*corpus.split(data.validation_fraction)),
        "probe": {"initial": measure(initial.params), "final": None},
    }
    if reason is None:
        # As large as the parts of which training keeps one at a time.
        size = data.batch // config.optim.accumulate
        cut = windows.reshape(-1, size, data.context + 1)
        loss = evaluate(graph, state.params, scale, cut)
        bits = _bits_per_byte(loss, ends)
        summary["metrics"] |= {
            "train_loss": train_loss,
            "validation_loss": loss,
            "bits_per_byte": bits,
        }
        summary["probe"]["final"] = measure(state.params)
        progress.finish(
            f"validation loss {loss:.4f} nats per token, {bits:.4f} bits per byte"
        )
    else:
        summary["reason"] = reason
        progress.finish(reason)
    write_json(directory / "summary.json", summary)
    return summary


def _bytes_per_token(ends: np.ndarray) -> float:
    """Of the targets of windows, from where their tokens end: (..., T + 1)."""
    return (ends[..., -1] - ends[..., 0]).mean() / (ends.shape[-1] - 1)


def _bits_per_byte(loss: float, ends: np.ndarray) -> float:
    """The mean loss of these targets, in nats per token, in other units."""
    return float(loss / _bytes_per_token(ends) / math.log(2))


def _run_steps(
    config: Config,
    text: Text,
    directory: Path,
    progress: Progress,
    graph: Any,
    initial: TrainState,
    measure: Callable[[Any], dict[str, Any]],
) -> _End:
    """All steps from the newest checkpoint on."""
    optim, data = config.optim, config.data
    rates, scale = learning_rates(optim), jnp.float32(logit_scale(config.model))
    static = static_settings(optim)
    sizes = dict(seed=config.seed, batch=data.batch, context=data.context)
    progress.start("train", optim.steps)
    with Record(directory, config, initial) as record:
        first = record.step
        with Onlookers(config, directory, progress, measure, first) as onlookers:
            for step in range(first, optim.steps):
                onlookers.before(step)
                tokens, ends = (batch(part, step=step, **sizes) for part in text)
                state, numbers = train_step(
                    graph, static, record.state, tokens, rates[step], scale
                )
                loss = float(numbers["loss"])
                if not math.isfinite(loss):
                    reason = f"loss is {loss} at step {step + 1}"
                    return _End(step, record.state, record.loss, reason)
                numbers["bits_per_byte"] = _bits_per_byte(loss, ends)
                due = record.is_due(step + 1)
                # First: what was seen of a step that is lost is seen again.
                shown = onlookers.after(step + 1, state.params, numbers, due)
                record.add(step + 1, state, numbers)
                if shown:
                    progress.update(step + 1, **shown)
            timing = {"seconds": onlookers.seconds, "steps": record.step - first}
        write_json(directory / "timing.json", timing)
        return _End(record.step, record.state, record.loss)
