"""Attention while it is trained: what the probe sees, and an alarm if it goes wrong.

Nothing here changes a training: it reads the parameters between two steps.
"""

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from experiments.config import Logging
from experiments.files import read_lines, write_text
from experiments.results import MEASURES

Heads = list[list[dict[str, float]]]
"""For each layer, for each head, the measures of the probe."""


class Alarm(NamedTuple):
    """What a head has done wrong.

    Attributes:
        layer: counted from 0.
        head: counted from 0.
        what: the measure that is out of bounds.
        text: a sentence.
    """

    layer: int
    head: int
    what: str
    text: str


def not_finite(heads: Heads) -> Iterator[Alarm]:
    """The heads with a measure that is NaN or infinite, and the first such measure."""
    for layer, row in enumerate(heads):
        for head, measures in enumerate(row):
            for name, value in measures.items():
                if not math.isfinite(value):
                    text = f"layer {layer}, head {head}: {MEASURES[name]} is not finite"
                    yield Alarm(layer, head, name, text)
                    break


def alarms(heads: Heads, settings: Logging) -> Iterator[Alarm]:
    """The heads that are not finite, see hardly a second key, or have huge logits."""
    yield from not_finite(heads)
    low, high = settings.alarm_entropy, settings.alarm_logit
    for layer, row in enumerate(heads):
        for head, measures in enumerate(row):
            where = f"layer {layer}, head {head}"
            if (entropy := measures["entropy"]) < low:
                text = f"{where}: entropy / ln n is {entropy:.3g}, below {low:g}"
                yield Alarm(layer, head, "entropy", text)
            if high and high < (logit := measures["logit_max"]) < math.inf:
                text = f"{where}: the largest logit is {logit:.3g}, above {high:g}"
                yield Alarm(layer, head, "logit_max", text)


def worst(heads: Heads) -> dict[str, float]:
    """One number of each kind for a line: of the worst head, or the mean of all."""

    def of_all(name: str) -> list[float]:
        return [measures[name] for row in heads for measures in row]

    # Of numpy: where one is NaN, so is the worst.
    return {
        "lowest_entropy": float(np.min(of_all("entropy"))),
        "largest_logit": float(np.max(of_all("logit_max"))),
        "dead_share": float(np.mean(of_all("dead_share"))),
    }


class Watch:
    """Looks at a model every so often, and keeps what it sees in watch.jsonl.

    Args:
        directory: of the run.
        settings: how often, and what is alarming.
        last: the last step, after which it looks, too.
        measure: the probe, of parameters.
        step: the steps that are done: later lines are of a run that was interrupted,
            and will be written again.
    """

    def __init__(
        self,
        directory: Path,
        settings: Logging,
        last: int,
        measure: Callable[[Any], dict[str, Any]],
        step: int,
    ) -> None:
        self._path = directory / "watch.jsonl"
        self._settings = settings
        self._last = last
        self._measure = measure
        self._known: set[tuple[int, int, str]] = set()
        if self._path.exists():
            kept = [x for x in read_lines(self._path) if x["step"] <= step]
            write_text(self._path, "".join(map(_line, kept)))

    def is_due(self, step: int) -> bool:
        """Whether to look after so many steps."""
        every = self._settings.watch
        return every > 0 and (step % every == 0 or step == self._last)

    def look(
        self, step: int, loss: float, params: Any
    ) -> tuple[dict[str, float], list[str]]:
        """Measures every head, and writes a line.

        Returns:
            The numbers of `worst`, and a sentence for each head that was not out of
            bounds when it was last looked at.
        """
        measured = self._measure(params)
        found = list(alarms(measured["heads"], self._settings))
        line = {"step": step, "loss": loss, "alarms": [x.text for x in found]}
        with self._path.open("a", encoding="utf-8") as file:
            file.write(_line(line | measured))
        new = [x.text for x in found if x[:3] not in self._known]
        self._known = {x[:3] for x in found}
        return worst(measured["heads"]), new


def _line(table: dict[str, Any]) -> str:
    """As JSON, which has no word for NaN and infinity but null."""
    finite = json.loads(json.dumps(table), parse_constant=lambda _: None)
    return json.dumps(finite) + "\n"
