"""The usual story about 1/sqrt(d_k), step by step, from the runs of a sweep.

The arms are scale "none" (no factor) and "sqrt" (1/sqrt(d_k)), paired by seed: same
data in the same order and the same random draws.
"""

from collections.abc import Iterable, Sequence
from statistics import fmean
from typing import Any, NamedTuple

from experiments.evidence import (
    HOLDS,
    OPEN,
    PART,
    Interval,
    decide,
    describe,
    t_interval,
)
from experiments.results import (
    Results,
    Run,
    best_of,
    group,
    initial_mean,
    loss_by_seed,
)

IN_WORDS = {"none": "without the factor", "sqrt": "with it"}
SLOPE_TOLERANCE = 0.05
STORY_RULE = (
    "The whole story comes out as its steps do if they agree, holds in part if one of "
    "them holds at least in part, and is not resolved otherwise."
)


class Gap(NamedTuple):
    """Validation loss without the factor minus with it, paired by seed."""

    label: str
    d_k: int
    none: list[Run]
    sqrt: list[Run]
    interval: Interval | None  # None without a finished pair


def gaps(runs: Iterable[Run]) -> list[Gap]:
    """The gap at each setting and learning rate where both arms ran."""
    groups = group(runs, "label", "d_k", "lr").values()
    pairs = [[_arm(rs, scale) for scale in ("none", "sqrt")] for rs in groups]
    return [_gap(none, sqrt) for none, sqrt in pairs if none and sqrt]


def best_gaps(runs: Iterable[Run]) -> list[Gap]:
    """The gap between the arms, each at its own best learning rate."""
    groups = group(runs, "label", "d_k").values()
    pairs = [[best_of(_arm(rs, scale)) for scale in ("none", "sqrt")] for rs in groups]
    return [_gap(none, sqrt) for none, sqrt in pairs if none and sqrt]


class Verdict(NamedTuple):
    """A claim, the rule that decides it, the numbers, and how it came out."""

    claim: str
    rule: str
    numbers: str  # whole sentences; empty without a measurement
    outcome: str


def verdicts(results: Results) -> list[Verdict]:
    """The steps of the usual story, each decided by its own rule."""
    runs = results.runs
    return [
        _logits_grow(results.coord),
        _collapse(runs, "The softmax saturates", entropy="entropy / ln n"),
        _collapse(
            runs, "The typical row's gradient dies", row_norm_median="median row norm"
        ),
        _collapse(
            runs,
            "The gradients of W_Q and W_K vanish",
            wq_gradient_norm="gradient norm of W_Q",
            wk_gradient_norm="gradient norm of W_K",
        ),
        _training_is_worse(runs),
    ]


def combine(outcomes: Sequence[str]) -> str:
    """STORY_RULE, of the outcomes of the steps."""
    if len(set(outcomes)) == 1:
        return outcomes[0]
    return PART if {HOLDS, PART} & set(outcomes) else OPEN


def typical_rows(runs: Iterable[Run]) -> list[str]:
    """What training does to rows at the largest d_k, a sentence for each label."""
    sentences = []
    for (label,), members in group(runs, "label").items():
        d_k = max(run.d_k for run in members)
        at_d_k = [run for run in members if run.d_k == d_k]
        changes = [
            f"{words} (lr {best[0].lr_text}) dead rows from "
            f"{_change(best, 'dead_share')} and saturated rows from "
            f"{_change(best, 'saturated_share')}"
            for scale, words in IN_WORDS.items()
            if (best := best_of(_arm(at_d_k, scale)))
        ]
        if changes:
            where = _join(label, f"d_k {d_k}, the largest")
            sentences.append(f"At {where}, training takes {'; '.join(changes)}.")
    return sentences


def paradox(runs: Sequence[Run]) -> str | None:
    """Why weight gradients grow while the typical row dies, if the numbers show both.

    They do if, from the smallest to the largest d_k, the median row norm at least
    halves while both weights' gradient norms and rms / median at least double.
    """
    names = "row_norm_median", "row_norm_rms", "wq_gradient_norm", "wk_gradient_norm"
    for label in dict.fromkeys(run.label for run in runs):
        median, rms, w_q, w_k = (initial_mean(runs, label, "none", x) for x in names)
        if len(median) < 2:
            continue
        low, high = min(median), max(median)
        ratio = {d_k: rms[d_k] / max(median[d_k], 1e-30) for d_k in (low, high)}
        grows = all(2 * x[low] <= x[high] for x in (w_q, w_k, ratio))
        if grows and 2 * median[high] <= median[low]:
            return (
                "A norm adds up squares, so a few large rows decide it. Before "
                "training and without the factor the rms of the row norms is "
                f"{ratio[low]:.3g} times their median at d_k {low} and "
                f"{ratio[high]:.3g} times at d_k {high}: fewer and fewer rows carry "
                "the gradient. In them the largest logits nearly tie, for elsewhere "
                "the softmax hardly has a derivative; and what they pass on to queries "
                "and keys is not divided by sqrt(d_k). The norms tell that some rows "
                "still learn; only the rows themselves tell how few."
            )
    return None


def _logits_grow(coord: dict[str, Any]) -> Verdict:
    slopes = {}
    if 0 in coord.get("steps", ()):
        start = coord["steps"].index(0)
        slopes = {k: v["slope"][start] for k, v in coord["scales"].items()}
    expected = {"none": 0.5, "sqrt": 0.0}
    measured = {k: slopes[k] for k in expected if slopes.get(k) is not None}
    return Verdict(
        "Without the factor, logits grow like sqrt(d_k)",
        f"slope of log std against log d_k before training within {SLOPE_TOLERANCE} "
        "of 0.5 without the factor, and of 0 with it",
        "".join(f"Slope {IN_WORDS[k]}: {v:.3g}. " for k, v in measured.items()).strip(),
        decide(
            abs(measured[scale] - slope) <= SLOPE_TOLERANCE
            if scale in measured and "none" in measured  # which the claim is about
            else None
            for scale, slope in expected.items()
        ),
    )


def _collapse(runs: Sequence[Run], claim: str, **measures: str) -> Verdict:
    """Before training a measure falls by half with d_k, and to half the other arm's."""
    conditions: list[bool | None] = []
    numbers = []
    for label in dict.fromkeys(run.label for run in runs):
        for measure, name in measures.items():
            none = initial_mean(runs, label, "none", measure)
            sqrt = initial_mean(runs, label, "sqrt", measure)
            if not none:
                continue
            low, high = min(none), max(none)
            conditions += [
                none[high] < none[low] / 2 if high > low else None,
                none[high] < sqrt[high] / 2 if high in sqrt else None,
            ]
            sizes = sorted({low, high})
            values = ", ".join(
                " and ".join(f"{arm[d]:.3g}" if d in arm else "–" for d in sizes)
                + f" {words}"
                for arm, words in zip((none, sqrt), IN_WORDS.values(), strict=True)
            )
            where = _join(label, f"d_k {' and '.join(map(str, sizes))}")
            numbers.append(f"At {where}, {name}: {values}.")
    return Verdict(
        claim,
        "before training and without the factor, at the largest d_k: "
        f"{' and '.join(measures.values())} below half of the value at the smallest "
        "d_k, and below half of the value with the factor",
        " ".join(numbers),
        decide(conditions),
    )


def _training_is_worse(runs: Sequence[Run]) -> Verdict:
    found = best_gaps(runs)
    signs = [gap.interval.sign if gap.interval else None for gap in found]
    scales = [{run.scale for run in rs} for rs in group(runs, "label", "d_k").values()]
    # A size at which an arm diverged at every learning rate stays undecided.
    signs += [None] * (sum({"none", "sqrt"} <= s for s in scales) - len(found))
    return Verdict(
        "Training without the factor ends worse",
        "for every d_k, each arm at its best learning rate: the 95 % interval of the "
        "gap in validation loss, none - sqrt, lies above zero",
        " ".join(
            f"Gap at {_join(g.label, f'd_k {g.d_k}')}: {describe(g.interval)}."
            for g in found
        ),
        decide(None if sign is None else sign > 0 for sign in signs),
    )


def _change(runs: Sequence[Run], share: str) -> str:
    """A share before and after training, in percent."""
    before = fmean(run.initial[share] for run in runs)
    after = fmean(run.final[share] for run in runs)
    return f"{100 * before:.3g} % to {100 * after:.3g} %"


def _join(label: str, text: str) -> str:
    return f"{label}, {text}" if label else text


def _arm(runs: list[Run], scale: str) -> list[Run]:
    return [run for run in runs if run.scale == scale]


def _gap(none: list[Run], sqrt: list[Run]) -> Gap:
    others = loss_by_seed(sqrt)
    differences = [
        loss - other
        for seed, loss in loss_by_seed(none).items()
        if loss is not None and (other := others.get(seed)) is not None
    ]
    interval = t_interval(differences) if differences else None
    return Gap(none[0].label, none[0].d_k, none, sqrt, interval)
