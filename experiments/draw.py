"""Which token comes next: a draw from logits, some of them left out.

Pure functions of one row; `jax.vmap` lifts them to a batch.
"""

import zlib
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from experiments.config import ConfigError


class Drawing(NamedTuple):
    """How tokens are drawn. All of it is data: no value of it compiles anything.

    Attributes:
        temperature: divides the logits; 0 takes the largest, of equal ones the first.
        top_k: how many of the largest are kept.
        top_p: of these, the fewest that have this share of their probability.
    """

    temperature: float
    top_k: int
    top_p: float


def draw(rng: jax.Array, logits: jax.Array, drawing: Drawing) -> jax.Array:
    """A token from the softmax of what is kept of the logits, (V,)."""
    tokens, kept = ranked(logits, drawing)
    return tokens[jax.random.categorical(rng, kept)]


def ranked(logits: jax.Array, drawing: Drawing) -> tuple[jax.Array, jax.Array]:
    """The tokens from the most probable on, and what they are drawn by.

    Of equal logits that of the smaller token comes first, so that exactly k are kept.

    Args:
        logits: (V,).
        drawing: what is kept of them.

    Returns:
        tokens: (V,).
        logits: theirs, (V,), over the temperature and up to a constant; -inf: left out.

    Source: Fan et al. 2018, arXiv:1805.04833 (top-k); Holtzman et al. 2020,
        arXiv:1904.09751 (top-p).
    """
    greedy = drawing.temperature == 0
    logits, tokens = jax.lax.top_k(logits, len(logits))
    # From the largest, so that no temperature makes two of them infinite.
    logits = (logits - logits[0]) / jnp.where(greedy, 1, drawing.temperature)
    rank = jnp.arange(len(logits))
    kept = rank < jnp.where(greedy, 1, drawing.top_k)
    p = jax.nn.softmax(logits, where=kept)
    # A sum may reach 1 by rounding before all have been added.
    kept &= (jnp.cumsum(p) - p < drawing.top_p) | (drawing.top_p == 1)
    return tokens, jnp.where(kept, logits, -jnp.inf)


def keys_of(prompts: Sequence[Sequence[int]], seed: int) -> jax.Array:
    """A key for each prompt, another each time that the same prompt occurs again.

    So what is drawn for a prompt does not depend on the others, and those who ask for
    the same text again get another one.
    """
    before: Counter[bytes] = Counter()
    keys = []
    for prompt in prompts:
        text = np.asarray(list(prompt), np.int32).tobytes()
        rng = jax.random.fold_in(jax.random.key(seed), zlib.crc32(text))
        keys.append(jax.random.fold_in(rng, before[text]))
        before[text] += 1
    return jnp.stack(keys)


def check(drawing: Drawing, seed: int) -> None:
    """Raises ConfigError if nothing can be drawn like this."""
    temperature, top_k, top_p = drawing
    if not 0 <= temperature < float("inf"):
        raise ConfigError(f"temperature must be 0 or more, but got {temperature}")
    if top_k < 1:
        raise ConfigError(f"top_k must be at least 1, but got {top_k}")
    if top_k >= 2**31:
        raise ConfigError(
            f"top_k must be below 2**31, but got {top_k}; leave it out to keep all"
        )
    if not 0 < top_p <= 1:
        raise ConfigError(f"top_p must be above 0 and at most 1, but got {top_p}")
    if not 0 <= seed < 2**31:
        raise ConfigError(f"seed must be from 0 to 2**31 - 1, but got {seed}")
