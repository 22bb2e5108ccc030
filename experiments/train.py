"""Training of one model: every step a function of (config, seed, step) alone.

A run is resumed from its last checkpoint and ends with the very numbers, bit for bit,
of a run that was never interrupted. So nothing that depends on the clock is written
among the metrics.
"""

import functools
import json
import math
import time
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from experiments.checkpoint import Checkpoints, claim
from experiments.config import Config, run_id, to_dict
from experiments.data import (
    Corpus,
    batch,
    check_length,
    evaluation_batches,
    ngram_losses,
)
from experiments.files import damaged, read_lines, write_json, write_text
from experiments.lock import hold
from experiments.model import logit_scale
from experiments.probe import probe
from experiments.progress import Progress
from experiments.step import (
    TrainState,
    evaluate,
    initialise,
    learning_rates,
    static_settings,
    train_step,
)


def train(
    config: Config, corpus: Corpus, directory: Path, progress: Progress
) -> dict[str, Any]:
    """Trains one model, from its last checkpoint if there is one.

    Writes config.json, metrics.jsonl, checkpoints and, last of all, summary.json.

    Args:
        config: what to train.
        corpus: the text.
        directory: of this run.
        progress: where to say how far it is.

    Returns:
        The summary. Losses are in nats per byte.

    Raises:
        ConfigError: another process is training in the directory, it holds another
            run, or a damaged one, or the text is too short.
        KeyboardInterrupt: passed on, after a checkpoint was written.
    """
    check_length(corpus, config)
    with hold(directory):
        claim(directory, config, corpus)
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
    graph, initial = initialise(config)
    data = config.data
    text, held_out = corpus.split(data.validation_fraction)
    windows = evaluation_batches(
        held_out,
        tokens_wanted=config.evaluation.tokens,
        batch=data.batch,
        context=data.context,
    )
    scale = jnp.float32(logit_scale(config.model))
    probed = windows.reshape(-1, data.context + 1)[: config.probe.batch]
    measure = functools.partial(
        probe, graph, scale=scale, tokens=probed, settings=config.probe
    )

    step, state, train_loss, reason = _run_steps(
        config, text, directory, progress, graph, initial
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
            "parameters": sum(x.size for x in jax.tree.leaves(state.params)),
        },
        "corpus": {
            "name": corpus.name,
            "bytes": len(corpus.data),
            "sha256": corpus.sha256,
        },
        "baselines": ngram_losses(text, held_out),
        "probe": {"initial": measure(initial.params), "final": None},
    }
    if reason is None:
        loss = evaluate(graph, state.params, scale, windows)
        summary["metrics"] |= {
            "train_loss": train_loss,
            "validation_loss": loss,
            "bits_per_byte": loss / math.log(2),
        }
        summary["probe"]["final"] = measure(state.params)
        progress.finish(f"validation loss {loss:.4f} nats per byte")
    else:
        summary["reason"] = reason
        progress.finish(reason)
    write_json(directory / "summary.json", summary)
    return summary


def _run_steps(
    config: Config,
    text: np.ndarray,
    directory: Path,
    progress: Progress,
    graph: Any,
    initial: TrainState,
) -> _End:
    """All steps from the newest checkpoint on."""
    optim, data = config.optim, config.data
    rates, scale = learning_rates(optim), jnp.float32(logit_scale(config.model))
    static = static_settings(optim)
    progress.start("train", optim.steps)
    began = time.perf_counter()
    with _Record(directory, config, initial) as record:
        first = record.step
        for step in range(first, optim.steps):
            tokens = batch(
                text,
                seed=config.seed,
                step=step,
                batch=data.batch,
                context=data.context,
            )
            state, numbers = train_step(
                graph, static, record.state, tokens, rates[step], scale
            )
            loss = float(numbers["loss"])
            if not math.isfinite(loss):
                reason = f"loss is {loss} at step {step + 1}"
                return _End(step, record.state, record.loss, reason)
            if record.add(step + 1, state, numbers):
                speed = (step + 1 - first) / (time.perf_counter() - began)
                tokens_per_second = speed * data.batch * data.context
                progress.update(
                    step + 1, loss=loss, tokens_per_second=tokens_per_second
                )
        seconds = time.perf_counter() - began
        timing = {"seconds": seconds, "steps": record.step - first}
        write_json(directory / "timing.json", timing)
        return _End(record.step, record.state, record.loss)


class _Record:
    """How far a run is, in memory and on disk. A context manager.

    What is on disk is never ahead of its newest checkpoint when a run is resumed; an
    interrupt by the keyboard writes one more.
    """

    def __init__(self, directory: Path, config: Config, initial: TrainState) -> None:
        self._log, self._last = config.logging, config.optim.steps
        self._checkpoints = Checkpoints(directory)
        # One attribute, so that an interrupt never finds half of a step.
        self._at = self._checkpoints.step, self._checkpoints.restore(initial)
        self._path = path = directory / "metrics.jsonl"
        kept = self._kept_lines(path)
        self.loss: float | None = kept[-1]["loss"] if kept else None
        write_text(path, "".join(json.dumps(line) + "\n" for line in kept))
        self._lines = path.open("a", encoding="utf-8")

    @property
    def step(self) -> int:
        """The number of steps done."""
        return self._at[0]

    @property
    def state(self) -> TrainState:
        """The state after them."""
        return self._at[1]

    def add(self, step: int, state: TrainState, numbers: dict[str, jax.Array]) -> bool:
        """Keeps a step; whether it was one to write a line for."""
        due = self._is_due(step)
        if due:
            line = {"step": step} | {name: float(x) for name, x in numbers.items()}
            self._lines.write(json.dumps(line) + "\n")
            self._lines.flush()
            self.loss = line["loss"]
        self._at = step, state  # after its line: a checkpoint is never ahead of it
        if step % self._log.checkpoint_every == 0 or step == self._last:
            self._save()
        return due

    def __enter__(self) -> "_Record":
        return self

    def __exit__(self, kind: type | None, *_: object) -> None:
        if kind is KeyboardInterrupt and self.step:
            self._save()
        self._checkpoints.close()
        self._lines.close()

    def _save(self) -> None:
        # Orbax would make a directory that was deleted anew; this raises instead.
        self._path.stat()
        self._checkpoints.save(*self._at)

    def _is_due(self, step: int) -> bool:
        return step % self._log.every == 0 or step == self._last

    def _kept_lines(self, path: Path) -> list[dict[str, Any]]:
        """The lines up to the newest checkpoint, none of which may be missing."""
        lines = read_lines(path) if path.exists() else []
        kept = [line for line in lines if line["step"] <= self.step]
        due = [step for step in range(1, self.step + 1) if self._is_due(step)]
        if [line["step"] for line in kept] != due:
            raise damaged(path, "its steps are not those before the checkpoint")
        return kept
