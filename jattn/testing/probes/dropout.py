"""Dropout of weights: its rate, its key, and what it may not undo."""

import jax
import numpy as np

from jattn.foreign import refuses
from jattn.testing import dense
from jattn.testing.compare import Difference, check, close, exactly
from jattn.testing.probe import probe, vectors
from jattn.testing.subject import Subject


def _options(seed: int = 0, rate: float = 0.5) -> dict[str, object]:
    return {"dropout": rate, "dropout_rng": jax.random.key(seed)}


@probe("dropout", "dropout")
def a_rate_outside_zero_to_one_is_refused(f: Subject) -> None:
    """-0.5, NaN and 1.5 are no rates; 1.0 is refused or gives zeros."""
    q, k, v = vectors()
    accepted = []
    for rate in (-0.5, float("nan"), 1.5, 1.0):
        try:
            out = f.out(q, k, v, **_options(rate=rate))
        except Exception as error:
            if refuses(error):
                continue
            raise
        if rate != 1.0 or out.any():
            what = "NaN" if np.isnan(out).any() else "zeros" if not out.any() else "out"
            accepted.append(f"{rate} (gives {what})")
    check(not accepted, f"dropout_rate accepted: {', '.join(accepted)}")


@probe("dropout", "dropout", refusal=True)
def a_rate_needs_a_key(f: Subject) -> None:
    """dropout_rate=0.5 without dropout_rng is refused, not left out."""
    q, k, v = vectors()
    f.out(q, k, v, dropout=0.5)
    raise Difference("dropout_rate=0.5 without dropout_rng was accepted")


@probe("dropout", "dropout")
def without_dropout_nothing_is_dropped(f: Subject) -> None:
    """A rate of 0, or deterministic=True, is the plain result and needs no key."""
    q, k, v = vectors()
    want = dense.attend(q, k, v).out
    close("out", f.out(q, k, v, dropout=0.0), want, because="dropout_rate=0")
    if f.has("deterministic"):
        out = f.out(q, k, v, dropout=0.5, deterministic=True)
        close("out", out, want, because="deterministic=True")


@probe("dropout", "dropout")
def the_key_decides_what_is_dropped(f: Subject) -> None:
    """The same key gives the same bits, another key another output."""
    q, k, v = vectors()
    first, again, other = (f.out(q, k, v, **_options(seed)) for seed in (0, 0, 1))
    exactly("out", again, first, "called twice with one key")
    check((first != other).any(), "two keys give the same output")
    plain = dense.attend(q, k, v).out
    check(np.abs(first - plain).max() > 1e-3, "dropout_rate=0.5 drops nothing")


@probe("dropout", "dropout")
def dropout_keeps_the_mean(f: Subject) -> None:
    """What is kept is divided by 1 - rate: a weighted sum of ones is 1 on average."""
    ones = np.ones((2, 64, 3, 8), np.float32)
    out = f.out(0 * ones, ones, ones, **_options(rate=0.3))
    mean = float(out.mean())
    check(abs(mean - 1) < 0.1, f"the mean of out is {mean:.3g}, not 1")


@probe("dropout", "dropout", "mask")
def dropout_leaves_masked_keys_masked(f: Subject) -> None:
    """Causal and padding hold while weights are dropped."""
    q, k, v = vectors(T=11)
    pad = (np.arange(11) < np.array([11, 7])[:, None])[:, None, None]
    before = f.out(q, k, v, mask=pad, causal=True, **_options())
    k[1, 7:], v[1, 7:] = 9, 9
    after = f.out(q, k, v, mask=pad, causal=True, **_options())
    exactly("out[1]", after[1], before[1], "only keys and values of padding changed")
    k, v = k.copy(), v.copy()
    k[0, 6:], v[0, 6:] = 9, 9
    after = f.out(q, k, v, mask=pad, causal=True, **_options())
    exactly("out[0, :6]", after[0, :6], before[0, :6], "only later keys changed")
