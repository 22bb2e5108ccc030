"""A language model whose future is hidden in the right way, or in a wrong one."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jattn
from experiments.model import CausalLM, logits_with
from jattn.diagnostics import leaks

MEANS = ("perturbation", "gradient", "prefix")
Weigh = Callable[[jax.Array], jax.Array]
"""From scores (..., T, T) to weights."""


def seen(keys: int, beyond: int = 0) -> np.ndarray:
    """Which of so many keys each query may look at, (T, T), and `beyond` more."""
    return np.tri(keys, k=beyond, dtype=bool)


def masked(scores: jax.Array, allowed: Any, sentinel: float = -np.inf) -> jax.Array:
    """A softmax over keys, after a sentinel has taken the place of forbidden scores."""
    return jax.nn.softmax(jnp.where(allowed, scores, sentinel))


def after(scores: jax.Array) -> jax.Array:
    """A softmax over all keys, whose forbidden weights are then set to 0."""
    return jnp.where(seen(scores.shape[-1]), jax.nn.softmax(scores), 0)


def normalised(weights: jax.Array) -> jax.Array:
    """Weights of which each row sums to one."""
    return weights / weights.sum(axis=-1, keepdims=True)


def over_queries(scores: jax.Array) -> jax.Array:
    """A softmax along the wrong axis of masked scores."""
    allowed = seen(scores.shape[-1])
    return jax.nn.softmax(jnp.where(allowed, scores, -jnp.inf), axis=-2)


MASKING: dict[str, Weigh] = {
    "before the softmax": lambda s: masked(s, seen(s.shape[-1])),
    "after it": after,
    "after it, normalised": lambda s: normalised(after(s)),
    "one key too many": lambda s: masked(s, seen(s.shape[-1], beyond=1)),
    "transposed": lambda s: masked(s, seen(s.shape[-1]).T),
    "softmax over queries": over_queries,
    "sentinel -3": lambda s: masked(s, seen(s.shape[-1]), -3.0),
    "sentinel -50": lambda s: masked(s, seen(s.shape[-1]), -50.0),
}
"""Ways to hide the future. The first is right; the third is, but for rounding."""


def way_of(arm: jax.Array) -> Weigh:
    """A way of `MASKING` by its number: as that is data, all are one program."""
    return partial(jax.lax.switch, arm, list(MASKING.values()))


def attend(
    query: jax.Array, key: jax.Array, value: jax.Array, weigh: Weigh
) -> jax.Array:
    """Attention, (B, T, N, D), whose weights are `weigh(scores)`."""
    weights = weigh(jattn.scaled_scores(query, key))
    return jnp.einsum("bnts,bsnd->btnd", weights, value)


def losses(model: CausalLM, batch: dict[str, Any]) -> jax.Array:
    """The cross-entropy of every token but the first of each row, in nats.

    Args:
        model: whose attention is replaced.
        batch: "tokens", (B, T + 1), and "arm", which of `MASKING` replaces it, ().

    Returns:
        (B, T).
    """
    tokens = batch["tokens"]
    own = partial(attend, weigh=way_of(batch["arm"]))
    logits = logits_with(model, model.embed(tokens[:, :-1]), own)
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])


def loss(model: CausalLM, batch: dict[str, Any]) -> jax.Array:
    """Their mean."""
    return jnp.mean(losses(model, batch))


losses_of = nnx.jit(losses)


def tested(
    model: CausalLM, windows: np.ndarray, prefixes: Sequence[int], arm: Any
) -> dict[str, Any]:
    """The loss on whole windows, and of the tokens after prefixes alone.

    Args:
        model: whose attention is replaced.
        windows: tokens, (B, T + 1).
        prefixes: how many tokens come first.
        arm: which of `MASKING` replaces it.

    Returns:
        "validation": the mean loss on whole windows.
        "within": for each prefix, the mean loss of the token after it in these windows.
        "alone": the same if nothing but the prefix is given.
    """
    whole = np.asarray(losses_of(model, {"tokens": windows, "arm": arm}))
    alone = [
        losses_of(model, {"tokens": windows[:, : n + 1], "arm": arm})[:, -1]
        for n in prefixes
    ]
    return {
        "validation": float(whole.mean()),
        "within": [float(whole[:, n - 1].mean()) for n in prefixes],
        "alone": [float(x.mean()) for x in alone],
    }


def audit(model: CausalLM, tokens: np.ndarray) -> dict[str, dict[str, list[Any]]]:
    """For each way to mask, the verdict of each means, and the size of the first leak.

    Args:
        model: whose first layer of attention is audited, as that compiles faster than
            all of it.
        tokens: (B, T). Their vectors are changed, as tokens have no gradient.
    """
    attention, x = model.blocks[0].attention, model.embed(tokens)

    @jax.jit
    def layer(x: jax.Array, arm: jax.Array) -> jax.Array:
        query, key, value = attention.project(x)
        return attention.out(attend(query, key, value, way_of(arm)))

    found = {}
    for arm, name in enumerate(MASKING):
        report = leaks(partial(layer, arm=np.int32(arm)), x, means=MEANS)
        found[name] = {x: [report[x].verdict, report[x].size] for x in MEANS}
    return found
