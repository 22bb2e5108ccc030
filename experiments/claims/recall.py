"""Whether attention recalls what was seen once, and whether a recurrent state does."""

import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import numpy as np
from flax import nnx

from experiments.claims.arms import Run, above, band, of_arm, run_arms, spread
from experiments.claims.checks import check_heads
from experiments.claims.claim import Answer, Claim
from experiments.claims.store import Store
from experiments.config import ConfigError, Optim
from experiments.data import HELD_OUT
from experiments.evidence import HOLDS, decide, describe, t_interval
from experiments.fit import fit
from experiments.page import Cell, Figure, Part, Table
from experiments.progress import Progress
from experiments.settings import Count, Even, Name, Positive, Seed, Text
from experiments.studies.pairs import (
    Batch,
    Blocks,
    Reader,
    Recurrent,
    by_place,
    draw,
    is_right,
    loss,
    most_frequent,
    parameters,
    smallest,
)
from experiments.svg import Curve, curves

READERS = ("attention", "GRU")
PLACES = 4  # parts of a sequence, from the farthest to the nearest
ENOUGH = 0.95  # share of right answers
RECURRENT = {
    (True, True): "After as many updates a GRU with as many parameters answers less, "
    "and the less the more pairs there are.",
    (True, False): "After as many updates a GRU with as many parameters answers "
    "less, but hardly more than a guess, so that these runs do not tell how much its "
    "state could hold.",
    (False, True): "A GRU answers less the more pairs there are, but these runs do not "
    "show that it always answers less than attention.",
    (False, False): "These runs do not show that a GRU recalls less among every number "
    "of pairs, and the less the more there are.",
}


@dataclass(frozen=True)
class Recall:
    """Pairs of a key and a value, then questions."""

    name: Name = "recall"  # directory of the experiment, inside out
    out: Text = "runs"  # directory of all experiments
    pairs: tuple[Count, ...] = (4, 16, 48)  # in a sequence, ascending
    keys: Count = 64  # different ones
    values: Count = 16  # as well
    questions: Count = 8  # at the end of a sequence
    layers: Count = 1  # blocks of the reader with attention
    d_model: Even = 64  # width of the vector of a pair
    heads: Count = 2  # attention heads of a block
    batch: Count = 32  # sequences in a batch
    rates: tuple[Positive, ...] = (5e-3, 1e-2)  # peak learning rates of AdamW
    steps: Count = 200  # updates
    held_out: Count = 128  # sequences to test with
    every: Count = 10  # updates between tests
    seeds: Count = 3  # runs of each reader at each rate
    seed: Seed = 0  # of the first run of a reader; the others count on


def measure(settings: Recall, store: Store) -> dict[str, Any]:
    """Every reader, for every number of pairs."""
    pairs = list(settings.pairs)
    if pairs != sorted(pairs) or pairs[0] < PLACES or pairs[-1] > settings.keys:
        raise ConfigError(
            f"pairs = {pairs} must ascend from {PLACES} or more to "
            f"keys = {settings.keys} at most"
        )
    if list(settings.rates) != sorted(set(settings.rates)):
        raise ConfigError(f"rates = {list(settings.rates)} must ascend")
    if settings.values < 2:
        raise ConfigError("values = 1 must be at least 2, or every answer is right")
    check_heads(settings.d_model, settings.heads, rotary=True)
    return {
        "pairs": pairs,
        "rates": settings.rates,
        "parameters": {x: parameters(maker(settings, x)) for x in READERS},
        "runs": run_arms(settings, list(arms_of(pairs)), store, train),
    }


def arms_of(pairs: Sequence[int]) -> dict[str, tuple[str, int]]:
    """What each arm is called, and its reader and number of pairs."""
    both = itertools.product(pairs, READERS)
    return {f"{reader}, {n} pairs": (reader, n) for n, reader in both}


def maker(settings: Recall, reader: str) -> Callable[[], Reader]:
    """What makes a reader; the GRU has at least as many parameters as the other."""
    width = settings.d_model

    def make(body: Callable[[nnx.Rngs], Blocks | Recurrent]) -> Reader:
        rngs = nnx.Rngs(settings.seed)
        sizes = dict(keys=settings.keys, values=settings.values, width=width)
        return Reader(body(rngs), **sizes, rngs=rngs)

    def blocks(rngs: nnx.Rngs) -> Blocks:
        sizes = dict(layers=settings.layers, heads=settings.heads)
        return Blocks(width, **sizes, rngs=rngs)

    def recurrent(state: int) -> Callable[[], Reader]:
        return lambda: make(lambda rngs: Recurrent(width, state=state, rngs=rngs))

    attention = functools.partial(make, blocks)
    if reader == READERS[0]:
        return attention
    wanted = parameters(attention)
    return recurrent(smallest(lambda state: parameters(recurrent(state)), wanted))


def train(settings: Recall, arm: str, progress: Progress) -> dict[str, Any]:
    """A run at each learning rate: the share of right answers while it learns."""
    reader, pairs = arms_of(settings.pairs)[arm]
    make = maker(settings, reader)

    def batch(step: int, size: int = settings.batch) -> Batch:
        names = ("keys", "values", "questions", "seed")
        sizes = {name: getattr(settings, name) for name in names}
        return draw(**sizes, pairs=pairs, batch=size, step=step)

    test = batch(HELD_OUT, settings.held_out)
    if len(np.unique(test["asked"] * PLACES // pairs)) < PLACES:
        raise ConfigError(
            f"held_out = {settings.held_out} sequences of questions = "
            f"{settings.questions} do not ask about every quarter; give more of them"
        )
    found = []
    for lr in settings.rates:
        fitted = fit(
            loss,
            make(),
            batch,
            Optim(lr=lr, steps=settings.steps),
            record=lambda model: float(is_right(model, test).mean()),
            every=settings.every,
            may_diverge=True,
            progress=progress,
        )
        # What diverged answers nothing.
        right = np.asarray(is_right(fitted.model, test)) & (not fitted.diverged)
        places = by_place(right, test["asked"], pairs, PLACES)
        tested = [*range(settings.every, settings.steps, settings.every)]
        shares = dict.fromkeys([*tested, settings.steps], 0.0) | dict(fitted.records)
        found.append({"right": list(shares.items()), "places": places})
    return {"frequent": most_frequent(test, settings.values), "rates": found}


def at_best(runs: Sequence[Run]) -> tuple[int, list[Run]]:
    """Which learning rate ends with the most right answers, and the runs at it."""
    rates = range(len(runs[0]["rates"]))
    best = max(rates, key=lambda i: fmean(end(run["rates"][i]) for run in runs))
    return best, [run["rates"][best] for run in runs]


def end(run: Run) -> float:
    """The share of right answers after the last update."""
    return run["right"][-1][1]


def first_enough(run: Run) -> int | None:
    """After how many updates the share of right answers is first large enough."""
    return next((update for update, share in run["right"] if share >= ENOUGH), None)


def answers(results: dict[str, Any]) -> list[Answer]:
    """Whether attention recalls, and whether a recurrent state recalls less."""
    pairs, runs = results["pairs"], results["runs"]
    shares: dict[str, list[list[float]]] = {reader: [] for reader in READERS}
    for arm, (reader, _) in arms_of(pairs).items():
        shares[reader].append([end(run) for run in at_best(of_arm(runs, arm))[1]])
    attention, recurrent = shares.values()
    longest = at_best(of_arm(runs, f"{READERS[0]}, {pairs[-1]} pairs"))[1]
    quarters = [list(x) for x in zip(*(run["places"] for run in longest), strict=True)]
    recalls = decide([min(x) >= ENOUGH for x in (*attention, *quarters)])
    gaps = [np.subtract(*x).tolist() for x in zip(attention, recurrent, strict=True)]
    frequent = [
        [run["frequent"] for run in of_arm(runs, f"{READERS[1]}, {n} pairs")]
        for n in pairs
    ]
    known = [np.subtract(*x).tolist() for x in zip(recurrent, frequent, strict=True)]
    knows = above(known[0])
    # Of who only guesses, nothing shows that reading more costs anything.
    falls = above(np.subtract(known[0], known[-1]).tolist()) if knows else None
    less = [above(x) for x in gaps]
    which = f"{', '.join(map(str, pairs))} pairs"
    return [
        Answer(
            claim="Attention recalls what it has seen once, however far back.",
            source="Vaswani et al. 2017, arXiv:1706.03762, section 4",
            number=f"Right answers among {which}: {_list(map(spread, attention))}. "
            f"Among {pairs[-1]}, about the farthest to the nearest quarter: "
            f"{_list(map(spread, quarters))}.",
            rule=f"at least {ENOUGH} of the answers are right with every seed, among "
            "every number of pairs and about every quarter of the largest",
            outcome=recalls,
            sentence="A question finds its pair in one step, wherever that stands."
            if recalls == HOLDS
            else "Not everywhere do these readers with attention find the pair that "
            "is asked for.",
        ),
        Answer(
            claim="A recurrent state recalls less, and the less the more it has read.",
            source="Arora et al. 2023, arXiv:2312.04927; Jelassi et al. 2024, "
            "arXiv:2402.01032",
            number=f"Right answers of a GRU among {which}: "
            f"{_list(map(spread, recurrent))}; to name the most frequent value would "
            f"give {_list(f'{fmean(x):.3f}' for x in frequent)}. Gaps to attention: "
            f"{_list(describe(t_interval(x)) for x in gaps)}.",
            rule="95 % intervals, paired by seed, lie above 0: of the gap to attention "
            "among every number of pairs, and of how much less a GRU knows beyond the "
            f"most frequent value among {pairs[-1]} than among {pairs[0]}, where that "
            "must be more than nothing to decide",
            outcome=decide([*less, falls]),
            sentence=RECURRENT[all(less), bool(knows and falls)],
        ),
    ]


def _list(texts: Iterable[str]) -> str:
    return " / ".join(texts)


def parts(results: dict[str, Any]) -> list[Part]:
    """Both readers while they learn, and how they end."""
    pairs, runs = results["pairs"], results["runs"]
    found: dict[str, dict[str, Curve]] = {f"{n} pairs": {} for n in pairs}
    rows: list[list[Cell]] = []
    for arm, (reader, n) in arms_of(pairs).items():
        rate, best = at_best(of_arm(runs, arm))
        updates = [update for update, _ in best[0]["right"]]
        rights = [[share for _, share in run["right"]] for run in best]
        found[f"{n} pairs"][reader] = band(updates, rights)
        enough = [first_enough(run) for run in best]
        near = zip(*(run["places"] for run in best), strict=True)
        row: list[Cell] = [n, reader, f"{results['rates'][rate]:g}"]
        row.append(spread([end(run) for run in best]))
        row.append(", ".join("never" if x is None else str(x) for x in enough))
        row.append(", ".join(f"{fmean(x):.2f}" for x in near))
        rows.append([*row, results["parameters"][reader]])
    figure = curves("Right answers", found, x_label="updates")
    columns = ("pairs", "reader", "rate", "right", "updates to .95", "by quarter")
    return [
        Figure(
            lambda: figure,
            "Share of right answers about sequences that were not trained on. Means "
            "over seeds with 95 % intervals, each reader at its best learning rate.",
        ),
        Table(
            "Readers at their best learning rates",
            (*columns, "parameters"),
            rows,
            f"Right: ± 95 % interval over seeds. Updates to {ENOUGH}: of each seed. By "
            "quarter: about the farthest quarter of the pairs to the nearest.",
            2,
        ),
    ]


CLAIM = Claim(
    title="Does attention recall what was seen once?",
    design="A reader sees pairs of a key and a value, one pair at a time and all keys "
    "different, then keys alone, and says the value that stood with each. One reader "
    "is a small causal transformer, the other a GRU with at least as many parameters; "
    "both have the same embeddings, the same data and the same number of updates.",
    settings=Recall,
    measure=measure,
    answers=answers,
    parts=parts,
)
