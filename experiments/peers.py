"""The implementations whose cost is measured, each compiled for one case.

Letters: B batch, T queries and keys, N heads, H head size. Everything here is
self-attention with as many key heads as query heads.
"""

import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from experiments.cases import Case, Inputs
from jattn import attention, masks

FLOAT32 = 4
# How libraries say that they cannot: out of memory, no such kernel, wrong shapes.
FAILURES = (RuntimeError, ValueError, NotImplementedError, ImportError, MemoryError)


class Declined(Exception):
    """An implementation does not do a case; the message says why."""


class Program(NamedTuple):
    """A case, compiled."""

    bind: Callable[[Inputs], Callable[[], Any]]
    """Puts the inputs where and how the implementation wants them; what it gives back
    is the call that is timed."""
    wait: Callable[[Any], Any]
    """Waits until a call is finished."""
    results: Callable[[Any], list[np.ndarray]]
    """Output, and query's, key's and value's gradients, (B, T, N, H), float32."""
    needed_bytes: int
    """Of memory."""
    temp_bytes: int | None = None
    """Of memory beside arguments and results, from the compiler."""


def build(name: str, case: Case) -> Program:
    """Compile a case by the implementation of this name.

    Raises:
        Declined: it is not installed or does not do the case.
    """
    try:
        return IMPLEMENTATIONS[name](case)
    except FAILURES as error:
        raise Declined(words(error)) from None


def words(error: BaseException) -> str:
    """The reason of a failure, in one short line."""
    if isinstance(error, ModuleNotFoundError):
        return f"{error.name} is not installed"
    first = str(error).strip().partition("\n")[0]
    return first[:120] or type(error).__name__


def _jattn(case: Case, implementation: Any) -> Program:
    tiled = case.tile > 0 and implementation == "blockwise"
    blocks = (case.tile, case.tile) if tiled else None

    def attend(q: Any, k: Any, v: Any, *ids: Any) -> Any:
        mask: Any = None if case.mask == "full" else masks.causal()
        if case.mask == "window":
            mask &= masks.sliding_window(case.window - 1)
        if case.mask == "packed":
            mask &= masks.segments(*ids)
        return attention(
            q, k, v, mask=mask, implementation=implementation, block_sizes=blocks
        )

    return _compiled(case, attend, ["ids"] if case.mask == "packed" else [])


def _jax_nn(case: Case, implementation: Any) -> Program:
    attend = partial(jax.nn.dot_product_attention, implementation=implementation)
    if case.mask == "packed":
        return _compiled(case, lambda *x: attend(*x[:3], mask=x[3]), ["dense"])
    window = (case.window - 1, 0) if case.mask == "window" else None
    options = dict(is_causal=case.mask != "full", local_window_size=window)
    return _compiled(case, partial(attend, **options), [])


def _flax_nnx(case: Case) -> Program:
    from flax import nnx

    attend = partial(nnx.dot_product_attention, is_causal=case.mask == "causal")
    if case.mask in ("window", "packed"):
        return _compiled(case, lambda *x: attend(*x[:3], mask=x[3]), ["dense"])
    return _compiled(case, attend, [])


def _compiled(case: Case, attend: Callable[..., Any], extras: Sequence[str]) -> Program:
    """The program of an `attend(query, key, value, *extras)` in JAX."""

    def with_gradient(q: Any, k: Any, v: Any, cotangent: Any, *extras: Any) -> Any:
        out, pull = jax.vjp(lambda *x: attend(*x, *extras), q, k, v)
        return out, *pull(cotangent)

    square = (case.batch, 1, case.length, case.length)
    kinds = {
        "ids": jax.ShapeDtypeStruct(square[::3], jnp.int32),
        "dense": jax.ShapeDtypeStruct(square, jnp.bool),
    }
    vector = jax.ShapeDtypeStruct(case.shape, case.dtype)
    shapes = [vector] * (4 if case.backward else 3) + [kinds[x] for x in extras]
    function = with_gradient if case.backward else attend
    compiled = jax.jit(function).lower(*shapes).compile()

    def place(inputs: Inputs) -> list[jax.Array]:
        arrays = [*inputs.vectors, *(getattr(inputs, x) for x in extras)]
        pairs = zip(arrays, shapes, strict=True)
        return [jnp.asarray(x, shape.dtype) for x, shape in pairs]

    return program_of(compiled, place)


def program_of(compiled: Any, place: Callable[[Inputs], list[jax.Array]]) -> Program:
    """A compiled program of JAX, with what makes its arguments of inputs."""
    memory = compiled.memory_analysis()
    temp = memory.temp_size_in_bytes
    needed = temp + memory.argument_size_in_bytes + memory.output_size_in_bytes

    def bind(inputs: Inputs) -> Callable[[], Any]:
        return partial(compiled, *jax.block_until_ready(place(inputs)))

    def results(out: Any) -> list[np.ndarray]:
        return [np.asarray(x, np.float32) for x in jax.tree.leaves(out)]

    return Program(bind, jax.block_until_ready, results, needed, temp)


def _torch(case: Case) -> Program:
    """PyTorch's kernel, heads first; gradients by its own differentiation."""
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    device = "cuda" if jax.default_backend() == "gpu" else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        raise Declined("this torch has no CUDA")
    if device == "cpu" and hasattr(os, "sched_getaffinity"):
        torch.set_num_threads(len(os.sched_getaffinity(0)))
    masked = case.mask in ("window", "packed")
    pairs = case.batch * case.length**2 * (1 + FLOAT32)  # as Boolean and as a bias
    vectors = 8 * FLOAT32 * int(np.prod(case.shape))

    def bind(inputs: Inputs) -> Callable[[], Any]:
        q, k, v, *cotangent = (
            torch.tensor(x.swapaxes(1, 2), device=device).to(getattr(torch, case.dtype))
            for x in inputs.vectors
        )
        mask = torch.tensor(inputs.dense, device=device) if masked else None
        causal = case.mask == "causal"
        attend = partial(scaled_dot_product_attention, attn_mask=mask, is_causal=causal)

        def forward() -> Any:
            with torch.no_grad():
                return (attend(q, k, v),)

        def backward() -> Any:
            out = attend(q, k, v)
            return (out.detach(), *torch.autograd.grad(out, (q, k, v), cotangent))

        for x in (q, k, v):
            x.requires_grad_(case.backward)
        return backward if case.backward else forward

    def wait(out: Any) -> Any:
        if device == "cuda":
            torch.cuda.synchronize()
        return out

    def results(out: Any) -> list[np.ndarray]:
        return [x.float().cpu().numpy().swapaxes(1, 2) for x in out]

    return Program(bind, wait, results, pairs * masked + vectors)


IMPLEMENTATIONS: dict[str, Callable[[Case], Program]] = {
    "blockwise": partial(_jattn, implementation="blockwise"),
    "reference": partial(_jattn, implementation="reference"),
    "jax.nn": partial(_jax_nn, implementation="xla"),
    "jax.nn:cudnn": partial(_jax_nn, implementation="cudnn"),
    "flax.nnx": _flax_nnx,
    "torch": _torch,
}
