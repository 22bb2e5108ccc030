"""The two contracts of jattn: a mask and a score rule.

A `Mask` says which query may look at which key; a `Score` changes the score of a
pair. Both speak of positions, not of array indices, so that a rule means the same in
a tile, on a device, in a cache and in a packed batch: whoever moves the keys moves
their positions with them.

A mask answers for the pairs of a tile (`allowed`) and for the tile as a whole
(`verdict`). Verdicts are Kleene's three-valued logic, with `&` the minimum, `|` the
maximum and `~` the reflection 2 - x, so whatever is composed can be skipped soundly.

Source: Kleene 1952, Introduction to Metamathematics, section 64 (the strong tables).
"""

import dataclasses
import re
from collections.abc import Iterator
from typing import Any, ClassVar, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from jattn.core.letters import Lettered, children

EMPTY, PARTIAL, FULL = 0, 1, 2
"""No pair of the tile is allowed; some may be, or nobody knows; every pair is."""

Array: TypeAlias = jax.Array | np.ndarray


def as_array(value: Any) -> Array:
    """JAX arrays as they are, anything else in numpy, which starts no backend."""
    return value if isinstance(value, jax.Array) else np.asarray(value)


class Range(NamedTuple):
    """The smallest and the largest position in a tile: integers or integer arrays."""

    lo: Any
    hi: Any


class Rule(Lettered):
    """What masks and score rules have in common."""

    positional: ClassVar[bool] = True
    """Whether the rule itself, its parts aside, depends on positions; with it, queries
    and keys of different numbers need positions that are chosen."""

    called: ClassVar[str] = ""
    """The public name of the rule, where it is not that of the class."""

    def bind(self, num_queries: int, num_keys: int, num_heads: int) -> Any:
        """The rule for T, S and N; a rule that needs the sizes gets them here."""
        sizes = num_queries, num_keys, num_heads
        bound = {
            name: jax.tree.map(lambda x: x.bind(*sizes), value, is_leaf=_is_rule)
            for name, value in self._parts()
        }
        return dataclasses.replace(self, **bound) if bound else self

    def walk(self) -> Iterator["Rule"]:
        """This rule and every rule that it is made of."""
        yield self
        for _, value in self._parts():
            for part in jax.tree.leaves(value, is_leaf=_is_rule):
                yield from part.walk()

    def _parts(self) -> Iterator[tuple[str, Any]]:
        for field in dataclasses.fields(self):
            if "children" in field.metadata:
                yield field.name, getattr(self, field.name)

    def __repr__(self) -> str:
        words = re.findall("[A-Z][a-z]*", type(self).__name__)
        name = self.called or "_".join(words).lower()
        given: list[str] = []
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if not field.kw_only and field.default is dataclasses.MISSING:
                given += map(_shown, value if isinstance(value, tuple) else (value,))
            elif not _left_out(value, field.default):
                # A field that would hide a method ends in an underscore.
                given.append(f"{field.name.rstrip('_')}={_shown(value)}")
        return f"{name}({', '.join(given)})"


class Mask(Rule):
    """Which query may look at which key. Compose with `&`, `|` and `~`."""

    def allowed(self, q_pos: Array, k_pos: Array) -> Any:
        """Whether each pair of a tile is allowed.

        Args:
            q_pos: positions of the tile's queries, (T, 1).
            k_pos: positions of its keys, (1, S).

        Returns:
            Boolean, (T, S), each axis full or 1, or a scalar. The arrays of `self` are
            those of the tile.
        """
        raise NotImplementedError

    def verdict(self, q_range: Range, k_range: Range) -> Any:
        """EMPTY, PARTIAL or FULL for the whole tile; PARTIAL is always sound.

        Args:
            q_range: the smallest and the largest position of the tile's queries:
                integers, or arrays of them with one for each tile, possibly traced.
            k_range: the same of its keys.
        """
        return PARTIAL

    def __and__(self, other: "Mask") -> "Mask":
        return _compose(And, "&", self, other)

    def __or__(self, other: "Mask") -> "Mask":
        return _compose(Or, "|", self, other)

    def __invert__(self) -> "Mask":
        return Not(self)

    def __bool__(self) -> bool:
        raise TypeError(
            f"masks: {self} has no truth value. Compose masks with &, | and ~, not "
            "with and, or and not."
        )


class Score(Rule):
    """A change of the scores of a tile."""

    def __call__(self, s: jax.Array, q_pos: Array, k_pos: Array) -> jax.Array:
        """The changed scores.

        Args:
            s: scores, (T, S), float32, or float64 for float64 inputs.
            q_pos: positions of the tile's queries, (T, 1).
            k_pos: positions of its keys, (1, S).

        Returns:
            (T, S) of the dtype of `s`; finite wherever `s` is.
        """
        raise NotImplementedError


def verdict_of(some: Any, every: Any) -> Any:
    """The verdict from "some pair may be allowed" and "every pair is allowed"."""
    xp = _numpy_of(some, every)
    some = xp.where(some, np.int8(PARTIAL), np.int8(EMPTY))
    return xp.where(every, np.int8(FULL), some)


class And(Mask):
    """Allows what both masks allow."""

    positional = False

    left: Mask = children()
    right: Mask = children()

    def allowed(self, q_pos: Array, k_pos: Array) -> Any:
        return self.left.allowed(q_pos, k_pos) & self.right.allowed(q_pos, k_pos)

    def verdict(self, q_range: Range, k_range: Range) -> Any:
        left = self.left.verdict(q_range, k_range)
        right = self.right.verdict(q_range, k_range)
        return _numpy_of(left, right).minimum(left, right)

    def __repr__(self) -> str:
        return f"{_within(self.left, Or)} & {_within(self.right, And | Or)}"


class Or(Mask):
    """Allows what either mask allows."""

    positional = False

    left: Mask = children()
    right: Mask = children()

    def allowed(self, q_pos: Array, k_pos: Array) -> Any:
        return self.left.allowed(q_pos, k_pos) | self.right.allowed(q_pos, k_pos)

    def verdict(self, q_range: Range, k_range: Range) -> Any:
        left = self.left.verdict(q_range, k_range)
        right = self.right.verdict(q_range, k_range)
        return _numpy_of(left, right).maximum(left, right)

    def __repr__(self) -> str:
        return f"{self.left} | {_within(self.right, Or)}"


class Not(Mask):
    """Allows what the mask forbids."""

    positional = False

    inner: Mask = children()

    def allowed(self, q_pos: Array, k_pos: Array) -> Any:
        return jnp.logical_not(self.inner.allowed(q_pos, k_pos))

    def verdict(self, q_range: Range, k_range: Range) -> Any:
        return 2 - self.inner.verdict(q_range, k_range)

    def __repr__(self) -> str:
        return f"~{_within(self.inner, And | Or)}"


def _compose(kind: Any, sign: str, left: Mask, right: Any) -> Mask:
    if not isinstance(right, Mask):
        raise TypeError(
            f"masks: {sign} must stand between two masks, but got {left} {sign} "
            f"{type(right).__name__}. An array becomes one by jattn.masks.dense(array)."
        )
    return kind(left, right)


def _is_rule(value: Any) -> bool:
    return isinstance(value, Rule)


def _within(mask: Mask, looser: Any) -> str:
    """A part of an expression, in parentheses if it is of a kind that binds less."""
    return f"({mask})" if isinstance(mask, looser) else str(mask)


def _left_out(value: Any, default: Any) -> bool:
    """Whether an argument is its default, or letters of arrays that name no axis."""
    if isinstance(value, tuple):
        return all(isinstance(x, str) and not x for x in value)
    return not hasattr(value, "dtype") and value == default


def _shown(value: Any) -> str:
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"{value.dtype}[{','.join(map(str, value.shape))}]"
    return getattr(value, "__name__", None) or repr(value)


def _numpy_of(*values: Any) -> Any:
    """Numpy, unless a value is traced or on a device: plans made of ints stay ints."""
    return jnp if any(isinstance(value, jax.Array) for value in values) else np
