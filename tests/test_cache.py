"""Attention to a cache is attention to the tokens that were appended."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify
from oracle import (
    assert_close,
    assert_gradient_close,
    assert_same_bits,
    dense_attention,
    dense_jax,
    jit,
    normal,
)

import jattn
from jattn import KVCache, choice, masks
from jattn.layer_cache import place_after

B, H, D, TOKENS, SLOTS = 2, 5, 7, 64, 67
HEADS = {"MHA": (3, 3), "GQA": (6, 3), "MQA": (3, 1)}
i, j = np.arange(TOKENS)[:, None], np.arange(TOKENS)[None, :]


def vectors(num_heads=6, num_kv_heads=3, length=TOKENS, dtype=np.float32):
    shapes = (num_heads, H), (num_kv_heads, H), (num_kv_heads, D)
    return [normal(n, B, length, *x, dtype=dtype) for n, x in enumerate(shapes)]


def make(capacity=SLOTS, num_kv_heads=3, **kwargs):
    how = dict(v_head_dim=D, dtype="float32") | kwargs
    return KVCache.init(B, capacity, num_kv_heads, H, **how)


def documents(*rows):
    """Ids and positions of packed documents of these lengths, after padding."""
    ids, positions = np.zeros((2, B, TOKENS), np.int32)
    for row, lengths in enumerate(rows):
        start = TOKENS - sum(lengths)
        for document, length in enumerate(lengths, 1):
            ids[row, start : start + length] = document
            positions[row, start : start + length] = np.arange(length)
            start += length
    return ids, positions


ONE = np.ones((B, TOKENS), np.int32), np.broadcast_to(j, (B, TOKENS)).astype(np.int32)
# (how far a window reaches, how long a prefix is seen by all, ids and positions)
KINDS = {
    "causal": (1000, 0, *ONE),
    "window": (8, 0, *ONE),
    "prefix": (8, 4, *ONE),
    "packed": (1000, 0, *documents([20, 30], [64])),
}


@jit
def step(cache, q, k, v, left, prefix, ids, all_ids, positions):
    mask = masks.causal() & (masks.sliding_window(left) | masks.prefix(prefix))
    mask &= masks.segments(ids, all_ids)
    cache = cache.append(k, v, positions=positions)
    return cache, cache.attend(q, mask=mask)


def check_chunks(heads, chunk):
    q, k, v = vectors(*HEADS[heads])
    for kind, (left, prefix, ids, positions) in KINDS.items():
        all_ids = np.pad(ids, ((0, 0), (0, SLOTS - TOKENS)))
        cache, outs = make(num_kv_heads=HEADS[heads][1]), []
        for at in range(0, TOKENS - chunk + 1, chunk):
            x = [a[:, at : at + chunk] for a in (q, k, v, ids, positions)]
            data = np.int32(left), np.int32(prefix), x[3], all_ids, x[4]
            cache, out = step(cache, *x[:3], *data)
            outs.append(out)
        far = positions[:, :, None] - positions[:, None, :]
        near = (far <= left) | (positions[:, None, :] < prefix)
        same = (ids[:, :, None] == ids[:, None, :]) & (ids[:, :, None] > 0)
        allowed = ((far >= 0) & near & same)[:, None]
        got = np.concatenate(outs, axis=1)
        want = dense_attention(q, k, v, allowed).out[:, : got.shape[1]]
        assert got.shape[1] > TOKENS - chunk
        assert_close(got, want, name=f"{kind}, {chunk} at once")


@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_chunks_give_what_all_tokens_at_once_give(chunk):
    check_chunks("GQA", chunk)


@pytest.mark.slow
@pytest.mark.parametrize("chunk", [1, 7, 64])
@pytest.mark.parametrize("heads", ["MHA", "MQA"])
def test_chunks_give_the_same_for_any_number_of_heads(heads, chunk):
    check_chunks(heads, chunk)


@functools.partial(jit, static_argnames="options")
def decode(cache, q, k, v, lengths=None, options=()):
    cache = cache.append(k, v, lengths)
    return cache, cache.attend(q, mask=masks.causal(), **dict(options))


def test_rows_of_different_lengths_with_nan_in_slots_that_are_not_written():
    q, k, v = vectors()
    stale = dataclasses.replace(
        make(),
        **{
            name: jnp.full_like(getattr(make(), name), jnp.nan)
            for name in ("_key_t", "_value")
        },
    )
    lengths = np.array([[3, 7], [0, 2], [7, 1]], np.int32)
    cache, done = stale, np.zeros(B, int)
    for counts in lengths:
        parts = [np.full_like(x[:, :7], np.nan) for x in (q, k, v)]
        for row, n in enumerate(counts):
            for part, x in zip(parts, (q, k, v), strict=True):
                part[row, :n] = x[row, done[row] : done[row] + n]
        cache, out = decode(cache, *parts, counts)
        for row, n in enumerate(counts):
            end = done[row] + n
            seen = (x[row : row + 1, :end] for x in (q, k, v))
            want = dense_attention(*seen, (j <= i)[:end, :end]).out
            assert_close(out[row, :n], want[0, done[row] :])
            assert (np.asarray(out[row, n:]) == 0).all()
        done += counts
    np.testing.assert_array_equal(cache.length, done)
    assert not cache.overflowed.any()


@pytest.mark.parametrize("chunk", [1, 3])
def test_a_rolling_window_sees_the_last_keys_through_several_wraps(chunk):
    q, k, v = vectors(length=TOKENS)
    cache, outs = make(7, window=5), []
    for at in range(0, TOKENS - chunk + 1, chunk):
        now = (x[:, at : at + chunk] for x in (q, k, v))
        cache, out = decode(cache, *now)
        outs.append(out)
    got = np.concatenate(outs, axis=1)
    want = dense_attention(q, k, v, (j <= i) & (i - j < 5)).out
    assert_close(got, want[:, : got.shape[1]])
    held = np.sort(np.asarray(cache.positions), axis=1)
    np.testing.assert_array_equal(held[0], np.arange(got.shape[1])[-7:])


def test_the_cache_has_a_dtype_of_its_own():
    q, k, v = vectors(length=7)
    cache, out = decode(make(dtype="bfloat16"), q, k, v)
    k, v = (np.asarray(jnp.asarray(x, jnp.bfloat16), np.float32) for x in (k, v))
    assert cache._key_t.dtype == jnp.bfloat16 and out.dtype == jnp.float32
    assert_close(out, dense_attention(q, k, v, (j <= i)[:7, :7]).out)


def test_the_last_queries_alone_get_what_they_get_among_all():
    q, k, v = vectors()
    cache, out = decode(make(), *(x[:, :7] for x in (q, k, v)))
    last = jit(lambda cache, q: cache.attend(q, mask=masks.causal()))
    assert_close(last(cache, q[:, 5:7]), out[:, 5:])


@pytest.mark.slow
def test_every_algorithm_reads_the_cache():
    q, k, v = vectors(length=7)
    results = [
        decode(make(), q, k, v, options=(("implementation", name), ("stats", True)))[1]
        for name in ("decode", "blockwise", "reference")
    ]
    for other in results[1:]:
        for x, y in zip(*map(jax.tree.leaves, (results[0], other)), strict=True):
            assert_close(x, y)


def test_many_queries_stand_in_several_tiles(monkeypatch):
    monkeypatch.setattr(choice, "MANY", 4)  # two queries of two heads
    q, k, v = vectors(length=7)

    def prefill(cache, *x, **options):
        cache = cache.append(*x[1:]).append(*x[1:])
        return cache.attend(x[0], mask=masks.causal(), stats=True, **options)

    got = jit(prefill)(make(), q, k, v)
    want = jit(functools.partial(prefill, implementation="reference"))(make(), q, k, v)
    for x, y in zip(*map(jax.tree.leaves, (got, want)), strict=True):
        assert_close(x, y)


def test_steps_drop_what_one_call_for_all_tokens_drops():
    how = dict(dropout_rate=0.4, dropout_rng=jax.random.key(3))
    q, k, v = vectors(length=9)

    @jit
    def step(cache, q, k, v):
        cache = cache.append(k, v)
        return cache, cache.attend(q, mask=masks.causal(), **how)

    cache, outs = make(5, window=3), []
    for at in (0, 3, 6):
        cache, out = step(cache, *(x[:, at : at + 3] for x in (q, k, v)))
        outs.append(out)
    mask = masks.causal() & masks.sliding_window(2)
    want = jattn.attention(q, k, v, mask=mask, implementation="reference", **how)
    assert_close(np.concatenate(outs, axis=1), want)


def test_overflow_is_an_error_outside_jit_and_nan_and_a_flag_inside():
    q, k, v = vectors(length=7)
    cache, before = decode(make(9), q, k, v, np.array([3, 7], np.int32))
    with pytest.raises(ValueError, match=r"every token.* length=7, t=3 in row=1, with"):
        cache.append(k, v, [6, 3])
    for lengths in ([2, 8], [2, -1]):
        wrong, out = decode(make(9), q, k, v, np.array(lengths, np.int32))
        assert wrong.overflowed.tolist() == [False, True]
        assert np.isnan(out[1]).all() and not np.isnan(out[0]).any()
    cache, out = decode(cache, q, k, v, np.array([1, 3], np.int32))
    assert cache.overflowed.tolist() == [False, True]
    assert np.isnan(out[1]).all() and not np.isnan(out[0]).any()
    assert not np.isnan(before).any()
    for name in ("_key_t", "_value"):
        assert np.isfinite(getattr(cache, name)).all()
    assert_same_bits(cache._key_t[1, :, :, :7], np.moveaxis(k[1], 0, -1))
    cache, out = decode(cache, q, k, v, np.array([0, 0], np.int32))
    assert np.isnan(out[1]).all(), "from then on"


def test_checkify_catches_what_is_wrong_and_nothing_else():
    errors = checkify.user_checks | checkify.index_checks
    checked = jit(checkify.checkify(KVCache.append, errors=errors))
    _, k, v = vectors(length=7)
    full, ragged, wrong = np.array([[7, 7], [0, 3], [0, 8]], np.int32)
    error, cache = checked(make(9), k, v, full)
    assert error.get() is None
    assert "more tokens than slots" in checked(cache, k, v, full)[0].get()
    assert checked(make(9), k, v, ragged)[0].get() is None
    assert "lengths are not from 0" in checked(make(9), k, v, wrong)[0].get()
    one = KVCache.init(1, 9, 3, H, v_head_dim=D, dtype="float32")
    assert checked(one, k[:1, :1], v[:1, :1])[0].get() is None


@pytest.mark.slow
def test_gradients_reach_keys_of_earlier_appends():
    q, k, v = vectors(length=6)
    weigh = normal(9, B, 3, 6, D, dtype=np.float32)

    def cached(k, v):
        cache = make(9).append(k[:, :3], v[:, :3]).append(k[:, 3:], v[:, 3:])
        return (cache.attend(q[:, 3:], mask=masks.causal()) * weigh).sum()

    def whole(k, v):
        out, _ = dense_jax(q, k, v, (j <= i)[:6, :6])
        return (out[:, 3:] * weigh).sum()

    with jax.numpy_rank_promotion("allow"):
        want = jax.grad(whole, (0, 1))(k, v)
    for got, expected in zip(jit(jax.grad(cached, (0, 1)))(k, v), want, strict=True):
        assert_gradient_close(got, np.asarray(expected))


def test_a_step_copies_no_cache():
    def one(cache, q, k):
        cache = cache.append(k, k)
        return cache, cache.attend(q)

    temp = []
    for slots in (512, 4096):
        # XLA treats the write of a single slot in its own way.
        make_it = functools.partial(KVCache.init, 1, slots, 3, H, dtype="float32")
        q, k = (jax.ShapeDtypeStruct((1, 1, n, H), "float32") for n in (6, 3))
        lowered = jit(one, donate_argnums=0).lower(jax.eval_shape(make_it), q, k)
        memory = lowered.compile().memory_analysis()
        assert memory.alias_size_in_bytes >= 2 * 4 * slots * 3 * H
        temp.append(memory.temp_size_in_bytes)
    assert temp[1] - temp[0] < 1e5, "430 kB of keys and values"


def refused(call, *words):
    with pytest.raises((TypeError, ValueError)) as caught:
        call()
    for word in words:
        assert word in str(caught.value)


def test_bad_input_is_refused_in_letters():
    q, k, v = vectors(length=7)
    cache = make()
    filled = cache.append(k, v)
    refused(lambda: cache.attend(q), "KVCache.attend", "T=7, t=0", "Append")
    refused(lambda: filled.attend(np.repeat(q, 2, 1)), "T=14, t=7")
    refused(lambda: cache.append(k[:1], v[:1]), "(B, t, K, H)", "(1, 7, 3, 5)")
    refused(lambda: cache.append(k[:, :, :2], v), "(2, t, 3, 5)", "(2, 7, 2, 5)")
    refused(lambda: cache.append(k, k), "value must be (B, t, K, D)")
    refused(lambda: cache.append(k, v[:, :6]), "same number t")
    refused(lambda: cache.append(k.astype(int), v), "floating point")
    refused(lambda: cache.append(k, v, np.array([8, 0])), "from 0 to t", "0 to 8")
    refused(lambda: cache.append(k, v, np.array([1, -1])), "-1 to 1")
    refused(lambda: cache.append(k, v, np.array([1])), "lengths must be (B,)")
    refused(lambda: cache.append(k, v, positions=np.zeros((B, 6), int)), "(2, 7)")
    refused(lambda: make(7, window=5).append(k, v), "window + t - 1", "at most 3")
    refused(lambda: make(0), "capacity must be", "0")
    refused(lambda: make(7, window=0), "window must be")
    refused(lambda: make(7, window=8), "window must not exceed")
    refused(lambda: make(dtype="int8"), "dtype must be floating point")
    refused(lambda: filled.attend(q[:, :, :5]), "N=5", "K=3")
    refused(lambda: filled.attend(q, key_positions=j), "Give positions to append")
    refused(lambda: filled.attend(q, maks=None), "those of attention", "'maks'")
    refused(lambda: filled.attend(q, query_positions="end"), "'end'. Leave them out")
    place = filled.length[:, None]
    refused(lambda: place_after("f", place, q[:1, :, 0], None), "B=2", "(1, 7, 5)")
    small = np.ones((1, 1, 7, 7), bool)
    refused(
        lambda: filled.attend(q, mask=small), "mask must be", "(1, 1, 7, 7)", "S is"
    )
    rolling, counted = make(14, window=7).append(k, v), masks.lengths(np.array([3, 4]))
    counted = masks.causal() & ~counted
    refused(lambda: rolling.attend(q, mask=counted), "lengths counts", "masks.prefix")
    refused(lambda: make(dtype=None), "dtype must be floating point", "None")
    refused(lambda: make(dtype="floot"), "dtype must be floating point", "'floot'")
    refused(lambda: make(dtype="float64"), "without jax_enable_x64")
    refused(lambda: filled.attend(q, empty_rows="mean"), "empty_rows")


def test_a_cache_is_the_carry_of_a_scan_and_a_stack_of_layers():
    q, k, v = vectors(length=8)

    def body(caches, now):
        caches = jax.vmap(lambda cache: cache.append(now[1], now[2]))(caches)
        out = jax.vmap(lambda cache: cache.attend(now[0]))(caches)
        return caches, out

    layers = jax.tree.map(lambda x: jnp.stack([x, x]), make(9))
    steps = [np.moveaxis(x, 1, 0)[:, :, None] for x in (q, k, v)]
    caches, outs = jit(lambda c, x: jax.lax.scan(body, c, x))(layers, steps)
    want = dense_attention(q, k, v, (j <= i)[:8, :8]).out
    for layer in (0, 1):
        assert_close(np.moveaxis(outs[:, layer, :, 0], 0, 1), want)
    assert (np.asarray(caches.length) == 8).all()
    assert jattn.KVCache is KVCache


def test_a_compiled_function_may_close_over_a_cache_and_lengths():
    x = normal(0, 2, 3, 1, 4, dtype=np.float32)
    lengths = jnp.array([3, 1])
    cache = KVCache.init(2, 8, 1, 4, dtype="float32").append(x, x, lengths)
    want = cache.attend(x), cache.append(x, x, lengths).attend(x)
    got = jit(lambda x: (cache.attend(x), cache.append(x, x, lengths).attend(x)))(x)
    jax.tree.map(lambda a, b: assert_close(a, b, jnp.float32), got, want)
    with pytest.raises(ValueError, match="lengths must be from 0 to t, but got 1 to 3"):
        jit(lambda x: cache.append(x, x, lengths).length)(x[:, :2])
