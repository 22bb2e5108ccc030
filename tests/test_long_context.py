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
from experiments.evidence import HOLDS, PART, t_interval
from experiments.progress import Silent
from experiments.theory import softmax_law, weight_of_one

pytestmark = pytest.mark.usefixtures("quick_compiler")

TINY = LongContext(lengths=(16, 256), draws=60, reference=8, head_dim=3)


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


def exactly(n, factor):
    weight = weight_of_one(n, factor, 5 * factor)
    return {
        "weight": weight,
        "entropy": softmax_law(n, factor).entropy,
        "weights": [weight - 1e-4, weight + 1e-4],
    }


def test_attention_spreads_and_log_n_slows_it():
    factors = {name: rule is not None for name, rule in SCORES.items()}
    rows = [
        {"n": n}
        | {x: exactly(n, log_n_factor(n, 64) ** on) for x, on in factors.items()}
        for n in (16, 64, 16384)
    ]
    spread, selective = CLAIM.answers({"reference": 64, "rows": rows})
    assert (spread.outcome, selective.outcome) == (HOLDS, PART)
