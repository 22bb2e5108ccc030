"""Layers of one kind: one after another, or stacked in one."""

import functools
import operator
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jattn.algorithms.partition import merge, partition
from jattn.nnx.config import TransformerConfig


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
    layers: Any,
    x: jax.Array,
    caches: Any,
    config: TransformerConfig,
    **options: Any,
) -> tuple[jax.Array, Any]:
    """What comes out of the last layer, and what became of the cache of each.

    Args:
        layers: as `make_layers` makes them.
        x: what the first layer gets.
        caches: one for each layer, or None.
        config: whether they are stacked, and recomputed.
        **options: what all layers get, by name.
    """
    if config.scan_layers:
        return _through(layers, x, caches, config, options)
    updated = []
    for layer, cache in zip(layers, caches or [None] * len(layers), strict=True):
        if config.remat is False:
            x, cache = _call(layer, x, cache, options)
        else:
            x, cache = _through(layer, x, cache, config, options)
        updated.append(cache)
    return x, tuple(updated)


def each_layer(layers: Any, config: TransformerConfig) -> Any:
    """The layers one by one, of stacked ones too."""
    if not config.scan_layers:
        return layers
    graphdef, state = nnx.split(layers)
    return [nnx.merge(graphdef, _take(state, i)) for i in range(config.num_layers)]


def _call(layer: Any, x: jax.Array, cache: Any, options: Any) -> tuple[jax.Array, Any]:
    if cache is None:
        return layer(x, **options), None
    return layer(x, cache=cache, **options)


def _through(
    layer: Any, x: jax.Array, cache: Any, config: TransformerConfig, options: Any
) -> tuple[jax.Array, Any]:
    """A layer that is recomputed if the config says so, or stacked ones in turn."""
    graphdef, params, others = nnx.split(layer, nnx.Param, ...)
    leaves, structure = jax.tree.flatten(options)
    is_data = [isinstance(leaf, (jax.Array, np.ndarray)) for leaf in leaves]
    data, static = partition(is_data, leaves)
    x, cache, after = _compiled(
        x,
        params,
        others,
        cache,
        data,
        call=(graphdef, structure, tuple(is_data), tuple(static)),
        remat=config.remat,
        stacked=config.scan_layers,
    )
    if after is not None:
        nnx.update(layer, after)
    return x, cache


@functools.partial(jax.jit, static_argnames=("call", "remat", "stacked"), inline=True)
def _compiled(
    x: jax.Array,
    params: Any,
    others: Any,
    caches: Any,
    data: list[Any],
    *,
    call: Any,
    remat: Any,
    stacked: bool,
) -> tuple[jax.Array, Any, Any]:
    """One program for all calls of the same structure and shapes, outside `jit` too.

    Functions of JAX, not of Flax, so that a model from outside a loop can be called
    within it, as a decoding loop does.
    """
    graphdef, structure, is_data, static = call

    def pure(x: jax.Array, parts: Any, data: Any) -> tuple[jax.Array, Any, Any]:
        params, others, cache = parts
        options = jax.tree.unflatten(structure, merge(is_data, data, static))
        before = jax.tree.leaves(others)
        one = nnx.merge(graphdef, params, others)
        x, cache = _call(one, x, cache, options)
        after = nnx.state(one, nnx.Not(nnx.Param))
        now = jax.tree.leaves(after)
        same = len(before) == len(now) and all(map(operator.is_, before, now))
        return x, cache, None if same else after

    if remat is not False:
        policy = None if remat is True else remat
        # A loop keeps apart by itself what is computed twice.
        pure = jax.checkpoint(pure, policy=policy, prevent_cse=not stacked)
    if not stacked:
        return pure(x, (params, others, caches), data)

    if caches is None:

        def step(x: jax.Array, parts: Any) -> tuple[jax.Array, Any]:
            x, _, after = pure(x, (*parts, None), data)
            return x, after

        x, after = jax.lax.scan(step, x, (params, others))
        return x, None, after
    # Not in a loop, which would copy all slots of a layer to read those in use.
    updated, states = [], []
    for i, cache in enumerate(caches):
        x, cache, after = pure(x, (*_take((params, others), i), cache), data)
        updated.append(cache)
        states.append(after)
    stack: Any = functools.partial(jax.tree.map, lambda *x: jnp.stack(x))
    return x, tuple(updated), None if after is None else stack(*states)


def stack_layers(params: Mapping[Any, Any]) -> dict[Any, Any]:
    """The parameters of the same model with scan_layers=True.

    Args:
        params: nested dicts, as of `nnx.to_pure_dict(nnx.state(model, nnx.Param))`.

    Example:
        >>> stack_layers({"blocks": {0: {"a": jnp.zeros(2)}, 1: {"a": jnp.ones(2)}}})
        {'blocks': {'a': Array([[0., 0.],
               [1., 1.]], dtype=float32)}}
    """

    def stacked(blocks: Any) -> Any:
        if not _is_listed(blocks):
            raise ValueError(
                'stack_layers: params["blocks"] must hold a tree for each layer by its '
                f"number, but got {_shown(blocks)}. Those of scan_layers=True are "
                "stacked already."
            )
        return jax.tree.map(
            lambda *x: jnp.stack(x), *(blocks[i] for i in sorted(blocks, key=int))
        )

    return _at_blocks("stack_layers", params, stacked)


def unstack_layers(params: Mapping[Any, Any]) -> dict[Any, Any]:
    """The parameters of the same model with scan_layers=False.

    Args:
        params: nested dicts, as of `nnx.to_pure_dict(nnx.state(model, nnx.Param))`.

    Example:
        >>> unstack_layers({"blocks": {"a": jnp.zeros((2, 1))}})
        {'blocks': {0: {'a': Array([0.], dtype=float32)},
                    1: {'a': Array([0.], dtype=float32)}}}
    """

    def listed(blocks: Any) -> Any:
        counts = {np.shape(x)[:1] for x in jax.tree.leaves(blocks)}
        if _is_listed(blocks) or len(counts) != 1 or () in counts:
            raise ValueError(
                'unstack_layers: params["blocks"] must hold arrays with a first axis '
                f"for the layers, but got {_shown(blocks)}. Those of scan_layers=False "
                "are not stacked."
            )
        return {i: _take(blocks, i) for i in range(*counts.pop())}

    return _at_blocks("unstack_layers", params, listed)


def _take(tree: Any, i: int) -> Any:
    return jax.tree.map(lambda x: x[i], tree)


def _is_listed(blocks: Any) -> bool:
    return (
        isinstance(blocks, Mapping)
        and bool(blocks)
        and all(str(name).isdecimal() for name in blocks)
    )


def _shown(blocks: Any) -> str:
    names = list(blocks) if isinstance(blocks, Mapping) else type(blocks).__name__
    shapes = [np.shape(x) for x in jax.tree.leaves(blocks)]
    return f"{names}, arrays of shapes {sorted(set(shapes))}"


def _at_blocks(
    caller: str, tree: Mapping[Any, Any], change: Callable[[Any], Any]
) -> dict[Any, Any]:
    def has_blocks(tree: Any) -> bool:
        return isinstance(tree, Mapping) and (
            "blocks" in tree or any(map(has_blocks, tree.values()))
        )

    if not has_blocks(tree):
        raise ValueError(
            f'{caller}: params must be nested dicts with a part "blocks", but got '
            f"{_shown(tree)}. Give nnx.to_pure_dict(nnx.state(model, nnx.Param))."
        )

    def changed(tree: Any) -> Any:
        if not isinstance(tree, Mapping):
            return tree
        return {
            name: change(x) if name == "blocks" else changed(x)
            for name, x in tree.items()
        }

    return changed(tree)
