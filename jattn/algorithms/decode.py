"""Few queries against many keys, as in decoding: the keys are split.

Queries stand in one tile, or in one after the other if they are many; its keys are a
block. The live blocks of a plan are dealt to a few parts; each part is a fold of
`SoftmaxState`, and the states of the parts are merged as a tree. Of keys and values
only live blocks are read, each where it lies, so time and memory follow what is filled
and not what there is room for.

Derivatives are those of `blockwise`.

Source: Dao et al. 2023, pytorch.org/blog/flash-decoding (split keys).
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jattn.algorithms import blockwise
from jattn.algorithms.partition import merge, partition
from jattn.core.letters import take
from jattn.core.plan import Grid, Plan, make_plan
from jattn.core.product import product
from jattn.core.softmax import SoftmaxState
from jattn.core.spec import AttentionSpec
from jattn.core.stats import Moments, Stats, stats_of
from jattn.core.tile import Pairs, accumulator, logits, poison, scores
from jattn.core.varying import varying

PARTS = 4
"""How many states are merged at the end: a power of two."""

State = tuple[SoftmaxState, Moments]


def block_keys(backend: str) -> int:
    """How many keys a block has, where nobody says.

    On a CPU, as measured: a block of all heads stays in the processor's cache between
    its two products. Elsewhere a guess.
    """
    return 128 if backend == "cpu" else 1024


def attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    pairs: Pairs,
    spec: AttentionSpec,
    *,
    cached: bool = False,
) -> tuple[jax.Array, jax.Array, Stats | None]:
    """Attention of one head; arguments and results as in `reference.attend`.

    With `cached`, k is (H, S), and what the mask allows is marked by `poison` already.
    Keys and values may be of another dtype than that of the spec, in which they are
    multiplied.
    """
    leaves, structure = jax.tree.flatten((q, k, v, pairs))
    # What is static stays so, for a plan that is made while the call is traced.
    is_data = [isinstance(x, jax.Array) for x in leaves]
    data, static = partition(is_data, leaves)

    def of_data(fn: Callable[..., Any]) -> Callable[..., Any]:
        def call(*data: jax.Array) -> Any:
            operands = merge(is_data, data, static)
            return fn(*jax.tree.unflatten(structure, operands))

        return call

    def by_blockwise(q: jax.Array, k: jax.Array, v: jax.Array, pairs: Pairs) -> Any:
        return blockwise.attend(q, k.T if cached else k, v, pairs, spec)

    # What a rule closes over has derivatives too, so it becomes an argument.
    split = of_data(functools.partial(_attend, spec=spec, cached=cached))
    split, closed = jax.closure_convert(split, *data)
    whole = of_data(by_blockwise)
    if closed:
        whole, _ = jax.closure_convert(whole, *data)
    return _either(split, whole, *data, *closed)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _either(split: Callable[..., Any], whole: Callable[..., Any], *arrays: Any) -> Any:
    """What `split` computes, with the derivatives of `whole`."""
    return split(*arrays)


@_either.defjvp
def _either_jvp(
    split: Callable[..., Any],
    whole: Callable[..., Any],
    primals: tuple,
    tangents: tuple,
) -> Any:
    return jax.jvp(whole, primals, tangents)


class _Head(NamedTuple):
    """The operands of one head, and its blocks."""

    q: jax.Array
    k: jax.Array
    v: jax.Array
    pairs: Pairs
    spec: AttentionSpec
    cached: bool
    grid: Grid

    def block(
        self, j: jax.Array, full: bool
    ) -> tuple[jax.Array, Callable[[jax.Array], jax.Array]]:
        """The logits (T, block_k) of block j, and how weights are multiplied by v."""
        q, spec, grid = self.q, self.spec, self.grid
        start, size = grid.column_start(j), grid.block_k
        k = lax.dynamic_slice_in_dim(self.k, start, size, int(self.cached))
        v = lax.dynamic_slice_in_dim(self.v, start, size)
        tile = take(self.pairs, "S", start, size)
        k_t = k if self.cached else k.T
        if not (full and self.cached):
            q, k, v = poison(q, k_t.T, v)
            k_t = k.T
        s = (scores if full else logits)(q, k_t, tile, spec)
        if not full and grid.shared_keys:
            new = jnp.maximum(0, (j + 1) * size - grid.num_keys)
            s = jnp.where(jnp.arange(size)[None, :] < new, -jnp.inf, s)

        def weigh(p: jax.Array) -> jax.Array:
            return product("ts,sd->td", tile.kept(p), v, spec.dtype, spec.precision)

        return s, weigh

    def part(self, plan: Plan, i: jax.Array) -> State:
        """The state of part `i` of the live blocks, those without the mask first."""
        columns = jnp.asarray(plan.columns)[0]
        shape, width = (self.q.shape[0],), self.v.shape[1]
        state = SoftmaxState.empty(shape, width, accumulator(self.spec.dtype))
        state = varying((state, Moments.of_start(state)), (columns, *self[:4]))

        def add(full: bool, slot: jax.Array, before: State) -> State:
            s, weigh = self.block(columns[slot], full)
            after, moments = before[0].add(s, weigh), before[1]
            if self.spec.stats:
                moments = moments.add(before[0], after, s)
            return after, moments

        full, live = plan.full[0], plan.live[0]
        for is_full, low, count in ((True, 0, full), (False, full, live - full)):
            begin, end = (low + count * n // PARTS for n in (i, i + 1))
            state = lax.fori_loop(begin, end, functools.partial(add, is_full), state)
        return state


def _attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    pairs: Pairs,
    *,
    spec: AttentionSpec,
    cached: bool,
) -> tuple[jax.Array, jax.Array, Stats | None]:
    q = jnp.where(jnp.isfinite(q).all(axis=1, keepdims=True), q, jnp.nan)
    grid = Grid.of(q.shape[0], v.shape[0], *spec.block_sizes)
    if grid.num_rows == 1:
        return _row(q, k, v, pairs, spec, cached)

    def row(start: jax.Array) -> Any:
        queries = lax.dynamic_slice_in_dim(q, start, grid.block_q)
        rules = take(pairs, "T", start, grid.block_q)
        return _row(queries, k, v, rules, spec, cached)

    def joined(x: jax.Array) -> jax.Array:
        before = x[:-1].reshape(-1, *x.shape[2:])
        return jnp.concatenate((before, x[-1, grid.shared_queries :]))

    return jax.tree.map(joined, lax.map(row, grid.row_starts))


def _row(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    pairs: Pairs,
    spec: AttentionSpec,
    cached: bool,
) -> tuple[jax.Array, jax.Array, Stats | None]:
    """Attention of the queries of one tile."""
    num_queries, (num_keys, width) = q.shape[0], v.shape
    grid = Grid.of(num_queries, num_keys, num_queries, spec.block_sizes[1])
    head = _Head(q, k, v, pairs, spec, cached, grid)
    part = functools.partial(head.part, make_plan(pairs, grid))
    states = lax.map(part, np.arange(PARTS))
    state, moments = _merged_all(states, PARTS)
    if pairs.sink is not None:
        sink = jnp.asarray(pairs.sink, state.max.dtype)
        start = SoftmaxState.of_sink(sink, (num_queries,), width)
        state, moments = _merged((state, moments), (start, Moments.of_start(start)))
    out, shift, log_sum = state.normalised()
    stats = stats_of(shift, log_sum, *moments.finish(state)) if spec.stats else None
    return out, shift + log_sum, stats


def _merged_all(states: State, count: int) -> State:
    """The state over the keys of all, merged in pairs."""
    if count == 1:
        return jax.tree.map(lambda x: x[0], states)
    half = count // 2
    first = jax.tree.map(lambda x: x[:half], states)
    second = jax.tree.map(lambda x: x[half:], states)
    return _merged_all(_merged(first, second), half)


def _merged(one: State, other: State) -> State:
    """The state over the keys of both."""
    both = one[0].merge(other[0])
    moments = (x.relative_to(state, both) for state, x in (one, other))
    return both, jax.tree.map(jnp.add, *moments)
