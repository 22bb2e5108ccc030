"""The NNX module against Flax's own, and what it has beyond it."""

import functools

import chex
import flax.nnx as nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracle import assert_close, exact

import jattn
from jattn import masks, scores
from jattn.nnx import MultiHeadAttention

DIMS = chex.Dimensions(B=2, T=5, S=7, N=4, K=2, D=12)
X = exact(1, *DIMS["BTD"]).astype(np.float32)
MEMORY = exact(2, *DIMS["BSD"]).astype(np.float32)
ALLOWED = np.random.default_rng(0).random((2, 1, 5, 7)) < 0.6
ALLOWED[..., 0] = True


def make(module=MultiHeadAttention, **options):
    extra = dict(decode=False) if module is nnx.MultiHeadAttention else {}
    options = dict(num_heads=DIMS.N, in_features=DIMS.D, **options)
    return module(**options, rngs=nnx.Rngs(0), **extra)


def shapes(module):
    state = nnx.to_pure_dict(nnx.state(module, nnx.Param))
    leaves = jax.tree_util.tree_leaves_with_path(state)
    return {jax.tree_util.keystr(path): (x.shape, x.dtype) for path, x in leaves}


KINDS = [
    dict(),
    dict(use_bias=False),
    dict(normalize_qk=True),
    dict(num_kv_heads=2),
    dict(qkv_features=20, out_features=3),
    dict(in_kv_features=12, param_dtype=jnp.bfloat16),
]


@pytest.mark.parametrize("options", KINDS, ids=str)
def test_parameters_have_flaxs_paths_shapes_and_values(options):
    ours, flaxs = make(**options), make(nnx.MultiHeadAttention, **options)
    assert shapes(ours) == shapes(flaxs)
    if options.get("num_kv_heads"):
        assert ours.key.kernel.shape == (DIMS.D, 2, 3)


def loaded(**options):
    """Ours with the parameters of Flax's, all of them disturbed."""
    ours, flaxs = make(**options), make(nnx.MultiHeadAttention, **options)
    state = nnx.state(flaxs, nnx.Param)
    seeds = iter(range(100))
    state = jax.tree.map(
        lambda x: x + 0.1 * exact(next(seeds), *x.shape).astype(x.dtype), state
    )
    nnx.update(flaxs, state)
    nnx.update(ours, state)
    return ours, flaxs


def assert_same_outputs(ours, flaxs):
    np.testing.assert_allclose(ours, flaxs, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("options", [KINDS[0], *KINDS[2:5]], ids=str)
def test_flaxs_parameters_give_flaxs_outputs(options):
    ours, flaxs = loaded(**options)
    assert_same_outputs(ours(X), flaxs(X))
    assert_same_outputs(ours(X, MEMORY, 2 * MEMORY), flaxs(X, MEMORY, 2 * MEMORY))
    assert_same_outputs(
        ours(X, MEMORY, mask=ALLOWED), flaxs(X, MEMORY, mask=jnp.asarray(ALLOWED))
    )
    causal = ours(X, is_causal=True)
    assert_same_outputs(causal, flaxs(X, is_causal=True))
    assert_same_outputs(causal, ours(X, mask=masks.causal()))


def test_is_causal_and_an_array_mask_are_both_obeyed():
    ours, _ = loaded()
    allowed = ALLOWED[..., :5]
    both = allowed & np.tril(np.ones((5, 5), bool))
    assert_same_outputs(ours(X, mask=allowed, is_causal=True), ours(X, mask=both))
    rule = masks.lengths(np.array([2, 4]))
    got = ours(X, mask=rule, is_causal=True)
    assert_same_outputs(got, ours(X, mask=masks.causal() & rule))


def test_head_sizes_are_free_and_set_the_scale():
    layer = make(head_dim=5, v_head_dim=7, num_kv_heads=2, out_features=3)
    chex.assert_shape(layer.query.kernel, (DIMS.D, 4, 5))
    chex.assert_shape(layer.key.kernel, (DIMS.D, 2, 5))
    chex.assert_shape(layer.value.kernel, (DIMS.D, 2, 7))
    chex.assert_shape(layer.out.kernel, (4, 7, 3))
    q, k, v = layer.project(X, MEMORY)
    chex.assert_shape((q, k, v), [(2, 5, 4, 5), (2, 7, 2, 5), (2, 7, 2, 7)])
    out = layer(X, MEMORY)
    chex.assert_shape(out, (2, 5, 3))
    assert_close(layer(X, MEMORY, scale=5**-0.5), np.asarray(out))


def test_every_call_argument_reaches_attention():
    layer = make()
    q, k, v = layer.project(X, MEMORY)
    options = dict(
        mask=masks.causal(),
        score=scores.soft_cap(0.5),
        bias=exact(5, 1, 4, 1, 7).astype(np.float32),
        scale=1.5,
        query_positions="end",
        key_positions=np.arange(7)[::-1],
    )
    want = layer.out(jattn.attention(q, k, v, **options))
    assert_same_outputs(layer(X, MEMORY, **options), want)
    others = [
        layer(X, MEMORY, **{n: x for n, x in options.items() if n != left_out})
        for left_out in ("mask", "score", "bias", "scale", "key_positions")
    ]
    assert not any(np.allclose(other, want, atol=1e-4) for other in others)


def test_with_rope_only_distances_matter():
    layer = make(rope=functools.partial(jattn.rotary, base=100.0), head_dim=6)
    start = layer(X, mask=masks.causal())
    at = np.arange(5) + 37
    moved = layer(X, mask=masks.causal(), query_positions=at, key_positions=at)
    np.testing.assert_allclose(moved, start, atol=2e-5)
    reversed_ = layer(X, key_positions=np.arange(5)[::-1])
    assert not np.allclose(reversed_, layer(X), atol=1e-3)
    last = layer(X[:, -2:], X, mask=masks.causal(), query_positions="end")
    assert_close(last, np.asarray(start[:, -2:]))


@pytest.mark.parametrize("kind", ["layer", "rms"])
def test_qk_norm_makes_the_size_of_inputs_irrelevant(kind):
    layer = make(qk_norm=kind, use_bias=False)
    q, k, v = layer.project(X)
    larger = layer.project(3 * X)
    assert_close(larger[0], np.asarray(q), jnp.bfloat16)
    assert_close(larger[1], np.asarray(k), jnp.bfloat16)
    assert_close(larger[2], 3 * np.asarray(v))
    np.testing.assert_allclose(np.mean(np.square(q), -1), 1, atol=1e-2)
    assert np.allclose(np.mean(q, -1), 0, atol=1e-5) == (kind == "layer")
    names = [name for name in shapes(layer) if "_ln" in name]
    assert names == ["['key_ln']['scale']", "['query_ln']['scale']"]


def test_normalize_qk_is_qk_norm_layer():
    left, right = make(normalize_qk=True), make(qk_norm="layer")
    assert_same_outputs(left(X), right(X))


def test_dtype_of_the_computation_and_of_the_parameters():
    layer = make(dtype=jnp.bfloat16)
    assert layer(X).dtype == jnp.bfloat16
    assert layer.query.kernel.dtype == jnp.float32
    want = make()(X)
    assert_close(layer(X), np.asarray(want), jnp.bfloat16)


def test_a_module_under_jit_grad_and_vmap():
    layer = make(num_kv_heads=2)

    def loss(layer, x):
        return jnp.sum(layer(x, mask=masks.causal()) ** 2)

    value, gradients = nnx.jit(nnx.value_and_grad(loss))(layer, X)
    assert np.isfinite(value)
    flat = nnx.to_pure_dict(gradients)
    assert np.abs(flat["query"]["kernel"]).max() > 0
    per_row = nnx.vmap(lambda layer, x: layer(x), in_axes=(None, 0))(layer, X)
    assert_close(per_row, np.asarray(layer(X)))
    h = 1e-2
    kernel = layer.out.kernel[...]
    layer.out.kernel[...] = kernel.at[0, 0, 0].add(h)
    above = loss(layer, X)
    layer.out.kernel[...] = kernel.at[0, 0, 0].add(-h)
    slope = (above - loss(layer, X)) / (2 * h)
    np.testing.assert_allclose(flat["out"]["kernel"][0, 0, 0], slope, rtol=1e-2)


def test_two_of_a_kind_have_one_structure():
    first, second = (nnx.graphdef(make(qk_norm="rms")) for _ in range(2))
    assert first == second and hash(first) == hash(second)


def test_initial_kernels_keep_unit_variance():
    layer = MultiHeadAttention(8, 256, 512, rngs=nnx.Rngs(0))
    for part in (layer.query, layer.key, layer.value):
        np.testing.assert_allclose(np.std(part.kernel[...]), 1 / 16, rtol=0.02)
    np.testing.assert_allclose(np.std(layer.out.kernel[...]), 512**-0.5, rtol=0.02)
    x = np.random.default_rng(0).standard_normal((1, 64, 256)).astype(np.float32)
    q, k, _ = layer.project(x)
    for variance in (np.var(q), np.var(k), np.var(jattn.scaled_scores(q, k))):
        np.testing.assert_allclose(variance, 1, rtol=0.1)


def test_initialisers_are_those_given():
    ones, zeros = nnx.initializers.ones_init(), nnx.initializers.zeros_init()
    layer = make(kernel_init=ones, out_kernel_init=zeros, bias_init=ones)
    assert (layer.query.kernel[...] == 1).all() and (layer.value.bias[...] == 1).all()
    assert (layer.out.kernel[...] == 0).all() and (layer.out.bias[...] == 1).all()
    layer = make(kernel_init=ones, out_bias_init=ones)
    assert (layer.out.kernel[...] == 1).all() and (layer.out.bias[...] == 1).all()


@pytest.mark.parametrize(
    "options, text",
    [
        (dict(qkv_features=13), "num_heads must divide.*num_heads=4, qkv_features=13"),
        (dict(head_dim=5, qkv_features=21), "qkv_features=21, num_heads=4, head_dim=5"),
        (dict(num_kv_heads=3), "multiple of num_kv_heads.*num_kv_heads=3"),
        (dict(num_kv_heads=0), "num_kv_heads must be 1 or more.*num_kv_heads=0"),
        (dict(head_dim=0), "head_dim must be 1 or more"),
        (dict(qk_norm="lyaer"), "Did you mean 'layer'"),
        (dict(qk_norm="rms", normalize_qk=True), "qk_norm='rms'.*Give one"),
    ],
    ids=str,
)
def test_sizes_that_contradict_are_refused(options, text):
    with pytest.raises(ValueError, match="(?s)^MultiHeadAttention: .*" + text):
        make(**options)


def test_no_heads_are_refused():
    with pytest.raises(ValueError, match="num_heads=0"):
        MultiHeadAttention(0, 12, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="num_heads"):
        MultiHeadAttention(0, 12, head_dim=3, rngs=nnx.Rngs(0))


@pytest.mark.parametrize(
    "call, text",
    [
        (lambda layer: layer(X[..., :11]), r"inputs_q must be \(\*B, T, 12\).*11\)"),
        (lambda layer: layer(X, X[..., :11]), r"inputs_k must be \(\*B, S, 12\)"),
        (lambda layer: layer(X, X, X[..., :11]), r"inputs_v must be \(\*B, S, 12\)"),
        (lambda layer: layer(X[0, 0]), r"inputs_q.*\(12,\)"),
        (lambda layer: layer(X, MEMORY, is_causal=True), "T=5, S=7"),
        (lambda layer: layer(X, mask=ALLOWED[0, 0]), r"\(5, 7\)"),
        (lambda layer: layer(X, MEMORY[:1]), r"leading axes \*B"),
    ],
)
def test_inputs_that_do_not_fit_are_refused(call, text):
    with pytest.raises(ValueError, match="(?s)" + text):
        call(make())


def test_rope_does_not_guess_where_fewer_queries_stand():
    layer = jattn.nnx.MultiHeadAttention(2, 8, rope=jattn.rotary, rngs=nnx.Rngs(0))
    x = jnp.asarray(np.random.default_rng(0).normal(size=(1, 7, 8)), jnp.float32)
    with pytest.raises(ValueError, match="T != S"):
        layer(x[:, -1:], x)
    last = layer(x[:, -1:], x, query_positions="end")
    np.testing.assert_allclose(last, layer(x)[:, -1:], rtol=2e-5, atol=2e-6)


def test_keys_of_self_attention_stand_where_its_queries_do():
    layer = jattn.nnx.MultiHeadAttention(2, 8, rope=jattn.rotary, rngs=nnx.Rngs(0))
    x = jnp.asarray(np.random.default_rng(0).normal(size=(1, 7, 8)), jnp.float32)
    moved = layer(x, query_positions=jnp.arange(7)[None] + 100)
    np.testing.assert_allclose(moved, layer(x), rtol=2e-5, atol=2e-5)


def test_project_gives_what_the_call_attends_with():
    layer = jattn.nnx.MultiHeadAttention(2, 8, rope=jattn.rotary, rngs=nnx.Rngs(0))
    x = jnp.asarray(np.random.default_rng(0).normal(size=(1, 7, 8)), jnp.float32)
    places = jnp.arange(7)[None] * 3
    q, k, v = layer.project(x, query_positions=places)
    out = layer.out(jattn.attention(q, k, v))
    np.testing.assert_array_equal(layer(x, query_positions=places), out)


def test_rope_places_more_queries_than_keys_as_attention_does():
    layer = jattn.nnx.MultiHeadAttention(2, 8, rope=jattn.rotary, rngs=nnx.Rngs(0))
    x = jnp.asarray(np.random.default_rng(0).normal(size=(1, 5, 8)), jnp.float32)
    for place, positions in (("start", np.arange(5)), ("end", np.arange(-3, 2))):
        named, given = (
            layer(x, x[:, :2], query_positions=p, mask=masks.sliding_window(9, 9))
            for p in (place, positions)
        )
        np.testing.assert_array_equal(named, given)
