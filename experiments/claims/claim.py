"""What an experiment about a claim consists of."""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from experiments.claims.store import Store
from experiments.page import Part


@dataclass(frozen=True)
class Answer:
    """What came of one claim.

    Attributes:
        claim: what is said, a sentence.
        source: who says it.
        number: the number that decides, with its uncertainty, in words.
        rule: what has to be true of it.
        outcome: the rule's verdict: HOLDS, PART, FAILS or OPEN of `evidence`.
        sentence: what can honestly be said.
    """

    claim: str
    source: str
    number: str
    rule: str
    outcome: str
    sentence: str


@dataclass(frozen=True)
class Claim:
    """An experiment: the question, how it is measured, and what follows from it.

    Attributes:
        title: of its page.
        design: what is done, in a few sentences for the page.
        settings: the frozen dataclass of its config, with the fields `name` and `out`.
        measure: from settings and a store to its results, plain values for JSON. All
            that takes long is a piece of the store, so that nothing is done twice.
        answers: from the results to answers, whose verdicts follow from their rules.
        parts: from the results to figures and tables; at least one figure.
    """

    title: str
    design: str
    settings: type
    measure: Callable[[Any, Store], dict[str, Any]]
    answers: Callable[[dict[str, Any]], list[Answer]]
    parts: Callable[[dict[str, Any]], list[Part]]


def find(name: str) -> Claim:
    """The experiment of a name."""
    claim: Claim = import_module(f"experiments.claims.{name}").CLAIM
    return claim
