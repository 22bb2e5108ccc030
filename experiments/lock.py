"""One process at a time in a directory."""

import contextlib
import fcntl
from collections.abc import Iterator
from pathlib import Path

from experiments.config import ConfigError


@contextlib.contextmanager
def hold(directory: Path) -> Iterator[None]:
    """Keep other processes from training in a directory, which is made as needed.

    The kernel releases the lock when a process ends, however it ends: a killed run
    never blocks the next. Needs `fcntl`, which Windows does not have.

    Raises:
        ConfigError: another process holds the directory.
    """
    directory.mkdir(parents=True, exist_ok=True)
    # The file stays: removing it would let two processes hold two files of one name.
    with (directory / ".lock").open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"another process is training in {directory}; wait until it is finished"
            ) from None
        yield
