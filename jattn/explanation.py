"""What `attention` would do with a call, and what that takes."""

import functools
import inspect
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jattn import execute
from jattn.algorithms.block_sizes import plan_of
from jattn.choice import choose, spec_of
from jattn.core.boundary import Sizes, check_vectors, positions_beside
from jattn.core.heads import over_heads
from jattn.core.letters import take
from jattn.core.plan import Grid, make_plan
from jattn.core.spec import AttentionSpec
from jattn.core.tile import Pairs, accumulator
from jattn.dispatch import attention
from jattn.findings import Explanation, Tiles
from jattn.prepare import Call, prepare


def explain(
    query: Any, key: Any, value: Any = None, *, memory: bool = True, **options: Any
) -> Explanation:
    """What `attention` would do with these arguments, and what that takes.

    Nothing is computed with the vectors. The algorithm, its tiles and its program are
    found by the code by which `attention` finds them.

    Args:
        query: (*B, T, N, H), an array or a `jax.ShapeDtypeStruct`.
        key: (*B, S, K, H), likewise.
        value: (*B, S, K, D), likewise; by default like key.
        memory: whether to compile the call and its gradient, which takes seconds, for
            what the compiler says about temporary memory.
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
    call = Call("explain", sizes)
    pairs, spec, reasons = _arranged(call, query, key, value, options)
    heads = math.prod(sizes.batch) * sizes.N
    num_pairs = heads * sizes.T * sizes.S
    has_tiles = num_pairs and spec.implementation == "blockwise"
    tiles = _tiles(sizes, pairs, spec) if has_tiles else None
    computed: float | None = float(num_pairs > 0)
    if tiles is not None:
        tile = math.prod(tiles.block_sizes)
        computed = tiles.live and tiles.live * tile / (sizes.T * sizes.S)
    arrays = (query, key, value), pairs, options.get("dropout_rng")
    devices = jax.devices()
    return Explanation(
        shapes={name: tuple(shape) for name, shape in shapes.items()},
        dtype=spec.dtype,
        backend=jax.default_backend(),
        devices=f"{len(devices)} x {devices[0].device_kind}",
        implementation=spec.implementation,
        reasons=reasons,
        tiles=tiles,
        computed=computed,
        flops=None if computed is None else _flops(shapes, spec, num_pairs * computed),
        temp_bytes=_temp_bytes(_described(arrays), spec) if memory else None,
        matrix_bytes=num_pairs * accumulator(spec.dtype).itemsize,
        out_bytes=math.prod(shapes["out"]) * query.dtype.itemsize,
    )


RULES = tuple(inspect.signature(prepare).parameters)[1:]
"""The options that become rules."""


def _arranged(
    call: Call, query: Any, key: Any, value: Any, options: dict[str, Any]
) -> tuple[Pairs, AttentionSpec, dict[str, str]]:
    """The rules, the spec and the reasons of the call, as `attention` makes them."""
    try:
        bound = inspect.signature(attention).bind(query, key, value, **options)
    except TypeError as error:
        raise TypeError(
            f"explain: options must be those of attention, but {error}. See "
            "help(jattn.attention)."
        ) from None
    bound.apply_defaults()
    given = dict(bound.kwargs)
    rules = {name: given.pop(name) for name in RULES}
    pairs, align = _prepared(call, rules)
    choice = choose(call, given.pop("implementation"), given["block_sizes"])
    dtype = jnp.result_type(query.dtype, key.dtype, value.dtype)
    given |= dict(dtype=dtype, align=align, sinks=rules["sinks"])
    return pairs, spec_of(call, choice, **given), choice.reasons


def _prepared(call: Call, rules: dict[str, Any]) -> tuple[Pairs, str]:
    """`prepare`, for which shapes stand in as traced arrays."""
    leaves, structure = jax.tree.flatten(rules)
    shapes = [x for x in leaves if isinstance(x, jax.ShapeDtypeStruct)]
    found = []

    def with_traced(traced: list[Any]) -> None:
        rest = iter(traced)
        filled = [
            next(rest) if isinstance(x, jax.ShapeDtypeStruct) else x for x in leaves
        ]
        with jax.ensure_compile_time_eval():  # what is known stays known
            pairs, align = prepare(call, **jax.tree.unflatten(structure, filled))
        pairs = jax.tree.map(lambda x: _described(x) if _is_traced(x) else x, pairs)
        found.append((pairs, align))

    if not shapes:
        return prepare(call, **rules)
    jax.eval_shape(with_traced, shapes)
    return found[0]


def _is_traced(x: Any) -> bool:
    return isinstance(x, (jax.core.Tracer, jax.ShapeDtypeStruct))


def _described(arrays: Any) -> Any:
    """The shapes and dtypes of arrays."""
    return jax.eval_shape(lambda x: x, arrays)


def _tiles(sizes: Sizes, pairs: Pairs, spec: AttentionSpec) -> Tiles:
    """The tiles of `blockwise`, by its own plan."""
    # What else the rules hold makes no difference to a plan.
    given = pairs.mask, pairs.q_pos, pairs.k_pos
    data = [] if pairs.mask is None else jax.tree.leaves(given)
    block_q, block_k = spec.block_sizes
    grid = Grid(sizes.T, sizes.S, min(block_q, sizes.T), min(block_k, sizes.S))
    if any(map(_is_traced, data)):
        return Tiles(grid[2:], (grid.num_rows, grid.num_columns))
    q_pos = positions_beside("explain", None, sizes.T, sizes.S, spec.align)
    placed = Pairs(
        None,
        (),
        pairs.mask,
        q_pos if pairs.q_pos is None else pairs.q_pos,
        np.arange(sizes.S, dtype=np.int32) if pairs.k_pos is None else pairs.k_pos,
    )
    bound = placed.bind(sizes.T, sizes.S, sizes.N)
    if data or jax.tree.leaves(bound.mask):
        with jax.ensure_compile_time_eval():
            found = _counts(placed, sizes=sizes, grid=grid)
            (full, live), alone = (np.asarray(x).tolist() for x in found)
        per_head = min(alone), max(alone)
    else:
        grid, plan = plan_of(bound, sizes.T, sizes.S, spec)
        full, live = int(plan.full.sum()), int(plan.live.sum())
        per_head = live, live
    shape = grid.num_rows, grid.num_columns
    return Tiles(grid[2:], shape, full, live, per_head)


@functools.partial(jax.jit, static_argnames=("sizes", "grid"))
def _counts(pairs: Pairs, *, sizes: Sizes, grid: Grid) -> tuple[jax.Array, jax.Array]:
    """FULL and live tiles of the plan for all, and live tiles of each by itself."""

    def counts(pairs: Pairs) -> jax.Array:
        # Row by row, since a plan of 10^8 tiles is larger than what it is to explain.
        def in_row(i: jax.Array) -> jax.Array:
            row = take(pairs, "T", grid.row_start(i), grid.block_q)
            plan = make_plan(row, grid._replace(num_queries=grid.block_q))
            return jnp.asarray([plan.full[0], plan.live[0]])

        return jax.lax.map(in_row, np.arange(grid.num_rows)).sum(axis=0)

    def over(fn: Any) -> jax.Array:
        q = jnp.zeros((*sizes.batch, sizes.T, sizes.N, 1))
        k = jnp.zeros((*sizes.batch, sizes.S, sizes.K, 1))
        of_head = lambda q, k, pairs: fn(pairs)  # noqa: E731
        return over_heads(of_head, (q,), (k,), pairs, "start", {}).reshape(-1, 2)

    def by_itself(pairs: Pairs) -> jax.Array:
        # In a map that is a loop, each head and batch row has a plan of its own.
        leaves, structure = jax.tree.flatten(pairs)
        of = jax.custom_batching.sequential_vmap(
            lambda *leaves: counts(jax.tree.unflatten(structure, leaves))
        )
        return of(*leaves)

    return over(counts)[0], over(by_itself)[:, 1]


def _flops(
    shapes: dict[str, Any], spec: AttentionSpec, num_pairs: float
) -> tuple[int, int]:
    """Two products forward; backward four, and the logits anew in tiles."""
    head_dim, width = shapes["query"][-1], shapes["value"][-1]
    forward = 2 * num_pairs * (head_dim + width)
    anew = 2 * num_pairs * head_dim if spec.implementation == "blockwise" else 0
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
