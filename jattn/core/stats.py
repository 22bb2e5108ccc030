"""Statistics of the weights of a row, from whole rows or in parts."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jattn.core.softmax import SoftmaxState, below, finite, logsumexp


class Stats(NamedTuple):
    """What can be said of the weights p of each query, each (*B, T, N).

    Of a query without keys: -inf, -inf, 0, 0 and 0. An attention sink counts as one
    more key; dropout comes later. `lse` is differentiable, the others are constants to
    derivatives.

    Attributes:
        lse: natural log of the softmax's denominator.
        max_logit: the largest logit.
        entropy: -sum p ln p, in nats: from 0, all weight on one key, to ln of the
            number of keys.
        max_prob: the largest weight.
        sum_p2: sum p^2, one over the effective number of keys; 1 - sum_p2 is the trace
            of the softmax's Jacobian, which goes to 0 as the row saturates.
    """

    lse: jax.Array
    max_logit: jax.Array
    entropy: jax.Array
    max_prob: jax.Array
    sum_p2: jax.Array


class Moments(NamedTuple):
    """What the statistics need beside a `SoftmaxState`, relative to its maximum.

    Attributes:
        first: sum of exp(score - max) * (score - max). (..., T).
        second: sum of exp(score - max)**2. (..., T).
    """

    first: jax.Array
    second: jax.Array

    @classmethod
    def of_start(cls, state: SoftmaxState) -> "Moments":
        """Those of a state that has seen no key, or a sink only."""
        return cls(jnp.zeros_like(state.sum), state.sum)

    def add(
        self, before: SoftmaxState, after: SoftmaxState, scores: jax.Array
    ) -> "Moments":
        """The moments after more keys, (..., T, S), which led from state to state."""
        old = self.relative_to(before, after)
        less_than_max = below(scores, finite(after.max))
        exps = jnp.exp(less_than_max)
        terms = jnp.where(exps > 0, exps * less_than_max, 0)
        return Moments(
            old.first + jnp.sum(terms, axis=-1),
            old.second + jnp.sum(exps**2, axis=-1),
        )

    def relative_to(self, before: SoftmaxState, after: SoftmaxState) -> "Moments":
        """The moments of `before`, relative to the maximum of a state after it."""
        shift = finite(after.max)
        less = finite(before.max) - shift
        old = jnp.exp(before.max - shift)
        # Where nothing old is left, `less` can have overflowed.
        first = jnp.where(old == 0, 0, old * (self.first + less * before.sum))
        return Moments(first, old**2 * self.second)

    def finish(self, state: SoftmaxState) -> tuple[jax.Array, jax.Array]:
        """Sum of p (score - max), and sum of p^2; 0 if empty."""
        total = jnp.where(state.sum == 0, 1, state.sum)
        return self.first / total, self.second / total**2


def stats_of(
    shift: jax.Array, log_sum: jax.Array, mean: jax.Array, sum_p2: jax.Array
) -> Stats:
    """The statistics of rows, from `SoftmaxState.normalised` and `Moments.finish`."""
    empty = jnp.isneginf(log_sum)
    rest = (
        jnp.where(empty, -jnp.inf, shift),
        jnp.where(empty, 0, log_sum - mean),
        jnp.where(empty, 0, jnp.exp(-log_sum)),
        sum_p2,
    )
    return _stats(shift + log_sum, rest)


def stats_of_rows(scores: jax.Array, weights: jax.Array) -> Stats:
    """The statistics of whole rows, (..., S) to (...), and their weights."""
    log = jnp.log(jnp.where(weights == 0, 1, weights))
    rest = (
        jnp.max(scores, axis=-1, initial=-jnp.inf),
        -jnp.sum(weights * log, axis=-1),
        jnp.max(weights, axis=-1, initial=0),
        jnp.sum(weights**2, axis=-1),
    )
    return _stats(logsumexp(scores), rest)


def _stats(lse: jax.Array, rest: tuple[jax.Array, ...]) -> Stats:
    # A maximum over many numbers can lose a NaN on a CPU; a sum of them does not.
    rest = tuple(jnp.where(jnp.isnan(lse), jnp.nan, x) for x in rest)
    return Stats(lse, *map(jax.lax.stop_gradient, rest))
