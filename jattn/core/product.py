"""Products of matrices in a narrow dtype, with wide sums, in every derivative.

Matrix units multiply bfloat16 several times faster than float32. `lax.dot_general`
does so forwards, but the transpose of a product of narrow matrices with a wide result
multiplies wide by narrow, and rounds what it returns. Here both operands are rounded
to the narrow dtype whenever they are multiplied, and results are wide, so tangents
and gradients can be kept and summed wide.
"""

import functools
import string
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from jattn.core.softmax import accumulator
from jattn.core.varying import alike


def product(
    letters: str, x: jax.Array, y: jax.Array, dtype: Any, precision: Any = None
) -> jax.Array:
    """Multiplies and sums as `jnp.einsum(letters, x, y)`, for two operands.

    Args:
        letters: for example "th,hs->ts": each letter of the result stands in an
            operand, and each of an operand in the other or in the result.
        x: first operand, in float32 or a dtype that converts to it (float64 likewise).
        y: second operand.
        dtype: what is multiplied. On a CPU, where it would save nothing, operands of
            products that are not (T, S) are not rounded to it.
        precision: as in `jax.lax.dot_general`.

    Returns:
        float32, or float64 if `dtype` is.
    """
    return _product.bind(
        *alike((x, y)), letters=letters, dtype=jnp.dtype(dtype), precision=precision
    )


_product = Primitive("product")


def _multiply(
    x: jax.Array, y: jax.Array, *, letters: str, dtype: Any, precision: Any
) -> jax.Array:
    of_x, of_y, of_result = _names(letters)
    shared = [a for a in of_x if a in of_y]
    summed = [a for a in shared if a not in of_result]
    batch = [a for a in shared if a in of_result]

    def axes(letters: str, names: list[str]) -> list[int]:
        return [letters.index(a) for a in names]

    result = lax.dot_general(
        x.astype(dtype),
        y.astype(dtype),
        (
            (axes(of_x, summed), axes(of_y, summed)),
            (axes(of_x, batch), axes(of_y, batch)),
        ),
        precision=precision,
        preferred_element_type=accumulator(dtype),
    )
    return jnp.transpose(result, axes(_order(letters), list(of_result)))


def _multiply_on_cpu(
    x: jax.Array, y: jax.Array, *, letters: str, dtype: Any, precision: Any
) -> jax.Array:
    of_result = _names(letters)[2]
    # Of what has to be transposed XLA's CPU compiler does not do every narrow product.
    if not {"t", "s"} <= set(of_result) or _order(letters) != of_result:
        dtype = accumulator(dtype)
    return _multiply(x, y, letters=letters, dtype=dtype, precision=precision)


def _cotangent(
    aval: Any,
    wanted: str,
    cotangent: tuple[str, jax.Array],
    other: tuple[str, jax.Array],
    **how: Any,
) -> jax.Array:
    # In the order in which the result needs no transposition: a CPU is more than twice
    # as fast.
    alone = next(a for a in wanted if (a in other[0]) != (a in cotangent[0]))
    (first, x), (second, y) = sorted(
        (other, cotangent), key=lambda p: alone not in p[0]
    )
    return product(f"{first},{second}->{wanted}", x, y, **how).astype(aval.dtype)


def _of_first(g: jax.Array, x: Any, y: jax.Array, *, letters: str, **how: Any) -> Any:
    of_x, of_y, of_result = _names(letters)
    return _cotangent(x.aval, of_x, (of_result, g), (of_y, y), **how)


def _of_second(g: jax.Array, x: jax.Array, y: Any, *, letters: str, **how: Any) -> Any:
    of_x, of_y, of_result = _names(letters)
    return _cotangent(y.aval, of_y, (of_result, g), (of_x, x), **how)


def _batch(
    operands: tuple, axes: tuple, *, letters: str, **how: Any
) -> tuple[jax.Array, int]:
    of_x, of_y, of_result = _names(letters)
    new = next(a for a in string.ascii_uppercase if a not in letters)
    named = [
        names if axis is None else names[:axis] + new + names[axis:]
        for names, axis in zip((of_x, of_y), axes, strict=True)
    ]
    letters = f"{','.join(named)}->{new}{of_result}"
    return product(letters, *operands, **how), 0


def _names(letters: str) -> list[str]:
    return letters.replace("->", ",").split(",")


def _order(letters: str) -> str:
    """The axes of `lax.dot_general`'s result: of both, of the first, of the second."""
    of_x, of_y, of_result = _names(letters)
    batch = [a for a in of_x if a in of_y and a in of_result]
    rest = [a for a in of_x + of_y if (a in of_x) != (a in of_y)]
    return "".join(batch + rest)


@_product.def_impl
def _multiply_here(x: jax.Array, y: jax.Array, **how: Any) -> jax.Array:
    on_cpu = jax.default_backend() == "cpu"
    return (_multiply_on_cpu if on_cpu else _multiply)(x, y, **how)


@_product.def_abstract_eval
def _aval(*operands: Any, **how: Any) -> Any:
    return jax.make_jaxpr(functools.partial(_multiply, **how))(*operands).out_avals[0]


for _platform, _lowered in ((None, _multiply), ("cpu", _multiply_on_cpu)):
    mlir.register_lowering(
        _product, mlir.lower_fun(_lowered, multiple_results=False), _platform
    )
ad.defbilinear(_product, _of_first, _of_second)
batching.primitive_batchers[_product] = _batch
