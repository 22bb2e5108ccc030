"""The block sizes that are fastest here."""

import functools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jattn.choice import block_sizes_of
from jattn.core.boundary import check_vectors
from jattn.dispatch import attention
from jattn.prepare import Call

CANDIDATES = {
    "cpu": ((128, 128), (256, 256), (512, 256), (512, 512)),
    "gpu": ((128, 128), (256, 256), (512, 512), (1024, 512), (1024, 1024)),
    "tpu": ((256, 256), (512, 512), (512, 1024), (1024, 512), (1024, 1024)),
}


def tune(
    query: Any,
    key: Any,
    value: Any,
    *,
    candidates: Sequence[tuple[int, int]] | None = None,
    backward: bool = True,
    rounds: int = 3,
    **options: Any,
) -> tuple[int, int]:
    """The block sizes with which `attention` is fastest on this machine.

    Every candidate is compiled and timed, in turns, and the least median of wall times
    wins. Nothing is stored: keep the result, for example in a config.

    Args:
        query: (*B, T, N, H), an array or a `jax.ShapeDtypeStruct`, which stands for
            normal random numbers.
        key: (*B, S, K, H), likewise.
        value: (*B, S, K, D), likewise.
        candidates: pairs (queries, keys) of a tile. By default a few from 128 to 1024,
            and what `attention` would take.
        backward: whether to time the gradient with respect to query, key and value too.
        rounds: how often each is timed.
        **options: of `attention`: the mask, score rules, and so on.

    Returns:
        The best pair, for `attention(..., block_sizes=...)`.

    Raises:
        ValueError: there is no candidate, or one is not a pair of positive ints, or
            `attention` refuses the arguments.
        TypeError: it was called while tracing, as under `jax.jit`.
        ExceptionGroup: no candidate fits into memory; others are passed over.

    Example:
        >>> import jax, jattn
        >>> x = jax.ShapeDtypeStruct((1, 64, 2, 8), "float32")
        >>> tune(x, x, x, mask=jattn.masks.causal(), candidates=[(16, 32)])
        (16, 32)
    """
    sizes = check_vectors("tune", query, key, value)
    call = Call("tune", sizes)
    vectors = [_array(x, seed) for seed, x in enumerate((query, key, value))]
    # Under jit, arrays that are made here are traced too.
    if any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves((vectors, options))):
        raise TypeError(
            "tune: it measures time and must be called with arrays or "
            "jax.ShapeDtypeStructs, but got traced ones. Call it outside jax.jit."
        )
    for name in ("implementation", "block_sizes"):
        if name in options:
            raise ValueError(
                f"tune: {name} is what is searched for, but got it among the options. "
                "Leave it out."
            )
    if type(rounds) is not int or rounds < 1:
        raise ValueError(
            f"tune: rounds must be a positive int, but got {rounds!r}. 3 are enough "
            "where nothing else runs."
        )
    if candidates is None:
        backend = jax.default_backend()
        found = [block_sizes_of(call, None)]
        found += CANDIDATES.get(backend, CANDIDATES["gpu"])
    else:
        found = [block_sizes_of(call, pair) for pair in candidates]
    # Blocks larger than the arrays are cut to them, so these are the same.
    cut = {(min(q, sizes.T), min(k, sizes.S)): (q, k) for q, k in reversed(found)}
    if not cut:
        raise ValueError("tune: candidates must hold a pair, but got none.")
    runs, failures = {}, []
    for pair in reversed(cut.values()):
        attend = functools.partial(attention, block_sizes=pair, **options)
        try:
            runs[pair] = _compiled(attend, vectors, backward)
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            failures.append(error)
    if not runs:
        raise ExceptionGroup("tune: no candidate ran.", failures)
    times: dict[tuple[int, int], list[float]] = {pair: [] for pair in runs}
    for _ in range(rounds):
        for pair, run in runs.items():
            start = time.perf_counter()
            run()
            times[pair].append(time.perf_counter() - start)
    return min(times, key=lambda pair: statistics.median(times[pair]))


def _array(x: Any, seed: int) -> jax.Array:
    if isinstance(x, jax.ShapeDtypeStruct):
        return jax.random.normal(jax.random.key(seed), x.shape, x.dtype)
    return jnp.asarray(x)


def _compiled(
    attend: Callable[..., Any], vectors: list[jax.Array], backward: bool
) -> Callable[[], Any]:
    """The call to be timed, which has run once."""

    def loss(*vectors: jax.Array) -> jax.Array:
        results = jax.tree.leaves(attend(*vectors))
        return jnp.stack([jnp.sum(x, dtype=jnp.float32) for x in results]).sum()

    fn = jax.grad(loss, (0, 1, 2)) if backward else attend
    compiled = jax.jit(fn).lower(*vectors).compile()

    def run() -> Any:
        return jax.block_until_ready(compiled(*vectors))

    run()
    return run
