"""Which block sizes are tried, which wins, and what is refused."""

import functools
import os
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracle import assert_close, dense_attention, exact

import jattn
from jattn import masks, scores, tune, tuning
from jattn.algorithms.block_sizes import default_block_sizes

T, S, N, K, H = 23, 29, 2, 1, 3
SHAPES = (T, N, H), (S, K, H), (S, K, 5)
PAIRS = [(7, 11), (16, 8)]


def vectors():
    return [exact(n, *shape).astype(np.float32) for n, shape in enumerate(SHAPES)]


def shapes(*sizes):
    return [jax.ShapeDtypeStruct(size, jnp.float32) for size in sizes or SHAPES]


def zeros(n, heads=1):
    return [np.zeros((n, count, 2), np.float32) for count in (heads, 1, 1)]


def test_it_returns_a_candidate_that_attention_takes():
    found = tune(*vectors(), candidates=PAIRS, rounds=1, backward=False)
    assert found in PAIRS
    assert type(found) is tuple and [type(n) for n in found] == [int, int]
    out = jattn.attention(*vectors(), block_sizes=found)
    assert_close(out, dense_attention(*vectors()).out)


@pytest.fixture
def tried(monkeypatch):
    """The calls that would have been compiled; none is."""
    calls = []

    def compiled(attend, vectors, backward):
        calls.append((attend, vectors, backward))
        return lambda: None

    monkeypatch.setattr(tuning, "_compiled", compiled)
    return calls


def pairs(tried):
    return [attend.keywords["block_sizes"] for attend, *_ in tried]


def test_a_shape_stands_for_normal_random_numbers(tried):
    _, key, value = vectors()
    query = jax.ShapeDtypeStruct((999, N, H), jnp.bfloat16)
    tune(query, key, value, candidates=PAIRS)
    for _, arrays, _ in tried:
        assert (arrays[0].shape, arrays[0].dtype) == ((999, N, H), jnp.bfloat16)
        numbers = np.asarray(arrays[0], np.float64)
        # Of 5994 numbers, within 5 standard errors.
        assert abs(numbers.mean()) < 0.065 and abs(numbers.var() - 1) < 0.092
        np.testing.assert_array_equal(arrays[1], key)
        np.testing.assert_array_equal(arrays[2], value)
    tried.clear()
    tune(*shapes(SHAPES[1], SHAPES[1], SHAPES[1]), candidates=PAIRS[:1])
    (_, arrays, _), *_ = tried
    assert not np.array_equal(arrays[0], arrays[1])
    assert not np.array_equal(arrays[1], arrays[2])


@jax.custom_jvp
def no_derivative(s):
    return s


@no_derivative.defjvp
def _refuse(primals, tangents):
    raise NotImplementedError("no derivative")


def forward_only(s, q_pos, k_pos):
    return no_derivative(s)


def test_the_gradient_is_timed_too_unless_it_is_not_wanted():
    options = dict(score=scores.rule(forward_only), query_positions="start")
    options |= dict(candidates=PAIRS[:1], rounds=1)
    assert tune(*shapes(), backward=False, **options) == PAIRS[0]
    with pytest.raises(NotImplementedError, match="no derivative"):
        tune(*shapes(), **options)


def test_the_gradient_is_with_respect_to_query_key_and_value():
    def attend(*vectors):
        return jnp.stack([jnp.sum(x) for x in vectors]).sum(), None

    run = tuning._compiled(attend, [jnp.ones(n) for n in (2, 3, 5)], True)
    assert [x.shape for x in run()] == [(2,), (3,), (5,)]
    assert tuning._compiled(attend, [jnp.ones(n) for n in (2, 3)], False)()[0] == 5


def test_options_reach_attention():
    with pytest.raises(ValueError, match="attention: with T != S .*T=23, S=29"):
        tune(*shapes(), candidates=PAIRS, mask=masks.causal())
    with pytest.raises(TypeError, match="colour"):
        tune(*shapes(), candidates=PAIRS, colour="red")
    found = tune(
        *vectors(),
        candidates=PAIRS[:1],
        rounds=1,
        backward=False,
        mask=masks.causal(),
        query_positions="end",
        dropout_rate=0.1,
        dropout_rng=jax.random.key(0),
        stats=True,
    )
    assert found == PAIRS[0]


def test_blocks_that_are_cut_to_the_same_are_tried_once(tried):
    same = [(23, 29), (512, 512), (64, 29), (23, 30)]
    found = tune(*shapes(), candidates=[(8, 8), *same, (8, 29), (8, 999), (8, 8)])
    assert sorted(pairs(tried)) == [(8, 8), (8, 29), (23, 29)]
    assert found in pairs(tried)


@pytest.mark.parametrize("backend", ["cpu", "gpu", "tpu", "another"])
def test_by_default_the_default_is_among_those_tried(tried, monkeypatch, backend):
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    for groups in (1, 2, 4):
        tried.clear()
        tune(*zeros(2048, heads=groups))
        got = pairs(tried)
        assert default_block_sizes(backend, groups) in got
        assert len(got) == len(set(got)) >= 4
        assert all(64 <= n <= 1024 for pair in got for n in pair)
    tried.clear()
    tune(*zeros(40))
    assert len(tried) == 1


class Clock:
    """Time that passes only where a run says so."""

    def __init__(self, durations):
        self.now, self.order = 0.0, []
        self.durations = {pair: iter(times) for pair, times in durations.items()}

    def compiled(self, attend, vectors, backward):
        pair = attend.keywords["block_sizes"]

        def run():
            self.order.append(pair)
            self.now += next(self.durations[pair])

        return run


@pytest.fixture
def timed(monkeypatch):
    def use(durations):
        clock = Clock(durations)
        time = types.SimpleNamespace(perf_counter=lambda: clock.now)
        monkeypatch.setattr(tuning, "time", time)
        monkeypatch.setattr(tuning, "_compiled", clock.compiled)
        return clock

    return use


A, B, C = (2, 3), (5, 7), (11, 13)


@pytest.mark.parametrize("order", [[A, B, C], [B, C, A], [C, A, B]])
def test_the_least_median_wins_and_not_the_least_mean_or_minimum(timed, order):
    timed({A: [2, 2, 90], B: [4, 4, 4], C: [1, 5, 5]})
    assert tune(*shapes(), candidates=order) == A


def test_candidates_take_turns_three_times_or_as_often_as_wanted(timed):
    clock = timed({pair: [1] * 10 for pair in (A, B, C)})
    tune(*shapes(), candidates=[A, B, C])
    assert clock.order == [A, B, C] * 3
    clock.order.clear()
    tune(*shapes(), candidates=[A, B, C], rounds=2)
    assert clock.order == [A, B, C] * 2


def failing(attend, vectors, backward, kind=jax.errors.JaxRuntimeError, only=None):
    pair = attend.keywords["block_sizes"]
    if only in (None, pair):
        raise kind(f"RESOURCE_EXHAUSTED: no memory for {pair}")
    return lambda: None


def test_a_candidate_that_does_not_run_is_left_out(monkeypatch):
    monkeypatch.setattr(tuning, "_compiled", functools.partial(failing, only=A))
    assert tune(*shapes(), candidates=[A, B]) == B


def test_if_none_runs_the_reasons_are_raised_together(monkeypatch):
    monkeypatch.setattr(tuning, "_compiled", failing)
    with pytest.raises(ExceptionGroup, match="tune: no candidate ran") as error:
        tune(*shapes(), candidates=[A, B])
    reasons = [str(reason) for reason in error.value.exceptions]
    assert reasons == [f"RESOURCE_EXHAUSTED: no memory for {pair}" for pair in (A, B)]


def test_a_mistake_is_no_candidate_that_does_not_run(monkeypatch):
    mistake = functools.partial(failing, kind=ZeroDivisionError, only=A)
    monkeypatch.setattr(tuning, "_compiled", mistake)
    with pytest.raises(ZeroDivisionError):
        tune(*shapes(), candidates=[A, B])


def test_nothing_is_written_to_disk(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    for name in ("HOME", "TMPDIR", "XDG_CACHE_HOME"):
        monkeypatch.setenv(name, str(tmp_path))
    tune(*shapes(), candidates=PAIRS[:1], rounds=1, backward=False)
    assert os.listdir(tmp_path) == []


WRONG = [
    (dict(candidates=[]), "candidates must hold a pair, but got none"),
    (dict(candidates=[(0, 4)]), r"two positive ints .*but got \(0, 4\)"),
    (dict(candidates=[(4, 4), (4, -1)]), r"two positive ints .*but got \(4, -1\)"),
    (dict(candidates=[(4.0, 4)]), r"two positive ints .*but got \(4.0, 4\)"),
    (dict(candidates=[[4, 0]]), r"two positive ints .*but got \[4, 0\]"),
    (dict(candidates=(4, 4)), "two positive ints .*but got 4"),
    (dict(candidates="abc"), "two positive ints .*but got 'a'"),
    (dict(implementation="blockwise"), "implementation is what is searched for"),
    (dict(implementation=None), "implementation is what is searched for"),
    (dict(block_sizes=(4, 4)), "block_sizes is what is searched for.*Leave it out"),
    (dict(rounds=0), "rounds must be a positive int, but got 0"),
    (dict(rounds=-1), "rounds must be a positive int, but got -1"),
    (dict(rounds=1.5), "rounds must be a positive int, but got 1.5"),
    (dict(rounds=True), "rounds must be a positive int, but got True"),
    (dict(rounds=None), "rounds must be a positive int, but got None"),
]


@pytest.mark.parametrize("options, text", WRONG)
def test_a_mistake_is_named_before_anything_is_compiled(tried, options, text):
    with pytest.raises(ValueError) as error:
        tune(*shapes(), **options)
    assert type(error.value) is ValueError
    message = str(error.value)
    assert re.match("tune: .*but got.*[.]$", message), message
    assert re.search(text, message), message
    assert not tried


def test_vectors_that_do_not_fit_are_named_in_letters(tried):
    query, key, value = shapes()
    with pytest.raises(ValueError, match="^tune: query heads N .*N=2 and K=3"):
        tune(query, *shapes((S, 3, H), (S, 3, H)))
    with pytest.raises(TypeError, match="^tune: query must be floating point.*int32"):
        tune(jax.ShapeDtypeStruct((T, N, H), jnp.int32), key, value)
    with pytest.raises(TypeError, match="^tune: value must be an array.*tuple"):
        tune(query, key, (S, K, H))
    assert not tried


def test_it_cannot_be_called_while_tracing():
    for transform in (jax.jit, jax.grad):
        with pytest.raises(TypeError, match="^tune: .*traced.*outside jax.jit"):
            transform(lambda *x: tune(*x, candidates=PAIRS) and 0.0)(*vectors())


@pytest.mark.parametrize("make", [vectors, shapes])
def test_arrays_from_elsewhere_are_no_way_to_call_it_while_tracing(make):
    def masked(ids):
        mask = masks.segments(ids, np.ones(S, int))
        return tune(*make(), candidates=PAIRS[:1], backward=False, mask=mask), ids

    with pytest.raises(TypeError, match="^tune: .*outside jax.jit"):
        jax.jit(masked)(jnp.ones(T, int))
