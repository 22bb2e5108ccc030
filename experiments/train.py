"""Training of one model: every step a function of (config, seed, step) alone.

A run is resumed from its last checkpoint and ends with the very numbers, bit for bit,
of a run that was never interrupted. So nothing that depends on the clock is written
among the metrics.
"""

import functools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.checkpoint import claim
from experiments.config import Config, check_together, run_id, to_dict
from experiments.data import (
    Corpus,
    Split,
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
    evaluate,
    initialise,
    learning_rates,
    static_settings,
    train_step,
)
from experiments.tokens import Text
from experiments.trackers import check_tracker
from experiments.watch import not_finite


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
            run, or a damaged one, the text is too short, a tracker cannot be used, or
            there is no step to trace.
        KeyboardInterrupt: passed on, after a checkpoint was written.
    """
    check_length(corpus, config)
    check_together(config)
    check_tracker(config.logging.tracker)
    with hold(directory):
        claim(directory, config, corpus)
        split_of(corpus, config.data).tokenizer.keep(directory)
        return _train(config, corpus, directory, progress)


class _Diverged(Exception):
    """A number is not finite: which, and when."""


def _train(
    config: Config, corpus: Corpus, directory: Path, progress: Progress
) -> dict[str, Any]:
    split = split_of(corpus, config.data)
    graph, initial = initialise(config, split.tokenizer.vocabulary)
    windows, ends = _held_out(config, split)
    measure = functools.partial(
        probe,
        graph,
        scale=jnp.float32(logit_scale(config.model)),
        tokens=windows.reshape(-1, windows.shape[-1])[: config.probe.batch],
        settings=config.probe,
    )
    progress.start("train", config.optim.steps)
    summary = _summary(config, corpus, split, ends, initial.params)
    summary["probe"]["initial"] = measure(initial.params)
    with (
        Record(directory, config, initial) as record,
        Onlookers(config, directory, progress, measure, record.step) as onlookers,
    ):
        try:
            _run_steps(config, split.train, graph, record, onlookers, progress)
            loss = _validation_loss(config, windows, graph, record)
            summary["probe"]["final"] = _final_probe(measure, record)
        except _Diverged as error:
            summary |= {"status": "diverged", "reason": str(error)}
            progress.finish(str(error))
        else:
            bits = _bits_per_byte(loss, ends)
            found = {"validation_loss": loss, "bits_per_byte": bits}
            summary["metrics"] |= found
            onlookers.end(loss, bits)
            progress.finish(
                f"validation loss {loss:.4f} nats per token, {bits:.4f} bits per byte"
            )
        summary["metrics"] |= {"step": record.step, "train_loss": record.loss}
        write_json(directory / "summary.json", summary)
    return summary


def _held_out(config: Config, split: Split) -> tuple[np.ndarray, np.ndarray]:
    """Windows of tokens to validate on, and where these end in the text."""
    tokens, ends = (
        evaluation_batches(
            part,
            tokens_wanted=config.evaluation.tokens,
            batch=config.data.batch,
            context=config.data.context,
        )
        for part in split.validation
    )
    return tokens, ends


def _summary(
    config: Config, corpus: Corpus, split: Split, ends: np.ndarray, params: Any
) -> dict[str, Any]:
    """What summary.json holds, as far as it is known before training."""
    return {
        "id": run_id(config),
        "config": to_dict(config),
        "status": "finished",
        "metrics": {
            "step": 0,
            "train_loss": None,
            "validation_loss": None,
            "bits_per_byte": None,
            "bytes_per_token": float(_bytes_per_token(ends)),
            "vocabulary": split.tokenizer.vocabulary,
            "parameters": sum(x.size for x in jax.tree.leaves(params)),
        },
        "corpus": {
            "name": corpus.name,
            "bytes": len(corpus.data),
            "sha256": corpus.sha256,
        },
        "baselines": ngram_losses(*corpus.split(config.data.validation_fraction)),
        "probe": {"initial": None, "final": None},
    }


def _run_steps(
    config: Config,
    text: Text,
    graph: Any,
    record: Record,
    onlookers: Onlookers,
    progress: Progress,
) -> None:
    """All steps from the newest checkpoint on.

    Raises:
        _Diverged: a number of a step is not finite.
    """
    optim, data = config.optim, config.data
    rates, scale = learning_rates(optim), jnp.float32(logit_scale(config.model))
    static = static_settings(optim)
    sizes = dict(seed=config.seed, batch=data.batch, context=data.context)
    for step in range(record.step, optim.steps):
        onlookers.before(step)
        tokens, ends = (batch(part, step=step, **sizes) for part in text)
        state, found = train_step(
            graph, static, record.state, tokens, rates[step], scale
        )
        numbers = {name: float(x) for name, x in jax.device_get(found).items()}
        for name in ("loss", "learning_rate", "gradient_norm"):
            if not math.isfinite(value := numbers[name]):
                what = name.replace("_", " ")
                raise _Diverged(f"{what} is {value} at step {step + 1}")
        numbers["bits_per_byte"] = _bits_per_byte(numbers["loss"], ends)
        due = record.is_due(step + 1)
        # First: what was seen of a step that is lost is seen again.
        shown = onlookers.after(step + 1, state.params, numbers, due)
        record.add(step + 1, state, numbers)
        if shown:
            progress.update(step + 1, **shown)


def _validation_loss(
    config: Config, windows: np.ndarray, graph: Any, record: Record
) -> float:
    """In nats per token.

    Raises:
        _Diverged: it is not finite, by the last update.
    """
    # As large as the parts of which training keeps one at a time.
    size = config.data.batch // config.optim.accumulate
    cut = windows.reshape(-1, size, windows.shape[-1])
    scale = jnp.float32(logit_scale(config.model))
    loss = evaluate(graph, record.state.params, scale, cut)
    if not math.isfinite(loss):
        raise _Diverged(f"validation loss is {loss} after step {record.step}")
    return loss


def _final_probe(
    measure: Callable[[Any], dict[str, Any]], record: Record
) -> dict[str, Any]:
    """What the probe sees after the last step.

    Raises:
        _Diverged: something that is not finite.
    """
    measured = measure(record.state.params)
    if broken := next(not_finite(measured["heads"]), None):
        raise _Diverged(f"{broken.text} after step {record.step}")
    return measured


def _bytes_per_token(ends: np.ndarray) -> float:
    """Of the targets of windows, from where their tokens end: (..., T + 1)."""
    return (ends[..., -1] - ends[..., 0]).mean() / (ends.shape[-1] - 1)


def _bits_per_byte(loss: float, ends: np.ndarray) -> float:
    """The mean loss of these targets, in nats per token, in other units."""
    return float(loss / _bytes_per_token(ends) / math.log(2))
