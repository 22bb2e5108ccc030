"""Planned memory: the derivatives that are compiled, their growth, the conclusions."""

import json
from functools import partial

import jax.numpy as jnp
import numpy as np
import pytest

from experiments.__main__ import main
from experiments.cases import Case
from experiments.claims import memory
from experiments.claims.memory import CLAIM, DERIVATIVES, HERE, NO_TPU, TPU, Memory
from experiments.config import ConfigError
from experiments.evidence import FAILS, HOLDS, OPEN, PART
from experiments.page import Figure, Table
from experiments.studies.planned import (
    ATTEND,
    FORWARD,
    GRADIENT,
    HVP,
    derived,
    measured,
)
from experiments.studies.planned import program as compiled
from jattn.algorithms.block_sizes import BLOCK_SIZES

pytestmark = pytest.mark.usefixtures("quick_compiler")


def test_derivatives_are_those_of_the_dot_product_with_c():
    q, k, v, c = (jnp.float32(x) for x in (2.0, 3.0, 5.0, 7.0))

    def attend(q, k, v):
        return q * k * v

    assert derived(attend, FORWARD)(q, k, v, c) == 30
    assert derived(attend, GRADIENT)(q, k, v, c) == (7 * 15, 7 * 10, 7 * 6)
    # The Hessian of c q k v has rows c (0, v, k), c (v, 0, q), c (k, q, 0).
    assert derived(attend, HVP)(q, k, v, c) == (49 * 8, 49 * 7, 49 * 5)


def test_a_layer_has_four_matrices_and_their_biases_at_any_length():
    settings = Memory(heads=3, head_dim=5)
    assert memory.parameters(settings) == 4 * 15**2 + 4 * 15


def test_dense_memory_grows_like_the_square_and_blockwise_like_the_length():
    found = {}
    for name in ("blockwise", "jax.nn"):
        sizes = [
            compiled(name, FORWARD, Case("causal", True, n, 1, 8)).temp_bytes
            for n in (512, 2048)
        ]
        found[name] = np.log(sizes[1] / sizes[0]) / np.log(4)
    assert found["blockwise"] < memory.LINEAR
    assert found["jax.nn"] == pytest.approx(2, abs=0.1)


def rows(lengths, dense=2.0, tiled=1.0, names=tuple(ATTEND), timed=True):
    """Programs that grow with these powers of n."""
    return [
        {
            "derivative": derivative,
            "length": n,
            "implementation": name,
            "bytes": power and int(1e6 * n**power),
            "ms": n / 10 if timed else None,
            "reason": None,
        }
        for derivative in DERIVATIVES
        for n in lengths
        for name in names
        for power in [tiled if name == "blockwise" else dense]
    ]


def results(tpu=None, **powers):
    return {"parameters": 99, "rows": {HERE: rows((8, 32), **powers), TPU: tpu or []}}


@pytest.mark.parametrize(
    ("numbers", "outcomes"),
    [
        (results(), [PART, HOLDS]),
        (results(tiled=2.0), [HOLDS, FAILS]),
        (results(tiled=1.5), [PART, FAILS]),
        (results(tiled=None), [PART, OPEN]),
        (results(dense=None), [FAILS, HOLDS]),
        (results(dense=None, tiled=None), [OPEN, OPEN]),
        (results(dense=1.0), [FAILS, HOLDS]),
        (results(tpu=rows((8, 16), timed=False)), [PART, HOLDS, HOLDS]),
        (results(tpu=rows((8, 16), tiled=1.5)), [PART, HOLDS, FAILS]),
    ],
)
def test_verdicts_follow_from_the_numbers(numbers, outcomes):
    found = CLAIM.answers(numbers)
    assert [answer.outcome for answer in found] == outcomes
    assert all("compiler" in answer.number for answer in found)
    told = outcomes[0] == PART and outcomes[1] != OPEN
    assert found[0].sentence.startswith("These ") == (not told)
    for answer in found[1:]:
        assert ("faster than the length" in answer.sentence) == (
            answer.outcome == FAILS
        )
    for answer in found[2:]:
        assert "has not run it: " in answer.sentence


def test_the_parameters_stand_beside_every_program():
    figure, here, growth, note = CLAIM.parts(results())
    assert isinstance(figure, Figure) and HVP in figure.draw()
    assert isinstance(here, Table) and len(here.rows) == 18
    assert {row[here.columns.index("parameters")] for row in here.rows} == {99}
    assert growth.rows[0] == [FORWARD, "blockwise", pytest.approx(1), pytest.approx(1)]
    assert note == NO_TPU


def test_the_table_of_a_tpu_has_no_times_and_says_whose_word_it_is():
    tpu = rows((8, 16), names=("blockwise", "jax.nn"), timed=False)
    tpu[-1] |= {"bytes": None, "reason": "RESOURCE_EXHAUSTED"}
    *_, programs, growth = CLAIM.parts(results(tpu=tpu))
    assert "ms" not in programs.columns and "No TPU has run it" in programs.caption
    assert programs.rows[-1][-1] == "RESOURCE_EXHAUSTED"
    assert list(growth.columns) == ["derivative", "implementation", "memory"]
    assert CLAIM.answers(results(tpu=tpu))[2].outcome == HOLDS
    for row in tpu:
        row["bytes"] = None
    assert CLAIM.answers(results(tpu=tpu))[2].outcome == OPEN


def test_a_program_without_temporary_memory_has_no_logarithm():
    numbers = results()
    for row in numbers["rows"][HERE]:
        if row["implementation"] == "jax.nn" or row["length"] == 8:
            row["bytes"] = 0 if row["length"] == 8 else None
    figure, *_ = CLAIM.parts(numbers)
    assert "blockwise" in figure.draw() and "jax.nn" not in figure.draw()


def test_in_a_block_of_the_default_size_or_more_blockwise_is_not_dense():
    assert max(max(sizes) for sizes in BLOCK_SIZES.values()) == memory.BLOCK


@pytest.fixture
def simple(monkeypatch):
    """Implementations that compile at once; the last has other values."""
    for name, factor in zip(ATTEND, (1, 1, 2), strict=True):
        monkeypatch.setitem(ATTEND, name, partial(lambda c, q, k, v: c * v, factor))
    return partial(measured, FORWARD, Case("causal", True, 16, 1, 4), seed=0, rounds=1)


def test_what_needs_too_much_is_not_run(simple):
    found = simple(limit_gb=1e-9)["rows"]
    assert [row["implementation"] for row in found] == list(ATTEND)
    assert all(row["ms"] is None and "GB" in row["reason"] for row in found)


def test_an_implementation_with_other_values_is_not_timed(simple):
    *timed, wrong = simple(limit_gb=1)["rows"]
    assert all(row["ms"] > 0 and row["reason"] is None for row in timed)
    assert wrong["ms"] is None and wrong["reason"].startswith("differs by")


def fails(*vectors):
    raise RuntimeError("RESOURCE_EXHAUSTED: out of memory\nand more")


def test_an_implementation_that_fails_says_why_and_the_others_are_timed(
    simple, monkeypatch
):
    monkeypatch.setitem(ATTEND, "reference", fails)
    ours, failed, _ = simple(limit_gb=1)["rows"]
    assert ours["ms"] > 0 and failed["ms"] is failed["bytes"] is None
    assert failed["reason"] == "RESOURCE_EXHAUSTED: out of memory"


def test_nobody_takes_the_place_of_the_first_in_comparisons(simple, monkeypatch):
    monkeypatch.setitem(ATTEND, "blockwise", fails)
    failed, *others = simple(limit_gb=1)["rows"]
    assert failed["reason"].startswith("RESOURCE")
    for row in others:
        assert row["ms"] is None and row["bytes"] is not None
        assert row["reason"] == "not compared, as blockwise was not run"


def test_the_first_is_not_compared_with_itself(monkeypatch):
    """Of results that are 0 there is no relative difference."""
    zero = {"blockwise": lambda q, k, v: 0 * v}
    monkeypatch.setattr("experiments.studies.planned.ATTEND", zero)
    case = Case("causal", True, 4, 1, 4)
    (row,) = measured(FORWARD, case, seed=0, rounds=1, limit_gb=1)["rows"]
    assert row["ms"] > 0 and row["reason"] is None


@pytest.mark.parametrize("name", ["lengths", "tpu_lengths"])
def test_lengths_that_tell_no_slope_are_refused(name):
    for lengths in ((64,), (1024, 512), (512, 512)):
        with pytest.raises(ConfigError, match=f"^{name} = .* two or more numbers that"):
            CLAIM.measure(Memory(**{name: lengths}), None)
    for lengths in ((16, 64), (16, 511, 1024)):
        with pytest.raises(ConfigError, match=f"^{name} = .* two of 512 or more"):
            CLAIM.measure(Memory(**{name: lengths}), None)
    with pytest.raises(ConfigError, match="must end with twice the first or more"):
        CLAIM.measure(Memory(lengths=(600, 1100)), None)


@pytest.mark.slow
def test_the_experiment_runs_at_small_settings_and_is_not_run_again(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(memory, "find_spec", lambda name: None)
    args = ["memory", "configs/memory.toml", "--out", str(tmp_path)]
    args += ["--lengths", "512", "1024", "--head-dim", "8", "--rounds", "1"]
    path = tmp_path / "memory" / "results.json"
    kept = []
    for _ in range(2):
        assert main(args) == 0
        kept.append(json.loads(path.read_text())["results"])
    assert kept[0] == kept[1]
    found = kept[0]["rows"][HERE]
    assert len(found) == 18 and all(row["ms"] > 0 for row in found)
    assert not any(row["reason"] for row in found)
