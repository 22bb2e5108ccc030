"""Whether cross-attention is what a decoder reads its source with, and how that looks.

An encoder-decoder writes sequences of symbols backwards. Its control is the same model,
trained alike, whose cross-attention may look at nothing and so adds 0.
"""

from dataclasses import dataclass
from statistics import fmean
from typing import Any

import numpy as np
from flax import nnx

from experiments.claims.arms import above, band, of_arm, run_arms, spread
from experiments.claims.checks import check_heads
from experiments.claims.claim import Answer, Claim
from experiments.claims.store import Store
from experiments.config import ConfigError, Optim
from experiments.data import HELD_OUT
from experiments.evidence import HOLDS, decide, t_interval
from experiments.fit import fit
from experiments.page import Figure, Part, Table
from experiments.progress import Progress
from experiments.settings import Count, Even, Name, Seed, Text
from experiments.studies.backwards import (
    Batch,
    blind,
    cross_weights,
    draw,
    is_exact,
    is_new,
    least_loss,
    loss,
    mirrored,
)
from experiments.svg import Curve, curves, heat
from jattn.nnx import EncoderDecoder, TransformerConfig

ARMS = ("with cross-attention", "without")


@dataclass(frozen=True)
class Reversal:
    """Sequences of symbols, to be written backwards."""

    name: Name = "reversal"  # directory of the experiment, inside out
    out: Text = "runs"  # directory of all experiments
    symbols: Count = 26  # different ones
    shortest: Count = 5  # symbols of a sequence, at least
    longest: Count = 10  # symbols of a sequence, at most
    layers: Count = 1  # blocks of the encoder, and of the decoder
    d_model: Even = 48  # width of the residual stream
    heads: Count = 2  # attention heads of a block
    batch: Count = 64  # sequences in a batch
    optim: Optim = Optim(lr=5e-3, steps=500)
    held_out: Count = 512  # sequences to test with
    every: Count = 50  # updates between tests
    seeds: Count = 3  # runs of each arm
    seed: Seed = 0  # of the first run of an arm; the others count on


def measure(settings: Reversal, store: Store) -> dict[str, Any]:
    """What came of both arms, and what a decoder can do without its source."""
    shortest, longest = settings.shortest, settings.longest
    if shortest > longest:
        raise ConfigError(f"shortest = {shortest} is more than longest = {longest}")
    check_heads(settings.d_model, settings.heads)
    lengths = range(shortest, longest + 1)
    return {
        "least_loss": least_loss(**sizes(settings)),
        "even": len(lengths) / sum(lengths),
        "runs": run_arms(settings, ARMS, store, train),
    }


def sizes(settings: Reversal) -> dict[str, int]:
    """What sequences are drawn from."""
    return {x: getattr(settings, x) for x in ("symbols", "shortest", "longest")}


def train(settings: Reversal, arm: str, progress: Progress) -> dict[str, Any]:
    """One run: how it learns, how it ends, and where its cross-attention looks."""

    def batch(step: int, size: int = settings.batch) -> Batch:
        return draw(**sizes(settings), batch=size, seed=settings.seed, step=step)

    def seen(batch: Batch) -> Batch:
        return batch if arm == ARMS[0] else blind(batch)

    test = batch(HELD_OUT, settings.held_out)
    new = is_new(test, map(batch, range(settings.optim.steps)))
    full = test["lengths"] == settings.longest
    if not new.any() or not full.any():
        raise ConfigError(
            f"of held_out = {settings.held_out} sequences none is new, or none as long "
            f"as longest = {settings.longest}; give more of them, or more symbols"
        )

    def exact(model: EncoderDecoder, test: Batch) -> float:
        return float(is_exact(model, test)[new].mean())

    fitted = fit(
        loss,
        model_of(settings),
        lambda step: seen(batch(step)),
        settings.optim,
        record=lambda model: exact(model, seen(test)),
        every=settings.every,
        progress=progress,
    )
    weights = np.asarray(cross_weights(fitted.model, test))
    return {
        "curve": fitted.curve,
        "exact": fitted.records,
        "blind": exact(fitted.model, blind(test)),
        "tested": int(new.sum()),
        "mirrored": mirrored(weights, test["lengths"]).tolist(),
        "pattern": weights[:, full, :, :-1].mean(axis=1).round(4).tolist(),
    }


def model_of(settings: Reversal) -> EncoderDecoder:
    """The model before training."""
    config = TransformerConfig(
        vocab_size=settings.symbols + 1,
        num_layers=settings.layers,
        d_model=settings.d_model,
        num_heads=settings.heads,
        positions="sinusoidal",
    )
    return EncoderDecoder(config, rngs=nnx.Rngs(settings.seed))


def answers(results: dict[str, Any]) -> list[Answer]:
    """Whether cross-attention is needed, and whether it looks where it should."""
    read, control = (of_arm(results["runs"], arm) for arm in ARMS)
    shares, alone = ([run["exact"][-1][1] for run in runs] for runs in (read, control))
    gaps = np.subtract(shares, alone).tolist()
    left = [run["blind"] for run in read]
    can = min(shares) >= 0.95
    # Who could not do it before has lost nothing.
    reads = decide([can, above(gaps), max(left) < 0.05 if can else None])
    aligned = [float(np.mean(run["mirrored"])) for run in read]
    aligns = decide([above(aligned, 0.5)])
    return [
        Answer(
            claim="A decoder reads its source through cross-attention.",
            source="Vaswani et al. 2017, arXiv:1706.03762, section 3.2.3",
            number=f"Written without a fault: {_range(shares)} of the unseen sequences "
            f"with cross-attention, {_range(left)} if it is taken away after training, "
            f"{_range(alone)} if there never was any. Gap between the first and the "
            f"last: {_range(gaps)}, {_least(gaps)}.",
            rule="at least .95 with every seed, then less than .05 once "
            "cross-attention is taken away, and the 95 % interval of the gap, paired "
            "by seed, lies above 0",
            outcome=reads,
            sentence="Cross-attention is all that a decoder knows of its source, and "
            "enough to write unseen sequences backwards."
            if reads == HOLDS
            else "These runs do not show that cross-attention lets a decoder write "
            "unseen sequences backwards.",
        ),
        Answer(
            claim="Cross-attention aligns target and source.",
            source="Bahdanau et al. 2015, arXiv:1409.0473, section 5.2.1",
            number=f"Weight of the symbol that is to be written next, averaged over "
            f"heads: {spread(aligned)}; even weights would give {results['even']:.3f}.",
            rule="the 95 % interval of this weight lies above one half",
            outcome=aligns,
            sentence="Most of the weight is where the next symbol stands, but not all."
            if aligns == HOLDS
            else "These runs do not show that most of the weight is where the next "
            "symbol stands.",
        ),
    ]


def _range(shares: list[float]) -> str:
    """The least and the largest: an interval of a mean may leave 0 to 1."""
    ends = (min(shares), max(shares))
    return " to ".join(dict.fromkeys(f"{x:.3f}" for x in ends))


def _least(gaps: list[float]) -> str:
    mean, half_width, seeds = t_interval(gaps)
    if half_width is None:
        return "one seed: not resolved"
    least = max(mean - half_width, -1)
    return f"of whose mean over {seeds} seeds the 95 % interval begins at {least:.3f}"


def parts(results: dict[str, Any]) -> list[Part]:
    """Both arms while they learn, where the heads look, and every run."""
    runs = results["runs"]
    updates = [update for update, _ in runs[0]["exact"]]
    bound = Curve((updates[0], updates[-1]), [results["least_loss"]] * 2)
    found: dict[str, dict[str, Curve]] = {"loss, nats": {}, "without a fault": {}}
    for arm in ARMS:
        of = of_arm(runs, arm)
        shares = [[share for _, share in run["exact"]] for run in of]
        found["loss, nats"][arm] = band(updates, [loss_curve(run) for run in of])
        found["without a fault"][arm] = band(updates, shares)
    found["loss, nats"]["least without a source"] = bound
    learning = curves("Learning to write backwards", found, x_label="updates")
    first = of_arm(runs, ARMS[0])[0]
    looks = heat(
        "Where cross-attention looks",
        {
            f"layer {layer}, head {head}": weights
            for layer, heads in enumerate(first["pattern"], start=1)
            for head, weights in enumerate(heads, start=1)
        },
        x_label="symbol of the source",
        y_label="symbol to be written",
    )
    rows = [
        [
            run["arm"],
            run["seed"],
            run["exact"][-1][1],
            run["blind"],
            loss_curve(run)[-1],
            ", ".join(f"{weight:.2f}" for heads in run["mirrored"] for weight in heads),
        ]
        for run in runs
    ]
    columns = ("arm", "seed", "no fault", "taken away", "loss", "on the next symbol")
    return [
        Figure(
            lambda: learning,
            "Means over seeds with 95 % intervals. The loss is the mean since the "
            "point before. Without its source a decoder cannot get below "
            f"{results['least_loss']:.3f} on average.",
        ),
        Figure(
            lambda: looks,
            f"Mean weights in the longest sequences, seed {first['seed']}, from none "
            "(the page) to 1 (blue). Who reads backwards goes along this diagonal.",
        ),
        Table(
            "Runs",
            columns,
            rows,
            f"Of {runs[0]['tested']} sequences. Taken away: without cross-attention "
            "after training. On the next symbol: mean weight there, for each head, "
            "if the model may look.",
            2,
        ),
    ]


def loss_curve(run: dict[str, Any]) -> list[float]:
    """The mean loss between each test and the one before."""
    ends = [update for update, _ in run["exact"]]
    spans = zip([0, *ends], ends, strict=False)
    return [fmean(run["curve"][start:end]) for start, end in spans]


CLAIM = Claim(
    title="Does a decoder read its source through cross-attention?",
    design="A small encoder-decoder learns to write sequences of symbols backwards. It "
    "is tested, the most probable symbol at a time, on sequences that it was not "
    "trained on. Their lengths differ: padding of the source is masked, and nothing "
    "but the mask says where a source ends. The control is the same model with the "
    "same initial weights and data, whose cross-attention may look at nothing.",
    settings=Reversal,
    measure=measure,
    answers=answers,
    parts=parts,
)
