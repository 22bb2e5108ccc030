"""Rules of evidence: intervals, what decides, and how both are told."""

import numpy as np
import pytest
from scipy import stats

from experiments.evidence import (
    FAILS,
    HOLDS,
    OPEN,
    PART,
    Interval,
    decide,
    describe,
    plus_minus,
    t_interval,
    together,
)


@pytest.mark.parametrize("values", [[0.1, 0.2], [0.3, -0.1, 0.25, 0.7]])
def test_the_interval_is_student_t(values):
    low, high = stats.ttest_1samp(values, 0).confidence_interval(0.95)
    interval = t_interval(values)
    np.testing.assert_allclose(interval.mean - interval.half_width, low)
    np.testing.assert_allclose(interval.mean + interval.half_width, high)


@pytest.mark.parametrize(
    ("interval", "text"),
    [
        (Interval(0.233, 0.1234, 3), "0.233 (95 %: 0.11 to 0.36), 3 paired seeds"),
        (
            Interval(0.0763, 0.0057, 5),
            "0.0763 (95 %: 0.0706 to 0.0820), 5 paired seeds",
        ),
        (
            Interval(-0.1, 0.25, 2),
            "-0.100 (95 %: -0.35 to 0.15), 2 paired seeds: not resolved",
        ),
        (
            Interval(0.3, 0.0, 2),
            "0.300 (95 %: 0.300 to 0.300), 2 paired seeds",
        ),
        (
            Interval(2.0, 30.0, 2),
            "2.000 (95 %: -28 to 32), 2 paired seeds: not resolved",
        ),
    ],
)
def test_an_interval_is_spelled_out(interval, text):
    assert describe(interval) == text


@pytest.mark.parametrize(
    ("conditions", "outcome"),
    [
        ([True, True], HOLDS),
        ([True, None], PART),
        ([True, False], PART),
        ([False, None], FAILS),
        ([None], OPEN),
        ([], OPEN),
    ],
)
def test_conditions_decide_as_the_printed_rule_says(conditions, outcome):
    assert decide(conditions) == outcome


def test_all_are_met_unless_one_is_refuted_or_undecided():
    assert together([True, True]) is True and together([]) is True
    assert together([True, None]) is None
    assert together([None, False, True]) is False


@pytest.mark.parametrize(
    ("mean", "error", "text"),
    [
        (0.99304, 0.0066, "0.9930 ± 0.0066"),
        (140.2, 254.1, "140 ± 254"),
        (1.0, 0.0, "1.000"),
        (0.8, 1e-17, "0.800"),
        (2.5, None, "2.500"),
    ],
)
def test_an_uncertainty_has_two_digits_and_the_mean_as_many_decimals(mean, error, text):
    assert plus_minus(mean, error) == text
