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
from experiments.model import CAUSAL
from experiments.step import next_byte_loss


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
    vectors = nnx.merge(graph, params).projections(inputs, scale=scale)

    def loss(params: Any, shifts: list[jax.Array]) -> jax.Array:
        logits = nnx.merge(graph, params)(inputs, scale=scale, shifts=shifts)
        return next_byte_loss(logits, targets)

    # The gradient of zeros that are added to the heads' outputs is that of the outputs.
    zeros = [jnp.zeros_like(value) for _, _, value in vectors]
    gradient, dheads = jax.grad(loss, argnums=(0, 1))(params, zeros)
    layers = []
    for layer, (query, key, value) in enumerate(vectors):
        attention = gradient["blocks"][layer]["attention"]
        rows = _row_measures(query, key, value, scale, dheads[layer], settings)
        for name, projection in (("wq", "query"), ("wk", "key")):
            kernel = attention[projection]["kernel"][...]  # (D, N, d_k)
            norm = jnp.sqrt(jnp.sum(kernel**2, axis=(0, 2)))
            rows[f"{name}_gradient_norm"] = norm
        layers.append(rows)
    return layers


def _row_measures(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    scale: jax.Array,
    dheads: jax.Array,
    settings: Probe,
) -> dict[str, jax.Array]:
    """The measures of the rows that see two keys or more, for each head."""
    options: dict[str, Any] = dict(mask=CAUSAL, scale=scale)
    stats = jattn.attention(query, key, value, stats=True, **options)[1]
    norm = jattn.diagnostics.score_gradient_rows(query, key, value, dheads, **options)
    stats = jax.tree.map(lambda x: x[:, 1:], stats)  # (B, T - 1, N)
    norm = norm[:, 1:] * query.shape[0] * query.shape[1]
    keys = jnp.arange(2, query.shape[1] + 1).reshape(1, -1, 1)
    std, largest = _logit_measures(query, key, scale)
    mean = functools.partial(jnp.mean, axis=(0, 1), dtype=norm.dtype)
    return {
        "row_norm_median": jnp.median(norm.reshape(-1, norm.shape[-1]), axis=0),
        "row_norm_rms": jnp.sqrt(mean(norm**2)),
        "dead_share": mean(norm < settings.dead_below),
        "entropy": mean(stats.entropy / jnp.log(keys)),
        "max_probability": mean(stats.max_prob),
        "saturated_share": mean(stats.max_prob > settings.saturated_above),
        "softmax_derivative": mean(1 - stats.sum_p2),
        "logit_std": mean(std[:, 1:]),
        "logit_max": jnp.max(largest[:, 1:], axis=(0, 1)),
    }


def _logit_measures(
    query: jax.Array, key: jax.Array, scale: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The standard deviation and the largest absolute logit of rows, (B, T, N).

    Some rows at a time: memory does not grow with the square of the length.
    """
    position = jnp.arange(query.shape[1])

    def of_row(row: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        query, at = row
        logits = jattn.scaled_scores(query[:, None], key, scale)[:, :, 0]  # (B, N, T)
        seen = CAUSAL.allowed(at, position)[None, None]
        largest = jnp.max(jnp.abs(logits), axis=-1, where=seen, initial=0)
        return jnp.std(logits, axis=-1, where=seen), largest

    rows = jax.lax.map(of_row, (jnp.moveaxis(query, 1, 0), position), batch_size=64)
    return jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1), rows)
