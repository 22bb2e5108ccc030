"""Whether attention makes all tokens equal as layers are stacked, and what prevents it.

Layers at initialisation, made of the parts of a `jattn.nnx.EncoderBlock`: with and
without the residual stream, the feed-forward network and the norms. All arms of a seed
have the same weights and the same tokens.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from experiments.claims.arms import above, band, spread
from experiments.claims.bounds import rounded_up
from experiments.claims.checks import check_heads
from experiments.claims.claim import Answer, Claim
from experiments.claims.store import Store, numbers_of
from experiments.config import ConfigError
from experiments.evidence import Interval, decide, describe, t_interval
from experiments.page import Figure, Part, Table
from experiments.settings import Count, Name, Seed, Share, Text
from experiments.studies.rank import Arm, compiled_layer, order, through
from experiments.svg import Curve, curves
from jattn.nnx import EncoderBlock, TransformerConfig

STREAMS = {"without residual connections": False, "with residual connections": True}
KINDS = {
    "attention alone": (False, False),
    "attention and FFN": (True, False),
    "attention and LayerNorm": (False, True),
    "all three": (True, True),
}
ALONE, WITH_FFN, WITH_NORM, _ = KINDS
ByKind = dict[str, list[dict[str, Any]]]  # for each kind of layers, its runs
LOST = 1e-6  # what is left if tokens are as good as equal
NOTHING = 1e-17  # stands for less, which has no logarithm where it is 0
FFN = {
    True: "An FFN keeps tokens apart where attention alone does not.",
    False: "An FFN at initialisation does not stop it: it sees one token at a time and "
    "drives what is nearly equal apart by a factor at most, and attention cubes it.",
    None: "These layers do not show whether an FFN does.",
}


@dataclass(frozen=True)
class Collapse:
    """Random tokens in many layers of random weights."""

    name: Name = "collapse"  # directory of the experiment, inside out
    out: Text = "runs"  # directory of all experiments
    tokens: Count = 32  # in a sequence
    d_model: Count = 64  # width of a token
    heads: Count = 4  # attention heads of a layer
    layers: Count = 24  # how deep
    kept: Share = 0.1  # of the norm that differs between tokens; less counts as lost
    seeds: Count = 5  # draws of weights and tokens
    seed: Seed = 0  # the first of them; the others count on


def measure(settings: Collapse, store: Store) -> dict[str, Any]:
    """For every seed and arm the residual after each layer, and a layer's order."""
    if settings.tokens < 3:
        raise ConfigError(
            f"tokens = {settings.tokens} must be at least 3: p is told by two that "
            "differ a little from one more"
        )
    if settings.d_model < 3:
        raise ConfigError(
            f"d_model = {settings.d_model} must be at least 3: of less than that "
            "LayerNorm leaves a sign, or nothing"
        )
    check_heads(settings.d_model, settings.heads)
    store.progress.start("seeds", total=settings.seeds)
    runs = []
    for done in range(settings.seeds):
        one = replace(settings, seed=settings.seed + done, seeds=1)
        given = numbers_of(one)
        del given["kept"]  # it judges the numbers and changes none
        runs.append(store.piece("residuals", given, partial(run, one)))
        store.progress.update(done + 1)
    return {"layers": settings.layers, "kept": settings.kept, "runs": runs}


def run(settings: Collapse) -> dict[str, Any]:
    """What one draw gives, in float64, so that rounding does not end it early."""
    with jax.enable_x64(True):
        rngs, config = nnx.Rngs(settings.seed), config_of(settings)
        blocks = [EncoderBlock(config, rngs=rngs) for _ in range(settings.layers)]
        rng = np.random.default_rng(settings.seed)
        tokens = rng.standard_normal((settings.tokens, settings.d_model))
        found: dict[str, Any] = {"seed": settings.seed}
        for stream, residual in STREAMS.items():
            found[stream] = {}
            for kind, others in KINDS.items():
                step = partial(compiled_layer, arm=Arm(residual, *others))
                found[stream][kind] = {
                    "residuals": through(step, blocks, tokens),
                    "order": order(partial(step, blocks[0]), tokens),
                }
    return found


def config_of(settings: Collapse) -> TransformerConfig:
    """What the blocks are made of; random tokens need no positions."""
    return TransformerConfig(
        vocab_size=1,
        d_model=settings.d_model,
        num_heads=settings.heads,
        norm="layer",
        activation="gelu",
        positions="none",
        param_dtype=jnp.float64,
    )


def answers(results: dict[str, Any]) -> list[Answer]:
    """Whether tokens become equal, and what of a block keeps them apart."""
    without, within = (
        {kind: [run[stream][kind] for run in results["runs"]] for kind in KINDS}
        for stream in STREAMS
    )
    layers, kept = results["layers"], results["kept"]
    return [
        _alone(without, layers),
        _residual(within, layers, kept),
        _fed(without, layers, kept),
        _normed(without, within),
    ]


def _alone(without: ByKind, layers: int) -> Answer:
    pure = without[ALONE]
    return Answer(
        claim="Attention alone makes all tokens equal, doubly exponentially in depth.",
        source="Dong et al. 2021, arXiv:2103.03404, theorem 2.2",
        number=f"{_path(pure)}. Of a small residual r a layer makes one like r^p, "
        f"p = {_orders(pure)}.",
        rule=f"p is 2.9 to 3.1, and after layer {layers} less than {LOST:g} is "
        "left, with every seed",
        outcome=decide([_has_order(pure, 3), max(_left(pure)) < LOST]),
        sentence="With nothing beside attention each layer cubes what tokens "
        "differ in: after a few layers they are equal to the last digit."
        if _collapses(pure)
        else "These layers do not show that attention alone cubes what tokens "
        "differ in until they are equal.",
    )


def _residual(within: ByKind, layers: int, kept: float) -> Answer:
    joined = [run for runs in within.values() for run in runs]
    linear = _has_order(joined, 1)
    stays = {kind: above(_left(runs), kept) for kind, runs in within.items()}
    told = (f"{kind} {spread(_left(runs))}" for kind, runs in within.items())
    return Answer(
        claim="Residual connections stop the collapse of tokens.",
        source="Dong et al. 2021, arXiv:2103.03404, abstract",
        number=f"Left after layer {layers}: {', '.join(told)}; p = {_orders(joined)}.",
        rule="p is .9 to 1.1 with every seed, and the 95 % interval of what is "
        f"left lies above {kept:g}, for each of the four kinds of layers",
        outcome=decide([linear, *stays.values()]),
        sentence=_apart(linear, [kind for kind, x in stays.items() if x]),
    )


def _fed(without: ByKind, layers: int, kept: float) -> Answer:
    fed = without[WITH_FFN]
    stops = above(_left(fed), kept)
    return Answer(
        claim="A feed-forward network at initialisation stops the collapse of tokens.",
        source="Dong et al. 2021, arXiv:2103.03404, abstract",
        number="Without residual connections and with an FFN, whose weights are "
        f"LeCun normal, at most {rounded_up(max(_left(fed)))} is left after layer "
        f"{layers}; p = {_orders(fed)}.",
        rule=f"the 95 % interval of what is left lies above {kept:g}",
        outcome=decide([stops]),
        sentence=FFN[stops],
    )


def _normed(without: ByKind, within: ByKind) -> Answer:
    normed = without[WITH_NORM]
    gap = np.subtract(_left(within[WITH_NORM]), _left(within[ALONE])).tolist()
    more = t_interval(gap)
    # Where attention alone does not collapse, nothing is known of a norm's role.
    too = _collapses(normed) if _collapses(without[ALONE]) else None
    idle = [too, False if more.sign else None]
    return Answer(
        claim="LayerNorm plays no role in the collapse of tokens.",
        source="Dong et al. 2021, arXiv:2103.03404, section 3",
        number="Without residual connections at most "
        f"{rounded_up(max(_left(normed)))} is left with it, p = {_orders(normed)}. "
        f"With residual connections, left with it less left without: {describe(more)}.",
        rule="without residual connections the first rule holds with it too; with "
        "them a 95 % interval of what it keeps that excludes 0 refutes it",
        outcome=decide(idle),
        sentence=_of_norm(idle, more),
    )


def _of_norm(idle: list[bool | None], more: Interval) -> str:
    if idle != [True, False]:
        return "These layers do not show where LayerNorm plays a role."
    return (
        "Without residual connections tokens collapse with LayerNorm too; with them "
        f"{'more' if more.mean > 0 else 'less'} is left of what they differ in."
    )


def _apart(linear: bool, stays: list[str]) -> str:
    if not linear:
        return "These layers do not show what residual connections do."
    text = (
        "With residual connections a layer leaves a share of what tokens differ in, "
        "not its cube"
    )
    if len(stays) == len(KINDS):
        return f"{text}, and at this depth much of it."
    by = f"only of layers of {' and of '.join(stays)}" if stays else "of none"
    return f"{text}; but shares multiply, and {by} is it shown that they leave much."


def _collapses(runs: list[dict[str, Any]]) -> bool:
    return _has_order(runs, 3) and max(_left(runs)) < LOST


def _left(runs: list[dict[str, Any]]) -> list[float]:
    """What is left after the last layer, for each seed."""
    return [run["residuals"][-1] for run in runs]


def _has_order(runs: list[dict[str, Any]], power: int) -> bool:
    return all(run["order"] and abs(run["order"] - power) < 0.1 for run in runs)


def _orders(runs: list[dict[str, Any]]) -> str:
    """The least and the largest p; unknown where a layer leaves no digit at all."""
    found = [run["order"] for run in runs]
    if None in found:
        return "unknown"
    return " to ".join(dict.fromkeys(f"{x:.3f}" for x in (min(found), max(found))))


def _path(runs: list[dict[str, Any]]) -> str:
    """What is left after each of the first layers, as geometric means over seeds."""
    left = 10 ** _logs(runs).mean(axis=0)[1:5]
    depths = ", ".join(str(depth) for depth, _ in enumerate(left, start=1))
    return f"Left after layer {depths}: {', '.join(f'{x:.2g}' for x in left)}"


def _logs(runs: list[dict[str, Any]]) -> np.ndarray:
    """Powers of ten of residuals, (runs, depths)."""
    return np.log10(np.maximum([run["residuals"] for run in runs], NOTHING))


def parts(results: dict[str, Any]) -> list[Part]:
    """What is left after each layer, in powers of ten."""
    runs, layers = results["runs"], results["layers"]
    depths = list(range(layers + 1))
    shown = [depth for depth in (1, 2, 4, 8) if depth < layers] + [layers]
    found: dict[str, dict[str, Curve]] = {}
    rows: list[list[Any]] = []
    for stream in STREAMS:
        found[stream] = {}
        for kind in KINDS:
            of = [run[stream][kind] for run in runs]
            found[stream][kind] = line = band(depths, _logs(of).tolist())
            rows.append([stream, kind, _orders(of), *(10 ** line.y[x] for x in shown)])
    figure = curves("What tokens differ in", found, x_label="layers")
    return [
        Figure(
            lambda: figure,
            "log10 of the residual |X - 1 mean(X)^T| / |X|, in the Frobenius norm: "
            "the share of the norm in which tokens differ. Means over seeds with 95 % "
            "intervals. At -15 rounding in float64 is all that is left.",
        ),
        Table(
            "Residuals",
            ("stream", "layers of", "p", *(f"after {x}" for x in shown)),
            rows,
            "Geometric means over seeds, for which what is less than "
            f"{NOTHING:g} counts as that; and the least and the largest p of the first "
            "layer.",
            2,
        ),
    ]


CLAIM = Claim(
    title="Does attention make all tokens equal?",
    design="Random tokens pass through layers at initialisation: the parts of one "
    "pre-LN transformer block, with and without the residual stream, the feed-forward "
    "network and the norms, all with the same weights. After each layer stands the "
    "residual: the share of the norm in which tokens differ from their mean. How fast "
    "it can fall is told by one layer alone: tokens that differ by .01 and by .001 of "
    "their norm give the power p in r -> c r^p. With p = 3 the logarithm of 1 / r "
    "grows like 3^depth; with p = 1 like the depth. Dong et al. bound a composite "
    "of the 1- and the infinity-norm; here it is the Frobenius norm.",
    settings=Collapse,
    measure=measure,
    answers=answers,
    parts=parts,
)
