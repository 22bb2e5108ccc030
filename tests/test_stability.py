"""Logits while a model is trained too fast, and what is concluded from them."""

import numpy as np
import pytest

from experiments.claims.on_text import TEXT, OnText
from experiments.claims.stability import (
    ARMS,
    CLAIM,
    MEASURES,
    Stability,
    growths,
    last,
    train,
)
from experiments.config import ConfigError
from experiments.data import load_corpus
from experiments.evidence import FAILS, HOLDS, OPEN, PART
from experiments.page import Figure, Table
from experiments.progress import Silent

pytestmark = pytest.mark.usefixtures("quick_compiler")

CAP = 7.0
END = {
    "plain": (4000.0, 0.01, 3.0),
    "qk-norm": (12.0, 0.3, 2.5),
    "soft cap": (CAP, 0.2, 2.6),
}


def run(logit, entropy, loss, looks=3, diverged=False):
    """What would be kept of a run that ends like this."""
    shares = np.linspace(0, 1, looks)
    seen = [
        [int(20 * i), dict(zip(MEASURES, values, strict=True))]
        for i, share in enumerate(shares)
        for values in [(2 * (logit / 2) ** share, entropy**share, share)]
    ]
    return {"seen": seen, "loss": loss, "diverged": diverged}


def results(**ends):
    runs = []
    for arm, (kind, rate) in ARMS.items():
        logit, entropy, loss = (END | ends)[kind] if rate == "high" else (5, 0.5, 2.4)
        for seed in range(3):
            wobble = 1 - 0.001 * seed * len(kind)
            made = run(logit * wobble, entropy * wobble, loss + 0.001 * seed)
            runs.append({"arm": arm, "seed": seed} | made)
    return {"cap": CAP, "rates": {"moderate": 0.01, "high": 0.1}, "runs": runs}


def test_growth_is_the_largest_logit_at_the_end_over_that_before_training():
    found = run(50.0, 0.1, 3.0)
    assert growths([found]) == pytest.approx([np.log10(25)])
    assert last(found, "entropy") == 0.1


def test_runs_that_diverge_before_they_are_looked_at_decide_nothing():
    found = results()
    for one in found["runs"]:
        if one["arm"].endswith("high"):
            one |= run(2.0, 0.9, 5.5, looks=1, diverged=True)
    answers = CLAIM.answers(found)
    assert [x.outcome for x in answers] == [OPEN, HOLDS, OPEN, OPEN]
    assert "unseen, as a run diverged at once" in answers[0].number


@pytest.mark.parametrize(
    ("ends", "outcomes"),
    [
        ({}, [HOLDS, HOLDS, HOLDS, HOLDS]),
        ({"qk-norm": (90.0, 0.005, 3.2)}, [PART, HOLDS, PART, PART]),
        ({"soft cap": (CAP + 0.1, 0.2, 3.2)}, [HOLDS, FAILS, PART, HOLDS]),
        ({"plain": (6.0, 0.9, 2.0)}, [PART, HOLDS, FAILS, FAILS]),
    ],
)
def test_verdicts_follow_from_the_numbers(ends, outcomes):
    found = CLAIM.answers(results(**ends))
    assert [answer.outcome for answer in found] == outcomes
    shown = [answer.sentence.startswith("In these runs") for answer in found]
    assert shown == [outcome == HOLDS for outcome in outcomes]


def test_growth_is_told_with_its_interval_which_is_that_of_its_logarithm():
    found = results()
    for one in found["runs"]:
        if one["arm"] == "plain, high":
            one |= run(2 * 10 ** (2 + one["seed"]), 0.01, 3.0)
    half_width = 4.302653 / 3**0.5  # of 2, 3 and 4
    low, high = 10 ** (3 - half_width), 10 ** (3 + half_width)
    told = f"grows 1000-fold (95 %: {low:.3g} to {high:.0f}) without it"
    assert told in CLAIM.answers(found)[0].number


def test_a_run_that_diverged_shortens_the_curves_and_is_told():
    found = results()
    for one in found["runs"]:
        if one["arm"] == "plain, high" and one["seed"] == 1:
            one |= run(9e9, 0.0, 5.5, looks=2, diverged=True)
    *figures, table = CLAIM.parts(found)
    assert isinstance(table, Table) and len(table.rows) == 3 * len(ARMS)
    assert [row[-1] for row in table.rows].count("diverged") == 1
    assert all(isinstance(x, Figure) and "qk-norm" in x.draw() for x in figures)
    assert "Diverged: 1 of 3 without." in CLAIM.answers(found)[2].number


def test_a_cap_that_no_score_rule_takes_is_refused():
    with pytest.raises(ConfigError, match="cap = 1e-12 must be from 1e-9 to 1e30"):
        CLAIM.measure(Stability(cap=1e-12), None)


def test_more_windows_than_there_are_cannot_be_looked_at():
    models = OnText(held_out=256)  # in windows of 32
    with pytest.raises(ConfigError, match="probed = 9 is more than the 8 windows"):
        CLAIM.measure(Stability(models=models, probed=9), None)


def test_a_high_rate_below_the_moderate_one_is_refused():
    with pytest.raises(ConfigError, match="moderate = 0.5 must be below high = 0.1"):
        CLAIM.measure(Stability(moderate=0.5), None)


@pytest.mark.slow
def test_a_small_run_is_looked_at_and_its_logits_stay_below_the_cap():
    models = OnText(layers=1, d_model=8, d_k=4, d_ff=8, steps=10, held_out=256)
    settings = Stability(models=models, cap=0.5, every=5)
    found = train(load_corpus(TEXT), settings, "soft cap, high", Silent())
    assert [update for update, _ in found["seen"]] == [0, 5, 10]
    assert all(0 < x["largest_logit"] <= 0.5 for _, x in found["seen"])
    assert found["loss"] > 0 and not found["diverged"]
