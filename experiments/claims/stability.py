"""What high learning rates do to the logits of attention, and two ways to hold them."""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from flax import nnx

from experiments.claims import on_text
from experiments.claims.arms import Run, above, band, of_arm, run_arms, spread
from experiments.claims.claim import Answer, Claim
from experiments.claims.on_text import OnText, config_of
from experiments.claims.store import Store
from experiments.config import ConfigError, Probe
from experiments.data import Corpus
from experiments.evidence import HOLDS, decide, describe, t_interval
from experiments.model import CausalLM
from experiments.page import Cell, Figure, Part, Table
from experiments.probe import probe
from experiments.progress import Progress
from experiments.settings import Count, Name, Positive, Seed, Text
from experiments.svg import Curve, curves
from experiments.watch import worst

KINDS = PLAIN, NORM, CAP = "plain", "qk-norm", "soft cap"
RATES = ("moderate", HIGH := "high")
ARMS = {f"{x}, {y}": (x, y) for y in RATES for x in KINDS}
MEASURES = {
    "largest_logit": "largest logit",
    "entropy": "entropy / ln n",
    "saturated_share": "saturated rows",
}
COLLAPSED = 0.05  # entropy / ln n of rows that attend to hardly more than one key


@dataclass(frozen=True)
class Stability:
    """Trainings at a moderate and at a high learning rate."""

    name: Name = "stability"  # directory of the experiment, inside out
    out: Text = "runs"  # directory of all experiments
    models: OnText = OnText(steps=200)
    moderate: Positive = 1e-2  # peak learning rate of AdamW
    high: Positive = 1e-1  # one that is too high
    cap: Positive = 30.0  # logits s become cap tanh(s / cap)
    probed: Count = 16  # windows that are looked at
    every: Count = 20  # updates between looks
    seeds: Count = 4  # runs of each arm
    seed: Seed = 0  # of the first run of an arm; the others count on


def measure(settings: Stability, store: Store) -> dict[str, Any]:
    """Every arm while it is trained."""
    if settings.moderate >= settings.high:
        raise ConfigError(
            f"moderate = {settings.moderate} must be below high = {settings.high}"
        )
    if not 1e-9 <= settings.cap <= 1e30:
        raise ConfigError(f"cap = {settings.cap} must be from 1e-9 to 1e30")
    corpus = on_text.load_text(settings.models)
    config = config_of(settings.models, settings.seed, "adamw", settings.high)
    *sizes, _ = on_text.held_out(config, corpus).shape
    if settings.probed > (windows := math.prod(sizes)):
        raise ConfigError(
            f"probed = {settings.probed} is more than the {windows} windows of "
            f"models.held_out = {settings.models.held_out}"
        )
    return {
        "cap": settings.cap,
        "rates": {rate: getattr(settings, rate) for rate in RATES},
        "runs": run_arms(
            settings, list(ARMS), store, functools.partial(train, corpus), corpus.sha256
        ),
    }


def train(
    corpus: Corpus, settings: Stability, arm: str, progress: Progress
) -> dict[str, Any]:
    """One run: its heads from before the first update on, and how it ends."""
    kind, rate = ARMS[arm]
    changes: dict[str, dict[str, Any]]
    changes = {PLAIN: {}, NORM: {"qk_norm": True}, CAP: {"soft_cap": settings.cap}}
    lr = getattr(settings, rate)
    config = config_of(settings.models, settings.seed, "adamw", lr, **changes[kind])
    windows = on_text.held_out(config, corpus)
    probed = windows.reshape(-1, windows.shape[-1])[: settings.probed]

    def look(model: CausalLM) -> dict[str, float]:
        graph, params = nnx.split(model, nnx.Param)
        scale = on_text.scale_of(config)
        seen = probe(graph, params, scale=scale, tokens=probed, settings=Probe())
        found = worst(seen["heads"]) | seen["mean"]
        return {measure: found[measure] for measure in MEASURES}

    start = on_text.initial(config, corpus)
    fitted = on_text.train(config, corpus, progress, record=look, every=settings.every)
    before, after = (
        on_text.validation_loss(config, corpus, model)
        for model in (start, fitted.model)
    )
    ended = not fitted.diverged and np.isfinite(after)
    return {
        "seen": [[0, look(start)], *fitted.records],
        # A training that diverged has learned nothing.
        "loss": after if ended else before,
        "diverged": not ended,
    }


def last(run: Run, measure: str) -> float:
    """A measure of the heads when they were last seen."""
    return run["seen"][-1][1][measure]


def growths(runs: Sequence[Run]) -> list[float] | None:
    """How many times as large the largest logit became, to the base of ten.

    None if a run was not seen after an update.
    """
    if min(len(run["seen"]) for run in runs) < 2:
        return None
    begun = [run["seen"][0][1]["largest_logit"] for run in runs]
    return np.log10(
        [last(run, "largest_logit") for run in runs] / np.array(begun)
    ).tolist()


def answers(results: dict[str, Any]) -> list[Answer]:
    """Whether logits grow, what holds them, and what that is good for."""
    rate = results["rates"][HIGH]
    fast = {kind: of_arm(results["runs"], f"{kind}, {HIGH}") for kind in KINDS}
    capped = [run for run in results["runs"] if ARMS[run["arm"]][0] == CAP]
    return [
        _held(fast, rate),
        _capped(capped, results["cap"]),
        _worse(fast, rate),
        _collapse(fast, rate),
    ]


def _held(fast: dict[str, list[Run]], rate: float) -> Answer:
    grown, held = growths(fast[PLAIN]), growths(fast[NORM])
    return _answer(
        "qk-norm prevents the growth of logits.",
        "Dehghani et al. 2023, arXiv:2302.05442; Wortsman et al. 2023, "
        "arXiv:2309.14322",
        f"At the rate {rate:g} the largest logit grows {_times(grown)} without it, "
        f"{_times(held)} with it.",
        "at the high rate the 95 % interval of the growth lies above tenfold without "
        "qk-norm, and below with it",
        # Logarithms to the base of ten: tenfold is 1.
        [
            None if grown is None else above(grown, 1.0),
            None if held is None else above([1 - x for x in held]),
        ],
        "with qk-norm, whose gains are still learned, logits grow by less than an "
        "order of magnitude at a rate at which without it they grow by more",
    )


def _capped(runs: Sequence[Run], cap: float) -> Answer:
    largest = max(x["largest_logit"] for run in runs for _, x in run["seen"])
    return _answer(
        "A soft cap bounds the logits.",
        "Gemma Team 2024, arXiv:2408.00118, section 2",
        f"Cap {cap:g}; largest logit seen {largest:.4g}.",
        "no logit that was looked at is larger than the cap, up to rounding",
        [largest <= cap * (1 + 1e-6)],
        f"no logit exceeds {cap:g}, which is arithmetic and no finding: "
        "|cap tanh(s / cap)| <= cap, whatever training does",
    )


def _worse(fast: dict[str, list[Run]], rate: float) -> Answer:
    lost = {kind: [run["loss"] for run in fast[kind]] for kind in KINDS}
    gaps = {x: np.subtract(lost[PLAIN], lost[x]).tolist() for x in (NORM, CAP)}
    told = (f"{kind} {describe(t_interval(x))}" for kind, x in gaps.items())
    diverged = sum(run["diverged"] for run in fast[PLAIN])
    return _answer(
        "At a high learning rate a model without either ends worse.",
        "Wortsman et al. 2023, arXiv:2309.14322, section 3.1, of qk-norm",
        f"At the rate {rate:g}, loss without less loss with {'; '.join(told)}. "
        f"Diverged: {diverged} of {len(fast[PLAIN])} without.",
        "at the high rate the 95 % intervals of both gaps in validation loss, paired "
        "by seed, lie above 0; a run that diverged counts as not trained",
        [above(x) for x in gaps.values()],
        "both qk-norm and a soft cap save some of what a high learning rate costs",
    )


def _collapse(fast: dict[str, list[Run]], rate: float) -> Answer:
    left = {kind: [last(run, "entropy") for run in fast[kind]] for kind in KINDS}
    grown = {kind: growths(fast[kind]) for kind in KINDS}
    told = (f"{kind} {_times(grown[kind])}, {spread(left[kind])}" for kind in KINDS)
    # Of heads that nobody saw after an update nothing is known.
    plain, norm, cap = (
        None if grown[kind] is None else above(left[kind], COLLAPSED) for kind in KINDS
    )
    collapsed = None if plain is None else not plain
    return _answer(
        "Where logits grow, entropy collapses.",
        "Zhai et al. 2023, arXiv:2303.06296",
        f"At the rate {rate:g}, growth of the largest logit, and entropy / ln n, mean "
        f"over heads: {'; '.join(told)}.",
        "at the high rate the 95 % interval of entropy / ln n lies below "
        f"{COLLAPSED} for the plain model, and, if so, above it with qk-norm and with "
        "a soft cap",
        [collapsed, *(x if collapsed else None for x in (norm, cap))],
        "heads whose logits nothing bounds attend to hardly more than one key, and "
        "others do not; but what is left of the entropy does not follow from the "
        "growth alone",
    )


def _answer(
    claim: str,
    source: str,
    number: str,
    rule: str,
    conditions: Sequence[bool | None],
    found: str,
) -> Answer:
    """The answer; `found` if all conditions are met."""
    outcome = decide(conditions)
    shown, missed = "In these runs", "These runs do not show all of this:"
    sentence = f"{shown if outcome == HOLDS else missed} {found}."
    return Answer(claim, source, number, rule, outcome, sentence)


def _times(logs: Sequence[float] | None) -> str:
    """The geometric mean and its 95 % interval, as in "4.1-fold (3.2 to 5.3)"."""
    if logs is None:
        return "unseen, as a run diverged at once"
    mean, half_width, _ = t_interval(logs)
    sides = (0, -1, 1) if half_width else (0,)
    powers = [10 ** (mean + side * (half_width or 0)) for side in sides]
    first, *ends = (f"{x:.0f}" if x >= 100 else f"{x:.3g}" for x in powers)
    return f"{first}-fold" + f" (95 %: {' to '.join(ends)})" * bool(ends)


def parts(results: dict[str, Any]) -> list[Part]:
    """The heads while training goes on, and how every run ends."""
    runs, rates = results["runs"], results["rates"]
    figures: list[Part] = [
        Figure(
            functools.partial(_while_training, runs, rate),
            f"At the {rate} learning rate, {rates[rate]:g}: the largest logit of all "
            "heads, and for all rows the mean of entropy / ln n and the share that "
            "gives more than .99 of its weight to one key. "
            "Means over seeds with 95 % intervals, up to where a first run diverged.",
        )
        for rate in RATES
    ]
    rows: list[list[Cell]] = [
        [
            kind,
            f"{rates[rate]:g}",
            run["seed"],
            *(last(run, measure) for measure in MEASURES),
            run["loss"],
            "diverged" if run["diverged"] else "finished",
        ]
        for arm, (kind, rate) in ARMS.items()
        for run in of_arm(runs, arm)
    ]
    columns = ("arm", "rate", "seed", *MEASURES.values(), "loss", "status")
    caption = (
        "After training, or when last looked at. Loss: of validation, nats per byte."
    )
    return [*figures, Table("Runs", columns, rows, caption, 3)]


def _while_training(runs: Sequence[Run], rate: str) -> str:
    """The measures of the arms of a rate against updates."""
    found: dict[str, dict[str, Curve]] = {}
    for measure, heading in MEASURES.items():
        is_logit = measure == "largest_logit"
        found[f"{heading}, log10" if is_logit else heading] = panel = {}
        for arm in (arm for arm in ARMS if ARMS[arm][1] == rate):
            seen = [run["seen"] for run in of_arm(runs, arm)]
            common = min(map(len, seen))
            updates = [update for update, _ in seen[0][:common]]
            values = [[x[measure] for _, x in one[:common]] for one in seen]
            values = np.log10(values).tolist() if is_logit else values
            panel[ARMS[arm][0]] = band(updates, values)
    return curves(f"Heads at the {rate} rate", found, x_label="updates")


CLAIM = Claim(
    title="What keeps attention stable at a high learning rate?",
    design="Small causal transformers read text byte by byte, trained by AdamW at a "
    "moderate and at a high learning rate: as they are, with qk-norm, and with logits "
    "s that become cap tanh(s / cap). All have the factor 1/sqrt(d_k). Their heads are "
    "looked at every few updates, on windows that they are not trained on. Arms of a "
    "seed see the same data.",
    settings=Stability,
    measure=measure,
    answers=answers,
    parts=parts,
)
