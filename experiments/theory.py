"""The exact law of the softmax of n independent normal logits, and a check of it.

Logits s_i = sigma z_i with z_i independent N(0, 1): the random energy model of
Derrida 1981 (Phys. Rev. B 24, 2613) with n levels, where softmax is the Gibbs
measure. For a query with independent N(0, 1) entries, the logits q.k of n such keys
have exactly this law given |q|, with sigma = |q| times the scale, and |q| ~ chi(d_k).
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import eigh_tridiagonal
from scipy.special import softmax, xlogy

from experiments.config import Theory

SCALES = ("none", "sqrt")
_TAIL = 9.0  # normal tails beyond nine standard deviations weigh less than 1e-18
_BATCH_QUERIES = 64
_MIN_BATCHES = 64  # fewer would make the standard error itself uncertain
_CHUNK = 2**21  # numbers held at once, vectors and logits: 8 MiB in float32


class Law(NamedTuple):
    """Expectations for one softmax row p with partition function Z."""

    log_z: float
    sum_p2: float
    trace: float
    entropy: float


class _Grid(NamedTuple):
    """Points u = ln t, and the values of t X, X = e^{sigma z}, with their densities."""

    u: NDArray
    step: float
    tx: NDArray
    density: NDArray

    @classmethod
    def of(cls, keys: int, sigma: float, step: float) -> "_Grid":
        """The grid on which sums over `keys` logits converge."""
        step = min(step, sigma / 2)
        reach = int(np.ceil(_TAIL * sigma / step))
        z = np.arange(-reach, reach + 1) * (step / sigma)
        density = np.exp(-(z**2) / 2) * (step / sigma) / np.sqrt(2 * np.pi)
        # Left of `low` n e^{9 sigma} t is below 1e-12; right of `high` L^n is zero.
        low = -_TAIL * sigma - np.log(keys) - 28
        high = _TAIL * sigma + 5
        u = np.arange(low, high, step)
        y = low + step * np.arange(-reach, len(u) + reach)  # u + sigma z
        # Beyond 50, e^{-tX} is zero anyway.
        return cls(u, step, np.exp(np.minimum(y, 50)), density)

    def mean(self, fn: Callable[[NDArray], NDArray]) -> NDArray:
        """E fn(t X) for every t."""
        return np.convolve(fn(self.tx), self.density, mode="valid")


class Estimate(NamedTuple):
    """A Monte Carlo mean with its standard error."""

    mean: float
    standard_error: float


def scale_factor(scale: str, d_k: int) -> float:
    """What q.k is multiplied by: 1 for "none", 1/sqrt(d_k) for "sqrt"."""
    return {"none": 1.0, "sqrt": d_k**-0.5}[scale]


def softmax_law(keys: int, sigma: float, *, step: float = 0.25) -> Law:
    """Expectations over softmax(sigma z), z with n = keys independent N(0, 1) entries.

    With X = e^{sigma z}, the Laplace transform L(t) = E e^{-tX} and u = ln t,
    from ln Z = int (e^-t - e^-tZ) dt/t and Z^-2 = int t e^-tZ dt (t from 0):

        E ln Z    = int (exp(-e^u) - L^n) du
        E sum p^2 = n int E[(tX)^2 e^{-tX}] L^{n-1} du
        E tr J    = 1 - E sum p^2,   J = diag(p) - p p^T the derivative of softmax
        E H       = E ln Z - sigma^2 E tr J   (Stein's lemma: E p.z = sigma E tr J)

    On one grid for u and for sigma z both expectations are convolutions with the
    normal density. The integrands are analytic, so the trapezoid rule converges
    exponentially: the default step errs by less than 1e-8.

    Args:
        keys: number of logits n.
        sigma: their standard deviation, > 0.
        step: spacing of the grid in u; never more than sigma / 2 is used.
    """
    grid = _Grid.of(keys, sigma, step)
    u, step, laplace = grid.u, grid.step, grid.mean(lambda tx: np.exp(-tx))
    second = grid.mean(lambda tx: tx**2 * np.exp(-tx))

    log_z = step * np.sum(np.exp(-np.exp(np.minimum(u, 50))) - laplace**keys)
    sum_p2 = step * np.sum(keys * second * laplace ** (keys - 1))
    return _law(log_z, sum_p2, log_z - sigma**2 * (1 - sum_p2))


def weight_of_one(
    keys: int, sigma: float, logit: float, *, step: float = 0.25
) -> float:
    """E of the softmax weight of one key of a given logit among n normal ones.

    With X* = e^logit and Z the sum of n independent X = e^{sigma z}, and L(t) as in
    `softmax_law`, E X*/(X* + Z) = int X* e^{-t X*} L(t)^n dt.

    Args:
        keys: number n of the others.
        sigma: standard deviation of their logits, > 0.
        logit: of the one key.
        step: as in `softmax_law`.
    """
    grid = _Grid.of(keys, sigma, step)
    log_tx = np.minimum(grid.u + logit, 50)  # ln t X*
    density = np.exp(log_tx - np.exp(log_tx))
    laplace = grid.mean(lambda tx: np.exp(-tx)) ** keys
    # The density, of integral 1, moves with the logit and leaves the grid: for a large
    # one on the left, where L^n is 1, else on the right, where L^n is 0.
    if logit > 0:
        return float(1 - grid.step * np.sum(density * (1 - laplace)))
    return float(grid.step * np.sum(density * laplace))


def averaged_law(keys: int, d_k: int, scale: str, *, nodes: int = 32) -> Law:
    """The law for random q and k with N(0, 1) entries: averaged over |q| ~ chi(d_k).

    |q|^2 / 2 has the Gamma(d_k / 2) law, whose Gauss quadrature is the generalised
    Gauss-Laguerre rule, here from its Jacobi matrix (Golub & Welsch 1969). The
    expectations are even in sigma, thus smooth functions of |q|^2.
    """
    alpha = d_k / 2 - 1
    k = np.arange(nodes)
    half_squares, vectors = eigh_tridiagonal(
        2 * k + 1 + alpha, np.sqrt(k[1:] * (k[1:] + alpha))
    )
    weights = vectors[0] ** 2
    factor = scale_factor(scale, d_k)
    laws = [softmax_law(keys, factor * np.sqrt(2 * h)) for h in half_squares]
    log_z, sum_p2, _, entropy = weights @ np.array(laws)
    return _law(log_z, sum_p2, entropy)


def monte_carlo(
    keys: int, d_k: int, scale: str, *, relative_error: float, seed: int
) -> dict[str, Estimate]:
    """E[tr J] and E[H] of softmax(scale q.k) over random vectors q and k.

    Queries of one batch share its keys, so rows are not independent: the standard
    error is that of the means of independent batches. Batches are added until it is
    at most `relative_error` of the value, for both quantities.

    Returns:
        {"trace": Estimate, "entropy": Estimate}, the entropy in nats.
    """
    rng = np.random.default_rng([seed, keys, d_k, SCALES.index(scale)])
    factor = scale_factor(scale, d_k)
    numbers = (keys + _BATCH_QUERIES) * d_k + keys * _BATCH_QUERIES
    chunk = max(1, _CHUNK // numbers)  # batches at a time
    means = np.empty((0, 2))
    while True:
        q = rng.standard_normal((chunk, _BATCH_QUERIES, d_k), dtype=np.float32)
        k = rng.standard_normal((chunk, keys, d_k), dtype=np.float32)
        means = np.concatenate([means, _batch_means(factor * q @ k.mT)])
        value = means.mean(axis=0)
        error = means.std(axis=0, ddof=1) / np.sqrt(len(means))
        if len(means) >= _MIN_BATCHES and np.all(error <= relative_error * value):
            break
    return {
        name: Estimate(float(value[i]), float(error[i]))
        for i, name in enumerate(("trace", "entropy"))
    }


def theory_table(theory: Theory) -> dict:
    """Quadrature beside Monte Carlo for every d_k and scale: theory.json."""
    rows = []
    for d_k in theory.d_k:
        for scale in SCALES:
            law = averaged_law(theory.keys, d_k, scale)
            check = monte_carlo(
                theory.keys,
                d_k,
                scale,
                relative_error=theory.relative_error,
                seed=theory.seed,
            )
            row: dict = {"d_k": d_k, "scale": scale}
            for name, estimate in check.items():
                row[name] = {
                    "quadrature": getattr(law, name),
                    "monte_carlo": estimate.mean,
                    "standard_error": estimate.standard_error,
                }
            rows.append(row)
    return {"keys": theory.keys, "rows": rows}


def _law(log_z: float, sum_p2: float, entropy: float) -> Law:
    return Law(float(log_z), float(sum_p2), float(1 - sum_p2), float(entropy))


def _batch_means(logits: NDArray) -> NDArray:
    """(batches, queries, keys) -> (batches, 2): each batch's mean trace and entropy."""
    p = softmax(logits.astype(np.float64), axis=-1)
    trace = 1 - np.sum(p**2, axis=-1)
    entropy = -np.sum(xlogy(p, p), axis=-1)
    return np.stack([trace.mean(axis=-1), entropy.mean(axis=-1)], axis=-1)
