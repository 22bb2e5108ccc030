"""Whether attention weights say which tokens a prediction rests on.

What they say is held against what happens to the prediction when a token is replaced,
or when nothing may look at it any more.
"""

from dataclasses import dataclass
from functools import partial
from statistics import fmean
from typing import Any

import numpy as np

from experiments.claims.arms import above, spread
from experiments.claims.checks import check_text
from experiments.claims.claim import Answer, Claim
from experiments.claims.one_width import Trained
from experiments.claims.store import Store
from experiments.config import Config, ConfigError, Data, Model, Optim
from experiments.data import load_corpus
from experiments.evidence import decide, t_interval
from experiments.page import Figure, Part, Table
from experiments.progress import Prefixed, Progress
from experiments.settings import Count, Name, Seed, Text
from experiments.studies.explaining import (
    AGREEMENTS,
    METHODS,
    OCCLUSIONS,
    OTHER,
    agreement,
    importance,
    occlusion,
)
from experiments.svg import Curve, bars, curves

RULE = "with both kinds of occlusion, by 95 % intervals over windows:"
DOES = {True: "does", False: "does not", None: "is not shown to"}
SCORED = METHODS[:3]
Values = list[list[float]]  # for each kind of occlusion, of all windows


@dataclass(frozen=True)
class Explain:
    """Predictions of trained language models, and what is said of them."""

    name: Name = "explain"  # directory of the experiment, inside out
    out: Text = "runs"  # directory of all experiments
    data: Data = Data()
    model: Model = Model()
    optim: Optim = Optim()
    windows: Count = 64  # held-out windows, each with one prediction
    replacements: Count = 3  # tokens of the text that are put in the place of another
    seeds: Count = 3  # models
    seed: Seed = 0  # of the first one; the others count on


def measure(settings: Explain, store: Store) -> dict[str, Any]:
    """For every model how well each method agrees with both kinds of occlusion."""
    if settings.data.context < 3:
        raise ConfigError(
            f"data.context = {settings.data.context} must be at least 3: there is "
            "nothing to rank"
        )
    wanted = settings.windows * settings.data.context
    corpus = load_corpus(settings.data.source)
    check_text(corpus, settings.data, wanted, f"windows = {settings.windows}")
    models = []
    for seed in range(settings.seed, settings.seed + settings.seeds):
        config = Config(
            seed=seed, data=settings.data, model=settings.model, optim=settings.optim
        )
        trained = Trained(config, *store.train(config))
        given = [trained.given, settings.windows, settings.replacements]
        progress = Prefixed(store.progress, f"seed {seed}")
        found = store.piece(
            "model", given, partial(explain, settings, trained, progress)
        )
        models.append({"seed": seed, "loss": trained.loss} | found)
    return {"models": models, "ranked": settings.data.context - 1}


def explain(settings: Explain, trained: Trained, progress: Progress) -> dict[str, Any]:
    """One model: agreement in each window, and where the tokens that count stand.

    Returns:
        "agreement": as of `explaining.agreement`.
        "profile": for each kind of scores the mean share of each token, the nearest
            first.
    """
    split, model = trained.split(), trained.model()
    context, count = settings.data.context, settings.windows
    windows = trained.windows(split.validation.tokens, count * context)
    windows = windows.reshape(-1, context + 1)[:count, :-1]
    rng = np.random.default_rng(trained.config.seed)
    found: list[dict[str, Any]] = []
    progress.start("windows", total=count)
    for done, tokens in enumerate(windows, start=1):
        others = rng.choice(split.train.tokens, settings.replacements).astype(np.int32)
        row = importance(model, tokens, trained.scale)
        row |= occlusion(model, tokens, others, trained.scale)
        row |= {"nearness": np.arange(context - 1), "chance": rng.random(context - 1)}
        found.append(row)
        progress.update(done)
    scores = {name: np.stack([row[name] for row in found]) for name in found[0]}
    shares = {x: scores[x] / scores[x].sum(axis=-1, keepdims=True) for x in scores}
    profile = {name: x.mean(axis=0)[::-1].tolist() for name, x in shares.items()}
    return {"agreement": agreement(scores), "profile": profile}


def of(results: dict[str, Any], how: str, name: str) -> Values:
    """The agreement of a method with both kinds of occlusion, a mean over models."""
    values = [
        [model["agreement"][how][kind][name] for kind in OCCLUSIONS]
        for model in results["models"]
    ]
    return np.mean(values, axis=0).tolist()


def answers(results: dict[str, Any]) -> list[Answer]:
    """What attention, rollout and a gradient tell of what a prediction rests on."""
    rank, first = (
        {name: of(results, how, name) for name in METHODS} for how in AGREEMENTS
    )
    gaps = [
        _gaps(rank, "attention", "chance"),
        _gaps(first, "attention", "nearness"),
        _gaps(rank, "attention", OTHER),
    ]
    found = [_above(gap) for gap in gaps]
    does = [_does(signs) for signs in found]
    return [
        Answer(
            claim="Attention weights explain a prediction.",
            source="put to the test by Jain & Wallace 2019, arXiv:1902.10186, and "
            "Wiegreffe & Pinter 2019, arXiv:1908.04626",
            number=f"Rank correlation with occlusion: {_words(rank['attention'])}; "
            f"more than that of chance by {_words(gaps[0])}, than that of the two "
            f"kinds with each other by {_words(gaps[2])}. The token with most weight "
            f"counts most in {_words(first['attention'])} of the windows, more often "
            f"than the last but one by {_words(gaps[1])}.",
            rule=f"{RULE} rank correlation is above that of chance; what has most "
            "weight counts most more often than the last token but one; and rank "
            "correlation is above that of the two kinds with each other",
            outcome=decide(sum(found, [])),
            sentence=f"In these models attention {does[0]} rank tokens better than "
            f"chance, {does[1]} name what counts most more often than always taking "
            f"the last token but one, and {does[2]} rank tokens as well as a second "
            "experiment would.",
        ),
        _better(
            rank,
            first,
            "gradient x input",
            "A gradient explains better than attention weights.",
            "Jain & Wallace 2019, arXiv:1902.10186, section 4.1",
        ),
        _better(
            rank,
            first,
            "rollout",
            "Attention rollout explains better than attention weights.",
            "Abnar & Zuidema 2020, arXiv:2005.00928",
        ),
    ]


def _better(
    rank: dict[str, Values],
    first: dict[str, Values],
    name: str,
    claim: str,
    source: str,
) -> Answer:
    gaps = [_gaps(values, name, "attention") for values in (rank, first)]
    found = [_above(gap) for gap in gaps]
    does = [_does(signs) for signs in found]
    return Answer(
        claim=claim,
        source=source,
        number=f"From that of attention weights, rank correlation differs by "
        f"{_words(gaps[0])}, and the share of windows with the same token first by "
        f"{_words(gaps[1])}.",
        rule=f"{RULE} rank correlation, and the share of windows with the same token "
        "first, are above those of attention weights",
        outcome=decide(sum(found, [])),
        sentence=f"In these models {name} {does[0]} come nearer to the order by "
        f"occlusion than attention, and {does[1]} name more often what counts most.",
    )


def _gaps(rank: dict[str, Values], name: str, other: str) -> Values:
    """Paired: both methods rank the same tokens."""
    return np.subtract(rank[name], rank[other]).tolist()


def _above(values: Values, bound: float = 0.0) -> list[bool | None]:
    return [above(x, bound) for x in values]


def _does(found: list[bool | None]) -> str:
    """What is so, or is not, by each kind of occlusion, as a verb."""
    if len(set(found)) == 1:
        return DOES[found[0]]
    pairs = zip(found, OCCLUSIONS, strict=True)
    return " and ".join(f"{DOES[x]} ({kind})" for x, kind in pairs)


def _words(values: Values) -> str:
    pairs = zip(values, OCCLUSIONS, strict=True)
    return " and ".join(f"{spread(x)} ({kind})" for x, kind in pairs)


def parts(results: dict[str, Any]) -> list[Part]:
    """Agreement of every method, and how far back what counts stands."""
    models, ranked = results["models"], results["ranked"]
    rank, first = (
        {name: of(results, how, name) for name in METHODS} for how in AGREEMENTS
    )
    intervals = {
        f"{name}, {kind}": t_interval(values)
        for name in METHODS
        for kind, values in zip(OCCLUSIONS, rank[name], strict=True)
    }
    agreement = bars(
        "Agreement with occlusion",
        {name: (x.mean, x.half_width) for name, x in intervals.items()},
        label="rank correlation",
    )
    distances = [2**n for n in range(ranked.bit_length())]
    shares = {
        name: np.cumsum(np.mean([model["profile"][name] for model in models], axis=0))
        for name in (*OCCLUSIONS, *SCORED)
    }
    profile = curves(
        "How far back the tokens stand that count",
        {
            "share of all before the last": {
                name: Curve(distances, [float(x[n - 1]) for n in distances])
                for name, x in shares.items()
            }
        },
        x_label="the nearest tokens",
        log_x=True,
    )
    columns = [f"{how}, {kind}" for how in AGREEMENTS for kind in OCCLUSIONS]
    rows = [[name, *map(spread, (*rank[name], *first[name]))] for name in METHODS]
    own = [
        [model["seed"], model["loss"]]
        + [fmean(model["agreement"]["rank"]["removed"][name]) for name in METHODS]
        for model in models
    ]
    return [
        Figure(
            lambda: agreement,
            "Rank correlation: means over models, then over windows, with 95 % "
            "intervals.",
        ),
        Figure(
            lambda: profile,
            "What the nearest 1, 2, 4, ... tokens before the last one count for "
            "together: means over windows and models.",
        ),
        Table(
            "Agreement",
            ("method", *columns),
            rows,
            f"Of {ranked} tokens. Rank: rank correlation. First: share of the windows "
            "with the same token first.",
        ),
        Table(
            "Models",
            ("seed", "loss", *METHODS),
            own,
            "Validation loss, and mean rank correlations with removal.",
            2,
        ),
    ]


CLAIM = Claim(
    title="Do attention weights explain a prediction?",
    design="Trained causal language models predict what comes after held-out windows. "
    "Of the tokens before the last one, to which the prediction is linked by attention "
    "alone, each is replaced by tokens drawn from the text, or hidden from all others; "
    "how far the predicted distribution moves (KL divergence) is what the token counts "
    "for. Methods that need no experiment rank the same tokens: the weights of the "
    "last layer, attention rollout, the gradient of the log-probability of the most "
    "probable token times the input. Nearness ranks by place alone, and chance "
    "draws a ranking.",
    settings=Explain,
    measure=measure,
    answers=answers,
    parts=parts,
)
