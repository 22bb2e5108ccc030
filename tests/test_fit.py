"""Training from a loss and batches: repeatable, compiled once, honest about its end."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from oracle import assert_close, jit

from experiments import fit as module
from experiments.config import ConfigError, Optim
from experiments.fit import fit, mean_loss

pytestmark = pytest.mark.usefixtures("quick_compiler")

OPTIM = Optim(lr=1e-2, steps=7)


def batches(step):
    rng = np.random.default_rng(step)
    x = rng.standard_normal((5, 3), np.float32)
    return {"x": x, "y": x.sum(axis=1, keepdims=True)}


def loss(model, batch):
    return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)


def line(seed=0):
    return nnx.Linear(3, 1, rngs=nnx.Rngs(seed))


def numbers(model):
    return np.concatenate([np.ravel(x) for x in jax.tree.leaves(nnx.state(model))])


def test_the_same_arguments_give_the_same_bits_and_leave_the_model_as_it_was():
    model, kept = line(), numbers(line())
    first, again = (fit(loss, model, batches, OPTIM) for _ in range(2))
    assert np.array_equal(numbers(model), kept)
    assert np.array_equal(numbers(first.model), numbers(again.model))
    assert first.curve == again.curve and len(first.curve) == OPTIM.steps
    assert not first.diverged
    assert loss(first.model, batches(9)) < loss(model, batches(9))


def test_every_batch_is_asked_for_once_and_records_tell_when_they_were_made():
    asked = []

    def count(step):
        asked.append(step)
        return batches(step)

    fitted = fit(loss, line(), count, OPTIM, record=numbers, every=3)
    assert asked == list(range(7))
    assert [step for step, _ in fitted.records] == [3, 6, 7]
    assert np.array_equal(fitted.records[-1][1], numbers(fitted.model))
    assert not np.array_equal(fitted.records[0][1], numbers(fitted.model))


def test_models_and_rates_of_one_structure_share_one_compilation():
    fit(loss, line(), batches, OPTIM)
    before = module._step._cache_size()
    fit(loss, line(seed=1), batches, Optim(lr=1e-3, steps=2))
    assert module._step._cache_size() == before


def broken(step):
    return (
        batches(step) if step < 4 else {**batches(step), "y": np.full((5, 1), np.inf)}
    )


def test_a_loss_that_is_not_finite_is_an_error_that_names_the_learning_rate():
    text = "the loss is inf at update 5; lower the learning rate 0.01"
    with pytest.raises(ConfigError, match=text):
        fit(loss, line(), broken, OPTIM)


def test_or_a_result_whose_curve_ends_before_it():
    fitted = fit(loss, line(), broken, OPTIM, every=2, record=numbers, may_diverge=True)
    assert fitted.diverged and len(fitted.curve) == 4
    assert [step for step, _ in fitted.records] == [2, 4]


def test_batches_that_would_have_to_be_accumulated_are_refused():
    with pytest.raises(ConfigError, match=r"optim\.accumulate = 2 must be 1 here"):
        fit(loss, line(), batches, Optim(accumulate=2))


def test_the_mean_loss_counts_real_tokens_alone():
    rng = np.random.default_rng(0)
    logits = rng.standard_normal((2, 5, 3)).astype(np.float32)
    targets = rng.integers(3, size=(2, 5))
    real = np.array([[1, 1, 1, 0, 0], [0, 0, 0, 0, 1]], bool)
    p = np.exp(logits.astype(float))
    p /= p.sum(-1, keepdims=True)
    picked = np.take_along_axis(p, targets[..., None], -1)[..., 0]
    dirty = np.where(real[..., None], logits, np.nan)
    both = jit(jax.value_and_grad(mean_loss))
    value, slope = both(dirty, targets, real)
    assert_close(value, -np.log(picked)[real].mean())
    assert_close(slope, (p - np.eye(3)[targets]) * real[..., None] / real.sum())
    assert np.all(np.asarray(slope)[~real] == 0)
    value, slope = both(dirty, targets, np.zeros_like(real))
    assert value == 0 and np.all(slope == 0)
