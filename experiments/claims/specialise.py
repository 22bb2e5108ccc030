"""Whether heads specialise: which keys they look at, and how unlike they are.

Each head is asked, before and after training, how much weight it gives to the token
before, to earlier tokens like the query's and to what followed those; on text that the
model has not seen, and on random tokens that are repeated once.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from experiments.claims.arms import above, band, spread
from experiments.claims.checks import check_text
from experiments.claims.claim import Answer, Claim
from experiments.claims.one_width import OneWidth, Trained, train
from experiments.claims.store import Store
from experiments.config import ConfigError
from experiments.data import load_corpus
from experiments.evidence import decide, describe, t_interval
from experiments.page import Figure, Part, Table
from experiments.settings import Count, Name, Text
from experiments.studies.patterns import PATTERNS, look, repeats
from experiments.svg import Curve, curves

STAGES = ("trained", "before training")
TEXT, REPEATS = "text", "repeats"
IN_WORDS = {TEXT: "on unseen text", REPEATS: "where random tokens are repeated"}
ALL = [(kind, pattern) for pattern in PATTERNS for kind in IN_WORDS]


@dataclass(frozen=True)
class Specialise:
    """Trained models, whose heads are looked at."""

    name: Name = "specialise"  # directory of the experiment, inside out
    out: Text = "runs"  # directory of all experiments
    models: OneWidth = OneWidth()
    heads: Count = 8  # of a layer
    tokens: Count = 4096  # of text that the model has not seen, to look at
    repeats: Count = 64  # sequences of random tokens


def measure(settings: Specialise, store: Store) -> dict[str, Any]:
    """For each model where its heads look, before and after training."""
    if settings.heads < 2:
        raise ConfigError("heads = 1 must be at least 2, to be unlike one another")
    data, tokens = settings.models.data, settings.tokens
    check_text(load_corpus(data.source), data, tokens, f"tokens = {tokens}")
    numbers = {"tokens": tokens, "repeats": settings.repeats}
    runs = []
    for model in train(settings.models, settings.heads, store):
        seed, compute = model.config.seed, partial(look_at, settings, model)
        found = store.piece("looks", model.given | numbers, compute)
        runs.append({"seed": seed} | found)
    seen = settings.models.optim.steps * data.batch * data.context
    return {"heads": settings.heads, "seen": seen, "runs": runs}


def look_at(settings: Specialise, trained: Trained) -> dict[str, Any]:
    """Where the heads of one model look, for each stage and kind of tokens."""
    text, context = trained.split(), trained.config.data.context
    unseen = trained.windows(text.validation.tokens, settings.tokens)
    drawn = repeats(
        text.train.tokens,
        count=settings.repeats,
        context=context,
        seed=trained.config.seed,
    )
    tokens = {TEXT: unseen.reshape(-1, context + 1)[:, :-1], REPEATS: drawn}
    models = zip(STAGES, (trained.model(), trained.initial()), strict=True)
    return {
        stage: {kind: look(model, trained.scale, x) for kind, x in tokens.items()}
        for stage, model in models
    }


def answers(results: dict[str, Any]) -> list[Answer]:
    """Whether heads of each kind are there, and whether heads become unlike."""
    unlike, alike = (divergences(results, stage) for stage in STAGES)
    gaps = np.subtract(unlike, alike).tolist()
    grows = above(gaps)
    return [
        _looks_at(
            results,
            (TEXT, "previous token"),
            claim="Some heads look at the token before.",
            source="Voita et al. 2019, arXiv:1905.09418; Elhage et al. 2021, A "
            "mathematical framework for transformer circuits",
        ),
        _looks_at(
            results,
            (REPEATS, "induction"),
            claim="Some heads look at what followed the same token (induction).",
            source="Olsson et al. 2022, arXiv:2209.11895",
        ),
        Answer(
            claim="Heads become unlike one another.",
            source="Voita et al. 2019, arXiv:1905.09418",
            number="Jensen-Shannon divergence of a layer's heads on unseen text: "
            f"{spread(unlike)} nats after training, {spread(alike)} before; ln of the "
            f"number of heads is {np.log(results['heads']):.2f}. Growth: "
            f"{describe(t_interval(gaps))}.",
            rule="the 95 % interval of the growth, paired by seed, lies above 0",
            outcome=decide([grows]),
            sentence={
                True: "After training, heads of a layer look at more different keys "
                "than the random ones that they were.",
                False: "Heads of a layer look at more similar keys than the random "
                "ones that they were.",
                None: "These runs do not show whether training makes heads more "
                "unlike than random ones are.",
            }[grows],
        ),
    ]


def divergences(results: dict[str, Any], stage: str) -> list[float]:
    """For each seed how unlike heads are on text, in the mean over layers."""
    return [float(np.mean(run[stage][TEXT]["divergence"])) for run in results["runs"]]


def ranked(
    results: dict[str, Any], stage: str, kind: str, pattern: str
) -> list[list[float]]:
    """For each seed, the weights that heads give to these keys, the largest first."""
    found = (run[stage][kind]["heads"][pattern] for run in results["runs"])
    return [sorted(np.ravel(heads).tolist(), reverse=True) for heads in found]


def evenly(results: dict[str, Any], kind: str, pattern: str) -> float:
    """What even weights give to these keys."""
    found = (run[STAGES[0]][kind]["even"][pattern] for run in results["runs"])
    return float(np.mean(list(found)))


def _looks_at(
    results: dict[str, Any], where: tuple[str, str], claim: str, source: str
) -> Answer:
    """Whether the best head of a kind is one."""
    after, before = (
        [heads[0] for heads in ranked(results, stage, *where)] for stage in STAGES
    )
    most, grows = above(after, 0.5), above(np.subtract(after, before).tolist())
    if grows is None and not most:
        most = None  # what training has not turned yet refutes nothing
    kind, pattern = where
    keys = PATTERNS[pattern]
    sentence = f"{results['seen']} tokens of training turn a head to {keys}"
    if grows:
        share = "gets" if most else "is not shown to get"
        sentence = f"In these runs {sentence}, which {share} most of its weight."
    else:
        sentence = f"These runs do not show that {sentence}."
    return Answer(
        claim=claim,
        source=source,
        number=f"Weight that the best head gives to {keys}, {IN_WORDS[kind]}: "
        f"{spread(after)} after training, {spread(before)} before; even weights would "
        f"give {evenly(results, *where):.2g}.",
        rule="the 95 % interval of this weight lies above one half, and that of its "
        "growth, paired by seed, above 0; a smaller weight refutes it only if it grew "
        "or fell",
        outcome=decide([most, grows]),
        sentence=sentence,
    )


def parts(results: dict[str, Any]) -> list[Part]:
    """How much weight heads give to each kind of keys, and every head."""
    runs, panels = results["runs"], {}
    for kind, pattern in ALL:
        found = {x: ranked(results, x, kind, pattern) for x in STAGES}
        ranks = range(1, len(found[STAGES[0]][0]) + 1)
        lines = {stage: band(ranks, heads) for stage, heads in found.items()}
        even = [evenly(results, kind, pattern)] * len(ranks)
        panels[f"{pattern}, {kind}"] = lines | {"even weights": Curve(ranks, even)}
    figure = curves("Where heads look", panels, x_label="rank of the head")
    columns = [f"{pattern}, {kind}" for kind, pattern in ALL]
    rows = [
        [run["seed"], f"{layer + 1}, {head + 1}"]
        + [run[STAGES[0]][kind]["heads"][x][layer][head] for kind, x in ALL]
        for run in runs
        for layer in range(len(runs[0][STAGES[0]][TEXT]["divergence"]))
        for head in range(results["heads"])
    ]
    return [
        Figure(
            lambda: figure,
            "Mean weight on keys of each kind, over the queries that have any, for all "
            "heads, in each panel in the order of this weight. Means over seeds with "
            "95 % intervals.",
        ),
        Table(
            "Every head",
            ("seed", "layer, head", *columns),
            rows,
            "After training, the mean weight on keys of each kind.",
            2,
            folded=True,
        ),
    ]


CLAIM = Claim(
    title="Do heads specialise?",
    design="Of every head of trained models, and of the same models before training, "
    "it is measured how much weight a query gives to the token before it, to earlier "
    "tokens like its own, and to the tokens that followed those; only queries count "
    "that have such keys. Once on text that the models have not seen, and once on "
    "random tokens that are repeated, where nothing but the repetition tells what "
    "comes next. How unlike the heads of a layer are is the Jensen-Shannon divergence "
    "of their rows.",
    settings=Specialise,
    measure=measure,
    answers=answers,
    parts=parts,
)
