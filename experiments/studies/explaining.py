"""How much each token counts in a prediction, by attention and by experiment.

The prediction is that of the token after a window. It is linked to the tokens before
the last one by attention alone, so these are ranked.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from scipy import stats

import jattn
from experiments.model import CausalLM, logits_with
from jattn.masks import causal

OCCLUSIONS = ("replaced", "removed")
OTHER = "other occlusion"
METHODS = ("attention", "rollout", "gradient x input", OTHER, "nearness", "chance")


@nnx.jit
def importance(
    model: CausalLM, tokens: jax.Array, scale: jax.Array
) -> dict[str, jax.Array]:
    """What attention and a gradient say of each token but the last.

    Args:
        model: of pre-LN blocks.
        tokens: (T,).
        scale: the factor of the dot products.

    Returns:
        Scores, each (T - 1,). "attention": the weight in the last layer, a mean over
        heads; "rollout": as in `rollout`; "gradient x input": the absolute product of
        a token's embedding and the derivative by it of the log-probability of what is
        most probable.
    """

    def best(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        layers = []

        def attend(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
            rules: dict[str, Any] = dict(scale=scale, score=model.score)
            weights = jattn.attention_weights(query, key, mask=causal(), **rules)
            layers.append(weights[0].mean(axis=0))
            return jnp.einsum("bnts,bsnd->btnd", weights, value)

        logits = logits_with(model, x, attend)[0, -1]
        return jax.nn.log_softmax(logits).max(), jnp.stack(layers)

    x = model.embed(tokens[None])
    gradient, layers = jax.grad(best, has_aux=True)(x)
    scores = {
        "attention": layers[-1, -1],
        "rollout": rollout(layers)[-1],
        "gradient x input": jnp.abs(jnp.sum(gradient * x, axis=-1))[0],
    }
    return {name: score[:-1] for name, score in scores.items()}


def rollout(layers: jax.Array) -> jax.Array:
    """The weights of all layers as one, if half of a layer's output is its input.

        A = A_L ... A_1, with A_l = (weights_l + 1) / 2

    Args:
        layers: weights, (L, T, T), those of the first layer first.

    Returns:
        (T, T).

    Source: Abnar & Zuidema 2020, arXiv:2005.00928, section 3.
    """
    identity = jnp.eye(layers.shape[-1])
    found = identity
    for weights in layers:
        found = (weights + identity) / 2 @ found
    return found


@nnx.jit
def occlusion(
    model: CausalLM, tokens: jax.Array, others: jax.Array, scale: jax.Array
) -> dict[str, jax.Array]:
    """How far the prediction moves without each token but the last.

        KL(p || p without the token), in nats

    Args:
        model: a causal language model.
        tokens: (T,).
        others: tokens to replace each of them, one at a time, (R,).
        scale: the factor of the dot products.

    Returns:
        Scores, each (T - 1,). "replaced": a mean over the R tokens in its place;
        "removed": no later token may look at it.
    """
    count = len(tokens) - 1
    place = jnp.eye(count, count + 1, dtype=bool)

    def predicted(tokens: jax.Array, **options: Any) -> jax.Array:
        return jax.nn.log_softmax(model(tokens, scale=scale, **options)[:, -1])

    whole = predicted(tokens[None])
    replaced = jnp.where(place, others[:, None, None], tokens)
    without = {
        "replaced": predicted(replaced.reshape(-1, count + 1)),
        "removed": predicted(
            jnp.broadcast_to(tokens, place.shape), mask=~place[:, None, None]
        ),
    }
    moved = {x: jnp.sum(jnp.exp(whole) * (whole - y), -1) for x, y in without.items()}
    return {name: x.reshape(-1, count).mean(axis=0) for name, x in moved.items()}


def rank_correlation(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Spearman's, along the last axis."""
    a, b = (stats.rankdata(x, axis=-1) - (x.shape[-1] + 1) / 2 for x in (a, b))
    size = np.sqrt(np.sum(a**2, axis=-1) * np.sum(b**2, axis=-1))
    return np.sum(a * b, axis=-1) / size


def same_first(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """1 where the largest along the last axis is at the same place, else 0."""
    return (a.argmax(axis=-1) == b.argmax(axis=-1)).astype(float)


AGREEMENTS = {"rank": rank_correlation, "first": same_first}


def agreement(scores: dict[str, np.ndarray]) -> dict[str, Any]:
    """How well all scores, (W, S), agree with those of occlusion.

    Returns:
        For each of `AGREEMENTS`, for each kind of occlusion, for each name, or `OTHER`
        for the other kind, the values of all windows, W.
    """
    return {
        how: {
            kind: {
                OTHER if name in OCCLUSIONS else name: agree(x, scores[kind]).tolist()
                for name, x in scores.items()
                if name != kind
            }
            for kind in OCCLUSIONS
        }
        for how, agree in AGREEMENTS.items()
    }
