"""The means by which a leak is found, each independent of the others."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jattn.diagnostics.audited import Audited
from jattn.diagnostics.leak_changes import (
    Change,
    control_changes,
    covered,
    narrow,
    spread,
)
from jattn.diagnostics.places import differences, first_index
from jattn.foreign import in_one_line
from jattn.reports import Finding

PREFIX_TOLERANCE = {"float64": 1e-10, "float32": 1e-4, "float16": 2e-2, "bfloat16": 0.1}
"""Between programs for different lengths, in units of the largest output."""


class Evidence(NamedTuple):
    """What all means share.

    Attributes:
        audited: the function and its inputs.
        base: its outputs, each (B, T, width).
        others: other values for all inputs, twice.
        allowed: which output may depend on which input, (B, T, S).
        changes: what to change, and what must stay.
        atol: how much is still no leak.
    """

    audited: Audited
    base: list[np.ndarray]
    others: list[list[np.ndarray]]
    allowed: np.ndarray
    changes: list[Change]
    atol: float

    def moved(self, leaves: Any) -> np.ndarray:
        """The largest change of each output, (B, T)."""
        pairs = zip(self.audited.values(leaves), self.base, strict=True)
        changes = [differences(x, y).max(-1, initial=0) for x, y in pairs]
        return np.max(changes, axis=0)

    def moved_by(self, inputs: np.ndarray, others: list[np.ndarray]) -> np.ndarray:
        """The same where the marked inputs, (B, S), are replaced."""
        return self.moved(self.audited.changed(inputs, others))

    def clean(self, check: str, calls: int) -> Finding:
        """The finding of a check without a leak."""
        tried, all_pairs = covered(self.changes, self.allowed), (~self.allowed).sum()
        rows = ", batch rows" if self.audited.rows > 1 else ""
        detail = f"{tried} of {all_pairs} forbidden pairs{rows}: {calls} calls"
        return Finding(check, "right", detail)

    def leak(
        self, check: str, output: Any, inputs: np.ndarray, size: float, how: str
    ) -> Finding:
        """The finding of an output (b, t) that depends on inputs (b, s)."""
        at, first = self.audited.index(output), self.audited.index(inputs[0])
        more = f" and {len(inputs) - 1} more together" if len(inputs) > 1 else ""
        detail = f"output {at} depends on input {first}{more}: {how}"
        return Finding(check, "wrong", detail, at, first, float(size))


def repeat(evidence: Evidence) -> Finding:
    """Whether two equal calls agree."""
    moved = evidence.moved(evidence.audited.leaves)
    place = first_index(moved > evidence.atol)
    if place is None:
        return Finding("repeat", "right", "two equal calls agree")
    at, size = evidence.audited.index(place), float(moved[place])
    detail = f"two equal calls differ at output {at} by {size:.2g}: is dropout on?"
    return Finding("repeat", "wrong", detail, at, None, size)


def control(evidence: Evidence) -> Finding:
    """Whether outputs depend on other positions at all, so that a leak would show."""
    alive, eligible = 0, 0
    for change in control_changes(evidence.allowed):
        moved = evidence.moved_by(change.inputs, evidence.others[0])
        alive += int(((moved > 0) & change.outputs).sum())
        eligible += int(change.outputs.sum())
    if not eligible:
        return Finding("control", "not run", "no output may see another position")
    detail = f"{alive} of {eligible} outputs depend on other positions"
    if alive:
        return Finding("control", "right", detail)
    return Finding("control", "inconclusive", f"{detail}, so no leak could be seen")


def perturbation(evidence: Evidence, _strict: bool) -> Finding:
    """Changes what must not be seen; the outputs must stay."""
    for others in evidence.others:
        for change in evidence.changes:
            moved = evidence.moved_by(change.inputs, others)
            place = first_index(change.outputs & (moved > evidence.atol))
            if place is None:
                continue

            def alone(
                inputs: np.ndarray, others: Any = others, at: Any = place
            ) -> bool:
                marks = _marks(inputs, evidence.allowed[:, 0])
                return evidence.moved_by(marks, others)[at] > evidence.atol

            left = narrow(np.argwhere(change.inputs), alone)
            how = f"it moves by {moved[place]:.2g}"
            return evidence.leak("perturbation", place, left, moved[place], how)
    return evidence.clean("perturbation", len(evidence.others) * len(evidence.changes))


def gradient(evidence: Evidence, strict: bool) -> Finding:
    """The gradient with respect to what must not be seen; it must be 0."""
    try:
        sizes_of = _gradient_sizes(evidence.audited)
    except (TypeError, ValueError) as error:
        if strict:
            raise
        return _not_run("gradient", "JAX cannot differentiate fn", error)
    if not np.any(sizes_of(np.ones_like(evidence.allowed[..., 0])) != 0):
        nothing = "no output has a gradient in any input"
        return Finding("gradient", "inconclusive" if strict else "not run", nothing)
    for change in evidence.changes:
        sizes = sizes_of(change.outputs)
        place = first_index(change.inputs & ~(sizes <= evidence.atol))  # NaN is not 0
        if place is None:
            continue

        def alone(outputs: np.ndarray, at: Any = place) -> bool:
            sizes = sizes_of(_marks(outputs, evidence.allowed[..., 0]))
            return not sizes[at] <= evidence.atol

        left = narrow(np.argwhere(change.outputs), alone)
        how = f"its gradient there is {sizes[place]:.2g}"
        at = np.array([place])
        return evidence.leak("gradient", left[0], at, sizes[place], how)
    return evidence.clean("gradient", len(evidence.changes))


def prefix(evidence: Evidence, strict: bool) -> Finding:
    """The outputs of the first inputs alone; they must be the first outputs.

    That is another program, so they are compared up to rounding.
    """
    audited, (_, T, S) = evidence.audited, evidence.allowed.shape
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
            outputs = audited(audited.prefix(n))
        except (TypeError, ValueError) as error:
            if strict:
                raise
            return _not_run("prefix", f"fn fails on {n} of {S} positions", error)
        for got, want in zip(outputs, evidence.base, strict=True):
            if got.shape[audited.axis] != n:
                detail = f"{n} inputs give {got.shape[audited.axis]} outputs"
                return Finding("prefix", "wrong", detail)
            rtol = PREFIX_TOLERANCE.get(str(got.dtype), 0)
            limit = rtol * np.max(np.abs(want), initial=0, where=np.isfinite(want))
            apart = differences(audited.flat(got), want[:, :n]).max(-1, initial=0)
            place = first_index(apart > max(limit, evidence.atol))
            if place is not None:
                at, size = audited.index(place), float(apart[place])
                detail = f"output {at} of the first {n} inputs alone is {size:.2g} off"
                return Finding("prefix", "wrong", detail, at, None, size)
    shown = " and ".join(map(str, lengths))
    return Finding("prefix", "right", f"the first {shown} of {S} inputs alone")


MEANS: dict[str, Callable[[Evidence, bool], Finding]] = {
    "perturbation": perturbation,
    "gradient": gradient,
    "prefix": prefix,
}
"""By name. `strict` is whether a means was asked for: where it does not apply, that is
then an error or inconclusive, and otherwise it is not run."""


def _gradient_sizes(audited: Audited) -> Callable[[np.ndarray], np.ndarray]:
    """From outputs (B, T) to the largest gradient of them at each input, (B, S)."""

    def of_floats(floats: list[jax.Array]) -> list[jax.Array]:
        leaves: list[Any] = list(audited.leaves)
        for i, x in zip(audited.floating, floats, strict=True):
            leaves[i] = x
        return [y for y in audited(leaves) if jnp.issubdtype(y.dtype, jnp.floating)]

    floats = [audited.leaves[i] for i in audited.floating]
    outputs, pull = jax.vjp(of_floats, list(map(jnp.asarray, floats)))
    rng = np.random.default_rng(1)
    cotangents = [rng.standard_normal(y.shape).astype(y.dtype) for y in outputs]
    apply = jax.jit(lambda pull, seeds: pull(seeds)[0])  # compiled once for all changes

    def sizes_of(outputs: np.ndarray) -> np.ndarray:
        seeds = [
            np.where(spread(outputs, y, audited.axis), y, y.dtype.type(0))
            for y in cotangents
        ]
        gradients = [audited.flat(g) for g in apply(pull, seeds)]
        return np.max([np.abs(g).max(-1, initial=0) for g in gradients], axis=0)

    return sizes_of


def _marks(places: np.ndarray, like: np.ndarray) -> np.ndarray:
    marks = np.zeros(like.shape, bool)
    marks[tuple(places.T)] = True
    return marks


def _not_run(check: str, why: str, error: Exception) -> Finding:
    return Finding(check, "not run", f"{why} ({in_one_line(error, 60)})")
