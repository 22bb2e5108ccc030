"""The command line refuses the impossible in one line, before it writes anything."""

import errno
import io
import json
import re
import subprocess
import sys
import threading

import pytest
from rich.console import Console

from experiments.__main__ import main
from experiments.claims import NAMES
from experiments.config import Config, load, override, run_id
from experiments.progress import Prefixed, display

COMMANDS = (
    *("train", "sweep", "theory", "coord", "cost", "decode"),
    *("report", "compare", "sample", "conformance", "all", "verdicts", *NAMES),
)


@pytest.fixture
def here(tmp_path, monkeypatch):
    """An empty working directory, with an empty and a short text."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.txt").touch()
    (tmp_path / "short.txt").write_text("not much to learn from")
    (tmp_path / "long.txt").write_text("enough to learn from. " * 9000)
    (tmp_path / "swept.toml").write_text("[sweep]\nseed = [0, 1]")
    (tmp_path / "long.toml").write_text("[data]\nsource = 'long.txt'")
    return tmp_path


def refusal(here, capsys, *args):
    """The one line on stderr of a command that must fail and write nothing."""
    before = sorted(here.rglob("*"))
    assert main(args) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: ") and err.count("\n") == 1
    assert sorted(here.rglob("*")) == before
    return err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "[optim]\nlearning_rte = 1e-3",
            "'optim.learning_rte'; the keys here are name",
        ),
        ("[modle]\nd_k = 16", "did you mean 'model'?"),
        ("[model]\nd_k = 15", "model.d_k = 15 must be even"),
        ("[optim]\nlr = -3e-3", "optim.lr = -0.003 must be positive"),
        ("seed = 1\nseed = 2", "is not TOML"),
        ("[data]\nsource = 'absent.txt'", "there is no such file"),
        ("[data]\nsource = 'empty.txt'", "is empty"),
        ("[data]\nsource = 'short.txt'", "needs 65 tokens, but this split has 20"),
    ],
)
def test_a_bad_config_is_refused(here, capsys, text, message):
    (here / "bad.toml").write_text(text)
    assert message in refusal(here, capsys, "train", "bad.toml")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ("train absent.toml", "absent.toml: No such file"),
        ("train swept.toml", "use the command sweep"),
        ("sweep swept.toml --seed 3", "'seed' is varied by [sweep]"),
        ("sweep swept.toml --optim.lrr 3", "did you mean 'optim.lr'?"),
        ("theory swept.toml --theory.keys few", "theory.keys: invalid literal"),
        ("report absent", "absent holds no experiment"),
        ("compare absent", "absent holds no run"),
        ("compare", "required: DIRECTORY"),
        ("train long.toml --data.tokenizer bpe:9", "must have a size above 256"),
        ("train long.toml --data.tokenizer x.json", "x.json: there is no such token"),
        ("train long.toml --logging.tracker wandb", "pip install 'jattn[wandb]'"),
        ("sample absent --prompt x", "absent holds no training run"),
        ("sample absent", "nothing to continue: give --prompt or --prompt-file"),
        ("train swept.toml --name a..", "must be a file name that ends in no dot"),
        ("theory swept.toml --out empty.txt", "empty.txt/run: Not a directory"),
        ("theory swept.toml --out empty.txt/x", "empty.txt/x/run: Not a directory"),
        ("sweep long.toml --out empty.txt", "empty.txt/run: Not a directory"),
        ("train long.toml --out empty.txt", "empty.txt/run/"),
        ("train long.toml --optim.steps 1 --profile", "traces the steps after the"),
        ("dance", "invalid choice: 'dance'"),
        ("", "required: COMMAND"),
    ],
)
def test_a_bad_command_line_is_refused(here, capsys, args, message):
    assert message in refusal(here, capsys, *args.split())


@pytest.mark.parametrize("command", ["train", "sweep", "theory", "coord", "cost"])
def test_only_the_config_is_required(here, capsys, command):
    assert "required: CONFIG; see" in refusal(here, capsys, command)


@pytest.mark.parametrize(
    ("args", "watch", "profile"),
    [
        ("long.toml", 0, 0),
        ("long.toml --watch", 20, 0),
        ("--watch long.toml --logging.every 7 --seed 3", 7, 0),
        ("long.toml --logging.watch 9 --profile --watch", 9, 5),
        ("--profile long.toml --logging.profile 2", 0, 2),
    ],
)
def test_a_training_may_be_watched_and_profiled(
    here, capsys, monkeypatch, args, watch, profile
):
    def run(config, corpus, progress):
        got.append(config.logging)
        keys = ("id", "status", "metrics", "baselines", "corpus")
        corpus = {"name": "x", "bytes": 1, "sha256": "y"}
        return dict(zip(keys, ("x", "finished", {}, {}, corpus), strict=True))

    got = []
    monkeypatch.setattr("experiments.sweep.run", run)
    assert main(["train", *args.split()]) == 0
    assert [(x.watch, x.profile) for x in got] == [(watch, profile)]


@pytest.mark.parametrize(
    "option",
    [
        ("--watch",),
        ("--profile",),
        ("--logging.watch", "2"),
        ("--logging.profile=2",),
        ("--logging.alarm-entropy", "0.3"),
        ("--logging.tracker", "tensorboard"),
    ],
)
def test_a_finished_training_cannot_be_watched(here, capsys, option):
    finished = here / "runs/run" / run_id(load("long.toml")[0]) / "summary.json"
    finished.parent.mkdir(parents=True)
    finished.touch()
    line = refusal(here, capsys, "train", "long.toml", *option)
    assert "is finished: there is nothing to look at" in line


@pytest.mark.parametrize("name", ["a", "a.b", "a..b", "7", "a-"])
def test_a_name_may_hold_dots_inside(name):
    assert override(Config(), ["--name", name]).name == name


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (PermissionError(errno.EACCES, "Permission denied", "x/y"), "x/y: Permission"),
        (OSError("two\nlines"), "two lines"),
    ],
)
def test_what_the_system_refuses_is_one_line(here, capsys, monkeypatch, error, message):
    def refuse(path):
        raise error

    monkeypatch.setattr("experiments.commands.load", refuse)
    assert message in refusal(here, capsys, "train", "long.toml")


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("train", "interrupted; the same command continues from here"),
        ("recall", "interrupted; the same command continues from here"),
        ("coord", "interrupted; the same command starts again"),
        ("compare", "interrupted"),
    ],
)
def test_an_interrupt_says_what_the_same_command_does(
    here, capsys, monkeypatch, command, message
):
    def interrupt(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr("experiments.commands.load", interrupt)
    monkeypatch.setattr("experiments.commands.Console", interrupt)
    assert main([command, "long.toml"]) == 130
    assert capsys.readouterr().err == f"{message}\n"


def test_a_coordinate_check_that_explodes_is_one_line_with_the_cure(here, capsys):
    tiny = "--model.layers 1 --model.d-model 8 --data.batch 2 --coord.d-k 2"
    args = ["coord", "long.toml", "--coord.lr", "1e30", *tiny.split()]
    assert main(args) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith("error: the std of the logits must be positive and finite")
    assert "lower coord.lr" in line and not list(here.rglob("coord.json"))


def test_a_damaged_file_is_one_line(here, capsys):
    (here / "sweep.json").write_text("{}")
    assert "sweep.json is damaged" in refusal(here, capsys, "report", ".")
    (here / "config.json").write_text("{}")
    line = refusal(here, capsys, "sample", ".", "--prompt", "x")
    assert "config.json is damaged" in line


def test_sampling_a_run_without_checkpoints_makes_none(here, capsys):
    claim = {"config": {}, "sha256": "0" * 64}
    (here / "config.json").write_text(json.dumps(claim))
    line = refusal(here, capsys, "sample", ".", "--prompt", "x")
    assert "holds no checkpoint: train the run first" in line


def test_help_lists_the_commands_with_one_line_each(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as stop:
        main(["--help"])
    listed = re.findall(r"^    (\w+)\s+[A-Z].*\.$", capsys.readouterr().out, re.M)
    assert stop.value.code == 0
    assert tuple(listed) == COMMANDS


def test_help_says_where_the_report_of_several_runs_is(capsys):
    with pytest.raises(SystemExit):
        main(["report", "--help"])
    assert "./report.html" in capsys.readouterr().out


def test_help_of_a_config_lists_every_setting(here, capsys):
    with pytest.raises(SystemExit) as stop:
        main(["train", "swept.toml", "--help"])
    out = capsys.readouterr().out
    assert stop.value.code == 0
    assert "--optim.lr" in out and "peak learning rate" in out


def test_the_command_line_starts_without_jax():
    code = "import sys, experiments.__main__; sys.exit('jax' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def steps_of_a_task(console):
    with display(console) as progress:
        task = Prefixed(progress, "1/2")
        task.start("run", total=1000)
        for step in range(1, 1001):
            task.update(step, loss=2.345678, tokens_per_second=51234.5)
        task.finish("done")


def test_away_from_a_terminal_progress_is_a_few_plain_lines():
    out = io.StringIO()
    steps_of_a_task(Console(file=out))
    first, *between, last = out.getvalue().splitlines()
    assert (first, last) == ("1/2  run", "1/2  done")
    assert between[0] == "  1/1000  loss 2.346  tokens/s 51,234" and len(between) == 5


def test_on_a_terminal_the_bar_leaves_only_the_message():
    out = io.StringIO()
    steps_of_a_task(Console(file=out, force_terminal=True, width=120))
    assert "loss 2.346" in out.getvalue()
    assert out.getvalue().endswith("1/2  done\n")
    assert "\x1b[?25h" in out.getvalue()  # the cursor is back


def test_two_tasks_in_a_row_leave_no_bar_behind():
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=120)
    before = set(threading.enumerate())
    with display(console) as progress:
        progress.start("first", total=2)
        progress.start("second", total=2)
        progress.finish("done")
    for bar in set(threading.enumerate()) - before:
        bar.join(timeout=5)
        assert not bar.is_alive()
    assert out.getvalue().endswith("done\n")


@pytest.mark.parametrize("terminal", [False, True])
def test_a_note_stays_while_the_task_goes_on(terminal):
    out = io.StringIO()
    with display(Console(file=out, force_terminal=terminal, width=120)) as progress:
        task = Prefixed(progress, "1/2")
        task.start("run", total=9)
        task.note("layer 0, head 1")
        task.update(9, bits_per_byte=3.25)
        task.finish("done")
    text = out.getvalue()
    assert text.index("  1/2  layer 0, head 1\n") < text.index("bits per byte 3.25")
