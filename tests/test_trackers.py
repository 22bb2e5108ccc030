"""Trackers get every number once, and cost nothing where they are not wanted."""

import dataclasses
import sys
import types

import pytest

from experiments import onlookers
from experiments.config import Config, ConfigError, Logging, run_id, to_dict
from experiments.data import load_corpus
from experiments.progress import Silent
from experiments.trackers import PACKAGES, check_tracker, open_tracker
from experiments.train import train


def config_of(tracker):
    return Config(name="plays", logging=Logging(tracker=tracker))


class Calls:
    """Stands for anything, and keeps what is called."""

    def __init__(self):
        self.made = []

    def __getattr__(self, name):
        def call(*args, **options):
            self.made.append((name, *args, options))
            return self

        return self if name == "summary" else call


@pytest.fixture(params=PACKAGES)
def opened(request, monkeypatch, tmp_path):
    """A tracker that writes with a false package, and what it calls."""
    calls = Calls()
    monkeypatch.setitem(sys.modules, PACKAGES[request.param], calls)
    config = config_of(request.param)
    return config, open_tracker(config, tmp_path, 7), calls, tmp_path


def test_a_tracker_gets_every_number_with_its_step_and_is_closed(opened):
    config, tracker, calls, _ = opened
    numbers = {"loss": 2.5, "gradient_norm": 0.5}
    tracker.log(8, numbers)
    tracker.close(True)
    if config.logging.tracker == "wandb":
        logged = [("log", numbers, {"step": 8}), ("update", numbers, {})]
        closed = ("finish", {"exit_code": 0})
    else:
        logged = [("add_scalar", "loss", 2.5, 8, {})]
        logged += [("add_scalar", "gradient_norm", 0.5, 8, {})]
        closed = ("close", {})
    assert calls.made[1:] == [*logged, closed]


def test_a_run_that_goes_on_is_the_same_run_to_its_tracker(opened):
    config, _, calls, directory = opened
    ((name, *args, options),) = calls.made
    if config.logging.tracker == "wandb":
        assert (name, args) == ("init", [])
        assert open_tracker(config, directory, 9) and calls.made[1][1] == options
        assert (options["resume"], options["project"]) == ("allow", "plays")
        assert options["config"] == to_dict(config)
    else:
        assert (name, options) == ("SummaryWriter", {"purge_step": 8})
        assert args == [str(directory / "tensorboard")]


def test_what_is_trained_again_in_a_new_directory_is_another_run_of_wandb(
    tmp_path, monkeypatch
):
    calls, config = Calls(), config_of("wandb")
    monkeypatch.setitem(sys.modules, "wandb", calls)
    for name in "ab":
        (tmp_path / name).mkdir()
        open_tracker(config, tmp_path / name, 0)
    first, second = (options["id"] for _, options in calls.made)
    assert first != second
    assert {x.split("-")[0] for x in (first, second)} == {run_id(config)}


def test_a_run_of_wandb_that_is_not_complete_has_failed(tmp_path, monkeypatch):
    calls = Calls()
    monkeypatch.setitem(sys.modules, "wandb", calls)
    open_tracker(config_of("wandb"), tmp_path, 0).close(False)
    assert calls.made[-1] == ("finish", {"exit_code": 1})


def test_only_a_run_with_its_validation_is_complete(tmp_path, monkeypatch):
    calls = Calls()
    monkeypatch.setattr(onlookers, "open_tracker", lambda *_: calls)
    arguments = Config(), tmp_path, Silent(), None, 360
    with onlookers.Onlookers(*arguments):
        pass
    assert calls.made.pop() == ("close", False, {})
    with onlookers.Onlookers(*arguments) as looking:
        looking.end(2.5, 3.5)
    numbers = {"validation_loss": 2.5, "validation_bits_per_byte": 3.5}
    assert calls.made == [("log", 360, numbers, {}), ("close", True, {})]


@pytest.fixture
def logged_out(monkeypatch):
    """Stands for the package wandb where nobody is logged in."""

    class Error(Exception):
        """Of the package."""

    def refuse(**options):
        raise Error("No API key configured. Use `wandb login` to log in.")

    package = types.SimpleNamespace(Error=Error, login=refuse, init=refuse)
    monkeypatch.setitem(sys.modules, "wandb", package)


def test_who_is_not_logged_in_is_told_so_in_one_sentence(logged_out, tmp_path):
    for use in (
        lambda: check_tracker("wandb"),
        lambda: open_tracker(config_of("wandb"), tmp_path, 0),
    ):
        with pytest.raises(ConfigError) as caught:
            use()
        assert str(caught.value) == (
            "logging.tracker = 'wandb': No API key configured; log in by `wandb "
            "login`, or set WANDB_MODE=offline"
        )


def test_who_is_not_logged_in_leaves_nothing_behind(logged_out, tmp_path):
    (tmp_path / "text.txt").write_text("enough to learn from. " * 9000)
    config = config_of("wandb")
    data = dataclasses.replace(config.data, source=str(tmp_path / "text.txt"))
    config = dataclasses.replace(config, data=data)
    with pytest.raises(ConfigError, match="log in by `wandb login`"):
        train(config, load_corpus(data.source), tmp_path / "run", Silent())
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", PACKAGES)
def test_without_its_package_the_error_says_what_to_install(name, monkeypatch):
    monkeypatch.setitem(sys.modules, PACKAGES[name], None)
    with pytest.raises(ConfigError, match=rf"pip install 'jattn\[{name}\]'"):
        check_tracker(name)


def test_none_needs_nothing(tmp_path):
    check_tracker("none")
    tracker = open_tracker(config_of("none"), tmp_path, 0)
    tracker.log(1, {"loss": 1.0})
    tracker.close(True)
    assert not list(tmp_path.iterdir())


def test_a_tracker_does_not_change_the_run():
    assert run_id(config_of("wandb")) == run_id(config_of("none"))
