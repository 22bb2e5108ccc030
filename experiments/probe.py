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
from experiments.model import CausalLM, logits_with
from experiments.step import token_losses
from jattn.scores import Score

CAUSAL = jattn.masks.causal()
Vectors = tuple[jax.Array, jax.Array, jax.Array]


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
                `settings.dead_below`, or not finite;
            entropy: mean entropy of the weights over its largest value, ln n;
            max_probability: mean largest weight; saturated_share: of rows where it is
                above `settings.saturated_above`, or NaN;
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

    def loss(params: Any, shifts: list[jax.Array]) -> tuple[jax.Array, list[Vectors]]:
        model = nnx.merge(graph, params)
        logits, vectors = shifted(model, inputs, scale=scale, shifts=shifts)
        return token_losses(logits, targets).mean, vectors

    # The gradient of zeros that are added to the heads' outputs is that of the outputs.
    whole = nnx.merge(graph, params)
    attentions = [block.attention for block in whole.blocks]
    zeros = [jnp.zeros((*inputs.shape, x.num_heads, x.v_head_dim)) for x in attentions]
    gradients, vectors = jax.grad(loss, argnums=(0, 1), has_aux=True)(params, zeros)
    gradient, dheads = gradients
    layers = []
    for layer, own in enumerate(vectors):
        attention = gradient["blocks"][layer]["attention"]
        rows = _row_measures(own, scale, whole.score, dheads[layer], settings)
        for name, projection in (("wq", "query"), ("wk", "key")):
            kernel = attention[projection]["kernel"][...]  # (D, N, d_k)
            norm = jnp.sqrt(jnp.sum(kernel**2, axis=(0, 2)))
            rows[f"{name}_gradient_norm"] = norm
        layers.append(rows)
    return layers


def shifted(
    model: CausalLM, tokens: jax.Array, *, scale: jax.Array, shifts: list[jax.Array]
) -> tuple[jax.Array, list[Vectors]]:
    """The model's forward pass, with something added to what its heads return.

    Args:
        model: of pre-LN blocks.
        tokens: (B, T).
        scale: the factor of the dot products.
        shifts: for each layer, (B, T, N, d_v). Their gradients are those of the heads.

    Returns:
        logits: (B, T, vocabulary).
        vectors: for each layer, the queries, keys and values of its attention.
    """
    vectors: list[Vectors] = []

    def attend(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        shift = shifts[len(vectors)]
        vectors.append((query, key, value))
        options: dict[str, Any] = dict(scale=scale, score=model.score)
        return jattn.attention(query, key, value, mask=CAUSAL, **options) + shift

    return logits_with(model, model.embed(tokens), attend), vectors


def _row_measures(
    vectors: Vectors,
    scale: jax.Array,
    score: tuple[Score, ...],
    dheads: jax.Array,
    settings: Probe,
) -> dict[str, jax.Array]:
    """The measures of the rows that see two keys or more, for each head."""
    query, key, value = vectors
    options: dict[str, Any] = dict(mask=CAUSAL, scale=scale, score=score)
    stats = jattn.attention(query, key, value, stats=True, **options)[1]
    norm = jattn.diagnostics.score_gradient_rows(query, key, value, dheads, **options)
    stats = jax.tree.map(lambda x: x[:, 1:], stats)  # (B, T - 1, N)
    norm = norm[:, 1:] * query.shape[0] * query.shape[1]
    keys = jnp.arange(2, query.shape[1] + 1).reshape(1, -1, 1)
    std, largest = _logit_measures(query, key, scale, score)
    mean = functools.partial(jnp.mean, axis=(0, 1), dtype=norm.dtype)
    return {
        "row_norm_median": jnp.median(norm.reshape(-1, norm.shape[-1]), axis=0),
        "row_norm_rms": jnp.sqrt(mean(norm**2)),
        "dead_share": mean((norm < settings.dead_below) | ~jnp.isfinite(norm)),
        "entropy": mean(stats.entropy / jnp.log(keys)),
        "max_probability": mean(stats.max_prob),
        # Not `>`: a row of NaN is not a healthy one.
        "saturated_share": mean(~(stats.max_prob <= settings.saturated_above)),
        "softmax_derivative": mean(1 - stats.sum_p2),
        "logit_std": mean(std[:, 1:]),
        "logit_max": jnp.max(largest[:, 1:], axis=(0, 1)),
    }


def _logit_measures(
    query: jax.Array, key: jax.Array, scale: jax.Array, score: tuple[Score, ...]
) -> tuple[jax.Array, jax.Array]:
    """The standard deviation and the largest absolute logit of rows, (B, T, N).

    Some rows at a time: memory does not grow with the square of the length.
    """
    position = jnp.arange(query.shape[1])

    def of_row(row: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        query, at = row
        logits = jattn.scaled_scores(query[:, None], key, scale)[:, :, 0]  # (B, N, T)
        for rule in score:
            logits = rule(logits, at.reshape(1, 1, 1), position.reshape(1, 1, -1))
        seen = CAUSAL.allowed(at, position)[None, None]
        largest = jnp.max(jnp.abs(logits), axis=-1, where=seen, initial=0)
        return jnp.std(logits, axis=-1, where=seen), largest

    rows = jax.lax.map(of_row, (jnp.moveaxis(query, 1, 0), position), batch_size=64)
    return jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1), rows)
