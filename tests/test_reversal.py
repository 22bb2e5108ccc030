"""Sequences to be written backwards, and what is concluded from who can."""

import functools
import json
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from flax import nnx
from oracle import assert_close, jit

from experiments.__main__ import main
from experiments.claims.reversal import ARMS, CLAIM, Reversal, model_of, train
from experiments.config import ConfigError
from experiments.evidence import FAILS, HOLDS, OPEN, PART
from experiments.page import Figure, Table
from experiments.progress import Silent
from experiments.studies.backwards import (
    blind,
    cross_weights,
    draw,
    is_exact,
    is_new,
    least_loss,
    mirrored,
    predict,
    write,
)

pytestmark = pytest.mark.usefixtures("quick_compiler")

SIZES = dict(symbols=6, shortest=2, longest=5)
TINY = Reversal(**SIZES, d_model=8, heads=2)
batch_of = functools.partial(draw, **SIZES, batch=7, seed=3)


@pytest.fixture(scope="module")
def model():
    """One that was not trained, but whose source decides what is written."""
    model = model_of(TINY)
    model.encoder.embed.embedding[...] *= 5
    for block in model.decoder.blocks:
        block.cross_attention.out.kernel[...] *= 30
    return model


def test_targets_are_the_sources_backwards():
    batch = batch_of(step=1)
    lengths = set()
    for row in range(7):
        n = batch["lengths"][row]
        source, target = batch["source"][row], batch["targets"][row]
        assert target[:n].tolist() == source[:n].tolist()[::-1]
        assert np.all(source[n:] == 6) and np.all(target[n:] == 6)
        assert batch["inputs"][row].tolist() == [6, *target[:-1]]
        assert batch["real"][row].tolist() == [True] * (n + 1) + [False] * (5 - n)
        lengths.add(int(n))
    assert lengths <= {2, 3, 4, 5} and len(lengths) > 1
    assert np.all(batch["source"][batch["real"][:, 1:]] < 6)


def test_a_batch_depends_on_seed_and_step_alone():
    first, again = batch_of(step=1), batch_of(step=1)
    assert all(np.array_equal(first[name], again[name]) for name in first)
    for other in (batch_of(step=2), batch_of(step=1, seed=4)):
        assert not np.array_equal(first["source"], other["source"])


def test_what_was_trained_on_is_not_new():
    test, other = batch_of(step=1), batch_of(step=2)
    test["source"][2] = other["source"][5]
    assert np.flatnonzero(~is_new(test, [batch_of(step=9), other])).tolist() == [2]


def test_the_least_loss_without_a_source_is_the_entropy_of_the_targets():
    symbols, sizes = 3, (1, 2)
    chance = {
        word: 1 / len(sizes) / symbols**n
        for n in sizes
        for word in product(range(symbols), repeat=n)
    }
    entropy = -sum(p * np.log(p) for p in chance.values())
    targets = sum(p * (len(word) + 1) for word, p in chance.items())
    found = least_loss(symbols=symbols, shortest=1, longest=2)
    assert found == pytest.approx(entropy / targets, rel=1e-12)


def test_the_mirrored_share_is_one_of_the_mirror_and_even_of_even_weights():
    size = np.array([2, 5, 3])
    within = np.arange(5) < size[:, None]
    even = np.broadcast_to((within / size[:, None])[:, None, None], (3, 2, 6, 5))
    mirror = np.zeros((3, 2, 6, 5))
    for row, n in enumerate(size):
        for t in range(n):
            mirror[row, 1, t, n - 1 - t] = 1
    found = mirrored(np.stack([even, mirror]), size)
    assert_close(found, [[3 / size.sum()] * 2, [0, 1]])


def test_cross_attention_sees_the_source_and_nothing_of_its_padding(model):
    batch = batch_of(step=1)
    weights = np.asarray(cross_weights(model, batch))
    assert weights.shape == (1, 7, 2, 6, 5)
    within = np.arange(5) < batch["lengths"][:, None]
    assert np.all(np.moveaxis(weights, -1, 2)[:, ~within] == 0)
    assert_close(weights.sum(-1), np.ones((1, 7, 2, 6)))
    assert np.ptp(weights, axis=3).max() > 1e-3  # queries differ


def test_what_is_written_is_the_most_probable_by_the_whole_model(model):
    batch = batch_of(step=1)
    written = np.asarray(write(model, batch))
    inputs = np.concatenate([batch["inputs"][:, :1], written[:, :-1]], axis=1)
    graph, params = nnx.split(model)
    whole = jit(lambda params, batch: predict(nnx.merge(graph, params), batch))
    logits = np.asarray(whole(params, batch | {"inputs": inputs}))
    assert np.array_equal(logits.argmax(-1), written)
    assert len(np.unique(written, axis=0)) > 3  # the source matters


def test_a_fault_counts_up_to_the_end_and_not_in_what_follows(model):
    batch = batch_of(step=1)
    written = np.array(write(model, batch))
    assert is_exact(model, batch | {"targets": written}).all()
    end = np.arange(7), batch["lengths"]
    wrong = written.copy()
    wrong[end] += 1
    assert not is_exact(model, batch | {"targets": wrong}).any()
    wrong = np.where(batch["real"], written, written + 1)
    assert is_exact(model, batch | {"targets": wrong}).all()


def test_a_blind_decoder_writes_the_same_whatever_the_source(model):
    batch = batch_of(step=1)
    written = np.asarray(write(model, blind(batch)))
    assert np.array_equal(written, np.broadcast_to(written[0], written.shape))


def results(exact, left=0.0, alone=0.0, mirrored=0.8):
    """What runs of as many seeds would have left, with a little wobble."""
    runs = []
    for seed, share in enumerate(exact):
        for arm, end, weight in zip(ARMS, (share, alone), (mirrored, 0.1), strict=True):
            runs.append(
                {
                    "arm": arm,
                    "seed": seed,
                    "curve": [3.0, 2.0, 1.0, 0.5],
                    "exact": [[2, end / 2], [4, end]],
                    "blind": left,
                    "tested": 99,
                    "mirrored": [[weight + seed / 100, weight]],
                    "pattern": [[np.eye(3).tolist()] * 2],
                }
            )
    return {"least_loss": 2.5, "even": 0.2, "runs": runs}


@pytest.mark.parametrize(
    ("numbers", "outcomes"),
    [
        (results([0.99, 0.98, 1.0]), [HOLDS, HOLDS]),
        (results([0.99, 0.98, 0.9]), [PART, HOLDS]),
        (results([0.99, 0.98, 1.0], left=0.2), [PART, HOLDS]),
        (results([0.1, 0.0, 0.2], left=0.1, alone=0.9, mirrored=0.2), [FAILS, FAILS]),
        (results([0.99], mirrored=0.9), [PART, OPEN]),
        (results([0.0, 0.0, 0.0]), [FAILS, HOLDS]),
        (results([0.0, 0.0, 0.0], left=0.0, alone=0.5), [FAILS, HOLDS]),
    ],
)
def test_verdicts_follow_from_the_numbers(numbers, outcomes):
    found = CLAIM.answers(numbers)
    assert [answer.outcome for answer in found] == outcomes
    shown = [answer.sentence.startswith("These runs do not show") for answer in found]
    assert shown == [outcome != HOLDS for outcome in outcomes]


def test_no_share_is_said_to_be_beyond_one():
    text = CLAIM.answers(results([0.99, 0.998, 0.992]))[0].number
    assert (
        "0.990 to 0.998 of the unseen sequences with cross-attention, 0.000 if" in text
    )
    assert "the 95 % interval begins at 0.983" in text and "1.0" not in text
    assert "one seed: not resolved" in CLAIM.answers(results([0.99]))[0].number
    wild = CLAIM.answers(results([0.0, 0.0, 0.5], alone=0.9))[0].number
    assert wild.endswith("begins at -1.000.")


def test_there_is_a_figure_of_learning_one_of_the_heads_and_a_row_for_each_run():
    learning, looks, table = CLAIM.parts(results([0.99, 0.98]))
    assert isinstance(learning, Figure) and isinstance(looks, Figure)
    assert "least without a source" in learning.draw() and "2.500" in learning.caption
    assert "layer 1, head 2" in looks.draw()
    assert isinstance(table, Table) and len(table.rows) == 4
    assert table.rows[2] == ["with cross-attention", 1, 0.98, 0, 0.75, "0.81, 0.80"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (Reversal(shortest=5, longest=4), "shortest = 5 is more than longest = 4"),
        (Reversal(d_model=6, heads=4), "d_model = 6 must be a multiple of heads = 4"),
    ],
)
def test_impossible_settings_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        CLAIM.measure(settings, None)


@pytest.mark.parametrize(
    "sizes",
    [dict(symbols=1, shortest=1, longest=2), dict(held_out=1, shortest=1, longest=40)],
)
def test_a_test_without_a_new_or_a_longest_sequence_is_refused(sizes, monkeypatch):
    monkeypatch.setattr("experiments.claims.reversal.fit", None)
    with pytest.raises(ConfigError, match="sequences none is new, or none as long"):
        train(replace(TINY, **sizes), ARMS[0], Silent())


@pytest.mark.slow
@pytest.mark.usefixtures("optimised")
def test_only_who_sees_the_source_writes_it_backwards_and_again(tmp_path):
    args = ["reversal", "configs/reversal.toml", "--out", str(tmp_path)]
    args += ["--symbols", "8", "--shortest", "3", "--longest", "6", "--seeds", "1"]
    args += ["--optim.steps", "250"]
    assert main(args) == 0
    results = json.loads((tmp_path / "reversal" / "results.json").read_text())
    runs = results["results"]["runs"]
    assert len(runs) == 2
    for run in runs:
        share = run["exact"][-1][1]
        assert share > 0.8 if run["arm"] == ARMS[0] else share < 0.05
        assert run["blind"] < 0.05
    assert main(args) == 0
    again = json.loads((tmp_path / "reversal" / "results.json").read_text())
    assert again["results"] == results["results"]
