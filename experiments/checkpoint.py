"""The state of a run on disk: complete checkpoints, and what they belong to."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from flax import nnx

from experiments.config import Config, ConfigError, from_dict, run_id, to_dict
from experiments.data import Corpus
from experiments.files import damaged, read_json, write_json
from experiments.model import CausalLM
from experiments.step import TrainState, initialise
from experiments.tokens import of_run

# What orbax raises for files that are empty, cut off, overwritten or missing.
DAMAGED = (ValueError, KeyError, AttributeError, FileNotFoundError, IsADirectoryError)


def claim(directory: Path, config: Config, corpus: Corpus) -> None:
    """Marks a directory as that of a run, or makes sure that it is.

    Raises:
        ConfigError: it holds a run of other settings or on another text.
    """
    path = directory / "config.json"
    if path.exists():
        held, sha256 = _claimed(path)
        if run_id(held) != run_id(config):
            raise ConfigError(
                f"{directory} holds a run of another config; name another"
            )
        if sha256 != corpus.sha256:
            raise ConfigError(f"{directory} holds a run on another text; name another")
    write_json(path, {"config": to_dict(config), "sha256": corpus.sha256})


class Checkpoints:
    """The checkpoints of one run; the newest two are kept.

    An interrupted write leaves the older ones as they were.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory / "checkpoints"
        with _refusing_damage(self._directory):
            self._manager = ocp.CheckpointManager(
                self._directory.absolute(),
                options=ocp.CheckpointManagerOptions(max_to_keep=2),
                item_handlers=ocp.StandardCheckpointHandler(),
            )

    def close(self) -> None:
        """Ends all use."""
        self._manager.close()

    @property
    def step(self) -> int:
        """How many updates the newest checkpoint has seen; 0 without one."""
        return self._manager.latest_step() or 0

    def save(self, step: int, state: TrainState) -> None:
        """Writes the state after `step` updates, and waits until it is complete."""
        if step != self.step:
            self._manager.save(step, args=ocp.args.StandardSave(_named(state)))
            self._manager.wait_until_finished()

    def restore(self, like: TrainState) -> TrainState:
        """The newest state, in the structure of `like`; `like` itself without one.

        Raises:
            ConfigError: the checkpoint is damaged, or has other parameters.
        """
        if self.step == 0:
            return like
        path = self._directory / str(self.step)
        named = _named(like)
        abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, named)
        with _refusing_damage(path):
            held = self._manager.item_metadata(self.step).tree
            if _shapes(held) == _shapes(named):
                args = ocp.args.StandardRestore(abstract)
                arrays = self._manager.restore(self.step, args=args)
                leaves = [arrays[name] for name in named]
                return jax.tree.unflatten(jax.tree.structure(like), leaves)
        raise ConfigError(
            f"{path} holds other parameters than such a model has now; remove "
            f"{self._directory.parent} to train it again"
        )


def restore_parameters(directory: Path) -> tuple[Config, CausalLM]:
    """The model of a run at its newest checkpoint.

    Raises:
        ConfigError: there is no checkpoint, or it is damaged, or of another model.
    """
    config, _ = _claimed(directory / "config.json")
    graph, initial = initialise(config, of_run(directory, config.data).vocabulary)
    # To look for checkpoints makes their directory.
    is_there = (directory / "checkpoints").exists()
    if not is_there or (checkpoints := Checkpoints(directory)).step == 0:
        raise ConfigError(f"{directory} holds no checkpoint: {_cure(directory)}")
    state = checkpoints.restore(initial)
    checkpoints.close()
    return config, nnx.merge(graph, state.params)


def _cure(directory: Path) -> str:
    """What to do about a run without a checkpoint."""
    path = directory / "summary.json"
    if not path.exists():
        return "train the run first"
    reason = read_json(path).get("reason")
    return f"its training diverged ({reason}); train it with other settings"


def _claimed(path: Path) -> tuple[Config, str]:
    """What config.json says: the config, and the SHA-256 of the text."""
    held = read_json(path)
    try:
        return from_dict(held["config"]), held["sha256"]
    except ConfigError as error:
        raise damaged(path, error) from None


@contextlib.contextmanager
def _refusing_damage(directory: Path) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        # An array that cannot be read is an Exception of no further type to orbax.
        if type(error) is not Exception and not isinstance(error, DAMAGED):
            raise
        raise ConfigError(
            f"{directory} is damaged; remove it to continue from an older checkpoint, "
            "or from the beginning"
        ) from error


def _named(state: TrainState) -> dict[str, Any]:
    """The arrays by their paths."""
    leaves = jax.tree_util.tree_leaves_with_path(state)
    return {jax.tree_util.keystr(p, simple=True, separator="."): x for p, x in leaves}


def _shapes(arrays: Any) -> Any:
    return jax.tree.map(lambda x: (tuple(x.shape), x.dtype), arrays)
