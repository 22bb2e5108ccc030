"""Those who look at a training: the display, a tracker, the watch, a trace.

None of them changes it.
"""

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from experiments.config import Config
from experiments.progress import Progress
from experiments.tracing import Trace
from experiments.trackers import open_tracker
from experiments.watch import Watch


class Onlookers:
    """What is done beside the steps of a run. A context manager.

    Args:
        config: of the run.
        directory: of the run.
        progress: is told of alarms, and where a trace is.
        measure: the probe, of parameters.
        step: the steps that are done.

    Raises:
        ConfigError: the tracker cannot be used.
    """

    def __init__(
        self,
        config: Config,
        directory: Path,
        progress: Progress,
        measure: Callable[[Any], dict[str, Any]],
        step: int,
    ) -> None:
        settings, self._last = config.logging, config.optim.steps
        self._progress = progress
        self._tokens = config.data.batch * config.data.context
        self._first = self._begun = self._done = step
        if settings.watch and step == self._last:
            progress.note("no look at attention: no step is left")
        self._watch = Watch(directory, settings, self._last, measure, step)
        # The first step compiles.
        traced = range(step + 1, min(step + 1 + settings.profile, self._last))
        if settings.profile and not traced:
            progress.note("no trace: of the steps that are left, the first compiles")
        self._trace = Trace(directory, traced, progress.note)
        self._tracker = open_tracker(config, directory, step)
        self._complete = False
        self._seen: dict[str, float] = {}
        self._looking = 0.0  # seconds
        self._began = time.perf_counter()

    @property
    def seconds(self) -> float:
        """What the steps have taken, without the looks at attention."""
        return time.perf_counter() - self._began - self._looking

    def before(self, step: int) -> None:
        """A step begins, and so many are done."""
        self._begun = step + 1
        self._trace.before(step)

    def after(
        self, step: int, params: Any, numbers: Mapping[str, Any], due: bool
    ) -> dict[str, float]:
        """So many steps are done.

        Args:
            step: how many.
            params: after them.
            numbers: the metrics of the last one.
            due: whether they are written to metrics.jsonl.

        Returns:
            What to show; nothing after most steps.
        """
        self._done = step
        if step == self._last:
            self._trace.end(step)
        if watched := self._watch.is_due(step):
            self._look(step, numbers["loss"], params)
        if not (due or watched):
            return {}
        self._tracker.log(step, {**numbers, **(self._seen if watched else {})})
        return {
            "loss": numbers["loss"],
            "bits_per_byte": numbers["bits_per_byte"],
            "tokens_per_second": (step - self._first) * self._tokens / self.seconds,
            **self._seen,
        }

    def end(self, loss: float, bits_per_byte: float) -> None:
        """The run is complete, with these results of the validation."""
        # A batch of training has numbers of the same kind.
        found = {"validation_loss": loss, "validation_bits_per_byte": bits_per_byte}
        self._tracker.log(self._done, found)
        self._complete = True

    def _look(self, step: int, loss: float, params: Any) -> None:
        began = time.perf_counter()
        self._seen, alarms = self._watch.look(step, loss, params)
        for alarm in alarms:
            self._progress.note(f"step {step}: {alarm}")
        self._looking += time.perf_counter() - began

    def __enter__(self) -> "Onlookers":
        return self

    def __exit__(self, *_: object) -> None:
        self._trace.end(self._begun)
        self._tracker.close(self._complete)
