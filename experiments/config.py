"""Read, override and multiply the settings of an experiment.

Nothing is ignored silently: an unknown key, a wrong type or an impossible value is a
`ConfigError` of one sentence.
"""

import contextlib
import hashlib
import io
import itertools
import json
import tomllib
from collections.abc import Sequence
from dataclasses import asdict
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any, Literal, TypeVar

from experiments.parse import ConfigError as ConfigError
from experiments.parse import parse, paths, refuse_unknown_keys, unknown_key
from experiments.settings import Config as Config
from experiments.settings import Coord as Coord
from experiments.settings import Cost as Cost
from experiments.settings import Data as Data
from experiments.settings import Decode as Decode
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
KINDS: dict[str, type[Any]] = {"training": Config, "cost": Cost, "decode": Decode}
# Settings that do not change what a training run computes.
NOT_PART_OF_A_RUN = (
    *("name", "out", "theory", "coord"),
    *("logging.watch", "logging.alarm_entropy", "logging.alarm_logit"),
    *("logging.tracker", "logging.profile"),
)


def settings_of(kind: str) -> type[Any]:
    """The dataclass that a config of a kind is read into."""
    from experiments.claims import NAMES

    parse(Literal[(*KINDS, "all", *NAMES)], kind, "kind")
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
        raise unknown_key(unknown[0][2:].split("=")[0].replace("-", "_"), cls)
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
        if path not in paths(Config):
            raise ConfigError(f"sweep: {unknown_key(path, Config)}")
        if {path, path.split(".")[0]} & set(NOT_PART_OF_A_RUN):
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
    for path in NOT_PART_OF_A_RUN:
        *tables, leaf = path.split(".")
        del reduce(getitem, tables, table)[leaf]
    return hashlib.sha256(json.dumps(table, sort_keys=True).encode()).hexdigest()[:10]


def to_dict(config: Any) -> dict[str, Any]:
    """The config as tables, lists and plain values, as JSON would give it back."""
    return json.loads(json.dumps(asdict(config)))


def from_dict(table: dict[str, Any], cls: Any = Config) -> Any:
    """The config of nested tables; keys that are left out keep their defaults.

    Raises:
        ConfigError: see `load`.
    """
    refuse_unknown_keys(cls, table, cls)
    config = parse(cls, table, "")
    if cls is Config:
        check_together(config)
    return config


def check_together(config: Config) -> None:
    """Refuse settings that are possible, but not beside each other.

    Raises:
        ConfigError: they are not.
    """
    batch, parts = config.data.batch, config.optim.accumulate
    if batch % parts:
        raise ConfigError(
            f"optim.accumulate = {parts} must divide data.batch = {batch}, the windows "
            "of an update"
        )
    if config.model.positions == "sinusoidal" and config.model.d_model % 2:
        raise ConfigError(
            f"model.d_model = {config.model.d_model} must be even: sinusoidal "
            "positions are pairs of a sine and a cosine"
        )
    if config.data.context < 2:
        raise ConfigError(
            "data.context = 1 must be at least 2: one token has nothing to attend to"
        )
    if config.logging.profile and config.optim.steps < 2:
        raise ConfigError(
            f"logging.profile = {config.logging.profile} traces the steps after the "
            "first, which compiles, but optim.steps = 1; set it to 2 or more"
        )


def _first_paragraph(box: str) -> str:
    """The message inside the frame that tyro draws."""
    lines = (line.strip("│ ") for line in box.splitlines()[1:])
    return " ".join(itertools.takewhile(lambda line: line.strip("─╰╯"), lines))
