"""What a probe is: a claim, what it needs, and a function that checks it."""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from jattn.foreign import in_one_line, refuses
from jattn.reports import Finding, Verdict
from jattn.testing.compare import Difference, normal
from jattn.testing.subject import Subject

PROBES: dict[str, "Probe"] = {}
"""Every probe by its name, in the order in which they are written."""


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
        except Exception as error:  # of a function that we know nothing about
            return self._found(*self._answered(error))
        return self._found("right", str(self.run.__doc__).partition("\n")[0])

    def _answered(self, error: Exception) -> tuple[Verdict, str]:
        """What an error says of the function."""
        words = in_one_line(error)
        if refuses(error) and self.refusal:
            return "refused", words
        declined = isinstance(error, NotImplementedError)
        if declined or (refuses(error) and self.optional):
            return "not offered", words
        return "wrong", f"raised {words}"

    def _found(self, verdict: Verdict, detail: str) -> Finding:
        return Finding(self.name, verdict, detail, topic=self.topic)


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
    """Query, key and value of a call; by default B, T, S, N and H differ."""
    K, D = K or N, D or H
    return (
        normal(1, B, T, N, H, dtype=dtype),
        normal(2, B, S, K, H, dtype=dtype),
        normal(3, B, S, K, D, dtype=dtype),
    )


def some_pairs(T: int = 5, S: int = 11, B: int = 2, N: int = 1) -> np.ndarray:
    """A mask (B, N, T, S) at random, in which every query may see the first key."""
    mask: np.ndarray = np.random.default_rng(4).random((B, N, T, S)) < 0.6
    mask[..., 0] = True
    return mask
