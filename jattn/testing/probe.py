"""What a probe is: a claim, what it needs, and a function that checks it."""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from jattn.testing.compare import Difference, normal
from jattn.testing.features import words
from jattn.testing.report import Finding
from jattn.testing.subject import Subject

PROBES: dict[str, "Probe"] = {}
"""Every probe by its name, in the order in which they are written."""

CLEAR = (ValueError, TypeError, NotImplementedError, AssertionError)
"""Errors that refuse a call; anything else is a crash."""


@dataclasses.dataclass(frozen=True)
class Probe:
    """A claim about attention functions.

    Its docstring is the claim; its function returns if that holds and raises a
    `Difference` if it does not.
    """

    name: str
    topic: str
    run: Callable[[Subject], None]
    needs: tuple[str, ...]
    """Features that must be offered; "a|b" is either."""
    refusal: bool
    """Whether a clear error is as good an answer."""
    optional: bool
    """Whether a clear error means that it is not offered."""

    def __call__(self, subject: Subject) -> Finding:
        """The finding for this subject."""
        for need in self.needs:
            reasons = [subject.features.missing(name) for name in need.split("|")]
            if None not in reasons:
                return self._found("not offered", str(reasons[0]))
        try:
            self.run(subject)
        except Difference as difference:
            return self._found("wrong", str(difference))
        except NotImplementedError as error:
            status = "refused" if self.refusal else "not offered"
            return self._found(status, words(error))
        except Exception as error:  # of a function that we know nothing about
            clear = isinstance(error, CLEAR)
            if clear and self.refusal:
                return self._found("refused", words(error))
            if clear and self.optional:
                return self._found("not offered", words(error))
            return self._found("wrong", f"raised {words(error)}")
        return self._found("right", str(self.run.__doc__).partition("\n")[0])

    def _found(self, status: Any, detail: str) -> Finding:
        return Finding(self.name, self.topic, status, detail)


def probe(
    topic: str, *needs: str, refusal: bool = False, optional: bool = False
) -> Callable[[Callable[[Subject], None]], Callable[[Subject], None]]:
    """Registers a function as a probe; its name is the name of the claim."""

    def register(run: Callable[[Subject], None]) -> Callable[[Subject], None]:
        name = run.__name__.replace("_", " ")
        PROBES[name] = Probe(name, topic, run, needs, refusal, optional)
        return run

    return register


def vectors(
    T: int = 5,
    S: int = 11,
    *,
    B: int = 2,
    N: int = 3,
    K: int | None = None,
    H: int = 8,
    D: int | None = None,
    dtype: Any = np.float32,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Query, key and value of a call; sizes that no two axes share."""
    K, D = K or N, D or H
    return (
        normal(1, B, T, N, H, dtype=dtype),
        normal(2, B, S, K, H, dtype=dtype),
        normal(3, B, S, K, D, dtype=dtype),
    )


def some_pairs(T: int = 5, S: int = 11, B: int = 2, N: int = 1) -> np.ndarray:
    """A mask (B, N, T, S) that leaves every query a key and every axis a reason."""
    mask: np.ndarray = np.random.default_rng(4).random((B, N, T, S)) < 0.6
    mask[..., 0] = True
    return mask
