"""Whether attention spreads thin over a long context.

One query and n keys whose logits are independent N(0, 1); the logit of one more key,
the relevant one, is larger. How much weight it gets, and how evenly the others share
theirs, follows from n alone: by quadrature, and by `jattn.attention` on drawn vectors.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jattn
from experiments.claims.arms import spread
from experiments.claims.checks import check_ascending
from experiments.claims.claim import Answer, Claim
from experiments.claims.store import Store
from experiments.config import ConfigError
from experiments.evidence import HOLDS, decide, describe, t_interval
from experiments.page import Figure, Part, Table
from experiments.settings import Count, Name, Positive, Seed, Text
from experiments.svg import Curve, curves
from experiments.theory import softmax_law, weight_of_one

KEPT = 0.9  # of the weight at the reference length
SENTENCES = {
    "keeps": "The factor keeps the weight of a relevant key nearly as it is.",
    "slows": "The factor slows the loss from a power of n to a fraction, but a "
    "relevant key still loses weight as its rivals become more.",
}
SCORES = {"as they are": None, "times log n": jattn.scores.log_n_scale}


@dataclass(frozen=True)
class LongContext:
    """One relevant key among n others."""

    name: Name = "long_context"  # directory of the experiment, inside out
    out: Text = "runs"  # directory of all experiments
    lengths: tuple[Count, ...] = (16, 64, 256, 1024, 4096, 16384)  # n, ascending
    logit: Positive = 5.0  # of the relevant key, before any factor
    reference: Count = 64  # n at which the factor log n / log(reference) is 1
    draws: Count = 256  # independent sets of keys for each n
    head_dim: Count = 8  # size of a query or key
    seed: Seed = 0  # of the draws


def measure(settings: LongContext, store: Store) -> dict[str, Any]:
    """For every n and both kinds of scores, the exact and the measured values."""
    lengths, reference = list(settings.lengths), settings.reference
    check_ascending("lengths", lengths)
    if reference not in lengths[:-1]:
        raise ConfigError(
            f"lengths = {lengths} must hold reference = {reference} and a larger one"
        )
    if settings.logit > 1e4:
        raise ConfigError(f"logit = {settings.logit:g} must be at most 10000")
    if reference == 1:
        raise ConfigError(
            "reference = 1 must be at least 2: log n is divided by its own"
        )
    store.progress.start("draws", total=len(lengths))
    rows = []
    for done, n in enumerate(lengths, start=1):
        given = [n, settings.logit, reference, settings.draws]
        given += [settings.head_dim, settings.seed]
        rows.append(store.piece("draws", given, partial(_draw, settings, n)))
        store.progress.update(done)
    return {"reference": reference, "rows": rows}


def _draw(settings: LongContext, n: int) -> dict[str, Any]:
    row: dict[str, Any] = {"n": n}
    for name, rule in SCORES.items():
        factors = [1.0, 1.0]
        if rule:
            factors = [log_n_factor(keys, settings.reference) for keys in (n, n + 1)]
        score = rule and rule(settings.reference)
        weights, entropies = drawn(settings, n, score)
        row[name] = {
            "entropy": softmax_law(n, factors[0]).entropy,
            "weight": weight_of_one(n, factors[1], factors[1] * settings.logit),
            "entropies": entropies,
            "weights": weights,
        }
    return row


def log_n_factor(keys: int, reference: int) -> float:
    """What `jattn.scores.log_n_scale` multiplies the logits of a query with."""
    return max(1.0, float(np.log(keys) / np.log(reference)))


def drawn(
    settings: LongContext, n: int, score: jattn.scores.Score | None
) -> tuple[list[float], list[float]]:
    """For each draw the weight of the relevant key, and the entropy without it."""
    rng = np.random.default_rng([settings.seed, n])
    size, draws = settings.head_dim, settings.draws
    query = jnp.asarray(rng.standard_normal((draws, 1, 1, size), dtype=np.float32))
    query *= jnp.sqrt(size) / jnp.linalg.norm(query, axis=-1, keepdims=True)
    # With |q| = sqrt(H), the logit q.k / sqrt(H) of a normal key is N(0, 1).
    others = jnp.asarray(rng.standard_normal((draws, n, 1, size), dtype=np.float32))
    relevant = settings.logit * query / jnp.sqrt(size)
    keys = jnp.concatenate([relevant, others], axis=1)
    is_relevant = jnp.zeros((draws, n + 1, 1, 1)).at[:, 0].set(1)
    options: dict[str, Any] = {"score": score, "query_positions": "end"}
    weight = jattn.attention(query, keys, is_relevant, **options)
    _, stats = jattn.attention(query, others, others, stats=True, **options)
    weight, entropy = jax.device_get((weight, stats.entropy))
    return weight.ravel().tolist(), entropy.ravel().tolist()


def answers(results: dict[str, Any]) -> list[Answer]:
    """Whether attention spreads, and whether log n keeps it together."""
    rows, reference = results["rows"], results["reference"]
    first, last = rows[0], rows[-1]
    plain, scaled = ([row[name] for row in rows] for name in SCORES)
    stretch = np.log(last["n"] / first["n"])
    slope = (plain[-1]["entropy"] - plain[0]["entropy"]) / stretch
    left = plain[-1]["weight"] / plain[0]["weight"]
    at_reference = [row["times log n"] for row in rows if row["n"] == reference][0]
    kept = scaled[-1]["weight"] / at_reference["weight"]
    # Paired: both kinds of scores see the same draws.
    weights = [cells[-1]["weights"] for cells in (plain, scaled)]
    gap = t_interval(np.subtract(*reversed(weights)).tolist())
    more = describe(gap, "paired draws")
    measured = [spread(x) for x in weights]
    spreads = decide([abs(slope - 1) < 0.1, left < 0.1])
    helps = None if gap.sign is None else gap.sign > 0
    slows = "keeps" if kept >= KEPT else "slows"
    return [
        Answer(
            claim="Attention is diffuse over a long context.",
            source="Chiang & Cholak 2022, arXiv:2202.12172",
            number=f"From n = {first['n']} to {last['n']} the entropy grows by "
            f"{slope:.3f} per unit of ln n, and the weight of the relevant key goes "
            f"from {plain[0]['weight']:.3g} to {plain[-1]['weight']:.3g} (measured: "
            f"{measured[0]}).",
            rule="the entropy grows by .9 to 1.1 per unit of ln n, and less than a "
            "tenth of the weight is left at the largest n",
            outcome=spreads,
            sentence="Logits that do not grow with n cannot single out one of n keys: "
            "the others outweigh it by their number alone."
            if spreads == HOLDS
            else "These lengths do not show how a relevant key is outweighed.",
        ),
        Answer(
            claim="Logits that grow like log n keep attention selective.",
            source="Chiang & Cholak 2022, arXiv:2202.12172; Su 2021, kexue.fm/8823",
            number=f"At n = {last['n']} the weight is {scaled[-1]['weight']:.3g} "
            f"(measured: {measured[1]}), {kept:.2f} of what it is at the reference "
            f"length. With the factor less without it: {more}.",
            rule="at the largest n the 95 % interval of the paired gap lies above 0, "
            "and then at least nine tenths of the weight at the reference length are "
            "left",
            outcome=decide([helps, kept >= KEPT if helps else None]),
            sentence=SENTENCES[slows] if helps else "It is not shown to help here.",
        ),
    ]


def parts(results: dict[str, Any]) -> list[Part]:
    """Weight and entropy against n: lines are exact, points with bars measured."""
    rows = results["rows"]
    lengths = [row["n"] for row in rows]
    panels: dict[str, dict[str, Curve]] = {"weight of the relevant key": {}}
    panels["entropy of the others, nats"] = {}
    table = []
    for name in SCORES:
        cells = [row[name] for row in rows]
        for panel, exact, draws in zip(
            panels.values(),
            ("weight", "entropy"),
            ("weights", "entropies"),
            strict=True,
        ):
            means = [t_interval(cell[draws]) for cell in cells]
            panel[name] = Curve(lengths, [cell[exact] for cell in cells])
            panel[f"{name}, measured"] = Curve(
                lengths, [x.mean for x in means], [x.half_width or 0 for x in means]
            )
        for n, cell in zip(lengths, cells, strict=True):
            entropy = t_interval(cell["entropies"]).mean
            weight = [cell["weight"], spread(cell["weights"])]
            table.append([name, n, *weight, cell["entropy"], entropy])
    columns = ("scores", "n", "weight", "measured", "entropy", "measured")
    figure = curves("Weight and entropy", panels, x_label="n", log_x=True)
    caption = (
        "Measured: means over draws with 95 % intervals; the other curves are exact. "
        "The entropy is that of n keys without the relevant one. With logits as they "
        "are it is ln n - 1/2 for large n: with variance 1 it differs from that of "
        "even weights by a constant."
    )
    return [
        Figure(lambda: figure, caption),
        Table("Exact and measured", columns, table, "Measured: mean over draws.", 2),
    ]


CLAIM = Claim(
    title="Does attention spread thin over a long context?",
    design="The logits of n keys are independent standard normal numbers; that of one "
    "more key, the relevant one, is larger. Its expected weight, and the entropy of "
    "the weights of the others without it, are integrals, here by quadrature; beside "
    "them stand means over drawn queries and keys under jattn.attention, with the "
    "logits as they are and times max(1, log n / log r) for a reference length r.",
    settings=LongContext,
    measure=measure,
    answers=answers,
    parts=parts,
)
