"""Whether attention is right on this machine, in a few seconds."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jattn

B, T, N, K, H, D = 2, 11, 4, 2, 5, 3
LENGTHS = np.array([0, 7])
"""Keys of each batch row: in the first no query sees any."""

TILES: dict[str, dict[str, Any]] = {
    "reference": dict(implementation="reference"),
    "blockwise": dict(block_sizes=(4, 3)),
}
MASK = jattn.masks.causal() & jattn.masks.lengths(LENGTHS)


def vectors(dtype: Any) -> list[Any]:
    """Query, key, value and the gradient of the output, as bfloat16 holds them."""
    draw = np.random.default_rng(0).standard_normal
    shapes = (B, T, N, H), (B, T, K, H), (B, T, K, D), (B, T, N, D)
    return [draw(shape).astype(jnp.bfloat16).astype(dtype) for shape in shapes]


def attend(q: Any, k: Any, v: Any, *, how: str) -> jax.Array:
    """The call that is checked."""
    # A product that rounds its factors is no mistake, but would look like one.
    return jattn.attention(q, k, v, mask=MASK, precision="highest", **TILES[how])


@functools.partial(jax.jit, static_argnames="how")
def results(q: Any, k: Any, v: Any, g: Any, how: str) -> tuple[jax.Array, ...]:
    """The output, and the gradients of query, key and value."""
    out, pull = jax.vjp(functools.partial(attend, how=how), q, k, v)
    return out, *pull(g)


def answer(q: Any, k: Any, v: Any, g: Any) -> tuple[np.ndarray, ...]:
    """The same in float64 numpy, by the textbook."""
    q, k, v, g = (np.asarray(x, np.float64) for x in (q, k, v, g))
    heads = np.arange(N) // (N // K)
    k, v = k[:, :, heads], v[:, :, heads]
    index = np.arange(T)
    allowed = (index <= index[:, None]) & (index < LENGTHS[:, None, None])
    s = np.einsum("btnh,bsnh->bnts", q, k) / np.sqrt(H)
    e = np.exp(s) * allowed[:, None]
    p = e / np.maximum(e.sum(-1, keepdims=True), np.finfo(float).tiny)
    out = np.einsum("bnts,bsnd->btnd", p, v)
    dp = np.einsum("btnd,bsnd->bnts", g, v)
    ds = p * (dp - np.sum(p * dp, axis=-1, keepdims=True)) / np.sqrt(H)
    dq = np.einsum("bnts,bsnh->btnh", ds, k)
    dk = np.einsum("bnts,btnh->bsnh", ds, q).reshape(B, T, K, N // K, H).sum(3)
    dv = np.einsum("bnts,btnd->bsnd", p, g).reshape(B, T, K, N // K, D).sum(3)
    return out, dq, dk, dv


def check_answer(how: str) -> None:
    """Output and gradients against float64."""
    given = vectors(np.float32)
    names = ("out", "query's gradient", "key's gradient", "value's gradient")
    pairs = zip(names, results(*given, how), answer(*given), strict=True)
    for name, got, want in pairs:
        require_close(name, got, want, 2e-5)


def check_bfloat16() -> None:
    """The output in bfloat16."""
    given = vectors(jnp.bfloat16)
    out = attend(*given[:3], how="blockwise")
    require(out.dtype == jnp.bfloat16, f"out is {out.dtype}")
    require_close("out", out, answer(*given)[0], 5e-2)


def check_unseen(how: str) -> None:
    """An empty row is exactly 0, and a NaN that no query may see changes nothing."""
    q, k, v, g = vectors(np.float32)
    clean = results(q, k, v, g, how)
    require(not np.any(clean[0][0]), "a query without keys does not get 0")
    require(not np.any(clean[1][0]), "a query without keys gets a gradient")
    k[1, LENGTHS[1]], v[1, LENGTHS[1] + 1] = np.nan, np.inf
    pairs = zip(clean, results(q, k, v, g, how), strict=True)
    same = all(np.array_equal(x, y) for x, y in pairs)
    require(same, "a NaN that no query may see changes a result")


def check_dropout() -> None:
    """The key decides which weights are dropped; the others are doubled."""
    q, k, _, _ = vectors(np.float32)
    weigh = functools.partial(jattn.attention_weights, q, k, precision="highest")
    first, again, other = (
        np.asarray(weigh(dropout_rate=0.5, dropout_rng=jax.random.key(seed)))
        for seed in (0, 0, 1)
    )
    require(np.array_equal(first, again), "one key drops different weights")
    require(not np.array_equal(first, other), "two keys drop the same weights")
    kept = first != 0
    require(0.4 < kept.mean() < 0.6, f"{kept.mean():.0%} are kept, of 50%")
    require_close("a weight", first, 2 * kept * np.asarray(weigh()), 1e-5)


def check_memory() -> None:
    """The gradient takes far less temporary memory than one T x S matrix."""
    length = 16384
    x = jax.ShapeDtypeStruct((length, 1, 8), np.float32)
    gradient = jax.grad(lambda x: jattn.attention(x, x, x).sum())
    planned = jax.jit(gradient).lower(x).compile().memory_analysis()
    if planned is not None:
        used, matrix = planned.temp_size_in_bytes, 4 * length**2
        require(used < matrix / 20, f"{used} bytes, where T x S takes {matrix}")


def require(condition: bool, text: str) -> None:
    """Raises AssertionError with `text` unless the condition holds."""
    if not condition:
        raise AssertionError(text)


def require_close(name: str, got: Any, want: np.ndarray, tolerance: float) -> None:
    """Raises AssertionError unless no entry is off by more than the tolerance."""
    error = np.max(np.abs(np.asarray(got, np.float64) - want))
    # Not `error > tolerance`, which a NaN would pass.
    require(error <= tolerance, f"{name} is off by {error:.1e}")


def checks() -> dict[str, Callable[[], None]]:
    """The checks by what they show, each of which raises if it does not hold."""
    found: dict[str, Callable[[], None]] = {}
    for how in TILES:
        found[f"{how}, values"] = functools.partial(check_answer, how)
        found[f"{how}, what is unseen"] = functools.partial(check_unseen, how)
    found["bfloat16"] = check_bfloat16
    found["dropout"] = check_dropout
    found["memory"] = check_memory
    return found
