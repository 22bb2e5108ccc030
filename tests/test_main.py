"""`python -m jattn` says what is here, and fails if attention is wrong."""

import importlib.metadata
import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
from oracle import dense_jax

import jattn
from jattn import selfcheck
from jattn.__main__ import main
from jattn.testing.compare import Difference

PACKAGES = ["jattn", "python", "jax", "jaxlib", "numpy", "flax", "optax", "chex"]


def test_it_prints_versions_and_devices(capsys, monkeypatch):
    version = importlib.metadata.version

    def without_flax(package):
        if package == "flax":
            raise importlib.metadata.PackageNotFoundError
        return version(package)

    monkeypatch.setattr(importlib.metadata, "version", without_flax)
    assert main(["--no-check"]) == 0
    rows = dict(line.split(None, 1) for line in capsys.readouterr().out.splitlines())
    assert list(rows) == [*PACKAGES, "backend", "devices"]
    assert (rows["jattn"], rows["jax"]) == (jattn.__version__, jax.__version__)
    assert rows["flax"] == "not installed"
    assert (rows["backend"], rows["devices"]) == ("cpu", f"{jax.device_count()} x cpu")


@pytest.mark.parametrize("argv, code", [(["--help"], 0), (["--quick"], 2), (["x"], 2)])
def test_it_helps_and_refuses_what_it_does_not_know(argv, code, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(argv)
    assert stopped.value.code == code
    printed = capsys.readouterr()
    assert "usage: python -m jattn" in printed.out + printed.err


@pytest.fixture
def planted(monkeypatch):
    """Puts another function in the place of attention."""

    def plant(attention):
        selfcheck.results.clear_cache()
        monkeypatch.setattr(jattn, "attention", attention)

    yield plant
    monkeypatch.undo()
    selfcheck.results.clear_cache()


def textbook(q, k, v, **options):
    """Right for finite vectors."""
    return dense_jax(q, k, v, allowed=selfcheck.ALLOWED)[0].astype(q.dtype)


def failure(check, *arguments):
    with pytest.raises(Difference) as error:
        check(*arguments)
    return str(error.value)


def test_the_answer_is_that_of_another_textbook(planted):
    planted(textbook)
    selfcheck.check_answer("reference")


def test_a_wrong_gradient_is_named(planted):
    planted(lambda q, k, v, **_: textbook(q, jax.lax.stop_gradient(k), v))
    text = failure(selfcheck.check_answer, "blockwise")
    assert text.startswith("gradient of key[1, 0, 0, 0] is 0, not ")


def test_a_nan_that_leaks_is_named(planted):
    planted(textbook)
    text = failure(selfcheck.check_unseen, "reference")
    assert text.startswith("gradient of key[1, 0, 0, 0] is nan, not")
    assert text.endswith("; a NaN that no query may see changes it")


def test_an_empty_row_that_is_not_0_is_named(planted):
    planted(lambda q, k, v, **_: textbook(q, k, v) + 1e-30)
    text = failure(selfcheck.check_unseen, "reference")
    assert text == "a query without keys does not get 0"


def test_memory_that_grows_like_a_matrix_is_named(planted):
    planted(lambda q, k, v, **_: dense_jax(q, k, v)[0])
    assert "where T x S takes 1073741824" in failure(selfcheck.check_memory)


def test_a_check_that_fails_is_named_and_the_exit_code_is_1(planted, capsys):
    def wrong(q, k, v, **options):
        return jnp.repeat(v, q.shape[-2] // k.shape[-2], -2)

    planted(wrong)
    assert main([]) == 1
    printed = capsys.readouterr()
    failed = [line for line in printed.out.splitlines() if "FAILED: " in line]
    names = [line[:28].strip() for line in failed]
    right = {"dropout", "memory"}  # the first is of the weights, the other needs none
    assert names == [name for name in selfcheck.checks() if name not in right]
    assert "FAILED: Difference: gradient of key[1, 0, 0, 0] is 0, not" in failed[0]
    assert printed.err == f"{len(names)} checks failed: {'; '.join(names)}\n"


def test_dropout_by_another_rule_is_named(monkeypatch):
    weights = jattn.attention_weights

    def wrong(*vectors, **options):
        return weights(*vectors, **options | dict(dropout_rng=jax.random.key(0)))

    monkeypatch.setattr(jattn, "attention_weights", wrong)
    text = failure(selfcheck.check_dropout)
    assert text == "two keys drop the same weights"


def test_an_error_is_a_failure_and_no_end(monkeypatch, capsys):
    def broken():
        raise ZeroDivisionError("by zero")

    rest = {"b": lambda: None, "c": lambda: "not measured: no memory"}
    monkeypatch.setattr(selfcheck, "checks", lambda: {"a": broken, **rest})
    assert main([]) == 1
    *_, a, b, c = capsys.readouterr().out.splitlines()
    assert a.split(None, 1)[1].startswith("FAILED: ZeroDivisionError: by zero (")
    assert b.split(None, 1)[1] == "ok (0.0 s)"
    assert c.split(None, 1)[1] == "not measured: no memory (0.0 s)"


@pytest.mark.slow
def test_all_is_well_here():
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", "jattn"],
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        cwd=pathlib.Path(__file__).parent.parent,
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count(" ok (") == len(selfcheck.checks())
