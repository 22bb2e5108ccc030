"""Weights, scale, heads, sinks, caps: what is computed where everything may be seen."""

from typing import Any

import jax
import numpy as np

from jattn import scores
from jattn.testing import dense
from jattn.testing.compare import all_close, check, close, exactly, normal
from jattn.testing.probe import probe, some_pairs, vectors
from jattn.testing.subject import Subject


@probe("values")
def weights_are_a_softmax_of_scores_over_root_H(f: Subject) -> None:
    """The formula: softmax(query key^T / sqrt(H)) value."""
    q, k, v = vectors()
    close("out", f.out(q, k, v), dense.attend(q, k, v).out)


@probe("values", "scale")
def a_scale_replaces_the_default(f: Subject) -> None:
    """scale=0.3 is the factor, not one more beside 1/sqrt(H)."""
    q, k, v = vectors()
    want = dense.attend(q, k, v, scale=0.3).out
    close("out", f.out(q, k, v, scale=0.3), want, because="scale=0.3")


@probe("values", "scale")
def a_scale_of_zero_is_a_scale(f: Subject) -> None:
    """scale=0.0 gives the mean of the values; it is not "not given"."""
    q, k, v = vectors()
    want = np.broadcast_to(v.astype(np.float64).mean(1, keepdims=True), q.shape)
    close("out", f.out(q, k, v, scale=0.0), want, because="scale=0.0")


@probe("values")
def large_scores_do_not_overflow(f: Subject) -> None:
    """Scores of 1e5 give the weights that their differences give."""
    q, k, v = vectors()
    q, k = np.abs(q) + 1, 0.01 * k + 1e4
    k[:, 4] += 1e4
    out = f.out(q, k, v)
    want = np.broadcast_to(v[:, 4:5], out.shape)
    close("out", out, want, because="one score leads by 1e4")


@probe("values")
def the_order_of_keys_does_not_matter(f: Subject) -> None:
    """Keys and values in another order give the same output."""
    q, k, v = vectors()
    order = np.random.default_rng(5).permutation(k.shape[1])
    close("out", f.out(q, k[:, order], v[:, order]), f.out(q, k, v))


@probe("values")
def batch_rows_do_not_touch_each_other(f: Subject) -> None:
    """Another second row of the batch leaves the first as it was, bit for bit."""
    first = q, k, v = vectors()
    other = (np.concatenate([x[:1], 3 * x[1:] + 1]) for x in first)
    exactly("out", f.out(*other)[:1], f.out(q, k, v)[:1], "only batch row 1 changed")


@probe("values", "gqa")
def query_head_n_reads_key_head_n_over_G(f: Subject) -> None:
    """N = 4, K = 2: query heads 0 and 1 read key head 0, and add to its gradient."""
    q, k, v = vectors(N=4, K=2)
    d_out = normal(6, *q.shape)
    all_close(f.results(q, k, v, d_out), dense.gradients(q, k, v, d_out))


@probe("values", refusal=True)
def heads_that_do_not_divide_are_refused(f: Subject) -> None:
    """N = 3 query heads on K = 2 key heads have no meaning."""
    q, k, v = vectors(N=3, K=2)
    f.out(q, k, v)
    check(False, "N=3 query heads on K=2 key heads were accepted")


@probe("values", refusal=True)
def arrays_with_heads_first_are_refused(f: Subject) -> None:
    """(B, N, T, H) arrays with T = 5 and S = 11 cannot be (B, T, N, H)."""
    q, k, v = (np.swapaxes(x, 1, 2) for x in vectors())
    f.out(q, k, v)
    check(False, f"query {q.shape} and key {k.shape}, heads first, were accepted")


@probe("values", "score|logits_soft_cap", "mask")
def a_soft_cap_comes_before_the_mask(f: Subject) -> None:
    """The mask is applied to cap tanh(s / cap): no cap lifts a masked key."""
    q, k, v = vectors()
    q, mask = 20 * q, some_pairs()
    name, cap = "logits_soft_cap", 1.0
    option = {"score": scores.soft_cap(cap)} if f.has("score") else {name: cap}
    out = f.out(q, k, v, mask=mask, **option)
    close("out", out, dense.attend(q, k, v, mask=mask, cap=1.0).out)


@probe("values", "score", "grad")
def the_slopes_of_a_score_rule_are_learned(f: Subject) -> None:
    """A penalty of a slope times the distance (ALiBi), and the slopes' gradient."""
    q, k, v = vectors(T=11)
    slopes = np.array([0.5, 0.25, 0.125], np.float32)
    distance = np.abs(np.arange(11)[:, None] - np.arange(11))
    bias = -slopes[:, None, None] * distance
    d_out = normal(6, *q.shape)

    def loss(slopes: np.ndarray) -> float:
        rule = scores.rule(_alibi, slopes, axes=["N"])
        return (f.fn(q, k, v, score=rule) * d_out).sum()

    got, gradient = f.program(jax.value_and_grad(loss))(slopes)
    want = dense.gradients(q, k, v, d_out, bias=bias)
    close("sum of out", got, (want["out"] * d_out).sum())
    close("gradient of slopes", gradient, -(want["bias"] * distance).sum((0, 2, 3)))


def _alibi(s: Any, q_pos: Any, k_pos: Any, slope: Any) -> Any:
    return s - slope * abs(q_pos - k_pos)


@probe("values", "sinks")
def a_sink_takes_weight_and_has_no_value(f: Subject) -> None:
    """One more logit per head, also far above every score; it has a gradient."""
    q, k, v = vectors()
    d_out = normal(6, *q.shape)
    for sinks in np.array([[0.7, -0.3, 2.0], [100.0, -100.0, 0.0]], np.float32):
        got = f.results(q, k, v, d_out, sinks=sinks)
        all_close(got, dense.gradients(q, k, v, d_out, sinks=sinks))
