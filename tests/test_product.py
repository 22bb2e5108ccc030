"""A product rounds what it multiplies, never what it returns, in every derivative."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracle import assert_close, assert_gradient_close, exact, jit, normal

from jattn.core.product import _multiply, product

SIZES = dict(t=7, s=11, h=5, d=13, b=2, c=3)
SCORES, VALUES = "th,hs->ts", "ts,ds->td"
LETTERS = [SCORES, VALUES, "td,ts->ds", "bth,hs->bts"]


def operands(letters, dtype, make=exact):
    """Three arrays: the operands, and what has the shape of the result."""
    names = letters.replace("->", ",").split(",")
    shapes = [[SIZES[a] for a in name] for name in names]
    return [jnp.asarray(make(n, *shape), dtype) for n, shape in enumerate(shapes)]


def einsum(letters, x, y):
    x, y = (np.asarray(a, np.float64) for a in (x, y))
    return np.einsum(letters, x, y)


def derivatives(fn, x, y, g):
    """Value, tangent, gradients, and those of both in turn."""

    def pull(x, y, g):
        return jax.vjp(fn, x, y)[1](g)

    back = pull(x, y, g)
    return (
        fn(x, y),
        jax.jvp(fn, (x, y), (x + 1, y - 2))[1],
        back,
        jax.jvp(pull, (x, y, g), (tangent_like(x), tangent_like(y), tangent_like(g)))[
            1
        ],
        jax.vjp(pull, x, y, g)[1](back),
    )


def tangent_like(x):
    return jnp.asarray(exact(5, *x.shape), x.dtype)


@pytest.mark.parametrize("letters", LETTERS)
def test_values_and_derivatives_of_two_orders_are_those_of_einsum(letters, x64):
    x, y, g = operands(letters, jnp.float64, normal)
    ours = functools.partial(product, letters, dtype=jnp.float64)
    theirs = functools.partial(jnp.einsum, letters)
    got, want = (
        jit(functools.partial(derivatives, f))(x, y, g) for f in (ours, theirs)
    )
    assert_close(got[0], einsum(letters, x, y), jnp.float64)
    jax.tree.map(lambda a, b: assert_gradient_close(a, b, jnp.float64), got, want)


@pytest.mark.parametrize("letters", [SCORES, VALUES])
def test_float32_is_multiplied_as_it_is(letters):
    x, y, _ = operands(letters, jnp.float32, normal)
    got = product(letters, x, y, jnp.float32)
    assert got.dtype == jnp.float32
    assert_close(got, einsum(letters, x, y))


@pytest.mark.parametrize("in_axes", [(0, None), (None, 1), (1, 2), (2, 0)])
@pytest.mark.parametrize("letters", [SCORES, VALUES, "bth,hs->bts"])
def test_it_may_be_mapped_over_either_operand_at_any_axis(letters, in_axes):
    names = letters.replace("->", ",").split(",")
    arrays = operands(letters, jnp.float32)
    for n, axis in enumerate(in_axes):
        if axis is not None:
            x = np.asarray(exact(n + 7, SIZES["c"], *arrays[n].shape))
            arrays[n] = jnp.asarray(np.moveaxis(x, 0, axis), jnp.float32)
            names[n] = names[n][:axis] + "c" + names[n][axis:]
    want = einsum(f"{names[0]},{names[1]}->c{names[2]}", *arrays[:2])
    one = functools.partial(product, letters, dtype=jnp.float32)
    assert_close(jax.vmap(one, in_axes)(*arrays[:2]), want)
    last = jax.vmap(one, in_axes, out_axes=-1)(*arrays[:2])
    assert_close(last, np.moveaxis(want, 0, -1))


def test_it_may_be_mapped_twice_and_its_gradient_too(x64):
    x, y, g = operands(SCORES, jnp.float64)
    xs, ys = (jnp.stack([a, 2 * a, 3 * a]) for a in (x, y))

    def gradients(fn):
        def pull(x, y):
            return jax.vjp(fn, x, y)[1](g)

        return jax.vmap(jax.vmap(pull, (None, 0)), (0, None))(xs, ys)

    got = gradients(functools.partial(product, SCORES, dtype=jnp.float64))
    want = gradients(functools.partial(jnp.einsum, SCORES))
    for a, b in zip(got, want, strict=True):
        assert a.shape == b.shape
        assert_close(a, b, jnp.float64)


def rounded(x):
    return x.astype(jnp.bfloat16).astype(jnp.float32)


@pytest.mark.parametrize("letters", LETTERS)
def test_off_a_cpu_every_product_rounds_both_operands_and_no_result(letters):
    x, y, _ = operands(letters, jnp.float32, normal)
    got = _multiply(x, y, letters=letters, dtype=jnp.bfloat16, precision=None)
    assert got.dtype == jnp.float32
    assert_close(got, einsum(letters, rounded(x), rounded(y)))
    for wrong in ((x, rounded(y)), (rounded(x), y)):
        assert np.abs(np.asarray(got) - einsum(letters, *wrong)).max() > 1e-3
    assert (rounded(got) != got).any()


@pytest.mark.parametrize("letters, narrow", [(SCORES, True), (VALUES, False)])
def test_a_cpu_rounds_the_operands_of_scores_only(letters, narrow):
    x, y, _ = operands(letters, jnp.float32, normal)
    got = product(letters, x, y, jnp.bfloat16)
    multiplied = (rounded(x), rounded(y)) if narrow else (x, y)
    assert_close(got, einsum(letters, *multiplied))


@pytest.mark.parametrize("letters", [SCORES, VALUES])
def test_gradients_of_narrow_products_are_wide_and_not_rounded(letters):
    x, y, g = operands(letters, jnp.float32)  # all without rounding
    first = functools.partial(product, letters, dtype=jnp.bfloat16)
    a, b, result = letters.replace("->", ",").split(",")
    dx, dy = jax.vjp(first, x, y)[1](g)
    assert dx.dtype == dy.dtype == jnp.float32
    assert_close(dx, einsum(f"{result},{b}->{a}", g, y))
    assert_close(dy, einsum(f"{result},{a}->{b}", g, x))
    dot = jax.jvp(first, (x, y), (tangent_like(x), tangent_like(y)))[1]
    assert dot.dtype == jnp.float32
    want = einsum(letters, tangent_like(x), y) + einsum(letters, x, tangent_like(y))
    assert_close(dot, want)


def test_narrow_operands_get_gradients_of_their_dtype():
    x, y, g = operands(SCORES, jnp.float32)
    x = x.astype(jnp.bfloat16)
    first = functools.partial(product, SCORES, dtype=jnp.bfloat16)
    dx, dy = jax.vjp(first, x, y)[1](g)
    assert (dx.dtype, dy.dtype) == (jnp.bfloat16, jnp.float32)


@pytest.mark.parametrize("platform, narrow", [("cuda", 7), ("tpu", 7), ("cpu", 3)])
def test_accelerators_multiply_narrow_in_every_derivative(platform, narrow):
    """One product forwards, two backwards, and four in the tangents of these."""
    x, y, g = operands(SCORES, jnp.float32)
    fn = functools.partial(product, SCORES, dtype=jnp.bfloat16)

    def pull(x, y):
        return fn(x, y), jax.vjp(fn, x, y)[1](g)

    def both(x, y):
        return jax.jvp(pull, (x, y), (x, y))

    traced = jax.jit(both).trace(x, y)
    text = traced.lower(lowering_platforms=(platform,)).as_text()
    products = re.findall(r"dot_general .* : \((.*)\) -> (.*)", text)
    assert len(products) == 7
    assert all(result.endswith("xf32>") for _, result in products)
    assert sum(operands.count("bf16") == 2 for operands, _ in products) == narrow
