"""How a long computation says where it is: a bar on a terminal, else plain lines."""

import contextlib
from collections.abc import Iterator
from typing import Protocol

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    TextColumn,
    TimeRemainingColumn,
)
from rich.progress import Progress as Bar

PLAIN_LINES = 5  # lines of one task, where there is no terminal


class Progress(Protocol):
    """What a computation calls. Only the command line decides how it looks."""

    def start(self, description: str, total: int) -> None:
        """A task of `total` steps begins."""

    def update(self, step: int, **numbers: float) -> None:
        """`step` steps are done; `numbers` (loss, tokens_per_second) are their news."""

    def note(self, message: str) -> None:
        """Something to keep, while the task goes on."""

    def finish(self, message: str) -> None:
        """The task is over, or was over already; `message` is all there is to keep."""


class Silent:
    """Shows nothing."""

    def start(self, description: str, total: int) -> None:
        """Show nothing."""

    def update(self, step: int, **numbers: float) -> None:
        """Show nothing."""

    def note(self, message: str) -> None:
        """Show nothing."""

    def finish(self, message: str) -> None:
        """Show nothing."""


class PlainLines:
    """A few lines for each task, for files and pipes."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def start(self, description: str, total: int) -> None:
        """Print what begins."""
        self._total = total
        self._next = 0.0
        _print(self._console, description)

    def update(self, step: int, **numbers: float) -> None:
        """Print the numbers if a fifth of the task has passed since the last line."""
        if step >= self._next:
            self._next = step + self._total / PLAIN_LINES
            _print(self._console, f"  {step}/{self._total}  {_words(numbers)}")

    def note(self, message: str) -> None:
        """Print the message."""
        _print(self._console, f"  {message}")

    def finish(self, message: str) -> None:
        """Print the message."""
        _print(self._console, message)


class LiveBar:
    """One bar that moves, with the last numbers and the time that remains."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bar = Bar()

    def start(self, description: str, total: int) -> None:
        """Show a new bar in the place of the last one."""
        self.close()
        self._bar = Bar(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[words]}", markup=False),
            TimeRemainingColumn(),
            console=self._console,
            transient=True,
        )
        self._task = self._bar.add_task(description, total=total, words="")
        self._bar.start()

    def update(self, step: int, **numbers: float) -> None:
        """Move the bar."""
        self._bar.update(self._task, completed=step, words=_words(numbers))

    def note(self, message: str) -> None:
        """Print the message above the bar."""
        _print(self._console, f"  {message}")

    def finish(self, message: str) -> None:
        """Replace the bar by the message."""
        self.close()
        _print(self._console, message)

    def close(self) -> None:
        """Take the bar away, and give the terminal its cursor back."""
        self._bar.stop()


class Prefixed:
    """Another display, with a prefix to all it says: which run of a sweep this is."""

    def __init__(self, progress: Progress, prefix: str) -> None:
        self._progress = progress
        self._prefix = prefix

    def start(self, description: str, total: int) -> None:
        """Pass on, with the prefix."""
        self._progress.start(f"{self._prefix}  {description}", total)

    def update(self, step: int, **numbers: float) -> None:
        """Pass on."""
        self._progress.update(step, **numbers)

    def note(self, message: str) -> None:
        """Pass on, with the prefix."""
        self._progress.note(f"{self._prefix}  {message}")

    def finish(self, message: str) -> None:
        """Pass on, with the prefix."""
        self._progress.finish(f"{self._prefix}  {message}")


@contextlib.contextmanager
def display(console: Console) -> Iterator[Progress]:
    """The display that suits the console; whatever happens, no bar is left behind."""
    if not console.is_terminal:
        yield PlainLines(console)
        return
    bar = LiveBar(console)
    try:
        yield bar
    finally:
        bar.close()


def _print(console: Console, line: str) -> None:
    console.print(line, markup=False, highlight=False, soft_wrap=True)


def _words(numbers: dict[str, float]) -> str:
    """The numbers as in "loss 2.346  tokens/s 51,200"."""
    return "  ".join(
        f"{name.replace('_per_second', '/s').replace('_', ' ')} "
        + (f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}")
        for name, value in numbers.items()
    )
