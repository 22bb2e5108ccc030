"""What `attention` would do with a call, and what that takes."""

import functools
import inspect
import math
from typing import Any

import jax
import jax.numpy as jnp

from jattn import execute
from jattn.choice import choose, spec_of
from jattn.core.boundary import check_vectors
from jattn.core.spec import AttentionSpec
from jattn.core.tile import Pairs, accumulator
from jattn.counting import is_traced, tiles_of
from jattn.dispatch import attention
from jattn.findings import Explanation
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
    tiles = tiles_of("explain", sizes, pairs, spec) if has_tiles else None
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
        pairs = jax.tree.map(lambda x: _described(x) if is_traced(x) else x, pairs)
        found.append((pairs, align))

    if not shapes:
        return prepare(call, **rules)
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
