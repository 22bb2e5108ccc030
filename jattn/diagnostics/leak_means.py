"""The means by which a leak is found, each independent of the others."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jattn.diagnostics.leak_probes import Probe, control_probes, covered, narrow, spread
from jattn.diagnostics.reports import Finding, differences, first_index
from jattn.diagnostics.subject import Subject

PREFIX_TOLERANCE = {"float64": 1e-10, "float32": 1e-4, "float16": 2e-2, "bfloat16": 0.1}
"""Between programs for different lengths, in units of the largest output."""


class Evidence(NamedTuple):
    """What all means share.

    Attributes:
        subject: the function and its inputs.
        base: its outputs, each (B, T, width).
        others: other values for all inputs, twice.
        allowed: which output may depend on which input, (B, T, S).
        probes: what to change, and what must stay.
        atol: how much is still no leak.
    """

    subject: Subject
    base: list[np.ndarray]
    others: list[list[np.ndarray]]
    allowed: np.ndarray
    probes: list[Probe]
    atol: float

    def moved(self, leaves: Any) -> np.ndarray:
        """The largest change of each output, (B, T)."""
        pairs = zip(self.subject.values(leaves), self.base, strict=True)
        changes = [differences(x, y).max(-1, initial=0) for x, y in pairs]
        return np.max(changes, axis=0)

    def moved_by(self, inputs: np.ndarray, others: list[np.ndarray]) -> np.ndarray:
        """The same where the marked inputs, (B, S), are replaced."""
        return self.moved(self.subject.changed(inputs, others))

    def clean(self, check: str, calls: int) -> Finding:
        """The finding of a check without a leak."""
        tried, all_pairs = covered(self.probes, self.allowed), (~self.allowed).sum()
        rows = ", batch rows" if self.subject.rows > 1 else ""
        detail = f"{tried} of {all_pairs} forbidden pairs{rows}: {calls} calls"
        return Finding(check, "right", detail)

    def leak(
        self, check: str, output: Any, inputs: np.ndarray, size: float, how: str
    ) -> Finding:
        """The finding of an output (b, t) that depends on inputs (b, s)."""
        at, first = self.subject.index(output), self.subject.index(inputs[0])
        more = f" and {len(inputs) - 1} more together" if len(inputs) > 1 else ""
        detail = f"output {at} depends on input {first}{more}: {how}"
        return Finding(check, "WRONG", detail, at, first, float(size))


def repeat(evidence: Evidence) -> Finding:
    """Whether two equal calls agree."""
    moved = evidence.moved(evidence.subject.leaves)
    place = first_index(moved > evidence.atol)
    if place is None:
        return Finding("repeat", "right", "two equal calls agree")
    at, size = evidence.subject.index(place), float(moved[place])
    detail = f"two equal calls differ at output {at} by {size:.2g}: is dropout on?"
    return Finding("repeat", "WRONG", detail, at, None, size)


def control(evidence: Evidence) -> Finding:
    """Whether outputs depend on other positions at all, so that a leak would show."""
    alive, eligible = 0, 0
    for probe in control_probes(evidence.allowed):
        moved = evidence.moved_by(probe.inputs, evidence.others[0])
        alive += int(((moved > 0) & probe.outputs).sum())
        eligible += int(probe.outputs.sum())
    if not eligible:
        return Finding("control", "not run", "no output may see another position")
    detail = f"{alive} of {eligible} outputs depend on other positions"
    if alive:
        return Finding("control", "right", detail)
    return Finding("control", "inconclusive", f"{detail}, so no leak could be seen")


def perturbation(evidence: Evidence, strict: bool) -> Finding:
    """Changes what must not be seen; the outputs must stay."""
    for others in evidence.others:
        for probe in evidence.probes:
            moved = evidence.moved_by(probe.inputs, others)
            place = first_index(probe.outputs & (moved > evidence.atol))
            if place is None:
                continue

            def alone(
                inputs: np.ndarray, others: Any = others, at: Any = place
            ) -> bool:
                marks = _marks(inputs, evidence.allowed[:, 0])
                return evidence.moved_by(marks, others)[at] > evidence.atol

            left = narrow(np.argwhere(probe.inputs), alone)
            how = f"it moves by {moved[place]:.2g}"
            return evidence.leak("perturbation", place, left, moved[place], how)
    return evidence.clean("perturbation", len(evidence.others) * len(evidence.probes))


def gradient(evidence: Evidence, strict: bool) -> Finding:
    """The gradient with respect to what must not be seen; it must be 0."""
    try:
        sizes_of = _gradient_sizes(evidence.subject)
    except (TypeError, ValueError) as error:
        if strict:
            raise
        return _not_run("gradient", "JAX cannot differentiate fn", error)
    for probe in evidence.probes:
        sizes = sizes_of(probe.outputs)
        place = first_index(probe.inputs & ~(sizes <= evidence.atol))  # NaN is not 0
        if place is None:
            continue

        def alone(outputs: np.ndarray, at: Any = place) -> bool:
            sizes = sizes_of(_marks(outputs, evidence.allowed[..., 0]))
            return not sizes[at] <= evidence.atol

        left = narrow(np.argwhere(probe.outputs), alone)
        how = f"its gradient there is {sizes[place]:.2g}"
        at = np.array([place])
        return evidence.leak("gradient", left[0], at, sizes[place], how)
    return evidence.clean("gradient", len(evidence.probes))


def prefix(evidence: Evidence, strict: bool) -> Finding:
    """The outputs of the first inputs alone; they must be the first outputs."""
    subject, (_, T, S) = evidence.subject, evidence.allowed.shape
    closed = [n for n in range(1, S) if not evidence.allowed[:, :n, n:].any()]
    if T != S or not closed:
        if strict:
            raise ValueError(
                "leaks: prefixes need a mask under which no output depends on later "
                f"inputs, and T == S, but got {T=}, {S=}. Leave 'prefix' out of means."
            )
        return Finding("prefix", "not run", "the mask closes no prefix off")
    lengths = sorted({closed[len(closed) // 2], closed[-1]})
    for n in lengths:
        try:
            outputs = subject(subject.prefix(n))
        except (TypeError, ValueError) as error:
            if strict:
                raise
            return _not_run("prefix", f"fn fails on {n} of {S} positions", error)
        for got, want in zip(outputs, evidence.base, strict=True):
            if got.shape[subject.axis] != n:
                detail = f"{n} inputs give {got.shape[subject.axis]} outputs"
                return Finding("prefix", "WRONG", detail)
            rtol = PREFIX_TOLERANCE.get(str(got.dtype), 0)
            limit = rtol * np.max(np.abs(want), initial=0, where=np.isfinite(want))
            apart = differences(subject.flat(got), want[:, :n]).max(-1, initial=0)
            place = first_index(apart > max(limit, evidence.atol))
            if place is not None:
                at, size = subject.index(place), float(apart[place])
                detail = f"output {at} of the first {n} inputs alone is {size:.2g} off"
                return Finding("prefix", "WRONG", detail, at, None, size)
    shown = " and ".join(map(str, lengths))
    return Finding("prefix", "right", f"the first {shown} of {S} inputs alone")


MEANS: dict[str, Callable[[Evidence, bool], Finding]] = {
    "perturbation": perturbation,
    "gradient": gradient,
    "prefix": prefix,
}


def _gradient_sizes(subject: Subject) -> Callable[[np.ndarray], np.ndarray]:
    """From outputs (B, T) to the largest gradient of them at each input, (B, S)."""

    def of_floats(floats: list[jax.Array]) -> list[jax.Array]:
        leaves: list[Any] = list(subject.leaves)
        for i, x in zip(subject.floating, floats, strict=True):
            leaves[i] = x
        return [y for y in subject(leaves) if jnp.issubdtype(y.dtype, jnp.floating)]

    floats = [subject.leaves[i] for i in subject.floating]
    outputs, pull = jax.vjp(of_floats, list(map(jnp.asarray, floats)))
    rng = np.random.default_rng(1)
    cotangents = [rng.standard_normal(y.shape).astype(y.dtype) for y in outputs]
    apply = jax.jit(lambda pull, seeds: pull(seeds)[0])  # compiled once for all probes

    def sizes_of(outputs: np.ndarray) -> np.ndarray:
        seeds = [
            np.where(spread(outputs, y, subject.axis), y, y.dtype.type(0))
            for y in cotangents
        ]
        gradients = [subject.flat(g) for g in apply(pull, seeds)]
        return np.max([np.abs(g).max(-1, initial=0) for g in gradients], axis=0)

    return sizes_of


def _marks(places: np.ndarray, like: np.ndarray) -> np.ndarray:
    marks = np.zeros(like.shape, bool)
    marks[tuple(places.T)] = True
    return marks


def _not_run(check: str, why: str, error: Exception) -> Finding:
    reason = (str(error).splitlines() or [""])[0][:60]
    return Finding(check, "not run", f"{why} ({type(error).__name__}: {reason})")
