"""The law of random softmax rows: against exact integrals, itself and true vectors."""

import time

import numpy as np
import pytest
from scipy import integrate, stats
from scipy.special import expit, xlogy

from experiments import theory
from experiments.config import Theory
from experiments.theory import (
    averaged_law,
    monte_carlo,
    softmax_law,
    theory_table,
    weight_of_one,
)

D_K = (4, 16, 64, 256, 1024)


def normal_mean(function):
    """E f(w) for w ~ N(0, 1) by adaptive integration."""
    value, _ = integrate.quad(
        lambda w: function(w) * stats.norm.pdf(w),
        -12,
        12,
        points=(-0.5, 0, 0.5),
        limit=1000,
        epsabs=1e-12,
    )
    return value


@pytest.mark.parametrize("sigma", [0.1, 1.0, 5.0, 32.0])
def test_two_keys_agree_with_the_one_dimensional_integral(sigma):
    def p(w):  # the difference of two independent N(0, 1) is sqrt(2) w
        return expit(np.sqrt(2) * sigma * w)

    law = softmax_law(2, sigma)
    trace = normal_mean(lambda w: 2 * p(w) * p(-w))
    entropy = normal_mean(lambda w: -xlogy(p(w), p(w)) - xlogy(p(-w), p(-w)))
    log_z = normal_mean(lambda w: np.logaddexp(0, np.sqrt(2) * sigma * w))
    np.testing.assert_allclose(law.trace, trace, atol=1e-8)
    np.testing.assert_allclose(law.entropy, entropy, atol=1e-8)
    np.testing.assert_allclose(law.log_z, log_z, atol=1e-8)


@pytest.mark.parametrize("keys", [1, 64, 1000])
@pytest.mark.parametrize("sigma", [0.05, 1.0, 10.0, 38.0])
def test_halving_the_step_changes_nothing(keys, sigma):
    coarse, fine = softmax_law(keys, sigma), softmax_law(keys, sigma, step=0.125)
    np.testing.assert_allclose(coarse, fine, atol=1e-8)


@pytest.mark.parametrize("scale", theory.SCALES)
@pytest.mark.parametrize("d_k", (2, *D_K))
def test_doubling_the_nodes_over_the_query_norm_changes_nothing(d_k, scale):
    few, many = averaged_law(64, d_k, scale), averaged_law(64, d_k, scale, nodes=64)
    np.testing.assert_allclose(few, many, atol=1e-7)


def test_average_over_the_query_norm_agrees_with_brute_force():
    value, _ = integrate.quad(
        lambda r: softmax_law(5, r).entropy * stats.chi.pdf(r, 6), 0.01, 9
    )
    np.testing.assert_allclose(averaged_law(5, 6, "none").entropy, value, atol=1e-6)


def test_dense_sampling_of_the_law_agrees():
    z = 3.0 * np.random.default_rng(7).standard_normal((200_000, 11))
    p = np.exp(z - np.logaddexp.reduce(z, axis=1, keepdims=True))
    trace = 1 - np.sum(p**2, axis=1)
    error = trace.std() / np.sqrt(len(trace))
    assert abs(softmax_law(11, 3.0).trace - trace.mean()) < 4 * error


@pytest.mark.parametrize("logit", [-6.0, -0.1, 0.1, 4.0, 9.0, 15.0, 30.0, 50.0])
def test_the_weight_of_one_is_that_of_a_long_simulation(logit):
    z = 1.3 * np.random.default_rng(3).standard_normal((200_000, 4))
    others = np.exp(z - logit).sum(axis=1)
    for found, drawn in (
        (weight_of_one(4, 1.3, logit), 1 / (1 + others)),
        (1 - weight_of_one(4, 1.3, logit), others / (1 + others)),
    ):
        error = drawn.std() / np.sqrt(len(drawn))
        assert abs(found - drawn.mean()) < 4 * error + 1e-12


@pytest.mark.parametrize("sigma", [1e-3, 1.0, 8.0])
@pytest.mark.parametrize("keys", [1, 4, 16384])
def test_the_weight_of_one_rises_from_zero_to_one_with_its_logit(keys, sigma):
    logits = [-1e300, -700.0, *np.arange(-99.0, 200.0, 0.5), 700.0, 1e300]
    weights = np.array([weight_of_one(keys, sigma, x) for x in logits])
    assert np.all(np.diff(weights) > -1e-12)
    np.testing.assert_allclose(weights[[0, 1, -2, -1]], [0, 0, 1, 1], atol=1e-12)


@pytest.mark.parametrize("logit", [16.0, 20.0])
def test_what_the_others_get_of_a_large_logit_is_their_mean_over_it(logit):
    others = 4 * np.exp(0.5 - logit)
    left = 1 - weight_of_one(4, 1.0, logit)
    np.testing.assert_allclose(left, others, rtol=1e-4)


@pytest.mark.parametrize("keys", [1, 64])
def test_without_spread_the_row_is_uniform(keys):
    law = softmax_law(keys, 1e-3)
    np.testing.assert_allclose(law.entropy, np.log(keys), atol=1e-5)
    np.testing.assert_allclose(law.sum_p2, 1 / keys, atol=1e-5)


@pytest.mark.parametrize("sigma", [2.0, 8.0, 32.0])
def test_the_trace_stays_below_the_bound_by_the_largest_logit(sigma):
    assert softmax_law(64, sigma).trace < np.sqrt(2 * np.log(64)) / sigma


def test_with_the_factor_the_law_tends_to_that_of_unit_logits():
    law = averaged_law(64, 4096, "sqrt")
    np.testing.assert_allclose(law, softmax_law(64, 1.0), rtol=1e-4)


def test_the_mean_derivative_falls_like_one_over_sqrt_d_k():
    ratio = averaged_law(64, 256, "none").trace / averaged_law(64, 1024, "none").trace
    np.testing.assert_allclose(ratio, 2, rtol=0.01)


@pytest.mark.parametrize(
    "widths", [D_K[::2], pytest.param(D_K, marks=pytest.mark.slow)], ids=str
)
def test_quadrature_and_true_vectors_agree_in_little_time(widths):
    start = time.process_time()
    table = theory_table(Theory(d_k=widths))
    assert time.process_time() - start < 25
    assert [(row["d_k"], row["scale"]) for row in table["rows"]] == [
        (d_k, scale) for d_k in widths for scale in theory.SCALES
    ]
    for row in table["rows"]:
        for name in ("trace", "entropy"):
            cell = row[name]
            assert cell["standard_error"] <= 0.01 * cell["monte_carlo"]
            difference = abs(cell["quadrature"] - cell["monte_carlo"])
            assert difference < 4 * cell["standard_error"], (row["d_k"], row["scale"])


def test_the_standard_error_covers_the_spread_over_seeds():
    runs = [
        monte_carlo(8, 4, "none", relative_error=0.01, seed=seed)["trace"]
        for seed in range(40)
    ]
    spread = np.std([run.mean for run in runs], ddof=1)
    typical = np.mean([run.standard_error for run in runs])
    assert 0.7 < spread / typical < 1.4


def test_the_same_seed_repeats_the_same_estimate():
    first, again, other = (
        monte_carlo(8, 16, "none", relative_error=0.05, seed=seed) for seed in (1, 1, 2)
    )
    assert first == again != other
