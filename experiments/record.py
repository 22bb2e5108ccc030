"""How far a training is: its metrics and its checkpoints, which never disagree."""

import json
from pathlib import Path
from typing import Any

from experiments.checkpoint import Checkpoints
from experiments.config import Config
from experiments.files import damaged, read_lines, write_text
from experiments.step import TrainState


class Record:
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

    def is_due(self, step: int) -> bool:
        """Whether a line is written after so many steps."""
        return step % self._log.every == 0 or step == self._last

    def add(self, step: int, state: TrainState, numbers: dict[str, float]) -> None:
        """Keeps a step, and writes a line if it is due."""
        if self.is_due(step):
            line = {"step": step} | numbers
            self._lines.write(json.dumps(line) + "\n")
            self._lines.flush()
            self.loss = line["loss"]
        self._at = step, state  # after its line: a checkpoint is never ahead of it
        if step % self._log.checkpoint_every == 0 or step == self._last:
            self._save()

    def __enter__(self) -> "Record":
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

    def _kept_lines(self, path: Path) -> list[dict[str, Any]]:
        """The lines up to the newest checkpoint, none of which may be missing."""
        lines = read_lines(path) if path.exists() else []
        kept = [line for line in lines if line["step"] <= self.step]
        due = [step for step in range(1, self.step + 1) if self.is_due(step)]
        if [line["step"] for line in kept] != due:
            raise damaged(path, "its steps are not those before the checkpoint")
        return kept
