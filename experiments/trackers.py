"""Where the metrics of a training go besides metrics.jsonl."""

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from experiments.config import Config, ConfigError, run_id, to_dict

PACKAGES = {"tensorboard": "tensorboardX", "wandb": "wandb"}


class Tracker(Protocol):
    """What a training calls."""

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """These are the numbers after `step` steps, which never decreases."""

    def close(self) -> None:
        """There are no more."""


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
        ConfigError: its package is not installed.
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

    def close(self) -> None:
        """Close nothing."""


class TensorBoard:
    """Event files in the directory of the run."""

    def __init__(self, package: Any, directory: Path, step: int) -> None:
        self._writer = package.SummaryWriter(str(directory), purge_step=step + 1)

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """Write a scalar for each number."""
        for name, value in numbers.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Write what is left."""
        self._writer.close()


class WeightsAndBiases:
    """A run of the project that is called like the experiment.

    The service keeps the id of a run and ignores steps that it has, so an interrupted
    run goes on where it was.
    """

    def __init__(self, package: Any, config: Config, directory: Path) -> None:
        self._run = package.init(
            project=config.name,
            id=run_id(config),
            config=to_dict(config),
            dir=str(directory),
            resume="allow",
        )

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """Send the numbers."""
        self._run.log(dict(numbers), step=step)

    def close(self) -> None:
        """Send what is left."""
        self._run.finish()
