"""Read, override and multiply the settings of an experiment.

Nothing is ignored silently: an unknown key, a wrong type or an impossible value is a
`ConfigError` of one sentence.
"""

import contextlib
import hashlib
import io
import itertools
import json
import math
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, fields, is_dataclass
from difflib import get_close_matches
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import (
    Annotated,
    Any,
    Literal,
    TypeVar,
    get_args,
    get_origin,
    get_type_hints,
)

from experiments.settings import Config as Config
from experiments.settings import Coord as Coord
from experiments.settings import Cost as Cost
from experiments.settings import Data as Data
from experiments.settings import Evaluation as Evaluation
from experiments.settings import Logging as Logging
from experiments.settings import Model as Model
from experiments.settings import Optim as Optim
from experiments.settings import Probe as Probe
from experiments.settings import Scale as Scale
from experiments.settings import Theory as Theory

Settings = TypeVar("Settings")
# What the key `kind` of a file may be, besides the name of an experiment about a claim;
# a file without it is about training.
KINDS: dict[str, type[Any]] = {"training": Config, "cost": Cost}
TYPES = {int: "a whole number", float: "a number", str: "a text", bool: "true or false"}
# Settings that do not change what a training run computes.
NOT_PART_OF_A_RUN = ("name", "out", "theory", "coord")


class ConfigError(ValueError):
    """What the user asked for cannot be done; the message is one sentence."""


def settings_of(kind: str) -> type[Any]:
    """The dataclass that a config of a kind is read into."""
    from experiments.claims import NAMES

    _parse(Literal[(*KINDS, "all", *NAMES)], kind, "kind")
    if kind in KINDS:
        return KINDS[kind]
    if kind == "all":
        from experiments.claims.all import All

        return All
    from experiments.claims.claim import find  # imports JAX

    return find(kind).settings


def load(path: str | Path) -> tuple[Any, dict[str, list[Any]]]:
    """Read a TOML file: the config of its `kind`, and the lists of its `[sweep]` table.

    Raises:
        ConfigError: the file is missing or not TOML, a key is unknown, a value has the
            wrong type or is impossible, or a point of the sweep is.
    """
    try:
        table = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not TOML: {error}") from None
    try:
        cls = settings_of(table.pop("kind", "training"))
        if cls is not Config:  # it has no runs to sweep over
            return from_dict(table, cls), {}
        sweep = table.pop("sweep", {})
        config = from_dict(table)
        grid(config, sweep)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    return config, sweep


def override(
    config: Settings, args: Sequence[str], prog: str | None = None
) -> Settings:
    """Replace settings by command-line options such as `--optim.lr 1e-2`."""
    import tyro

    messages, cls = io.StringIO(), type(config)
    try:
        with contextlib.redirect_stderr(messages):
            changed, unknown = tyro.cli(
                cls, default=config, args=args, prog=prog, return_unknown_args=True
            )
    except SystemExit as stop:
        if not stop.code:  # --help
            raise
        raise ConfigError(_first_paragraph(messages.getvalue())) from None
    if unknown and unknown[0].startswith("--"):
        raise _unknown_key(unknown[0][2:].split("=")[0].replace("-", "_"), cls)
    if unknown:
        raise ConfigError(f"{unknown[0]!r} is not an option")
    return from_dict(to_dict(changed), cls)


def grid(config: Config, sweep: dict[str, list[Any]]) -> list[Config]:
    """All combinations of the lists of a sweep; the last list varies fastest."""
    if not isinstance(sweep, dict):
        raise ConfigError("sweep must be a table of lists")
    for path, values in sweep.items():
        if isinstance(values, dict):  # TOML reads a dotted key as a table
            quoted = f'"{path}.{next(iter(values), "")}"'
            raise ConfigError(
                f"sweep: write the path in quotes, as in {quoted} = [...]"
            )
        if path not in _paths(Config):
            raise ConfigError(f"sweep: {_unknown_key(path, Config)}")
        if path.split(".")[0] in NOT_PART_OF_A_RUN:
            raise ConfigError(f"sweep: '{path}' does not change a training run")
        if not isinstance(values, list) or not values:
            raise ConfigError(f"sweep: '{path}' must be a list of at least one value")
    points = []
    for combination in itertools.product(*sweep.values()):
        table = to_dict(config)
        for path, value in zip(sweep, combination, strict=True):
            *tables, leaf = path.split(".")
            reduce(getitem, tables, table)[leaf] = value
        points.append(from_dict(table))
    if len({run_id(point) for point in points}) < len(points):
        raise ConfigError("sweep: two points are the same run")
    return points


def run_id(config: Config) -> str:
    """Name of a run: a hash of the settings that change what it computes."""
    table = to_dict(config)
    for key in NOT_PART_OF_A_RUN:
        del table[key]
    return hashlib.sha256(json.dumps(table, sort_keys=True).encode()).hexdigest()[:10]


def to_dict(config: Any) -> dict[str, Any]:
    """The config as tables, lists and plain values, as JSON would give it back."""
    return json.loads(json.dumps(asdict(config)))


def from_dict(table: dict[str, Any], cls: Any = Config) -> Any:
    """The config of nested tables; keys that are left out keep their defaults.

    Raises:
        ConfigError: see `load`.
    """
    _refuse_unknown_keys(cls, table, cls)
    return _parse(cls, table, "")


def _parse(hint: Any, value: Any, path: str) -> Any:
    """The value as the type `hint` wants it, or an error that names its path."""
    where = f"{path} = {value!r}"
    if is_dataclass(hint):
        return _parse_table(hint, value, path)
    if get_origin(hint) is Annotated:
        base, *rules = get_args(hint)
        value = _parse(base, value, path)
        for rule in rules:
            if not rule.holds(value):
                raise ConfigError(f"{where} {rule.text}")
        return value
    if get_origin(hint) is tuple:
        if not isinstance(value, list) or not value:
            raise ConfigError(f"{where} must be a list of at least one value")
        item = get_args(hint)[0]
        return tuple(_parse(item, v, f"{path}[{i}]") for i, v in enumerate(value))
    if get_origin(hint) is Literal:
        if value not in (choices := get_args(hint)):
            near = get_close_matches(str(value), choices, 1)
            nearest = f"; did you mean {near[0]!r}?" if near else ""
            listed = ", ".join(map(repr, choices))
            raise ConfigError(f"{where} must be one of {listed}{nearest}")
        return value
    if hint is float and type(value) is int:
        value = float(value)
    if type(value) is not hint:  # isinstance would take a bool for an int
        raise ConfigError(f"{where} must be {TYPES[hint]}")
    if hint is float and not math.isfinite(value):
        raise ConfigError(f"{where} must be finite")
    return value


def _parse_table(cls: Any, table: Any, path: str) -> Any:
    if not isinstance(table, dict):
        raise ConfigError(f"{path} = {table!r} must be a table")
    prefix = f"{path}." if path else ""
    hints = get_type_hints(cls, include_extras=True)
    return cls(**{k: _parse(hints[k], v, prefix + k) for k, v in table.items()})


def _refuse_unknown_keys(cls: Any, table: Any, root: Any, prefix: str = "") -> None:
    """Raise if a table, or one inside it, has a key that `cls` has no field for."""
    hints = get_type_hints(cls)
    for key, value in table.items() if isinstance(table, dict) else ():
        if key not in hints:
            raise _unknown_key(prefix + key, root)
        if is_dataclass(hints[key]):
            _refuse_unknown_keys(hints[key], value, root, f"{prefix}{key}.")


def _paths(cls: Any, prefix: str = "") -> Iterator[str]:
    """Dotted paths of all settings."""
    for field in fields(cls):
        if is_dataclass(field.type):
            yield from _paths(field.type, f"{prefix}{field.name}.")
        else:
            yield prefix + field.name


def _unknown_key(path: str, cls: Any) -> ConfigError:
    """Say which key was meant: here, or the same or a similar name elsewhere."""
    *_, key = path.split(".")
    table = path.removesuffix(key)
    known = list(_paths(cls))
    below = [p.removeprefix(table) for p in known if p.startswith(table)]
    here = list(dict.fromkeys(p.split(".")[0] for p in below))
    elsewhere = {p.split(".")[-1]: p for p in reversed(known)}
    if key in elsewhere:
        hint = f"'{key}' belongs at '{elsewhere[key]}'"
    elif near := get_close_matches(key, here, 1):
        hint = f"did you mean '{table}{near[0]}'?"
    elif near := get_close_matches(key, elsewhere, 1):
        hint = f"did you mean '{elsewhere[near[0]]}'?"
    elif here:
        hint = f"the keys here are {', '.join(here)}"
    else:
        hint = f"there is no table '{table[:-1]}'"
    return ConfigError(f"unknown key '{path}'; {hint}")


def _first_paragraph(box: str) -> str:
    """The message inside the frame that tyro draws."""
    lines = (line.strip("│ ") for line in box.splitlines()[1:])
    return " ".join(itertools.takewhile(lambda line: line.strip("─╰╯"), lines))
