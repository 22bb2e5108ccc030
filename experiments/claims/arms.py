"""Arms that are compared: a run of each for every seed, and what they show together."""

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from experiments.claims.store import Store, numbers_of
from experiments.evidence import plus_minus, t_interval
from experiments.progress import Prefixed, Progress
from experiments.svg import Curve

Run = dict[str, Any]


def run_arms(
    settings: Any,
    arms: Sequence[str],
    store: Store,
    run: Callable[[Any, str, Progress], Run],
    text: str | None = None,
) -> list[Run]:
    """A run of each arm for every seed, each a piece of the store.

    Args:
        settings: of the experiment, with `seeds` and the first `seed`.
        arms: their names.
        store: where runs are kept.
        run: from settings of one seed, the name of an arm and a progress to what is to
            be kept.
        text: what identifies the text that runs read, if they read one.
    """
    runs = []
    seeds = range(settings.seed, settings.seed + settings.seeds)
    for seed, arm in itertools.product(seeds, arms):
        one = replace(settings, seed=seed, seeds=1)
        progress = Prefixed(store.progress, f"{arm}, seed {seed}")
        compute = functools.partial(run, one, arm, progress)
        given = numbers_of(one)
        if text is not None:
            given = {"settings": given, "text": text}
        found = store.piece(arm, given, compute)
        runs.append({"arm": arm, "seed": seed} | found)
    return runs


def of_arm(runs: Sequence[Run], arm: str) -> list[Run]:
    """The runs of an arm, in the order of their seeds."""
    return [run for run in runs if run["arm"] == arm]


def above(values: Sequence[float], bound: float = 0.0) -> bool | None:
    """Whether the 95 % interval of the mean lies above; False: below; None: neither."""
    sign = t_interval([value - bound for value in values]).sign
    return None if sign is None else sign > 0


def spread(values: Sequence[float]) -> str:
    """The mean and the half-width of its 95 % interval, as in "0.9930 ± 0.0066"."""
    return plus_minus(*t_interval(values)[:2])


def band(x: Sequence[float], runs: Sequence[Sequence[float]]) -> Curve:
    """The means over runs of their values at each x, with 95 % intervals."""
    means = [t_interval(values) for values in zip(*runs, strict=True)]
    error = [interval.half_width or 0.0 for interval in means]
    return Curve(x, [interval.mean for interval in means], error)
