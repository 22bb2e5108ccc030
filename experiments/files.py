"""JSON files that are either complete or absent."""

import json
import os
from pathlib import Path
from typing import Any


def write_json(path: Path, value: Any) -> None:
    """Write a value as JSON; an interrupted write leaves the old file as it was.

    Directories are made as needed.

    Raises:
        ValueError: a number is nan or infinite, for which JSON has no word.
    """
    text = json.dumps(value, indent=1, allow_nan=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(text + "\n", encoding="utf-8")
    os.replace(temporary, path)


def read_json(path: Path) -> Any:
    """Read what `write_json` wrote."""
    return json.loads(path.read_text(encoding="utf-8"))
