"""Whether attention is right on this machine, in a few seconds."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jattn
from jattn.testing import dense
from jattn.testing.compare import all_close, check, close, exactly

B, T, N, K, H, D = 2, 11, 4, 2, 5, 3
LENGTHS = np.array([0, 7])
"""Keys of each batch row: in the first no query sees any."""

TILES: dict[str, dict[str, Any]] = {
    "reference": dict(implementation="reference"),
    "blockwise": dict(block_sizes=(4, 3)),
}
MASK = jattn.masks.causal() & jattn.masks.lengths(LENGTHS)
ALLOWED = np.tri(T, dtype=bool) & (np.arange(T) < LENGTHS[:, None, None, None])


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
def results(q: Any, k: Any, v: Any, g: Any, how: str) -> dict[str, jax.Array]:
    """The output, and the gradients of query, key and value."""
    out, pull = jax.vjp(functools.partial(attend, how=how), q, k, v)
    return dict(zip(("out", "query", "key", "value"), (out, *pull(g)), strict=True))


def answer(q: Any, k: Any, v: Any, g: Any) -> dict[str, np.ndarray]:
    """The same in float64 numpy, by the textbook."""
    return dense.gradients(q, k, v, g, mask=ALLOWED)


def check_answer(how: str) -> None:
    """Output and gradients against float64."""
    given = vectors(np.float32)
    all_close(results(*given, how), answer(*given))


def check_bfloat16() -> None:
    """The output in bfloat16."""
    given = vectors(jnp.bfloat16)
    out = attend(*given[:3], how="blockwise")
    check(out.dtype == jnp.bfloat16, f"out is {out.dtype}")
    close("out", out, answer(*given)["out"], jnp.bfloat16)


def check_unseen(how: str) -> None:
    """An empty row is exactly 0, and a NaN that no query may see changes nothing."""
    q, k, v, g = vectors(np.float32)
    clean = results(q, k, v, g, how)
    check(not np.any(clean["out"][0]), "a query without keys does not get 0")
    check(not np.any(clean["query"][0]), "a query without keys gets a gradient")
    k[1, LENGTHS[1]], v[1, LENGTHS[1] + 1] = np.nan, np.inf
    for name, got in results(q, k, v, g, how).items():
        what = name if name == "out" else f"gradient of {name}"
        exactly(what, got, clean[name], "a NaN that no query may see changes it")


def check_dropout() -> None:
    """The key decides which weights are dropped; the others are doubled."""
    q, k, _, _ = vectors(np.float32)
    weigh = functools.partial(jattn.attention_weights, q, k, precision="highest")
    first, again, other = (
        np.asarray(weigh(dropout_rate=0.5, dropout_rng=jax.random.key(seed)))
        for seed in (0, 0, 1)
    )
    check(np.array_equal(first, again), "one key drops different weights")
    check(not np.array_equal(first, other), "two keys drop the same weights")
    kept = first != 0
    check(0.4 < kept.mean() < 0.6, f"{kept.mean():.0%} are kept, of 50%")
    close("a weight", first, 2 * kept * np.asarray(weigh()))


def check_memory() -> str | None:
    """The gradient takes far less temporary memory than one T x S matrix."""
    length = 16384
    x = jax.ShapeDtypeStruct((length, 1, 8), np.float32)
    gradient = jax.grad(lambda x: jattn.attention(x, x, x).sum())
    planned = jax.jit(gradient).lower(x).compile().memory_analysis()
    if planned is None:
        return "not measured: the backend does not say what it plans"
    used, matrix = planned.temp_size_in_bytes, 4 * length**2
    check(used < matrix / 20, f"{used} bytes, where T x S takes {matrix}")
    return None


def checks() -> dict[str, Callable[[], str | None]]:
    """The checks by what they show, each of which raises if it does not hold.

    One that could not look says so.
    """
    found: dict[str, Callable[[], str | None]] = {}
    for how in TILES:
        found[f"{how}, values"] = functools.partial(check_answer, how)
        found[f"{how}, what is unseen"] = functools.partial(check_unseen, how)
    found["bfloat16"] = check_bfloat16
    found["dropout"] = check_dropout
    found["memory"] = check_memory
    return found
