"""Every experiment in turn: interrupted or not, one page and one table come of it."""

import json
import sys
from dataclasses import make_dataclass
from types import ModuleType

import pytest
from markup import assert_well_formed

from experiments.__main__ import main
from experiments.claims import NAMES
from experiments.claims.all import BEGIN, END, All, into_readme
from experiments.claims.claim import Answer, Claim
from experiments.config import ConfigError
from experiments.evidence import FAILS, HOLDS
from experiments.page import Figure, Table
from experiments.settings import Count, Name, Text

PIECES = [("one", 0), ("one", 1), ("one", 2), ("two", 0), ("two", 1)]


class Work:
    """The slow parts of all experiments; is interrupted in its `last` call."""

    def __init__(self):
        self.calls = []
        self.last = None

    def do(self, name, number):
        self.calls.append((name, number))
        if len(self.calls) == self.last:
            raise KeyboardInterrupt
        return {"value": number + len(name) / 7}


def claim_of(name, size, outcome, work):
    """An experiment of so many pieces, whose number is their sum."""
    fields = [("name", Name, name), ("out", Text, "runs"), ("size", Count, size)]
    settings = make_dataclass("Settings", fields, frozen=True)
    settings.__module__ = f"experiments.claims.{name}"

    def measure(settings, store):
        pieces = range(settings.size)
        found = [store.piece("p", n, lambda n=n: work.do(name, n)) for n in pieces]
        return {"values": [x["value"] for x in found]}

    def answers(results):
        number = f"{sum(results['values']):.6f} | at most"
        return [Answer(f"{name} is it.", "Nobody 1999", number, "none", outcome, "So.")]

    def parts(results):
        table = Table("Values", ("value",), [[x] for x in results["values"]])
        return [Figure(lambda: "<svg></svg>", f"figure of {name}"), table]

    return Claim(f"Is it {name}?", "By adding.", settings, measure, answers, parts)


@pytest.fixture
def work(monkeypatch):
    """Two experiments of three pieces and two, and what they do.

    The machine is always the same: its load is not, nor the date.
    """
    work = Work()
    monkeypatch.setattr("experiments.claims.run.describe", lambda threads: {"cpu": 1})
    for name, size, outcome in (("one", 3, HOLDS), ("two", 2, FAILS)):
        module = ModuleType(f"experiments.claims.{name}")
        module.CLAIM = claim_of(name, size, outcome, work)
        monkeypatch.setitem(sys.modules, module.__name__, module)
        monkeypatch.setitem(NAMES, name, "it is.")
    return work


@pytest.fixture
def command(work, tmp_path):
    """What runs both into a directory."""
    paths = [tmp_path / f"{name}.toml" for name in ("one", "two")]
    for path in paths:
        path.write_text(f'kind = "{path.stem}"\n')
    config = tmp_path / "all.toml"
    config.write_text(f'kind = "all"\nconfigs = {[str(path) for path in paths]}\n')
    return lambda out: main(["all", str(config), "--out", str(out)])


def files(directory):
    """What was written, but for the command and the directory, which differ."""
    found = {}
    for path in sorted(directory.rglob("*")):
        if path.is_file() and path.name != ".lock":
            text = path.read_text().replace(str(directory), "OUT")
            if path.name == "results.json":
                text = json.loads(text)["results"]
            found[str(path.relative_to(directory))] = text
    return found


def test_each_is_run_once_and_the_table_has_every_claim(
    command, work, tmp_path, capsys
):
    for _ in range(2):
        assert command(tmp_path / "runs") == 0
        assert work.calls == PIECES
        out = capsys.readouterr().out
        assert "one is it." in out and "does not hold" in out
        assert "Of 2 claims: 1 × holds, 1 × does not hold." in out
    page = (tmp_path / "runs/all/report.html").read_text()
    assert_well_formed(page)
    for text in ("Is it one?", "figure of two", 'href="#two"', "By adding.", "1999"):
        assert text in page, text


@pytest.mark.parametrize("last", range(1, 1 + len(PIECES)))
def test_interrupted_anywhere_and_run_again_the_same_comes_out(
    command, work, tmp_path, last
):
    assert command(tmp_path / "whole") == 0
    work.calls, work.last = [], last
    assert command(tmp_path / "stopped") == 130
    assert not (tmp_path / "stopped/all/report.html").exists()
    work.last = None
    assert command(tmp_path / "stopped") == 0
    assert work.calls == [*PIECES[:last], *PIECES[last - 1 :]]
    whole = files(tmp_path / "whole")
    assert whole == files(tmp_path / "stopped")
    assert {"values": [3 / 7, 10 / 7, 17 / 7]} in whole.values()


def test_nothing_is_run_if_a_config_does_not_fit(command, work, tmp_path, capsys):
    (tmp_path / "two.toml").write_text('kind = "two"\nsize = 0\n')
    assert command(tmp_path / "runs") == 2
    assert "two.toml" in capsys.readouterr().err and not work.calls
    (tmp_path / "two.toml").write_text("")
    assert command(tmp_path / "runs") == 2
    assert "not the config of an experiment about a" in capsys.readouterr().err
    assert not work.calls


@pytest.mark.parametrize("name", ["one", "models", "report.html", "verdicts.md"])
def test_a_name_that_is_taken_is_refused_before_anything_is_run(
    command, work, tmp_path, capsys, name
):
    (tmp_path / "two.toml").write_text(f'kind = "two"\nname = "{name}"\n')
    assert command(tmp_path / "runs") == 2
    assert "must differ from each other and from ['models'" in capsys.readouterr().err
    assert not work.calls and not (tmp_path / "runs").exists()


def test_verdicts_without_a_table_are_damaged(tmp_path, capsys):
    readme = tmp_path / "README.md"
    readme.write_text(f"{BEGIN}\n{END}\n")
    (tmp_path / "verdicts.md").write_text("## Verdicts\n")
    assert main(["verdicts", str(tmp_path), "--into", str(readme)]) == 2
    assert "is damaged (it has no table of claims)" in capsys.readouterr().err


def test_a_readme_gets_the_table_between_its_marks(command, tmp_path):
    command(tmp_path / "runs")
    readme = tmp_path / "README.md"
    for held in ("old", "| old |\n| --- |"):
        readme.write_text(f"before\n{BEGIN}\n{held}\n{END}\nafter\n")
        into_readme(readme, tmp_path / "runs/all")
        before, table, after = readme.read_text().split("<!--", 2)
        assert (before, after) == ("before\n", " end of claims -->\nafter\n")
        rows = table.strip().splitlines()[1:]
        assert rows[0] == "| claim | verdict | number | said by |" and len(rows) == 4
        assert rows[2].startswith(r"| one is it. | holds | 4.285714 \| at most | N")
    readme.write_text("no marks")
    with pytest.raises(ConfigError, match="has no part between"):
        into_readme(readme, tmp_path / "runs/all")


def test_by_default_all_are_run(capsys):
    for argv in (["all", "--nmae", "x"], ["all", "configs/all.toml", "--nmae", "x"]):
        assert main(argv) == 2
        assert "did you mean 'name'" in capsys.readouterr().err
    assert [path.split("/")[-1] for path in All().configs] == [
        f"{name}.toml" for name in NAMES
    ]
