"""Heads that specialise: what the numbers have to say for it."""

import pytest
from oracle import assert_close

from experiments.claims.specialise import CLAIM, IN_WORDS, STAGES
from experiments.evidence import FAILS, HOLDS, OPEN, PART
from experiments.page import Figure, Table
from experiments.studies.patterns import PATTERNS


def results(previous=(0.8, 0.1), induction=(0.7, 0.1), divergence=(0.6, 0.2), seeds=3):
    """The best head of three by pattern, after and before; other weights are small."""

    def look(kind, stage, wobble):
        best = {"previous token": previous, "induction": induction}
        heads = {
            name: [[0.04, wobble * best.get(name, (0.05, 0.05))[stage], 0.03]]
            for name in PATTERNS
        }
        even = dict.fromkeys(PATTERNS, 0.06)
        return {
            "heads": heads,
            "even": even,
            "divergence": [wobble * divergence[stage]],
        }

    runs = [
        {"seed": seed}
        | {
            name: {kind: look(kind, stage, 1 + 0.01 * seed) for kind in IN_WORDS}
            for stage, name in enumerate(STAGES)
        }
        for seed in range(seeds)
    ]
    return {"heads": 3, "seen": 99, "runs": runs}


@pytest.mark.parametrize(
    ("numbers", "outcomes"),
    [
        (results(), [HOLDS, HOLDS, HOLDS]),
        (results(previous=(0.4, 0.1)), [PART, HOLDS, HOLDS]),
        (results(induction=(0.1, 0.1)), [HOLDS, OPEN, HOLDS]),
        (results(induction=(0.1, 0.3)), [HOLDS, FAILS, HOLDS]),
        (results(induction=(0.3, 0.1)), [HOLDS, PART, HOLDS]),
        (results(divergence=(0.1, 0.2)), [HOLDS, HOLDS, FAILS]),
        (results(seeds=1), [OPEN, OPEN, OPEN]),
    ],
)
def test_verdicts_follow_from_the_numbers(numbers, outcomes):
    assert [answer.outcome for answer in CLAIM.answers(numbers)] == outcomes


def test_a_sentence_says_what_the_numbers_say():
    def sentences(**numbers):
        return [answer.sentence for answer in CLAIM.answers(results(**numbers))]

    assert "turn a head to the token before, which gets most" in sentences()[0]
    assert "not shown to get most" in sentences(previous=(0.4, 0.1))[0]
    assert (
        "not show that 99 tokens of training turn a head to what"
        in sentences(induction=(0.1, 0.1))[1]
    )
    assert "more similar keys" in sentences(divergence=(0.1, 0.2))[2]


def test_every_head_is_shown():
    figure, table = CLAIM.parts(results(seeds=2))
    assert isinstance(figure, Figure) and "induction, repeats" in figure.draw()
    assert isinstance(table, Table) and len(table.rows) == 6
    assert table.rows[4][:2] == [1, "1, 2"]
    assert_close(table.rows[4][2:4], [1.01 * 0.8] * 2)
    assert_close(table.rows[4][6:], [1.01 * 0.7] * 2)
