"""The whole experiment, small: from a config to a report, once and again."""

import json
from pathlib import Path

import pytest
from test_report import SECTIONS

from experiments.__main__ import main

pytestmark = pytest.mark.usefixtures("quick_compiler")


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    out = tmp_path_factory.mktemp("out")
    assert main(["sweep", "configs/smoke.toml", "--out", str(out)]) == 0
    return out / "smoke"


def test_the_report_has_every_section(directory):
    page = (directory / "report.html").read_text()
    for section in SECTIONS:
        assert f'id="{section}"' in page
    assert page.count("<svg") >= 3


def test_every_run_of_the_grid_is_finished(directory):
    runs = json.loads((directory / "sweep.json").read_text())["runs"]
    assert len(set(runs)) == 4
    for run in runs:
        summary = json.loads((directory / run / "summary.json").read_text())
        assert summary["status"] == "finished" and summary["id"] == run


def test_a_second_sweep_computes_nothing_again(directory, capsys):
    files = [x for x in directory.rglob("*.json*") if x.name != "sweep.json"]
    before = {path: path.stat().st_mtime_ns for path in files}
    out = directory.parent
    assert main(["sweep", "configs/smoke.toml", "--out", str(out)]) == 0
    assert before == {path: path.stat().st_mtime_ns for path in files}


def test_a_single_run_prints_its_losses_and_what_it_has_read(tmp_path, capsys):
    single, _ = Path("configs/smoke.toml").read_text().split("[sweep]")
    config = tmp_path / "single.toml"
    config.write_text(single)
    assert main(["train", str(config), "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    (summary,) = (tmp_path / "smoke").glob("*/summary.json")
    corpus = json.loads(summary.read_text())["corpus"]
    assert corpus["sha256"] in printed and f"{corpus['bytes']:,} bytes" in printed
    assert "validation_loss" in printed and "bigram table" in printed
