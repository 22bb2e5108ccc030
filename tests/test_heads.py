"""The number of heads: what a layer costs, and what the numbers have to say."""

import jax.numpy as jnp
import numpy as np
import pytest

from experiments.claims.heads import CLAIM, COUNTED, Heads, layer, measure
from experiments.config import ConfigError
from experiments.evidence import FAILS, HOLDS, OPEN, PART
from experiments.page import Figure, Table

ONE = [2.3, 2.31, 2.32]


def results(two=(2.2, 2.22, 2.23), four=(2.1, 2.12, 2.11), operations=1.0, time=1.0):
    """Losses by seed of 1, 2 and 4 heads; what 4 cost as multiples of what 1 does."""
    counted = [dict.fromkeys(COUNTED, 10.0) for _ in range(3)]
    counted[-1]["operations"] *= operations
    ratios = [[1.0, 1.01], [1.0, 0.99], [time, time + 0.01]]
    losses = [ONE, list(two), list(four)]
    found = {"counted": counted, "ratios": ratios, "losses": losses}
    return {"width": 32, "counts": [1, 2, 4], "seeds": [0, 1, 2]} | found


@pytest.mark.usefixtures("quick_compiler")
def test_a_layer_of_more_heads_has_more_weights_but_no_more_parameters():
    x = jnp.asarray(np.random.default_rng(0).standard_normal((2, 12, 8), np.float32))
    one, two = (layer(heads, x)[1] for heads in (1, 2))
    assert one["parameters"] == two["parameters"] == 4 * 8 * 8
    assert two["exponentials"] - one["exponentials"] >= 2 * 12 * 12
    assert one["operations"] < two["operations"] and one["memory"] < two["memory"]


@pytest.mark.parametrize(
    ("numbers", "outcomes"),
    [
        (results(), [HOLDS, FAILS, HOLDS]),
        (results(four=ONE), [PART, HOLDS, HOLDS]),
        (results(two=ONE, four=ONE), [OPEN, OPEN, HOLDS]),
        (results(two=ONE, four=(2.5, 2.52, 2.51)), [FAILS, HOLDS, HOLDS]),
        (results(operations=1.5), [HOLDS, FAILS, PART]),
        (results(time=2.0), [HOLDS, FAILS, PART]),
    ],
)
def test_verdicts_follow_from_the_numbers(numbers, outcomes):
    assert [answer.outcome for answer in CLAIM.answers(numbers)] == outcomes


def test_a_sentence_says_what_the_numbers_say():
    better, worse, free = CLAIM.answers(results(four=ONE, time=2.0))
    assert "heads are better than one; of other" in better.sentence
    assert "end with a higher loss" in worse.sentence
    assert "4 heads of size 8 lose against 2 of size 16: 0.093" in worse.number
    assert "a matrix of weights of its own" in free.sentence
    assert "2 heads 0.093" in better.number and "2.005" in free.number


def test_every_number_of_heads_is_shown():
    loss, cost, table = CLAIM.parts(results(time=2.0))
    assert isinstance(loss, Figure) and "validation loss" in loss.draw()
    assert isinstance(cost, Figure) and "exponentials" in cost.draw()
    assert isinstance(table, Table)
    assert table.rows[0][:5] == [1, *ONE, 10.0] and table.rows[2][-1][:5] == "2.005"


@pytest.mark.parametrize(
    ("counts", "message"),
    [
        ((2, 4), "counts must begin with 1"),
        ((1,), "counts must begin with 1"),
        ((1, 4, 2), "and go up"),
        ((1, 2, 3), "3 heads cannot share d_model = 64"),
        ((1, 2, 64), "64 heads cannot share d_model = 64"),
    ],
)
def test_impossible_settings_are_refused(counts, message):
    with pytest.raises(ConfigError, match=message):
        measure(Heads(counts=counts), None)
