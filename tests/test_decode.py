"""Split keys: what is visited, and that nothing else about a call differs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracle import assert_close, assert_gradient_close, dense_jax, exact, jit

import jattn
from jattn import masks, scores

B, T, S, N, K, H, D = 2, 3, 29, 6, 3, 5, 7
SPLIT = dict(implementation="decode", block_sizes=(1, 4))
RANDOM = np.random.default_rng(7)


def vectors():
    shapes = (T, N, H), (S, K, H), (S, K, D)
    return [exact(n, B, *x).astype(np.float32) for n, x in enumerate(shapes)]


def both(vectors, options):
    """Results of decode and of the textbook."""
    whole = dict(implementation="reference")
    return [jattn.attention(*vectors, **options, **how) for how in (SPLIT, whole)]


def test_statistics_and_sinks_are_merged_over_the_parts():
    @jit
    def call(vectors, lengths, sinks, slopes):
        mask = masks.causal() & masks.lengths(lengths)
        score = scores.alibi(slopes), scores.soft_cap(3.0)
        options = dict(mask=mask, score=score, query_positions="end")
        return both(vectors, dict(options, sinks=sinks, stats=True))

    sinks, slopes = exact(5, N).astype(np.float32), abs(exact(6, N).astype(np.float32))
    for lengths in ([29, 5], [0, 17]):
        got, want = call(vectors(), np.array(lengths), sinks, slopes)
        for x, y in zip(*map(jax.tree.leaves, (got, want)), strict=True):
            assert_close(x, y)


def test_dropout_has_the_pattern_of_every_algorithm():
    options = dict(dropout_rate=0.4, dropout_rng=jax.random.key(2))
    got, want = jit(lambda vectors: both(vectors, options))(vectors())
    assert_close(got, want)


def test_gradients_reach_what_a_rule_closes_over():
    q, k, v = vectors()

    def loss(attend):
        def of(q, k, v, slope):
            return (attend(q, k, v, lambda s, *_: s * slope) ** 2).sum()

        return jit(jax.grad(of, (0, 1, 2, 3)))(q, k, v, jnp.float32(1.5))

    def split(q, k, v, fn):
        options = dict(score=scores.rule(fn), query_positions="end")
        return jattn.attention(q, k, v, **options, **SPLIT)

    with jax.numpy_rank_promotion("allow"):
        want = loss(lambda q, k, v, fn: dense_jax(q, k, v, score=fn)[0])
    for x, y in zip(loss(split), want, strict=True):
        assert_gradient_close(x, np.asarray(y))


def test_a_nan_reaches_the_queries_that_may_see_it_whole_or_in_part():
    q, k, v = vectors()
    k[0, 3, 1, 2], v[1, 20, 0, 4] = -np.inf, np.nan
    seen = RANDOM.random((B, 1, T, S)) < 0.5
    seen[0, 0, :, :16], seen[0, 0, 2, 3] = True, False  # blocks that are FULL, and one
    seen[1, 0, 0, 16:24], seen[1, 0, 1, 20] = True, False
    out, lse = jit(
        lambda *x: jattn.attention(*x[:3], mask=x[3], return_lse=True, **SPLIT)
    )(q, k, v, seen)
    bad = np.zeros((B, T, N), bool)
    bad[0, :, 2:4] = seen[0, 0, :, 3, None]
    bad[1, :, 0:2] = seen[1, 0, :, 20, None]
    np.testing.assert_array_equal(np.isnan(lse), bad)
    np.testing.assert_array_equal(
        np.isnan(out), np.broadcast_to(bad[..., None], out.shape)
    )


def test_an_infinite_key_that_all_see_makes_every_row_nan():
    q, k, v = vectors()
    k[0, 3, 1, 2] = -np.inf
    out = jit(lambda *x: jattn.attention(*x, **SPLIT))(q, k, v)
    assert np.isnan(out[0, :, 2:4]).all()
    assert np.isfinite(out[1]).all() and np.isfinite(out[0, :, :2]).all()


@pytest.mark.parametrize(
    "sizes, chosen",
    [
        ((1, 300), "decode"),
        ((32, 300), "decode"),
        ((33, 300), "blockwise"),
        ((1, 256), "reference"),
    ],
)
def test_few_queries_of_many_keys_are_split(sizes, chosen):
    T, S = sizes
    q = jax.ShapeDtypeStruct((2, T, 6, 8), "float32")
    k = jax.ShapeDtypeStruct((2, S, 3, 8), "float32")
    found = jattn.explain(q, k, query_positions="end", memory=False)
    assert found.implementation == chosen
    assert f"T={T}" in found.reasons["decode"] or chosen == "reference"


def test_explain_counts_the_blocks_that_are_visited():
    q, k = (jax.ShapeDtypeStruct((2, n, 6, 8), "float32") for n in (1, 1000))
    mask = masks.sliding_window(130)
    found = jattn.explain(q, k, mask=mask, query_positions="end", memory=False)
    assert found.tiles.grid == (1, 8) and found.tiles.block_sizes == (1, 128)
    assert found.tiles.live == 2
