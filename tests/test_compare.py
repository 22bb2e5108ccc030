"""Runs are compared in what they differ in, and paired by seed."""

import json
from io import StringIO

import pytest
from rich.console import Console

from experiments.compare import read_entries, sections
from experiments.config import Config, ConfigError, from_dict, to_dict
from experiments.page import Finding, Table, print_section
from experiments.report import write_report
from experiments.results import MEASURES

LOSSES = {"rotary": (2.0, 2.1, 2.3), "none": (2.5, 2.5, 2.9)}


def write(directory, name, table, bits, *, sha256="ab" * 32, **metrics):
    config = from_dict(table)
    known = {"step": 9, "validation_loss": bits, "train_loss": bits}
    known |= {"bits_per_byte": bits, "bytes_per_token": 1.0, "parameters": 7}
    summary = {
        "id": name,
        "config": to_dict(config),
        "status": "finished" if bits is not None else "diverged",
        "metrics": known | metrics,
        "corpus": {"bytes": 1000, "sha256": sha256},
        "baselines": {"unigram": 3.0, "bigram": 2.6, "trigram": 2.4},
        "probe": {"initial": {"mean": dict.fromkeys(MEASURES, 0.5)}, "final": None},
    }
    path = directory / name / "summary.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(summary))
    claim = {"config": to_dict(config), "sha256": sha256}
    (path.parent / "config.json").write_text(json.dumps(claim))
    return path.parent


@pytest.fixture
def runs(tmp_path):
    for positions, losses in LOSSES.items():
        for seed, bits in enumerate(losses):
            table = {"seed": seed, "model": {"positions": positions}}
            table["name"] = "anything"
            write(tmp_path / positions, f"{positions}{seed}", table, bits)
    return tmp_path


def tables_of(*directories):
    (section,) = sections(read_entries(directories))
    return [part for part in section.parts if isinstance(part, Table)], section.parts


def printed(*directories, width=80):
    out = StringIO()
    (section,) = sections(read_entries(directories))
    print_section(section, Console(file=out, width=width))
    return out.getvalue()


def test_the_table_has_the_settings_that_differ_and_no_other(runs):
    (table, _), _ = tables_of(runs / "rotary", runs / "none")
    assert table.columns[:3] == ["run", "seed", "positions"]
    assert list(table.rows[3][:4]) == ["none/none0", "0", "none", "finished"]
    assert len(table.rows) == 6 and table.rows[5][-1] == 2.9


def test_differences_are_paired_by_seed(runs):
    (_, table), _ = tables_of(runs / "rotary", runs / "none")
    ((arm, words, dropped),) = table.rows
    # The mean of .5, .4, .6; t(.975, 2) = 4.303, times .1 / sqrt(3).
    assert arm == "positions none"
    assert words == "0.500 (95 %: 0.25 to 0.75), 3 paired seeds" and dropped == 0
    assert "those of positions rotary" in table.caption


def test_runs_without_a_partner_pair_with_none(runs):
    (_, table), _ = tables_of(
        runs / "rotary/rotary0", runs / "rotary/rotary1", runs / "none/none2"
    )
    assert table.rows == [["positions none", "no finished pair: not resolved", 0]]


def test_a_diverged_run_is_shown_and_the_pair_that_it_costs_counted(runs):
    write(runs / "none", "bad", {"seed": 3, "model": {"positions": "none"}}, None)
    (table, gaps), _ = tables_of(runs / "rotary", runs / "none")
    assert [row[3] for row in table.rows].count("diverged") == 1
    assert "3 paired seeds" in gaps.rows[0][1] and gaps.rows[0][2] == 0
    assert "flatters" not in gaps.caption  # seed 3 has no partner
    write(runs / "rotary", "good", {"seed": 3}, 2.0)
    (_, gaps), _ = tables_of(runs / "rotary", runs / "none")
    assert "3 paired seeds" in gaps.rows[0][1] and gaps.rows[0][2] == 1
    assert "over the other seeds, which flatters its arm" in gaps.caption


def test_runs_of_other_texts_are_not_subtracted_and_the_reason_is_printed(runs):
    other = write(runs, "other", {"optim": {"lr": 1.0}}, 2.0, sha256="cd" * 32)
    tables, parts = tables_of(runs / "rotary", other)
    assert len(tables) == 1 and isinstance(parts[1], Finding)
    shown = "The runs saw different texts: their losses cannot be compared."
    assert shown in printed(runs / "rotary", other)


def test_one_config_on_two_texts_is_not_said_to_differ_in_seeds_alone(runs):
    table = {"seed": 0, "model": {"positions": "rotary"}}
    other = write(runs / "other", "rotary0", table, 2.0, sha256="cd" * 32)
    text = printed(runs / "rotary", other)
    assert "different texts" in text and "of one arm" not in text
    assert "(cdcdcdcd)" in text and "(abababab)" in text


def test_seeds_alone_are_no_comparison_and_the_reason_is_printed(runs):
    shown = "All runs are of one arm: there is nothing to compare."
    assert shown in printed(runs / "rotary")


def test_runs_that_have_not_ended_are_counted_and_named(runs):
    (runs / "rotary/rotary1/summary.json").unlink()
    listed = {"runs": ["none0", "none1", "none2", "begun", "never"]}
    (runs / "none/sweep.json").write_text(json.dumps(listed))
    begun = write(runs / "none", "begun", {"seed": 7}, 2.0)
    (begun / "summary.json").unlink()
    text = " ".join(printed(runs / "rotary", runs / "none").split())
    assert "Runs not finished 3, left out: rotary/rotary1, none/begun," in text
    assert "none/never." in text
    assert "not finished" not in printed(runs / "none/none0", runs / "none/none1")


def bases(directory):
    (_, table), _ = tables_of(directory)
    return [
        table.caption.split(":")[0].split("those of ")[1],
        *(r[0] for r in table.rows),
    ]


def test_arms_are_in_the_order_of_the_sweep_or_else_of_their_settings(tmp_path):
    ids = {"z": 1e-3, "b": 1e-1, "a": 1e-2}
    for id, rate in ids.items():
        write(tmp_path, id, {"optim": {"lr": rate}, "out": f"{id}/runs"}, 2.0)
    assert bases(tmp_path) == ["lr 0.001", "lr 0.01", "lr 0.1"]
    (tmp_path / "sweep.json").write_text(json.dumps({"runs": ["b", "z", "a"]}))
    assert bases(tmp_path) == ["lr 0.1", "lr 0.001", "lr 0.01"]


def test_no_two_columns_have_the_same_name_and_none_has_no_name(runs):
    table = {"optim": {"steps": 5, "name": "sgd"}, "probe": {"batch": 3}}
    (runs_table, _), _ = tables_of(
        runs / "rotary/rotary0", write(runs, "b", table, 2.0)
    )
    columns = runs_table.columns
    assert len(set(columns)) == len(columns) and "" not in columns
    assert {"status", "steps", "steps done", "probe.batch", "optim.name"} <= {*columns}


def test_a_setting_that_changes_no_number_is_a_column_and_no_arm(runs):
    for name, table in {
        "every": {"logging": {"every": 7}},
        "kept": {"logging": {"checkpoint_every": 7}},
        "probed": {"probe": {"dead_below": 0.5}},
    }.items():
        other = write(runs / name, "0", table | {"seed": 1}, 2.2)
        (runs_table,), parts = tables_of(runs / "rotary", other)
        (setting,) = (key for part in table.values() for key in part)
        assert setting in runs_table.columns
        assert "of one arm" in parts[1].text


def test_two_runs_of_a_seed_count_as_one_with_their_mean(runs):
    again = write(runs / "again", "rotary0", {"seed": 0}, 2.2)
    (table, gaps), _ = tables_of(runs / "rotary", again, runs / "none")
    assert gaps.rows[0][1].startswith("0.467") and "3 paired" in gaps.rows[0][1]
    assert "count as one, with their mean" in gaps.caption
    assert {"rotary/rotary0", "again/rotary0"} <= {row[0] for row in table.rows}


def test_runs_whose_directories_end_alike_have_longer_names(runs):
    places = [runs / x / "run" for x in "ab"]
    for seed, place in enumerate(places):
        write(place, "same", {"seed": seed}, 2.0)
    (table,), _ = tables_of(*places)
    assert [row[0] for row in table.rows] == ["a/run/same", "b/run/same"]


def test_a_run_that_is_named_twice_is_there_once(runs):
    assert len(read_entries([runs / "rotary", runs / "rotary/rotary1"]).ended) == 3


def test_runs_stand_by_arm_and_seed_whatever_they_are_called(runs):
    table = {"seed": 3, "model": {"positions": "rotary"}}
    late = write(runs / "late", "0", table, 2.0)
    write(runs / "none", "a", {"seed": 9, "model": {"positions": "none"}}, 2.0)
    entries = read_entries([runs / "rotary", runs / "none", late]).ended
    assert [entry.settings["seed"] for entry in entries] == [0, 1, 2, 3, 0, 1, 2, 9]


def test_a_run_that_has_not_ended_is_left_out_beside_others(runs):
    (runs / "begun").mkdir()
    (runs / "begun/config.json").write_text("{}")
    found = read_entries([runs / "begun", runs / "rotary"])
    assert len(found.ended) == 3 and "begun" in str(found.unfinished)
    with pytest.raises(ConfigError, match="begun: no run has ended"):
        read_entries([runs / "begun"])


def test_a_directory_without_a_run_is_refused(runs):
    with pytest.raises(ConfigError, match="no run"):
        read_entries([runs / "rotary", runs])


def test_the_tables_fit_a_terminal(runs):
    lines = printed(runs / "rotary", runs / "none").splitlines()
    assert max(map(len, lines)) <= 80


def test_several_directories_have_one_report(runs):
    path = write_report(runs, runs / "rotary", runs / "none")
    page = path.read_text()
    assert path == runs / "report.html"
    assert "<h1>rotary, none</h1>" in page
    assert "positions rotary" in page and "positions none" in page
    assert Config().name not in page.split("</h1>")[0]
