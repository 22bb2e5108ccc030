"""The cost of attention: nobody is timed unseen, and nobody is dropped in silence."""

import json
import subprocess
import sys
from dataclasses import replace
from statistics import median
from xml.dom import minidom

import numpy as np
import pytest

from experiments import peers
from experiments.__main__ import main
from experiments.cases import Case, Inputs, tables_of
from experiments.config import ConfigError, Cost, from_dict, load, override
from experiments.cost import OURS, check, measure, measure_cost
from experiments.cost_page import sections
from experiments.machine import limit_threads
from experiments.page import markdown
from experiments.progress import Silent
from experiments.settings import HeadCount, HeadSize
from experiments.timing import Clock, Ready, difference, slope, time_pair

pytestmark = pytest.mark.usefixtures("quick_compiler")
PEERS = ("jax.nn", "jax.nn:cudnn", "torch")
TINY = Cost(
    peers=PEERS,
    masks=("causal", "packed"),
    passes=("forward",),
    lengths=(11, 22),
    memory_lengths=(44,),
    head_dim=7,
    window=5,
    documents=3,
    check_length=13,
    rounds=3,
    sample_ms=0.01,
    head_size=HeadSize((3,), 11, ("jax.nn",)),
    head_count=HeadCount((2,), 10, 11, ("jax.nn",)),
)
TABLES = ("length", "head_size", "head_count")


def blind(case, real=peers.IMPLEMENTATIONS["jax.nn"]):
    """A peer that has never heard of packing."""
    return real(replace(case, mask="causal") if case.mask == "packed" else case)


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """The results, and their directory, with a wrong peer and a missing one."""
    out = tmp_path_factory.mktemp("out")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(peers.IMPLEMENTATIONS, "jax.nn", blind)
        patch.setitem(sys.modules, "torch", None)
        results = measure_cost(replace(TINY, out=str(out)), Silent(), "three", "cmd")
    return results, out / "cost"


def rows(results, tables=TABLES, **wanted):
    return [
        row
        for table in tables
        for row in results[table]
        if all(row[key] == value for key, value in wanted.items())
    ]


def test_the_file_holds_what_was_measured(measured):
    results, directory = measured
    assert json.loads((directory / "cost.json").read_text()) == results
    assert results["finished"] and results["command"] == "cmd"


def test_every_case_has_a_row_for_everybody(measured):
    results, _ = measured
    for length in TINY.lengths:
        for mask in TINY.masks:
            found = rows(results, ["length"], length=length, mask=mask)
            assert [row["implementation"] for row in found] == [OURS, *PEERS]
            assert all(("ratio" in row) != bool(row["reason"]) for row in found)
    names = [row["implementation"] for row in results["head_count"]]
    assert names == [OURS, "jax.nn"]


def test_a_ratio_is_the_median_of_the_rounds_and_its_spread_is_told(measured):
    timed = [row for row in rows(measured[0]) if not row["reason"]]
    assert len(timed) == 11  # without jax.nn in the packed cases
    for row in timed:
        assert row["ratio"] == [f(row["ratios"]) for f in (median, min, max)]
        assert len(row["ratios"]) == TINY.rounds and min(row["ratios"]) > 0
        assert min(row["ms"], row["ours_ms"], row["wall_ms"], row["ours_wall_ms"]) > 0


def test_a_peer_with_other_values_is_reported_and_not_timed(measured):
    results, _ = measured
    (seen,) = rows(results, ["checks"], implementation="jax.nn", mask="packed")
    assert seen["differs"] > 0.1 and "from reference at n=13" in seen["reason"]
    wrong = rows(results, implementation="jax.nn", mask="packed")
    assert len(wrong) == 3
    assert all(row["reason"] == seen["reason"] and "ms" not in row for row in wrong)
    right = rows(results, implementation="jax.nn", mask="causal")
    assert not any(row["reason"] for row in right)


def test_other_values_on_the_real_inputs_are_reported_too(monkeypatch):
    monkeypatch.setitem(peers.IMPLEMENTATIONS, "jax.nn", blind)
    case = Case("packed", False, 11, 1, 7, documents=3)
    _, row = measure(case, (OURS, "jax.nn"), TINY, Clock("cpu", 3, 1.0, 1e-5), {})
    assert row["reason"].startswith("differs by") and "blockwise" in row["reason"]


@pytest.mark.peer
@pytest.mark.parametrize("mask", ["causal", "full", "window", "packed"])
def test_torch_and_all_others_have_the_same_values(mask):
    pytest.importorskip("torch")
    settings = replace(TINY, peers=("reference", "jax.nn", "flax.nnx", "torch"))
    found = check(mask, settings)
    assert len(found) == 5 and not any(row["reason"] for row in found)
    assert all(row["differs"] < row["tolerance"] for row in found)


@pytest.mark.parametrize("table", ["head_count", "head_size"])
def test_the_peers_of_every_table_are_checked_before_they_are_timed(table):
    heads = dict(head_count=HeadCount(peers=()), head_size=HeadSize(peers=()))
    heads[table] = replace(heads[table], peers=("jax.nn",))
    found = check("causal", replace(TINY, peers=(), **heads))
    assert [row["implementation"] for row in found] == [OURS, "jax.nn"]


def test_if_blockwise_is_wrong_nobody_is_timed(monkeypatch):
    monkeypatch.setitem(peers.IMPLEMENTATIONS, OURS, blind)
    settings = replace(
        TINY, peers=(), head_count=HeadCount(peers=()), head_size=HeadSize(peers=())
    )
    (ours,) = check("packed", settings)
    assert ours["reason"].startswith("differs by")
    wrong = {(OURS, "packed"): ours["reason"]}
    case = Case("packed", False, 11, 1, 7, documents=3)
    clock = Clock("cpu", 3, 1.0, 1e-5)
    _, row = measure(case, (OURS, "jax.nn"), settings, clock, wrong)
    assert row["reason"] == "blockwise was not timed" and "ms" not in row


def test_a_missing_peer_and_one_that_declines_say_so(measured):
    results, directory = measured
    for name, reason in (
        ("torch", "torch is not installed"),
        ("jax.nn:cudnn", "cuDNN"),
    ):
        found = rows(results, implementation=name)
        assert found and all(reason in row["reason"] for row in found)
        assert reason in (directory / "cost.md").read_text()


@pytest.mark.parametrize(
    ("limit", "reason"),
    [
        (dict(memory_limit_gb=1e-9), "GB, over the limit of 1e-09 GB"),
        (dict(call_limit_s=1e-9), "s, over the limit of 1e-09 s"),
    ],
)
def test_what_needs_too_much_says_how_much(limit, reason):
    settings = replace(TINY, **limit)
    case = Case("causal", False, 11, 1, 7)
    (row,) = measure(case, (OURS,), settings, Clock("cpu", 3, 1.0, 1e-5), {})
    assert reason in row["reason"] and row["temp_bytes"] is not None


def test_what_has_not_begun_in_time_says_so(tmp_path):
    settings = replace(TINY, out=str(tmp_path), minutes=1e-9, masks=("full",))
    settings = replace(settings, peers=(), head_count=HeadCount(peers=()))
    results = measure_cost(settings, Silent(), "three")
    late = rows(results, (*TABLES, "memory"))
    assert late and all("not begun within" in row["reason"] for row in late)
    assert (tmp_path / "cost" / "cost.svg").exists()


def test_memory_is_known_for_lengths_that_are_not_run(measured):
    results, _ = measured
    found = rows(results, ["memory"], length=44, implementation="jax.nn")
    assert len(found) == 2 and all(row["temp_bytes"] > 44 * 44 * 4 for row in found)
    assert not rows(results, ["memory"], implementation="torch")


def test_threads_machine_and_slopes_are_told(measured):
    results, directory = measured
    text = (directory / "cost.md").read_text()
    for words in ("| threads | three |", "| load average |", "CPU time of the process"):
        assert words in text
    for key in ("cpu", "device", "jax", "flax", "date"):
        assert results["machine"][key]
    known = [row for row in results["slopes"] if row["time"] is not None]
    assert {row["implementation"] for row in known} == {OURS, "jax.nn"}


def test_the_figure_is_a_file_of_its_own_with_slopes(measured):
    text = (measured[1] / "cost.svg").read_text()
    minidom.parseString(text)
    assert "causal: temporary MB" in text and "blockwise  n^" in text


def test_the_tables_can_be_made_of_the_file(measured):
    results, directory = measured
    again = json.loads((directory / "cost.json").read_text())
    text = "\n".join(map(markdown, sections(again)))
    assert text == (directory / "cost.md").read_text()
    assert "| mask | n | blockwise, ms | jax.nn | jax.nn:cudnn |" in text
    assert "Heads at constant width 10" in text


@pytest.mark.parametrize("power", [0.0, 1.0, 2.0])
def test_the_slope_is_the_power(power):
    sizes = [512, 2048, 8192]
    assert slope(sizes, [3 * n**power for n in sizes]) == pytest.approx(power, abs=1e-9)


def test_one_length_has_no_slope():
    assert slope([512, 512], [1.0, 2.0]) is None
    assert slope([512, 1024], [1.0, 0.0]) is None


def test_a_difference_is_seen_in_a_small_vector_and_not_made_of_rounding():
    want = np.ones((4, 3), np.float32)
    want[0] = 0.0
    assert difference([want], [want]) == 0.0
    assert difference([want + np.float32(1e-7)], [want]) < 1e-6
    wrong = want.copy()
    wrong[0] = 0.1
    assert difference([want, wrong], [want, want]) > 0.05
    wrong[0] = np.nan
    assert difference([wrong], [want]) == np.inf
    nothing = np.zeros((4, 3), np.float32)
    assert difference([nothing], [nothing]) == 0.0
    assert difference([want], [nothing]) == difference([wrong], [nothing]) == np.inf


def test_a_long_round_is_repeated_three_times_at_most():
    calls = []
    ready = Ready(lambda: calls.append(1), lambda out: out, [], seconds=10.0)
    found = time_pair(ready, ready, Clock("wall", 9, 1.0, 1e-3))
    assert len(found["ratios"]) == 3
    assert len(calls) == 3 * 2 * 2  # every timed call after an untimed one


def test_the_masks_of_the_peers_say_what_the_words_say():
    case = Case("window", False, 40, 1, 3, batch=2, window=5, documents=4)
    assert Inputs(case, 0).dense.sum(-1).max() == 5
    assert Inputs(case, 0).dense[0, 0, :, 0].tolist() == [True] * 5 + [False] * 35
    assert Inputs(replace(case, mask="full"), 0).dense.all()
    packed = Inputs(replace(case, mask="packed"), 0)
    assert (np.diff(packed.ids) >= 0).all() and packed.ids.min() >= 1
    alone = packed.dense.sum(-1) == 1
    assert alone.sum() >= 2 and packed.dense.shape == (2, 1, 40, 40)


def test_the_gpu_config_runs_small_on_a_cpu(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    small = (
        "--lengths 16 --memory-lengths 32 --check-length 16 --heads 1 --head-dim 8 "
        "--masks causal --passes forward --rounds 1 --sample-ms 0.01 "
        "--head-size.sizes 4 --head-size.length 8 --head-count.counts 2 "
        "--head-count.width 8 --head-count.length 8 --peers jax.nn:cudnn "
        "--head-count.peers jax.nn --head-size.peers jax.nn:cudnn --out"
    )
    args = ["cost", "configs/cost_gpu.toml", *small.split(), str(tmp_path)]
    assert main(args) == 0
    out = capsys.readouterr().out
    assert "Time, forward" in out and "jax.nn" in out
    results = json.loads((tmp_path / "cost_gpu" / "cost.json").read_text())
    assert results["settings"]["dtype"] == "bfloat16"
    checked = {row["implementation"]: row["reason"] for row in results["checks"]}
    assert checked[OURS] is None and checked["jax.nn"] is None


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"lenghts": [8]}, "unknown key 'lenghts'; did you mean 'lengths'?"),
        ({"counts": [8]}, "'counts' belongs at 'head_count.counts'"),
        ({"optim": {}}, "unknown key 'optim'; the keys here are name, out, seed"),
        ({"head_size": {"sises": [8]}}, "did you mean 'head_size.sizes'?"),
        ({"peers": ["torhc"]}, "peers[0] = 'torhc' must be one of"),
        ({"masks": []}, "masks = [] must be a list of at least one value"),
        ({"threads": -1}, "threads = -1 must not be negative"),
    ],
)
def test_settings_are_refused_as_those_of_training_are(table, message):
    with pytest.raises(ConfigError) as caught:
        from_dict(table, Cost)
    assert message in str(caught.value)


def test_options_override_the_file():
    config, lists = load("configs/cost.toml")
    changed = override(config, ["--lengths", "8", "16", "--head-count.width", "64"])
    assert (changed.lengths, changed.head_count.width) == ((8, 16), 64)
    assert changed.masks == config.masks and not lists
    with pytest.raises(ConfigError, match="did you mean 'lengths'"):
        override(config, ["--lenghts", "8"])


def test_heads_that_do_not_divide_the_width_are_refused():
    with pytest.raises(ConfigError, match="3 heads do not divide the width 512"):
        tables_of(Cost(head_count=HeadCount(counts=(3,))))


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ("cost configs/smoke.toml", "of another kind: use the command train or sweep"),
        ("sweep configs/cost.toml", "of another kind: use the command cost"),
        ("cost configs/cost.toml --threads 4096", "is more than the"),
    ],
)
def test_the_wrong_command_is_told_in_one_sentence(capsys, args, message):
    assert main(args.split()) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_an_unknown_kind_is_told_the_nearest(tmp_path):
    path = tmp_path / "bad.toml"
    path.write_text("kind = 'cots'")
    with pytest.raises(ConfigError, match="did you mean 'cost'"):
        load(path)


def test_an_interrupted_measurement_starts_again(capsys, monkeypatch):
    def interrupt(path):
        raise KeyboardInterrupt

    monkeypatch.setattr("experiments.commands.load", interrupt)
    assert main(["cost", "configs/cost.toml"]) == 130
    assert "the same command starts again" in capsys.readouterr().err


def test_threads_are_limited_before_jax_starts_or_not_at_all():
    code = (
        "import os; from experiments.machine import limit_threads;"
        "print(limit_threads(1), len(os.sched_getaffinity(0)), os.environ['XLA_FLAGS'])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    assert run.stdout.startswith(b"1, on one core 1 ")
    assert b"--xla_cpu_multi_thread_eigen=false" in run.stdout
    assert "JAX had started before" in limit_threads(1)
