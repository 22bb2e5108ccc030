"""The files of an experiment: complete or absent, and refused if they are damaged."""

import json
import os
from pathlib import Path
from typing import Any

from experiments.config import ConfigError

NUMBER = int | float
# What a file must hold, by its name: dotted paths and types.
HOLDS: dict[str, dict[str, Any]] = {
    "config.json": {"config": dict, "sha256": str},
    "sweep.json": {"runs": list},
    "theory.json": {"keys": int, "rows": list},
    "results.json": {
        "experiment": str,
        "settings": dict,
        "machine": dict,
        "results": dict,
    },
    "coord.json": {"lr": NUMBER, "d_k": list, "steps": list, "scales": dict},
    "summary.json": {
        "id": str,
        "status": str,
        "config.seed": int,
        "config.data.batch": int,
        "config.data.context": int,
        "config.data.validation_fraction": NUMBER,
        "config.model.d_k": int,
        "config.model.scale": str,
        "config.optim.lr": NUMBER,
        "config.optim.steps": int,
        "config.probe.dead_below": NUMBER,
        "config.probe.saturated_above": NUMBER,
        "metrics.step": int,
        "metrics.validation_loss": NUMBER | None,
        "metrics.bytes_per_token": NUMBER,
        "corpus.bytes": int,
        "corpus.sha256": str,
        "baselines": dict,
        "probe.initial.mean": dict,
        "probe.final": dict | None,
    },
}


def write_json(path: Path, value: Any) -> None:
    """Write a value as JSON; an interrupted write leaves the old file as it was.

    Raises:
        ValueError: a number is nan or infinite, for which JSON has no word.
    """
    write_text(path, json.dumps(value, indent=1, allow_nan=False) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write a text; an interrupted write leaves the old file as it was."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, path)
    except OSError as error:
        error.filename = str(path)  # the name that its reader knows
        raise


def read_json(path: Path) -> dict[str, Any]:
    """Read what `write_json` wrote.

    Raises:
        ConfigError: it is not a table, or lacks what a file of this name must hold.
    """
    table = _parse(path, path.read_bytes(), "it")
    for name, kind in HOLDS.get(path.name, {}).items():
        value: Any = table
        for key in name.split("."):
            if not isinstance(value, dict) or key not in value:
                raise damaged(path, f"it has no '{name}'")
            value = value[key]
        if not isinstance(value, kind):
            raise damaged(path, f"'{name}' has the wrong type")
    return table


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Read metrics.jsonl, without a last line that was cut off.

    Raises:
        ConfigError: a line has no step and loss.
    """
    lines = []
    for number, text in enumerate(path.read_bytes().split(b"\n")[:-1], start=1):
        line = _parse(path, text, f"line {number}")
        numbers = line.get("step"), line.get("loss")
        if not all(isinstance(x, NUMBER) for x in numbers):
            raise damaged(path, f"line {number} has no step and loss")
        lines.append(line)
    return lines


def damaged(path: Path, why: object) -> ConfigError:
    """The error that refuses a file."""
    # The lines up to a checkpoint are not written again: both have to go together.
    what = path.parent if path.name == "metrics.jsonl" else "it"
    return ConfigError(f"{path} is damaged ({why}); remove {what} to compute it again")


def _parse(path: Path, text: bytes, what: str) -> dict[str, Any]:
    try:
        table = json.loads(text)
    except (ValueError, RecursionError):
        raise damaged(path, f"{what} is not JSON") from None
    if not isinstance(table, dict):
        raise damaged(path, f"{what} is not a table")
    return table
