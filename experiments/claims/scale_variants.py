"""Which factor dot products need, by which optimiser, and where else it can be put."""

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import numpy as np

from experiments.claims import on_text
from experiments.claims.arms import Run, above, band, of_arm, run_arms, spread
from experiments.claims.claim import Answer, Claim
from experiments.claims.on_text import OnText, config_of
from experiments.claims.store import Store
from experiments.config import ConfigError
from experiments.data import Corpus, ngram_losses
from experiments.evidence import FAILS, HOLDS, OPEN, PART, decide, describe, t_interval
from experiments.page import Cell, Figure, Part, Table
from experiments.progress import Progress
from experiments.settings import Count, Name, Positive, Seed, Text
from experiments.svg import Curve, curves

USUAL = "1/sqrt(d_k)"
FACTORS: dict[str, dict[str, Any]] = {
    "none": {"scale": "none"},
    USUAL: {"scale": "sqrt"},
    "1/d_k": {"scale": "inv"},
    "in the initial weights": {"scale": "init"},
    "with qk-norm": {"scale": "sqrt", "qk_norm": True},
    "with log n": {"scale": "sqrt", "log_n": True},
}
"""What each arm is called, and the settings of the model that make it."""
OPTIMISERS = {"AdamW": "adamw", "SGD": "sgd"}
ARMS = {f"{x}, {y}": (x, y) for x, y in itertools.product(FACTORS, OPTIMISERS)}
Gap = Callable[[str], np.ndarray]
"""From an optimiser to a number for each seed."""


@dataclass(frozen=True)
class ScaleVariants:
    """Factors of the dot products, each at several learning rates."""

    name: Name = "scale_variants"  # directory of the experiment, inside out
    out: Text = "runs"  # directory of all experiments
    models: OnText = OnText(layers=1)
    adamw: tuple[Positive, ...] = (1e-3, 4e-3, 1.6e-2, 6.4e-2)  # peak learning rates
    sgd: tuple[Positive, ...] = (3e-2, 1e-1, 3e-1, 1.0)  # as well, with momentum
    seeds: Count = 4  # runs of each arm at each learning rate
    seed: Seed = 0  # of the first run of an arm; the others count on


def measure(settings: ScaleVariants, store: Store) -> dict[str, Any]:
    """The loss of every arm at every learning rate, and of counting pairs of bytes."""
    for name in OPTIMISERS.values():
        rates = list(getattr(settings, name))
        if rates != sorted(set(rates)):
            raise ConfigError(f"{name} = {rates} must ascend")
    corpus = on_text.load_text(settings.models)
    for arm in FACTORS.values():  # refuses before anything is trained
        config = config_of(settings.models, settings.seed, "adamw", 1.0, **arm)
    parts = corpus.split(config.data.validation_fraction)
    return {
        "d_k": settings.models.d_k,
        "rates": {x: getattr(settings, name) for x, name in OPTIMISERS.items()},
        "counted": store.piece("counted", corpus.sha256, lambda: ngram_losses(*parts)),
        "runs": run_arms(
            settings, list(ARMS), store, functools.partial(train, corpus), corpus.sha256
        ),
    }


def train(
    corpus: Corpus, settings: ScaleVariants, arm: str, progress: Progress
) -> dict[str, Any]:
    """An arm at each of its learning rates: the loss, None where it diverged."""
    factor, optimiser = ARMS[arm]
    name = OPTIMISERS[optimiser]
    losses: list[float | None] = []
    for lr in getattr(settings, name):
        config = config_of(settings.models, settings.seed, name, lr, **FACTORS[factor])
        fitted = on_text.train(config, corpus, progress)
        found = on_text.validation_loss(config, corpus, fitted.model)
        losses.append(None if fitted.diverged or not np.isfinite(found) else found)
    start = on_text.initial(config, corpus)
    return {
        "initial": on_text.validation_loss(config, corpus, start),
        "losses": losses,
    }


def capped(run: Run) -> list[float]:
    """Its losses, none above that before training, which also stands for no loss."""
    return [
        run["initial"] if x is None else min(x, run["initial"]) for x in run["losses"]
    ]


def sensitivity(run: Run) -> float:
    """By how much a learning rate of the range ends above the best one, on average.

    Source: Wortsman et al. 2023, arXiv:2309.14322, section 2.2.
    """
    losses = capped(run)
    return fmean(losses) - min(losses)


def best(runs: Sequence[Run]) -> tuple[int, list[float]]:
    """Which learning rate has the lowest mean loss, and the losses at it."""
    columns = list(zip(*map(capped, runs), strict=True))
    index = min(range(len(columns)), key=lambda i: fmean(columns[i]))
    return index, list(columns[index])


def answers(results: dict[str, Any]) -> list[Answer]:
    """What each factor does at its best, under both optimisers."""
    none, usual, inverse, init, norm, log_n = FACTORS

    def runs(factor: str, optimiser: str) -> list[Run]:
        return of_arm(results["runs"], f"{factor}, {optimiser}")

    def at_best(factor: str, optimiser: str) -> np.ndarray:
        return np.array(best(runs(factor, optimiser))[1])

    def gap(worse: str, better: str) -> Gap:
        return lambda x: at_best(worse, x) - at_best(better, x)

    def regained(optimiser: str) -> np.ndarray:
        return gap(none, init)(optimiser) - 0.9 * gap(none, usual)(optimiser)

    def calmed(optimiser: str) -> np.ndarray:
        plain, calm = (runs(factor, optimiser) for factor in (usual, norm))
        return np.subtract([*map(sensitivity, plain)], [*map(sensitivity, calm)])

    lies = "lies above 0 under both optimisers, paired by seed"
    loss = f"each arm at its best learning rate, the 95 % interval of this gap {lies}"
    return [
        _answer(
            "Dot products need the factor 1/sqrt(d_k).",
            "Vaswani et al. 2017, arXiv:1706.03762, section 3.2.1",
            gap(none, usual),
            "Loss without the factor less loss with it",
            loss,
            "these models end worse without the factor, even at the learning rate that "
            "suits them best",
        ),
        _answer(
            "The factor can be put into the initial weights instead.",
            "the code of T5, Raffel et al. 2020, arXiv:1910.10683",
            regained,
            "Loss regained by it less nine tenths of what the factor regains",
            loss,
            "at the learning rate that suits them best, smaller initial weights regain "
            "nine tenths of what the factor does",
        ),
        _answer(
            "1/d_k is better than 1/sqrt(d_k).",
            "Yang et al. 2022, arXiv:2203.03466, for widths that grow",
            gap(usual, inverse),
            "Loss with 1/sqrt(d_k) less loss with 1/d_k",
            loss,
            "models of this one width end better with 1/d_k",
        ),
        _answer(
            "qk-norm makes the learning rate matter less.",
            "Wortsman et al. 2023, arXiv:2309.14322, section 3.1",
            calmed,
            "Learning-rate sensitivity without qk-norm less that with it",
            f"the 95 % interval of this gap {lies}",
            "a learning rate that is not the best one costs less with qk-norm",
        ),
        _answer(
            "A factor of log n lowers the loss.",
            "Chiang & Cholak 2022, arXiv:2202.12172, for lengths that grow",
            gap(usual, log_n),
            "Loss without log n less loss with it",
            loss,
            "logits that grow like log n help within one short context",
        ),
    ]


def _answer(
    claim: str, source: str, gap: Gap, what: str, rule: str, found: str
) -> Answer:
    """What a gap says under both optimisers together; `found` if it lies above 0."""
    gaps = {optimiser: gap(optimiser).tolist() for optimiser in OPTIMISERS}
    numbers = [f"{name} {describe(t_interval(x))}" for name, x in gaps.items()]
    signs = [above(x) for x in gaps.values()]
    outcome = decide(signs)
    other = "the opposite" if False in signs else "neither that nor the opposite"
    sentence = {
        HOLDS: f"Under both optimisers {found}.",
        PART: f"Under one optimiser {found}; under the other {other} is shown.",
        FAILS: f"That {found} is shown under neither optimiser, and the opposite under "
        "one at least.",
        OPEN: f"These runs do not tell whether {found}.",
    }[outcome]
    return Answer(
        claim, source, f"{what}: {'; '.join(numbers)}.", rule, outcome, sentence
    )


def parts(results: dict[str, Any]) -> list[Part]:
    """Loss against learning rate, and every arm at its best."""
    runs, rates = results["runs"], results["rates"]
    found: dict[str, dict[str, Curve]] = {x: {} for x in OPTIMISERS}
    rows: list[list[Cell]] = []
    for arm, (factor, optimiser) in ARMS.items():
        of = of_arm(runs, arm)
        found[optimiser][factor] = band(rates[optimiser], [capped(run) for run in of])
        index, losses = best(of)
        is_end = index in (0, len(rates[optimiser]) - 1)
        rate = f"{rates[optimiser][index]:g}{' (end)' * is_end}"
        calm = spread([sensitivity(run) for run in of])
        lost = sum(loss is None for run in of for loss in run["losses"])
        rows.append([optimiser, factor, rate, spread(losses), calm, lost])
    figure = curves(
        "Loss against learning rate", found, x_label="learning rate", log_x=True
    )
    columns = ("optimiser", "factor", "best rate", "loss", "sensitivity", "diverged")
    counted = results["counted"]
    return [
        Figure(
            lambda: figure,
            f"Validation loss in nats per byte at d_k = {results['d_k']}, means over "
            "seeds with 95 % intervals; no loss counts as more than that before "
            "training. The trainings are short: a table of pairs of bytes, counted in "
            f"all of the text to train on, has {counted['bigram']:.3f}, one of single "
            f"bytes {counted['unigram']:.3f}.",
        ),
        Table(
            "Each at its best learning rate",
            columns,
            rows,
            "(end): of the range, so that a rate beyond it may be better. Sensitivity: "
            "the mean excess of the loss over the best one, over all rates. Diverged: "
            "how many runs. ± 95 % interval over seeds.",
            2,
        ),
    ]


CLAIM = Claim(
    title="Which factor do dot products need?",
    design="Small causal transformers read text byte by byte, their dot products times "
    "no factor, 1/sqrt(d_k) or 1/d_k; with the factor 1/sqrt(d_k) in the initial "
    "weights of queries and keys instead; and with 1/sqrt(d_k) beside qk-norm, or "
    "beside ln n over that of the context. Each is trained by AdamW and by SGD with "
    "momentum, at several learning rates. Arms of a seed see the same data and draws.",
    settings=ScaleVariants,
    measure=measure,
    answers=answers,
    parts=parts,
)
