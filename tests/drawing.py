"""Random calls of attention, and what each means in numpy.

What is static about a call is a `Frame`, out of few, so that few programs are compiled;
all else is data, drawn from a seed: vectors, positions, what the masks and the score
rules hold, and in the tree "any" even how the masks are composed.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from frames import Frame
from numpy.random import Generator

from jattn import masks, scores


def any_tree(a, b, c, *on):
    """An expression of a, b and c that depends on masks of one Boolean, `on`.

    Each of the three, and the whole, stands as it is or negated; the signs between are
    & or |. With every switch negated it means the same, by De Morgan's laws and as ~~x
    is x; in the logic of verdicts too, so the same tiles are visited.
    """

    def turned(x, negated):
        return (x & ~negated) | (~x & negated)

    def joined(x, y, is_or):
        return (x & y) | (is_or & (x | y))

    a, b, c = (turned(*pair) for pair in zip((a, b, c), on[:3], strict=True))
    return turned(joined(joined(a, b, on[3]), c, on[4]), on[5])


SWITCHES = 6
TREES: dict[str, Callable[..., Any]] = {
    "any": any_tree,
    "and": lambda a, b, c: a & b & c,
    "or": lambda a, b, c: (a & b) | c,
    "nor": lambda a, b, c: ~(a | ~b) & c,
    "not": lambda a, b, c: a & ~(b & c),
    "xor": lambda a, b, c: (a & ~b) | (~a & (b | c)),
}
"""How three masks are composed; of Boolean arrays they make what the mask means."""


class At(NamedTuple):
    """Positions of the queries, (*B, 1, T, 1), and of the keys, (*B, 1, 1, S)."""

    q: np.ndarray
    k: np.ndarray


def _flags(rng: Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Booleans in runs; at times all or none is true."""
    flags = rng.random(shape) < rng.choice([0.0, 0.2, 0.6, 0.9, 1.0])
    for axis in range(-min(2, len(shape)), 0):
        flags = np.repeat(flags, rng.choice([1, 1, 4]), axis)
        flags = flags.take(np.arange(shape[axis]), axis)
    return flags


def _ints(rng: Generator, low: int, high: int, shape: tuple[int, ...]) -> np.ndarray:
    return np.asarray(rng.integers(low, high, shape), np.int32)


def _numbers(rng: Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Normal numbers that every floating dtype holds without rounding."""
    return np.asarray(rng.standard_normal(shape), jnp.bfloat16).astype(np.float32)


def _per_row(x: Any) -> Any:
    return x[..., None, None, None]


def _per_head(x: Any) -> Any:
    return x[..., None, None]


def _near(q_pos, k_pos, reach, seen):
    return (abs(q_pos - k_pos) <= reach) & seen


def _wanted(q_pos, k_pos, wanted):
    return wanted


def _all_or_none(q_range, k_range, wanted):
    return jnp.where(wanted, masks.FULL, masks.EMPTY)


def mask_by_position(name: str, rng: Generator, f: Frame, at: At) -> tuple[Any, Any]:
    """A mask, and which pairs it allows, broadcast to (*B, N, T, S)."""
    match name:
        case "causal":
            return masks.causal(), at.k <= at.q
        case "window":
            return masks.sliding_window(2, 1), abs(2 * (at.q - at.k) - 1) <= 3
        case "far":
            return masks.sliding_window(None, 3), at.k <= at.q + 3
        case "windows":
            left, right = _ints(rng, 0, 5, (2, f.N))
            first, last = at.q - _per_head(left), at.q + _per_head(right)
            return masks.sliding_window(left, right), (first <= at.k) & (at.k <= last)
        case "chunked":
            return masks.chunked(3), at.q // 3 == at.k // 3
        case "dilated":
            return masks.dilated(2), (at.q - at.k) % 2 == 0
        case "prefix":
            n = _ints(rng, 0, f.S + 2, f.batch)
            return masks.prefix(n), at.k < _per_row(n)
        case "blocks":
            layout = _flags(rng, (f.N, 4, 5))
            row, column = at.q // 2, at.k // 2
            inside = (0 <= row) & (row < 4) & (0 <= column) & (column < 5)
            row, column = np.clip(row, 0, 3), np.clip(column, 0, 4)
            there = layout[_per_head(np.arange(f.N)), row, column]
            return masks.block_sparse(layout, 2), inside & there
        case "rule":
            reach, seen = _ints(rng, 0, 6, (f.N,)), _flags(rng, f.shape("BS"))
            near = abs(at.q - at.k) <= _per_head(reach)
            rule = masks.rule(_near, reach, seen, axes=["N", "BS"])
            return rule, near & seen[..., None, None, :]
    return mask_by_array(name, rng, f)


def mask_by_array(name: str, rng: Generator, f: Frame) -> tuple[Any, Any]:
    """The same for masks that ask for no positions."""
    match name:
        case "all":
            return masks.everything(), np.True_
        case "none":
            return masks.nothing(), np.False_
        case "lengths":
            s, t = _ints(rng, 0, f.S + 2, f.batch), _ints(rng, 0, f.T + 2, f.batch)
            keys, queries = np.arange(f.S), np.arange(f.T)[:, None]
            allowed = (keys < _per_row(s)) & (queries < _per_row(t))
            return masks.lengths(s, t), allowed
        case "padding":
            s, t = _flags(rng, f.shape("BS")), _flags(rng, f.shape("BT"))
            return masks.padding(s, t), s[..., None, None, :] & t[..., None, :, None]
        case "segments" | "packed":
            t, s = (_ints(rng, 0, 4, f.shape("B" + x)) for x in "TS")
            if rng.random() < 0.7:
                t, s = np.sort(t), np.sort(s)
            same = t[..., None, :, None] == s[..., None, None, :]
            if name == "packed":
                return masks.segments(t, s, padding_id=None), same
            return masks.segments(t, s), same & (s[..., None, None, :] != 0)
        case "dense" | "heads":
            array = _flags(rng, f.shape("BNTS", "BNTS" if name == "dense" else "NS"))
            return masks.dense(array), array
        case "rows":
            wanted = _flags(rng, f.batch)
            rule = masks.rule(_wanted, wanted, axes=["B"], verdict=_all_or_none)
            return rule, _per_row(wanted)
    raise KeyError(name)


def _slope(s, q_pos, k_pos, slope, table):
    slope, table = slope.astype(s.dtype), table.astype(s.dtype)
    return s - slope * jnp.abs(q_pos - k_pos) + table[(q_pos - k_pos) % 3]


def score_rule(name: str, rng: Generator, f: Frame) -> Any:
    """A score rule."""
    match name:
        case "cap":
            return scores.soft_cap(2.0)
        case "caps":
            return scores.soft_cap(np.abs(_numbers(rng, (f.N,))) + 0.5)
        case "additive":
            return scores.additive(_numbers(rng, f.shape("BNTS", "NT")))
        case "alibi":
            return scores.alibi()
        case "alibis":
            return scores.alibi(_numbers(rng, (f.N,)) / 8)
        case "t5":
            table = _numbers(rng, (8, f.N))
            return scores.relative_bias(table, bidirectional=True, max_distance=8)
        case "log_n":
            return scores.log_n_scale(4)
        case "slope":
            slope, table = _numbers(rng, (f.N,)) / 8, _numbers(rng, (3,))
            return scores.rule(_slope, slope, table, axes=["N", ""])
    raise KeyError(name)


def scored(name: str, rule: Any, s: Any, at: At) -> Any:
    """All scores, (*B, N, T, S), after a rule."""
    far = at.q - at.k
    match name:
        case "cap":
            return 2 * jnp.tanh(s / 2)
        case "caps":
            return _per_head(rule.cap) * jnp.tanh(s / _per_head(rule.cap))
        case "additive":
            return s + rule.bias
        case "alibi":
            n = s.shape[-3]  # a power of two
            return s - _per_head(2.0 ** (-8 * np.arange(1, n + 1) / n)) * abs(far)
        case "alibis":
            return s - _per_head(rule.slopes) * abs(far)
        case "t5":
            away = abs(far)[..., 0, :, :]
            bucket = sum((away >= n).astype(int) for n in (1, 2, 4))
            bucket += 4 * (far[..., 0, :, :] < 0)
            return s + jnp.moveaxis(rule.table[bucket], -1, -3)
        case "log_n":
            n = jnp.maximum(at.q + 1, 4)
            return s * jnp.log(n.astype(s.dtype)) / np.log(4)
        case "slope":
            slope, table = rule.arrays
            return s - _per_head(slope) * abs(far) + table[far % 3]
    raise KeyError(name)


class Drawn(NamedTuple):
    """The data of a call, and what they mean.

    Attributes:
        floats: the keywords of attention that have gradients.
        others: its mask and positions.
        allowed: the pairs that the mask allows, (*B, N, T, S).
        at: where they stand.
        parts: the masks that the mask is made of, and what each allows.
    """

    floats: dict[str, Any]
    others: dict[str, Any]
    allowed: np.ndarray
    at: At
    parts: list[tuple[Any, Any]]


def draw(f: Frame, seed: int, special: float = 1.0, negated: bool = False) -> Drawn:
    """The data of a call; `special` stands in a tenth of the entries of vectors.

    With `negated` every switch of `any_tree` is. Logits stay moderate: float32 holds
    one of 50 to 4e-6, which is more than the tolerance of a weight.
    """
    rng = np.random.default_rng(seed)
    others, at = _positions(f, rng)
    pairs = [mask_by_position(name, rng, f, at) for name in f.masks]
    if f.tree == "any":
        on = (rng.random(SWITCHES) < 0.5) ^ negated
        pairs += [(masks.dense(x.reshape(f.shape("BNTS", ""))), x) for x in on]
    rules, meanings = zip(*pairs, strict=True)
    others["mask"] = TREES[f.tree](*rules)
    allowed = np.broadcast_to(TREES[f.tree](*meanings), f.shape("BNTS"))

    floats: dict[str, Any] = {
        "query": _numbers(rng, (*f.batch, f.T, f.N, f.H)),
        "key": _numbers(rng, (*f.batch, f.S, f.K, f.H)),
        "value": _numbers(rng, (*f.batch, f.S, f.K, f.D)),
    }
    for x in floats.values():
        x[rng.random(x.shape) < 0.1] = special
    floats = {name: x.astype(f.dtype) for name, x in floats.items()}
    floats["score"] = tuple(score_rule(name, rng, f) for name in f.scores)
    if f.bias is not None:
        bias = _numbers(rng, f.shape("BNTS", f.bias))
        floats["bias"] = np.where(rng.random(bias.shape) < 0.1, -np.inf, bias)
    if f.scale is not None:
        floats["scale"] = _numbers(rng, f.shape(f.scale)) / 2
    if f.sinks is not None:
        floats["sinks"] = _numbers(rng, f.shape(f.sinks))
    if f.dtype == "float64":
        floats = jax.tree.map(np.float64, floats)
    return Drawn(floats, others, allowed, at, pairs[:3])


def _positions(f: Frame, rng: Generator) -> tuple[dict[str, Any], At]:
    """Positions as keywords of attention, and as they are."""
    q, k = np.arange(f.T), np.arange(f.S)
    given: dict[str, Any] = {}
    if f.positions in ("keys", "both"):
        k = given["key_positions"] = _ints(rng, -4, 12, f.shape("BS"))
    if f.positions in ("queries", "both"):
        q = given["query_positions"] = _ints(rng, -4, 12, (f.T,))
    elif f.positions == "keys":
        q = k[..., : f.T]
    elif f.positions == "end":
        q = q + f.S - f.T
    q, k = (np.broadcast_to(x, (*f.batch, x.shape[-1])) for x in (q, k))
    return given, At(q[..., None, :, None], k[..., None, None, :])
