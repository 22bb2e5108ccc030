"""The NNX module token by token: with its own cache as Flax, and with a KVCache."""

import chex
import flax.nnx as nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracle import assert_close, assert_same_bits, exact, jit

import jattn
from jattn import masks
from jattn.nnx import MultiHeadAttention

pytestmark = pytest.mark.usefixtures("quick_compiler")

DIMS = chex.Dimensions(B=2, T=5, S=7, N=4, K=2, D=12)
X = exact(1, *DIMS["BTD"]).astype(np.float32)
SHAPE = DIMS["BSD"]
CHUNKS = [(0, 1), (1, 2), (2, 5)]
HIDDEN = np.ones((2, 1, 1, 7), np.float32)  # a mask as Flax makes them
HIDDEN[0, ..., 1] = 0


def make(module=MultiHeadAttention, shape=SHAPE, cache_dtype=jnp.float32, **options):
    options = dict(num_kv_heads=DIMS.K, normalize_qk=True) | options
    layer = module(DIMS.N, DIMS.D, rngs=nnx.Rngs(0), **options)
    layer.init_cache(shape, cache_dtype)
    return layer


def steps(layer, chunks, **options):
    """Outputs of a module that decodes chunk by chunk, compiled once per length."""
    graph, state = nnx.split(layer)

    def step(state, x):
        layer = nnx.merge(graph, state)
        return layer(x, decode=True, **options), nnx.state(layer)

    step, outs = jit(step), []
    for start, stop in chunks:
        out, state = step(state, X[:, start:stop])
        outs.append(out)
    nnx.update(layer, state)
    return np.concatenate(outs, axis=1)


def full(layer, **options):
    """Outputs of all tokens at once."""
    graph, state = nnx.split(layer)
    call = jit(lambda state: nnx.merge(graph, state)(X, is_causal=True, **options))
    return np.asarray(call(state))


ONE_BY_ONE = [(t, t + 1) for t in range(DIMS.T)]


def test_token_by_token_is_as_in_flax_with_the_variables_of_flax():
    ours, flaxs = make(), make(nnx.MultiHeadAttention)
    got, want = (steps(layer, ONE_BY_ONE, mask=HIDDEN) for layer in (ours, flaxs))
    np.testing.assert_allclose(got, want, rtol=2e-6, atol=2e-6)
    states = [nnx.to_pure_dict(nnx.state(m, nnx.Cache)) for m in (ours, flaxs)]
    assert set(states[0]) == {"cached_key", "cached_value", "cache_index"}
    chex.assert_trees_all_close(*states, rtol=2e-6, atol=2e-6)
    chex.assert_trees_all_equal_shapes_and_dtypes(*states)


@pytest.mark.parametrize(
    "options",
    [
        dict(rope=jattn.rotary, head_dim=4, v_head_dim=5, sinks=True),
        pytest.param(dict(qk_norm="l2", normalize_qk=False), marks=pytest.mark.slow),
    ],
    ids=["rope", "l2"],
)
def test_any_number_of_tokens_at_a_time_is_the_full_pass(options):
    layer = make(**options)
    window = masks.sliding_window(2)
    # With and without the flag a token sees what comes before it.
    got = steps(layer, CHUNKS, mask=window, is_causal=True)
    assert layer.cache_index[...] == DIMS.T
    assert_close(got, full(layer, mask=window))


def test_weights_and_statistics_while_decoding_are_of_all_slots():
    layer = make(cache_dtype=jnp.bfloat16, dtype=jnp.bfloat16)
    graph, state = nnx.split(layer)

    def call(state):
        capture = nnx.capture(nnx.merge(graph, state), nnx.Intermediate)
        asked = dict(sow_weights=True, stats=True)
        _, found = capture(X[:, :2], decode=True, **asked)
        return [found[f"attention_{x}"].get_value() for x in ("weights", "stats")]

    (weights,), (stats,) = jit(call)(state)
    chex.assert_shape(weights, DIMS["BN"] + (2, DIMS.S))
    assert weights.dtype == jnp.bfloat16 and stats.lse.dtype == jnp.float32
    assert (np.asarray(weights)[..., 0, 1:] == 0).all()
    np.testing.assert_allclose(stats.max_prob[:, 0], 1, rtol=1e-6)


def test_an_attention_fn_decodes_too():
    def outputs(mask, **options):
        return steps(make(**options), [(0, 2), (2, 4)], mask=mask, is_causal=True)

    window = masks.sliding_window(1)
    for attention_fn, mask in (
        (nnx.dot_product_attention, HIDDEN),
        (jattn.attention_fn, window),
    ):
        got, want = outputs(mask, attention_fn=attention_fn), outputs(mask)
        np.testing.assert_allclose(got, want, rtol=2e-6, atol=2e-6)


def test_rules_need_an_attention_fn_that_knows_them():
    layer = make(attention_fn=nnx.dot_product_attention)
    with pytest.raises(TypeError, match="mask must be an array, but got causal()"):
        steps(layer, ONE_BY_ONE, mask=masks.causal())


def test_a_token_without_a_slot_is_an_error_or_nan_and_overwrites_nothing():
    layer = make(shape=(2, 4, 12), normalize_qk=False)
    steps(layer, [(0, 3)])
    kept = np.asarray(layer.cached_key[...])
    with pytest.raises(ValueError, match="4 slots, 2 tokens, index=3"):
        layer(X[:, 3:], decode=True)
    with pytest.raises(ValueError, match="4 slots, 5 tokens"):
        steps(layer, [(0, 5)])
    got = steps(layer, [(3, 5), (0, 2)])
    assert_close(got[:, 0], full(layer)[:, 3])
    assert np.isnan(got[:, 1:]).all()
    assert_same_bits(layer.cached_key[...][:, :3], kept[:, :3])
    assert layer.cache_index[...] == 7


def test_the_cache_has_a_dtype_of_its_own():
    for cached, computed in ((jnp.bfloat16, None), (jnp.float32, jnp.bfloat16)):
        layer = make(cache_dtype=cached, dtype=computed)
        out = steps(layer, [(0, 3)])
        assert out.dtype == (computed or jnp.float32)
        assert layer.cached_value[...].dtype == cached
        assert_close(out, full(make())[:, :3], jnp.bfloat16)


def test_what_unwritten_slots_hold_does_not_matter():
    layer, other = make(), make()
    for cached in (other.cached_key, other.cached_value):
        cached[...] = jnp.full_like(cached[...], jnp.nan)
    assert_same_bits(steps(other, CHUNKS[2:]), steps(layer, CHUNKS[2:]))


def test_a_view_switches_decoding_on_and_makes_the_cache():
    layer = MultiHeadAttention(DIMS.N, DIMS.D, rngs=nnx.Rngs(0))
    view = nnx.view(layer, decode=True, batch_size=2, max_length=7)
    assert layer.cached_key is None and layer.decode is None
    chex.assert_shape(view.cached_key, (2, 7, DIMS.N, 3))
    assert view.cache_index[...] == 0
    layer.set_view(batch_size=(2, 3), max_length=7)
    chex.assert_shape(layer.cached_value, (2, 3, 7, DIMS.N, 3))
    with pytest.raises(TypeError, match="given together.*max_length=None"):
        layer.set_view(batch_size=2)
    with pytest.raises(ValueError, match="decode=True needs a cache"):
        MultiHeadAttention(DIMS.N, DIMS.D, decode=True, rngs=nnx.Rngs(0))(X)


def fresh(layer, window=None):
    sizes = layer.num_kv_heads, layer.head_dim
    return jattn.KVCache.init(
        2, 9, *sizes, v_head_dim=layer.v_head_dim, window=window, dtype=jnp.float32
    )


def test_a_kv_cache_in_chunks_of_unequal_lengths_is_the_full_pass():
    layer = make(rope=jattn.rotary, head_dim=4, v_head_dim=5)
    graph, state = nnx.split(layer)

    @jit
    def call(cache, x, lengths):
        capture = nnx.capture(nnx.merge(graph, state), nnx.Intermediate)
        options = dict(cache=cache, lengths=lengths, is_causal=True, stats=True)
        (out, cache), found = capture(x, **options)
        return out, cache, found["attention_stats"].get_value()[0].max_prob

    first, cache, most = call(fresh(layer), X[:, :3], np.array([3, 1]))
    np.testing.assert_array_equal(cache.length, [3, 1])
    np.testing.assert_allclose(most[:, 0], 1, rtol=1e-6)
    rest = np.stack([X[0, 3:], X[1, 1:3]])
    rest = np.pad(rest, ((0, 0), (0, 1), (0, 0)))
    second, cache, _ = call(cache, rest, np.array([2, 2]))
    want = full(layer)
    assert_close(first[0], want[0, :3])
    assert_close(first[1, :1], want[1, :1])
    assert_close(second[0, :2], want[0, 3:])
    assert_close(second[1, :2], want[1, 1:3])


def test_positions_of_a_kv_cache_turn_and_are_stored():
    layer = make(rope=jattn.rotary, head_dim=4)
    at = np.stack([np.arange(5) + 4, np.array([0, 0, 1, 2, 3])])
    options = dict(mask=masks.causal() & masks.sliding_window(2))

    def call(layer):
        want = layer(X, query_positions=at, **options)
        cache, outs = fresh(layer), []
        for start, stop in ((0, 2), (2, 5)):
            piece = slice(start, stop)
            out, cache = layer(
                X[:, piece],
                X[:, piece],
                cache=cache,
                query_positions=at[:, piece],
                **options,
            )
            outs.append(out)
        return want, jnp.concatenate(outs, axis=1), cache.positions

    graph, state = nnx.split(layer)
    want, got, stored = jit(lambda state: call(nnx.merge(graph, state)))(state)
    np.testing.assert_array_equal(stored[:, :5], at)
    # In the first chunk of row 1 both tokens stand at 0, and see each other there too.
    assert_close(got, np.asarray(want))


@pytest.mark.parametrize(
    "options, text",
    [
        (dict(decode=True, cache=True), "with decode=True.*got cache"),
        (dict(decode=True, query_positions=np.arange(5)), "got query_positions"),
        (dict(decode=True, input_positions=np.arange(5)), "got input_positions"),
        (dict(decode=True, inputs_k=X[:, :2]), r"of the T tokens of inputs_q.*2, 12\)"),
        (dict(cache=True, key_positions=np.arange(5)), "with a cache.*key_positions"),
        (dict(cache=True, sow_weights=True), "with a cache.*got sow_weights"),
        (dict(cache=True, query_positions="end"), "must be integers, but got 'end'"),
        (dict(cache=True, inputs_k=X[:, :2]), "of the T tokens of inputs_q"),
        (dict(cache=dict()), "cache must be a jattn.KVCache, but got dict"),
        (dict(decode=True, inputs_q=X[:1]), r"\(1, 5, 2, 3\).*for this batch"),
    ],
    ids=str,
)
def test_options_that_do_not_go_together_are_refused(options, text):
    layer = make()
    inputs = options.pop("inputs_q", X)
    if options.get("cache") is True:
        options = options | dict(cache=fresh(layer))
    kind = TypeError if "got dict" in text else ValueError
    with pytest.raises(kind, match="(?s)^MultiHeadAttention: .*" + text):
        jax.eval_shape(lambda: layer(inputs, **options))


def test_a_kv_cache_takes_the_default_function_only():
    layer = make(attention_fn=nnx.dot_product_attention)
    with pytest.raises(ValueError, match="with an attention_fn.*got cache"):
        layer(X, cache=fresh(layer))


def test_a_cache_of_other_tokens_is_refused():
    layer = make()
    for shape in (12, (12,), (2, 7, 5)):
        with pytest.raises(ValueError, match="init_cache: input_shape must be .*=12"):
            layer.init_cache(shape)
    with pytest.raises(ValueError, match="the number of slots must be an int"):
        layer.init_cache((2, 0, 12))
    with pytest.raises(TypeError, match="dtype must be floating point"):
        layer.init_cache((2, 7, 12), jnp.int32)
