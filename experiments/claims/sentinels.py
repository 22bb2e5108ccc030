"""A mask as a large negative number that is added to scores, dtype by dtype."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jattn
from experiments.claims.claim import Answer
from experiments.evidence import PART, decide
from experiments.page import Table

DTYPES = ("float16", "bfloat16", "float32")
SENTINELS = ("-1e9", "finfo.min", "-inf")
RULE = "a rule"
NAMES = ("one key", "one key of low score", "no key", "no key, two masks")
LOW = -3e9
"""A score below -1e9, or in a smaller dtype the lowest there is."""


class Rows(NamedTuple):
    """Queries and their keys.

    Attributes:
        scores: (R, S).
        allowed: which of its keys a query may see, (R, S).
        twice: whether two masks hide the others, and not one, (R,).
    """

    scores: jax.Array
    allowed: np.ndarray
    twice: np.ndarray


def rows(dtype: str) -> Rows:
    """The rows of `NAMES`."""
    scores = np.tile([1.0, 2.0, 3.0], (len(NAMES), 1))
    scores[1, 0] = max(LOW, float(jnp.finfo(dtype).min))
    allowed = np.zeros(scores.shape, bool)
    allowed[:2, 0] = True
    return Rows(jnp.asarray(scores, dtype), allowed, np.array([0, 0, 0, 1], bool))


def with_sentinel(rows: Rows, name: str) -> jax.Array:
    """The weights, (R, S), if each mask adds a sentinel to the scores that it hides.

    Step by step, so that nothing is computed in another dtype than that of the scores.
    """
    dtype = rows.scores.dtype
    number = jnp.finfo(dtype).min if name == "finfo.min" else float(name)
    hidden = jnp.where(rows.allowed, 0, jnp.float32(number)).astype(dtype)
    once = rows.scores + hidden
    return jax.nn.softmax(jnp.where(rows.twice[:, None], once + hidden, once))


def with_rule(rows: Rows) -> jax.Array:
    """The weights, (R, S), if the mask is an array of `jattn.attention_weights`."""
    query = jnp.ones((len(rows.scores), 1, 1, 1), rows.scores.dtype)
    key, mask = rows.scores[:, :, None, None], rows.allowed[:, None, None]
    return jattn.attention_weights(query, key, mask=mask, scale=1.0)[:, 0, 0]


def outcomes(rows: Rows, weights: jax.Array) -> list[str]:
    """What became of rows: "right", "NaN", or how much weight hidden keys get."""

    def of_row(weights: np.ndarray, allowed: np.ndarray) -> str:
        if np.isnan(weights).any():
            return "NaN"
        hidden = weights[~allowed].sum()
        return f"{hidden:.2f} hidden" if hidden else "right"

    pairs = zip(np.asarray(weights, np.float64), rows.allowed, strict=True)
    return [of_row(*pair) for pair in pairs]


def found() -> dict[str, dict[str, list[str]]]:
    """For each dtype and way to mask, what becomes of the rows of `NAMES`."""
    ways: dict[str, Callable[[Rows], jax.Array]]
    ways = {name: partial(with_sentinel, name=name) for name in SENTINELS}
    ways[RULE] = with_rule
    return {
        dtype: {
            name: outcomes(rows(dtype), way(rows(dtype))) for name, way in ways.items()
        }
        for dtype in DTYPES
    }


def answer(found: dict[str, dict[str, list[str]]]) -> Answer:
    """Whether -1e9 does what -inf does where that does any good."""
    right = {
        name: [x == "right" for dtype in found.values() for x in dtype[name]]
        for name in (*SENTINELS, RULE)
    }
    pairs = zip(right["-1e9"], right["-inf"], strict=True)
    as_good = [number for number, infinity in pairs if infinity]
    counts = ", ".join(f"{sum(x)} with {name}" for name, x in right.items())
    outcome = decide(as_good)
    return Answer(
        claim="To add -1e9 to hidden scores is as good as to add -inf.",
        source="the custom of `scores += mask * -1e9`",
        number=f"Of {len(as_good)} rows that -inf leaves right, -1e9 leaves "
        f"{sum(as_good)}. Right are, of {len(right[RULE])}: {counts}.",
        rule="with -1e9 every row is right that is with -inf, in every dtype",
        outcome=outcome,
        sentence="It is, unless the score of a key to see is as low. In an empty row "
        "neither is right: -inf is NaN, and so is -1e9 in float16, where it is -inf; "
        "elsewhere -1e9 hands the weight to hidden keys in silence."
        if outcome == PART
        else "Here the two come out as the number says.",
    )


def as_table(found: dict[str, dict[str, list[str]]]) -> Table:
    """The same for a page, a line for each row."""
    return Table(
        "Sentinels",
        ("dtype", "row", *SENTINELS, RULE),
        [
            [dtype, *cells]
            for dtype, ways in found.items()
            for cells in zip(NAMES, *ways.values(), strict=True)
        ],
        "What becomes of a query that may see one key of three, or none. Hidden: the "
        f"weight that hidden keys get. A low score: {LOW:g}, or the lowest there is. "
        "Two masks: the sentinel is added twice. A rule: a mask of jattn.attention.",
        2,
    )
