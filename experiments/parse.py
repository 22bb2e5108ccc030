"""Tables of plain values as dataclasses, by the types of their fields."""

import math
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from difflib import get_close_matches
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

TYPES = {int: "a whole number", float: "a number", str: "a text", bool: "true or false"}


class ConfigError(ValueError):
    """What the user asked for cannot be done; the message is one sentence."""


def parse(hint: Any, value: Any, path: str) -> Any:
    """The value as the type `hint` wants it, or an error that names its path."""
    where = f"{path} = {value!r}"
    if is_dataclass(hint):
        return _parse_table(hint, value, path)
    if get_origin(hint) is Annotated:
        base, *rules = get_args(hint)
        value = parse(base, value, path)
        for rule in rules:
            if not rule.holds(value):
                raise ConfigError(f"{where} {rule.text}")
        return value
    if get_origin(hint) is tuple:
        if not isinstance(value, list) or not value:
            raise ConfigError(f"{where} must be a list of at least one value")
        item = get_args(hint)[0]
        return tuple(parse(item, v, f"{path}[{i}]") for i, v in enumerate(value))
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
    return cls(**{k: parse(hints[k], v, prefix + k) for k, v in table.items()})


def refuse_unknown_keys(cls: Any, table: Any, root: Any, prefix: str = "") -> None:
    """Raise if a table, or one inside it, has a key that `cls` has no field for."""
    hints = get_type_hints(cls)
    for key, value in table.items() if isinstance(table, dict) else ():
        if key not in hints:
            raise unknown_key(prefix + key, root)
        if is_dataclass(hints[key]):
            refuse_unknown_keys(hints[key], value, root, f"{prefix}{key}.")


def paths(cls: Any, prefix: str = "") -> Iterator[str]:
    """Dotted paths of all settings."""
    for field in fields(cls):
        if is_dataclass(field.type):
            yield from paths(field.type, f"{prefix}{field.name}.")
        else:
            yield prefix + field.name


def unknown_key(path: str, cls: Any) -> ConfigError:
    """Say which key was meant: here, or the same or a similar name elsewhere."""
    *_, key = path.split(".")
    table = path.removesuffix(key)
    known = list(paths(cls))
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
