"""Factors of the dot products: what makes an arm, and what follows from its losses."""

import dataclasses
import functools
from math import log

import pytest

from experiments.claims.on_text import TEXT, OnText, config_of, scale_of
from experiments.claims.scale_variants import (
    ARMS,
    CLAIM,
    FACTORS,
    OPTIMISERS,
    USUAL,
    ScaleVariants,
    best,
    capped,
    sensitivity,
    train,
)
from experiments.config import ConfigError
from experiments.data import load_corpus
from experiments.evidence import FAILS, HOLDS, OPEN, PART
from experiments.page import Figure, Table
from experiments.progress import Silent

pytestmark = pytest.mark.usefixtures("quick_compiler")


def test_an_arm_differs_from_the_usual_one_in_one_setting_of_the_model():
    usual, *others = (
        config_of(OnText(d_k=22), 7, "sgd", 0.5, **FACTORS[factor])
        for factor in (USUAL, *FACTORS)
    )
    fields = [field.name for field in dataclasses.fields(usual.model)]
    found = []
    for config in others:
        assert dataclasses.replace(config, model=usual.model) == usual
        pairs = [(x, getattr(config.model, x)) for x in fields]
        found.append([(x, y) for x, y in pairs if y != getattr(usual.model, x)])
    assert found == [
        [("scale", "none")],
        [],
        [("scale", "inv")],
        [("scale", "init")],
        [("qk_norm", True)],
        [("log_n", True)],
    ]
    scales = [float(scale_of(config)) for config in others]
    usual = pytest.approx(22**-0.5)
    assert scales == [1, usual, pytest.approx(1 / 22), 1, usual, usual]
    assert (others[0].seed, others[0].optim.name, others[0].optim.lr) == (7, "sgd", 0.5)


def test_sensitivity_is_the_mean_excess_over_the_best_rate_capped_at_no_training():
    run = {"initial": 5.0, "losses": [3.0, 2.5, 7.0, None]}
    assert capped(run) == [3.0, 2.5, 5.0, 5.0]
    assert sensitivity(run) == (0.5 + 0 + 2.5 + 2.5) / 4
    assert sensitivity({"initial": 5.0, "losses": [2.0]}) == 0


def test_the_best_rate_is_that_of_the_lowest_mean_over_seeds():
    losses = [[3.0, 2.9, None], [2.0, 2.2, 1.0], [2.5, 2.3, 2.0]]
    runs = [{"initial": 5.0, "losses": x} for x in losses]
    assert best(runs) == (1, [2.9, 2.2, 2.3])


def results(seeds=3, **losses):
    """What would be kept of arms whose best losses are these, with a little wobble."""
    levels = {"none": 2.9, USUAL: 2.6, "1/d_k": 2.5, "in the initial weights": 2.6}
    levels |= {"with qk-norm": 2.55, "with log n": 2.6} | losses
    runs = []
    for arm, (factor, optimiser) in ARMS.items():
        level = levels[factor]
        low = level[optimiser] if isinstance(level, dict) else level
        steep = 0.1 if factor == "with qk-norm" else 0.4
        for seed in range(seeds):
            at = low + 0.1 * seed + 0.01 * (seed == len(factor) % 3)
            run = {"initial": log(256), "losses": [at + steep, at, None]}
            runs.append({"arm": arm, "seed": seed} | run)
    counted = {"unigram": 3.3, "bigram": 2.4, "trigram": 2.0}
    rates = {"AdamW": [1e-3, 1e-2, 1e-1], "SGD": [0.1, 1.0, 10.0]}
    return {"d_k": 64, "rates": rates, "counted": counted, "runs": runs}


def outcomes(results):
    return [answer.outcome for answer in CLAIM.answers(results)]


def test_verdicts_follow_from_the_numbers():
    assert outcomes(results()) == [HOLDS, HOLDS, HOLDS, HOLDS, OPEN]
    apart = {
        "none": {"AdamW": 2.9, "SGD": 2.6},
        "1/d_k": {"AdamW": 2.5, "SGD": 2.8},
        "in the initial weights": 2.8,
        "with log n": 2.8,
    }
    found = results(**apart)
    assert outcomes(found) == [PART, FAILS, PART, HOLDS, FAILS]
    needed, *_, log_n = CLAIM.answers(found)
    assert needed.sentence.startswith("Under one optimiser these models end worse")
    assert log_n.sentence.startswith("That logits that grow like log n help")
    assert needed.sentence.endswith("neither that nor the opposite is shown.")
    inverse = CLAIM.answers(found)[2].sentence
    assert inverse.endswith("under the other the opposite is shown.")
    assert needed.number.startswith("Loss without the factor less loss with it: AdamW")


def test_rates_that_do_not_ascend_are_refused():
    for rates in ((0.1, 0.3, 0.2), (0.1, 0.1)):
        with pytest.raises(ConfigError, match="must ascend"):
            CLAIM.measure(ScaleVariants(sgd=rates), None)


def test_a_context_of_one_token_is_refused_before_anything_is_trained():
    with pytest.raises(ConfigError, match="data.context = 1 must be at least 2"):
        CLAIM.measure(ScaleVariants(models=OnText(context=1)), None)


def test_one_seed_resolves_nothing():
    assert outcomes(results(seeds=1)) == [OPEN] * 5


def test_there_is_a_panel_for_each_optimiser_and_a_row_for_each_arm():
    figure, table = CLAIM.parts(results())
    assert isinstance(figure, Figure) and isinstance(table, Table)
    drawn = figure.draw()
    assert all(name in drawn for name in (*OPTIMISERS, *FACTORS))
    assert "2.400" in figure.caption and len(table.rows) == len(ARMS)
    assert table.rows[0][:3] == ["AdamW", "none", "0.01"] and table.rows[0][-1] == 3


@pytest.mark.slow
def test_the_factor_alone_makes_a_difference_and_no_run_differs_from_itself():
    models = OnText(layers=1, d_model=8, d_k=4, d_ff=8, steps=6, held_out=256)
    settings = ScaleVariants(models=models, sgd=(0.3,))
    trained = functools.partial(train, load_corpus(TEXT), settings)
    arms = ("none, SGD", "1/sqrt(d_k), SGD", "none, SGD")
    none, usual, again = (trained(arm, Silent()) for arm in arms)
    assert none == again and none["losses"] != usual["losses"]
    assert 0 < none["losses"][0] < none["initial"]
