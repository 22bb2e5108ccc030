"""Heads taken away from trained models: what the numbers have to say for it."""

import numpy as np
import pytest

from experiments.claims.prune import CLAIM, ORDERS, Prune, costs, measure, unnoticed
from experiments.config import ConfigError
from experiments.evidence import FAILS, HOLDS, OPEN, PART
from experiments.page import Figure, Table

UP = np.arange(1, 9) / 8  # what 1 to 8 of 8 heads cost, over what all do, in even parts


def run(seed=0, greedy=UP**8, judged=UP**6, drawn=UP, alone=0.001):
    """A model of 8 heads, from what removals cost; all of them cost 1 nat."""
    wobble = 1 + 0.01 * seed
    after = {
        name: [(2 + wobble * np.array(x)).tolist()]
        for name, x in zip(ORDERS, (greedy, judged, drawn), strict=True)
    }
    after["random"] *= 2
    single = [2 + alone] * 5 + [2.3] * 3
    return {"seed": seed, "whole": 2.0, "alone": single, "after": after}


def results(seeds=3, **numbers):
    return {"runs": [run(seed, **numbers) for seed in range(seeds)]}


def test_costs_start_at_none_and_are_means_over_orders():
    one = run()
    one["after"]["random"] = [[3.0] * 8, [5.0] * 8]
    assert costs(one, "random") == [0.0] + [2.0] * 8
    assert unnoticed(run(alone=0.019)) == 5 and unnoticed(run(alone=0.021)) == 0


@pytest.mark.parametrize(
    ("numbers", "outcomes"),
    [
        (results(), [HOLDS, HOLDS]),
        (results(alone=0.1), [PART, HOLDS]),
        (results(greedy=UP**2), [PART, HOLDS]),
        (results(greedy=UP**2, alone=0.1), [FAILS, HOLDS]),
        (results(judged=UP**1.2), [HOLDS, PART]),
        (results(judged=UP**0.9), [HOLDS, FAILS]),
        (results(seeds=1), [PART, OPEN]),
    ],
)
def test_verdicts_follow_from_the_numbers(numbers, outcomes):
    assert [answer.outcome for answer in CLAIM.answers(numbers)] == outcomes


def test_a_sentence_says_what_the_numbers_say():
    def sentences(**numbers):
        return [answer.sentence for answer in CLAIM.answers(results(**numbers))]

    assert "finds most of what" in sentences()[1]
    assert "less than half" in sentences(judged=UP**1.2)[1]
    assert "do not show" in sentences(seeds=1)[1]
    assert "few heads to spare" in sentences(greedy=UP**2, alone=0.1)[0]


def test_every_order_of_every_model_is_shown():
    *figures, table = CLAIM.parts(results(seeds=2))
    assert [isinstance(x, Figure) and "<svg" in x.draw() for x in figures] == [True] * 2
    assert isinstance(table, Table) and len(table.rows) == 6
    assert table.columns[3:] == ["2 gone", "4 gone", "6 gone", "8 gone"]
    assert table.rows[2] == [0, "random", 2.0, 0.25, 0.5, 0.75, 1.0]


def test_too_few_heads_are_refused():
    with pytest.raises(ConfigError, match="there must be four or more"):
        measure(Prune(heads=1), None)
