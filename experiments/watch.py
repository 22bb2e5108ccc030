"""Attention while it is trained: what the probe sees, and an alarm if it goes wrong.

Nothing here changes a training: it reads the parameters between two steps.
"""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from experiments.config import Logging
from experiments.files import read_lines, write_text

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


def alarms(heads: Heads, settings: Logging) -> Iterator[Alarm]:
    """The heads that attend to hardly more than one key, or whose logits are huge."""
    low, high = settings.alarm_entropy, settings.alarm_logit
    for layer, row in enumerate(heads):
        for head, measures in enumerate(row):
            where = f"layer {layer}, head {head}"
            # Not `<`: a measure that is NaN is out of bounds, too.
            if low and not (entropy := measures["entropy"]) >= low:
                text = f"{where}: entropy / ln n is {entropy:.3g}, below {low:g}"
                yield Alarm(layer, head, "entropy", text)
            if high and not (logit := measures["logit_max"]) <= high:
                text = f"{where}: the largest logit is {logit:.3g}, above {high:g}"
                yield Alarm(layer, head, "logit_max", text)


def worst(heads: Heads) -> dict[str, float]:
    """One number of each kind for a line: of the worst head, or the mean of all."""
    every = [measures for row in heads for measures in row]
    return {
        "lowest_entropy": min(measures["entropy"] for measures in every),
        "largest_logit": max(measures["logit_max"] for measures in every),
        "dead_share": sum(measures["dead_share"] for measures in every) / len(every),
    }


class Watch:
    """Looks at a model every so often, and keeps what it sees in watch.jsonl.

    Args:
        directory: of the run.
        settings: how often, and what is alarming.
        measure: the probe, of parameters.
        step: the steps that are done: later lines are of a run that was interrupted,
            and will be written again.
    """

    def __init__(
        self,
        directory: Path,
        settings: Logging,
        measure: Callable[[Any], dict[str, Any]],
        step: int,
    ) -> None:
        self._path = directory / "watch.jsonl"
        self._settings = settings
        self._measure = measure
        self._known: set[tuple[int, int, str]] = set()
        if self._path.exists():
            kept = [x for x in read_lines(self._path) if x["step"] <= step]
            write_text(self._path, "".join(json.dumps(line) + "\n" for line in kept))

    def is_due(self, step: int) -> bool:
        """Whether to look after so many steps."""
        return self._settings.watch > 0 and step % self._settings.watch == 0

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
            file.write(json.dumps(line | measured) + "\n")
        new = [x.text for x in found if x[:3] not in self._known]
        self._known = {x[:3] for x in found}
        return worst(measured["heads"]), new
