"""Every way to attention, as one function of vectors that are already projected.

A module gets identities as its projections, so that what it attends with is what it is
given. All take query (B, T, N, H), key and value (B, S, N, H), and a mask (B, N, T, S),
each axis full or 1.
"""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx

import jattn
import jattn.nnx

BLOCKS = dict(implementation="blockwise", block_sizes=(2, 3))


def reference(query, key, value, mask=None):
    return jattn.attention(query, key, value, mask=mask, implementation="reference")


def blockwise(query, key, value, mask=None):
    return jattn.attention(query, key, value, mask=mask, **BLOCKS)


def drop_in(query, key, value, mask=None):
    return jattn.dot_product_attention(query, key, value, mask=mask)


def adapter(query, key, value, mask=None):
    return jattn.attention_fn(query, key, value, mask=mask)


def identity(rng, shape, dtype):
    return jnp.eye(*shape, dtype=dtype)


def projected(call, query, *others):
    """`call` on vectors whose heads stand side by side, as in a module."""
    width = query.shape[-2] * query.shape[-1]
    flat = [x.reshape(*x.shape[:-2], width) for x in (query, *others)]
    return call(*flat).reshape(query.shape)


def in_nnx(module, query, key, value, mask=None, **options):
    num_heads, head_dim = query.shape[-2:]
    shared = dict(dtype=query.dtype, use_bias=False, kernel_init=identity)
    layer = module(num_heads, num_heads * head_dim, **shared, rngs=nnx.Rngs(0))
    return projected(functools.partial(layer, mask=mask, **options), query, key, value)


def flax_nnx(query, key, value, mask=None):
    attention_fn = functools.partial(jattn.attention_fn, **BLOCKS)
    module = functools.partial(
        nnx.MultiHeadAttention, attention_fn=attention_fn, decode=False
    )
    return in_nnx(module, query, key, value, mask)


def flax_linen(query, key, value, mask=None):
    layer = nn.MultiHeadDotProductAttention(
        num_heads=query.shape[-2],
        dtype=query.dtype,
        use_bias=False,
        kernel_init=identity,
        attention_fn=jattn.attention_fn,
    )

    def call(*flat):
        return layer.init_with_output(jax.random.key(0), *flat, mask=mask)[0]

    return projected(call, query, key, value)


PATHS = {
    "reference": reference,
    "blockwise": blockwise,
    "dot_product_attention": drop_in,
    "attention_fn": adapter,
    "jattn.nnx": functools.partial(in_nnx, jattn.nnx.MultiHeadAttention),
    "flax.nnx": flax_nnx,
    "flax.linen": flax_linen,
}


def with_gradients(fn, query, key, value, cotangent, allowed=None):
    """The output of a path, and its gradients to query, key and value."""
    out, pull = jax.vjp(lambda *x: fn(*x, allowed), query, key, value)
    gradients = zip(("query", "key", "value"), pull(cotangent), strict=True)
    return dict(gradients, out=out)
