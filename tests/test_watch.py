"""Heads that go wrong are named, and what was seen of them is kept."""

import json
import math

import pytest

from experiments.config import Config, Logging, from_dict, run_id
from experiments.watch import Watch, alarms, worst

SETTINGS = Logging(watch=3, alarm_entropy=0.1, alarm_logit=20.0)
QUIET = Logging(alarm_entropy=0.0, alarm_logit=0.0)
LAST = 10  # step


def head(entropy=0.5, logit_max=5.0, dead_share=0.0):
    return {"entropy": entropy, "logit_max": logit_max, "dead_share": dead_share}


def texts(heads, settings=SETTINGS):
    return [alarm.text for alarm in alarms(heads, settings)]


def test_an_alarm_names_layer_and_head_and_the_bound():
    heads = [[head(), head(entropy=0.03)], [head(logit_max=21.7), head()]]
    assert texts(heads) == [
        "layer 0, head 1: entropy / ln n is 0.03, below 0.1",
        "layer 1, head 0: the largest logit is 21.7, above 20",
    ]


def test_a_bound_itself_is_no_alarm():
    assert texts([[head(entropy=0.1, logit_max=20.0)]]) == []


@pytest.mark.parametrize("settings", [SETTINGS, QUIET])
def test_a_head_that_is_not_finite_is_named_whatever_the_bounds(settings):
    heads = [[head(), head(entropy=math.nan, logit_max=math.nan)], [head()]]
    heads[1][0]["logit_max"] = math.inf
    assert texts(heads, settings) == [
        "layer 0, head 1: entropy / ln n is not finite",
        "layer 1, head 0: logit max is not finite",
    ]


def test_a_bound_of_0_never_alarms():
    assert texts([[head(entropy=0.0, logit_max=1e9)]], QUIET) == []


def test_the_line_shows_the_worst_head_and_the_mean_of_dead_rows():
    heads = [
        [head(0.5, 3.0, 0.25), head(0.2, 9.0)],
        [head(0.7, 4.0), head(dead_share=1)],
    ]
    assert worst(heads) == {
        "lowest_entropy": 0.2,
        "largest_logit": 9.0,
        "dead_share": 0.3125,
    }
    for row in heads:
        row.append(head(math.nan, math.nan))
        assert math.isnan(worst(heads)["lowest_entropy"])
        assert math.isnan(worst(heads)["largest_logit"])
        row.pop()


@pytest.fixture
def watch(tmp_path):
    """Of parameters that say what the probe finds."""

    def measure(entropy):
        return {"heads": [[head(entropy)]], "mean": head(entropy)}

    return lambda step=0: Watch(tmp_path, SETTINGS, LAST, measure, step)


def lines(directory):
    return [json.loads(x) for x in (directory / "watch.jsonl").read_text().splitlines()]


def test_it_looks_every_so_often_and_after_the_last_step_or_never(watch, tmp_path):
    assert [step for step in range(1, 11) if watch().is_due(step)] == [3, 6, 9, LAST]
    never = Watch(tmp_path, Logging(), LAST, None, 0)
    assert not any(map(never.is_due, range(11))) and not list(tmp_path.iterdir())


def test_a_head_is_named_when_it_goes_wrong_and_again_only_after_it_was_well(watch):
    looking = watch()
    named = [looking.look(1, 2.0, entropy)[1] for entropy in (0.5, 0.05, 0.04, 0.3, 0)]
    assert [len(texts) for texts in named] == [0, 1, 0, 0, 1]


def test_what_was_seen_is_written_with_every_measure(watch, tmp_path):
    numbers, _ = watch().look(3, 2.5, 0.05)
    assert numbers["lowest_entropy"] == 0.05
    (line,) = lines(tmp_path)
    assert (line["step"], line["loss"]) == (3, 2.5)
    assert line["heads"] == [[head(0.05)]] and line["mean"] == head(0.05)
    assert line["alarms"] == ["layer 0, head 0: entropy / ln n is 0.05, below 0.1"]


def test_what_is_not_finite_is_written_as_null(watch, tmp_path):
    watch().look(3, 2.5, math.nan)
    watch(3).look(6, 2.5, math.inf)
    for line in lines(tmp_path):
        assert line["heads"][0][0]["entropy"] is line["mean"]["entropy"] is None
        assert line["alarms"] == ["layer 0, head 0: entropy / ln n is not finite"]


def test_a_run_that_goes_on_writes_no_line_twice(watch, tmp_path):
    for step in (3, 6, 9):
        watch(step).look(step, 2.5, 0.5)
    with (tmp_path / "watch.jsonl").open("a") as file:
        file.write('{"step": 12, "lo')
    watch(6).look(9, 2.5, 0.7)
    assert [line["step"] for line in lines(tmp_path)] == [3, 6, 9]
    assert lines(tmp_path)[-1]["mean"]["entropy"] == 0.7


def test_watching_does_not_change_the_run():
    table = {"watch": 1, "alarm_entropy": 0.5, "alarm_logit": 1.0, "profile": 3}
    assert run_id(from_dict({"logging": table})) == run_id(Config())
    assert run_id(from_dict({"logging": {"every": 3}})) != run_id(Config())
