"""How many heads of a trained model can be taken away, and which.

Heads are taken away after training, one by one: the one that a gradient calls the least
important first, or the one whose loss hurts least, or in random order. Orders are found
on text of the training split and tested on the validation split.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from flax import nnx

from experiments.claims.arms import above, band, spread
from experiments.claims.checks import check_text
from experiments.claims.claim import Answer, Claim
from experiments.claims.one_width import OneWidth, Trained, train
from experiments.claims.store import Store
from experiments.config import ConfigError
from experiments.data import load_corpus
from experiments.evidence import HOLDS, PART, decide, describe, t_interval
from experiments.page import Figure, Part, Table
from experiments.settings import Count, Name, Text
from experiments.step import evaluate
from experiments.studies.removal import alone, greedy, importance, in_order, losses
from experiments.svg import Curve, curves

NOTICED = 0.01  # of the loss; a source of the claim reports "no noticeable" harm
ORDERS = ("greedy", "by importance", "random")

LIKE_GREEDY = {
    True: "One backward pass finds most of what trying every head finds.",
    False: "One backward pass is better than chance, but finds less than half of what "
    "trying every head finds.",
    None: "One backward pass is better than chance; these runs do not show how near it "
    "comes to trying every head.",
}


@dataclass(frozen=True)
class Prune:
    """Trained models, from which heads are taken away."""

    name: Name = "prune"  # directory of the experiment, inside out
    out: Text = "runs"  # directory of all experiments
    models: OneWidth = OneWidth()
    heads: Count = 8  # of a layer
    tokens: Count = 2048  # to choose heads by, and as many others to test with
    random: Count = 6  # random orders for each model


def measure(settings: Prune, store: Store) -> dict[str, Any]:
    """For each model, the loss after every removal."""
    if settings.heads * settings.models.layers < 4:
        raise ConfigError("a quarter of the heads is to go: there must be four or more")
    data, tokens, both = settings.models.data, settings.tokens, ("train", "validation")
    check_text(load_corpus(data.source), data, tokens, f"tokens = {tokens}", both)
    numbers = {"tokens": settings.tokens, "random": settings.random}
    runs = []
    for model in train(settings.models, settings.heads, store):
        seed = model.config.seed
        compute = partial(remove, settings, model)
        found = store.piece("removals", model.given | numbers, compute)
        runs.append({"seed": seed} | found)
    return {"heads": settings.heads, "runs": runs}


def remove(settings: Prune, trained: Trained) -> dict[str, Any]:
    """The loss of one model with all heads, without each, and along every order."""
    model, scale, text = trained.model(), trained.scale, trained.split()
    graph, params = nnx.split(model, nnx.Param)
    seen, unseen = (
        trained.windows(part.tokens, settings.tokens)
        for part in (text.train, text.validation)
    )
    heads = settings.heads * settings.models.layers
    judged = importance(model, scale, seen)
    rng = np.random.default_rng([trained.config.seed, settings.random])
    orders = {
        "greedy": [greedy(partial(losses, model, scale, seen), heads)],
        "by importance": [np.argsort(judged).tolist()],
        "random": [rng.permutation(heads).tolist() for _ in range(settings.random)],
    }

    def loss(gates: np.ndarray) -> list[float]:
        return losses(model, scale, unseen, gates).tolist()

    return {
        "whole": evaluate(graph, params, scale, unseen),
        "alone": loss(alone(heads)),
        "importance": judged.tolist(),
        "orders": orders,
        "after": {
            name: [loss(in_order(order)) for order in found]
            for name, found in orders.items()
        },
    }


def costs(run: dict[str, Any], order: str) -> list[float]:
    """What it costs to take away none, one, ... all heads, in the mean over orders."""
    found = np.mean(run["after"][order], axis=0)
    return [0.0, *(found - run["whole"]).tolist()]


def answers(results: dict[str, Any]) -> list[Answer]:
    """Whether a quarter of the heads can go, and whether importance says which."""
    runs = results["runs"]
    found: dict[str, Any] = {
        name: np.array([costs(run, name) for run in runs]) for name in ORDERS
    }
    heads = found["greedy"].shape[1] - 1
    few = heads // 4
    noticed = np.array([NOTICED * run["whole"] for run in runs])
    together, worth = found["greedy"][:, few], found["greedy"][:, -1]
    alone = min(map(unnoticed, runs))
    unseen = above(noticed - together)
    many = decide([unseen, alone >= heads / 2])
    quarter = "is missed, too" if unseen is False else "is not shown to go unnoticed"
    # Over all removals but the last, which is the same in every order.
    best, judged, drawn = (x[:, 1:-1].mean(axis=1) for x in found.values())
    gain = drawn - judged
    helps, enough = above(gain), above(gain - (drawn - best) / 2)
    return [
        Answer(
            claim="Many heads can be taken away after training.",
            source="Michel et al. 2019, arXiv:1905.10650, sections 3 and 4; Voita et "
            "al. 2019, arXiv:1905.09418",
            number=f"Without {few} of {heads} heads, greedily chosen on other text, "
            f"the loss rises by {spread(together)} nats per token; {NOTICED:.0%} of it "
            f"is {noticed.mean():.2g}. Alone, at least {alone} heads of every model "
            f"cost less than that. All heads are worth {spread(worth)}.",
            rule=f"the 95 % interval of what {few} heads cost lies below {NOTICED:.0%} "
            "of the loss; and in every model at least half of the heads cost less than "
            "that when they go alone",
            outcome=many,
            sentence={
                HOLDS: "A quarter of the heads can go unnoticed together, and so can "
                "most heads alone.",
                PART: "Either a quarter of the heads can go unnoticed together or most "
                "heads can alone, but these runs do not show both.",
            }.get(
                many,
                "Models as small as these have few heads to spare: in one at least, "
                f"most heads are missed even alone, and a quarter of them {quarter}.",
            ),
        ),
        Answer(
            claim="A gradient tells which heads can go.",
            source="Michel et al. 2019, arXiv:1905.10650, section 4.1",
            number=f"In the mean over 1 to {heads - 1} gone, heads cost "
            f"{spread(judged)} nats if the least important go first, {spread(drawn)} "
            f"in random order and {spread(best)} greedily. Importance saves, against "
            f"random order, {describe(t_interval(gain))}.",
            rule="paired by seed, the 95 % interval of what importance saves lies "
            "above 0, and above half of what the greedy order saves",
            outcome=decide([helps, enough]),
            sentence=LIKE_GREEDY[enough]
            if helps
            else "These runs do not show that one backward pass is better than chance.",
        ),
    ]


def unnoticed(run: dict[str, Any]) -> int:
    """How many heads cost less than is noticed when they go alone."""
    return int(np.sum(np.array(run["alone"]) < (1 + NOTICED) * run["whole"]))


def parts(results: dict[str, Any]) -> list[Part]:
    """What it costs to take away one head, and more and more of them."""
    runs = results["runs"]
    heads = len(runs[0]["alone"])
    ranks = range(1, heads + 1)
    alone = [sorted(np.array(run["alone"]) - run["whole"]) for run in runs]
    noticed = [NOTICED * float(np.mean([run["whole"] for run in runs]))] * heads
    one = {"one head": band(ranks, alone)}
    one[f"{NOTICED:.0%} of the loss"] = Curve(ranks, noticed)
    along = {
        name: band(range(heads + 1), [costs(run, name) for run in runs])
        for name in ORDERS
    }
    first = curves(
        "One head taken away", {"loss, nats more": one}, x_label="rank of the head"
    )
    then = curves("Heads taken away", {"loss, nats more": along}, x_label="heads gone")
    counts = [heads * quarters // 4 for quarters in (1, 2, 3, 4)]
    rows = [
        [run["seed"], name, run["whole"], *(costs(run, name)[n] for n in counts)]
        for run in runs
        for name in ORDERS
    ]
    columns = ["seed", "order", "all there", *(f"{n} gone" for n in counts)]
    return [
        Figure(
            lambda: first,
            "From the head whose loss costs least to the one whose loss costs most, "
            "with all others there, and beside them a hundredth of the loss with all. "
            "Means over seeds with 95 % intervals.",
        ),
        Figure(
            lambda: then,
            "One head after another, without training in between: the one that costs "
            "least next, by a gradient, and at random. Means over seeds with 95 % "
            "intervals.",
        ),
        Table(
            "Every model",
            columns,
            rows,
            "Validation loss with all heads, and how much it rises, in nats per token.",
            2,
        ),
    ]


CLAIM = Claim(
    title="Can heads of a trained model be taken away?",
    design="In trained models, the slice of the output projection that belongs to a "
    "head is set to zero; they are not trained further. Heads go one after another: in "
    "the order of |dL/dg|, g being a factor of what the head returns, the least "
    "important first; greedily, each time the head that costs least; and in random "
    "orders as a control. Orders are found on text that the models were trained on, "
    "losses measured on text that they were not.",
    settings=Prune,
    measure=measure,
    answers=answers,
    parts=parts,
)
