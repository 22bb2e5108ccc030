"""Whether attention sees the order of tokens, and what their positions are worth.

Exact: encoders at initialisation, whose tokens are permuted. Learned: causal language
models that are told the places of tokens in one way or another, or not at all.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from experiments.claims.arms import above, spread
from experiments.claims.bounds import rounded_down, rounded_up
from experiments.claims.checks import check_text
from experiments.claims.claim import Answer, Claim
from experiments.claims.one_width import Trained
from experiments.claims.store import Store
from experiments.config import (
    Config,
    ConfigError,
    Data,
    Model,
    Optim,
    check_together,
)
from experiments.data import load_corpus
from experiments.evidence import HOLDS, decide, describe, t_interval
from experiments.page import Figure, Part, Table
from experiments.settings import Count, Name, Seed, Text
from experiments.studies.reordered import KINDS, MASKED, past_shuffled, permuted
from experiments.svg import bars

EXACT = 1e-4  # of the size of outputs, in float32: the largest of many roundings
SEEN = 0.1  # likewise, where order is seen
TOLD = KINDS[1:]  # all but none


@dataclass(frozen=True)
class Order:
    """Models that are told the places of tokens, or not."""

    name: Name = "order"  # directory of the experiment, inside out
    out: Text = "runs"  # directory of all experiments
    sequences: Count = 16  # of random tokens, whose order is changed
    shuffled: Count = 32768  # tokens of validation windows whose past is shuffled
    data: Data = Data()
    model: Model = Model()  # its positions are set by the arms
    optim: Optim = Optim()
    seeds: Count = 3  # runs of each arm
    seed: Seed = 0  # of the first run of an arm; the others count on


def measure(settings: Order, store: Store) -> dict[str, Any]:
    """Encoders whose tokens are permuted, and what training came to."""
    if settings.data.context < 3:
        raise ConfigError(
            f"data.context = {settings.data.context} must be at least 3: all tokens "
            "but the last are shuffled"
        )
    if settings.model.positions != Model().positions:
        raise ConfigError("model.positions must be left out: each arm has its own")
    for kind in KINDS:
        check_together(config_of(settings, kind, settings.seed))
    corpus, wanted = load_corpus(settings.data.source), settings.shuffled
    check_text(corpus, settings.data, wanted, f"shuffled = {wanted}")
    runs = []
    for seed in range(settings.seed, settings.seed + settings.seeds):
        sizes = [settings.sequences, settings.data.context, seed]
        moved = store.piece("permuted", sizes, partial(permuted, *sizes))
        run: dict[str, Any] = {"seed": seed, "moved": moved}
        for kind in KINDS:
            trained = train(settings, kind, seed, store)
            given = trained.given | {"shuffled": settings.shuffled}
            compute = partial(past_shuffled, trained, settings.shuffled)
            shuffled = store.piece("past shuffled", given, compute)
            run[kind] = {"loss": trained.loss} | shuffled
            per_byte = trained.summary["baselines"]["bigram"]
            run["bigram"] = per_byte * trained.summary["metrics"]["bytes_per_token"]
        runs.append(run)
    return {"runs": runs}


def train(settings: Order, kind: Any, seed: int, store: Store) -> Trained:
    """A causal language model of one arm."""
    config = config_of(settings, kind, seed)
    return Trained(config, *store.train(config))


def config_of(settings: Order, kind: Any, seed: int) -> Config:
    """What it is trained with."""
    return Config(
        seed=seed,
        data=settings.data,
        model=replace(settings.model, positions=kind),
        optim=settings.optim,
    )


def answers(results: dict[str, Any]) -> list[Answer]:
    """Whether order is seen without positions, and whether positions help."""
    runs = results["runs"]
    moved = {name: [run["moved"][name] for run in runs] for name in runs[0]["moved"]}
    return [_blind(moved), _by_mask(runs, moved), _helped(runs), _by_turning(runs)]


def _blind(moved: dict[str, list[float]]) -> Answer:
    least = min(x for kind in TOLD for x in moved[kind])
    outcome = decide([max(moved["none"]) <= EXACT, least > SEEN])
    return Answer(
        claim="Self-attention does not see the order of tokens.",
        source="Vaswani et al. 2017, arXiv:1706.03762, section 3.5",
        number="If tokens are permuted, an encoder without positions and its "
        f"permuted outputs differ by {rounded_up(max(moved['none']))} of their rms "
        f"at most, with positions by {rounded_down(least)} at least.",
        rule=f"at most {EXACT:g} without positions, and more than {SEEN:g} with "
        "each kind of positions, with every seed",
        outcome=outcome,
        sentence="Without positions and without a mask self-attention is "
        "equivariant: permuted tokens give permuted outputs, each token its own. "
        "It is not invariant: at the same place stands another output."
        if outcome == HOLDS
        else "These encoders do not show that order is seen by positions alone.",
    )


def _by_mask(runs: list[dict[str, Any]], moved: dict[str, list[float]]) -> Answer:
    cost = costs_of_shuffling(runs, "none")
    outcome = decide([above(cost)])
    return Answer(
        claim="A causal mask alone shows a model the order.",
        source="Haviv et al. 2022, arXiv:2203.16634",
        number="What shuffling all tokens but the last costs a causal language "
        "model that was trained without positions, in nats: "
        f"{describe(t_interval(cost))}. Before training, outputs of permuted "
        "tokens and permuted outputs, which see others, differ by "
        f"{rounded_down(min(moved[MASKED]))} of the rms at least.",
        rule="the 95 % interval of what shuffling costs lies above 0",
        outcome=outcome,
        sentence="Under a causal mask tokens differ by how many they see, and a "
        f"model learns to use that: shuffling adds {_added(runs, 'none')} to its "
        "loss of the last token, where with rotary positions it adds "
        f"{_added(runs, 'rotary')}."
        if outcome == HOLDS
        else "These models do not show that a causal mask is enough to learn order "
        "from.",
    )


def _helped(runs: list[dict[str, Any]]) -> Answer:
    gains = {kind: gains_over(runs, "none", kind) for kind in TOLD}
    helps = [above(x) for x in gains.values()]
    helpful = [kind for kind, x in zip(TOLD, helps, strict=True) if x]
    if len(helpful) == len(TOLD):
        found = f"if they are {' or '.join(helpful)}: each kind lowers its loss."
    elif helpful:
        found = f"if they are {' or '.join(helpful)}; for the others no gain is shown."
    else:
        found = "in no kind that is shown."
    return Answer(
        claim="A language model is better if it is told the places of tokens.",
        source="Vaswani et al. 2017, arXiv:1706.03762, section 3.5",
        number=f"Validation loss without positions: {spread(losses(runs, 'none'))} "
        f"nats. Gained by positions: {_gaps(gains)}.",
        rule="the 95 % interval of the gain, paired by seed, lies above 0 for each "
        "kind of positions",
        outcome=decide(helps),
        sentence="At this budget and learning rate positions help a causal model "
        + found,
    )


def _by_turning(runs: list[dict[str, Any]]) -> Answer:
    leads = {kind: gains_over(runs, kind, "rotary") for kind in TOLD[:-1]}
    wins = [above(x) for x in leads.values()]
    return Answer(
        claim="Rotary positions are better than added ones.",
        source="Su et al. 2021, arXiv:2104.09864",
        number=f"Validation loss with rotary positions: "
        f"{spread(losses(runs, 'rotary'))} nats. Gained over others: "
        f"{_gaps(leads)}.",
        rule="the 95 % interval of the gap, paired by seed, lies above 0 for "
        "learned and for sinusoidal positions",
        outcome=decide(wins),
        sentence="Within these few updates, at one learning rate, a model learns "
        "most with rotary positions; longer training is another question."
        if all(wins)
        else "These runs do not show that rotary positions are better than both.",
    )


def losses(runs: list[dict[str, Any]], kind: str) -> list[float]:
    """The validation losses of an arm."""
    return [run[kind]["loss"] for run in runs]


def gains_over(runs: list[dict[str, Any]], other: str, kind: str) -> list[float]:
    """By how much the validation loss of an arm is lower than another's."""
    return np.subtract(losses(runs, other), losses(runs, kind)).tolist()


def costs_of_shuffling(runs: list[dict[str, Any]], kind: str) -> list[float]:
    """What it costs an arm that all tokens but the last are shuffled."""
    return [run[kind]["shuffled"] - run[kind]["in order"] for run in runs]


def _added(runs: list[dict[str, Any]], kind: str) -> str:
    """What shuffling costs an arm, in percent of the loss."""
    loss = np.mean([run[kind]["in order"] for run in runs])
    return f"{100 * np.mean(costs_of_shuffling(runs, kind)) / loss:.2g} %"


def _gaps(gaps: dict[str, list[float]]) -> str:
    return "; ".join(f"{kind} {describe(t_interval(x))}" for kind, x in gaps.items())


def parts(results: dict[str, Any]) -> list[Part]:
    """What positions gain, what shuffling costs, and every run."""
    runs = results["runs"]
    measured = {
        "loss without positions minus loss": {
            kind: gains_over(runs, "none", kind) for kind in KINDS[1:]
        },
        "loss with a shuffled past minus loss": {
            kind: costs_of_shuffling(runs, kind) for kind in KINDS
        },
    }
    captions = (
        "What positions gain in validation loss, nats per token.",
        "What the last token of a window costs more, nats, if all tokens but the one "
        "before it are shuffled. A model that knows them as a bag would be at 0.",
    )
    figures: list[Part] = []
    for (label, found), caption in zip(measured.items(), captions, strict=True):
        means = {kind: t_interval(x)[:2] for kind, x in found.items()}
        svg = bars(label, means, label=f"{label}, nats", reference=0.0)
        text = f"{caption} Means over seeds with 95 % intervals, paired by seed."
        figures.append(Figure(partial(str, svg), text))
    names = list(runs[0]["moved"])
    return [
        *figures,
        Table(
            "Permuted tokens",
            ("seed", *names),
            [[run["seed"], *(run["moved"][x] for x in names)] for run in runs],
            "The largest difference between outputs of permuted tokens and permuted "
            "outputs, over their rms; in place: between outputs at the same place, "
            "without positions.",
        ),
        Table(
            "Validation loss",
            ("seed", *KINDS, "bigram table"),
            [
                [run["seed"], *(run[kind]["loss"] for kind in KINDS), run["bigram"]]
                for run in runs
            ],
            "Nats per token. The table was counted on the bytes of the whole training "
            "split, which is far more text than these models see; its loss is that of "
            "as many bytes as a token has on average.",
        ),
    ]


CLAIM = Claim(
    title="Does attention see the order of tokens?",
    design="Encoders at initialisation get random tokens, and the same tokens "
    "permuted; their outputs should be permuted likewise if order is not seen. Then "
    "causal language models are trained with no positions, with learned and sinusoidal "
    "ones, which are added to the embeddings, and with rotary ones, which turn queries "
    "and keys: on the same text, with the same seeds and at one learning rate. To see "
    "whether a model uses order, it predicts the last token of validation windows "
    "while all tokens but the one before it are shuffled.",
    settings=Order,
    measure=measure,
    answers=answers,
    parts=parts,
)
