"""Layers of one kind: one after another, or stacked in one."""

import operator
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jattn.nnx.config import TransformerConfig

Step = Callable[[Any, jax.Array, Any], tuple[jax.Array, Any]]
"""`step(layer, x, cache) -> (x, cache)`."""


def make_layers(
    make: Callable[[nnx.Rngs], nnx.Module], config: TransformerConfig, rngs: nnx.Rngs
) -> Any:
    """config.num_layers layers: a list, or one whose parameters are stacked.

    The parameters are the same: a layer draws from keys of its own in either.
    """
    rngs = rngs.fork().split(config.num_layers)
    if config.scan_layers:
        return nnx.vmap(make, transform_metadata={nnx.PARTITION_NAME: "layers"})(rngs)
    graphdef, keys = nnx.split(rngs)
    return nnx.List(
        [make(nnx.merge(graphdef, _take(keys, i))) for i in range(config.num_layers)]
    )


def run_layers(
    layers: Any, x: jax.Array, step: Step, caches: Any, config: TransformerConfig
) -> tuple[jax.Array, Any]:
    """What comes out of the last layer, and what became of the cache of each."""
    if config.scan_layers:
        return _through(layers, x, step, caches, config)
    updated = []
    for layer, cache in zip(layers, caches or [None] * len(layers), strict=True):
        if config.remat is False:
            x, cache = step(layer, x, cache)
        else:
            x, cache = _through(layer, x, step, cache, config)
        updated.append(cache)
    return x, tuple(updated)


def map_layers(layers: Any, fn: Callable[[Any], Any], config: TransformerConfig) -> Any:
    """`fn(layer)` of each layer, in a tuple, or stacked as the layers are."""
    if not config.scan_layers:
        return tuple(fn(layer) for layer in layers)
    graphdef, state = nnx.split(layers)
    return jax.vmap(lambda one: fn(nnx.merge(graphdef, one)))(state)


def _through(
    layer: Any, x: jax.Array, step: Step, cache: Any, config: TransformerConfig
) -> tuple[jax.Array, Any]:
    """`step`, recomputed if the config says so, of a layer or of stacked ones in turn.

    Functions of JAX, not of Flax, so that a model from outside a loop can be called
    within it, as a decoding loop does.
    """
    graphdef, params, others = nnx.split(layer, nnx.Param, ...)

    def pure(x: jax.Array, parts: Any) -> tuple[jax.Array, Any]:
        params, others, cache = parts
        before = jax.tree.leaves(others)
        one = nnx.merge(graphdef, params, others)
        x, cache = step(one, x, cache)
        after = nnx.state(one, nnx.Not(nnx.Param))
        now = jax.tree.leaves(after)
        same = len(before) == len(now) and all(map(operator.is_, before, now))
        return x, (cache, None if same else after)

    if config.remat is not False:
        policy = None if config.remat is True else config.remat
        # A loop keeps apart by itself what is computed twice.
        pure = jax.checkpoint(pure, policy=policy, prevent_cse=not config.scan_layers)
    parts = params, others, cache
    if config.scan_layers:
        x, (cache, after) = jax.lax.scan(pure, x, parts)
    else:
        x, (cache, after) = pure(x, parts)
    if after is not None:
        nnx.update(layer, after)
    return x, cache


def stack_layers(params: Mapping[Any, Any]) -> dict[Any, Any]:
    """The parameters of the same model with scan_layers=True.

    Args:
        params: nested dicts, as of `nnx.to_pure_dict(nnx.state(model, nnx.Param))`.

    Example:
        >>> stack_layers({"blocks": {0: {"a": jnp.zeros(2)}, 1: {"a": jnp.ones(2)}}})
        {'blocks': {'a': Array([[0., 0.],
               [1., 1.]], dtype=float32)}}
    """
    return _at_blocks(
        params,
        lambda blocks: jax.tree.map(
            lambda *x: jnp.stack(x), *(blocks[i] for i in sorted(blocks, key=int))
        ),
    )


def unstack_layers(params: Mapping[Any, Any]) -> dict[Any, Any]:
    """The parameters of the same model with scan_layers=False.

    Args:
        params: nested dicts, as of `nnx.to_pure_dict(nnx.state(model, nnx.Param))`.

    Example:
        >>> unstack_layers({"blocks": {"a": jnp.zeros((2, 1))}})
        {'blocks': {0: {'a': Array([0.], dtype=float32)},
                    1: {'a': Array([0.], dtype=float32)}}}
    """
    return _at_blocks(
        params,
        lambda blocks: {
            i: _take(blocks, i) for i in range(len(jax.tree.leaves(blocks)[0]))
        },
    )


def _take(tree: Any, i: int) -> Any:
    return jax.tree.map(lambda x: x[i], tree)


def _at_blocks(tree: Mapping[Any, Any], change: Callable[[Any], Any]) -> dict[Any, Any]:
    return {
        name: change(value)
        if name == "blocks"
        else _at_blocks(value, change)
        if isinstance(value, Mapping)
        else value
        for name, value in tree.items()
    }
