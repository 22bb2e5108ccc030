"""The story of 1/sqrt(d_k): gaps between arms, and the rules of its steps."""

from dataclasses import replace

import numpy as np
import pytest

from experiments.evidence import FAILS, HOLDS, OPEN, PART, describe
from experiments.results import Results, Run, best_of, initial_mean
from experiments.story import (
    best_gaps,
    combine,
    gaps,
    paradox,
    typical_rows,
    verdicts,
)

MEASURES = (
    "row_norm_median",
    "row_norm_rms",
    "entropy",
    "wq_gradient_norm",
    "wk_gradient_norm",
)


def run(scale="none", d_k=16, lr=1e-3, seed=0, loss=2.0, label="", **initial):
    return Run(
        id=f"{label}{scale}{d_k}{lr}{seed}",
        label=label,
        scale=scale,
        d_k=d_k,
        lr=lr,
        seed=seed,
        step=10,
        loss=loss,
        reason="" if loss is not None else "loss is nan at step 10",
        initial=dict.fromkeys(MEASURES, 1.0) | initial,
        final={},
        curve=[],
        baselines={},
        bytes_fitted=1000,
        bytes_read=100,
    )


def pairs(*differences, d_k=16, lr=1e-3):
    """Runs of both arms whose losses differ by these, one seed each."""
    return [
        run(scale, d_k=d_k, lr=lr, seed=seed, loss=2 + seed + extra)
        for seed, difference in enumerate(differences)
        for scale, extra in (("sqrt", 0.0), ("none", difference))
    ]


def outcomes(runs, coord=None):
    results = Results({}, {}, coord or {}, list(runs), [], [])
    names = ("logits", "saturation", "rows", "weights", "training")
    verdict = dict(zip(names, verdicts(results), strict=True))
    return {name: v.outcome for name, v in verdict.items()}


def arms(measure, none, sqrt):
    """Both arms at d_k 16 and 256 with these values of a measure."""
    return [
        run(scale, d_k=d_k, **{measure: value})
        for scale, values in (("none", none), ("sqrt", sqrt))
        for d_k, value in zip((16, 256), values, strict=True)
    ]


def test_one_seed_is_not_resolved():
    (gap,) = gaps(pairs(0.4))
    assert gap.interval.half_width is None
    assert gap.interval.sign is None
    assert "one seed: not resolved" in describe(gap.interval)
    assert outcomes(pairs(0.4))["training"] == OPEN


def test_an_interval_around_zero_is_not_resolved():
    runs = pairs(0.3, -0.1, 0.1)
    assert "not resolved" in describe(gaps(runs)[0].interval)
    assert outcomes(runs)["training"] == OPEN


@pytest.mark.parametrize(("sign", "outcome"), [(1, HOLDS), (-1, FAILS)])
def test_a_resolved_gap_decides_by_its_sign(sign, outcome):
    runs = pairs(sign * 0.1, sign * 0.11, sign * 0.12)
    assert outcomes(runs)["training"] == outcome


def test_a_gap_resolved_at_one_size_only_holds_in_part():
    runs = pairs(0.1, 0.11, 0.12) + pairs(0.1, -0.1, 0.0, d_k=64)
    assert outcomes(runs)["training"] == PART


def test_a_size_at_which_an_arm_always_diverged_stays_undecided():
    runs = pairs(0.1, 0.11, 0.12) + [
        run("none", d_k=64, loss=None),
        run("sqrt", d_k=64),
    ]
    assert outcomes(runs)["training"] == PART


def test_gaps_are_paired_by_seed():
    runs = pairs(0.10, 0.11, 0.12)  # seeds differ by 1.0, far more than the arms
    gap = gaps(runs[::-1])[0].interval
    np.testing.assert_allclose(gap.mean, 0.11)
    assert gap.half_width < 0.03


def test_a_seed_of_one_arm_only_is_in_no_pair():
    (gap,) = gaps([*pairs(0.1, 0.2), run("none", seed=7, loss=9.0)])
    assert gap.interval.n == 2


def test_a_diverged_run_is_in_no_pair_and_its_rate_is_not_the_best():
    runs = [*pairs(0.1, 0.2), *pairs(-1.0, lr=1e-2), run(lr=1e-2, seed=1, loss=None)]
    (gap,) = best_gaps(runs)
    assert {r.lr for r in gap.none} == {1e-3}
    assert gaps(runs)[1].interval.n == 1


def test_two_runs_of_a_seed_count_as_one_with_their_mean():
    twins = [run("none", loss=2.2), run("none", loss=2.6), run("none", seed=1)]
    (gap,) = gaps([*twins, run("sqrt"), run("sqrt", seed=1)])
    assert gap.interval.n == 2
    np.testing.assert_allclose(gap.interval.mean, 0.2)  # of .4 and 0
    assert best_of(twins) == twins
    (gap,) = gaps([*twins, run("none", loss=None), run("sqrt"), run("sqrt", seed=1)])
    assert gap.interval.n == 1


def test_a_rate_without_all_seeds_is_not_the_best():
    arm = [run(seed=0), run(seed=1), run(lr=1e-2, seed=0, loss=0.5)]
    assert {r.lr for r in best_of(arm)} == {1e-3}


def test_each_arm_is_taken_at_its_own_best_rate():
    runs = [
        run(scale, lr=lr, seed=seed, loss=loss + 0.01 * seed)
        for seed in range(2)
        for scale, lr, loss in (
            ("none", 1e-3, 2.4),
            ("none", 1e-2, 2.6),
            ("sqrt", 1e-3, 2.5),
            ("sqrt", 1e-2, 2.2),
        )
    ]
    (gap,) = best_gaps(runs)
    assert (gap.none[0].lr, gap.sqrt[0].lr) == (1e-3, 1e-2)
    np.testing.assert_allclose(gap.interval.mean, 0.2)
    assert outcomes(runs)["training"] == HOLDS  # at 1e-3 alone sqrt loses


def test_runs_that_differ_otherwise_are_not_paired():
    runs = [run("none", label="init gpt2"), run("sqrt", label="init lecun")]
    assert gaps(runs) == best_gaps(runs) == []


def test_one_arm_alone_decides_nothing_about_training():
    assert outcomes([run("none"), run("none", seed=1)])["training"] == OPEN


@pytest.mark.parametrize(
    ("none", "sqrt", "outcome"),
    [
        ((0.06, 0.0001), (0.04, 0.04), HOLDS),
        ((0.06, 0.05), (0.04, 0.04), FAILS),
        ((0.06, 0.02), (0.03, 0.03), PART),  # falls, but not below half the other
        ((0.02, 0.015), (0.04, 0.04), PART),  # below half the other, but hardly falls
    ],
)
def test_rows_die_if_the_median_falls_by_half_twice_over(none, sqrt, outcome):
    assert outcomes(arms("row_norm_median", none, sqrt))["rows"] == outcome


def test_saturation_follows_the_entropy():
    assert outcomes(arms("entropy", (0.4, 0.05), (0.9, 0.9)))["saturation"] == HOLDS
    assert outcomes(arms("entropy", (0.9, 0.9), (0.9, 0.9)))["saturation"] == FAILS


def test_growing_weight_gradients_do_not_vanish():
    grow = arms("wq_gradient_norm", (0.26, 3.75), (0.09, 0.09))
    assert outcomes(grow)["weights"] == FAILS


def test_weight_gradients_vanish_only_if_both_do():
    runs = arms("wq_gradient_norm", (0.4, 0.01), (0.4, 0.4))
    assert outcomes(runs)["weights"] == PART
    both = [
        run(r.scale, d_k=r.d_k, **{m: r.initial["wq_gradient_norm"] for m in MEASURES})
        for r in runs
    ]
    assert outcomes(both)["weights"] == HOLDS


def test_one_size_cannot_show_a_fall():
    runs = [run("none", row_norm_median=0.01), run("sqrt", row_norm_median=0.04)]
    assert outcomes(runs)["rows"] == PART
    assert outcomes(runs[:1])["rows"] == OPEN


@pytest.mark.parametrize(
    ("none", "sqrt", "outcome"),
    [(0.48, 0.01, HOLDS), (0.48, 0.3, PART), (0.1, 0.3, FAILS), (None, None, OPEN)],
)
def test_logits_grow_by_the_slope_before_training(none, sqrt, outcome):
    scales = {"none": {"slope": [9.0, none]}, "sqrt": {"slope": [9.0, sqrt]}}
    coord = {"steps": [4, 0], "d_k": [16, 64], "scales": scales}
    assert outcomes([], coord)["logits"] == outcome


@pytest.mark.parametrize("sqrt", [0.0, 0.3])
def test_nothing_is_said_of_logits_without_the_factor_if_none_ran(sqrt):
    coord = {"steps": [0], "d_k": [16, 64], "scales": {"sqrt": {"slope": [sqrt]}}}
    assert outcomes([], coord)["logits"] == OPEN


def test_nothing_is_said_of_training_without_the_factor_if_none_ran():
    runs = [run("sqrt", d_k=d_k, seed=seed) for d_k in (16, 256) for seed in (0, 1)]
    assert set(outcomes(runs).values()) == {OPEN}


def test_without_measurements_nothing_is_resolved():
    assert set(outcomes([]).values()) == {OPEN}


@pytest.mark.parametrize(
    ("steps", "whole"),
    [
        ([HOLDS, HOLDS], HOLDS),
        ([FAILS, FAILS], FAILS),
        ([OPEN, OPEN], OPEN),
        ([HOLDS, FAILS], PART),
        ([HOLDS, OPEN], PART),
        ([PART, FAILS], PART),
        ([FAILS, OPEN], OPEN),
    ],
)
def test_the_story_holds_only_if_all_its_steps_do(steps, whole):
    assert combine(steps) == whole


@pytest.mark.parametrize(
    ("changed", "explained"),
    [
        ({}, True),
        ({"row_norm_median": (0.06, 0.05), "row_norm_rms": (0.08, 0.8)}, False),
        ({"row_norm_rms": (0.06, 0.0002)}, False),  # all rows die alike
        ({"wq_gradient_norm": (0.3, 0.4)}, False),
        ({"wk_gradient_norm": (0.3, 0.01)}, False),
    ],
)
def test_the_paradox_is_explained_only_where_the_numbers_show_it(changed, explained):
    values = {
        "row_norm_median": (0.06, 0.0002),
        "row_norm_rms": (0.08, 0.1),
        "wq_gradient_norm": (0.3, 1.5),
        "wk_gradient_norm": (0.3, 1.5),
    } | changed
    runs = [
        run(d_k=d_k, **{name: ends[i] for name, ends in values.items()})
        for i, d_k in enumerate((16, 256))
    ]
    assert (paradox(runs) is not None) == explained


def test_one_size_has_no_paradox():
    assert paradox([run()]) is None


def probed(scale, d_k, lr, loss, before, after):
    shares = dict.fromkeys(("dead_share", "saturated_share"), before)
    final = dict.fromkeys(("dead_share", "saturated_share"), after)
    return replace(run(scale, d_k, lr, loss=loss, **shares), final=final)


def test_rows_are_told_at_the_largest_size_and_the_best_rates():
    runs = [
        probed("none", 256, 1e-3, 2.4, 0.4, 0.9),
        probed("none", 256, 1e-2, 2.6, 0.4, 0.1),
        probed("sqrt", 256, 1e-3, 2.4, 0.0, 0.3),
        probed("sqrt", 256, 1e-2, 2.3, 0.0, 0.2),
        probed("sqrt", 16, 1e-2, 2.0, 0.7, 0.7),
    ]
    assert typical_rows(runs) == [
        "At d_k 256, the largest, training takes without the factor (lr 0.001) dead "
        "rows from 40 % to 90 % and saturated rows from 40 % to 90 %; with it (lr 0.01)"
        " dead rows from 0 % to 20 % and saturated rows from 0 % to 20 %."
    ]


def test_rows_of_diverged_runs_are_not_told():
    assert typical_rows([run("none", loss=None), run("sqrt", loss=None)]) == []


def test_one_size_is_told_once():
    saturates = verdicts(Results({}, {}, {}, [run(entropy=0.25)], [], []))[1]
    assert saturates.numbers == (
        "At d_k 16, entropy / ln n: 0.25 without the factor, – with it."
    )


def test_measures_are_averaged_over_runs():
    runs = [run(seed=0, entropy=0.2), run(seed=1, entropy=0.4)]
    assert initial_mean(runs, "", "none", "entropy") == pytest.approx({16: 0.3})
