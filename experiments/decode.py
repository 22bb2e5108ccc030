"""Time of one step of decoding, by what is filled, against `jax.nn`.

A step appends a token to a `KVCache`, whose buffers it is given to write to, and
attends with it. `jax.nn` attends to keys and values in its own layout over the whole
capacity, with a length for each row, and need not write anything.
"""

import dataclasses
import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jattn
from experiments.config import ConfigError, to_dict
from experiments.files import write_json
from experiments.machine import describe
from experiments.progress import Progress
from experiments.settings import Decode
from experiments.timing import called, clock_here, difference, time_pair

Row = dict[str, Any]


def measure_decode(
    settings: Decode, progress: Progress, threads: str, command: str = ""
) -> dict[str, Any]:
    """Measure every filled length, and write decode.json.

    Returns:
        What decode.json holds: "rows" (one for each filled length, see
        `timing.time_pair`), "machine" and "settings".

    Raises:
        ConfigError: more is filled than there is room for, or the heads do not fit.
    """
    if max(settings.filled) > settings.capacity:
        raise ConfigError(
            f"filled = {list(settings.filled)} must not be more than capacity = "
            f"{settings.capacity}"
        )
    if settings.heads % settings.kv_heads:
        raise ConfigError(
            f"heads = {settings.heads} must be a multiple of kv_heads = "
            f"{settings.kv_heads}"
        )
    progress.start("decode", total=len(settings.filled))
    rows = []
    for done, filled in enumerate(settings.filled, start=1):
        rows.append(measure(settings, filled))
        progress.update(done)
    results = {
        "command": command,
        "settings": to_dict(settings),
        "machine": describe(threads),
        "rows": rows,
    }
    directory = Path(settings.out) / settings.name
    directory.mkdir(parents=True, exist_ok=True)
    write_json(directory / "decode.json", results)
    progress.finish("decode  finished")
    return results


def measure(settings: Decode, filled: int) -> Row:
    """Time a step by both; the newest token makes `filled`."""
    batch, slots, size = settings.batch, settings.capacity, settings.head_dim
    rng = np.random.default_rng(settings.seed)

    def normal(*shape: int) -> jax.Array:
        values = rng.standard_normal(shape, dtype=np.float32)
        return jnp.asarray(values).astype(settings.dtype)

    query = normal(batch, 1, settings.heads, size)
    key, value = (normal(batch, slots, settings.kv_heads, size) for _ in range(2))
    before, last = slice(0, filled - 1), slice(filled - 1, filled)
    cache = jattn.KVCache.init(
        batch, slots, settings.kv_heads, size, dtype=settings.dtype
    )
    if filled > 1:
        append = jax.jit(jattn.KVCache.append, donate_argnums=0)
        cache = append(cache, key[:, before], value[:, before])
    token = query, key[:, last], value[:, last]
    compiled = step.lower(cache, *token).compile()
    held = [cache]

    def ours() -> jax.Array:
        # A step that is timed again starts from the same length.
        cache, out = compiled(held.pop(), *token)
        held.append(rewound(cache))
        return out

    lengths = jnp.full(batch, filled, jnp.int32)
    whole = functools.partial(
        jax.nn.dot_product_attention, key_value_seq_lengths=lengths
    )
    theirs = functools.partial(jax.jit(whole), query, key, value)
    clock = clock_here(settings.rounds, float("inf"), settings.sample_ms / 1e3)
    own, other = (
        called(call, results=lambda out: [np.asarray(out, np.float32)])
        for call in (ours, theirs)
    )
    row: Row = {"filled": filled, "differs": difference(own.results, other.results)}
    planned = compiled.memory_analysis()
    row["temp_bytes"] = None if planned is None else planned.temp_size_in_bytes
    return row | time_pair(own, other, clock)


@functools.partial(jax.jit, donate_argnums=0)
def step(
    cache: jattn.KVCache, query: jax.Array, key: jax.Array, value: jax.Array
) -> tuple[jattn.KVCache, jax.Array]:
    """One token more, and what it gets."""
    cache = cache.append(key, value)
    return cache, cache.attend(query)


@functools.partial(jax.jit, donate_argnums=0)
def rewound(cache: jattn.KVCache) -> jattn.KVCache:
    """The cache without its last token, whose slot is written again."""
    return dataclasses.replace(cache, length=cache.length - 1)
