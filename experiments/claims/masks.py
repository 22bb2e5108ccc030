"""What a mask in the wrong place does to a language model, and how to notice.

Models are trained alike, each with another way to hide the future. Their loss on whole
windows is held against that on prefixes, at the end of which nothing is left to leak.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from experiments.claims import sentinels
from experiments.claims.arms import above, band, of_arm, run_arms, spread
from experiments.claims.bounds import rounded_up
from experiments.claims.checks import check_text
from experiments.claims.claim import Answer, Claim
from experiments.claims.on_text import held_out, initial
from experiments.claims.store import Store, numbers_of
from experiments.config import Config, ConfigError, Data, Evaluation, Model, Optim
from experiments.data import Corpus, batch, load_corpus, split_of
from experiments.evidence import HOLDS, PART, decide
from experiments.fit import fit
from experiments.page import Figure, Part, Table
from experiments.progress import Progress
from experiments.settings import Count, Even, Name, Seed, Text
from experiments.studies.masking import MASKING, MEANS, audit, loss, tested
from experiments.svg import curves

ARMS = tuple(MASKING)
RIGHT, AFTER, AGAIN = ARMS[:3]
EQUAL = 0.01  # nats; a smaller difference of losses is none
LEAKS = {
    "every": "Every mask that lowered the loss on whole windows did so by a leak, and "
    "left a model that predicts worse than the right one.",
    "some": "Some masks lowered the loss on whole windows by a leak, and left models "
    "that predict worse than the right one.",
    "none": "In these runs no mask is shown to look better and to predict worse.",
}
Losses = dict[str, list[float]]  # of each arm, for every seed


@dataclass(frozen=True)
class Masks:
    """Causal language models that differ in how they hide the future."""

    name: Name = "masks"  # directory of the experiment, inside out
    out: Text = "runs"  # directory of all experiments
    layers: Count = 2  # transformer blocks
    d_model: Even = 64  # width of the residual stream
    data: Data = Data(batch=8)
    optim: Optim = Optim(steps=200)
    evaluation: Evaluation = Evaluation()
    prefixes: tuple[Count, ...] = (16, 32, 48)  # tokens that come before the predicted
    audited: Count = 8  # tokens of a row in the audit, which comes before training
    seeds: Count = 3  # runs of each arm
    seed: Seed = 0  # of the first run of an arm; the others count on


def measure(settings: Masks, store: Store) -> dict[str, Any]:
    """Sentinels, the audit of every arm before training, and every run."""
    if max(settings.prefixes) > settings.data.context:
        raise ConfigError(
            f"prefixes = {settings.prefixes} must not be longer than "
            f"data.context = {settings.data.context}"
        )
    if settings.audited < 2:
        raise ConfigError("audited = 1 must be at least 2: one token has no future")
    corpus, wanted = load_corpus(settings.data.source), settings.evaluation.tokens
    check_text(corpus, settings.data, wanted, f"evaluation.tokens = {wanted}")

    def run(one: Masks, arm: str, progress: Progress) -> dict[str, Any]:
        return train(one, arm, corpus, progress)

    one = replace(settings, seeds=1)
    given = {"settings": numbers_of(one), "text": corpus.sha256}
    return {
        "prefixes": settings.prefixes,
        "sentinels": store.piece("sentinels", [], sentinels.found),
        "audit": store.piece("audit", given, partial(audit_of, one, corpus)),
        "runs": run_arms(settings, ARMS, store, run, corpus.sha256),
    }


def config_of(settings: Masks) -> Config:
    """What a model is trained with."""
    return Config(
        seed=settings.seed,
        data=settings.data,
        model=Model(
            layers=settings.layers, d_model=settings.d_model, d_ff=4 * settings.d_model
        ),
        optim=settings.optim,
        evaluation=settings.evaluation,
    )


def audit_of(settings: Masks, corpus: Corpus) -> dict[str, Any]:
    """The audit before training, on random bytes."""
    rng = np.random.default_rng(settings.seed)
    tokens = rng.integers(256, size=(2, settings.audited))
    return audit(initial(config_of(settings), corpus), tokens)


def train(
    settings: Masks, arm: str, corpus: Corpus, progress: Progress
) -> dict[str, Any]:
    """One run: what `tested` says of the trained model."""
    config, data, number = config_of(settings), settings.data, np.int32(ARMS.index(arm))
    tokens = split_of(corpus, data).train.tokens
    sizes = dict(seed=settings.seed, batch=data.batch, context=data.context)

    def batches(step: int) -> dict[str, Any]:
        return {"tokens": batch(tokens, step=step, **sizes), "arm": number}

    fitted = fit(
        loss, initial(config, corpus), batches, config.optim, progress=progress
    )
    windows = held_out(config, corpus).reshape(-1, data.context + 1)
    return tested(fitted.model, windows, settings.prefixes, number)


def losses_by_arm(runs: Sequence[dict[str, Any]], name: str) -> Losses:
    """One of the losses of runs; a mean over prefixes."""
    return {
        arm: [float(np.mean(run[name])) for run in of_arm(runs, arm)] for arm in ARMS
    }


def minus(a: Sequence[float], b: Sequence[float]) -> list[float]:
    """The difference for every seed."""
    return np.subtract(a, b).tolist()


def answers(results: dict[str, Any]) -> list[Answer]:
    """What a low loss is worth, where a mask belongs, and what an audit finds."""
    whole, alone = (losses_by_arm(results["runs"], x) for x in ("validation", "alone"))
    gaps = {arm: minus(alone[arm], alone[RIGHT]) for arm in ARMS}
    return [
        _lower_loss(whole, alone, gaps),
        _place(gaps),
        _audited(results["audit"]),
        sentinels.answer(results["sentinels"]),
    ]


def _lower_loss(whole: Losses, alone: Losses, gaps: Losses) -> Answer:
    lower = [arm for arm in ARMS if above(minus(whole[RIGHT], whole[arm]), EQUAL)]
    worse = [above(gaps[arm], EQUAL) for arm in lower]
    numbers = [
        f"{arm} {spread(whole[arm])} and {spread(alone[arm])}"
        for arm in [RIGHT, *lower]
    ]
    if worse and all(worse):
        sentence = LEAKS["every"]
    else:
        sentence = LEAKS["some" if True in worse else "none"]
    return Answer(
        claim="A model with a lower validation loss predicts better.",
        source="the custom of choosing models by their validation loss",
        number="Loss on whole windows, and of a token after a prefix alone: "
        f"{'; '.join(numbers)}.",
        rule="no mask with a lower loss on whole windows than the right one has a "
        "higher one after prefixes: 95 % intervals, paired by seed, of gaps beyond "
        f"{EQUAL} nats",
        outcome=decide(None if x is None else not x for x in worse),
        sentence=sentence,
    )


def _place(gaps: Losses) -> Answer:
    outcome = decide(above(gaps[arm], EQUAL) for arm in (AFTER, AGAIN))
    return Answer(
        claim="A mask belongs before the softmax.",
        source="Vaswani et al. 2017, arXiv:1706.03762, section 3.2.3",
        number=f"With a mask after the softmax the loss after prefixes is higher by "
        f"{spread(gaps[AFTER])}; if the weights are normalised again, it differs by "
        f"{rounded_up(np.abs(gaps[AGAIN]).max())} at most.",
        rule="after the softmax, with and without normalising the weights again, the "
        f"95 % interval of the gap, paired by seed, lies above {EQUAL} nats",
        outcome=outcome,
        sentence={
            PART: "Or after it, if the weights are normalised again, which is the same "
            "but for rounding; otherwise the future leaks through the denominator.",
        }.get(outcome, "In these runs masks after the softmax are no clear case."),
    )


def _audited(audit: dict[str, Any]) -> Answer:
    leaking = [arm for arm in ARMS if arm not in (RIGHT, AGAIN)]
    wrong = {
        arm: [name for name, (verdict, _) in audit[arm].items() if verdict == "wrong"]
        for arm in ARMS
    }
    by = {name: sum(name in wrong[arm] for arm in leaking) for name in MEANS}
    outcome = decide([not wrong[RIGHT], *(bool(wrong[arm]) for arm in leaking)])
    return Answer(
        claim="A leak can be found before training.",
        source="Karpathy 2019, A Recipe for Training Neural Networks",
        number=f"Of {len(leaking)} masks that leak, "
        f"{', '.join(f'{name} finds {count}' for name, count in by.items())}. Of "
        f"{len(MEANS)} means, {len(wrong[RIGHT])} find a leak in the right one, and "
        f"{len(wrong[AGAIN])} in that after the softmax, normalised, which is right "
        "but for rounding.",
        rule="some means of the audit finds a leak in each untrained layer that has "
        "one, and none in the right one; what leaks by rounding alone decides nothing",
        outcome=outcome,
        sentence="What must not be seen is changed, and what must not change is "
        "watched: that finds leaks in seconds, before a model is trained."
        if outcome == HOLDS
        else "The audit of untrained layers did not tell all masks rightly.",
    )


def parts(results: dict[str, Any]) -> list[Part]:
    """What the future was worth to each mask, and what audit and dtypes say."""
    runs, prefixes = results["runs"], results["prefixes"]
    views = {"within": "in a whole window", "alone": "after a prefix alone"}
    losses = {
        f"loss {view}": {
            arm: band(prefixes, [run[name] for run in of_arm(runs, arm)])
            for arm in ARMS
        }
        for name, view in views.items()
    }
    by_prefix = curves("Loss after a prefix", losses, x_label="tokens of the prefix")
    whole, within, alone = (
        losses_by_arm(runs, name) for name in ("validation", *views)
    )
    gap = {arm: minus(alone[arm], within[arm]) for arm in ARMS}
    columns = ("mask", "whole windows", *views.values(), "gap")
    rows = [
        [arm, *(spread(x[arm]) for x in (whole, within, alone, gap))] for arm in ARMS
    ]
    audit = [
        [arm, *(_cell(*results["audit"][arm][name]) for name in MEANS)] for arm in ARMS
    ]
    return [
        Figure(
            lambda: by_prefix,
            "The loss of the same tokens, once with what comes after them in view. "
            "Means over seeds with 95 % intervals. What leaks in training is missing "
            "when a model writes.",
        ),
        Table("Losses, nats per token", columns, rows, "Means and 95 % intervals."),
        Table(
            "Audit before training",
            ("mask", *MEANS),
            audit,
            "With the change, or the gradient, where the first leak is. After it, "
            "normalised: the future cancels but for rounding, until a hidden score is "
            "so large that all others round to 0. Sentinel -3 and -50: the number "
            "takes the place of a hidden score.",
        ),
        sentinels.as_table(results["sentinels"]),
    ]


def _cell(verdict: str, size: float | None) -> str:
    return verdict if size is None else f"{verdict}: {size:.1e}"


CLAIM = Claim(
    title="What does a mask in the wrong place do?",
    design="Causal language models with the same initial weights and batches, which "
    "hide the future in different ways. Every token of a held-out window is predicted "
    "as in training, with the whole window as input; then the tokens after some "
    "prefixes are predicted from the prefix alone, as when a model writes. An audit "
    "looks for leaks in an untrained layer. Large negative numbers, added to hidden "
    "scores, are tried by themselves, in three dtypes.",
    settings=Masks,
    measure=measure,
    answers=answers,
    parts=parts,
)
