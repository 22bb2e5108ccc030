"""jit, vmap, and derivatives in forward mode and of second order."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jattn.testing import dense
from jattn.testing.compare import close, normal
from jattn.testing.probe import probe, some_pairs, vectors
from jattn.testing.subject import Subject


@probe("transforms", "jit")
def jit_changes_nothing(f: Subject) -> None:
    """Called eagerly, it gives the same."""
    q, k, v = map(jnp.asarray, vectors())
    close("out", f.fn(q, k, v), f.out(q, k, v), because="called without jit")


@probe("transforms", "vmap", "mask")
def vmap_maps_vectors_and_mask(f: Subject) -> None:
    """Over an axis of query and mask, with keys and values shared."""
    q, k, v = vectors()
    many, masks = np.stack([q, -q, 2 * q]), np.stack([some_pairs()] * 3)
    masks[1, ..., 1:4], masks[2, ..., 5:] = False, False

    def vmapped(q: Any, mask: Any) -> Any:
        return f.fn(q, k, v, mask=mask)

    out = np.asarray(f.program(jax.vmap(vmapped))(many, masks))
    for i in range(3):
        want = dense.attend(many[i], k, v, mask=masks[i]).out
        close(f"out {i} of vmap", out[i], want)


@probe("transforms", "vmap", "grad")
def vmap_of_grad_is_the_gradient_of_each(f: Subject) -> None:
    """Gradients of query and key under vmap."""
    q, k, v = vectors()
    many = np.stack([q, -q, 2 * q])

    def total(q: Any, k: Any) -> Any:
        return jnp.sum(f.fn(q, k, v))

    gradient = jax.grad(total, argnums=(0, 1))
    got = f.program(jax.vmap(gradient, in_axes=(0, None)))(many, k)
    wants = [dense.gradients(x, k, v, np.ones_like(q)) for x in many]
    for name, gradients in zip(("query", "key"), got, strict=True):
        want = np.stack([want[name] for want in wants])
        close(f"gradient of {name} under vmap", gradients, want)


def _moments(q: Any, k: Any, v: Any) -> tuple[Any, Any]:
    """The first two derivatives of attention(a * query, key, value) in a, at a = 1.

    The covariance of scores and values under the weights, and their third moment.
    """
    out, _, p = dense.attend(q, k, v)
    s = np.einsum("btnh,bsnh->bnts", *(np.asarray(x, np.float64) for x in (q, k)))
    s = s / np.sqrt(q.shape[-1])
    s -= (p * s).sum(-1, keepdims=True)
    v = np.swapaxes(v, 1, 2)[:, :, None] - np.swapaxes(out, 1, 2)[:, :, :, None]
    first = np.einsum("bnts,bntsd->btnd", p * s, v)
    return first, np.einsum("bnts,bntsd->btnd", p * s * s, v)


@probe("transforms", "jvp")
def forward_mode_is_the_covariance(f: Subject) -> None:
    """Along the query itself it is the covariance of scores and values."""
    q, k, v = vectors()

    def tangent(q: Any, k: Any, v: Any) -> Any:
        return jax.jvp(lambda q: f.fn(q, k, v), (q,), (q,))[1]

    close("tangent of out", f.program(tangent)(q, k, v), _moments(q, k, v)[0])


@probe("transforms", "hvp")
def second_derivatives_are_right(f: Subject) -> None:
    """Forward over reverse, and reverse over reverse, along the query itself."""
    q, k, v = vectors()
    d_out = normal(6, *q.shape)
    want = (_moments(q, k, v)[1] * d_out).sum()

    def second(q: Any, k: Any, v: Any, d_out: Any) -> Any:
        def loss(a: Any) -> Any:
            return jnp.sum(f.fn(a * q, k, v) * d_out)

        forward = jax.jvp(jax.grad(loss), (jnp.float32(1),), (jnp.float32(1),))[1]
        return forward, jax.grad(jax.grad(loss))(jnp.float32(1))

    forward, reverse = f.program(second)(q, k, v, d_out)
    close("second derivative, forward over reverse", forward, want)
    close("second derivative, reverse over reverse", reverse, want)
