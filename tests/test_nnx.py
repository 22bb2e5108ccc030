"""The NNX module against Flax's own, and what it has beyond it."""

import functools
import inspect

import chex
import flax.nnx as nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracle import (
    assert_close,
    assert_gradient_close,
    dense_attention,
    exact,
    jit,
)

import jattn
from jattn import masks, scores
from jattn.core.dropout import Shared
from jattn.nnx import MultiHeadAttention

pytestmark = pytest.mark.usefixtures("quick_compiler")

DIMS = chex.Dimensions(B=2, T=5, S=7, N=4, K=2, D=12)
X = exact(1, *DIMS["BTD"]).astype(np.float32)
MEMORY = exact(2, *DIMS["BSD"]).astype(np.float32)
ALLOWED = np.random.default_rng(0).random((2, 1, 5, 7)) < 0.6
ALLOWED[..., 0] = True


def make(module=MultiHeadAttention, **options):
    extra = dict(decode=False) if module is nnx.MultiHeadAttention else {}
    extra |= dict(num_heads=DIMS.N, in_features=DIMS.D, rngs=nnx.Rngs(0))
    return module(**(extra | options))


def pure(module):
    """Everything in a module that is not static, keys of `jax.random` as numbers."""
    state = nnx.to_pure_dict(nnx.state(module))

    def plain(x):
        is_key = jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)
        return jax.random.key_data(x) if is_key else x

    return jax.tree.map(plain, state)


def run(call, *modules):
    """The results of call(*modules), compiled."""
    graph, state = nnx.split(modules)
    return jit(lambda state: call(*nnx.merge(graph, state)))(state)


def disturbed(module):
    """All of its parameters changed, since biases start at 0 and scales at 1."""
    seeds = iter(range(100))
    state = jax.tree.map(
        lambda x: x + 0.1 * exact(next(seeds), *x.shape).astype(x.dtype),
        nnx.state(module, nnx.Param),
    )
    nnx.update(module, state)
    return module


def assert_same_outputs(ours, flaxs):
    np.testing.assert_allclose(ours, flaxs, rtol=2e-6, atol=2e-6)


KINDS = {
    "plain": dict(),
    "no bias": dict(use_bias=False),
    "norm": dict(normalize_qk=True),
    "grouped": dict(num_kv_heads=2),
    "widths": dict(qkv_features=20, out_features=3),
    "narrow": dict(in_kv_features=12, param_dtype=jnp.bfloat16, dropout_rate=0.5),
}
KINDS["all"] = KINDS["norm"] | KINDS["grouped"] | KINDS["widths"]
KINDS["all"] |= dict(dropout_rate=0.5)
EACH_KIND = pytest.mark.parametrize(
    "options",
    [
        pytest.param(options, id=name, marks=[] if name == "all" else pytest.mark.slow)
        for name, options in KINDS.items()
    ],
)


@EACH_KIND
def test_one_seed_gives_the_parameters_of_flax_bit_by_bit(options):
    modules = MultiHeadAttention, nnx.MultiHeadAttention
    ours, flaxs = jit(lambda: [pure(make(module, **options)) for module in modules])()
    chex.assert_trees_all_equal(ours, flaxs)
    chex.assert_trees_all_equal_shapes_and_dtypes(ours, flaxs)


@EACH_KIND
def test_flaxs_parameters_give_flaxs_outputs(options):
    options = dict(deterministic=True) | options
    ours = make(**options)
    flaxs = disturbed(make(nnx.MultiHeadAttention, **options))
    nnx.update(ours, nnx.state(flaxs, nnx.Param))
    numbers = nnx.make_causal_mask(jnp.ones((2, 5)))
    padding = nnx.make_attention_mask(jnp.ones((2, 5)), X[..., 0] > 0, jnp.multiply)
    padding = padding.at[..., 0].set(1.0)  # no row without a key

    def call(layer):
        return [
            layer(X, MEMORY, 2 * MEMORY, mask=jnp.asarray(ALLOWED)),
            layer(X, mask=nnx.combine_masks(numbers, padding)),
            layer(X, mask=ALLOWED[..., :5], is_causal=True),
            layer(X[0, :3]),
        ]

    got, want = run(lambda *layers: [call(layer) for layer in layers], ours, flaxs)
    jax.tree.map(assert_same_outputs, got, want)


def test_checkpoints_load_both_ways_as_pure_dicts():
    ours, flaxs = (
        make(normalize_qk=True),
        make(nnx.MultiHeadAttention, normalize_qk=True),
    )
    for source, target in ((ours, flaxs), (flaxs, ours)):
        saved = nnx.to_pure_dict(nnx.state(disturbed(source), nnx.Param))
        state = nnx.state(target, nnx.Param)
        nnx.replace_by_pure_dict(state, saved)
        nnx.update(target, state)
        chex.assert_trees_all_equal(pure(source), pure(target))


@pytest.mark.parametrize("name", ["__init__", "__call__", "init_cache", "set_view"])
def test_every_argument_of_flax_is_there_with_its_default(name):
    flaxs = inspect.signature(getattr(nnx.MultiHeadAttention, name)).parameters
    ours = inspect.signature(getattr(MultiHeadAttention, name)).parameters
    for argument, flax in flaxs.items():
        assert ours[argument].kind == flax.kind, argument
        if argument not in ("kernel_init", "bias_init", "attention_fn"):  # functions
            assert ours[argument].default == flax.default, argument
    positional = [x for x, p in flaxs.items() if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert list(ours)[: len(positional)] == positional


def test_options_of_the_projections_are_passed_on():
    def promote(arrays, *, dtype=None):
        return arrays

    ones, zeros = nnx.initializers.ones_init(), nnx.initializers.zeros_init()
    options = dict(
        dtype=jnp.bfloat16,
        param_dtype=jnp.float16,
        precision="highest",
        kernel_init=ones,
        out_kernel_init=zeros,
        bias_init=ones,
        out_bias_init=zeros,
        normalize_qk=True,
        qkv_promote_dtype=functools.partial(promote),
        out_promote_dtype=functools.partial(promote),
        ln_promote_dtype=functools.partial(promote),
        qkv_dot_general=jax.lax.dot_general,
        out_dot_general=jnp.dot,
        qkv_dot_general_cls=dict,
        out_dot_general_cls=list,
        **{
            f"{name}_metadata": {"tag": name}
            for name in (
                *("kernel", "bias", "out_kernel", "out_bias"),
                *("query_ln_scale", "key_ln_scale"),
            )
        },
    )
    for left_out in ((), ("out_kernel_init", "out_bias_init"), ("out_bias_metadata",)):
        given = {name: x for name, x in options.items() if name not in left_out}
        ours, flaxs = make(**given), make(nnx.MultiHeadAttention, **given)
        chex.assert_trees_all_equal(pure(ours), pure(flaxs))
        for name in ("query", "key", "value", "out", "query_ln", "key_ln"):
            pair = [nnx.graphdef(getattr(layer, name)) for layer in (ours, flaxs)]
            assert pair[0] == pair[1], (name, left_out)


def calls_of(constructor, module, *inputs, rngs=None, **call):
    """The keywords with which a module calls its attention_fn."""
    seen = []

    def attention_fn(query, key, value, **given):
        seen.append(given | dict(shapes=[x.shape for x in (query, key, value)]))
        return jnp.zeros((*query.shape[:-1], value.shape[-1]))

    def run():
        layer = make(module, attention_fn=attention_fn, **constructor)
        source = None if rngs is None else nnx.Rngs(dropout=rngs)
        return layer(*inputs, rngs=source, **call)

    jax.eval_shape(run)
    (given,) = seen
    return given


@pytest.mark.parametrize(
    "constructor, call",
    [
        (dict(), dict(mask=ALLOWED)),
        (dict(dropout_rate=0.3, deterministic=False), dict(rngs=7)),
        (dict(dropout_rate=0.3, dtype=jnp.float32), dict(deterministic=True)),
        (dict(broadcast_dropout=False, precision="high"), dict(is_causal=True)),
    ],
    ids=["plain", "dropout", "deterministic", "causal"],
)
def test_an_attention_fn_is_called_as_flax_calls_it(constructor, call):
    memory = () if "is_causal" in call else (MEMORY,)
    ours, flaxs = (
        calls_of(constructor, module, X, *memory, **call)
        for module in (MultiHeadAttention, nnx.MultiHeadAttention)
    )
    assert ours.keys() == flaxs.keys()
    rngs = [given.pop("dropout_rng") for given in (ours, flaxs)]
    assert [x is None for x in rngs] == ["rngs" not in call] * 2
    assert ours.pop("mask") is call.get("mask") is flaxs.pop("mask")
    assert ours == flaxs


def test_an_attention_fn_gets_what_is_beyond_flax_where_it_is_given():
    rule, places = scores.soft_cap(5.0), np.arange(5) + 3
    beyond = dict(score=rule, query_positions=places, scale=2.0)
    given = calls_of(dict(sinks=True), MultiHeadAttention, X, **beyond)
    assert given["score"] is rule and given["scale"] == 2.0
    assert given["key_positions"] is given["query_positions"] is places
    assert given["sinks"].shape == (DIMS.N,) and "bias" not in given
    options = dict(rope=jattn.rotary, head_dim=4)
    given = calls_of(options, MultiHeadAttention, X, input_positions=places)
    assert given["input_positions"] is places
    assert not {"query_positions", "key_positions"} & given.keys()


def test_input_positions_are_those_of_the_queries():
    places = np.arange(5)[::-1]
    ours = make(rope=jattn.rotary, head_dim=4)
    named = make(rope=jattn.rotary, head_dim=4, attention_fn=jattn.attention_fn)

    def call(*layers):
        outs = [m(X, input_positions=places, is_causal=True) for m in layers]
        return [*outs, layers[0](X, query_positions=places, is_causal=True)]

    first, second, want = run(call, ours, named)
    assert_same_outputs(first, want)
    assert_same_outputs(second, want)


def test_is_causal_and_a_mask_are_both_obeyed():
    allowed = ALLOWED[..., :5]
    both = allowed & np.tril(np.ones((5, 5), bool))
    rule = masks.lengths(np.array([2, 4]))
    pairs = run(
        lambda layer: [
            (layer(X, mask=allowed, is_causal=True), layer(X, mask=both)),
            (
                layer(X, mask=rule, is_causal=True),
                layer(X, mask=masks.causal() & rule),
            ),
        ],
        make(),
    )
    for got, want in pairs:
        assert_same_outputs(got, want)


def test_head_sizes_are_free_and_set_the_scale():
    layer = make(head_dim=5, v_head_dim=7, num_kv_heads=2, out_features=3)
    chex.assert_shape(layer.query.kernel, (DIMS.D, 4, 5))
    chex.assert_shape(layer.key.kernel, (DIMS.D, 2, 5))
    chex.assert_shape(layer.value.kernel, (DIMS.D, 2, 7))
    chex.assert_shape(layer.out.kernel, (4, 7, 3))

    def call(layer):
        heads = layer.project(X, MEMORY)
        return heads, layer(X, MEMORY), layer(X, MEMORY, scale=5**-0.5)

    heads, out, scaled = run(call, layer)
    chex.assert_shape(heads, [(2, 5, 4, 5), (2, 7, 2, 5), (2, 7, 2, 7)])
    want = np.einsum("btnd,ndo->bto", dense_attention(*heads).out, layer.out.kernel)
    assert_close(out, want)
    assert_close(scaled, want)


def test_every_call_argument_reaches_attention():
    options = dict(
        mask=masks.causal(),
        score=scores.soft_cap(0.5),
        bias=exact(5, 1, 4, 1, 7).astype(np.float32),
        scale=1.5,
        query_positions="end",
        key_positions=np.arange(7)[::-1],
    )

    def call(layer):
        q, k, v = layer.project(X, MEMORY)
        want = layer.out(jattn.attention(q, k, v, **options))
        others = [
            layer(X, MEMORY, **{n: x for n, x in options.items() if n != left_out})
            for left_out in ("mask", "score", "bias", "scale", "key_positions")
        ]
        return layer(X, MEMORY, **options), want, others

    got, want, others = run(call, make())
    assert_same_outputs(got, want)
    assert not any(np.allclose(other, want, atol=1e-4) for other in others)


def test_with_rope_only_distances_matter():
    at = np.arange(5)
    causal = dict(mask=masks.causal())

    def call(layer):
        places = dict(query_positions=3 * at[None])
        q, k, v = layer.project(X, **places)
        return dict(
            start=layer(X, **causal),
            moved=layer(X, query_positions=at + 37, **causal),
            named=layer(X, X, query_positions=at + 37, **causal),
            last=layer(X[:, -2:], X, query_positions="end", **causal),
            apart=layer(X, **places),
            projected=layer.out(jattn.attention(q, k, v)),
        )

    rope = functools.partial(jattn.rotary, base=100.0)
    out = run(call, make(rope=rope, head_dim=6))
    np.testing.assert_allclose(out["moved"], out["start"], atol=2e-5)
    assert_same_outputs(out["named"], out["moved"])
    assert_close(out["last"], np.asarray(out["start"][:, -2:]))
    assert_same_outputs(out["apart"], out["projected"])
    with pytest.raises(ValueError, match="T != S"):
        jax.eval_shape(lambda: make(rope=rope, head_dim=6)(X[:, -1:], X))


@pytest.mark.slow
def test_rope_places_more_queries_than_keys_as_attention_does():
    layer = make(rope=jattn.rotary, head_dim=6)
    for place, positions in (("start", np.arange(5)), ("end", np.arange(-3, 2))):
        named, given = (
            layer(X, X[:, :2], query_positions=p, mask=masks.sliding_window(9, 9))
            for p in (place, positions)
        )
        np.testing.assert_array_equal(named, given)


@pytest.mark.parametrize("kind", ["layer", "rms", "l2"])
def test_qk_norm_makes_the_size_of_inputs_irrelevant(kind):
    layer = make(qk_norm=kind, use_bias=False)
    (q, k, v), larger = run(lambda m: (m.project(X), m.project(3 * X)), layer)
    assert_close(larger[0], np.asarray(q), jnp.bfloat16)
    assert_close(larger[1], np.asarray(k), jnp.bfloat16)
    assert_close(larger[2], 3 * np.asarray(v))
    lengths = np.mean(np.square(q), -1) ** 0.5 * np.mean(np.square(k), -1) ** 0.5
    np.testing.assert_allclose(
        lengths * (3 if kind == "l2" else 1), 3 if kind == "l2" else 1, atol=2e-2
    )
    assert np.allclose(np.mean(q, -1), 0, atol=1e-5) == (kind == "layer")


def test_scores_of_unit_vectors_are_cosines_times_a_scale_for_each_head():
    layer = make(qk_norm="l2", num_kv_heads=2, sinks=True)
    np.testing.assert_allclose(layer.qk_scale[...], 3**0.5, rtol=1e-6)
    np.testing.assert_array_equal(layer.sinks[...], np.zeros(4))

    def call(layer):
        heads = layer.project(X)
        weights = jattn.attention_weights(*heads[:2], sinks=layer.sinks[...])
        raw = layer.query(X), layer.key(X)
        return raw, heads, jattn.scaled_scores(*heads[:2]), weights, layer(X)

    (q, k), heads, got, weights, out = run(call, disturbed(layer))
    cosines = np.einsum("btnh,bsnh->bnts", q, np.repeat(k, 2, -2))
    lengths = [np.linalg.norm(x, axis=-1) for x in (q, np.repeat(k, 2, -2))]
    cosines /= np.einsum("btn,bsn->bnts", *lengths)
    assert_close(got, cosines * layer.qk_scale[...][None, :, None, None])
    dense = dense_attention(*heads, sinks=layer.sinks[...])
    assert_close(weights, dense.weights)
    want = np.einsum("btnh,nho->bto", dense.out, layer.out.kernel)
    assert_close(out - layer.out.bias[...][None, None], want)


def test_normalize_qk_is_qk_norm_layer():
    left, right = make(normalize_qk=True), make(qk_norm="layer")
    assert nnx.graphdef(left) == nnx.graphdef(right)
    chex.assert_trees_all_equal(pure(left), pure(right))


def test_dropout_has_the_pattern_of_attention_and_a_key_of_the_modules_own():
    layer = make(dropout_rate=0.4, deterministic=False, rngs=nnx.Rngs(3, dropout=5))
    key = nnx.Rngs(dropout=7).dropout()

    def call(layer):
        heads = layer.project(X)

        def want(rng):
            options = dict(dropout_rate=0.4, dropout_rng=rng)
            return layer.out(jattn.attention(*heads, **options))

        count = layer.rngs.count[...]
        outs = [
            (layer(X, rngs=nnx.Rngs(dropout=7)), want(Shared(key))),
            (layer(X, rngs=nnx.Rngs(dropout=7).dropout), want(Shared(key))),
        ]
        own = layer(X), layer(X)
        drawn = layer.rngs.count[...] - count
        layer.broadcast_dropout = False
        outs += [(layer(X, rngs=nnx.Rngs(dropout=7)), want(key))]
        return outs, own, drawn

    outs, (first, second), drawn = run(call, layer)
    for got, want in outs:
        assert_same_outputs(got, want)
    assert not np.allclose(outs[0][0], outs[2][0], atol=1e-3)
    assert not np.allclose(first, second, atol=1e-3)
    assert drawn == 2


def test_deterministic_is_that_of_the_call_then_of_the_module_then_an_error():
    layer = make(dropout_rate=0.4)
    with pytest.raises(ValueError, match="dropout_rate=0.4 and deterministic=None"):
        layer(X)
    plain = make()(X)
    assert_same_outputs(layer(X, deterministic=True), plain)
    layer.eval()
    assert_same_outputs(layer(X), plain)
    dropped = layer(X, deterministic=False)
    assert not np.allclose(dropped, plain, atol=1e-3)
    layer.train()
    assert not np.allclose(layer(X), plain, atol=1e-3)
    assert_same_outputs(nnx.view(layer, deterministic=True)(X), plain)
    keyless = make(dropout_rate=0.4, keep_rngs=False, deterministic=False)
    assert keyless.rngs is None
    with pytest.raises(ValueError, match="keep_rngs=False.*rngs=nnx.Rngs"):
        keyless(X)
    with pytest.raises(TypeError, match="rngs must be nnx.Rngs or nnx.RngStream"):
        keyless(X, rngs=jax.random.key(0))
    assert_same_outputs(keyless(X, deterministic=True), plain)


def test_weights_and_statistics_are_sown():
    def call(layer):
        sown = nnx.capture(layer, nnx.Intermediate)
        options = dict(mask=ALLOWED)
        out, found = sown(X, MEMORY, sow_weights=True, stats=True, **options)
        plain, nothing = sown(X, MEMORY, **options)
        assert set(found) == {"attention_weights", "attention_stats"} and not nothing
        (weights,), (stats,) = (found[name].get_value() for name in sorted(found)[::-1])
        return out, plain, weights, stats, layer.project(X, MEMORY)

    layer = make(num_kv_heads=2, sinks=True)
    out, plain, weights, stats, heads = run(call, layer)
    dense = dense_attention(*heads, ALLOWED, sinks=np.zeros(4))
    assert weights.dtype == jnp.float32
    assert_close(weights, dense.weights)
    assert isinstance(stats, jattn.Stats)
    assert_close(stats.lse, dense.lse)
    assert_same_outputs(out, plain)


def test_dtype_of_the_computation_and_of_the_parameters():
    narrow, mixed = make(dtype=jnp.bfloat16), make(param_dtype=jnp.bfloat16)
    assert narrow.query.kernel.dtype == jnp.float32

    def call(narrow, mixed, plain):
        q, k, v = mixed.project(X.astype(jnp.bfloat16), MEMORY)
        assert q.dtype == k.dtype == v.dtype == jnp.float32
        return narrow(X), plain(X)

    out, want = run(call, narrow, mixed, make())
    assert out.dtype == jnp.bfloat16
    assert_close(out, np.asarray(want), jnp.bfloat16)


def test_gradients_are_those_of_flax_under_jit_and_vmap():
    def call(layer):
        gradient = nnx.grad(lambda layer: jnp.sum(layer(X, is_causal=True) ** 2))
        return nnx.to_pure_dict(gradient(layer))

    def both(ours, flaxs):
        rows = nnx.vmap(lambda layer, x: layer(x), in_axes=(None, 0))(ours, X)
        return call(ours), call(flaxs), rows, ours(X)

    options = dict(num_kv_heads=2, normalize_qk=True)
    layers = make(**options), make(nnx.MultiHeadAttention, **options)
    ours, flaxs, rows, out = run(both, *layers)
    jax.tree.map(assert_gradient_close, ours, flaxs)
    assert_close(rows, np.asarray(out))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_layers_under_remat_and_scan_are_the_layers_one_by_one(dtype):
    @nnx.split_rngs(splits=3)
    @nnx.vmap(in_axes=0, out_axes=0)
    def stack(rngs):
        return make(rngs=rngs, dtype=dtype, dropout_rate=0.2, deterministic=False)

    layers = stack(nnx.Rngs(1, dropout=2))

    @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
    @nnx.remat
    def through(x, layer):
        return x + layer(x, mask=masks.causal()).astype(x.dtype)

    def scanned(layers):
        return jnp.sum(through(jnp.asarray(X), layers) ** 2)

    def unrolled(layers):
        x = jnp.asarray(X)
        graph, state = nnx.split(layers)
        for i in range(3):
            layer = nnx.merge(graph, jax.tree.map(lambda leaf, i=i: leaf[i], state))
            x = x + layer(x, mask=masks.causal()).astype(x.dtype)
        return jnp.sum(x**2)

    def derivative(layers, f):
        value, gradients = nnx.value_and_grad(f)(layers)
        return value, nnx.to_pure_dict(gradients)

    got, want = (
        run(functools.partial(derivative, f=f), layers) for f in (scanned, unrolled)
    )
    assert jax.tree.leaves(got[1])[0].dtype == jnp.float32
    jax.tree.map(lambda x, y: assert_gradient_close(x, y, dtype), got, want)


def test_parameters_are_sharded_by_the_names_of_their_axes():
    mesh = jax.make_mesh(
        (2, 4), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2
    )
    names = dict(
        kernel_metadata=("embed", "heads", "head_dim"),
        bias_metadata=("heads", "head_dim"),
        out_kernel_metadata=("heads", "head_dim", "embed"),
        out_bias_metadata=("embed",),
        sinks_metadata=("heads",),
        qk_scale_metadata=("heads",),
    )
    rules = (("embed", None), ("heads", "model"), ("head_dim", None))
    named = {n: dict(out_sharding=x, sharding_rules=rules) for n, x in names.items()}
    options = dict(sinks=True, qk_norm="l2")
    with jax.set_mesh(mesh):
        layer = make(**options, **named)
        specs = [
            x[...].sharding.spec
            for x in (layer.value.kernel, layer.out.kernel, layer.sinks, layer.qk_scale)
        ]
        x = jax.device_put(X, jax.NamedSharding(mesh, jax.P("data")))
        out = run(lambda layer: layer(x), layer)
    P = jax.P
    assert specs == [
        P(None, "model", None),
        P("model", None, None),
        P("model"),
        P("model"),
    ]
    assert_close(out, np.asarray(run(lambda layer: layer(X), make(**options))))


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


@pytest.mark.parametrize(
    "options, text",
    [
        (dict(qkv_features=13), "num_heads must divide.*num_heads=4, qkv_features=13"),
        (dict(head_dim=5, qkv_features=21), "qkv_features=21, num_heads=4, head_dim=5"),
        (dict(num_kv_heads=3), "multiple of num_kv_heads.*num_kv_heads=3"),
        (dict(num_kv_heads=0), "num_kv_heads must be an int, 1 or more.*got 0"),
        (dict(num_heads=0), "num_heads must be an int, 1 or more.*got 0"),
        (dict(num_heads=0, head_dim=3), "num_heads must be an int, 1 or more.*got 0"),
        (dict(head_dim=0), "head_dim must be an int, 1 or more"),
        (dict(out_features=-1), "out_features must be an int, 1 or more.*got -1"),
        (dict(qk_norm="lyaer"), "Did you mean 'layer'"),
        (dict(qk_norm="rms", normalize_qk=True), "qk_norm='rms'.*Give one"),
        (dict(dropout_rate=1.0), r"dropout_rate must be in \[0, 1\)"),
        (dict(num_heads=4.0), "num_heads must be an int"),
        (dict(rope="half"), "rope must be a function"),
        (dict(attention_fn=1), "attention_fn must be a function"),
    ],
    ids=str,
)
def test_constructors_that_contradict_are_refused(options, text):
    kind = (
        TypeError
        if "must be a function" in text or 4.0 in options.values()
        else ValueError
    )
    kind = ValueError if options == dict(head_dim=0) else kind
    with pytest.raises(kind, match="(?s)^MultiHeadAttention: .*" + text):
        make(**options)


@pytest.mark.parametrize(
    "call, text",
    [
        (lambda layer: layer(X[..., :11]), r"inputs_q must be \(\*B, T, 12\).*11\)"),
        (lambda layer: layer(X, X[..., :11]), r"inputs_k must be \(\*B, S, 12\)"),
        (lambda layer: layer(X, X, X[..., :11]), r"inputs_v must be \(\*B, S, 12\)"),
        (lambda layer: layer(X, inputs_v=X), "inputs_v .*without inputs_k"),
        (lambda layer: layer(X[0, 0]), r"inputs_q.*\(12,\)"),
        (lambda layer: layer(X, MEMORY, is_causal=True), "T=5, S=7"),
        (lambda layer: layer(X, mask=ALLOWED[0, 0]), r"\(5, 7\)"),
        (lambda layer: layer(X, MEMORY[:1]), r"leading axes \*B"),
        (lambda layer: layer(X, lengths=np.array([1, 2])), "without a cache.*lengths"),
        (
            lambda layer: layer(X, input_positions=X, key_positions=X),
            "beside input_positions.*key_positions",
        ),
    ],
)
def test_calls_that_do_not_fit_are_refused(call, text):
    with pytest.raises(ValueError, match="(?s)MultiHeadAttention: .*" + text):
        jax.eval_shape(lambda: call(make()))


@pytest.mark.parametrize(
    "call, text",
    [
        (lambda: make()([[1.0]]), "inputs_q must be an array, but got list"),
        (lambda: make()(X, [[1.0]]), "inputs_k must be an array, but got list"),
        (lambda: make()(X, is_causal="no"), "is_causal must be True or False"),
        (lambda: make(sinks=np.zeros(4)), "sinks must be True or False"),
        (lambda: MultiHeadAttention(4, 12, rngs=0), "rngs must be nnx.Rngs"),
    ],
)
def test_what_is_of_the_wrong_kind_is_refused(call, text):
    with pytest.raises(TypeError, match="^MultiHeadAttention: " + text):
        call()


def test_statistics_of_another_function_are_refused():
    layer = make(attention_fn=nnx.dot_product_attention)
    with pytest.raises(ValueError, match="with an attention_fn.*got stats"):
        layer(X, stats=True)
