"""Pairs and questions, who can answer them, and what is concluded from it."""

import functools

import jax
import numpy as np
import pytest
from flax import nnx
from oracle import jit

from experiments.claims.recall import CLAIM, READERS, Recall, arms_of, maker, train
from experiments.config import ConfigError
from experiments.evidence import FAILS, HOLDS, PART
from experiments.page import Figure, Table
from experiments.progress import Silent
from experiments.studies.pairs import (
    by_place,
    draw,
    is_right,
    most_frequent,
    parameters,
    smallest,
)

pytestmark = pytest.mark.usefixtures("quick_compiler")

SIZES = dict(keys=13, values=5, pairs=7, questions=3)
batch_of = functools.partial(draw, **SIZES, batch=11, seed=3)
TINY = Recall(keys=13, values=5, questions=3, d_model=8, heads=2)


def test_the_target_of_a_question_is_the_value_beside_its_key():
    batch = batch_of(step=1)
    for row in range(11):
        known = dict(zip(batch["keys"][row, :7], batch["values"][row, :7], strict=True))
        assert len(known) == 7  # keys differ
        asked = batch["keys"][row, 7:]
        assert [known[key] for key in asked] == batch["targets"][row].tolist()
        assert batch["keys"][row, batch["asked"][row]].tolist() == asked.tolist()
    assert np.all(batch["values"][:, 7:] == 5) and batch["values"][:, :7].max() == 4
    assert set(batch["asked"].ravel()) == set(range(7))


def test_a_batch_depends_on_seed_and_step_alone():
    first, again = batch_of(step=1), batch_of(step=1)
    assert all(np.array_equal(first[name], again[name]) for name in first)
    for other in (batch_of(step=2), batch_of(step=1, seed=4)):
        assert not np.array_equal(first["keys"], other["keys"])


def test_the_places_of_answers_are_parts_of_the_pairs():
    asked = np.array([[0, 1, 2], [3, 4, 6]])
    right = np.array([[1, 0, 1], [1, 1, 0]], bool)
    assert by_place(right, asked, 7, 2) == [0.75, 0.5]
    assert by_place(right, asked, 7, 3) == [2 / 3, 1, 0]


def test_who_knows_the_values_alone_names_the_most_frequent_one():
    values = np.array([[2, 2, 2, 0, 9], [1, 3, 0, 3, 9]])
    batch = {"values": values, "asked": np.zeros((2, 1), int)}
    assert most_frequent(batch, 9) == (3 / 4 + 2 / 4) / 2


class Fixed(nnx.Module):
    def __call__(self, batch):
        return batch["logits"]


def test_an_answer_is_right_if_its_value_is_the_most_probable():
    logits = np.array([[[0.1, 0.9, 0.5], [2.0, -1.0, 1.0]]], np.float32)
    for targets, right in (([1, 0], [True, True]), ([2, 1], [False, False])):
        batch = {"logits": logits, "targets": np.array([targets])}
        assert is_right(Fixed(), batch).tolist() == [right]


def test_the_smallest_size_is_found():
    assert [smallest(lambda n: n * n, wanted) for wanted in (1, 2, 9, 10)] == [
        1,
        2,
        3,
        4,
    ]


def test_parameters_are_counted_without_making_them():
    assert parameters(lambda: nnx.Linear(3, 5, rngs=nnx.Rngs(0))) == 20


def test_the_gru_has_at_least_as_many_parameters_and_hardly_more():
    attention, recurrent = (parameters(maker(TINY, reader)) for reader in READERS)
    assert attention <= recurrent < 1.1 * attention


@pytest.mark.parametrize("reader", READERS)
def test_an_answer_depends_on_all_pairs_and_on_no_other_question(reader):
    graph, shapes = nnx.split(nnx.eval_shape(maker(TINY, reader)))
    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda x: rng.standard_normal(x.shape, np.float32), shapes)
    answer = jit(lambda params, batch: nnx.merge(graph, params)(batch))
    batch = batch_of(step=1)
    logits = np.asarray(answer(params, batch))
    assert logits.shape == (11, 3, 5)
    for place in range(7):
        changed = batch | {"values": batch["values"].copy()}
        changed["values"][:, place] = (changed["values"][:, place] + 1) % 5
        moved = np.abs(np.asarray(answer(params, changed)) - logits).max(axis=(1, 2))
        assert np.all(moved > 0)
    later = batch | {"keys": batch["keys"].copy()}
    later["keys"][:, -1] = (later["keys"][:, -1] + 1) % 13
    moved = np.abs(np.asarray(answer(params, later)) - logits).max(axis=(0, 2))
    assert moved[:2].max() == 0 and moved[2] > 0


def results(attention=(1.0, 1.0), recurrent=(0.6, 0.3), places=1.0):
    """What would be kept of runs that end so, with a little wobble."""
    runs = []
    ends = dict(zip(READERS, (attention, recurrent), strict=True))
    for arm, (reader, n) in arms_of((4, 16)).items():
        for seed in range(3):
            end = ends[reader][n == 16] - 0.001 * seed
            best = {"right": [[2, end / 2], [4, end]], "places": [end] * 3 + [places]}
            worse = {"right": [[2, 0.0], [4, end / 4]], "places": [0.0] * 4}
            kept = {"frequent": 0.2, "rates": [worse, best]}
            runs.append({"arm": arm, "seed": seed} | kept)
    counts = dict(zip(READERS, (100, 103), strict=True))
    return {"pairs": [4, 16], "rates": [0.1, 0.2], "parameters": counts, "runs": runs}


@pytest.mark.parametrize(
    ("numbers", "outcomes"),
    [
        (results(), [HOLDS, HOLDS]),
        (results(attention=(1.0, 0.9)), [PART, HOLDS]),
        (results(places=0.5), [PART, HOLDS]),
        (results(recurrent=(0.6, 0.6)), [HOLDS, PART]),
        (results(recurrent=(0.201, 0.1)), [HOLDS, PART]),
        (results((0.2, 0.1), (0.9, 0.95), 0.1), [FAILS, FAILS]),
    ],
)
def test_verdicts_follow_from_the_numbers(numbers, outcomes):
    assert [answer.outcome for answer in CLAIM.answers(numbers)] == outcomes


def test_a_gru_that_guesses_does_not_show_that_more_pairs_cost_it_anything():
    *_, knows = CLAIM.answers(results())
    *_, guesses = CLAIM.answers(results(recurrent=(0.201, 0.1)))
    assert "the less the more pairs there are" in knows.sentence
    assert "hardly more than a guess" in guesses.sentence


def test_a_rate_at_which_training_diverges_has_no_right_answers_and_cannot_win():
    sizes = dict(pairs=(4,), keys=8, values=4, d_model=8, questions=4)
    settings = Recall(**sizes, rates=(1e30, 0.01), steps=5, every=2, held_out=16)
    worse, better = train(settings, "attention, 4 pairs", Silent())["rates"]
    assert worse == {"right": [(2, 0.0), (4, 0.0), (5, 0.0)], "places": [0.0] * 4}
    assert [update for update, _ in better["right"]] == [2, 4, 5]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(values=1), "values = 1 must be at least 2"),
        (dict(heads=5), "d_model = 64 must be a multiple of heads = 5"),
        (dict(d_model=6), "d_model / heads = 3 must be even"),
        (dict(rates=(0.2, 0.1)), "rates = .* must ascend"),
    ],
)
def test_settings_that_ask_nothing_are_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        CLAIM.measure(Recall(**changes), None)


def test_too_few_questions_for_every_quarter_are_refused():
    settings = Recall(pairs=(4,), questions=1, held_out=1)
    with pytest.raises(ConfigError, match="do not ask about every quarter"):
        train(settings, "GRU, 4 pairs", Silent())


def test_each_reader_is_shown_at_its_best_rate_with_its_updates_to_95_percent():
    figure, table = CLAIM.parts(results())
    assert isinstance(figure, Figure) and isinstance(table, Table)
    assert "16 pairs" in figure.draw()
    attention, recurrent = table.rows[2:]
    assert attention[:3] == [16, "attention", "0.2"] and attention[4] == "4, 4, 4"
    assert recurrent[4:] == ["never, never, never", "0.30, 0.30, 0.30, 1.00", 103]


@pytest.mark.parametrize("pairs", [(3, 8), (8, 4), (4, 65)])
def test_numbers_of_pairs_that_do_not_fit_are_refused(pairs):
    with pytest.raises(ConfigError, match="must ascend from 4 or more to keys = 64"):
        CLAIM.measure(Recall(pairs=pairs), None)


@pytest.mark.slow
def test_attention_recalls_at_small_settings():
    sizes = dict(pairs=(5,), keys=8, values=4, d_model=32, rates=(0.01,))
    settings = Recall(**sizes, steps=150, every=50)
    found = train(settings, "attention, 5 pairs", Silent())
    assert [update for update, _ in found["rates"][0]["right"]] == [50, 100, 150]
    assert min(found["rates"][0]["places"]) > 0.95
