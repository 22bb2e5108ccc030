"""What `attention` would do with a call, and what that takes."""

import dataclasses
import functools
import inspect
import math
from typing import Any

import jax
import jax.numpy as jnp

from jattn import execute
from jattn.algorithms.block_sizes import BLOCK_SIZES
from jattn.choice import arrange
from jattn.core.arguments import is_known
from jattn.core.boundary import check_vectors, one_of
from jattn.core.spec import AttentionSpec
from jattn.core.tile import Pairs, accumulator
from jattn.counting import Tiles, tiles_of
from jattn.dispatch import attention
from jattn.prepare import Call
from jattn.reports import shown_bytes

UNKNOWN = "known only at run time"


@dataclasses.dataclass(frozen=True)
class Explanation:
    """What `explain` found; as a string it is less than a screen.

    Attributes:
        shapes: of query, key, value and out.
        dtype: what the products of vectors multiply.
        backend: for which the choice was made.
        devices: how many of which kind it has here.
        implementation: the algorithm that was chosen.
        reasons: for every algorithm, why it was taken or not.
        tiles: what is visited; None for whole rows, and where there is no pair.
        computed: pairs in tiles that are computed, as a share of the T S pairs of a
            head; above 1 where tiles overlap at the edges. None if that is known only
            at run time.
        flops: of the matrix products, forward and forward + backward, for all heads
            and batch rows; likewise.
        temp_bytes: temporary memory of the compiled program, forward and forward +
            backward with respect to query, key and value, as its compiler plans it.
            None if it was not asked for, or the compiler does not say.
        matrix_bytes: what one matrix of logits (*B, N, T, S) would take.
        out_bytes: what the output takes.
    """

    shapes: dict[str, tuple[int, ...]]
    dtype: str
    backend: str
    devices: str
    implementation: str
    reasons: dict[str, str]
    tiles: Tiles | None
    computed: float | None
    flops: tuple[int, int] | None
    temp_bytes: tuple[int, int] | None
    matrix_bytes: int
    out_bytes: int

    def __str__(self) -> str:
        vectors = ("query", "key", "value")
        shapes = ", ".join(f"{name} {self.shapes[name]}" for name in vectors)
        lines = [("call", f"{shapes}, {self.dtype}")]
        lines += [("backend", f"{self.backend}, {self.devices}")]
        for name, reason in self.reasons.items():
            chosen = name == self.implementation
            lines += [(name, f"{'chosen' if chosen else 'not taken'}: {reason}")]
        if self.tiles is not None:
            lines += _lines_of_tiles(self.tiles)
        share = UNKNOWN if self.computed is None else f"{self.computed:.1%} of T x S"
        lines += [("computed", share)]
        if self.flops is not None:
            lines += [("FLOPs", "{:.3g}, {:.3g} with the gradient".format(*self.flops))]
        if self.temp_bytes is not None:
            forward, both = map(shown_bytes, self.temp_bytes)
            lines += [("temporary", f"{forward}, {both} with the gradient")]
        matrix = f"{shown_bytes(self.matrix_bytes)} for each matrix (*B, N, T, S)"
        lines += [("whole rows", matrix)]
        lines += [("output", f"{shown_bytes(self.out_bytes)}, {self.shapes['out']}")]
        return "\n".join(f"{name:<12}{text}" for name, text in lines)


def explain(
    query: Any,
    key: Any,
    value: Any = None,
    *,
    backend: str | None = None,
    memory: bool | None = None,
    **options: Any,
) -> Explanation:
    """What `attention` would do with these arguments, and what that takes.

    Nothing is computed with the vectors. The algorithm, its tiles and its program are
    found by the code by which `attention` finds them.

    Args:
        query: (*B, T, N, H), an array or a `jax.ShapeDtypeStruct`.
        key: (*B, S, K, H), likewise.
        value: (*B, S, K, D), likewise; by default like key.
        backend: "cpu", "gpu" or "tpu"; by default that of the process. Another one
            need not be at hand.
        memory: whether to compile the call and its gradient, which takes seconds, for
            what the compiler says about temporary memory. By default where the backend
            is that of the process, as it must be.
        **options: of `attention`: the mask, score rules, and so on. Their arrays may be
            ShapeDtypeStructs or traced too; which tiles they leave is then known only
            at run time. A mask of such arrays comes out of `jax.eval_shape`.

    Returns:
        An `Explanation`, to be read or printed.

    Raises:
        ValueError: `attention` would refuse the arguments.
        TypeError: likewise, or it has no such option.

    Example:
        >>> import jax, jattn
        >>> x = jax.ShapeDtypeStruct((2, 1024, 4, 64), "float32")
        >>> found = explain(x, x, x, mask=jattn.masks.causal(), memory=False)
        >>> found.implementation, found.reasons["reference"]
        ('blockwise', 'T=1024 and S=1024 are more than one tile of 256 x 256')
        >>> found.tiles.full, found.tiles.partial, found.tiles.empty
        (6, 4, 6)
    """
    sizes = check_vectors("explain", query, key, value)
    value = key if value is None else value
    shapes = {"query": query.shape, "key": key.shape, "value": value.shape}
    shapes["out"] = (*query.shape[:-1], value.shape[-1])
    dtype = jnp.result_type(query.dtype, key.dtype, value.dtype)
    options = _completed(query, key, value, options)
    here = jax.default_backend()
    backend = one_of(
        "explain",
        "backend",
        here if backend is None else backend,
        tuple(sorted({*BLOCK_SIZES, here})),
    )
    if memory and backend != here:
        raise ValueError(
            f"explain: memory needs the compiler of the backend, but got {backend=} "
            f"where that of the process is {here!r}. Leave memory out."
        )
    compiles = backend == here if memory is None else memory
    pairs, spec, reasons = _arranged(Call("explain", sizes, backend), dtype, options)
    heads = math.prod(sizes.batch) * sizes.N
    num_pairs = heads * sizes.T * sizes.S
    has_tiles = num_pairs and spec.implementation != "reference"
    tiles = tiles_of(sizes, pairs, spec) if has_tiles else None
    computed: float | None = float(num_pairs > 0)
    if tiles is not None:
        tile = math.prod(tiles.block_sizes)
        computed = tiles.live and tiles.live * tile / (sizes.T * sizes.S)
    arrays = (query, key, value), pairs, options["dropout_rng"]
    devices = jax.devices() if backend == here else []
    return Explanation(
        shapes={name: tuple(shape) for name, shape in shapes.items()},
        dtype=spec.dtype,
        backend=backend,
        devices=f"{len(devices)} x {devices[0].device_kind}" if devices else "not here",
        implementation=spec.implementation,
        reasons=reasons,
        tiles=tiles,
        computed=computed,
        flops=None if computed is None else _flops(shapes, spec, num_pairs * computed),
        temp_bytes=_temp_bytes(_described(arrays), spec) if compiles else None,
        matrix_bytes=num_pairs * accumulator(spec.dtype).itemsize,
        out_bytes=math.prod(shapes["out"]) * query.dtype.itemsize,
    )


def _lines_of_tiles(tiles: Tiles) -> list[tuple[str, str]]:
    (block_q, block_k), (rows, columns) = tiles.block_sizes, tiles.grid
    grid = f"{rows} x {columns} of {block_q} queries x {block_k} keys"
    if tiles.live is None or tiles.per_head is None:
        return [("tiles", f"{grid}; which are EMPTY is {UNKNOWN}")]
    counts = f"{tiles.full} FULL, {tiles.partial} PARTIAL, {tiles.empty} EMPTY"
    lines = [("tiles", grid), ("", counts)]
    if tiles.per_head != (tiles.live, tiles.live):
        fewest, most = tiles.per_head
        alone = f"{fewest}" if fewest == most else f"{fewest} to {most}"
        lines += [("", f"one head of one batch row needs {alone} of {tiles.live}")]
    return lines


def _completed(
    query: Any, key: Any, value: Any, options: dict[str, Any]
) -> dict[str, Any]:
    """All options of `attention`."""
    try:
        bound = inspect.signature(attention).bind(query, key, value, **options)
    except TypeError as error:
        raise TypeError(
            f"explain: options must be those of attention, but got {sorted(options)}: "
            f"{error}. See help(jattn.attention)."
        ) from None
    bound.apply_defaults()
    return dict(bound.kwargs)


def _arranged(
    call: Call, dtype: Any, options: dict[str, Any]
) -> tuple[Pairs, AttentionSpec, dict[str, str]]:
    """`arrange`, for which shapes stand in as traced arrays."""
    leaves, structure = jax.tree.flatten(options)
    shapes = [x for x in leaves if isinstance(x, jax.ShapeDtypeStruct)]
    found = []

    def with_traced(traced: list[Any]) -> None:
        rest = iter(traced)
        filled = [
            next(rest) if isinstance(x, jax.ShapeDtypeStruct) else x for x in leaves
        ]
        with jax.ensure_compile_time_eval():  # what is known stays known
            pairs, *others = arrange(
                call, dtype, **jax.tree.unflatten(structure, filled)
            )
        pairs = jax.tree.map(lambda x: x if is_known(x) else _described(x), pairs)
        found.append((pairs, *others))

    if not shapes:
        return arrange(call, dtype, **options)
    jax.eval_shape(with_traced, shapes)
    return found[0]


def _described(arrays: Any) -> Any:
    """The shapes and dtypes of arrays."""
    return jax.eval_shape(lambda x: x, arrays)


def _flops(
    shapes: dict[str, Any], spec: AttentionSpec, num_pairs: float
) -> tuple[int, int]:
    """Two products forward; backward four, and the logits anew in tiles."""
    head_dim, width = shapes["query"][-1], shapes["value"][-1]
    forward = 2 * num_pairs * (head_dim + width)
    anew = 2 * num_pairs * head_dim if spec.implementation != "reference" else 0
    return round(forward), round(3 * forward + anew)


def _temp_bytes(arrays: Any, spec: AttentionSpec) -> tuple[int, int] | None:
    """What the compiler plans for the call and for its gradient."""
    vectors, *rest = arrays

    def gradient(vectors: Any, out_gradient: Any, *rest: Any) -> Any:
        def out(vectors: Any) -> jax.Array:
            return execute.attend(*vectors, *rest, spec=spec)[0]

        return jax.vjp(out, vectors)[1](out_gradient)

    out = jax.eval_shape(functools.partial(execute.attend, spec=spec), *vectors, *rest)
    lowered = (
        execute.attend.lower(*vectors, *rest, spec=spec),
        jax.jit(gradient).lower(vectors, out[0], *rest),
    )
    planned = [program.compile().memory_analysis() for program in lowered]
    sizes = [plan.temp_size_in_bytes for plan in planned if plan is not None]
    return (sizes[0], sizes[1]) if len(sizes) == 2 else None
