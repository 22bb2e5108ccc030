"""What tokens count for, by attention, by a gradient and by experiment."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dense_blocks import filled
from flax import nnx
from oracle import assert_close, jit
from scipy import stats

import jattn
from experiments.__main__ import main
from experiments.claims.explain import CLAIM, SCORED, Explain
from experiments.config import ConfigError, Data, Model
from experiments.evidence import FAILS, HOLDS, OPEN, PART
from experiments.model import causal_lm
from experiments.page import Figure, Table
from experiments.studies.explaining import (
    AGREEMENTS,
    METHODS,
    OCCLUSIONS,
    OTHER,
    agreement,
    importance,
    occlusion,
    rank_correlation,
    same_first,
)

pytestmark = pytest.mark.usefixtures("quick_compiler")
SMALL = Model(layers=2, d_model=6, heads=2, d_k=4, d_v=3, d_ff=7, positions="none")
TOKENS = np.array([3, 1, 4, 1, 5], np.int32)
SCALE = jnp.float32(0.7)


@pytest.fixture(scope="module")
def model():
    return filled(lambda: causal_lm(SMALL, vocabulary=11, rngs=nnx.Rngs(0)))[0]


@pytest.fixture(scope="module")
def scores(model):
    return importance(model, TOKENS, SCALE)


@pytest.fixture(scope="module")
def log_probabilities(model):
    """Of the token after some."""
    last = jit(lambda tokens: jax.nn.log_softmax(model(tokens, scale=SCALE)[:, -1]))
    return lambda tokens: np.float64(last(np.asarray(tokens)[None])[0])


def divergence(p, q):
    return np.sum(np.exp(p) * (p - q))


@pytest.fixture(scope="module")
def by_blocks(model):
    """The weights of every layer, and the slopes as tokens grow, by the model's own."""

    def best(sizes):
        x, weights = model.embed(TOKENS[None]) * sizes, []
        for block in model.blocks:
            query, key, _ = block.attention.project(block.attention_norm(x))
            rules = dict(mask=jattn.masks.causal(), scale=SCALE)
            weights.append(jattn.attention_weights(query, key, **rules)[0].mean(axis=0))
            x = block(x, scale=SCALE)
        logits = model.head(model.norm(x))[0, -1]
        return jax.nn.log_softmax(logits).max(), weights

    slopes, weights = jit(jax.grad(best, has_aux=True))(jnp.ones((1, 5, 1)))
    return np.asarray(slopes[0, :, 0]), [np.float64(x) for x in weights]


def test_attention_and_rollout_are_rows_of_the_weights(scores, by_blocks):
    _, (first, last) = by_blocks
    assert_close(scores["attention"], last[-1, :-1])
    whole = (last + np.eye(5)) / 2 @ ((first + np.eye(5)) / 2)
    assert_close(scores["rollout"], whole[-1, :-1])


def test_gradient_times_input_is_the_slope_as_a_token_grows(scores, by_blocks):
    slopes = np.abs(by_blocks[0][:-1])
    assert_close(scores["gradient x input"], slopes)
    assert slopes.min() > 1e-5 and set(scores) == set(SCORED)


def test_occlusion_is_what_the_prediction_loses(model, log_probabilities):
    others = np.array([7, 1], np.int32)
    found = occlusion(model, TOKENS, others, SCALE)
    whole = log_probabilities(TOKENS)
    for place in range(4):
        # Without positions, what nothing may look at might as well not be there.
        without = log_probabilities(np.delete(TOKENS, place))
        assert_close(found["removed"][place], divergence(whole, without))
        swapped = [np.where(np.arange(5) == place, other, TOKENS) for other in others]
        moved = [divergence(whole, log_probabilities(tokens)) for tokens in swapped]
        assert_close(found["replaced"][place], np.mean(moved))
    assert found["replaced"].shape == (4,) and found["removed"].min() > 1e-4


def test_rank_correlation_is_scipys_with_ties_too():
    rng = np.random.default_rng(2)
    a, b = rng.integers(4, size=(2, 3, 7)).astype(float)
    want = [stats.spearmanr(x, y).statistic for x, y in zip(a, b, strict=True)]
    assert_close(rank_correlation(a, b), want)
    x = np.array([0.1, 5.0, 0.2])
    assert_close(rank_correlation(np.stack([x, -x]), np.exp(x)), [1, -1])
    assert same_first(np.stack([x, -x]), x**3).tolist() == [1, 0]


def test_each_kind_of_occlusion_is_held_against_the_other_and_not_itself():
    a, b, c = np.random.default_rng(3).random((3, 2, 5))
    found = agreement({"replaced": a, "removed": b, "attention": c})
    assert set(found["rank"]["removed"]) == {"attention", OTHER}
    assert found["rank"]["removed"][OTHER] == found["rank"]["replaced"][OTHER]
    assert found["rank"]["replaced"]["attention"] == rank_correlation(a, c).tolist()
    assert found["first"]["removed"]["attention"] == same_first(b, c).tolist()


USUAL = {
    "attention": (0.4, 0.8),
    "rollout": (0.6, 0.8),
    "gradient x input": (0.5, 0.7),
    OTHER: (0.7, 0.8),
    "nearness": (0.1, 0.9),
    "chance": (0.0, 0.0),
}


def results(wobble=0.01, **changes):
    """What two models would have left: (rank, first) of every method."""
    means = USUAL | {name.replace("_", " "): x for name, x in changes.items()}
    models = []
    for seed in (0, 1):
        found = {
            how: {
                kind: {
                    name: [both[i] + wobble * (n + 1) * j for j in (-1, 0, 1)]
                    for n, (name, both) in enumerate(means.items())
                }
                for kind in OCCLUSIONS
            }
            for i, how in enumerate(AGREEMENTS)
        }
        profile = {name: [0.5, 0.25, 0.2, 0.05] for name in (*OCCLUSIONS, *METHODS)}
        models.append({"seed": seed, "loss": 2.0, "profile": profile})
        models[-1]["agreement"] = found
    return {"ranked": 4, "models": models}


@pytest.mark.parametrize(
    ("numbers", "outcomes"),
    [
        (results(), [PART, PART, PART]),
        (results(attention=(0.9, 1.5)), [HOLDS, FAILS, FAILS]),
        (results(attention=(-0.4, 0.1)), [FAILS, HOLDS, HOLDS]),
        (results(wobble=9.0), [OPEN, OPEN, OPEN]),
        (results(rollout=(0.2, 1.5)), [PART, PART, PART]),
    ],
)
def test_verdicts_follow_from_the_numbers(numbers, outcomes):
    assert [answer.outcome for answer in CLAIM.answers(numbers)] == outcomes


def test_a_sentence_says_what_the_numbers_say():
    weights, gradient, _ = (x.sentence for x in CLAIM.answers(results()))
    assert "does rank tokens better than chance, does not name" in weights
    assert "and does not rank tokens as well as a second experiment" in weights
    assert "does come nearer" in gradient and "does not name more often" in gradient
    unsure = CLAIM.answers(results(wobble=9.0))[0].sentence
    assert unsure.count("is not shown to") == 3


def test_there_are_two_figures_a_row_for_each_method_and_one_for_each_model():
    bar, profile, table, models = CLAIM.parts(results(wobble=0.0))
    assert isinstance(bar, Figure) and "rollout, removed" in bar.draw()
    assert isinstance(profile, Figure) and "gradient x input" in profile.draw()
    assert isinstance(table, Table) and len(table.rows) == len(METHODS)
    name, *cells = table.rows[1]
    means = [cell.split(" ")[0] for cell in cells]
    assert (name, means) == ("rollout", ["0.600", "0.600", "0.800", "0.800"])
    assert_close(models.rows[1], [1, 2.0, 0.4, 0.6, 0.5, 0.7, 0.1, 0.0])


def test_a_window_with_nothing_to_rank_is_refused():
    with pytest.raises(ConfigError, match=r"data.context = 2 must be at least 3"):
        CLAIM.measure(Explain(data=Data(context=2)), None)


@pytest.mark.slow
def test_in_one_layer_rollout_ranks_as_attention_does(tmp_path):
    args = ["explain", "configs/explain.toml", "--model.layers", "1"]
    args += ["--model.d-model", "16", "--model.d-ff", "16", "--data.context", "8"]
    args += ["--optim.steps", "60", "--windows", "12", "--seeds", "1"]
    assert main([*args, "--out", str(tmp_path)]) == 0
    path = tmp_path / "explain" / "results.json"
    found = json.loads(path.read_text())["results"]
    # In one layer, what stands elsewhere than in the last place has half the weight.
    for kind in OCCLUSIONS:
        for model in found["models"]:
            rank = model["agreement"]["rank"][kind]
            assert_close(rank["rollout"], rank["attention"])
