"""Runs are compared in what they differ in, and paired by seed."""

import json
from io import StringIO

import pytest
from rich.console import Console

from experiments.compare import differing, read_entries, sections
from experiments.config import Config, ConfigError, from_dict, to_dict
from experiments.page import Table, print_section
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


def test_the_table_has_the_settings_that_differ_and_no_other(runs):
    (table, _), _ = tables_of(runs / "rotary", runs / "none")
    assert table.columns[:3] == ["run", "seed", "positions"]
    assert list(table.rows[3][:4]) == ["none/none0", "0", "none", "finished"]
    assert len(table.rows) == 6 and table.rows[5][-1] == 2.9


def test_differences_are_paired_by_seed(runs):
    (_, table), _ = tables_of(runs / "rotary", runs / "none")
    ((arm, words),) = table.rows
    # The mean of .5, .4, .6; t(.975, 2) = 4.303, times .1 / sqrt(3).
    assert arm == "positions none"
    assert words == "0.500 (95 %: 0.25 to 0.75), 3 paired seeds"
    assert "those of positions rotary" in table.caption


def test_runs_without_a_partner_pair_with_none(runs):
    (_, table), _ = tables_of(
        runs / "rotary/rotary0", runs / "rotary/rotary1", runs / "none/none2"
    )
    assert table.rows == [("positions none", "no finished pair: not resolved")]


def test_a_diverged_run_is_shown_and_not_paired(runs):
    write(runs / "none", "bad", {"seed": 3, "model": {"positions": "none"}}, None)
    (table, gaps), _ = tables_of(runs / "rotary", runs / "none")
    assert [row[3] for row in table.rows].count("diverged") == 1
    assert "3 paired seeds" in gaps.rows[0][1]


def test_runs_of_other_texts_are_not_subtracted(runs):
    other = write(runs, "other", {"optim": {"lr": 1.0}}, 2.0, sha256="cd" * 32)
    tables, parts = tables_of(runs / "rotary", other)
    assert len(tables) == 1 and "different texts" in parts[-1]


def test_seeds_alone_are_no_comparison(runs):
    tables, parts = tables_of(runs / "rotary")
    assert len(tables) == 1 and "seeds alone" in parts[-1]


def test_a_name_that_two_tables_have_is_shown_with_its_path(runs):
    table = {"probe": {"batch": 3}, "data": {"batch": 4}}
    entries = read_entries([runs / "rotary/rotary0", write(runs, "b", table, 2.0)])
    assert differing(entries) == ["data.batch", "probe.batch"]
    assert sections(entries)[0].parts[0].columns[1:3] == ["data.batch", "probe.batch"]


def test_a_run_that_is_named_twice_is_there_once(runs):
    assert len(read_entries([runs / "rotary", runs / "rotary/rotary1"])) == 3


def test_runs_stand_by_arm_and_seed_whatever_they_are_called(runs):
    table = {"seed": 3, "model": {"positions": "rotary"}}
    late = write(runs / "late", "0", table, 2.0)
    write(runs / "none", "a", {"seed": 9, "model": {"positions": "none"}}, 2.0)
    entries = read_entries([runs / "rotary", runs / "none", late])
    assert [entry.settings["seed"] for entry in entries] == [0, 1, 2, 3, 0, 1, 2, 9]


def test_a_directory_without_a_run_is_refused(runs):
    with pytest.raises(ConfigError, match="holds no run that has ended"):
        read_entries([runs / "rotary", runs])


def test_the_tables_fit_a_terminal(runs):
    out = StringIO()
    (section,) = sections(read_entries([runs / "rotary", runs / "none"]))
    print_section(section, Console(file=out, width=80))
    assert max(map(len, out.getvalue().splitlines())) <= 80


def test_several_directories_have_one_report(runs):
    path = write_report(runs, runs / "rotary", runs / "none")
    page = path.read_text()
    assert path == runs / "report.html"
    assert "<h1>rotary, none: does attention" in page
    assert "positions rotary" in page and "positions none" in page
    assert Config().name not in page.split("</h1>")[0]
