"""Padding of an encoder's batch: what is asked, and what a mask is worth."""

import json
from dataclasses import replace

import numpy as np
import pytest
from flax import nnx
from oracle import TOLERANCE, assert_close

from experiments.__main__ import main
from experiments.claims import padding as module
from experiments.claims.padding import (
    ARMS,
    CLAIM,
    Padding,
    batch_of,
    seen_by,
    unseen,
)
from experiments.config import ConfigError
from experiments.evidence import FAILS, HOLDS, OPEN, PART
from experiments.page import Figure, Table
from experiments.studies.padded import logits_of, widen
from jattn.nnx import Encoder, TransformerConfig

pytestmark = pytest.mark.usefixtures("quick_compiler")

TINY = Padding(symbols=3, shortest=2, longest=7)


@pytest.fixture(scope="module")
def model():
    config = TransformerConfig(
        vocab_size=4, num_layers=1, d_model=8, num_heads=2, positions="none"
    )
    return Encoder(config, rngs=nnx.Rngs(1))


def test_the_answer_is_the_symbol_that_is_the_most_frequent():
    batch = batch_of(TINY, 1, 60)
    asked = 0
    for row in range(60):
        n = batch["lengths"][row]
        counts = np.bincount(batch["tokens"][row, :n], minlength=3)
        assert counts.sum() == n and np.all(batch["tokens"][row, n:] == 3)
        decided = np.sum(counts == counts.max()) == 1
        assert batch["real"][row].tolist() == [decided] * n + [False] * (7 - n)
        if decided:
            assert np.all(batch["targets"][row] == counts.argmax())
            asked += 1
    assert 20 < asked < 60


def test_more_padding_is_not_asked_and_changes_no_symbol():
    batch = batch_of(TINY, 1, 9)
    wide = widen(batch, 12, token=4)
    within = np.arange(7) < batch["lengths"][:, None]
    assert np.array_equal(wide["tokens"][:, :7][within], batch["tokens"][within])
    assert np.all(wide["tokens"][:, :7][~within] == 4)
    assert np.all(wide["tokens"][:, 7:] == 4) and not wide["real"][:, 7:].any()
    for name in ("real", "targets"):
        assert np.array_equal(wide[name][:, :7], batch[name])
    assert np.array_equal(seen_by(ARMS[0], wide)["seen"], batch["lengths"])
    assert np.array_equal(seen_by(ARMS[1], wide)["seen"], [12] * 9)


def test_behind_a_mask_padding_is_nothing_and_may_be_nan(model):
    batch = batch_of(TINY, 1, 9)

    def logits(arm, width, token):
        wide = seen_by(arm, widen(batch, width, token))
        return np.asarray(logits_of(model, wide))[wide["real"]]

    first, wide, dirty = (logits(ARMS[0], *x) for x in ((7, 3), (19, 3), (19, 4)))
    assert_close(wide, first)
    assert np.isfinite(dirty).all() and np.array_equal(dirty, wide)
    bare, touched = logits(ARMS[1], 19, 3), logits(ARMS[1], 19, 4)
    assert np.abs(bare - first).max() > 100 * TOLERANCE[np.dtype("float32")]["atol"]
    assert np.isnan(touched).all()


def results(*widths, moved=1e-6, slope=1e-6, nan=0.0):
    """Accuracies without a mask at every width, for each seed."""
    runs, zeros = [], [0.0] * (len(widths) - 1)
    for seed, bare in enumerate(zip(*widths, strict=True)):
        of = {"seed": seed, "changed": [0.0, *zeros]}
        masked = {"accuracy": [1.0, *(1 + x for x in zeros)], "moved": [*zeros, moved]}
        runs.append(of | {"arm": ARMS[0], "slope": slope, "nan": nan} | masked)
        other = {"accuracy": list(bare), "moved": [*zeros, 9.0]}
        runs.append(of | {"arm": ARMS[1], "slope": 7.0, "nan": 1.0} | other)
    return {"widths": [16 * 2**n for n in range(len(widths))], "runs": runs}


@pytest.mark.parametrize(
    ("numbers", "outcomes"),
    [
        (results([1.0, 1.0, 0.999], [0.5, 0.6, 0.4]), [HOLDS, PART]),
        (results([0.9, 0.88, 0.91], [0.5, 0.6, 0.4]), [HOLDS, HOLDS]),
        (results([1.0, 1.0, 0.999], [1.0, 0.999, 1.0]), [HOLDS, FAILS]),
        (results([1.0], [0.5]), [HOLDS, OPEN]),
        (results([1.0, 1.0], [1.0, 0.9], moved=0.1), [PART, FAILS]),
        (results([1.0, 1.0], [1.0, 0.9], slope=0.1, nan=0.3), [FAILS, FAILS]),
    ],
)
def test_verdicts_follow_from_the_numbers(numbers, outcomes):
    assert [answer.outcome for answer in CLAIM.answers(numbers)] == outcomes


def test_a_sentence_says_what_the_numbers_say():
    def sentence(*numbers):
        return CLAIM.answers(results(*numbers))[1].sentence

    good, bad = [1.0, 1.0], [0.5, 0.51]
    at_once = sentence(good, bad)
    assert "and no more: to 16 tokens a row it costs less than 0.01" in at_once
    assert "of accuracy, from 32 on more." in at_once
    later = sentence(good, good, [1.0, 0.9], bad, bad)
    assert "and some more: to 32 tokens" in later and "from 128 on more." in later
    again = sentence(good, bad, good, bad)
    assert "and no more: to 16 tokens" in again and "from 128 on more." in again
    assert "as in training costs accuracy, and the most padding costs it" in sentence(
        [0.8, 0.81], [0.5, 0.51]
    )
    assert "may or may not cost accuracy" in sentence([0.9], [0.5])


def test_there_is_a_figure_and_a_row_for_each_run():
    figure, table = CLAIM.parts(results([1.0, 1.0], [0.5, 0.6]))
    assert isinstance(figure, Figure) and "share of changed answers" in figure.draw()
    assert isinstance(table, Table)
    assert table.rows[3] == ["without", 1, 1.0, 0.6, 9.0]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (Padding(shortest=5, longest=4), "shortest = 5 must be less than longest = 4"),
        (Padding(shortest=4, longest=4), "shortest = 4 must be less than longest = 4"),
        (Padding(symbols=1), "symbols = 1 must be at least 2"),
        (Padding(times=(1,)), "times = .1. must be two or more numbers that ascend"),
        (Padding(times=(1, 1)), "times = .1, 1. must be two or more numbers that asc"),
        (Padding(times=(1, 4, 2, 2)), "times = .1, 4, 2, 2. must be two or more"),
        (Padding(times=(2, 4)), "times must begin with 1, the width of training"),
        (Padding(heads=5), "d_model = 32 must be a multiple of heads = 5"),
    ],
)
def test_impossible_settings_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        module.measure(settings, None)


def test_a_test_of_which_nothing_is_decided_is_refused():
    for seed in range(99):
        settings = Padding(held_out=1, seeds=3, seed=seed)
        if unseen(settings)["real"].any() and not all(
            unseen(replace(settings, seed=seed + n))["real"].any() for n in (1, 2)
        ):
            break
    with pytest.raises(ConfigError, match=r"none of held_out = 1 .* of seed \d+ one"):
        module.measure(settings, None)


@pytest.mark.slow
@pytest.mark.usefixtures("optimised")
def test_the_experiment_comes_out_the_same_at_small_settings(tmp_path):
    args = ["padding", "configs/padding.toml", "--out", str(tmp_path), "--layers", "1"]
    args += ["--optim.steps", "150", "--seeds", "2", "--times", "1", "16"]
    assert main([*args, "--held-out", "128"]) == 0
    found = json.loads((tmp_path / "padding" / "results.json").read_text())
    masked, bare = CLAIM.answers(found["results"])
    assert masked.outcome == HOLDS and bare.outcome in (PART, HOLDS)
