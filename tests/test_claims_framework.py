"""An experiment about a claim: computed once, decided by rules, shown on one page."""

import json
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
from markup import assert_well_formed

from experiments.claims import NAMES
from experiments.claims import run as module
from experiments.claims.arms import above, band, of_arm, run_arms, spread
from experiments.claims.bounds import rounded_down, rounded_up
from experiments.claims.claim import Answer, Claim, find
from experiments.claims.run import answers_of, run
from experiments.claims.store import Store
from experiments.config import Config, ConfigError, Model, load
from experiments.evidence import FAILS, HOLDS, OPEN, decide
from experiments.page import Figure, Table
from experiments.progress import Silent
from experiments.settings import Count, Name, Positive, Seed, Text
from experiments.svg import bars, curves, heat

pytestmark = pytest.mark.usefixtures("quick_compiler")


@dataclass(frozen=True)
class Fake:
    """Numbers that are larger in one arm by `gap`, with a wobble of .1."""

    name: Name = "fake"  # directory
    out: Text = "runs"  # directory of all
    gap: float = 1.0  # of the arms
    wobble: Positive = 0.1  # of the seeds
    seeds: Count = 3  # runs
    seed: Seed = 5  # the first


class Work:
    """The slow part; interrupts itself, as Ctrl-C does, in its `last` call."""

    calls: ClassVar[list] = []
    last = None

    @classmethod
    def do(cls, settings, arm, progress):
        cls.calls.append((arm, settings.seed))
        if len(cls.calls) == cls.last:
            raise KeyboardInterrupt
        value = (arm == "a") * settings.gap + settings.wobble * (settings.seed % 2)
        return {"value": value, "steps": (1, 2), "curve": [3.0, value]}


def measure(settings, store):
    return {"runs": run_arms(settings, ("a", "b"), store, Work.do)}


def answers(results):
    a, b = ([x["value"] for x in of_arm(results["runs"], arm)] for arm in "ab")
    gaps = [x - y for x, y in zip(a, b, strict=True)]
    outcome = decide([above(gaps)])
    return [
        Answer(
            "A is <more>.", "Nobody 1999", spread(gaps), "gap above 0", outcome, "So."
        )
    ]


def parts(results):
    values = [run["value"] for run in results["runs"]]
    line = curves("line", {"v": {"a": band([1, 2], [[3, 4], [4, 5]])}}, x_label="x")
    cells = heat("cells", {"one": [[0, 1, 0.5], [1, 0, 0]]}, x_label="x", y_label="y")
    figures = [Figure(lambda: line, "a line"), Figure(lambda: cells, "cells")]
    bar = bars("bars", {"a": (1.0, None), "b": (2.0, 0.1)}, label="x", reference=1.5)
    table = Table("Values", ("value",), [[x] for x in values])
    return [*figures, Figure(lambda: bar, "bars"), table]


@pytest.fixture(autouse=True)
def fake(monkeypatch):
    """Puts the fake experiment where the named ones are."""
    claim = Claim("Is a <more>?", "Two arms.", Fake, measure, answers, parts)
    monkeypatch.setattr(module, "find", lambda name: claim)
    monkeypatch.setattr(Work, "calls", [])
    monkeypatch.setattr(Work, "last", None)


@pytest.fixture
def settings(tmp_path):
    return Fake(out=str(tmp_path))


def run_fake(settings, name="fake"):
    return run(name, settings, Silent(), "1", "python -m experiments fake")


def results_in(directory):
    return json.loads((directory / "results.json").read_text())["results"]


def test_what_is_kept_is_not_computed_again(settings):
    directory = run_fake(settings)
    assert Work.calls == [(arm, seed) for seed in (5, 6, 7) for arm in "ab"]
    kept = results_in(directory)
    run_fake(settings)
    assert len(Work.calls) == 6 and results_in(directory) == kept
    run_fake(replace(settings, seeds=4))  # the first three are there
    assert Work.calls[6:] == [("a", 8), ("b", 8)]
    run_fake(replace(settings, gap=2.0))
    assert len(Work.calls) == 14


@pytest.mark.parametrize("last", [1, 4, 6])
def test_an_interrupted_experiment_ends_with_the_same_numbers(settings, last, tmp_path):
    whole = run_fake(replace(settings, out=str(tmp_path / "whole")))
    Work.calls.clear()
    Work.last = last
    with pytest.raises(KeyboardInterrupt):
        run_fake(settings)
    assert not (tmp_path / "fake" / "results.json").exists()
    Work.last = None
    ended = run_fake(settings)
    assert len(Work.calls) == 6 + 1  # what was interrupted begins again, nothing else
    assert results_in(whole) == results_in(ended)
    assert (whole / "report.md").read_text().split("Settings")[0] == (
        ended / "report.md"
    ).read_text().split("Settings")[0]


def test_a_value_is_the_same_whether_it_was_kept_or_not(tmp_path):
    store = Store(tmp_path, tmp_path / "models", Silent())
    given = {"b": 1, "a": (2, 3)}
    values = [store.piece("a b", given, lambda: {"x": (1, 2)}) for _ in range(2)]
    assert values == [{"x": [1, 2]}] * 2
    assert store.piece("a b", {"a": [2, 3], "b": 1}, dict) == {"x": [1, 2]}
    assert store.piece("other", given, lambda: {"x": 0}) == {"x": 0}


def test_a_piece_that_is_not_finite_is_refused_by_name_and_not_kept(tmp_path):
    store = Store(tmp_path, tmp_path / "models", Silent())
    for value in (float("nan"), float("inf")):
        with pytest.raises(ConfigError, match="piece 'a b' came out as nan or inf"):
            store.piece("a b", 1, lambda value=value: {"x": [value]})
    assert store.piece("a b", 1, lambda: {"x": 2}) == {"x": 2}


@pytest.mark.parametrize("text", ["{", "{}", "[1]", '{"value": 3}', '{"value": null}'])
def test_a_damaged_piece_is_named_and_nothing_is_computed_over_it(settings, text):
    directory = run_fake(settings)
    path = sorted((directory / "pieces").iterdir())[0]
    path.write_text(text)
    with pytest.raises(ConfigError, match=rf"{path.name} is damaged \(.*; remove it"):
        run_fake(settings)
    path.unlink()
    run_fake(settings)


@pytest.fixture
def store(tmp_path, monkeypatch):
    """Whose trainings diverge at once."""
    diverged = {"status": "diverged", "reason": "the loss is nan"}
    monkeypatch.setattr("experiments.claims.store.load_corpus", lambda source: None)
    monkeypatch.setattr("experiments.claims.store.run", lambda *args: diverged)
    return Store(tmp_path, tmp_path / "models", Silent())


def test_a_model_that_diverged_is_no_model(store):
    text = "diverged.*the loss is nan.*lower the learning rate 0.003"
    with pytest.raises(ConfigError, match=text):
        store.train(Config())


def test_a_model_whose_settings_do_not_fit_together_is_not_trained(store):
    with pytest.raises(ConfigError, match="model.d_model = 5 must be even"):
        store.train(Config(model=Model(d_model=5, positions="sinusoidal")))


@pytest.mark.parametrize(
    ("gap", "wobble", "seeds", "outcome"),
    [(1.0, 0.1, 3, HOLDS), (-1.0, 0.1, 3, FAILS), (1.0, 0.1, 1, OPEN)],
)
def test_the_verdict_follows_from_the_numbers(settings, gap, wobble, seeds, outcome):
    changed = replace(settings, gap=gap, wobble=wobble, seeds=seeds)
    (answer,) = answers_of(run_fake(changed))
    assert answer.outcome == outcome


def test_the_page_has_every_part_and_needs_nothing_else(settings):
    directory = run_fake(settings)
    page = (directory / "report.html").read_text()
    shown = ["Is a &lt;more&gt;?", "Two arms.", "A is &lt;more&gt;: holds", "So. 1.000"]
    shown += ["Said by: Nobody 1999. Rule: gap above 0.", "<h3>Values</h3>", "1.10"]
    shown += ["a line", "cells", "bars", "<td>wobble</td><td>0.1</td>", "<td>backend"]
    assert [text for text in shown if text not in page] == []
    assert page.count("<svg") == page.count("<figure>") == 3
    for word in ("http", "<script", "<link", "src=", 'href="data', "url(http", "<?xml"):
        assert word not in page, word
    ids = re.findall(r' id="([^"]*)"', page)
    assert len(set(ids)) == len(ids)
    text = (directory / "report.md").read_text()
    assert "**A is <more>: holds** So. 1.000" in text and "| 1.10 |" in text


def test_the_page_is_well_formed(settings):
    assert_well_formed((run_fake(settings) / "report.html").read_text())


def test_the_results_of_another_experiment_are_not_written_over(settings):
    run_fake(settings)
    with pytest.raises(ConfigError, match="holds results of fake; set another --name"):
        run_fake(settings, name="other")


def test_a_bound_is_rounded_to_the_side_on_which_it_is_true():
    found = {x: (rounded_down(x), rounded_up(x)) for x in (3.46e-6, 4.684, 0.0, 120.5)}
    assert found == {
        3.46e-6: ("3.4e-06", "3.5e-06"),
        4.684: ("4.6", "4.7"),
        0.0: ("0", "0"),
        120.5: ("1.2e+02", "1.3e+02"),
    }
    assert rounded_down(4.2) == "4.2" and rounded_up(np.float64(2.5)) == "2.5"


def test_a_mean_is_told_with_its_interval_and_nothing_where_there_is_none():
    assert spread([0.99, 0.995, 0.994]) == "0.9930 ± 0.0066"
    assert spread([1.0, 1.0]) == spread([1.0]) == "1.000"
    assert spread([3e-6, 5e-6]) == "0.000004 ± 0.000013"
    assert spread([120.0, 160.0]) == "140 ± 254"
    assert above([1.0, 1.1], 0.5) is None and above([1.0, 1.1, 1.05], 0.5) is True
    assert above([1.0, 1.1, 1.05], 2) is False and above([1.0]) is None
    curve = band([10, 20], [[1.0, 2.0], [3.0, 2.0]])
    assert (curve.y, curve.x) == ([2.0, 2.0], [10, 20])
    assert curve.error[0] > 1 and curve.error[1] == 0


def test_a_long_heading_is_broken_into_lines_and_leaves_room_for_its_panel():
    long = {f"source /some/where/{'x' * 70}.txt {n}" for n in range(2)}
    drawn = curves("t", {x: {"a": band([1, 2], [[3, 4]])} for x in long}, x_label="x")
    assert drawn.count("<svg") == 1  # drawn without a warning


@pytest.mark.parametrize("name", NAMES)
def test_every_named_experiment_has_a_config_and_documented_settings(name):
    path = Path("configs") / f"{name}.toml"
    config, sweep = load(path)
    assert type(config) is find(name).settings and config.name == name and not sweep
    assert f"python -m experiments {name} configs/{name}.toml" in path.read_text()
    assert "Duration:" in path.read_text() and "Expected" in path.read_text()
