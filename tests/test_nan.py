"""A NaN or an Inf reaches exactly what may see it; no bit of anything else changes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracle import assert_same_bits, exact, jit

import jattn
from jattn import masks

IDS = np.array([[1, 1, 1, 2, 2, 0, 0], [3, 3, 3, 3, 3, 4, 0]], np.int32)  # (B, T)
B, T, N, K, H, D = 2, 7, 4, 2, 3, 5
SAME = (IDS[:, :, None] == IDS[:, None, :]) & (IDS[:, None, :] != 0)
ALLOWED = SAME & np.tril(np.ones((T, T), bool))  # (B, T, S)

POISONS = [
    ("q", (0, 1, 2)),  # one head of one query
    ("q", (0, 6, 0)),  # a query that sees nothing
    ("k", (0, 1, 1)),  # one key head, seen by its later neighbours
    ("v", (1, 5, 0)),  # the only key of its document
    ("k", (1, 6, 0)),  # padding
    ("v", (0, 5, 1)),  # padding
]
"""The argument, and the batch row, place and head that are spoilt."""

SETTINGS = [
    pytest.param(algorithm, dtype, id=f"{algorithm}-{dtype.__name__}")
    for algorithm in ("reference", "blockwise")
    for dtype in (jnp.float32, jnp.bfloat16)
]


def inputs(dtype):
    shapes = dict(q=(B, T, N, H), k=(B, T, K, H), v=(B, T, K, D))
    return {
        n: exact(i, *shape).astype(dtype) for i, (n, shape) in enumerate(shapes.items())
    }


def spoilt(x, poison, number):
    name, (b, place, head) = poison
    array = x[name].copy()
    array[b, place, head, 1] = number
    return x | {name: array}


def touched(poison):
    """Which rows may see the poison, and which queries and keys these rows touch."""
    name, (b, place, head) = poison
    rows = np.zeros((B, T, N), bool)
    if name == "q":
        rows[b, place, head] = ALLOWED[b, place].any()
    else:
        group = slice(head * (N // K), (head + 1) * (N // K))
        rows[b, :, group] = ALLOWED[b, :, place, None]
    groups = rows.reshape(B, T, K, N // K).any(-1)
    keys = np.einsum("btk,bts->bsk", groups.astype(int), ALLOWED.astype(int)) > 0
    return dict(out=rows, lse=rows, q=rows, k=keys, v=keys)


def attend(algorithm, x):
    out, lse = jattn.attention(
        x["q"],
        x["k"],
        x["v"],
        mask=masks.causal() & masks.segments(IDS),
        implementation=algorithm,
        block_sizes=(3, 2) if algorithm == "blockwise" else None,
        return_lse=True,
    )
    return dict(out=out, lse=lse)


def like(x, seed):
    shapes = sorted(x.items())
    return {
        n: exact(seed + i, *a.shape).astype(a.dtype) for i, (n, a) in enumerate(shapes)
    }


def first_order(algorithm, x):
    """The results, their gradients at fixed cotangents, and their tangents."""
    fn = functools.partial(attend, algorithm)
    results, pull = jax.vjp(fn, x)
    tangents = jax.jvp(fn, (x,), (like(x, 20),))[1]
    return results, pull(like(results, 10))[0], tangents


def second_order(algorithm, x, power=1):
    """Hessian-vector products, forward over reverse and reverse over reverse.

    The loss is linear in the results, or a sum of powers, whose cotangents are then
    NaN where the results are.
    """
    t = like(x, 20)

    def gradient(x):
        results, pull = jax.vjp(functools.partial(attend, algorithm), x)
        cotangents = like(results, 10)
        cotangents["out"] = cotangents["out"] * results["out"] ** (power - 1)
        return pull(cotangents)[0]

    def slope(x):
        parts = jax.tree.map(lambda g, t: jnp.sum(g * t), gradient(x), t)
        return sum(jax.tree.leaves(parts))

    return jax.jvp(gradient, (x,), (t,))[1], jax.grad(slope)(x)


@functools.cache
def compiled(order, algorithm):
    return jit(functools.partial(order, algorithm))


def assert_confined(got, clean, where, name):
    """Non-finite in every entry of the rows in `where`; elsewhere the same bits."""
    got, clean = np.asarray(got), np.asarray(clean)
    finite = np.isfinite(got.astype(np.float32))
    clean = np.where(np.isneginf(clean.astype(np.float32)) & finite, 0, clean)
    rows = where if got.ndim == where.ndim else where[..., None]
    rows = np.broadcast_to(rows, got.shape)
    missed = np.argwhere(finite & rows)
    assert not missed.size, f"{name} is finite at {missed.tolist()}"
    assert_same_bits(np.where(rows, 0, got), np.where(rows, 0, clean), name)


def assert_all_confined(order, algorithm, dtype, poison, number):
    fn, x = compiled(order, algorithm), inputs(dtype)
    clean, got = fn(x), fn(spoilt(x, poison, number))
    where = touched(poison)
    for mode, (a, b) in enumerate(zip(got, clean, strict=True)):
        for name in a:
            assert_confined(a[name], b[name], where[name], f"{name} of {mode}")


@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("poison", POISONS, ids=str)
@pytest.mark.parametrize("algorithm, dtype", SETTINGS)
def test_results_gradients_and_tangents_are_spoilt_where_seen(
    algorithm, dtype, poison, number
):
    assert_all_confined(first_order, algorithm, dtype, poison, number)


@pytest.mark.parametrize("poison", POISONS, ids=str)
@pytest.mark.parametrize("algorithm, dtype", SETTINGS)
def test_hessian_vector_products_are_spoilt_where_seen(algorithm, dtype, poison):
    assert_all_confined(second_order, algorithm, dtype, poison, np.nan)


squares = functools.partial(second_order, power=2)


@pytest.mark.parametrize("poison", [POISONS[0], POISONS[2], POISONS[3]], ids=str)
@pytest.mark.parametrize("algorithm", ["reference", "blockwise"])
def test_cotangents_that_are_nan_in_spoilt_rows_stay_there(algorithm, poison):
    assert_all_confined(squares, algorithm, jnp.float32, poison, np.nan)


@pytest.mark.parametrize("number", [1e30, np.nan])
@pytest.mark.parametrize("algorithm, dtype", SETTINGS)
def test_garbage_in_unseen_keys_changes_no_bit(algorithm, dtype, number):
    x = inputs(dtype)
    garbage = {n: a.copy() for n, a in x.items()}
    for array in (garbage["k"], garbage["v"]):
        array[IDS == 0] = number
    for order in (first_order, second_order):
        got, clean = (compiled(order, algorithm)(arrays) for arrays in (garbage, x))
        jax.tree.map(assert_same_bits, got, clean)


@pytest.mark.parametrize("algorithm, dtype", SETTINGS)
def test_gradients_of_unseen_keys_and_values_are_exactly_zero(algorithm, dtype):
    x = inputs(dtype)
    x["k"][IDS == 0] = np.nan
    x["v"][IDS == 0] = np.inf
    _, gradients, _ = compiled(first_order, algorithm)(x)
    for hvp in (gradients, *compiled(second_order, algorithm)(x)):
        for name in ("q", "k", "v"):
            assert not np.asarray(hvp[name], np.float32)[IDS == 0].any(), name
            assert np.isfinite(np.asarray(hvp[name], np.float32)).all(), name


@pytest.mark.parametrize("algorithm", ["reference", "blockwise"])
def test_unwritten_slots_of_a_cache_are_as_if_they_were_not_there(algorithm):
    x = inputs(jnp.float32)
    k, v = x["k"].copy(), x["v"].copy()
    k[:, 5:], v[:, 5:] = np.nan, np.inf
    attend = functools.partial(jattn.attention, implementation=algorithm)
    out = attend(x["q"], k, v, mask=masks.lengths(5))
    want = attend(x["q"], k[:, :5], v[:, :5])
    np.testing.assert_allclose(out, want, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("algorithm", ["reference", "blockwise"])
def test_with_empty_rows_as_mean_a_nan_is_seen_by_empty_rows_of_its_head(algorithm):
    x = inputs(jnp.float32)
    x["v"][0, 5, 1] = np.nan
    out = jattn.attention(
        x["q"],
        x["k"],
        x["v"],
        mask=masks.segments(IDS),
        implementation=algorithm,
        empty_rows="mean",
    )
    spoilt_rows = ~np.isfinite(np.asarray(out)).all(-1)
    want = np.zeros((B, T, N), bool)
    want[0, 5:, 2:] = True
    np.testing.assert_array_equal(spoilt_rows, want)
