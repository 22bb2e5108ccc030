"""Heads that are taken away: gates, orders and importance."""

import itertools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from oracle import assert_close, assert_gradient_close

from experiments.config import Model
from experiments.model import causal_lm, logit_scale
from experiments.step import token_losses
from experiments.studies.removal import alone, greedy, importance, in_order, losses

pytestmark = pytest.mark.usefixtures("quick_compiler")
SIZES = Model(layers=2, d_model=12, heads=3, d_k=4, d_v=5, d_ff=7)
SCALE = jnp.float32(logit_scale(SIZES))
WINDOWS = np.random.default_rng(0).integers(31, size=(2, 3, 12))


@pytest.fixture(scope="module")
def model():
    return causal_lm(SIZES, vocabulary=31, rngs=nnx.Rngs(3))


@partial(jax.jit, static_argnums=0)
@partial(jax.value_and_grad, argnums=1)
def loss_of(graph, params, window):
    """The loss of one window, and its derivatives by the parameters."""
    logits = nnx.merge(graph, params)(window[None, :-1], scale=SCALE)
    return token_losses(logits, window[None, 1:]).mean


def test_gates_take_away_the_first_of_an_order():
    gates = in_order([2, 0, 3, 1])
    assert gates.tolist() == [[1, 1, 0, 1], [0, 1, 0, 1], [0, 1, 0, 0], [0, 0, 0, 0]]
    assert alone(3).tolist() == [[0, 1, 1], [1, 0, 1], [1, 1, 0]]


def test_greedy_takes_the_cheapest_first_if_costs_add_up():
    price = np.array([3.0, 1.0, 4.0, 1.5])
    assert greedy(lambda gates: (1 - gates) @ price, 4) == [1, 3, 0, 2]


def test_greedy_sees_that_one_of_two_alike_is_needed():
    def loss(gates):
        either = np.maximum(gates[:, 0], gates[:, 1])
        return 5 * (1 - either) + 1 - gates[:, 2]

    # Alone, 0 and 1 are free; importance could not tell that only one of them is.
    assert greedy(loss, 3) == [0, 2, 1]


def test_a_gate_is_a_slice_of_the_output_projection(model):
    gates = np.ones((3, 6))
    gates[1, 1] = gates[2, 5] = 0
    gates[2, 0] = 0.5
    found = losses(model, SCALE, WINDOWS, gates)
    for factors, got in zip(gates.reshape(3, 2, 3), found, strict=True):
        cut = nnx.clone(model)
        for block, own in zip(cut.blocks, factors, strict=True):
            block.attention.out.kernel[...] *= own[:, None, None]
        split = nnx.split(cut, nnx.Param)
        want = [loss_of(*split, window)[0] for window in itertools.chain(*WINDOWS)]
        assert_close(got, np.mean(want))
    assert abs(found[1] - found[0]) > 1e-3


def test_importance_is_the_slope_of_each_window_along_the_slice(model):
    split = nnx.split(model, nnx.Param)
    want = np.zeros((2, 3))
    for window in itertools.chain(*WINDOWS):
        _, gradient = loss_of(*split, window)
        for layer, block in enumerate(model.blocks):
            kernel = block.attention.out.kernel[...]
            slope = gradient["blocks"][layer]["attention"]["out"]["kernel"][...]
            want[layer] += np.abs(np.sum(kernel * slope, axis=(1, 2)))
    want /= np.linalg.norm(want, axis=1, keepdims=True)
    assert_gradient_close(importance(model, SCALE, WINDOWS), want.ravel())
