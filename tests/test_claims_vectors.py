"""Dtypes, empty axes, higher derivatives and idle positions."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracle import assert_close, assert_same_bits, dense_jax, exact, jit
from paths import PATHS, with_gradients

import jattn
from jattn import masks, scores

each_path = pytest.mark.parametrize("path", PATHS)


@each_path
def test_float16_scores_beyond_its_range_win_and_an_empty_row_stays_empty(path):
    """The logits are 127279 and less, and the largest float16 is 65504."""
    sizes = np.array([300, 299, -300, 300], np.float16)[:, None, None]
    key = np.broadcast_to(sizes, (1, 4, 3, 2))
    query = np.full((1, 5, 3, 2), 300, np.float16)
    value = exact(1, 1, 4, 3, 2).astype(np.float16)
    cotangent = exact(2, 1, 5, 3, 2).astype(np.float16)
    allowed = np.broadcast_to(np.array([True, True, True, False]), (1, 3, 5, 4)).copy()
    allowed[:, :, 2] = False
    step = jit(functools.partial(with_gradients, PATHS[path]))
    got = step(query, key, value, cotangent, allowed)
    rows = np.array([0, 1, 3, 4])
    assert {x.dtype for x in got.values()} == {jnp.dtype(jnp.float16)}
    winner = np.broadcast_to(value[:, :1], (1, 4, 3, 2))
    np.testing.assert_array_equal(got["out"][:, rows], winner)
    assert not got["out"][:, 2].any()
    of_winner = cotangent[:, rows].astype(np.float32).sum(1)
    assert_close(got["value"][:, 0], of_winner, jnp.float16)
    assert not got["value"][:, 1:].any()
    assert not got["query"].any() and not got["key"].any()


@pytest.mark.parametrize("empty", ["B", "T", "S"])
@each_path
def test_an_empty_axis_gives_zeros_and_zero_gradients(path, empty):
    sizes = dict(B=2, T=5, S=7) | {empty: 0}
    query = np.ones((sizes["B"], sizes["T"], 3, 2), np.float32)
    key = np.ones((sizes["B"], sizes["S"], 3, 2), np.float32)
    cotangent = np.ones_like(query)
    step = jit(functools.partial(with_gradients, PATHS[path]))
    got = step(query, key, key, cotangent)
    assert got["out"].shape == got["query"].shape == query.shape
    assert got["key"].shape == got["value"].shape == key.shape
    assert not any(np.any(x) for x in got.values())


@pytest.mark.parametrize("path", ["dot_product_attention", "flax.linen"])
def test_a_map_of_hessian_products_over_masks_is_each_of_them(path, x64):
    query, tangent = exact(1, 2, 5, 3, 2), exact(2, 2, 5, 3, 2)
    key, value = exact(3, 2, 7, 3, 2), exact(4, 2, 7, 3, 2)
    allowed = np.random.default_rng(0).random((4, 2, 3, 5, 7)) < 0.5
    allowed[1, 0, :, 2] = False

    def products(fn, allowed):
        def gradient(query, key, value):
            def loss(query, key, value):
                return jnp.sin(fn(query, key, value, allowed)).sum()

            return jax.grad(loss, (0, 1, 2))(query, key, value)

        vectors = (query, key, value)
        return jax.jvp(gradient, vectors, (tangent, 2 * key, value - 1))[1]

    def dense(query, key, value, allowed):
        return dense_jax(query, key, value, allowed)[0]

    def of_all(fn):
        return jit(jax.vmap(functools.partial(products, fn)))(allowed)

    for got, want in zip(of_all(PATHS[path]), of_all(dense), strict=True):
        assert_close(got, want, jnp.float64)


@pytest.mark.parametrize("blocks", [None, (2, 3)])
def test_nothing_is_left_to_jaxs_promotion_of_dtypes(blocks):
    query, key = (jnp.zeros((2, n, 4, 3), jnp.bfloat16) for n in (5, 7))

    def loss(query, key, bias, slopes):
        out, stats = jattn.attention(
            query,
            key,
            key[..., :2],
            mask=masks.causal() & masks.lengths(np.array([2, 6])),
            score=(scores.soft_cap(2.0), scores.alibi(slopes)),
            bias=bias,
            scale=0.5,
            sinks=slopes,
            query_positions="end",
            dropout_rate=0.25,
            dropout_rng=jax.random.key(0),
            block_sizes=blocks,
            stats=True,
        )
        mean = jattn.attention(query, key, key, mask=masks.nothing(), empty_rows="mean")
        turned = jattn.rotary(out[..., :2], np.arange(5))
        return sum(x.astype(jnp.float32).sum() for x in (turned, mean, stats.lse))

    bias, slopes = np.zeros((1, 4, 5, 7), jnp.bfloat16), np.ones(4, np.float32)
    with jax.numpy_dtype_promotion("strict"):
        step = jax.grad(loss, (0, 1, 2, 3))
        gradients = jax.eval_shape(step, query, key, bias, slopes)
    assert [x.dtype for x in gradients] == [jnp.bfloat16] * 3 + [jnp.float32]


def test_positions_that_no_rule_asks_for_change_nothing():
    query, key = exact(1, 7, 2, 3), exact(2, 5, 2, 3)
    plain = jattn.attention(query, key, key)
    for places in (np.arange(5), np.array([9, -3, 4, 4, 0])):
        got = jattn.attention(query, key, key, key_positions=places)
        assert_same_bits(got, plain)
