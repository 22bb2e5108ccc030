"""Whether several heads are better than one, and whether they come free.

Models of one width are trained with more and more heads, which share it; and the
gradient of one layer of attention is compiled and timed for each number of heads.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import jattn
from experiments.claims.arms import above, band, spread
from experiments.claims.claim import Answer, Claim
from experiments.claims.one_width import OneWidth, config_of, train
from experiments.claims.store import Store
from experiments.config import ConfigError
from experiments.evidence import FAILS, HOLDS, OPEN, PART, decide, describe, t_interval
from experiments.page import Figure, Part, Table
from experiments.settings import Count, Name, Text
from experiments.svg import Curve, curves
from experiments.timing import called, clock_here, time_pair
from jattn.nnx import MultiHeadAttention

SAME = 1.1  # the largest ratio that still passes for "similar"
COUNTED = ("parameters", "operations", "exponentials", "memory")
TOO_MANY = {
    True: "Heads can become too small: the most of them end with a higher loss.",
    False: "Heads are not yet too small at the largest number of them.",
    None: "These runs do not resolve whether the largest number of heads is too many.",
}


@dataclass(frozen=True)
class Heads:
    """Models of one width, and one layer of them by itself."""

    name: Name = "heads"  # directory of the experiment, inside out
    out: Text = "runs"  # directory of all experiments
    counts: tuple[Count, ...] = (1, 2, 4, 8, 16)  # heads of a layer; the first is 1
    models: OneWidth = OneWidth()
    batch: Count = 4  # sequences, where the cost is measured
    length: Count = 256  # tokens of a sequence there
    rounds: Count = 9  # times that a pair of layers is timed


def measure(settings: Heads, store: Store) -> dict[str, Any]:
    """What models of each number of heads end with, and what a layer costs."""
    counts, models = settings.counts, settings.models
    if counts[0] != 1 or len(counts) == 1 or list(counts) != sorted(set(counts)):
        raise ConfigError("counts must begin with 1, to compare with, and go up")
    for heads in counts:
        config_of(models, heads, models.seed)  # refuses before anything is trained
    losses = [[x.loss for x in train(models, heads, store)] for heads in counts]
    given = [counts, models.d_model, settings.batch, settings.length, settings.rounds]
    cost = store.piece("cost", given, partial(costs, settings))
    seeds = list(range(models.seed, models.seed + models.seeds))
    found = {"counts": counts, "seeds": seeds, "losses": losses}
    return {"width": models.d_model} | found | cost


def costs(settings: Heads) -> dict[str, Any]:
    """What the compiler counts, and times as multiples of that of one head."""
    clock = clock_here(settings.rounds, round_seconds=1.0, sample_seconds=0.02)
    shape = settings.batch, settings.length, settings.models.d_model
    x = jnp.asarray(np.random.default_rng(0).standard_normal(shape, np.float32))
    layers = [layer(heads, x) for heads in settings.counts]
    ready = [called(call) for call, _ in layers]
    return {
        "counted": [counted for _, counted in layers],
        "ratios": [time_pair(ready[0], other, clock)["ratios"] for other in ready],
    }


def layer(heads: int, x: jax.Array) -> tuple[Callable[[], Any], dict[str, float]]:
    """The gradient of a layer of causal self-attention, compiled.

    Args:
        heads: how many share the width.
        x: inputs, (B, T, D).

    Returns:
        What calls it, and what the compiler counts of it.
    """
    attention = MultiHeadAttention(
        heads, x.shape[-1], use_bias=False, rope=jattn.rotary, rngs=nnx.Rngs(0)
    )
    graph, params = nnx.split(attention, nnx.Param)

    def loss(params: Any, x: jax.Array) -> jax.Array:
        return jnp.sum(nnx.merge(graph, params)(x, mask=jattn.masks.causal()) ** 2)

    gradient = jax.jit(jax.grad(loss, argnums=(0, 1))).lower(params, x).compile()
    analysis: Any = gradient.cost_analysis()
    memory: Any = gradient.memory_analysis()
    counted = {
        "parameters": sum(x.size for x in jax.tree.leaves(params)),
        "operations": analysis["flops"],
        "exponentials": analysis["transcendentals"],
        "memory": memory.temp_size_in_bytes / 2**20,
    }
    return partial(gradient, params, x), counted


def answers(results: dict[str, Any]) -> list[Answer]:
    """Whether more heads than one help, and whether they cost nothing."""
    losses = np.array(results["losses"])
    return [_helpful(results, losses), _too_many(results, losses), _free(results)]


def _helpful(results: dict[str, Any], losses: np.ndarray) -> Answer:
    gains = dict(zip(results["counts"][1:], losses[0] - losses[1:], strict=True))
    outcome = decide(map(above, gains.values()))
    told = (f"{n} heads {describe(t_interval(x))}" for n, x in gains.items())
    better = " and ".join(str(n) for n, x in gains.items() if above(x))
    found = {
        HOLDS: "every larger number of heads ended with a lower loss than one head",
        PART: f"{better} heads are better than one; of other numbers these runs do not "
        "show it",
        FAILS: "no number of heads is shown to be better than one, and some are worse",
        OPEN: "these runs do not resolve whether the number of heads changes the loss",
    }
    return Answer(
        claim="Several heads are better than one.",
        source="Vaswani et al. 2017, arXiv:1706.03762, table 3, rows (A)",
        number=f"Validation loss with one head: {spread(losses[0])} nats per token. "
        f"Less with more of them: {'; '.join(told)}.",
        rule="for every number of heads above one, the 95 % interval of what it lowers "
        "the loss by, paired by seed, lies above 0",
        outcome=outcome,
        sentence=f"At this width and learning rate {found[outcome]}.",
    )


def _too_many(results: dict[str, Any], losses: np.ndarray) -> Answer:
    width, (*_, before, most) = results["width"], results["counts"]
    lost = losses[-1] - losses[-2]
    hurts = above(lost)
    return Answer(
        claim="Too many heads are worse.",
        source="Vaswani et al. 2017, arXiv:1706.03762, section 6.2",
        number=f"Nats per token that {most} heads of size {width // most} lose against "
        f"{before} of size {width // before}: {describe(t_interval(lost))}.",
        rule="the 95 % interval of the difference between the two largest numbers of "
        "heads, paired by seed, lies above 0",
        outcome=decide([hurts]),
        sentence=TOO_MANY[hurts],
    )


def _free(results: dict[str, Any]) -> Answer:
    one, *_, most = results["counted"]
    grown = {name: most[name] / one[name] for name in COUNTED}
    times = results["ratios"][-1]
    slower = above(times, SAME)
    same = [grown["parameters"] == 1, grown["operations"] <= SAME]
    outcome = decide([*same, None if slower is None else not slower])
    return Answer(
        claim="At one width, the number of heads does not change the cost.",
        source="Vaswani et al. 2017, arXiv:1706.03762, section 3.2.2",
        number=f"From one head to {results['counts'][-1]}: {grown['parameters']:.2g} "
        f"times the parameters, {grown['operations']:.2f} times the operations, "
        f"{grown['exponentials']:.3g} times the exponentials and "
        f"{grown['memory']:.3g} times the memory of a layer's gradient, as the "
        f"compiler counts them; {spread(times)} times the time, over rounds of one "
        "process.",
        rule=f"the parameters are as many, the operations {SAME:g} times as many at "
        "most, and the 95 % interval of the ratio of times, over rounds, lies below "
        f"{SAME:g}",
        outcome=outcome,
        sentence="Heads share the width, so parameters and products of matrices stay "
        "as many, and so does the cost."
        if outcome == HOLDS
        else "Heads share the width, so parameters stay as many; but each head has a "
        "matrix of weights of its own, and so more of all that is not a product of "
        "matrices.",
    )


def parts(results: dict[str, Any]) -> list[Part]:
    """The loss and the cost against the number of heads."""
    counts, losses = results["counts"], np.array(results["losses"])
    counted, seeds = results["counted"], results["seeds"]
    loss = {"validation loss, nats": {"models": band(counts, losses.T.tolist())}}
    grown = {
        name: Curve(counts, [row[name] / counted[0][name] for row in counted])
        for name in COUNTED
    }
    grown["time, measured"] = band(counts, np.transpose(results["ratios"]).tolist())
    titles = "Loss against heads", "Cost against heads"
    first = curves(titles[0], loss, x_label="heads", log_x=True)
    panel = {"over that of one head": grown}
    then = curves(titles[1], panel, x_label="heads", log_x=True)
    rows = [
        [heads, *own.tolist(), *(row[name] for name in COUNTED), spread(times)]
        for heads, own, row, times in zip(
            counts, losses, counted, results["ratios"], strict=True
        )
    ]
    columns = [*(f"loss, seed {n}" for n in seeds), *COUNTED, "time"]
    return [
        Figure(lambda: first, "Means over seeds with 95 % intervals."),
        Figure(
            lambda: then,
            "The gradient of one layer of causal attention by itself. All but the time "
            "is what the compiler counts; the time is measured, on a CPU that of all "
            "threads, in turns with that of one head, with the 95 % interval over "
            "rounds of one process; another process may differ by more.",
        ),
        Table(
            "Numbers of heads",
            ("heads", *columns),
            rows,
            "Validation loss, and the cost of a layer's gradient: memory in MiB beside "
            "inputs and results, time as a multiple of that of one head.",
        ),
    ]


CLAIM = Claim(
    title="How many heads?",
    design="Models of one width are trained with more and more heads: a head has the "
    "width over their number for its queries, keys and values, so that all models have "
    "as many parameters. All are trained at one learning rate, on the same batches. "
    "What heads cost is counted and timed on the gradient of one layer by itself; up "
    "to 256 tokens jattn makes all weights at once.",
    settings=Heads,
    measure=measure,
    answers=answers,
    parts=parts,
)
