"""Whether padding changes what an encoder answers, with a mask and without.

Every token has to tell which symbol of its sequence is the most frequent. One arm hides
padding from attention, the other does not; both are trained at one width and tested
with more padding.
"""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from flax import nnx

from experiments.claims.arms import above, band, of_arm, run_arms, spread
from experiments.claims.bounds import rounded_up
from experiments.claims.checks import check_ascending, check_heads
from experiments.claims.claim import Answer, Claim
from experiments.claims.store import Store
from experiments.config import ConfigError, Optim
from experiments.data import HELD_OUT
from experiments.evidence import HOLDS, decide, describe, t_interval
from experiments.fit import fit
from experiments.page import Figure, Part, Table
from experiments.progress import Progress
from experiments.settings import Count, Name, Seed, Text
from experiments.studies.padded import (
    Batch,
    draw,
    gradient_of,
    logits_of,
    loss,
    widen,
)
from experiments.svg import curves
from jattn.nnx import Encoder, TransformerConfig

ARMS = ("with a mask", "without")
TOLERANCE = 1e-4  # of logits; they are of size 10, and float32 has seven digits
HARM = 0.01  # of accuracy; less is none
AS_WORDS = {True: "costs", False: "does not cost", None: "may or may not cost"}


@dataclass(frozen=True)
class Padding:
    """Sequences of unequal lengths, of which the most frequent symbol is asked."""

    name: Name = "padding"  # directory of the experiment, inside out
    out: Text = "runs"  # directory of all experiments
    symbols: Count = 4  # different ones
    shortest: Count = 4  # symbols of a sequence, at least
    longest: Count = 16  # symbols of a sequence, at most; the width of a training batch
    times: tuple[Count, ...] = (1, 2, 4, 8, 16)  # widths to test at, over the longest
    layers: Count = 2  # blocks of the encoder
    d_model: Count = 32  # width of the residual stream
    heads: Count = 2  # attention heads of a block
    batch: Count = 64  # sequences in a batch
    optim: Optim = Optim(lr=3e-3, steps=200)
    held_out: Count = 256  # sequences to test with
    seeds: Count = 5  # runs of each arm
    seed: Seed = 0  # of the first run of an arm; the others count on


def measure(settings: Padding, store: Store) -> dict[str, Any]:
    """What came of both arms at every width."""
    shortest, longest = settings.shortest, settings.longest
    if shortest >= longest:
        raise ConfigError(
            f"shortest = {shortest} must be less than longest = {longest}, so that "
            "there is padding"
        )
    if settings.symbols < 2:
        raise ConfigError("symbols = 1 must be at least 2: one is always most frequent")
    check_ascending("times", settings.times)
    if settings.times[0] != 1:
        raise ConfigError(
            f"times must begin with 1, the width of training, not {settings.times[0]}"
        )
    check_heads(settings.d_model, settings.heads)
    for seed in range(settings.seed, settings.seed + settings.seeds):
        if not unseen(replace(settings, seed=seed))["real"].any():
            raise ConfigError(
                f"in none of held_out = {settings.held_out} sequences of seed {seed} "
                "one symbol is the most frequent; give more of them"
            )
    widths = [times * longest for times in settings.times]
    return {"widths": widths, "runs": run_arms(settings, ARMS, store, train)}


def train(settings: Padding, arm: str, progress: Progress) -> dict[str, Any]:
    """One run, and what it says of the same sequences with more and more padding."""
    config = TransformerConfig(
        vocab_size=settings.symbols + 1,
        num_layers=settings.layers,
        d_model=settings.d_model,
        num_heads=settings.heads,
        positions="none",
    )
    fitted = fit(
        loss,
        Encoder(config, rngs=nnx.Rngs(settings.seed)),
        lambda step: seen_by(arm, batch_of(settings, step, settings.batch)),
        settings.optim,
        progress=progress,
    )
    test = unseen(settings)

    def padded(times: int, token: int = settings.symbols) -> Batch:
        return seen_by(arm, widen(test, times * settings.longest, token))

    def logits(batch: Batch) -> np.ndarray:
        return np.asarray(logits_of(fitted.model, batch))[batch["real"]]

    found = [logits(padded(times)) for times in settings.times]
    said = [x.argmax(axis=-1) for x in found]
    # No row of the embedding belongs to this token: its vector is NaN.
    with_nan = logits(padded(settings.times[1], settings.symbols + 1))
    slopes = [gradient_of(fitted.model, padded(x)) for x in settings.times[:2]]
    return {
        "accuracy": [float(np.mean(x == test["targets"][test["real"]])) for x in said],
        "changed": [float(np.mean(x != said[0])) for x in said],
        "moved": [float(np.abs(x - found[0]).max()) for x in found],
        "slope": float(np.abs(slopes[1] - slopes[0]).max() / np.abs(slopes[0]).max()),
        "nan": float(np.mean((with_nan != found[1]).any(axis=-1))),
    }


def unseen(settings: Padding) -> Batch:
    """What a run is tested with."""
    return batch_of(settings, HELD_OUT, settings.held_out)


def batch_of(settings: Padding, step: int, size: int) -> Batch:
    """What a step of a run sees."""
    sizes = {x: getattr(settings, x) for x in ("symbols", "shortest", "longest")}
    return draw(**sizes, batch=size, seed=settings.seed, step=step)


def seen_by(arm: str, batch: Batch) -> Batch:
    """The batch with how many tokens of a row attention may look at.

    As that is data, both arms are one program.
    """
    width = np.full_like(batch["lengths"], batch["tokens"].shape[1])
    return batch | {"seen": batch["lengths"] if arm == ARMS[0] else width}


def answers(results: dict[str, Any]) -> list[Answer]:
    """Whether padding is nothing to a mask, and what it does to a model without."""
    masked = of_arm(results["runs"], ARMS[0])
    moved = max(x for run in masked for x in run["moved"])
    slope = max(run["slope"] for run in masked)
    touched = max(run["nan"] for run in masked)
    nothing = decide([max(moved, slope) <= TOLERANCE, touched == 0])
    # For each width, for each seed.
    accuracy = [
        np.array([run["accuracy"] for run in of_arm(results["runs"], arm)]).T
        for arm in ARMS
    ]
    worth, without = (accuracy[0] - accuracy[1]).tolist(), accuracy[1].tolist()
    harms = [above(x, HARM) for x in worth]
    first, second, *_ = widths = results["widths"]
    last = widths[-1]
    return [
        Answer(
            claim="With a mask, padding changes nothing.",
            source="Keras guide, Understanding masking & padding",
            number=f"From {first} to {last} tokens a row a logit moves by "
            f"{rounded_up(moved)} at most, and from {first} to {second} a derivative "
            f"of the loss by {rounded_up(slope)} of the largest one. NaN in place of "
            f"padding changes the bits of {100 * touched:.3g} % of the answers.",
            rule=f"at most {TOLERANCE:g} of both with every seed, and no bit by NaN",
            outcome=nothing,
            sentence="Behind a mask it is of no consequence how much padding there is, "
            "nor what it holds."
            if nothing == HOLDS
            else "These runs do not show that padding behind a mask is of no "
            "consequence.",
        ),
        Answer(
            claim="Without a mask, padding makes answers unreliable.",
            source="the warning of Hugging Face Transformers about a missing "
            "attention_mask",
            number=f"Accuracy without a mask: {spread(without[0])} at {first} "
            f"tokens a row, as in training, and {spread(without[-1])} at {last}, "
            f"where a mask is worth {describe(t_interval(worth[-1]))}.",
            rule="the 95 % interval of what a mask is worth, in accuracy and paired by "
            f"seed, lies above {HARM:g} at the width of training, and at the largest",
            outcome=decide([harms[0], harms[-1]]),
            sentence=_without(widths, harms),
        ),
    ]


def _without(widths: list[int], harms: list[bool | None]) -> str:
    """What padding does without a mask, by where a mask is worth something."""
    if [harms[0], harms[-1]] != [False, True]:
        return (
            f"Without a mask, padding as in training {AS_WORDS[harms[0]]} accuracy, "
            f"and the most padding {AS_WORDS[harms[-1]]} it."
        )
    borne = next(n for n, x in enumerate(harms) if x is not False)
    broken = max(n for n, x in enumerate(harms) if not x) + 1
    return (
        "A model without a mask learns to bear the padding that it is trained with, "
        f"and {'some' if borne > 1 else 'no'} more: to {widths[borne - 1]} tokens a "
        f"row it costs less than {HARM:g} of accuracy, from {widths[broken]} on more. "
        "Then the answer to a sequence depends on how long the others of its batch are."
    )


def parts(results: dict[str, Any]) -> list[Part]:
    """Accuracy and changed answers at every width, and every run."""
    widths, runs = results["widths"], results["runs"]
    names = {"accuracy": "accuracy", "changed": "share of changed answers"}
    found = {
        title: {
            arm: band(widths, [run[name] for run in of_arm(runs, arm)]) for arm in ARMS
        }
        for name, title in names.items()
    }
    figure = curves("More padding", found, x_label="tokens a row", log_x=True)
    rows = [
        [run["arm"], run["seed"], *run["accuracy"], max(run["moved"])] for run in runs
    ]
    columns = ["arm", "seed", *map(str, widths), "change"]
    return [
        Figure(
            lambda: figure,
            "The same sequences with more and more padding. Means over seeds with 95 % "
            "intervals; answers are compared with those at the width of training.",
        ),
        Table(
            "Runs",
            columns,
            rows,
            "Accuracy by tokens a row, and the largest change of any logit.",
            2,
        ),
    ]


CLAIM = Claim(
    title="Does padding change what an encoder answers?",
    design="A small encoder without positions is to say, at every token, which symbol "
    "of the sequence is the most frequent: it has to weigh all of them evenly. "
    "Sequences of unequal lengths are padded to the longest there can be, and the loss "
    "is a mean over real tokens. One arm hides padding from attention with a mask, the "
    "other learns from the padding token itself what it is; both see the same batches. "
    "They are tested on the same unseen sequences with more and more padding.",
    settings=Padding,
    measure=measure,
    answers=answers,
    parts=parts,
)
