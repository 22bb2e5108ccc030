"""The cost of a step of decoding: what is refused, measured and printed."""

import json

import pytest

from experiments.__main__ import main

SIZES = {"batch": 2, "heads": 4, "kv-heads": 2, "head-dim": 8, "capacity": 32}


@pytest.fixture
def command(tmp_path):
    """Runs it at small sizes, with changes."""

    def run(**changes):
        settings = SIZES | {"rounds": 1, "sample-ms": 1e-3} | changes
        options = [x for key, value in settings.items() for x in (f"--{key}", value)]
        options = [str(y) for x in options for y in (x if isinstance(x, list) else [x])]
        out = ["--out", str(tmp_path)]
        return main(["decode", "configs/decode.toml", *options, *out])

    return run


def test_both_agree_and_the_ratio_is_theirs_over_ours(command, tmp_path, capsys):
    assert command(filled=[1, 7, 32]) == 0
    found = json.loads((tmp_path / "decode/decode.json").read_text())
    assert [row["filled"] for row in found["rows"]] == [1, 7, 32]
    for row in found["rows"]:
        assert row["differs"] < 1e-5
        assert row["ratio"][0] == pytest.approx(row["ms"] / row["ours_ms"])
    assert "jax.nn / ours" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"filled": [4, 33]}, "filled = [4, 33] must not be more than capacity = 32"),
        ({"kv-heads": 3}, "heads = 4 must be a multiple of kv_heads = 3"),
    ],
)
def test_what_does_not_fit_is_refused(command, changes, message, capsys):
    assert command(**{"filled": [4]} | changes) == 2
    assert message in capsys.readouterr().err
