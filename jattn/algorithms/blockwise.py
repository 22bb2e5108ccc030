"""Attention tile by tile: O(T + S) memory, in every derivative.

The primal is a fold of `SoftmaxState` over the tiles of a row of tiles. Its derivative
is written once, forwards, as a second fold over the same tiles of the tangent of the
tile function; JAX transposes that fold into the backward pass and differentiates it
again for higher orders. The checkpoints around it keep nothing of size T x S.

Source: Rabe & Staats 2021, arXiv:2112.05682 (linear memory); Dao 2023,
arXiv:2307.08691, section 3.1 (weights recomputed from the log-sum-exp).
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jattn.core.letters import letters_of, take_leaves
from jattn.core.softmax import SoftmaxState
from jattn.core.spec import AttentionSpec
from jattn.core.tile import Pairs, accumulator, guard, logits

Arrays = list[Any]


def attend(
    q: jax.Array, k: jax.Array, v: jax.Array, pairs: Pairs, spec: AttentionSpec
) -> tuple[jax.Array, jax.Array]:
    """Attention of one head; arguments and results as in `reference.attend`."""
    operands = guard(q, k, v, pairs)
    arrays, structure = jax.tree.flatten(operands)
    letters = ["TH", "SH", "SD", *letters_of(operands[3])]
    is_float = [jnp.issubdtype(jnp.result_type(x), jnp.inexact) for x in arrays]

    def pick(items: list, kind: bool) -> list:
        return [x for x, f in zip(items, is_float, strict=True) if f is kind]

    block_q, block_k = spec.block_sizes or (256, 256)
    tiling = _Tiling(
        structure,
        tuple(is_float),
        tuple(pick(letters, True)),
        tuple(pick(letters, False)),
        q.shape[0],
        k.shape[0],
        min(block_q, q.shape[0]),
        min(block_k, k.shape[0]),
        spec.precision,
    )
    out, shift, log_sum = _attend(tiling, pick(arrays, True), pick(arrays, False))
    return out, shift + log_sum


class _Tiling(NamedTuple):
    """What is static: how the operands are put together, and the grid of tiles.

    The operands, (q, k, v, pairs), are kept as a list of floating-point arrays, which
    have tangents, and a list of the others.

    The last row and column of tiles start early enough to be whole, so that no array
    is padded. What they share with their neighbours is computed twice: such queries
    are dropped, such keys are forbidden in the last tile.
    """

    structure: Any
    is_float: tuple[bool, ...]
    float_letters: tuple[str, ...]
    other_letters: tuple[str, ...]
    num_queries: int
    num_keys: int
    block_q: int
    block_k: int
    precision: Any

    def operands(self, floats: Arrays, others: Arrays) -> tuple:
        """(q, k, v, pairs) from the two lists."""
        sources = {True: iter(floats), False: iter(others)}
        return self.structure.unflatten([next(sources[f]) for f in self.is_float])

    def row(self, start: jax.Array, arrays: Arrays, letters: tuple[str, ...]) -> Arrays:
        """The arrays' part for the row of tiles whose first query is `start`."""
        return take_leaves(arrays, letters, "T", start, self.block_q)

    def column(self, j: jax.Array, arrays: Arrays, letters: tuple[str, ...]) -> Arrays:
        """The arrays' part for column `j` of the tiles."""
        start = jnp.minimum(j * self.block_k, self.num_keys - self.block_k)
        return take_leaves(arrays, letters, "S", start, self.block_k)

    def logits(self, j: jax.Array, floats: Arrays, others: Arrays) -> jax.Array:
        """The logits of a tile in column `j`."""
        q, k, _, pairs = self.operands(floats, others)
        s = logits(q, k, pairs, self.precision)
        if self.num_keys % self.block_k == 0:
            return s
        shared = jnp.maximum(0, (j + 1) * self.block_k - self.num_keys)
        return jnp.where(jnp.arange(self.block_k)[None, :] < shared, -jnp.inf, s)

    @property
    def num_columns(self) -> int:
        """How many tiles a row has."""
        return -(-self.num_keys // self.block_k)

    def over_rows(self, fn: Callable[..., Any]) -> Any:
        """`fn(start)` for every row of tiles, its results joined along the queries."""
        starts = jnp.arange(0, self.num_queries, self.block_q)
        parts = lax.map(fn, jnp.minimum(starts, self.num_queries - self.block_q))
        shared = len(starts) * self.block_q - self.num_queries

        def join(x: jax.Array) -> jax.Array:
            whole = x[:-1].reshape(-1, *x.shape[2:])
            return jnp.concatenate([whole, x[-1, shared:]])

        return jax.tree.map(join, parts)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _attend(tiling: _Tiling, floats: Arrays, others: Arrays) -> tuple[jax.Array, ...]:
    """`SoftmaxState.normalised` of every row."""
    dtype = accumulator(floats[0].dtype)
    value_dim = tiling.operands(floats, others)[2].shape[1]

    def row(start: jax.Array) -> tuple[jax.Array, ...]:
        floats_row = tiling.row(start, floats, tiling.float_letters)
        others_row = tiling.row(start, others, tiling.other_letters)

        def add_tile(j: jax.Array, state: SoftmaxState) -> SoftmaxState:
            tile = tiling.column(j, floats_row, tiling.float_letters)
            rest = tiling.column(j, others_row, tiling.other_letters)
            s = tiling.logits(j, tile, rest)
            v = tiling.operands(tile, rest)[2]
            return state.merge(SoftmaxState.from_scores(s, v, tiling.precision))

        empty = SoftmaxState.empty((tiling.block_q,), value_dim, dtype)
        return lax.fori_loop(0, tiling.num_columns, add_tile, empty).normalised()

    return tiling.over_rows(row)


@_attend.defjvp
def _attend_jvp(tiling: _Tiling, primals: tuple, tangents: tuple) -> tuple:
    """The tangents of the output and of the log-sum-exp, all of it in `log_sum`.

    With weights p = exp(s - shift - log_sum), and ds the tangent of the logits:
        d log_sum = sum p ds          d out = p ds v + p dv - (d log_sum) out
    """
    floats, others = primals
    out, shift, log_sum = _attend(tiling, floats, others)
    # Of a row without keys no tile has a weight, whatever stands here.
    rows = [shift, jnp.where(jnp.isneginf(log_sum), 0, log_sum)]

    def tile(
        j: jax.Array, floats: Arrays, dfloats: Arrays, others: Arrays, rows: Arrays
    ) -> tuple[jax.Array, jax.Array]:
        floats = tiling.column(j, floats, tiling.float_letters)
        dfloats = tiling.column(j, dfloats, tiling.float_letters)
        others = tiling.column(j, others, tiling.other_letters)
        s, ds = jax.jvp(lambda x: tiling.logits(j, x, others), (floats,), (dfloats,))
        v, dv = (tiling.operands(x, others)[2] for x in (floats, dfloats))
        # Of a row with a NaN every weight is NaN, so both say what is forbidden.
        forbidden = jnp.isneginf(s)
        shift, log_sum = rows
        p = jnp.exp(s - shift[:, None] - log_sum[:, None])
        p = jnp.where(forbidden, 0, p)
        pds = jnp.where(forbidden, 0, p * ds)
        matmul = functools.partial(
            jnp.matmul, precision=tiling.precision, preferred_element_type=s.dtype
        )
        acc = matmul(pds.astype(v.dtype), v) + matmul(p.astype(v.dtype), dv)
        # A cotangent of NaN times a weight of 0 would reach forbidden keys; the NaN
        # of the weights reaches the others without it, and d lse carries it forwards.
        return jnp.where(jnp.isnan(shift)[:, None], 0, acc), jnp.sum(pds, axis=-1)

    @jax.checkpoint
    def row(start: jax.Array) -> tuple[jax.Array, jax.Array]:
        floats_row = tiling.row(start, floats, tiling.float_letters)
        dfloats_row = tiling.row(start, tangents[0], tiling.float_letters)
        others_row = tiling.row(start, others, tiling.other_letters)
        parts = tiling.row(start, rows, ("T", "T"))

        def add_tile(sums: tuple, j: jax.Array) -> tuple[tuple, None]:
            # The checkpoint encloses the slicing too: what is kept is not sliced.
            added = jax.checkpoint(tile)(j, floats_row, dfloats_row, others_row, parts)
            return jax.tree.map(jnp.add, sums, added), None

        zeros = (
            jnp.zeros((tiling.block_q, out.shape[1]), out.dtype),
            jnp.zeros_like(parts[0]),
        )
        return lax.scan(add_tile, zeros, jnp.arange(tiling.num_columns))[0]

    acc, dlog_sum = tiling.over_rows(row)
    dout = acc - dlog_sum[:, None] * out
    return (out, shift, log_sum), (dout, jnp.zeros_like(shift), dlog_sum)
