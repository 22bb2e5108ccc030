"""Attention in float64 numpy, and the tolerances of everything compared with it."""

import functools
import re
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

TOLERANCE = {
    jnp.dtype(jnp.float64): dict(rtol=1e-12, atol=1e-12),
    jnp.dtype(jnp.float32): dict(rtol=2e-5, atol=2e-6),
    jnp.dtype(jnp.float16): dict(rtol=4e-3, atol=2e-3),
    jnp.dtype(jnp.bfloat16): dict(rtol=2e-2, atol=1e-2),
}
"""Largest error against the oracle, by the dtype of the inputs."""


def assert_close(got, want, dtype=jnp.float32, name=""):
    got = np.asarray(got, np.float64)
    np.testing.assert_allclose(got, want, err_msg=name, **TOLERANCE[jnp.dtype(dtype)])


def assert_gradient_close(got, want, dtype=jnp.float32, name=""):
    """Close in units of the largest entry, for sums of terms of either sign."""
    size = max(1.0, np.max(np.abs(want), initial=0.0))
    assert_close(np.asarray(got, np.float64) / size, want / size, dtype, name)


class Dense(NamedTuple):
    """Results with everything kept."""

    out: np.ndarray  # (*B, T, N, D)
    lse: np.ndarray  # (*B, T, N)
    weights: np.ndarray  # (*B, N, T, S)
    logits: np.ndarray  # (*B, N, T, S), or S + 1 with that of a sink last


def dense_attention(
    q, k, v, allowed=True, scale=None, score=lambda s: s, bias=0.0, sinks=None
):
    """Whole rows in float64, heads repeated, for finite vectors.

    allowed and bias broadcast to (*B, N, T, S); score maps the scaled scores; sinks
    are (N,).
    """
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    groups = q.shape[-2] // k.shape[-2]
    k, v = np.repeat(k, groups, -2), np.repeat(v, groups, -2)
    scale = q.shape[-1] ** -0.5 if scale is None else np.asarray(scale, np.float64)
    if np.ndim(scale):
        scale = scale[:, None, None]
    s = score(np.einsum("...tnh,...snh->...nts", q, k) * scale)
    s = np.where(allowed, s + np.asarray(bias, np.float64), -np.inf)
    if sinks is not None:
        column = np.broadcast_to(np.asarray(sinks)[:, None, None], (*s.shape[:-1], 1))
        s = np.concatenate([s, column], -1)
    top = s.max(-1, keepdims=True, initial=-np.inf)
    e = np.exp(s - np.where(np.isfinite(top), top, 0))
    total = e.sum(-1, keepdims=True)
    weights = (e / np.where(total > 0, total, 1))[..., : k.shape[-3]]
    with np.errstate(divide="ignore"):
        lse = (np.where(np.isfinite(top), top, 0) + np.log(total))[..., 0]
    out = np.einsum("...nts,...snd->...tnd", weights, v)
    return Dense(out, np.moveaxis(lse, -2, -1), weights, s)


def normal(seed, *shape, dtype=np.float64):
    """Standard normal numbers, the same on every machine."""
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def exact(seed, *shape):
    """Standard normal numbers that every floating dtype holds without rounding."""
    return np.asarray(normal(seed, *shape)).astype(jnp.bfloat16).astype(np.float64)


def dense_jax(
    q, k, v, allowed=True, scale=None, score=lambda s: s, bias=None, sinks=None, kept=1
):
    """`dense_attention` in JAX, for its derivatives: (out, lse).

    kept is what dropout multiplies the weights by, and broadcasts to (*B, N, T, S).
    """
    groups = q.shape[-2] // k.shape[-2]
    k, v = jnp.repeat(k, groups, -2), jnp.repeat(v, groups, -2)
    s = jnp.einsum("...tnh,...snh->...nts", q, k)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    scale = jnp.asarray(scale, s.dtype)
    s = score(s * jnp.reshape(scale, (1,) * (s.ndim - 3) + (-1, 1, 1)))
    s = jnp.where(allowed, s if bias is None else s + bias, -jnp.inf)
    if sinks is not None:
        column = jnp.reshape(sinks, (1,) * (s.ndim - 3) + (-1, 1, 1))
        column = jnp.broadcast_to(column, (*s.shape[:-1], 1))
        s = jnp.concatenate([s, column], -1)
    top = jnp.max(s, axis=-1, keepdims=True, initial=-jnp.inf)
    top = jax.lax.stop_gradient(jnp.where(jnp.isfinite(top), top, 0))
    e = jnp.exp(s - top)
    total = jnp.sum(e, axis=-1, keepdims=True)
    some = total > 0
    total = jnp.where(some, total, 1)
    lse = jnp.where(some, top + jnp.log(total), -jnp.inf)[..., 0]
    weights = (e / total)[..., : k.shape[-3]] * kept
    out = jnp.einsum("...nts,...snd->...tnd", weights, v)
    return out, jnp.swapaxes(lse, -1, -2)


FAST: dict[str, object] = {"xla_backend_optimization_level": 0}
if jax.__version_info__ < (0, 11):  # later ones have no such option
    FAST["xla_cpu_use_fusion_emitters"] = False

jit = functools.partial(jax.jit, compiler_options=FAST)
"""jax.jit that compiles twice as fast; LLVM's optimiser is not under test."""


def assert_same_bits(got, want, name=""):
    """Equal in every bit, in dtype and in shape."""
    got, want = np.asarray(got), np.asarray(want)
    assert (got.dtype, got.shape) == (want.dtype, want.shape), name
    same = got.view(f"u{got.itemsize}") == want.view(f"u{want.itemsize}")
    assert same.all(), f"{name}: {np.argwhere(~same).tolist()}"


def id_of(given):
    """What a test is given, as a part of its name: the same in every process."""
    return re.sub(" at 0x[0-9a-f]+", "", str(given))
