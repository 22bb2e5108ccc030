"""Whether outputs depend on what they must not depend on."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jattn.core.boundary import one_of
from jattn.core.rules import Array, Mask
from jattn.diagnostics.allowed_pairs import allowed_pairs
from jattn.diagnostics.audited import Audited, as_audited
from jattn.diagnostics.leak_changes import blind_changes, covered, reach, row_changes
from jattn.diagnostics.leak_means import MEANS, Evidence, control, repeat
from jattn.masks import causal
from jattn.reports import Report


@dataclasses.dataclass(frozen=True)
class Leaks(Report):
    """What `leaks` found.

    Attributes:
        forbidden: the number of pairs (output, input) that the mask forbids.
        covered: how many of them were tried.
    """

    forbidden: int
    covered: int


def leaks(
    fn: Callable[[Any], Any],
    inputs: Any,
    *,
    mask: Mask | Array | None = None,
    axis: int = 1,
    layers: int = 1,
    residual: bool = True,
    query_positions: Any = None,
    num_tokens: int | None = None,
    means: Sequence[str] | None = None,
    max_changes: int = 64,
    atol: float = 0.0,
    seed: int = 0,
) -> Leaks:
    """Whether an output depends on an input that it must not depend on.

    Three independent means. Perturbation changes only what an output must not see, to
    other values and to large ones: the output must stay as it is. The gradient of
    an output with respect to such an input must be exactly 0. A prefix of the inputs
    must give a prefix of the outputs, up to rounding. Besides, batch rows must not see
    one another, equal calls must agree, and some output must depend on another position
    at all, or the audit could not see a leak and says "inconclusive".

    Args:
        fn: `fn(inputs) -> outputs`: attention, a layer or a whole model in evaluation
            mode. It is called as it is, some 2 `max_changes` times at most: pass a
            jitted function where calls are slow.
        inputs: floats (*B, S, ...) or integer tokens (*B, S), or a pytree of them, as
            (query, key, value). What is not to be changed, `fn` closes over: also what
            it would find by a token's id, as padding.
        mask: which output may depend on which input: a rule of `jattn.masks`, or a
            Boolean array (*B, N, T, S), each axis full or 1; with several heads, what
            any of them sees. Default causal().
        axis: where the positions S and T stand in all inputs and outputs; the axes
            before it are *B. 0 for no batch.
        layers: through how many layers a mask acts: with a window an output sees as
            many windows back. Above 1, T == S.
        residual: whether an output may depend on the input of its own place whatever
            the mask says, as past a layer; where T == S.
        query_positions: where T outputs stand beside S inputs, as in `attention`.
        num_tokens: the size of the vocabulary; by default the largest token + 1.
        means: some of "perturbation", "gradient" and "prefix". By default all that
            apply: tokens have no gradient, and a prefix needs a mask without arrays.
        max_changes: how many sets of inputs are changed. If the mask has no more
            different rows, as with up to 64 places, every forbidden pair is tried.
        atol: the largest change, and gradient, that is not a leak. At 0 a leak of
            1e-6 in float32 is found. A prefix is another program, and its outputs may
            differ by rounding whatever this is.
        seed: of the new values.

    Returns:
        Findings "repeat", "control", "perturbation", "gradient" and "prefix"; each leak
        with the index of the first output and the input it depends on.

    Raises:
        ValueError: shapes do not fit, nothing is forbidden, or means do not apply.
        TypeError: an argument is of the wrong kind.

    Example:
        >>> import jax, jax.numpy as jnp, jattn
        >>> x = jax.random.normal(jax.random.key(0), (2, 5, 3))  # (B, T, D)
        >>> print(leaks(lambda x: jnp.cumsum(x, axis=1), x))
        Leaks: right
          right         repeat        two equal calls agree
          right         control       8 of 8 outputs depend on other positions
          right         perturbation  20 of 20 forbidden pairs, batch rows: 12 calls
          right         gradient      20 of 20 forbidden pairs, batch rows: 6 calls
          right         prefix        the first 3 and 4 of 5 inputs alone
        >>> found = leaks(lambda x: x + 1e-6 * jnp.roll(x, -1, axis=1), x)
        >>> found.ok, found.first.check, found.first.output, found.first.input
        (False, 'perturbation', (0, 0), (0, 1))
    """
    audited = as_audited("leaks", fn, inputs, axis)
    for name, count in (("layers", layers), ("max_changes", max_changes)):
        if type(count) is not int or count < 1:
            raise ValueError(
                f"leaks: {name} must be a positive int, but got {count!r}. 1 is one "
                "layer; 64 changes are the default."
            )
    num_tokens = _vocabulary(audited, num_tokens)
    base = audited.values(audited.leaves)
    sizes = (base[0].shape[1], audited.num_inputs)
    if layers > 1 and sizes[0] != sizes[1]:
        raise ValueError(
            "leaks: more than one layer needs as many outputs as inputs, T == S, but "
            f"got {layers=}, T={sizes[0]}, S={sizes[1]}. Leave layers at 1, and give "
            "the mask of the whole."
        )
    mask = causal() if mask is None else mask
    chosen = _means(means, audited, mask)
    pairs = allowed_pairs(
        "leaks", mask, audited.batch, *sizes, query_positions=query_positions
    )
    pairs = pairs.any(axis=-3).reshape(audited.rows, *sizes)
    allowed = reach(pairs, layers, residual)
    changes = [] if allowed.all() else blind_changes(allowed, max_changes)
    changes += row_changes(allowed)
    if not changes:
        raise ValueError(
            f"leaks: the mask must forbid something, but {mask} with {layers=} allows "
            "every pair. Say what must not be seen, or give two batch rows."
        )
    others = audited.others(num_tokens, seed)
    evidence = Evidence(audited, base, others, allowed, changes, atol)
    findings = [repeat(evidence)]
    if findings[0].verdict == "right":
        findings.append(control(evidence))
        strict = means is not None
        findings += [MEANS[name](evidence, strict) for name in MEANS if name in chosen]
    return Leaks(tuple(findings), int((~allowed).sum()), covered(changes, allowed))


def _means(means: Sequence[str] | None, audited: Audited, mask: Any) -> Sequence[str]:
    """Those that are asked for, or all that apply."""
    if means is None:
        free = not jax.tree.leaves(mask)
        applies = dict(perturbation=True, gradient=audited.floating, prefix=free)
        return [name for name, does in applies.items() if does]
    if isinstance(means, str) or not means:
        raise ValueError(
            f"leaks: means must be a sequence of names, but got {means!r}. For example "
            "('perturbation', 'gradient')."
        )
    for name in means:
        one_of("leaks", "means", name, tuple(MEANS))
    if "gradient" in means and not audited.floating:
        raise ValueError(
            "leaks: a gradient needs inputs that are floats, but got tokens. Leave it "
            "out, or give fn the embeddings as inputs."
        )
    return means


def _vocabulary(audited: Audited, num_tokens: int | None) -> int | None:
    """The number of tokens, where there are any."""
    tokens = [x for x in audited.leaves if not jnp.issubdtype(x.dtype, jnp.floating)]
    if not tokens:
        if num_tokens is not None:
            raise ValueError(
                f"leaks: num_tokens is for integer inputs, but got {num_tokens} and "
                "floats. Leave it out."
            )
        return None
    largest = max(int(np.max(np.asarray(x))) for x in tokens)
    number = largest + 1 if num_tokens is None else num_tokens
    if number < max(2, largest + 1) or min(int(x.min()) for x in tokens) < 0:
        raise ValueError(
            f"leaks: tokens must lie in 0 to num_tokens - 1, and be two at least, but "
            f"got num_tokens={number} and tokens up to {largest}. Set num_tokens to "
            "the size of the vocabulary."
        )
    return number
