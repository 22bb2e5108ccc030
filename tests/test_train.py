"""Training: the schedule, the optimiser, and runs that are interrupted."""

import dataclasses
import fcntl
import gc
import json
import os
import shutil
import signal
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

import experiments.train as module
from experiments import onlookers, record
from experiments.__main__ import main
from experiments.checkpoint import Checkpoints, restore_parameters
from experiments.config import (
    Config,
    ConfigError,
    Data,
    Evaluation,
    Logging,
    Model,
    Optim,
    Probe,
    to_dict,
)
from experiments.data import Corpus, load_corpus
from experiments.model import logit_scale
from experiments.progress import Silent
from experiments.sample import sample
from experiments.step import (
    initialise,
    learning_rates,
    static_settings,
    token_losses,
    train_step,
)
from experiments.sweep import run, sweep
from experiments.train import train

CONFIG = Config(
    data=Data(context=8, batch=2),
    model=Model(layers=1, d_model=8, heads=2, d_k=4, d_v=3, d_ff=8),
    optim=Optim(steps=10, lr=1e-2),
    evaluation=Evaluation(tokens=64),
    logging=Logging(every=2, checkpoint_every=3),
    probe=Probe(batch=2),
)
STATIC = static_settings(CONFIG.optim)
TIGHT = dataclasses.replace(STATIC, clip_norm=1e-3)
ARMS = ((1.0, 1.0), (0.3, 1e-2))  # factor of the dot products, and learning rate
pytestmark = pytest.mark.usefixtures("quick_compiler")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    path = tmp_path_factory.mktemp("corpus") / "text.txt"
    path.write_bytes(b"the quick brown fox jumps over the lazy dog. " * 100)
    return load_corpus(str(path))


@pytest.fixture(scope="module")
def finished(corpus, tmp_path_factory):
    """A run that was never interrupted: its directory and its summary."""
    directory = tmp_path_factory.mktemp("finished")
    return directory, train(CONFIG, corpus, directory, Silent())


class Interrupting(Silent):
    """Interrupts, as Ctrl-C does, once `step` is reached."""

    def __init__(self, step):
        self.step = step

    def update(self, step, **numbers):
        if step >= self.step:
            raise KeyboardInterrupt


def test_the_first_update_is_not_wasted_and_the_peak_is_reached_once():
    rates = learning_rates(Optim(lr=1.0, steps=20, warmup_fraction=0.2)).tolist()
    np.testing.assert_allclose(rates[:4], [0.25, 0.5, 0.75, 1.0], rtol=1e-6)
    assert max(rates) == 1.0 and rates[4:] == sorted(rates[4:], reverse=True)
    assert 0 < rates[-1] < 0.02
    assert learning_rates(Optim(lr=3.0, steps=20, warmup_fraction=0.0))[0] == 3.0


def test_the_loss_of_a_uniform_guess_is_the_log_of_the_vocabulary():
    total = token_losses(jnp.zeros((2, 3, 256)), jnp.zeros((2, 3), int))
    assert float(total.mean) == pytest.approx(np.log(256)) and total.tokens == 6


def update_of(optim, scale, rate):
    """What the first update of a new model gives."""
    graph, state = initialise(CONFIG)
    tokens = jnp.asarray(np.arange(18, dtype=np.int32).reshape(2, 9))
    numbers = jnp.float32(rate), jnp.float32(scale)
    return train_step(graph, optim, state, tokens, *numbers)


@pytest.fixture(scope="module")
def arms():
    """A clipped update of each arm, and how many programs were compiled for them."""
    before = train_step._cache_size()
    updates = [update_of(TIGHT, *arm) for arm in ARMS]
    return updates, train_step._cache_size() - before


def test_clipping_bounds_the_update_of_plain_gradients(arms):
    (clipped, numbers), _ = arms[0]
    state, free = update_of(STATIC, *ARMS[0])
    assert numbers["gradient_norm"] == free["gradient_norm"] > 1e-3
    moments = jax.tree.leaves(clipped.moments)
    means = [x for x in moments if x.ndim][: len(jax.tree.leaves(state.params))]
    norm = np.sqrt(sum(float((np.asarray(x) ** 2).sum()) for x in means))
    assert norm / (1 - STATIC.b1) == pytest.approx(1e-3, rel=1e-4)


def test_arms_that_differ_in_factor_and_rate_share_one_compilation(arms):
    ((_, first), (_, second)), programs = arms
    assert programs == 1
    assert first["loss"] != second["loss"]


def test_training_lowers_the_loss_and_writes_what_it_promises(finished):
    directory, summary = finished
    lines = (directory / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [2, 4, 6, 8, 10]
    assert json.loads(lines[-1])["loss"] < json.loads(lines[0])["loss"]
    assert json.loads((directory / "summary.json").read_text()) == summary
    assert summary["config"] == to_dict(CONFIG) and summary["status"] == "finished"
    assert summary["probe"]["initial"] != summary["probe"]["final"]
    bits = summary["metrics"]["validation_loss"] / np.log(2)
    assert summary["metrics"]["bits_per_byte"] == pytest.approx(bits)
    assert summary["metrics"]["bytes_per_token"] == 1
    assert summary["metrics"]["vocabulary"] == 256


def test_bits_per_byte_are_the_loss_over_the_bytes_that_the_targets_stand_for():
    # Where tokens end: the targets of two windows stand for 3 + 4 + 1 and 2 + 2 + 2.
    ends = np.array([[10, 13, 17, 18], [40, 42, 44, 46]])
    got = module._bits_per_byte(1.5, ends)
    assert got == pytest.approx(1.5 * 6 / 14 / np.log(2))


@pytest.mark.slow
def test_a_model_of_learned_tokens_is_trained_measured_and_sampled(corpus, tmp_path):
    pytest.importorskip("tokenizers")
    data = dataclasses.replace(CONFIG.data, tokenizer="bpe:270")
    evaluation = Evaluation(tokens=32)
    config = dataclasses.replace(CONFIG, data=data, evaluation=evaluation)
    with pytest.raises(KeyboardInterrupt):
        train(config, corpus, tmp_path, Interrupting(6))
    summary = train(config, corpus, tmp_path, Silent())
    metrics = summary["metrics"]
    assert metrics["bytes_per_token"] > 1.3 and metrics["vocabulary"] == 270
    nats = metrics["bits_per_byte"] * np.log(2) * metrics["bytes_per_token"]
    assert metrics["validation_loss"] == pytest.approx(nats)
    line = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])
    assert line["bits_per_byte"] < line["loss"] / np.log(2)
    assert summary["baselines"] == train_baselines(corpus)
    assert restore_parameters(tmp_path)[1].config.vocab_size == 270
    (text,) = sample(tmp_path, [b"the quick"], max_new_tokens=3)
    assert len(text) >= 3
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "summary.json").unlink()
    with pytest.raises(ConfigError, match="with another tokenizer"):
        train(config, corpus, tmp_path, Silent())


def train_baselines(corpus):
    return module.ngram_losses(*corpus.split(CONFIG.data.validation_fraction))


@pytest.mark.parametrize("step", [2, 6, 10])
def test_an_interrupted_run_ends_bitwise_as_an_uninterrupted_one(
    corpus, finished, tmp_path, step
):
    directory, summary = finished
    with pytest.raises(KeyboardInterrupt):
        train(CONFIG, corpus, tmp_path, Interrupting(step))
    assert not (tmp_path / "summary.json").exists()
    assert train(CONFIG, corpus, tmp_path, Silent()) == summary
    metrics = (tmp_path / "metrics.jsonl").read_bytes()
    assert metrics == (directory / "metrics.jsonl").read_bytes()
    for got, want in zip(*map(parameters, (tmp_path, directory)), strict=True):
        np.testing.assert_array_equal(got, want)


def test_a_run_that_is_watched_and_tracked_is_bitwise_the_same(
    corpus, finished, tmp_path, monkeypatch
):
    class Noting(Silent):
        """Keeps what is said and shown."""

        def __init__(self):
            self.notes, self.shown = [], {}

        def note(self, message):
            self.notes.append(message)

        def update(self, step, **numbers):
            self.shown[step] = numbers

    class Tracker(dict):
        """Keeps what is logged."""

        def log(self, step, numbers):
            self[step] = self.get(step, {}) | numbers

        def close(self, complete):
            self.complete = complete

    tracker, progress = Tracker(), Noting()
    monkeypatch.setattr(onlookers, "open_tracker", lambda *_: tracker)
    logging = dataclasses.replace(CONFIG.logging, watch=3, alarm_entropy=0.999)
    watched = dataclasses.replace(CONFIG, logging=logging)
    summary = train(watched, corpus, tmp_path, progress)
    directory, want = finished
    assert summary == want | {"config": to_dict(watched)}
    metrics = (tmp_path / "metrics.jsonl").read_bytes()
    assert metrics == (directory / "metrics.jsonl").read_bytes()
    lines = [json.loads(x) for x in (tmp_path / "watch.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [3, 6, 9, 10]
    assert [len(layer) for layer in lines[0]["heads"]] == [2]
    assert progress.notes[0].startswith("step 3: layer 0, head 0: entropy / ln n is ")
    assert list(progress.shown) == list(tracker) == [2, 3, 4, 6, 8, 9, 10]
    assert {"loss", "tokens_per_second", "lowest_entropy"} < set(progress.shown[10])
    assert {"loss", "learning_rate", "dead_share"} < set(tracker[9])
    assert "dead_share" not in tracker[8] and "validation_loss" not in tracker[9]
    for name in ("validation_loss", "bits_per_byte"):
        sent = tracker[10]["validation_" + name.removeprefix("validation_")]
        assert sent == summary["metrics"][name]
    last = json.loads(metrics.splitlines()[-1])
    assert tracker[10]["bits_per_byte"] == last["bits_per_byte"]
    assert tracker.complete


def parameters(directory):
    from flax import nnx

    return jax.tree.leaves(nnx.state(restore_parameters(directory)[1], nnx.Param))


def test_a_killed_run_ends_bitwise_as_an_uninterrupted_one(tmp_path):
    text = tmp_path / "text.txt"
    text.write_bytes(b"the quick brown fox jumps over the lazy dog. " * 100)
    config = tmp_path / "run.toml"
    config.write_text(
        f"""out = "{tmp_path}"
        data = {{ source = "{text}", context = 8, batch = 2 }}
        model = {{ layers = 1, d_model = 8, heads = 2, d_k = 4, d_v = 3, d_ff = 8 }}
        optim = {{ steps = 200 }}
        evaluation = {{ tokens = 64 }}
        logging = {{ every = 5, checkpoint_every = 20 }}
        probe = {{ batch = 2 }}"""
    )

    def command(name):
        return ["train", str(config), "--name", name]

    def result(name, file):
        (path,) = (tmp_path / name).glob(f"*/{file}")
        return path.read_bytes()

    def start(name):
        return subprocess.Popen(
            [sys.executable, "-m", "experiments", *command(name)],
            env=os.environ | {"JAX_PLATFORMS": "cpu"},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    killed = start("killed")
    deadline = time.monotonic() + 120
    while not list((tmp_path / "killed").glob("*/checkpoints/20")):
        assert killed.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    assert not list((tmp_path / "killed").glob("*/summary.json"))
    both = [start(name) for name in ("killed", "whole")]
    assert [run.wait() for run in both] == [0, 0]
    killed, whole = (json.loads(result(x, "summary.json")) for x in ("killed", "whole"))
    assert killed["metrics"] == whole["metrics"] and killed["probe"] == whole["probe"]
    assert result("killed", "metrics.jsonl") == result("whole", "metrics.jsonl")


@pytest.mark.parametrize(
    ("name", "value"),
    [("loss", np.nan), ("gradient_norm", np.inf), ("learning_rate", np.inf)],
)
def test_a_number_that_is_not_finite_ends_the_run_and_says_so(
    corpus, tmp_path, monkeypatch, name, value
):
    def diverging(*args):
        state, numbers = train_step(*args)
        fifth = args[4] == learning_rates(CONFIG.optim)[4]
        return state, numbers | {name: jnp.where(fifth, value, 1.0)}

    monkeypatch.setattr(module, "train_step", diverging)
    logging = dataclasses.replace(CONFIG.logging, checkpoint_every=100)
    config = dataclasses.replace(CONFIG, logging=logging)
    summary = train(config, corpus, tmp_path, Silent())
    assert summary["status"] == "diverged" and summary["metrics"]["step"] == 4
    reason = f"{name.replace('_', ' ')} is {value} at step 5"
    assert summary["reason"] == reason
    assert summary["metrics"]["validation_loss"] is None
    assert summary["probe"]["initial"] and summary["probe"]["final"] is None
    metrics = (tmp_path / "metrics.jsonl").read_text()
    assert metrics.count("\n") == 2 and "NaN" not in metrics and "Inf" not in metrics
    with pytest.raises(ConfigError) as caught:
        sample(tmp_path, [b"x"])
    assert f"no checkpoint: its training diverged ({reason})" in str(caught.value)


def with_a_last_update(changed, seed=0):
    """A training step whose last update, for a seed, ends with other parameters."""
    want = initialise(dataclasses.replace(CONFIG, seed=seed))[1].params
    last, first = learning_rates(CONFIG.optim)[-1], learning_rates(CONFIG.optim)[0]
    chosen = []

    def step(*args):
        if args[4] == first:
            same = jax.tree.map(np.array_equal, args[2].params, want)
            chosen[:] = [all(jax.tree.leaves(same))]
        state, numbers = train_step(*args)
        if args[4] == last and chosen[0]:
            state = state._replace(params=changed(state.params))
        return state, numbers

    return step


def test_a_last_update_to_nan_is_told_again_and_a_sweep_goes_on(
    corpus, tmp_path, monkeypatch
):
    def to_nan(params):
        return jax.tree.map(lambda x: x * np.nan, params)

    monkeypatch.setattr(module, "train_step", with_a_last_update(to_nan))
    data = dataclasses.replace(CONFIG.data, source=corpus.name)
    config = dataclasses.replace(CONFIG, data=data, out=str(tmp_path))
    sweep(config, {"seed": [0, 1]}, Silent())
    ends = []
    for seed in (0, 1):
        again = dataclasses.replace(config, seed=seed)
        summary = run(again, corpus, Silent())
        ends.append((summary["status"], summary.get("reason")))
        assert summary["metrics"]["step"] == 10
    diverged = ("diverged", "validation loss is nan after step 10")
    assert ends == [diverged, ("finished", None)]


def test_attention_that_is_not_finite_though_the_loss_is_ends_as_diverged(
    corpus, tmp_path, monkeypatch
):
    def huge_queries(params):
        attention = params["blocks"][0]["attention"]
        kernel = attention["query"]["kernel"]
        # Logits have a square that is infinite; their softmax is 0 and 1.
        kernel[...] = kernel[...].at[:, 1].multiply(1e21)
        return params

    monkeypatch.setattr(module, "train_step", with_a_last_update(huge_queries))
    logging = dataclasses.replace(CONFIG.logging, watch=100)
    config = dataclasses.replace(CONFIG, logging=logging)
    summary = train(config, corpus, tmp_path, Silent())
    reason = "layer 0, head 1: logit std is not finite after step 10"
    assert (summary["status"], summary["reason"]) == ("diverged", reason)
    assert summary["probe"]["final"] is None
    (line,) = (tmp_path / "watch.jsonl").read_text().splitlines()
    assert json.loads(line)["heads"][0][1]["logit_std"] is None and "Inf" not in line


def test_the_directory_of_another_run_is_refused_and_left_alone(corpus, finished):
    directory, _ = finished
    before = {path: path.stat().st_mtime_ns for path in directory.rglob("*")}
    other = dataclasses.replace(CONFIG, seed=1)
    with pytest.raises(ConfigError, match="another config"):
        train(other, corpus, directory, Silent())
    with pytest.raises(ConfigError, match="another text"):
        train(CONFIG, Corpus("x", corpus.data, "0" * 64), directory, Silent())
    assert before == {path: path.stat().st_mtime_ns for path in directory.rglob("*")}


def test_a_directory_in_which_another_process_trains_is_refused(corpus, tmp_path):
    with (tmp_path / ".lock").open("a") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(ConfigError, match="another process is training"):
            train(CONFIG, corpus, tmp_path, Silent())
        assert list(tmp_path.iterdir()) == [tmp_path / ".lock"]
    assert train(CONFIG, corpus, tmp_path, Silent())["status"] == "finished"


def test_the_directory_is_held_as_long_as_a_run_is_trained(corpus, tmp_path):
    class Looking(Silent):
        """Tries to take the lock while the run is trained, and when it ends."""

        def update(self, step, **numbers):
            with (tmp_path / ".lock").open("a") as file:
                with pytest.raises(BlockingIOError):
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)

        def finish(self, message):
            self.update(None)

    train(CONFIG, corpus, tmp_path, Looking())
    with (tmp_path / ".lock").open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


@pytest.fixture
def unfinished(finished, tmp_path):
    """A copy of a run that lacks nothing but its summary."""
    directory = shutil.copytree(finished[0], tmp_path / "run")
    (directory / "summary.json").unlink()
    return directory


def deleted(path):
    path.unlink()


def halved(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def doubled(path):
    path.write_bytes(path.read_bytes() * 2)


def replaced_by(text):
    return lambda path: path.write_text(text)


@pytest.mark.parametrize(
    "damage",
    [deleted, halved, doubled, *map(replaced_by, ["", "junk\n", "{}\n", "[1]\n"])],
)
def test_metrics_that_do_not_fit_the_checkpoint_are_refused(corpus, unfinished, damage):
    damage(unfinished / "metrics.jsonl")
    with pytest.raises(ConfigError) as caught:
        train(CONFIG, corpus, unfinished, Silent())
    assert "metrics.jsonl is damaged" in str(caught.value)
    assert f"; remove {unfinished} to compute it again" in str(caught.value)


def test_a_line_after_the_checkpoint_or_cut_off_is_no_damage(
    corpus, finished, unfinished
):
    with (unfinished / "metrics.jsonl").open("a") as file:
        file.write('{"step": 12, "loss": 1.0}\n{"step": 14, "lo')
    assert train(CONFIG, corpus, unfinished, Silent()) == finished[1]


@pytest.mark.parametrize("text", ["", "{", "{}", "[1]", '{"config": {"x": 1}}'])
def test_a_damaged_claim_is_refused(corpus, unfinished, text):
    (unfinished / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=r"config\.json is damaged \("):
        train(CONFIG, corpus, unfinished, Silent())
    with pytest.raises(ConfigError, match=r"config\.json is damaged \("):
        sample(unfinished, [b"x"])


def test_an_unknown_setting_in_a_claim_is_damage(unfinished):
    claim = {"config": {"optim": {"lrr": 1}}, "sha256": ""}
    (unfinished / "config.json").write_text(json.dumps(claim))
    with pytest.raises(ConfigError, match=r"config\.json is damaged \(.*'optim\.lrr'"):
        sample(unfinished, [b"x"])


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("default", None),
        ("default/_METADATA", "junk"),
        ("default/_METADATA", "[]"),
        ("default/ocdbt.process_0", None),
        ("_CHECKPOINT_METADATA", "[3]"),
    ],
)
# Orbax leaves coroutines behind that nobody waits for.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_damaged_checkpoint_is_named_and_the_run_goes_on_without_it(
    corpus, finished, unfinished, file, text
):
    path = unfinished / "checkpoints/10" / file
    if path.is_dir():
        shutil.rmtree(path)
    elif text is None:
        path.unlink()
    else:
        path.write_text(text)
    for use in (
        lambda: train(CONFIG, corpus, unfinished, Silent()),
        lambda: sample(unfinished, [b"x"]),
    ):
        with pytest.raises(ConfigError, match="is damaged; remove it") as caught:
            use()
    shutil.rmtree(str(caught.value).split(" is damaged")[0])
    del caught
    gc.collect()
    assert train(CONFIG, corpus, unfinished, Silent()) == finished[1]


def test_a_checkpoint_of_other_parameters_is_refused(corpus, unfinished):
    model = dataclasses.replace(CONFIG.model, d_ff=9)
    checkpoints = Checkpoints(unfinished)
    checkpoints.save(11, initialise(dataclasses.replace(CONFIG, model=model))[1])
    checkpoints.close()
    for use in (
        lambda: train(CONFIG, corpus, unfinished, Silent()),
        lambda: sample(unfinished, [b"x"]),
    ):
        with pytest.raises(ConfigError, match="11 holds other parameters than"):
            use()


def test_no_other_failure_is_taken_for_damage(unfinished, monkeypatch):
    def restore(*args, **options):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(ocp.CheckpointManager, "restore", restore)
    with pytest.raises(RuntimeError, match="out of memory"):
        sample(unfinished, [b"x"])


@pytest.mark.parametrize("step", [2, 10])
def test_a_directory_that_is_deleted_meanwhile_ends_the_run(corpus, tmp_path, step):
    class Deleting(Silent):
        def update(self, at, **numbers):
            if at == step:
                shutil.rmtree(tmp_path / "run")

    with pytest.raises(FileNotFoundError) as caught:
        train(CONFIG, corpus, tmp_path / "run", Deleting())
    assert caught.value.filename in map(
        str, (tmp_path / "run/metrics.jsonl", tmp_path / "run/summary.json")
    )
    assert not (tmp_path / "run").exists()


def test_an_interrupt_before_a_line_is_written_repeats_its_step(
    corpus, finished, tmp_path, monkeypatch
):
    class Interrupting:
        """Stands for the module json."""

        @staticmethod
        def dumps(line):
            if line["step"] == 4:
                raise KeyboardInterrupt
            return json.dumps(line)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(record, "json", Interrupting)
        train(CONFIG, corpus, tmp_path, Silent())
    assert train(CONFIG, corpus, tmp_path, Silent()) == finished[1]
    metrics = (tmp_path / "metrics.jsonl").read_bytes()
    assert metrics == (finished[0] / "metrics.jsonl").read_bytes()


def test_prompts_of_the_command_line_are_continued_in_their_order(
    finished, tmp_path, capsys
):
    directory, _ = finished
    (tmp_path / "prompt").write_bytes(b"dog")
    args = ["--prompt", "the", "--prompt-file", str(tmp_path / "prompt")]
    args += ["--prompt", "fox", "--tokens", "1", "--temperature", "0"]
    assert main(["sample", str(directory), *args]) == 0
    out, err = capsys.readouterr()
    config, model = restore_parameters(directory)
    prompts = [b"the", b"dog", b"fox"]
    logits = model(jnp.asarray([*map(list, prompts)]), scale=logit_scale(config.model))
    want = ""
    for number, token in enumerate(logits[:, -1].argmax(-1), start=1):
        text = prompts[number - 1] + bytes([int(token)])
        want += f"--- {number} of 3 ---\n{text.decode(errors='replace')}\n"
    assert out == want
    assert "3 tokens, " in err and " per second" in err
