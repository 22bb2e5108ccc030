"""Transformer blocks in float64 numpy, written out from their parameters."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from oracle import dense_attention, exact


def filled(make, seed=0):
    """A module whose parameters are drawn in numpy, and they, nested.

    Flax's initialisers, which would be compiled for every shape, are not run.
    """
    graphdef, state = nnx.split(nnx.eval_shape(make))
    seeds = iter(range(seed, seed + 1000))

    def fill(x):
        if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
            return jax.random.split(jax.random.key(0), x.shape)
        if not jax.dtypes.issubdtype(x.dtype, np.floating):
            return jnp.zeros(x.shape, x.dtype)
        return jnp.asarray(0.4 * exact(next(seeds), *x.shape), x.dtype)

    state = jax.tree.map(fill, state)
    params = nnx.to_pure_dict(nnx.filter_state(state, nnx.Param))
    return nnx.merge(graphdef, state), jax.tree.map(np.asarray, params)


def normed(params, x, kind):
    if kind == "layer":
        x = x - x.mean(-1, keepdims=True)
    x = x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6)
    return x * params["scale"] + params.get("bias", 0)


def linear(params, x, axes=1):
    return np.tensordot(x, params["kernel"], axes) + params.get("bias", 0)


def attended(params, x, memory, allowed):
    q, k, v = (
        linear(params[name], y)
        for name, y in (("query", x), ("key", memory), ("value", memory))
    )
    return linear(params["out"], dense_attention(q, k, v, allowed).out, 2)


def silu(x):
    return x / (1 + np.exp(-x))


def gelu(x):
    return x / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def relu(x):
    return np.maximum(x, 0)


ACTIVATIONS = dict(silu=silu, swiglu=silu, gelu=gelu, geglu=gelu, relu=relu, reglu=relu)


def fed_forward(params, x, activation):
    gate = ACTIVATIONS[activation]
    up = linear(params["up"], x)
    hidden = gate(linear(params["gate"], x)) * up if "gate" in params else gate(up)
    return linear(params["down"], hidden)


def block(params, x, config, *, allowed, memory=None, seen=None):
    """A block's residual stream; seen says which of a memory each token sees."""

    def add(x, name, f):
        norm, kind = params[f"{name}_norm"], config.norm
        if config.norm_first:
            return x + f(normed(norm, x, kind))
        return normed(norm, x + f(x), kind)

    x = add(x, "attention", lambda y: attended(params["attention"], y, y, allowed))
    if memory is not None:
        cross = params["cross_attention"]
        x = add(x, "cross_attention", lambda y: attended(cross, y, memory, seen))
    feed = params["feed_forward"]
    return add(x, "feed_forward", lambda y: fed_forward(feed, y, config.activation))
