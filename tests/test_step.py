"""An update is that of the whole batch, in however many parts it is computed."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracle import assert_close, jit

from experiments.config import Config, ConfigError, Data, Model, Optim, from_dict
from experiments.fit import fit
from experiments.step import (
    Total,
    TrainState,
    gradient_of,
    initialise,
    learning_rates,
    optimiser,
    static_settings,
    token_losses,
    train_step,
    update,
)

SGD = Optim(name="sgd", b1=0.0, clip_norm=1e9)
SMALL = Config(
    data=Data(context=7, batch=6),
    model=Model(layers=1, d_model=8, heads=2, d_k=4, d_v=3, d_ff=10),
)
WINDOWS = np.random.default_rng(0).integers(256, size=(6, 8))
pytestmark = pytest.mark.usefixtures("quick_compiler")


def weighted(params, batch):
    """Losses w x of the real ones of some numbers."""
    losses = params["w"] * batch["x"]
    return Total(jnp.sum(losses, where=batch["real"]), jnp.sum(batch["real"]))


def updated(optim, batch, rate, **params):
    params = {name: jnp.float32(x) for name, x in params.items()}
    state = TrainState(params, optimiser(optim).init(params))
    step = jit(lambda s, b, r: update(weighted, optim, s, b, r))
    return step(state, batch, jnp.float32(rate))


@pytest.mark.parametrize("parts", [1, 2])
def test_a_token_counts_the_same_in_whichever_part_it_is(parts):
    batch = {
        "x": np.array([[1, 2, 3, 99], [10, 99, 99, 99]], np.float32),
        "real": np.array([[1, 1, 1, 0], [1, 0, 0, 0]], bool),
    }
    optim = dataclasses.replace(SGD, accumulate=parts)
    state, numbers = updated(optim, batch, 0.1, w=0.5)
    # 16 over 4 tokens; the mean of the parts' means would be 6.
    assert numbers["loss"] == 0.5 * 4 and numbers["gradient_norm"] == 4
    assert state.params["w"] == pytest.approx(0.5 - 0.1 * 4)


def test_a_batch_of_padding_alone_changes_nothing():
    batch = {"x": np.full((2, 3), 7.0, np.float32), "real": np.zeros((2, 3), bool)}
    optim = dataclasses.replace(SGD, accumulate=2)
    state, numbers = updated(optim, batch, 0.1, w=0.5)
    assert numbers["loss"] == numbers["gradient_norm"] == 0
    assert state.params["w"] == 0.5


def test_what_is_clipped_is_the_gradient_of_all_parts():
    # Gradients (3, 0) and (-1, 0): each clipped to .5 they would cancel.
    batch = {
        "x": np.array([[3, 0], [-1, 0]], np.float32),
        "real": np.ones((2, 1), bool),
    }
    optim = dataclasses.replace(SGD, accumulate=2, clip_norm=0.5)
    state, _ = updated(optim, batch, 1.0, w=np.zeros((1, 2)))
    np.testing.assert_allclose(state.params["w"], [[-0.5, 0]], rtol=1e-6)


def test_momentum_adds_up_gradients_that_fade():
    batch = {"x": np.ones((2, 1), np.float32), "real": np.ones((2, 1), bool)}
    optim = dataclasses.replace(SGD, b1=0.5)
    state, _ = updated(optim, batch, 0.1, w=0.0)
    gradient = {"w": jnp.float32(1)}
    rule = optimiser(optim)
    for want in (1.5, 1.75):
        step, moments = rule.update(gradient, state.moments, state.params)
        state = TrainState(state.params, moments)
        assert step["w"] == want


def test_the_language_model_learns_the_same_from_parts():
    graph, state = initialise(SMALL)
    numbers = jnp.float32(1e-2), jnp.float32(0.5)
    found = []
    for parts in (1, 3):
        optim = static_settings(dataclasses.replace(Optim(), accumulate=parts))
        found.append(train_step(graph, optim, state, WINDOWS, *numbers))
    (whole, first), (cut, second) = found
    assert_close(second["loss"], first["loss"])
    assert_close(second["gradient_norm"], first["gradient_norm"])
    # The mean of gradients; what Adam makes of it may turn with its last bit.
    means = [s.moments[1].mu for s in (whole, cut)]
    for got, want in zip(*map(jax.tree.leaves, means), strict=True):
        assert_close(got, want)


def test_the_parts_of_a_batch_are_one_program_with_a_loop():
    def loss(params, tokens):
        return token_losses(jnp.broadcast_to(params, (*tokens.shape, 3)), tokens)

    params, tokens = jnp.zeros(3), np.zeros((12, 5), np.int32)
    text = str(
        jax.make_jaxpr(gradient_of, static_argnums=(0, 3))(loss, params, tokens, 4)
    )
    assert text.count("scan[") == 1 and "length=4" in text
    assert "f32[12,5" not in text  # never more than a part


def test_bfloat16_is_of_the_computation_alone():
    model = dataclasses.replace(SMALL.model, dtype="bfloat16")
    losses = {}
    for config in (SMALL, dataclasses.replace(SMALL, model=model)):
        graph, state = initialise(config)
        numbers = jnp.float32(1e-2), jnp.float32(0.5)
        program = train_step.trace(
            graph, static_settings(Optim()), state, WINDOWS, *numbers
        )
        losses[config.model.dtype] = ("bf16" in str(program.jaxpr), program.out_info)
    assert [found for found, _ in losses.values()] == [False, True]
    state, _ = losses["bfloat16"][1]
    assert {str(x.dtype) for x in jax.tree.leaves(state) if x.ndim} == {"float32"}


@pytest.mark.slow
def test_bfloat16_learns_about_the_same():
    model = dataclasses.replace(SMALL.model, dtype="bfloat16")
    curves = []
    for config in (SMALL, dataclasses.replace(SMALL, model=model)):
        graph, state = initialise(config)
        curve = []
        for _ in range(40):
            numbers = jnp.float32(1e-2), jnp.float32(0.5)
            state, report = train_step(
                graph, static_settings(Optim()), state, WINDOWS, *numbers
            )
            curve.append(float(report["loss"]))
        curves.append(curve)
    exact, rounded = map(np.array, curves)
    assert exact[-1] < exact[0] - 1
    assert 0 < np.abs(exact - rounded).max() < 0.05


def test_warm_up_begins_above_0_reaches_the_peak_and_the_cosine_ends_above_0():
    rates = learning_rates(Optim(lr=1.0, steps=10, warmup_fraction=0.4))
    want = [0.25, 0.5, 0.75, 1.0]
    want += [(1 + np.cos(np.pi * t / 7)) / 2 for t in range(1, 7)]
    np.testing.assert_allclose(rates, want, rtol=1e-6)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"optim": {"accumulate": 3}}, "accumulate = 3 must divide data.batch = 16"),
        (
            {"model": {"positions": "sinusoidal", "d_model": 9}},
            "model.d_model = 9 must be even",
        ),
        ({"data": {"context": 1}}, "data.context = 1 must be at least 2"),
    ],
)
def test_settings_that_do_not_fit_each_other_are_refused(table, message):
    with pytest.raises(ConfigError, match=message):
        from_dict(table)


def test_a_mean_that_counts_no_tokens_is_not_accumulated():
    with pytest.raises(ConfigError, match="optim.accumulate = 2 must be 1 here"):
        fit(None, None, None, Optim(accumulate=2))
