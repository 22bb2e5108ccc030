"""Tokens in another order: who can tell, and what is concluded from it."""

from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from experiments.claims import order
from experiments.claims.order import CLAIM, EXACT, SEEN, Order
from experiments.config import Config, ConfigError, Data, Model, Optim
from experiments.evidence import FAILS, HOLDS, OPEN, PART
from experiments.page import Figure, Table
from experiments.studies import reordered
from experiments.studies.reordered import KINDS, MASKED, moved, past_shuffled

pytestmark = pytest.mark.usefixtures("quick_compiler")


def test_what_moved_is_the_largest_difference_over_the_rms():
    want = jnp.array([[3.0, -4.0], [0.0, 5.0]])
    got = want.at[1, 0].add(0.5)
    assert moved(got, want) == pytest.approx(0.5 / np.sqrt(50 / 4))
    assert moved(want, want) == 0


class Bag(nnx.Module):
    """Logits from how often each token came, and from the last one."""

    def __call__(self, tokens, *, scale):
        counts = jax.nn.one_hot(tokens, 6).cumsum(axis=1)
        return scale * counts + 2 * jax.nn.one_hot(tokens, 6)


class First(nnx.Module):
    """Logits from the first token alone."""

    def __call__(self, tokens, *, scale):
        first = jax.nn.one_hot(tokens[:, :1], 6)
        return scale * jnp.broadcast_to(first, (*tokens.shape, 6))


def trained(model):
    windows = np.random.default_rng(0).integers(6, size=(2, 3, 9), dtype=np.int32)
    windows[..., -1] = windows[..., 0]
    return SimpleNamespace(
        model=lambda: model,
        scale=jnp.float32(3),
        config=SimpleNamespace(seed=1),
        split=lambda: SimpleNamespace(validation=SimpleNamespace(tokens=windows)),
        windows=lambda tokens, wanted: tokens,
    )


def test_only_a_model_that_knows_order_suffers_if_the_past_is_shuffled():
    bag, first = (past_shuffled(trained(model), 54) for model in (Bag(), First()))
    assert bag["in order"] == bag["shuffled"] > 0
    assert abs(first["in order"] - first["shuffled"]) > 0.1


def results(told=None, blind=3e-6, cost=0.02, losses=(2.5, 2.4, 2.3, 2.2), seeds=3):
    """What runs would have left, with a little wobble that is paired."""
    runs = []
    for seed in range(seeds):
        moves = dict.fromkeys([*KINDS, "in place", MASKED], 3.0)
        run = {"seed": seed, "moved": moves | {"none": blind} | (told or {})}
        for place, (kind, loss) in enumerate(zip(KINDS, losses, strict=True)):
            loss = loss + 0.1 * seed + 1e-3 * seed * place
            paid = cost + 1e-3 * seed
            run[kind] = {"loss": loss, "in order": 2.0, "shuffled": 2.0 + paid}
        runs.append(run | {"bigram": 2.53})
    return {"runs": runs}


@pytest.mark.parametrize(
    ("numbers", "outcomes"),
    [
        (results(), [HOLDS] * 4),
        (results(blind=1.0), [PART, HOLDS, HOLDS, HOLDS]),
        (results(told={"rotary": 1e-6}), [PART, HOLDS, HOLDS, HOLDS]),
        (results(cost=-0.001), [HOLDS, OPEN, HOLDS, HOLDS]),
        (results(cost=-0.02), [HOLDS, FAILS, HOLDS, HOLDS]),
        (results(told={MASKED: 0.0}), [HOLDS] * 4),
        (results(losses=(2.5, 2.6, 2.3, 2.4)), [HOLDS, HOLDS, PART, PART]),
        (results(losses=(2.2, 2.3, 2.4, 2.5)), [HOLDS, HOLDS, FAILS, FAILS]),
        (results(seeds=1), [HOLDS, OPEN, OPEN, OPEN]),
    ],
)
def test_verdicts_follow_from_the_numbers(numbers, outcomes):
    found = CLAIM.answers(numbers)
    assert [answer.outcome for answer in found] == outcomes
    for place in (0, 1, 3):
        shown = found[place].sentence.startswith("These ")
        assert shown == (found[place].outcome != HOLDS)
    third = found[2]
    ends = {HOLDS: "lowers its loss.", PART: "no gain is shown."}
    assert third.sentence.endswith(ends.get(third.outcome, "no kind that is shown."))
    assert EXACT < SEEN < 1


def test_bounds_are_true_and_a_cost_is_told_in_proportion():
    first, second, *_ = CLAIM.answers(results(blind=3.46e-6, told={MASKED: 4.68}))
    assert "by 3.5e-06 of their rms at most, with positions by 3 at" in first.number
    assert "differ by 4.6 of the rms at least" in second.number
    assert "shuffling adds 1 % to its loss of the last token" in second.sentence


def test_there_are_two_figures_and_every_run():
    gained, shuffled, exact, losses = CLAIM.parts(results())
    assert isinstance(gained, Figure) and isinstance(shuffled, Figure)
    assert "sinusoidal" in gained.draw() and gained.draw() != shuffled.draw()
    assert isinstance(exact, Table) and len(exact.rows) == 3
    assert losses.rows[0] == [0, 2.5, 2.4, 2.3, 2.2, 2.53]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (Order(data=Data(context=1)), "data.context = 1 must be at least 3"),
        (Order(data=Data(context=2)), "data.context = 2 must be at least 3"),
        (Order(model=Model(d_model=5)), "model.d_model = 5 must be even: sinusoidal"),
        (Order(optim=Optim(accumulate=5)), "must divide data.batch"),
    ],
)
def test_what_does_not_fit_one_arm_is_refused_before_any_is_trained(settings, message):
    with pytest.raises(ConfigError, match=message):
        order.measure(settings, None)


def test_tokens_that_are_permuted_are_not_in_their_order(monkeypatch):
    """Of two tokens every other permutation leaves both where they are."""
    monkeypatch.setattr(reordered, "Encoder", lambda *args, **options: None)
    monkeypatch.setattr(reordered.nnx, "jit", lambda encoder: lambda x, **options: x)
    for seed in range(6):
        found = reordered.permuted(64, 2, seed)
        assert found["none"] == 0 and found["in place"] > 0


class Trainer:
    """A store that trains nothing, and computes every piece."""

    def __init__(self):
        self.configs = []

    def train(self, config):
        self.configs.append(config)
        return {"id": str(len(self.configs))}, None

    def piece(self, name, given, compute):
        return compute()


def test_arms_differ_in_their_positions_alone():
    store = Trainer()
    runs = [order.train(Order(), kind, 5, store) for kind in KINDS]
    assert runs[1].summary["id"] == "2" and runs[1].config is store.configs[1]
    for kind, config in zip(KINDS, store.configs, strict=True):
        model = replace(Config().model, positions=kind)
        assert config == replace(Config(), seed=5, model=model)


@pytest.mark.slow
def test_an_encoder_is_equivariant_without_positions_and_without_a_mask_alone(
    monkeypatch,
):
    model = trained(First())
    model.given, model.loss = {}, 2.0
    model.summary = {"baselines": {"bigram": 2.5}, "metrics": {"bytes_per_token": 3.0}}
    monkeypatch.setattr(order, "train", lambda *args: model)
    settings = Order(sequences=2, seeds=1, data=Data(context=11))
    found = order.measure(settings, Trainer())
    assert found["runs"][0]["bigram"] == 7.5  # nats per token, as the losses
    assert found["runs"][0]["rotary"] == {"loss": 2.0} | past_shuffled(model, 54)
    moved = found["runs"][0]["moved"]
    assert set(moved) == {*KINDS, "in place", MASKED}
    assert sum(x > SEEN for x in moved.values()) == 5 and moved["none"] < EXACT
    assert CLAIM.answers(found)[0].outcome == HOLDS
