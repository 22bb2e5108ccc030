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
from typing import Any

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
from experiments.files import write_json
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
        ConfigError: the directory holds another run, or the text is too short.
        KeyboardInterrupt: passed on, after a checkpoint was written.
    """
    check_length(corpus, config)
    claim(directory, config, corpus)
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

    step, state, reason = _run_steps(config, text, directory, progress, graph, initial)
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
            "train_loss": _last_line(directory)["loss"],
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
) -> tuple[int, TrainState, str | None]:
    """All steps from the newest checkpoint on.

    Returns:
        The number of steps done, the state after them, and why there are no more if
        there should be.
    """
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
                return step, record.state, f"loss is {loss} at step {step + 1}"
            if record.add(step + 1, state, numbers):
                speed = (step + 1 - first) / (time.perf_counter() - began)
                tokens_per_second = speed * data.batch * data.context
                progress.update(
                    step + 1, loss=loss, tokens_per_second=tokens_per_second
                )
        seconds = time.perf_counter() - began
        timing = {"seconds": seconds, "steps": record.step - first}
        write_json(directory / "timing.json", timing)
        return record.step, record.state, None


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
        path = directory / "metrics.jsonl"
        lines = (
            path.read_text(encoding="utf-8").split("\n")[:-1] if path.exists() else []
        )
        kept = [line for line in lines if json.loads(line)["step"] <= self.step]
        path.write_text("".join(line + "\n" for line in kept), encoding="utf-8")
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
        self._at = step, state
        due = step % self._log.every == 0 or step == self._last
        if due:
            line = {"step": step} | {name: float(x) for name, x in numbers.items()}
            self._lines.write(json.dumps(line) + "\n")
            self._lines.flush()
        if step % self._log.checkpoint_every == 0 or step == self._last:
            self._checkpoints.save(step, state)
        return due

    def __enter__(self) -> "_Record":
        return self

    def __exit__(self, kind: type | None, *_: object) -> None:
        if kind is KeyboardInterrupt and self.step:
            self._checkpoints.save(*self._at)
        self._checkpoints.close()
        self._lines.close()


def _last_line(directory: Path) -> dict[str, Any]:
    lines = (directory / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return json.loads(lines[-1])
