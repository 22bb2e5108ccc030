"""A trace is of the steps that were asked for, and of no compilation."""

import jax
import pytest

from experiments import onlookers
from experiments.config import Config, Logging, Optim
from experiments.progress import Silent
from experiments.tracing import Trace


@pytest.fixture
def profiler(monkeypatch):
    """Stands for the profiler of JAX, and keeps what it is told."""
    told = []

    def start(directory, **options):
        told.append(("start", directory, options))

    def stop():
        told.append("stop")

    monkeypatch.setattr(jax.profiler, "start_trace", start)
    monkeypatch.setattr(jax.profiler, "stop_trace", stop)
    return told


def traced(directory, steps, done):
    """What is said, and when, in the steps up to `done`."""
    path = directory / "trace/plugins/profile/now/perfetto_trace.json.gz"
    path.parent.mkdir(parents=True)
    path.touch()
    said, at = [], None
    trace = Trace(directory, steps, lambda text: said.append((at, text)))
    for at in range(steps.start - 1, done):
        trace.before(at)
    at = "end"
    trace.end(done)
    return said, path


def test_the_steps_are_named_and_the_file_is_where_it_says(profiler, tmp_path):
    said, path = traced(tmp_path, range(1, 4), done=9)
    assert said == [(4, f"trace of steps 2 to 4, for ui.perfetto.dev: {path}")]
    start, stop = profiler
    assert start[1:] == (str(tmp_path / "trace"), {"create_perfetto_trace": True})
    assert stop == "stop"


def test_a_run_that_ends_earlier_has_a_trace_of_what_there_was(profiler, tmp_path):
    said, path = traced(tmp_path, range(1, 9), done=3)
    assert said == [("end", f"trace of steps 2 to 3, for ui.perfetto.dev: {path}")]


def test_no_steps_are_no_trace(profiler, tmp_path):
    assert traced(tmp_path, range(1, 1), done=5)[0] == [] == profiler


def test_the_first_step_which_compiles_is_not_traced(monkeypatch, tmp_path):
    asked = []
    monkeypatch.setattr(onlookers, "Trace", lambda *args: asked.append(args[1]))
    config = Config(logging=Logging(profile=3))
    onlookers.Onlookers(config, tmp_path, Silent(), None, 7)
    assert asked == [range(8, 11)]


class Noting(Silent):
    """Keeps what it is told."""

    def __init__(self):
        self.notes = []

    def note(self, message):
        self.notes.append(message)


def test_where_no_step_is_left_to_trace_or_to_look_at_it_is_said(profiler, tmp_path):
    config = Config(logging=Logging(profile=3), optim=Optim(steps=8))
    with onlookers.Onlookers(config, tmp_path, noting := Noting(), None, 7) as looking:
        looking.before(7)
    assert profiler == []
    watched = Config(logging=Logging(watch=3), optim=Optim(steps=8))
    onlookers.Onlookers(watched, tmp_path, noting, None, 8)
    assert noting.notes.pop() == "no look at attention: no step is left"
    assert noting.notes == ["no trace: of the steps that are left, the first compiles"]


def test_a_trace_ends_with_the_last_step_and_holds_no_evaluation(profiler, tmp_path):
    (tmp_path / "trace").mkdir()
    (tmp_path / "trace/perfetto_trace.json.gz").touch()
    config = Config(logging=Logging(profile=9), optim=Optim(steps=2))
    numbers = {"loss": 1.0, "bits_per_byte": 1.0}
    with onlookers.Onlookers(config, tmp_path, noting := Noting(), None, 0) as looking:
        for step in range(2):
            looking.before(step)
            looking.after(step + 1, None, numbers, True)
        assert profiler[-1] == "stop"
    assert noting.notes[0].startswith("trace of steps 2 to 2, ")


@pytest.mark.slow
def test_the_profiler_writes_what_perfetto_reads(tmp_path):
    said = []
    trace = Trace(tmp_path, range(1, 2), said.append)
    for step in range(3):
        trace.before(step)
        jax.numpy.ones(7).sum().block_until_ready()
    (text,) = said
    assert (tmp_path / text.split(f"{tmp_path}/")[1]).stat().st_size > 100
