"""Gradient health of attention, row by row.

Norms of whole gradients hide what saturation does: a few near-tied rows carry them
while the typical row is dead. So everything here is measured per row, a row being the
logits S of one query over the keys it may see, and the norms of the gradients of W_Q
and W_K stand beside it for comparison. Rows that see one key only are left out: their
weights are 1 whatever the logits are.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import jattn
from experiments.config import Probe
from experiments.step import next_byte_loss

CAUSAL = jattn.masks.causal()


def probe(
    graph: Any, params: Any, *, scale: jax.Array, tokens: np.ndarray, settings: Probe
) -> dict[str, Any]:
    """The measures of every head on a fixed batch.

    Args:
        graph: the structure of the model.
        params: its parameters.
        scale: the factor of the dot products.
        tokens: (B, T + 1); the last is only predicted.
        settings: which rows count as dead or saturated.

    Returns:
        "heads": for each layer, for each head, a dict of floats:
            row_norm_median, row_norm_rms: of |dL/dS| of a row, times B T, so that it
                is per predicted byte; dead_share: of rows where it is below
                `settings.dead_below`;
            entropy: mean entropy of the weights over its largest value, ln n;
            max_probability: mean largest weight; saturated_share: of rows where it is
                above `settings.saturated_above`;
            softmax_derivative: mean of 1 - sum p^2, the trace of the Jacobian dp/dS;
            logit_std: mean over rows of the logits' standard deviation;
            logit_max: the largest absolute logit;
            wq_gradient_norm, wk_gradient_norm: Frobenius norms of the head's part.
        "mean": their means over layers and heads.
    """
    measured = jax.device_get(_measure(graph, params, scale, tokens, settings))
    heads = [
        [{name: float(x[n]) for name, x in layer.items()} for n in range(num_heads)]
        for layer in measured
        for num_heads in [len(layer["entropy"])]
    ]
    every = [head for layer in heads for head in layer]
    mean = {name: float(np.mean([head[name] for head in every])) for name in every[0]}
    return {"heads": heads, "mean": mean}


@functools.partial(jax.jit, static_argnames=("graph", "settings"))
def _measure(
    graph: Any, params: Any, scale: jax.Array, tokens: jax.Array, settings: Probe
) -> list[dict[str, jax.Array]]:
    """For each layer, the measures of its heads, each (N,)."""
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    model = nnx.merge(graph, params)
    scored = model.queries_and_keys(inputs, scale=scale)

    def loss(params: Any, biases: list[jax.Array]) -> jax.Array:
        logits = nnx.merge(graph, params)(inputs, scale=scale, biases=biases)
        return next_byte_loss(logits, targets)

    # The gradient of a bias of zero is the gradient of the logits.
    zeros = [jnp.zeros(_logits(q, k, scale).shape, q.dtype) for q, k in scored]
    gradient, dlogits = jax.grad(loss, argnums=(0, 1))(params, zeros)
    layers = []
    for layer, (query, key) in enumerate(scored):
        attention = gradient["blocks"][layer]["attention"]
        rows = _row_measures(query, key, scale, dlogits[layer], settings)
        for name, projection in (("wq", "query"), ("wk", "key")):
            kernel = attention[projection]["kernel"][...]  # (D, N, d_k)
            norm = jnp.sqrt(jnp.sum(kernel**2, axis=(0, 2)))
            rows[f"{name}_gradient_norm"] = norm
        layers.append(rows)
    return layers


def _row_measures(
    query: jax.Array,
    key: jax.Array,
    scale: jax.Array,
    dlogits: jax.Array,
    settings: Probe,
) -> dict[str, jax.Array]:
    """The measures of the rows that see two keys or more, for each head."""
    num_queries = query.shape[1]
    weights = jattn.attention_weights(query, key, mask=CAUSAL, scale=scale)[:, :, 1:]
    logits = _logits(query, key, scale)[:, :, 1:]  # (B, N, T - 1, T)
    seen = jnp.isfinite(logits)
    keys = jnp.arange(2, num_queries + 1).reshape(1, 1, -1)

    norm = jnp.sqrt(jnp.sum(dlogits[:, :, 1:] ** 2, axis=-1))
    norm = norm * query.shape[0] * num_queries
    some = jnp.where(weights > 0, weights, 1)
    entropy = -jnp.sum(weights * jnp.log(some), axis=-1)
    largest = jnp.max(weights, axis=-1)
    mean = functools.partial(jnp.mean, axis=(0, 2), dtype=norm.dtype)
    return {
        "row_norm_median": jnp.median(
            jnp.moveaxis(norm, 1, 0).reshape(norm.shape[1], -1), axis=-1
        ),
        "row_norm_rms": jnp.sqrt(mean(norm**2)),
        "dead_share": mean(norm < settings.dead_below),
        "entropy": mean(entropy / jnp.log(keys)),
        "max_probability": mean(largest),
        "saturated_share": mean(largest > settings.saturated_above),
        "softmax_derivative": mean(1 - jnp.sum(weights**2, axis=-1)),
        "logit_std": mean(jnp.std(logits, axis=-1, where=seen)),
        "logit_max": jnp.max(jnp.abs(jnp.where(seen, logits, 0)), axis=(0, 2, 3)),
    }


def _logits(query: jax.Array, key: jax.Array, scale: jax.Array) -> jax.Array:
    """The logits of the pairs that are allowed, -inf elsewhere: (B, N, T, T)."""
    position = jnp.arange(query.shape[1])
    allowed = CAUSAL.allowed(position[:, None], position[None, :])
    return jattn.mask_scores(
        jattn.scaled_scores(query, key, scale), allowed[None, None]
    )
