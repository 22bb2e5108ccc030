"""The pieces of an experiment, each computed once and kept in a file."""

import dataclasses
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from experiments.config import Config, run_id, to_dict
from experiments.data import load_corpus
from experiments.files import damaged, read_json, write_json
from experiments.progress import Prefixed, Progress
from experiments.sweep import experiment_directory, run


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
        """
        text = json.dumps([name, given], sort_keys=True)
        key = hashlib.sha256(text.encode()).hexdigest()[:10]
        path = self.directory / "pieces" / f"{name.replace(' ', '_')}-{key}.json"
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)  # fails before the work
            write_json(path, {"name": name, "given": given, "value": compute()})
        # As JSON gives it back, so that a value is the same whether it was kept or not.
        kept = read_json(path)
        if "value" not in kept:
            raise damaged(path, "it has no 'value'")
        return kept["value"]

    def train(self, config: Config) -> tuple[dict[str, Any], Path]:
        """A language model: its summary and its directory.

        It is trained unless it was, by whichever experiment; an interrupted training
        continues at its last checkpoint.
        """
        out, name = str(self._models.parent), self._models.name
        config = dataclasses.replace(config, out=out, name=name)
        corpus = load_corpus(config.data.source)
        summary = run(config, corpus, Prefixed(self.progress, run_id(config)))
        return summary, experiment_directory(config) / run_id(config)
