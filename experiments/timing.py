"""Time in interleaved pairs, differences between results, and slopes."""

import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any, NamedTuple

import jax
import numpy as np

from experiments.peers import Inputs, Program

FEW_ROUNDS = 3


class Clock(NamedTuple):
    """How calls are timed."""

    measure: str
    """cpu: seconds of the process on all its threads, which other processes do not
    change much; wall: seconds that pass, for work on an accelerator."""
    rounds: int
    round_seconds: float
    """Of a round that takes longer there are three at most."""
    sample_seconds: float
    """A sample has as many calls as it takes to last that long."""


def clock_here(rounds: int, round_seconds: float, sample_seconds: float) -> Clock:
    """A clock of CPU time where the CPU computes, and of the wall's elsewhere."""
    measure = "cpu" if jax.default_backend() == "cpu" else "wall"
    return Clock(measure, rounds, round_seconds, sample_seconds)


class Sample(NamedTuple):
    """Seconds of one call."""

    cpu: float
    wall: float


class Ready(NamedTuple):
    """A program that has been called once on its inputs."""

    call: Callable[[], Any]
    wait: Callable[[Any], Any]
    results: list[np.ndarray]
    seconds: float
    """Wall time of a call, about."""


def start(program: Program, inputs: Inputs) -> Ready:
    """Place the inputs, and call the program on them."""
    return called(program.bind(inputs), program.wait, program.results)


def called(
    call: Callable[[], Any],
    wait: Callable[[Any], Any] = jax.block_until_ready,
    results: Callable[[Any], list[np.ndarray]] = lambda _: [],
) -> Ready:
    """What is ready once it is called for its results, and for the time if short."""
    begin = time.perf_counter()
    out = wait(call())
    seconds = time.perf_counter() - begin
    kept = results(out)
    del out
    if seconds < 1:
        seconds = _sample(call, wait, 1, True).wall
    return Ready(call, wait, kept, seconds)


def time_pair(ours: Ready, theirs: Ready, clock: Clock) -> dict[str, Any]:
    """Time two programs in turns, each sample after an untimed one of its own.

    Returns:
        "ratios": theirs / ours, of each round; "ratio": their median, and the least
        and the largest; "ms" and "ours_ms": the median time of a call; "wall_ms" and
        "ours_wall_ms": the same on the wall.
    """
    calls = [max(1, round(clock.sample_seconds / x.seconds)) for x in (ours, theirs)]
    seconds = 2 * (calls[0] * ours.seconds + calls[1] * theirs.seconds)
    rounds = clock.rounds
    if seconds > clock.round_seconds:
        rounds = min(rounds, FEW_ROUNDS)
    wait_each = clock.measure == "cpu"
    samples: tuple[list[Sample], list[Sample]] = ([], [])
    for _ in range(rounds):
        for ready, count, kept in zip((ours, theirs), calls, samples, strict=True):
            _sample(ready.call, ready.wait, count, wait_each)
            kept.append(_sample(ready.call, ready.wait, count, wait_each))
    own, other = ([getattr(x, clock.measure) for x in kept] for kept in samples)
    ratios = [theirs / ours for ours, theirs in zip(own, other, strict=True)]
    return {
        "ratios": ratios,
        "ratio": [median(ratios), min(ratios), max(ratios)],
        "ms": 1e3 * median(other),
        "ours_ms": 1e3 * median(own),
        "wall_ms": 1e3 * median(x.wall for x in samples[1]),
        "ours_wall_ms": 1e3 * median(x.wall for x in samples[0]),
    }


def difference(got: Sequence[np.ndarray], want: Sequence[np.ndarray]) -> float:
    """The largest difference of a vector (the last axis) of any array.

    |got - want| / (|want| + rms of |want| over the array)

    Beside the largest entry of an array, an error in a small vector would go unseen;
    beside a vector that has to be 0, every rounding would be one.
    """
    largest = 0.0
    for x, y in zip(got, want, strict=True):
        size = np.linalg.norm(y, axis=-1)
        error = np.linalg.norm(x - y, axis=-1)
        scale = size + np.sqrt(np.mean(size**2))
        # In an array of zeros any other vector is infinitely off, and so is NaN.
        off = np.where(error == 0, 0.0, np.inf)
        np.divide(error, scale, out=off, where=scale > 0)
        largest = max(largest, float(np.where(np.isnan(off), np.inf, off).max()))
    return largest


def slope(sizes: Sequence[float], values: Sequence[float]) -> float | None:
    """Of log value against log size, by least squares: the power of growth."""
    pairs = [(x, y) for x, y in zip(sizes, values, strict=True) if y > 0]
    if len({x for x, _ in pairs}) < 2:
        return None
    x, y = np.log(pairs).T
    return float(np.polyfit(x, y, 1)[0])


def _sample(
    call: Callable[[], Any], wait: Callable[[Any], Any], calls: int, wait_each: bool
) -> Sample:
    """Time some calls in a row. An accelerator may have them all in its queue."""
    cpu, wall = time.process_time(), time.perf_counter()
    for _ in range(calls):
        out = call()
        if wait_each:
            wait(out)
    wait(out)
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    return Sample(cpu / calls, wall / calls)
