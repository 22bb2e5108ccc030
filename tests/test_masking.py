"""Ways to hide the future, sentinels in every dtype, and what follows from them."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dense_blocks import filled
from flax import nnx
from oracle import assert_close, jit

import jattn
from experiments.__main__ import main
from experiments.claims.masks import AGAIN, ARMS, CLAIM, LEAKS, RIGHT, Masks
from experiments.claims.sentinels import (
    RULE,
    answer,
    as_table,
    found,
    rows,
    with_sentinel,
)
from experiments.config import ConfigError, Model
from experiments.evidence import FAILS, HOLDS, OPEN, PART
from experiments.model import causal_lm, logits_with
from experiments.page import Figure, Table
from experiments.studies.masking import (
    MASKING,
    MEANS,
    after,
    attend,
    masked,
    normalised,
    seen,
    way_of,
)
from experiments.studies.masking import tested as losses_after_prefixes

pytestmark = pytest.mark.usefixtures("quick_compiler")
SMALL = Model(layers=1, d_model=6, heads=2, d_k=4, d_v=3, d_ff=7, soft_cap=2.0)
T = 5


@pytest.fixture(scope="module")
def model():
    return filled(lambda: causal_lm(SMALL, vocabulary=11, rngs=nnx.Rngs(0)))[0]


@pytest.fixture(scope="module")
def sentinel_table():
    return found()


def scores(*shape):
    return np.random.default_rng(3).standard_normal((*shape, T, T))


def closed_forms(s):
    """The weights of every way, by their definitions."""
    past = np.tri(T, dtype=bool)
    e = np.exp(s)

    def over(allowed, axis=-1):
        kept = e * allowed
        return kept / kept.sum(axis, keepdims=True)

    def leaky(sentinel):
        kept = np.where(past, e, np.exp(sentinel))
        return kept / kept.sum(-1, keepdims=True)

    weights = [over(past), over(True) * past, over(past), over(np.tri(T, k=1))]
    weights += [over(past.T), over(past, axis=-2), leaky(-3.0), leaky(-50.0)]
    return dict(zip(ARMS, weights, strict=True))


def test_every_way_to_mask_has_its_closed_form():
    s = scores(2)
    for name, expected in closed_forms(s).items():
        assert_close(MASKING[name](jnp.float32(s)), expected, name=name)


def test_weights_normalised_again_are_lost_where_a_hidden_score_is_far_larger():
    s = jnp.array([[0.0, 200.0], [0.0, 0.0]])
    assert np.isnan(normalised(after(s))[0]).all()
    assert masked(s, seen(2))[0].tolist() == [1, 0]


@jit
def attended(vectors, arm):
    """The output, and how much each depends on what stands at each place, (T, T)."""

    def out(vectors):
        return attend(*vectors, way_of(arm))[0, :, 0]

    slopes = jax.jacrev(lambda x: out(x).sum(-1))(vectors)
    return out(vectors), sum(jnp.abs(x[:, 0, :, 0]).sum(-1) for x in slopes)


def test_all_ways_but_the_right_one_let_the_future_through():
    rng = np.random.default_rng(5)
    q, k, v = (rng.standard_normal((T, 3), np.float32) for _ in range(3))
    future = {}
    for arm, name in enumerate(ARMS):
        out, slopes = attended([x[None, :, None] for x in (q, k, v)], np.int32(arm))
        assert_close(out, closed_forms(q @ k.T / 3**0.5)[name] @ v, name=name)
        future[name] = np.max(slopes, where=~seen(T), initial=0)
    assert future.pop(RIGHT) == 0 and future.pop(AGAIN) < 1e-6
    assert 0 < future.pop("sentinel -50") < 1e-15
    assert min(future.values()) > 0.01


def test_with_its_own_attention_a_model_says_what_it_says(model):
    tokens = np.random.default_rng(1).integers(11, size=(2, T))
    calls = []

    def own(query, key, value):
        calls.append(query.shape)
        rules = dict(mask=jattn.masks.causal(), score=model.score)
        return jattn.attention(query, key, value, **rules)

    other = jit(lambda tokens: logits_with(model, model.embed(tokens), own))
    assert_close(other(tokens), jit(lambda tokens: model(tokens))(tokens))
    assert calls == [(2, T, 2, 4)]


def test_after_a_prefix_a_loss_is_that_in_the_window_unless_the_future_leaks(model):
    windows = np.random.default_rng(2).integers(11, size=(3, T + 1))
    right, leaky = (
        losses_after_prefixes(model, windows, (2, T), np.int32(arm)) for arm in (0, 3)
    )
    assert_close(right["alone"], right["within"])
    assert_close(leaky["alone"][1], leaky["within"][1])  # nothing is left to see
    assert abs(leaky["alone"][0] - leaky["within"][0]) > 1e-3
    assert right["validation"] != leaky["validation"]


EMPTY = ["1.00 hidden"] * 2
FULL_RANGE = {"-1e9": ["right", "1.00 hidden", *EMPTY]}
FULL_RANGE |= {"finfo.min": ["right", "right", "1.00 hidden", "NaN"]}
FULL_RANGE |= {"-inf": ["right", "right", "NaN", "NaN"], RULE: ["right"] * 4}
HALF = FULL_RANGE | {"-1e9": FULL_RANGE["-inf"]}  # 1e9 is beyond float16
HALF |= {"finfo.min": ["right", "0.67 hidden", "1.00 hidden", "NaN"]}


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [("float16", HALF), ("bfloat16", FULL_RANGE), ("float32", FULL_RANGE)],
)
def test_what_becomes_of_a_row_follows_from_the_range_of_its_dtype(
    sentinel_table, dtype, expected
):
    assert sentinel_table[dtype] == expected


def test_an_empty_row_is_spread_evenly_over_what_it_must_not_see():
    weights = with_sentinel(rows("float32"), "-1e9")
    assert_close(weights[2:], np.full((2, 3), 1 / 3))
    assert_close(weights[1], [0, 0.5, 0.5])  # what may be seen is below -1e9


def results(table, changes=(), wobble=0.001, audit=()):
    """What two seeds would have left: (whole, alone) of the arms that differ."""
    changes = dict(changes)
    runs = []
    for seed in (0, 1):
        for arm in ARMS:
            whole, alone = changes.get(arm, (2.4, 2.4))
            more = wobble * seed * (arm != RIGHT)
            losses = {"validation": whole + more, "within": [whole, whole]}
            runs.append({"arm": arm, "seed": seed, "alone": [alone, alone + more]})
            runs[-1] |= losses
    wrong = {x: ["wrong", 0.5] for x in MEANS}
    right = {x: ["right", None] for x in MEANS}
    found = {arm: right if arm == RIGHT else wrong for arm in ARMS} | dict(audit)
    return {"prefixes": [2, 4], "sentinels": table, "audit": found, "runs": runs}


LEAK = {"after it": (1.0, 5.0), "transposed": (0.1, 3.0)}
ALL_RIGHT = {x: ["right", None] for x in MEANS}


@pytest.mark.parametrize(
    ("changes", "outcomes"),
    [
        (dict(changes=LEAK), [FAILS, PART, HOLDS]),
        (dict(changes=LEAK, wobble=9.0), [OPEN, OPEN, HOLDS]),
        (dict(changes=LEAK | {AGAIN: (2.0, 2.1)}), [PART, PART, HOLDS]),
        (dict(changes={AGAIN: (2.0, 2.1)}), [HOLDS, FAILS, HOLDS]),
        (dict(changes={x: (1.0, 5.0) for x in ARMS[1:3]}), [FAILS, HOLDS, HOLDS]),
        (dict(audit={ARMS[4]: ALL_RIGHT}), [OPEN, FAILS, PART]),
    ],
)
def test_verdicts_follow_from_the_numbers(sentinel_table, changes, outcomes):
    *answers, sentinel = CLAIM.answers(results(sentinel_table, **changes))
    assert [answer.outcome for answer in answers] == outcomes
    assert sentinel.outcome == PART
    assert "Of 6 rows that -inf leaves right, -1e9 leaves 4." in sentinel.number
    assert "6 with -inf, 12 with a rule" in sentinel.number


def test_rows_that_are_nan_either_way_are_no_agreement(sentinel_table):
    nan = dict.fromkeys(sentinel_table["float16"], ["NaN"])
    right = nan | {"-inf": ["right"]}
    assert answer({"float16": nan}).outcome == OPEN
    assert answer({"float16": right}).outcome == FAILS
    assert answer({"float16": right | {"-1e9": ["right"]}}).outcome == HOLDS


def test_the_sentence_says_how_many_low_losses_were_leaks(sentinel_table):
    def sentence(changes):
        return CLAIM.answers(results(sentinel_table, changes))[0].sentence

    assert sentence(LEAK) == LEAKS["every"]
    assert sentence(LEAK | {"transposed": (0.1, 2.4)}) == LEAKS["some"]
    assert sentence({"transposed": (0.1, 2.4)}) == LEAKS["none"]
    assert sentence({}) == LEAKS["none"]


def test_what_the_audit_says_of_a_mask_that_is_right_but_for_rounding_is_told(
    sentinel_table,
):
    rounding = ALL_RIGHT | {"gradient": ["wrong", 1e-11]}
    for cells, count in ((rounding, 1), (ALL_RIGHT, 0)):
        audited = CLAIM.answers(results(sentinel_table, audit={AGAIN: cells}))[2]
        assert f"0 find a leak in the right one, and {count} in that" in audited.number
        assert audited.outcome == HOLDS and "loss" not in audited.sentence


def test_there_is_a_figure_and_a_row_for_each_mask_and_dtype(sentinel_table):
    figure, losses, audit, last = CLAIM.parts(results(sentinel_table, LEAK, 0.0))
    assert isinstance(figure, Figure) and "after a prefix alone" in figure.draw()
    assert losses.rows[1] == ["after it", "1.000", "1.000", "5.000", "4.000"]
    assert audit.rows[0] == [RIGHT, "right", "right", "right"]
    assert audit.rows[1] == ["after it", *["wrong: 5.0e-01"] * 3]
    assert isinstance(last, Table) and last == as_table(sentinel_table)
    assert last.rows[0] == ["float16", "one key", *["right"] * 4]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (Masks(prefixes=(16, 65)), r"prefixes = \(16, 65\) must not be longer"),
        (Masks(audited=1), "audited = 1 must be at least 2: one token has no future"),
    ],
)
def test_settings_that_hide_nothing_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        CLAIM.measure(settings, None)


@pytest.mark.slow
def test_the_experiment_sees_a_leak_at_small_settings(tmp_path):
    args = ["masks", "configs/masks.toml", "--layers", "1", "--d-model", "16"]
    args += ["--data.context", "8", "--optim.steps", "60", "--evaluation.tokens"]
    args += ["512", "--prefixes", "4", "--audited", "4", "--seeds", "1"]
    assert main([*args, "--out", str(tmp_path)]) == 0
    path = tmp_path / "masks" / "results.json"
    found = json.loads(path.read_text())["results"]
    assert CLAIM.answers(found)[2].outcome == HOLDS
    gaps = {run["arm"]: run["alone"][0] - run["within"][0] for run in found["runs"]}
    assert abs(gaps[RIGHT]) < 1e-4 < 0.1 < gaps["one key too many"]
