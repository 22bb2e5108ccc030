"""Trackers get every number once, and cost nothing where they are not wanted."""

import sys

import pytest

from experiments.config import Config, ConfigError, Logging, run_id, to_dict
from experiments.trackers import PACKAGES, open_tracker, package_of


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

        return call


@pytest.fixture(params=PACKAGES)
def opened(request, monkeypatch, tmp_path):
    """A tracker that writes with a false package, and what it calls."""
    calls = Calls()
    monkeypatch.setitem(sys.modules, PACKAGES[request.param], calls)
    config = config_of(request.param)
    return config, open_tracker(config, tmp_path, 7), calls, tmp_path


def test_a_tracker_gets_every_number_with_its_step_and_is_closed(opened):
    config, tracker, calls, _ = opened
    tracker.log(8, {"loss": 2.5, "gradient_norm": 0.5})
    tracker.close()
    if config.logging.tracker == "wandb":
        logged = [("log", {"loss": 2.5, "gradient_norm": 0.5}, {"step": 8})]
        closed = ("finish", {})
    else:
        logged = [("add_scalar", "loss", 2.5, 8, {})]
        logged += [("add_scalar", "gradient_norm", 0.5, 8, {})]
        closed = ("close", {})
    assert calls.made[1:] == [*logged, closed]


def test_a_run_that_goes_on_is_the_same_run_to_its_tracker(opened):
    config, _, calls, directory = opened
    ((name, *args, options),) = calls.made
    if config.logging.tracker == "wandb":
        assert (name, args, options["id"]) == ("init", [], run_id(config))
        assert (options["resume"], options["project"]) == ("allow", "plays")
        assert options["config"] == to_dict(config)
    else:
        assert (name, options) == ("SummaryWriter", {"purge_step": 8})
        assert args == [str(directory / "tensorboard")]


@pytest.mark.parametrize("name", PACKAGES)
def test_without_its_package_the_error_says_what_to_install(name, monkeypatch):
    monkeypatch.setitem(sys.modules, PACKAGES[name], None)
    with pytest.raises(ConfigError, match=rf"pip install 'jattn\[{name}\]'"):
        package_of(name)


def test_none_needs_nothing(tmp_path):
    assert package_of("none") is None
    tracker = open_tracker(config_of("none"), tmp_path, 0)
    tracker.log(1, {"loss": 1.0})
    tracker.close()
    assert not list(tmp_path.iterdir())


def test_a_tracker_does_not_change_the_run():
    assert run_id(config_of("wandb")) == run_id(config_of("none"))
