"""Where the metrics of a training go besides metrics.jsonl."""

import contextlib
import math
import re
import secrets
from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from experiments.config import Config, ConfigError, run_id, to_dict
from experiments.files import write_text

PACKAGES = {"tensorboard": "tensorboardX", "wandb": "wandb"}


class Tracker(Protocol):
    """What a training calls."""

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """These are the numbers after `step` steps, which never decreases."""

    def close(self, complete: bool) -> None:
        """There are no more; whether the run has all its steps and results."""


def check_tracker(tracker: str) -> None:
    """Refuse a tracker that cannot be used.

    Raises:
        ConfigError: its package is not installed, or nobody is logged in.
    """
    package = package_of(tracker)
    if tracker == "wandb":
        with _refusing(package):
            package.login()


def package_of(tracker: str) -> Any:
    """The package that a tracker writes with; None if it needs none.

    Raises:
        ConfigError: it is not installed.
    """
    if tracker not in PACKAGES:
        return None
    try:
        return import_module(PACKAGES[tracker])
    except ImportError:
        raise ConfigError(
            f"logging.tracker = {tracker!r} needs the package {PACKAGES[tracker]}: "
            f"pip install 'jattn[{tracker}]'"
        ) from None


def open_tracker(config: Config, directory: Path, step: int) -> Tracker:
    """The tracker of a run.

    Args:
        config: of the run.
        directory: of the run.
        step: the steps that are done; what was said of later ones is to be replaced.

    Raises:
        ConfigError: its package is not installed, or does not start.
    """
    package = package_of(config.logging.tracker)
    if config.logging.tracker == "tensorboard":
        return TensorBoard(package, directory / "tensorboard", step)
    if config.logging.tracker == "wandb":
        return WeightsAndBiases(package, config, directory)
    return Nowhere()


class Nowhere:
    """Writes nothing."""

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """Write nothing."""

    def close(self, complete: bool) -> None:
        """Close nothing."""


class TensorBoard:
    """Event files in the directory of the run."""

    def __init__(self, package: Any, directory: Path, step: int) -> None:
        self._writer = package.SummaryWriter(str(directory), purge_step=step + 1)

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """Write a scalar for each number that is one."""
        for name, value in numbers.items():
            if math.isfinite(value):
                self._writer.add_scalar(name, value, step)

    def close(self, complete: bool) -> None:
        """Write what is left."""
        self._writer.close()


class WeightsAndBiases:
    """A run of the project that is called like the experiment.

    The service keeps the id of a run and ignores steps that it has, so an interrupted
    run goes on where it was. The id lives as long as the directory: what is trained
    again in a new one is a new run.
    """

    def __init__(self, package: Any, config: Config, directory: Path) -> None:
        path = directory / "wandb_id.txt"
        if not path.exists():
            write_text(path, f"{run_id(config)}-{secrets.token_hex(4)}\n")
        with _refusing(package):
            self._run = package.init(
                project=config.name,
                id=path.read_text(encoding="utf-8").strip(),
                config=to_dict(config),
                dir=str(directory),
                resume="allow",
            )

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """Send the numbers."""
        self._run.log(dict(numbers), step=step)
        # Which has them even if the service had this step before.
        self._run.summary.update(dict(numbers))

    def close(self, complete: bool) -> None:
        """Send what is left; a run that is not complete has failed."""
        self._run.finish(exit_code=0 if complete else 1)


@contextlib.contextmanager
def _refusing(package: Any) -> Iterator[None]:
    """Makes an error of W&B one sentence."""
    try:
        yield
    except package.Error as error:
        first = re.split(r"\.\s|\.?$|\n", str(error).strip(), maxsplit=1)[0]
        raise ConfigError(
            f"logging.tracker = 'wandb': {first}; log in by `wandb login`, or set "
            "WANDB_MODE=offline"
        ) from None
