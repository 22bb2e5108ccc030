"""What tokens differ in: closed forms, the order of a layer, and what is concluded."""

import json

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from oracle import assert_close

from experiments.__main__ import main
from experiments.claims.collapse import (
    CLAIM,
    KINDS,
    NOTHING,
    STREAMS,
    Collapse,
    config_of,
)
from experiments.config import ConfigError
from experiments.evidence import FAILS, HOLDS, OPEN, PART
from experiments.page import Figure, Table
from experiments.studies.rank import (
    Arm,
    compiled_layer,
    layer,
    order,
    residual_of,
    through,
)
from jattn.nnx import EncoderBlock

pytestmark = pytest.mark.usefixtures("quick_compiler")
TINY = Collapse(tokens=5, d_model=6, heads=2)


def test_equal_tokens_leave_nothing_and_opposite_ones_all():
    token = np.arange(1.0, 4.0)
    assert residual_of(np.stack([token] * 5)) == 0
    assert residual_of(np.stack([token, -token])) == 1


def test_the_residual_is_the_share_of_the_norm_beside_the_mean():
    rng = np.random.default_rng(0)
    common, others = rng.standard_normal((1, 7)), rng.standard_normal((5, 7))
    others -= others.mean(axis=0)
    squares = np.sum(others**2), 5 * np.sum(common**2)
    share = np.sqrt(squares[0] / sum(squares))
    assert residual_of(common + others) == pytest.approx(share, rel=1e-14)


@pytest.mark.parametrize("size", [0.0, 1e-320, 1e-200, 1e200])
def test_tokens_of_any_size_have_the_residual_of_their_directions(size):
    tokens = np.array([[1.0, 2.0], [3.0, -4.0], [5.0, 6.0]])
    want = residual_of(tokens) if size else 0
    assert residual_of(size * tokens) == pytest.approx(want, rel=1e-3)


def test_tokens_that_become_infinite_are_refused_by_the_layer():
    def step(factor, x):
        return factor * x

    tokens = np.array([[1.0, 2.0], [3.0, -4.0]])
    assert len(through(step, [1e200], tokens)) == 2
    with pytest.raises(ConfigError, match="not finite after 2 layers; give fewer"):
        through(step, [1e200, np.inf, 1.0], tokens)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (dict(tokens=1), "tokens = 1 must be at least 3"),
        (dict(tokens=2), "tokens = 2 must be at least 3"),
        (dict(d_model=1, heads=1), "d_model = 1 must be at least 3"),
        (dict(d_model=2), "d_model = 2 must be at least 3"),
        (dict(d_model=6, heads=4), "d_model = 6 must be a multiple of heads = 4"),
    ],
)
def test_sizes_that_show_nothing_are_refused(sizes, message):
    with pytest.raises(ConfigError, match=message):
        CLAIM.measure(Collapse(**sizes), None)


@pytest.mark.parametrize("power", [1, 2, 3])
def test_the_order_of_a_step_is_the_power_of_what_it_leaves(power):
    tokens = np.random.default_rng(1).standard_normal((5, 7))

    def step(x):
        return tokens[0] + 0.3 * (x - tokens[0]) ** power

    assert order(step, tokens) == pytest.approx(power, abs=0.01)


@pytest.mark.parametrize(("residual", "power"), [(False, 3), (True, 1)])
def test_attention_cubes_what_tokens_differ_in_unless_they_are_added(
    residual, power, x64
):
    block = EncoderBlock(config_of(TINY), rngs=nnx.Rngs(0))
    tokens = np.random.default_rng(2).standard_normal((5, 6))
    arm = Arm(residual, feed_forward=False, norm=False)
    found = order(lambda x: compiled_layer(block, x, arm), tokens)
    assert found == pytest.approx(power, abs=0.02)


def test_a_layer_of_all_parts_is_the_block(x64):
    class Doubled(nnx.Module):
        def __init__(self, add):
            self.add = add

        def __call__(self, x):
            return 2 * x + self.add

    block = nnx.Module()
    block.attention_norm, block.attention = Doubled(1.0), Doubled(2.0)
    block.feed_forward_norm, block.feed_forward = Doubled(3.0), Doubled(4.0)
    x = np.full((2, 3), 5.0)
    found = {
        (True, True, True): 5 + 24 + 2 * (2 * 29 + 3) + 4,
        (False, True, True): 2 * (2 * 24 + 3) + 4,
        (True, False, True): 5 + 24,
        (False, False, False): 12,
        (False, True, False): 2 * 12 + 4,
    }
    for arm, want in found.items():
        assert np.all(layer(block, x, Arm(*arm)) == want), arm
    real = EncoderBlock(config_of(TINY), rngs=nnx.Rngs(0))
    x = np.random.default_rng(2).standard_normal((5, 6))
    found = compiled_layer(real, x, Arm(True, True, True))
    assert_close(found, nnx.jit(real)(x), jnp.float64)


def results(pure=3.0, left=1e-9, fed=1e-9, bare=0.3, normed=0.5, seeds=3):
    """Runs in which attention has an order, and so much is left."""
    runs = []
    for seed in range(seeds):
        ends = [
            dict(zip(KINDS, [left, fed, left, left], strict=True)),
            dict(zip(KINDS, [bare, 0.4, normed, 0.6], strict=True)),
        ]
        run = {"seed": seed}
        for stream, end, power in zip(STREAMS, ends, [pure, 1.0], strict=True):
            run[stream] = {
                kind: {"residuals": [0.9, 0.5, x + seed / 1e3 * x], "order": power}
                for kind, x in end.items()
            }
        runs.append(run)
    return {"layers": 2, "kept": 0.1, "runs": runs}


@pytest.mark.parametrize(
    ("numbers", "outcomes"),
    [
        (results(), [HOLDS, HOLDS, FAILS, PART]),
        (results(bare=0.01), [HOLDS, PART, FAILS, PART]),
        (results(bare=0.5), [HOLDS, HOLDS, FAILS, PART]),
        (results(fed=0.3), [HOLDS, HOLDS, HOLDS, PART]),
        (results(pure=2.0), [PART, HOLDS, FAILS, FAILS]),
        (results(pure=None), [PART, HOLDS, FAILS, FAILS]),
        (results(left=1e-3), [PART, HOLDS, FAILS, FAILS]),
        (results(seeds=1), [HOLDS, PART, OPEN, PART]),
    ],
)
def test_verdicts_follow_from_the_numbers(numbers, outcomes):
    found = CLAIM.answers(numbers)
    assert [answer.outcome for answer in found] == outcomes
    open_ends = [x.sentence.startswith("These layers do not show") for x in found]
    assert open_ends[0] == (outcomes[0] != HOLDS) and not open_ends[1]
    assert open_ends[2] == (outcomes[2] == OPEN)


def test_a_role_of_layer_norm_is_told_only_where_an_interval_shows_it():
    for numbers, told in ((results(), True), (results(bare=0.5), False)):
        last = CLAIM.answers(numbers)[3]
        assert last.sentence.startswith("These layers do not show") != told
        assert ("not resolved" in last.number) != told


def test_layer_norm_may_leave_more_or_less():
    for normed, word in ((0.5, "more"), (0.1, "less")):
        last = CLAIM.answers(results(normed=normed))[3]
        assert last.sentence.endswith(
            f"with them {word} is left of what they differ in."
        )


def test_layers_are_counted_as_there_are():
    numbers = results()
    assert CLAIM.answers(numbers)[0].number.startswith("Left after layer 1, 2: 0.5, 1")
    for run in numbers["runs"]:
        for stream in STREAMS:
            for kind in KINDS:
                del run[stream][kind]["residuals"][2:]
    assert CLAIM.answers(numbers)[0].number.startswith("Left after layer 1: 0.5. Of")


def test_nothing_left_has_a_place_in_figure_and_table():
    numbers = results(left=0.0, fed=0.0)
    assert "e-17" in CLAIM.answers(numbers)[0].number
    assert "at most 0 is left" in CLAIM.answers(numbers)[2].number
    figure, table = CLAIM.parts(numbers)
    assert "attention alone" in figure.draw()
    assert table.rows[0][-1] == pytest.approx(NOTHING, rel=1e-9)


def test_a_bound_is_rounded_to_where_it_holds():
    text = CLAIM.answers(results(fed=4.21e-16, seeds=1))[2].number
    assert "at most 4.3e-16 is left" in text


def test_the_sentence_names_the_layers_that_keep_tokens_apart():
    sentences = [CLAIM.answers(results(bare=x))[1].sentence for x in (0.3, 0.01)]
    assert sentences[0].endswith("and at this depth much of it.")
    assert sentences[1].endswith(
        "only of layers of attention and FFN and of attention and LayerNorm and of all "
        "three is it shown that they leave much."
    )


def test_nothing_is_said_of_a_norm_where_attention_alone_does_not_collapse():
    # With residual connections a norm makes no difference here.
    assert CLAIM.answers(results(bare=0.5))[3].outcome == PART
    assert CLAIM.answers(results(bare=0.5, left=1e-3))[3].outcome == OPEN


def test_there_is_a_figure_and_a_row_for_each_kind_of_layers():
    figure, table = CLAIM.parts(results())
    assert isinstance(figure, Figure) and "attention and LayerNorm" in figure.draw()
    assert isinstance(table, Table) and len(table.rows) == 8
    assert table.rows[4][:3] == [*list(STREAMS)[1:], "attention alone", "1.000"]
    assert table.rows[4][-1] == pytest.approx(0.3, rel=2e-3)


@pytest.mark.slow
def test_the_experiment_holds_at_small_settings_and_again(tmp_path):
    args = ["collapse", "configs/collapse.toml", "--out", str(tmp_path)]
    args += ["--tokens", "8", "--d-model", "16", "--heads", "2", "--layers", "7"]
    path = tmp_path / "collapse" / "results.json"
    kept = []
    for _ in range(2):
        assert main([*args, "--seeds", "2"]) == 0
        kept.append(json.loads(path.read_text())["results"])
    assert kept[0] == kept[1]
    first, _, third, _ = CLAIM.answers(kept[0])
    assert (first.outcome, third.outcome) == (HOLDS, FAILS)
