"""The pieces of an experiment, each computed once and kept in a file."""

import dataclasses
import hashlib
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from experiments.config import Config, ConfigError, check_together, run_id, to_dict
from experiments.data import load_corpus
from experiments.files import damaged, read_json, write_json
from experiments.progress import Prefixed, Progress
from experiments.sweep import run, run_directory


def numbers_of(settings: Any) -> dict[str, Any]:
    """The settings of an experiment without those that change no number."""
    table = to_dict(settings)
    del table["name"], table["out"]
    return table


class Store:
    """Where an experiment keeps what it has computed.

    A piece is a function of what it is called and of what it was computed from, so an
    experiment that was interrupted ends with the numbers of one that was not.

    Args:
        directory: of the experiment.
        models: of the language models, which experiments share.
        progress: where to say what is being done.
    """

    def __init__(self, directory: Path, models: Path, progress: Progress) -> None:
        self.directory = directory
        self.progress = progress
        self._models = models

    def piece(
        self, name: str, given: Any, compute: Callable[[], dict[str, Any]]
    ) -> dict[str, Any]:
        """What `compute()` returns, or returned when it was first asked for.

        Args:
            name: what it is, a few words.
            given: all that it depends on, as JSON can write it.
            compute: returns plain values for JSON.

        Raises:
            ConfigError: a number is nan or infinite, or the file is damaged.
        """
        text = json.dumps([name, given], sort_keys=True)
        key = hashlib.sha256(text.encode()).hexdigest()[:10]
        file = re.sub("[ /]", "_", name)
        path = self.directory / "pieces" / f"{file}-{key}.json"
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)  # fails before the work
            _write(path, {"name": name, "given": given, "value": compute()})
        # As JSON gives it back, so that a value is the same whether it was kept or not.
        kept = read_json(path)
        if not isinstance(kept.get("value"), dict):
            raise damaged(path, "it has no table 'value'")
        return kept["value"]

    def train(self, config: Config) -> tuple[dict[str, Any], Path]:
        """A language model: its summary and its directory.

        It is trained unless it was, by whichever experiment; an interrupted training
        continues at its last checkpoint.

        Raises:
            ConfigError: the settings do not fit together, or the training diverged.
        """
        out, name = str(self._models.parent), self._models.name
        config = dataclasses.replace(config, out=out, name=name)
        check_together(config)
        corpus = load_corpus(config.data.source)
        summary = run(config, corpus, Prefixed(self.progress, run_id(config)))
        if summary["status"] != "finished":
            raise ConfigError(
                f"the training of a model diverged ({summary['reason']}); lower the "
                f"learning rate {config.optim.lr:g}"
            )
        return summary, run_directory(config)


def _write(path: Path, piece: dict[str, Any]) -> None:
    try:
        write_json(path, piece)
    except ValueError:
        raise ConfigError(
            f"{path.parent.parent}: the piece {piece['name']!r} came out as nan or "
            "infinity; lower the learning rate, if it has one, or change its settings"
        ) from None
