"""One relevant key among n: what is drawn agrees with the integrals."""

import numpy as np
import pytest

from experiments.claims.long_context import (
    CLAIM,
    SCORES,
    LongContext,
    drawn,
    log_n_factor,
    measure,
)
from experiments.claims.store import Store
from experiments.config import ConfigError
from experiments.evidence import HOLDS, OPEN, PART, t_interval
from experiments.progress import Silent
from experiments.theory import softmax_law, weight_of_one

pytestmark = pytest.mark.usefixtures("quick_compiler")

TINY = LongContext(lengths=(8, 16, 256), draws=60, reference=8, head_dim=3)


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    directory = tmp_path_factory.mktemp("long")
    return measure(TINY, Store(directory, directory / "models", Silent()))


@pytest.mark.parametrize("name", SCORES)
def test_drawn_weights_and_entropies_are_those_of_the_integrals(results, name):
    for row in results["rows"]:
        for exact, draws in (("weight", "weights"), ("entropy", "entropies")):
            values = np.array(row[name][draws])
            error = values.std(ddof=1) / np.sqrt(len(values))
            assert abs(values.mean() - row[name][exact]) < 4 * error


def test_the_weight_is_that_of_a_long_simulation():
    rng, n, sigma, logit = np.random.default_rng(0), 11, 1.3, 2.0
    z = rng.standard_normal((200_000, n))
    weights = 1 / (1 + np.exp(sigma * z - logit).sum(axis=1))
    error = weights.std() / np.sqrt(len(weights))
    assert abs(weight_of_one(n, sigma, logit) - weights.mean()) < 4 * error


def test_the_entropy_of_many_unit_normal_logits_is_log_n_less_a_half():
    assert abs(softmax_law(16384, 1.0).entropy - np.log(16384) + 0.5) < 1e-3


def test_the_factor_is_that_of_the_score_rule():
    weights, _ = drawn(TINY, 64, SCORES["times log n"](8))
    plain, _ = drawn(TINY, 64, None)
    assert log_n_factor(64, 8) == 2 and log_n_factor(5, 8) == 1
    assert t_interval(weights).mean > t_interval(plain).mean


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (dict(lengths=(256, 64)), "lengths = .256, 64. must be two or more.*ascend"),
        (dict(lengths=(64, 64, 256)), "must be two or more numbers that ascend"),
        (dict(lengths=(64,)), "must be two or more numbers that ascend"),
        (dict(lengths=(16, 256)), "must hold reference = 64 and a larger one"),
        (dict(lengths=(16, 64)), "must hold reference = 64 and a larger one"),
        (dict(lengths=(1, 64), reference=1), "reference = 1 must be at least 2"),
        (dict(logit=1e5), "logit = 100000 must be at most 10000"),
    ],
)
def test_lengths_that_tell_nothing_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        measure(LongContext(**settings), None)


def exactly(n, factor, logit=5.0):
    weight = weight_of_one(n, factor, logit * factor)
    return {
        "weight": weight,
        "entropy": softmax_law(n, factor).entropy,
        "weights": [weight - 1e-4, weight + 1e-4],
    }


def rows_of(lengths=(16, 64, 16384), **options):
    factors = {name: rule is not None for name, rule in SCORES.items()}
    rows = [
        {"n": n}
        | {
            name: exactly(n, log_n_factor(n, 64) ** on, **options)
            for name, on in factors.items()
        }
        for n in lengths
    ]
    return {"reference": 64, "rows": rows}


def test_attention_spreads_and_log_n_slows_it():
    spread, selective = CLAIM.answers(rows_of())
    assert (spread.outcome, selective.outcome) == (HOLDS, PART)
    assert "outweigh it by their number alone" in spread.sentence
    assert "slows the loss" in selective.sentence and "paired draws" in selective.number


def test_a_logit_that_outweighs_all_others_keeps_its_weight():
    spread, selective = CLAIM.answers(rows_of(logit=50.0))
    assert (spread.outcome, selective.outcome) == (PART, OPEN)
    assert "do not show how a relevant key is outweighed" in spread.sentence
    assert selective.sentence == "It is not shown to help here."


def test_a_factor_that_keeps_the_weight_is_said_to_keep_it():
    results = rows_of(lengths=(64, 256), logit=20.0)
    plain, scaled = (results["rows"][-1][name] for name in SCORES)
    scaled["weights"] = [x + 0.1 for x in plain["weights"]]
    answer = CLAIM.answers(results)[1]
    assert answer.outcome == HOLDS
    assert answer.sentence.startswith("The factor keeps the weight of a relevant key")


def test_exact_curves_are_told_from_measured_ones(results):
    figure, _ = CLAIM.parts(results)
    assert "Measured: means over draws with 95 % intervals; the other" in figure.caption
    assert "that of n keys without the relevant one" in figure.caption
    weight = CLAIM.answers(results)[0].number
    assert "goes from" in weight and "falls" not in weight
