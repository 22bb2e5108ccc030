"""What the device does in a few steps, as a trace for a viewer."""

from collections.abc import Callable
from pathlib import Path

import jax


class Trace:
    """Records some steps of a training.

    Args:
        directory: of the run; the trace goes to its `trace`.
        steps: which to record.
        say: is told where the trace is.
    """

    def __init__(
        self, directory: Path, steps: range, say: Callable[[str], None]
    ) -> None:
        self._directory = directory / "trace"
        self._steps = steps
        self._say = say
        self._first: int | None = None

    def before(self, step: int) -> None:
        """Starts or ends the recording, if it is time, before a step is made."""
        if self._first is None and step in self._steps:
            jax.profiler.start_trace(str(self._directory), create_perfetto_trace=True)
            self._first = step
        elif step not in self._steps:
            self.end(step)

    def end(self, step: int) -> None:
        """Ends the recording, if there is one, after so many steps."""
        if self._first is None:
            return
        jax.profiler.stop_trace()
        *_, path = sorted(self._directory.rglob("perfetto_trace.json.gz"))
        done = f"steps {self._first + 1} to {step}"
        self._first = None
        self._say(f"trace of {done}, for ui.perfetto.dev: {path}")
