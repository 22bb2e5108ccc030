"""What the heads of a language model look at, against keys that tokens point to.

Letters: B windows, T queries and S keys of one, N heads.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.scipy.special import entr

import jattn
from experiments.config import ConfigError
from experiments.model import CausalLM
from experiments.probe import CAUSAL, shifted

PATTERNS = {
    "previous token": "the token before",
    "same token": "earlier tokens of the same kind",
    "induction": "what followed the same token before",
}
"""What is asked of heads, and the keys of a query that it is about.

Source: Elhage et al. 2021, A mathematical framework for transformer circuits; Olsson et
al. 2022, arXiv:2209.11895.
"""


def look(model: CausalLM, scale: jax.Array, tokens: np.ndarray) -> dict[str, Any]:
    """Where every head looks.

    Args:
        model: whose heads.
        scale: the factor of its dot products.
        tokens: (B, T).

    Returns:
        "heads": for each pattern the mean weight on its keys, (layers, N), over the
            queries that have such keys.
        "even": for each pattern the same of even weights.
        "divergence": for each layer, see `divergence`.
    """
    found = _look(*nnx.split(model, nnx.Param), scale, tokens)
    return jax.tree.map(lambda x: x.tolist(), jax.device_get(found))


@functools.partial(jax.jit, static_argnums=0)
def _look(graph: Any, params: Any, scale: jax.Array, tokens: jax.Array) -> Any:
    model = nnx.merge(graph, params)
    layers = weights_of(model, scale, tokens)
    even = jnp.tril(jnp.ones(layers[0].shape[-2:]))
    even = jnp.broadcast_to(even / even.sum(axis=1, keepdims=True), layers[0].shape)
    wanted = keys_of(tokens)
    return {
        "heads": {
            name: jnp.stack([weight_on(weights, keys) for weights in layers])
            for name, keys in wanted.items()
        },
        "even": {name: weight_on(even, keys)[0] for name, keys in wanted.items()},
        "divergence": [divergence(weights) for weights in layers],
    }


def weights_of(model: CausalLM, scale: jax.Array, tokens: jax.Array) -> list[jax.Array]:
    """The weights of every layer, (B, N, T, S)."""
    sizes = [(x.attention.num_heads, x.attention.v_head_dim) for x in model.blocks]
    shifts = [jnp.zeros((*tokens.shape, *size)) for size in sizes]
    _, vectors = shifted(model, tokens, scale=scale, shifts=shifts)
    options: Any = dict(mask=CAUSAL, scale=scale, score=model.score)
    return [jattn.attention_weights(query, key, **options) for query, key, _ in vectors]


def keys_of(tokens: jax.Array) -> dict[str, jax.Array]:
    """For each pattern which earlier keys belong to a query, (B, T, S)."""
    before = jnp.eye(tokens.shape[1], k=-1, dtype=bool)[None]
    earlier = jnp.tri(tokens.shape[1], k=-1, dtype=bool)[None]
    same = tokens[:, :, None] == tokens[:, None, :]
    # A key follows the query's token if the key before it has that token.
    after = jnp.pad(same[..., :-1], ((0, 0), (0, 0), (1, 0)))
    found = jnp.broadcast_to(before, same.shape), same & earlier, after & earlier
    return dict(zip(PATTERNS, found, strict=True))


def weight_on(weights: jax.Array, keys: jax.Array) -> jax.Array:
    """The mean over queries that have any of these keys of the weight on them, (N,).

    Args:
        weights: (B, N, T, S).
        keys: (B, T, S).
    """
    on = jnp.einsum("bnts,bts->n", weights, keys.astype(weights.dtype))
    return on / jnp.maximum(jnp.sum(keys.any(axis=-1)), 1)


def divergence(weights: jax.Array) -> jax.Array:
    """How unlike the heads' rows are: the mean Jensen-Shannon divergence of all N.

    H(mean over heads) - mean over heads of H, in nats: 0 if they are equal, ln N if no
    two of them share a key. The first query, which has one key, is left out.

    Args:
        weights: (B, N, T, S).

    Source: Lin 1991, Divergence measures based on the Shannon entropy.
    """
    rows = weights[:, :, 1:]
    of_mean = entr(rows.mean(axis=1)).sum(axis=-1)
    return jnp.mean(of_mean - entr(rows).sum(axis=-1).mean(axis=1))


def repeats(tokens: np.ndarray, *, count: int, context: int, seed: int) -> np.ndarray:
    """Random tokens, each once, and then all of them again.

    Args:
        tokens: a text; drawn from are the `context` most frequent ones in it.
        count: sequences.
        context: tokens of a sequence; an odd one is not filled.
        seed: of the draws.

    Returns:
        (count, context), or context - 1 if that is odd.

    Raises:
        ConfigError: the text has too few different tokens.
    """
    frequency = np.bincount(tokens)
    known = np.argsort(-frequency, kind="stable")[: min(context, np.sum(frequency > 0))]
    half = context // 2
    if len(known) < half:
        raise ConfigError(
            f"the text has {len(known)} different tokens, but {half} are to be "
            "repeated; lower models.data.context"
        )
    rng = np.random.default_rng([seed, context])
    first = rng.permuted(np.tile(known, (count, 1)), axis=1)[:, :half]
    return np.concatenate([first, first], axis=1).astype(np.int32)
