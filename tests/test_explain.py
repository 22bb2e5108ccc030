"""What explain says is what attention does."""

import functools
import inspect
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jattn
from jattn import choice, execute, explain, masks, scores

T, S, N, K, H, D = 23, 29, 4, 2, 5, 3
BLOCKS = (5, 7)


def shape(*sizes, dtype="float32"):
    return jax.ShapeDtypeStruct(sizes, dtype)


VECTORS = shape(2, T, N, H), shape(2, S, K, H), shape(2, S, K, D)
tiles_of = functools.partial(explain, *VECTORS, memory=False, block_sizes=BLOCKS)


def starts(length, block):
    return [min(i, length - block) for i in range(0, length, block)]


def verdicts(allowed):
    """Of every tile, counted pair by pair: allowed (T, S), as attention cuts it."""
    for i in starts(allowed.shape[0], BLOCKS[0]):
        for j in starts(allowed.shape[1], BLOCKS[1]):
            yield allowed[i : i + BLOCKS[0], j : j + BLOCKS[1]]


def test_static_tiles_are_those_of_the_pairs():
    found = tiles_of(mask=masks.causal(), query_positions="end")
    allowed = np.arange(S) <= np.arange(T)[:, None] + S - T
    tiles = list(verdicts(allowed))
    live = sum(tile.any() for tile in tiles)
    # In the last column the keys that it shares are forbidden, so none is FULL there.
    full = sum(tile.all() for n, tile in enumerate(tiles) if n % 5 != 4)
    got = found.tiles
    assert (got.block_sizes, got.grid, got.total) == (BLOCKS, (5, 5), 25)
    assert (got.full, got.live, got.partial) == (full, live, live - full)
    assert (got.empty, got.per_head) == (25 - live, (live, live))
    assert 0 < full < live < 25
    assert found.computed == pytest.approx(live * 35 / (T * S))
    assert found.flops[0] == live * 35 * 2 * N * 2 * (H + D)
    assert found.flops[1] == live * 35 * 2 * N * (8 * H + 6 * D)


def test_tiles_of_data_are_counted_for_all_and_for_each():
    ids = np.stack(
        [np.repeat([1, 2, 3], [8, 8, 13]), np.repeat([4, 5, 0], [3, 15, 11])]
    )
    left = np.array([2, 11, 5, 29])
    mask = masks.segments(ids[:, :T], ids) & masks.sliding_window(left)
    found = tiles_of(mask=mask, query_positions="start").tiles
    near = np.arange(T)[:, None] - np.arange(S)
    alone, union = [], np.zeros(25, bool)
    for row in ids:
        for bound in left:
            allowed = (
                (row[:T, None] == row) & (row != 0) & (near <= bound) & (near >= 0)
            )
            live = np.array([tile.any() for tile in verdicts(allowed)])
            alone.append(live.sum())
            union |= live
    assert found.per_head == (min(alone), max(alone))
    assert min(alone) < max(alone) < union.sum() == found.live < 25
    keys = dict(query_positions=np.arange(T), key_positions=np.arange(S)[::-1] - 9)
    found = tiles_of(mask=masks.causal(), **keys).tiles
    allowed = keys["key_positions"] <= np.arange(T)[:, None]
    assert found.live == sum(tile.any() for tile in verdicts(allowed))


def test_blocks_are_those_after_halving():
    x = shape(2048, 1, 2)
    tiles = []

    def seen(s, q_pos, k_pos):
        tiles.append(s.shape)
        return s

    window = dict(mask=masks.sliding_window(64), score=scores.rule(seen))
    jax.eval_shape(lambda x: jattn.attention(x, x, x, **window), x)
    found = explain(x, x, memory=False, **window).tiles
    assert {found.block_sizes} == set(tiles) == {(128, 128)}
    assert explain(x, x, memory=False, mask=masks.causal()).tiles.grid == (8, 8)


def test_what_depends_on_shapes_is_known_at_run_time_only():
    mask = jax.eval_shape(masks.segments, shape(2, T, dtype="int32"))
    x = shape(2, T, N, H)
    found = explain(x, x, mask=mask, memory=False, block_sizes=BLOCKS)
    assert found.tiles.grid == (5, 4)
    unknown = (found.tiles.live, found.tiles.empty, found.computed, found.flops)
    assert unknown == (None,) * 4
    assert str(found).count("known only at run time") == 2
    positions = shape(2, T, dtype="int32")
    found = tiles_of(mask=masks.causal(), query_positions=positions)
    assert found.tiles.partial is None
    scale, bias = shape(N), shape(1, N, T, S)
    known = tiles_of(mask=masks.lengths(3), scale=scale, bias=bias).tiles
    assert (known.live, known.total) == (5, 25)


def test_under_jit_what_is_known_is_counted():
    found = []

    def call(x, ids):
        for given in (ids, np.ones((2, T), int)):
            found.append(
                explain(
                    x, x, mask=masks.segments(given), memory=False, block_sizes=BLOCKS
                )
            )
        return x

    jax.eval_shape(call, shape(2, T, N, H), shape(2, T, dtype="int32"))
    assert [x.tiles.live for x in found] == [None, 20]


def test_every_algorithm_has_a_reason():
    assert set(choice.ACCEPTS) == set(execute.ALGORITHMS)
    small, large = shape(256, 1, 2), shape(257, 1, 2)
    cases = [
        (small, {}, "reference", "blockwise", "reference comes first"),
        (large, {}, "blockwise", "reference", "T=257 and S=257 are more than one tile"),
        (small, dict(block_sizes=(4, 4)), "blockwise", "reference", "block sizes"),
        (
            large,
            dict(implementation="reference"),
            "reference",
            "blockwise",
            "not asked",
        ),
    ]
    for x, options, chosen, other, reason in cases:
        found = explain(x, x, memory=False, **options)
        assert found.implementation == chosen
        assert set(found.reasons) == set(execute.ALGORITHMS)
        assert reason in found.reasons[other]
        assert (found.tiles is None) == (chosen == "reference")


def test_memory_is_what_the_compiler_says():
    x, k = shape(37, 2, 3), shape(37, 1, 3)
    rng = jax.eval_shape(lambda: jax.random.key(0))
    options = dict(mask=masks.causal(), implementation="reference", dropout_rate=0.1)
    found = explain(x, k, **options, dropout_rng=rng, scale=0.5)

    def attend(x, k, rng):
        return jattn.attention(x, k, k, **options, dropout_rng=rng, scale=0.5)

    compiled = jax.jit(attend).lower(x, k, rng).compile()
    want = compiled.memory_analysis().temp_size_in_bytes
    forward, both = found.temp_bytes
    assert want / 2 <= forward <= 2 * want  # the scale is data, and lse comes out too
    assert both > forward > 37**2 * 4
    assert (found.matrix_bytes, found.out_bytes) == (2 * 37**2 * 4, 37 * 6 * 4)


@pytest.mark.slow
def test_temporary_memory_is_linear():
    def temp_bytes(length):
        x = shape(length, 2, 8)
        return explain(x, x, mask=masks.causal(), block_sizes=(64, 64)).temp_bytes

    (forward, both), (forward_2, both_2) = map(temp_bytes, (1024, 2048))
    assert forward_2 <= 2.2 * forward and both_2 <= 2.2 * both


def test_another_backend_need_not_be_at_hand():
    x = jax.ShapeDtypeStruct((1, 4096, 2, 8), "float32")
    found = explain(x, x, backend="tpu")
    assert (found.backend, found.devices, found.temp_bytes) == ("tpu", "not here", None)
    assert found.tiles.block_sizes == (512, 512)
    assert explain(x, x, memory=False).tiles.block_sizes == (256, 256)
    with pytest.raises(ValueError, match="memory needs the compiler .*'tpu'.* 'cpu'"):
        explain(x, x, backend="tpu", memory=True)
    with pytest.raises(ValueError, match="explain: backend must be .* 'cuda'"):
        explain(x, x, backend="cuda")


@pytest.mark.parametrize("sizes", [(0, 2, 29), (23, 2, 0), (23, 0, 29)])
def test_without_a_pair_nothing_is_computed(sizes):
    t, n, s = sizes
    query, key = shape(t, n, H, dtype="bfloat16"), shape(s, n, H, dtype="bfloat16")
    for options in ({}, dict(implementation="blockwise")):
        found = explain(query, key, mask=masks.nothing(), memory=False, **options)
        assert (found.tiles, found.computed, found.flops) == (None, 0.0, (0, 0))
        assert (found.matrix_bytes, found.out_bytes) == (0, t * n * H * 2)
    x = jnp.zeros(query.shape)
    keys = jnp.zeros(key.shape)
    assert jattn.attention(x, keys, keys).shape == query.shape


def test_a_million_tokens_are_explained_by_their_shapes():
    x = shape(2**20, 1, 64, dtype="bfloat16")
    blocks = dict(block_sizes=(2048, 2048), memory=False)
    found = explain(x, x, mask=masks.causal(), **blocks)
    assert (found.tiles.full, found.tiles.partial) == (511 * 256, 512)
    assert found.matrix_bytes == 4 * 2**40
    assert "4.4 TB" in str(found)


def test_it_reads_in_one_screen():
    text = str(tiles_of(mask=masks.lengths(np.array([3, 29]))))
    lines = text.splitlines()
    assert len(lines) <= 14 and max(map(len, lines)) <= 100
    assert "blockwise   chosen: it takes" in text
    assert (
        "10 FULL" not in text
        and "one head of one batch row needs 5 to 25 of 25" in text
    )


WRONG = [
    (dict(implementation="flash"), ValueError, "implementation must be one of"),
    (dict(implementation="reference", block_sizes=(4, 4)), ValueError, "no tiles"),
    (dict(block_sizes=(0, 4)), ValueError, "block_sizes must be two positive ints"),
    (dict(return_lse=True, stats=True), ValueError, "return_lse and stats"),
    (dict(empty_rows="one"), ValueError, "empty_rows must be one of"),
    (dict(dropout_rate=0.1), ValueError, "dropout needs dropout_rng"),
    (dict(mask=masks.causal()), ValueError, "with T != S"),
    (dict(scale=np.ones(3)), ValueError, "scale must be a number or"),
    (dict(mask=shape(T, S, dtype=bool)), ValueError, "mask must be"),
    (dict(bias=shape(1, 1, T, S, dtype="int32")), TypeError, "bias must be floating"),
    (
        dict(colour="red"),
        TypeError,
        "options must be those of attention, but got .'colour'.: ",
    ),
]


@pytest.mark.parametrize("options, kind, text", WRONG)
def test_it_refuses_what_attention_refuses(options, kind, text):
    with pytest.raises(kind, match=f"^explain: .*{text}"):
        explain(*VECTORS, memory=False, **options)
    if "colour" in options:
        return
    arrays = {
        name: jnp.zeros(x.shape, x.dtype) if isinstance(x, jax.ShapeDtypeStruct) else x
        for name, x in options.items()
    }
    vectors = [jnp.zeros(x.shape) for x in VECTORS]
    with pytest.raises(kind, match=f"^attention: .*{re.escape(text)}"):
        jattn.attention(*vectors, **arrays)


def test_it_takes_every_option_of_attention():
    names = set(inspect.signature(jattn.attention).parameters)
    options = dict.fromkeys(names - {"query", "key", "value"})
    defaults = inspect.signature(jattn.attention).parameters
    options = {name: defaults[name].default for name in options}
    assert explain(*VECTORS, memory=False, **options) == explain(*VECTORS, memory=False)
