"""Attention and its derivatives, compiled: the memory that a compiler plans for them.

Letters: B batch, T queries and keys, N heads, H head size. Everything is causal
self-attention with as many key heads as query heads.
"""

import os
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.topologies import get_topology_desc
from jax.sharding import SingleDeviceSharding

from experiments.cases import Case, Inputs
from experiments.cost import TOLERANCE
from experiments.peers import FAILURES, Program, program_of, words
from experiments.timing import Ready, clock_here, difference, start, time_pair
from jattn import attention, masks

ATTEND: dict[str, Callable[..., jax.Array]] = {
    "blockwise": partial(attention, mask=masks.causal(), implementation="blockwise"),
    "reference": partial(attention, mask=masks.causal(), implementation="reference"),
    "jax.nn": partial(
        jax.nn.dot_product_attention, is_causal=True, implementation="xla"
    ),
}
OURS, *_ = ATTEND
ON_TPU = (OURS, "jax.nn")  # the compiler of a TPU takes a minute for a textbook's
FORWARD, GRADIENT, HVP = "forward", "gradient", "Hessian-vector product"
Row = dict[str, Any]
# libtpu reads them when it is loaded. Without them it asks a server of Google's cloud
# what machine this is, and may refuse to be loaded by two processes.
TPU_ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}


def derived(attend: Callable[..., Any], derivative: str) -> Callable[..., Any]:
    """A function of query, key, value and c, all (B, T, N, H).

    FORWARD is what attention gives; GRADIENT that of its dot product with c; HVP the
    Hessian of the same times (c, c, c), forward over reverse.
    """

    def forward(q: Any, k: Any, v: Any, c: Any) -> Any:
        return attend(q, k, v)

    def gradient(q: Any, k: Any, v: Any, c: Any) -> Any:
        return jax.vjp(attend, q, k, v)[1](c)

    def product(q: Any, k: Any, v: Any, c: Any) -> Any:
        return jax.jvp(partial(gradient, c=c), (q, k, v), (c, c, c))[1]

    return {FORWARD: forward, GRADIENT: gradient, HVP: product}[derivative]


def compile_for(name: str, derivative: str, case: Case, device: Any = None) -> Any:
    """The compiled program of an implementation, for this machine or for a device."""
    sharding = None if device is None else SingleDeviceSharding(device)
    vector = jax.ShapeDtypeStruct(case.shape, case.dtype, sharding=sharding)
    function = derived(ATTEND[name], derivative)
    return jax.jit(function, keep_unused=True).lower(*[vector] * 4).compile()


def program(name: str, derivative: str, case: Case) -> Program:
    """The same as something that `timing` can time on this machine."""
    dtype = case.dtype
    return program_of(
        compile_for(name, derivative, case),
        lambda inputs: [jnp.asarray(x, dtype) for x in inputs.vectors],
    )


def measured(
    derivative: str, case: Case, *, seed: int, rounds: int, limit_gb: float
) -> dict[str, list[Row]]:
    """The planned memory and the measured time of every implementation here.

    Those that fail, need more than a limit, have other values than the first or cannot
    be compared with it are not timed, and say so.
    """
    inputs = Inputs(case, seed)
    clock = clock_here(rounds, round_seconds=0.3, sample_seconds=0.02)
    rows: list[Row] = []
    ours: Ready | None = None
    for name in ATTEND:
        row = _row(name, derivative, case)
        rows.append(row)
        try:
            made = program(name, derivative, case)
            row["bytes"] = made.temp_bytes
            if made.needed_bytes > 1e9 * limit_gb:
                row["reason"] = f"needs {made.needed_bytes / 1e9:.2g} GB"
                continue
            if ours is None and name != OURS:
                row["reason"] = f"not compared, as {OURS} was not run"
                continue
            theirs = start(made, inputs)
        except FAILURES as error:
            row["reason"] = words(error)
            continue
        if ours is None:
            ours = theirs
        elif (off := difference(theirs.results, ours.results)) > TOLERANCE[case.dtype]:
            row["reason"] = f"differs by {off:.2g}"
            continue
        row["ms"] = time_pair(ours, theirs, clock)["ms"]
    return {"rows": rows}


def planned(derivative: str, case: Case, generation: str) -> dict[str, list[Row]]:
    """What the compiler of a TPU plans, arguments and results included."""
    rows = []
    for name in ON_TPU:
        row = _row(name, derivative, case)
        rows.append(row)
        try:
            compiled = compile_for(name, derivative, case, tpu(generation))
            row["bytes"] = compiled.memory_analysis().peak_memory_in_bytes
        except FAILURES as error:  # more than the TPU has
            row["reason"] = words(error)
    return {"rows": rows}


def _row(name: str, derivative: str, case: Case) -> Row:
    empty = {"bytes": None, "ms": None, "reason": None}
    key = {"derivative": derivative, "length": case.length, "implementation": name}
    return key | empty


def tpu(generation: str) -> Any:
    """A TPU that need not be there to be compiled for; this wants libtpu."""
    os.environ.update(TPU_ENVIRONMENT)
    name = f"{generation}:2x2"
    return get_topology_desc(platform="tpu", topology_name=name).devices[0]
