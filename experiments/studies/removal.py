"""Heads of a language model taken away: what that costs, and in which order.

A gate multiplies the slice of W_O that belongs to a head; at 0 the head is gone. Gates
are data, so that a call can take away many sets of heads, and all calls are one
program. They are flat here: those of the first layer, then those of the next.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from experiments.model import CausalLM
from experiments.step import token_losses


def losses(
    model: CausalLM, scale: jax.Array, windows: np.ndarray, gates: np.ndarray
) -> np.ndarray:
    """The mean loss under each set of gates, in nats per token.

    Args:
        model: which heads are taken from.
        scale: the factor of its dot products.
        windows: (batches, B, T + 1).
        gates: for each set those of all heads, (M, layers x N).

    Returns:
        (M,).
    """
    split = nnx.split(model, nnx.Param)
    found = [_losses(*split, scale, tokens, gates) for tokens in windows]
    return np.mean(jax.device_get(found), axis=0)


def importance(model: CausalLM, scale: jax.Array, windows: np.ndarray) -> np.ndarray:
    """The mean of |dL/dgate| over windows, divided by its norm in each layer.

    Args:
        model: whose heads are judged.
        scale: the factor of its dot products.
        windows: (batches, B, T + 1); L is the loss of one of them.

    Returns:
        (layers x N,).

    Source: Michel et al. 2019, arXiv:1905.10650, section 4.1.
    """
    split = nnx.split(model, nnx.Param)
    found = [_slopes(*split, scale, tokens) for tokens in windows]
    mean = np.abs(jax.device_get(found)).mean(axis=(0, 1))
    mean = mean.reshape(len(model.blocks), -1)
    return (mean / np.linalg.norm(mean, axis=1, keepdims=True)).ravel()


def greedy(loss: Callable[[np.ndarray], np.ndarray], heads: int) -> list[int]:
    """All heads, each the one that is the cheapest to take away after those before.

    Args:
        loss: of sets of gates, (M, heads) to (M,).
        heads: how many there are.
    """
    order: list[int] = []
    gates = np.ones(heads)
    for _ in range(heads):
        costs = np.array(loss(gates * alone(heads)))
        costs[order] = np.inf
        order.append(int(costs.argmin()))
        gates[order[-1]] = 0
    return order


def alone(heads: int) -> np.ndarray:
    """The gates that take away one head each, (heads, heads)."""
    return 1 - np.eye(heads)


def in_order(order: Sequence[int]) -> np.ndarray:
    """The gates that take away the first, the first two, ... all, (heads, heads)."""
    place = np.argsort(order)
    return (place[None] > np.arange(len(order))[:, None]).astype(float)


def _loss(
    graph: Any, params: Any, scale: jax.Array, tokens: jax.Array, gates: jax.Array
) -> jax.Array:
    """The mean loss of (B, T + 1) under the gates of all heads."""
    model = nnx.merge(graph, params)
    of_layers = gates.reshape(len(model.blocks), -1)
    for block, own in zip(model.blocks, of_layers, strict=True):
        out = block.attention.out
        kernel = out.kernel[...]  # (N, d_v, D)
        out.kernel = nnx.Param(kernel * own[:, None, None].astype(kernel.dtype))
    return token_losses(model(tokens[:, :-1], scale=scale), tokens[:, 1:]).mean


@functools.partial(jax.jit, static_argnums=0)
def _losses(graph: Any, *args: jax.Array) -> jax.Array:
    """Of M sets of gates: (M,)."""
    of_sets = jax.vmap(functools.partial(_loss, graph), (None, None, None, 0))
    return of_sets(*args)


@functools.partial(jax.jit, static_argnums=0)
def _slopes(graph: Any, params: Any, scale: jax.Array, tokens: jax.Array) -> jax.Array:
    """The derivatives of each window's loss by the gates at 1, (B, layers x N)."""
    blocks = nnx.merge(graph, params).blocks
    ones = jnp.ones(sum(block.attention.num_heads for block in blocks))

    def of_window(window: jax.Array) -> jax.Array:
        loss = functools.partial(_loss, graph, params, scale, window[None])
        return jax.grad(loss)(ones)

    return jax.vmap(of_window)(tokens)
