"""The Linen module against Flax's own, and what it has beyond it."""

import functools
import inspect
import warnings

import chex
import flax.linen as nn
import flax.nnx as nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracle import (
    assert_close,
    assert_gradient_close,
    assert_same_bits,
    exact,
    id_of,
    jit,
)

import jattn
import jattn.nnx
from jattn import masks, scores
from jattn.linen import MultiHeadAttention, MultiHeadDotProductAttention, SelfAttention

pytestmark = pytest.mark.usefixtures("quick_compiler")

DIMS = chex.Dimensions(B=2, T=5, S=7, N=4, K=2, D=12)
X = exact(1, *DIMS["BTD"]).astype(np.float32)
MEMORY = exact(2, *DIMS["BSD"]).astype(np.float32)
RNG = jax.random.key(0)
CAUSAL = nn.make_causal_mask(X[..., 0])
VALID = np.arange(DIMS.S) < np.array([[7], [3]])
SHARED = nn.make_attention_mask(np.ones(DIMS["BT"]), VALID)

FLAXS = functools.partial(nn.MultiHeadDotProductAttention, DIMS.N)
OURS = functools.partial(MultiHeadDotProductAttention, DIMS.N)
NNX = functools.partial(jattn.nnx.MultiHeadAttention, DIMS.N, DIMS.D)


def assert_same_outputs(ours, flaxs):
    for got, want in zip(*map(jax.tree.leaves, (ours, flaxs)), strict=True):
        assert got.dtype == want.dtype
        np.testing.assert_allclose(got, want, rtol=2e-6, atol=2e-6)


def disturbed(variables):
    """With nothing in it that is 0 or 1 at first."""
    leaves, structure = jax.tree.flatten(variables)
    noise = [0.1 * exact(n, *x.shape) for n, x in enumerate(leaves)]
    leaves = [x + z.astype(x.dtype) for x, z in zip(leaves, noise, strict=True)]
    return jax.tree.unflatten(structure, leaves)


@functools.cache
def params(**options):
    """Of a module with these options, disturbed."""
    return jit(lambda: disturbed(OURS(**options).init(RNG, X)))()


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


KINDS = [
    dict(),
    dict(use_bias=False, normalize_qk=True, qkv_features=20, out_features=3),
    slow(dict(param_dtype=jnp.bfloat16, dtype=jnp.float32, precision="highest")),
]


@pytest.mark.parametrize("options", KINDS, ids=["plain", "normalised", "narrow"])
def test_initial_variables_are_flaxs_to_the_bit_and_outputs_with_them(options):
    def run(make):
        module = make(**options)
        variables = module.init(RNG, X)
        apply = functools.partial(module.apply, disturbed(variables))
        across = apply(X, MEMORY, 2 * MEMORY, mask=SHARED)
        return variables, (apply(X, mask=CAUSAL), across)

    ours, flaxs = (jit(functools.partial(run, make))() for make in (OURS, FLAXS))
    jax.tree.map(assert_same_bits, ours[0], flaxs[0])
    assert_same_outputs(ours[1], flaxs[1])


@pytest.mark.slow
def test_gradients_are_flaxs():
    def run(make, variables):
        def loss(variables, x):
            return jnp.sum(jnp.sin(make().apply(variables, x, mask=CAUSAL)))

        return jax.grad(loss, argnums=(0, 1))(variables, X)

    ours, flaxs = (
        jit(functools.partial(run, make))(params()) for make in (OURS, FLAXS)
    )
    jax.tree.map(assert_gradient_close, ours, flaxs)


def test_every_field_and_call_argument_of_flaxs_is_there_in_its_place():
    skipped = {"parent", "name", "attention_fn", "kernel_init", "bias_init"}
    flaxs = FLAXS.func.__dataclass_fields__
    ours = OURS.func.__dataclass_fields__
    fields = [name for name in flaxs if name not in ("parent", "name")]
    assert list(ours)[: len(fields)] == fields
    for name in set(fields) - skipped:
        assert ours[name].default == flaxs[name].default, name
    theirs = inspect.signature(FLAXS.func.__call__).parameters
    here = inspect.signature(OURS.func.__call__).parameters
    assert list(here)[: len(theirs)] == list(theirs)
    assert all(here[x].default == p.default for x, p in theirs.items())
    assert all(here[x].kind == p.kind for x, p in theirs.items())
    flaxs = inspect.signature(nn.SelfAttention.__call__).parameters
    ours = inspect.signature(SelfAttention.__call__).parameters
    assert list(ours)[: len(flaxs)] == list(flaxs)


def test_flaxs_other_names_are_the_same_module():
    want = OURS().apply(params(), X, mask=CAUSAL)
    assert_same_bits(MultiHeadAttention(DIMS.N).apply(params(), X, mask=CAUSAL), want)
    assert_same_bits(SelfAttention(DIMS.N).apply(params(), X, CAUSAL), want)


def flat(pure):
    """The arrays of nested parameters, by their names."""
    leaves = jax.tree_util.tree_leaves_with_path(pure)
    return {jax.tree_util.keystr(path): x for path, x in leaves}


def loaded(make, saved):
    """An NNX module with these parameters, which have its names and shapes."""
    module = nnx.eval_shape(lambda: make(rngs=nnx.Rngs(0)))
    own = flat(nnx.to_pure_dict(nnx.state(module, nnx.Param)))
    given = {name: x.shape for name, x in flat(saved).items()}
    assert {name: x.shape for name, x in own.items()} == given
    nnx.update(module, saved)
    return nnx.split(module)


@pytest.mark.parametrize("normalize_qk", [False, slow(True)])
def test_a_checkpoint_of_any_of_four_modules_fits_the_others(normalize_qk):
    options = dict(normalize_qk=normalize_qk)
    saved = params(**options)["params"]
    flaxs = functools.partial(nnx.MultiHeadAttention, DIMS.N, DIMS.D, decode=False)
    graphs = [loaded(functools.partial(x, **options), saved) for x in (flaxs, NNX)]
    for _, state in graphs:
        jax.tree.map(assert_same_bits, nnx.to_pure_dict(state), saved)

    @jit
    def run(saved, states):
        linen = [x(**options).apply(dict(params=saved), X) for x in (OURS, FLAXS)]
        graph = [x for x, _ in graphs]
        return linen + [nnx.merge(*x)(X) for x in zip(graph, states, strict=True)]

    ours, *others = run(saved, [state for _, state in graphs])
    assert_same_outputs(others, [ours] * 3)


BEYOND = [
    dict(
        rope=functools.partial(jattn.rotary, base=100.0),
        head_dim=6,
        v_head_dim=3,
        num_kv_heads=2,
        qk_norm="rms",
        sinks=True,
    ),
    slow(dict(qk_norm="l2", num_kv_heads=1)),
]
RULES = dict(
    mask=masks.sliding_window(2, 1),
    score=scores.soft_cap(0.5),
    bias=exact(5, 1, 4, 1, 7).astype(np.float32),
    scale=1.5,
    query_positions="end",
    key_positions=np.arange(7)[::-1],
)


@pytest.mark.parametrize("options", BEYOND, ids=["rms", "l2"])
def test_beyond_flax_it_is_the_nnx_module_with_the_same_parameters(options):
    saved = params(**options)
    graph, state = loaded(functools.partial(NNX, **options), saved["params"])

    def outs(call):
        causal = call(X, is_causal=True)
        moved = call(X, X, mask=masks.causal(), query_positions=np.arange(5) + 3)
        return causal, moved, call(X, MEMORY, **RULES)

    @jit
    def run(saved, state):
        ours = functools.partial(OURS(**options).apply, saved)
        return outs(ours), outs(nnx.merge(graph, state))

    ours, theirs = run(saved, state)
    assert_same_outputs(ours, theirs)
    assert_close(ours[0], np.asarray(ours[1]))


def test_initial_values_beyond_flax():
    variables = jit(lambda: OURS(sinks=True, qk_norm="l2").init(RNG, X))()
    assert_same_bits(variables["params"]["sinks"], np.zeros(4, np.float32))
    scale = np.full(4, 3**0.5, np.float32)
    assert_same_bits(variables["params"]["qk_scale"], scale)


def test_precision_is_that_of_every_product():
    module = OURS(precision="highest")
    shown = str(jax.make_jaxpr(module.apply)(params(), X))
    assert "HIGHEST" in shown and "precision=None" not in shown


def test_products_of_the_projections_are_those_given():
    asked = []

    def product(name):
        def dot_general(*args, **options):
            asked.append(name)
            return jax.lax.dot_general(*args, **options)

        return dot_general

    qkv, out = product("qkv"), product("out")
    for options in (
        dict(qkv_dot_general=qkv, out_dot_general=out),
        dict(qkv_dot_general_cls=lambda: qkv, out_dot_general_cls=lambda: out),
    ):
        jax.eval_shape(OURS(**options).apply, params(), X)
    assert asked == ["qkv", "qkv", "qkv", "out"] * 2


RATE = dict(dropout_rate=0.4)


@pytest.mark.parametrize("shared", [True, slow(False)])
def test_a_module_in_training_drops_by_the_key_that_flaxs_would_use(shared):
    options = RATE | dict(deterministic=False, broadcast_dropout=shared)

    def run(make, **given):
        module = make(**options, **given)
        streams = dict(rngs=dict(dropout=RNG))
        return (
            module.apply(params(), X, **streams),
            module.apply(params(), X, dropout_rng=RNG),
        )

    ours = jit(functools.partial(run, OURS))()
    flaxs = jit(functools.partial(run, FLAXS, attention_fn=jattn.attention_fn))()
    assert_same_outputs(ours, flaxs)
    assert not np.allclose(*ours, atol=1e-2)


def test_whether_to_drop_is_said_once_and_matters_with_a_rate_only():
    plain = OURS().apply(params(), X)
    for module, call in (
        (OURS(), dict()),
        (OURS(deterministic=True), dict(deterministic=False)),
        (OURS(**RATE), dict(deterministic=True)),
        (OURS(**RATE, deterministic=True), dict()),
    ):
        assert_same_bits(module.apply(params(), X, **call), plain)
    for make in (OURS, FLAXS):
        for module, call in (
            (make(**RATE), dict()),
            (make(**RATE, deterministic=True), dict(deterministic=True)),
        ):
            with pytest.raises(ValueError, match="deterministic"):
                module.apply(params(), X, **call)
    with pytest.raises(ValueError, match=r"dropout_rate must be in \[0, 1\)"):
        OURS(dropout_rate=1.0).apply(params(), X)


@functools.cache
def decoding(make, **options):
    """Compiled steps of a module that decodes: (cache, tokens, ...) -> (out, cache)."""
    module, kept = make(decode=True, **options), params(**options)

    @jit
    def step(cache, tokens, mask=None):
        variables = kept | dict(cache=cache)
        out, changed = module.apply(variables, tokens, mask=mask, mutable="cache")
        return out, changed["cache"]

    return step, jit(lambda: module.init(RNG, X)["cache"])()


def decoded(make, sizes, cache=None, mask=None, **options):
    step, empty = decoding(make, **options)
    cache, outs, begin = empty if cache is None else cache, [], 0
    for size in sizes:
        seen = None if mask is None else mask[:, :, begin : begin + size]
        out, cache = step(cache, X[:, begin : begin + size], seen)
        outs.append(out)
        begin += size
    return np.concatenate(outs, axis=1), cache


LEFT_OUT = np.asarray(CAUSAL) * (np.arange(5) != 1)
LEFT_OUT[:, :, 1] = CAUSAL[:, :, 1]


def test_decoding_is_flaxs_and_the_full_pass_however_many_tokens_at_a_time():
    ours, cache = decoded(OURS, [1] * 5, mask=LEFT_OUT)
    flaxs, flaxs_cache = decoded(FLAXS, [1] * 5, mask=LEFT_OUT)
    assert_same_outputs(ours, flaxs)
    assert flat(cache).keys() == flat(flaxs_cache).keys()
    jax.tree.map(assert_same_bits, cache, flaxs_cache)
    assert_close(ours, np.asarray(OURS().apply(params(), X, mask=LEFT_OUT)))
    chunked, after = decoded(OURS, [2, 3], mask=LEFT_OUT)
    assert_close(chunked, ours)
    jax.tree.map(assert_close, after, cache)


def test_slots_without_a_token_may_hold_nan_and_rules_stand_at_positions():
    options = dict(rope=jattn.rotary, head_dim=6, num_kv_heads=2)
    module, whole = OURS(decode=True, **options), OURS(**options)
    rules = dict(mask=masks.sliding_window(1, 1), score=scores.alibi())

    @jit
    def run():
        variables = disturbed(module.init(RNG, X))
        kept = dict(params=variables["params"])
        cache = jax.tree.map(lambda x: jnp.nan * x, variables["cache"])
        cache = cache | dict(cache_index=np.int32(0))
        outs = []
        for tokens in (X[:, :2], X[:, 2:]):
            step = functools.partial(module.apply, mutable="cache", **rules)
            out, changed = step(kept | dict(cache=cache), tokens)
            cache = changed["cache"]
            outs.append(out)
        want = whole.apply(kept, X, is_causal=True, **rules)
        return jnp.concatenate(outs, 1), want, cache

    got, want, cache = run()
    assert_close(got, np.asarray(want))
    chex.assert_shape(cache["cached_key"], (2, 5, 2, 6))


def test_a_token_without_a_slot_is_an_error_and_nan_where_none_can_be_raised():
    _, full = decoded(OURS, [2, 2])
    step, _ = decoding(OURS)
    out, cache = step(full, X[:, :2])
    assert np.isfinite(out[:, 0]).all() and np.isnan(out[:, 1]).all()
    jax.tree.map(
        assert_same_bits, cache["cached_key"][:, :4], full["cached_key"][:, :4]
    )
    assert np.isnan(step(cache, X[:, :2])[0]).all()
    module = OURS(decode=True)
    for filled, text in ((full, "tokens, index=4"), (None, "5 slots, 6 tokens")):
        tokens = X[:, :2] if filled else jnp.concatenate([X, X[:, :1]], 1)
        variables = params() | dict(cache=filled or decoding(OURS)[1])
        with pytest.raises(ValueError, match=f"slot for every token.*{text}"):
            module.apply(variables, tokens, mutable="cache")


def test_an_attention_fn_is_called_as_flax_calls_it():
    calls = []

    def spy(query, key, value, mask=None, dropout_rate=None, module=None, dtype=0):
        calls.append((mask is CAUSAL, dropout_rate, module is not None, dtype))
        return value

    for make in (OURS, FLAXS):
        module = make(attention_fn=spy, dtype=jnp.float32)
        out = module.apply(params(), X, mask=CAUSAL, sow_weights=True)
        chex.assert_shape(out, X.shape)
    assert calls == [(True, 0.0, True, jnp.float32)] * 2


def test_einsums_reach_an_attention_fn_that_takes_them():
    asked = []

    def einsum(letters, *arrays, **options):
        asked.append(letters)
        return jnp.einsum(letters, *arrays, **options)

    classes = dict(
        qk_attn_weights_einsum_cls=lambda: einsum,
        attn_weights_value_einsum_cls=lambda: einsum,
    )
    module = OURS(attention_fn=nn.dot_product_attention, **classes)
    assert_same_outputs(module.apply(params(), X), OURS().apply(params(), X))
    assert len(asked) == 2
    with pytest.raises(NotImplementedError, match="qk_attn_weights_einsum_cls needs"):
        OURS(**classes).apply(params(), X)


def test_an_argument_does_not_get_lost_on_the_way_to_an_attention_fn():
    def silent(query, key, value, **options):
        return value

    def known(query, key, value, mask=None, dropout_rng=None, dropout_rate=0.0):
        return value

    drop = RATE | dict(deterministic=False)
    for fn, options, call, lost in (
        (silent, {}, dict(mask=CAUSAL), "mask"),
        (silent, {}, dict(score=scores.soft_cap(1.0)), "score"),
        (silent, dict(sinks=True), {}, "sinks"),
        (silent, dict(force_fp32_for_softmax=True), {}, "force_fp32_for_softmax"),
        (silent, drop, dict(dropout_rng=RNG), "dropout_rate, dropout_rng"),
        (
            known,
            drop | dict(broadcast_dropout=False),
            dict(dropout_rng=RNG),
            "broadcas",
        ),
        (nn.dot_product_attention, {}, dict(scale=2.0), "scale"),
        (nn.dot_product_attention, {}, dict(is_causal=True), "is_causal"),
        (nn.dot_product_attention, {}, dict(query_positions="end"), "query_positions"),
    ):
        variables = params(sinks=True) if options.get("sinks") else params()
        with pytest.raises(TypeError, match=f"attention_fn must name.*got {lost}"):
            OURS(attention_fn=fn, **options).apply(variables, X, **call)
    module = OURS(attention_fn=known, precision="highest", **drop)
    chex.assert_shape(module.apply(params(), X, dropout_rng=RNG), X.shape)


@pytest.mark.parametrize("rules", [True, slow(False)])
def test_an_attention_fn_decodes_at_the_positions_of_its_tokens(rules):
    rule = scores.alibi()
    fn = functools.partial(jattn.attention_fn, score=rule)
    fn = fn if rules else nn.dot_product_attention
    out, _ = decoded(OURS, [2, 2], attention_fn=fn)
    score = dict(score=rule) if rules else {}
    want = OURS().apply(params(), X[:, :4], is_causal=True, **score)
    assert_close(out, np.asarray(want))


def test_a_cache_is_appended_to_and_returned():
    options = dict(num_kv_heads=2, rope=jattn.rotary, head_dim=6, sinks=True)
    apply = functools.partial(OURS(**options).apply, params(**options))
    starts, mask = np.array([[0], [4]]), masks.causal()
    places = starts + np.arange(5)
    cache = jattn.KVCache.init(2, 9, 2, 6, dtype=jnp.float32)

    @jit
    def run(cache):
        options = dict(mask=mask, cache=cache, query_positions=places[:, :2])
        first, cache = apply(X[:, :2], **options)
        options = dict(mask=mask, cache=cache, query_positions=places[:, 2:])
        second, cache = apply(X[:, 2:], lengths=np.array([3, 1]), **options)
        out = jnp.concatenate([first, second], 1)
        return out, cache, apply(X, mask=mask, query_positions=places)

    out, cache, want = run(cache)
    assert cache.length.tolist() == [5, 3]
    assert_close(out[0], np.asarray(want[0]))
    assert_close(out[1, :3], np.asarray(want[1, :3]))


def test_weights_and_statistics_are_sown_where_flax_sows_weights():
    def sown(make, **call):
        module = make(dtype=jnp.bfloat16)
        apply = functools.partial(module.apply, params(), X, MEMORY, mask=SHARED)
        return apply(sow_weights=True, mutable="intermediates", **call)[1]

    ours = jit(functools.partial(sown, OURS, stats=True))()["intermediates"]
    flaxs = jit(functools.partial(sown, FLAXS))()["intermediates"]
    (stats,), (got,), (want,) = (
        ours["attention_stats"],
        ours["attention_weights"],
        flaxs["attention_weights"],
    )
    assert got.shape == want.shape == DIMS["BNTS"] and got.dtype == jnp.bfloat16
    assert_close(got, np.asarray(want, np.float64), jnp.bfloat16)
    top = np.swapaxes(np.asarray(got, np.float64).max(-1), 1, 2)
    assert_close(stats.max_prob, top, jnp.bfloat16)
    assert set(flaxs) < set(ours)


def test_force_fp32_for_softmax_is_about_the_weights_that_are_sown():
    def weights(force):
        module = OURS(dtype=jnp.bfloat16, force_fp32_for_softmax=force)
        call = dict(sow_weights=True, mutable="intermediates")
        out, sown = module.apply(params(), X, **call)
        return out, sown["intermediates"]["attention_weights"][0]

    (out, wide), (same, narrow) = jit(lambda: (weights(True), weights(False)))()
    assert (wide.dtype, narrow.dtype) == (jnp.float32, jnp.bfloat16)
    assert_same_bits(out, same)


class Block(nn.Module):
    """One of a stack of layers."""

    @nn.compact
    def __call__(self, x, mask):
        return x + OURS(dtype=jnp.bfloat16, name="attention")(x, mask=mask), None


@pytest.mark.slow
def test_remat_and_scan_over_layers_and_vmap_under_grad():
    layers = nn.scan(
        nn.remat(Block),
        variable_axes=dict(params=0),
        split_rngs=dict(params=True),
        length=3,
        in_axes=nn.broadcast,
    )()
    mask = masks.causal()
    variables = jit(lambda: disturbed(layers.init(RNG, X, mask)))()
    kernel = variables["params"]["attention"]["query"]["kernel"]
    assert kernel.shape == (3, 12, 4, 3) and kernel.dtype == jnp.float32

    def stacked(variables, x):
        return layers.apply(variables, x, mask)[0]

    def looped(variables, x):
        for i in range(3):
            layer = jax.tree.map(lambda w, i=i: w[i], variables)
            x, _ = Block().apply(layer, x, mask)
        return x

    def per_row(variables, x):
        return jax.vmap(stacked, (None, 0))(variables, x)

    def passes(fn):
        def loss(variables):
            out = fn(variables, jnp.asarray(X))
            return jnp.sum(jnp.sin(out)), out

        return jit(jax.grad(loss, has_aux=True))(variables)

    got, want = passes(stacked), passes(looped)
    assert got[1].dtype == jnp.float32
    assert_close(got[1], np.asarray(want[1]), jnp.bfloat16)
    narrow = functools.partial(assert_gradient_close, dtype=jnp.bfloat16)
    jax.tree.map(lambda a, b: narrow(a, np.asarray(b)), got[0], want[0])
    assert all(np.abs(x).max() > 0 for x in jax.tree.leaves(got[0]))
    assert_close(jit(per_row)(variables, X), np.asarray(got[1]), jnp.bfloat16)


@pytest.mark.slow
def test_nn_vmap_gives_each_its_own_parameters():
    mapped = nn.vmap(
        MultiHeadDotProductAttention,
        variable_axes=dict(params=0),
        split_rngs=dict(params=True),
    )(DIMS.N)
    out, variables = jit(lambda: mapped.init_with_output(RNG, X))()
    first, second = (jax.tree.map(lambda w, i=i: w[i], variables) for i in range(2))
    assert_close(out[1], np.asarray(OURS().apply(second, X[1])))
    kernels = [x["params"]["query"]["kernel"] for x in (first, second)]
    assert not np.allclose(*kernels, atol=1e-2)


def test_initialisers_name_the_axes_of_their_kernels_as_in_flax():
    partitioned = functools.partial(nn.with_logical_partitioning, nn.initializers.ones)
    options = dict(
        kernel_init=partitioned(("embed", "heads", "head_dim")),
        bias_init=partitioned(("heads", "head_dim")),
        out_kernel_init=partitioned(("heads", "head_dim", "embed")),
        out_bias_init=partitioned(("embed",)),
    )

    def specs(make):
        variables = jax.eval_shape(make(**options).init, RNG, X)
        return nn.get_partition_spec(variables), jax.tree.structure(variables)

    assert specs(OURS) == specs(FLAXS)
    names = specs(OURS)[0]["params"]
    assert tuple(names["out"]["kernel"]) == ("heads", "head_dim", "embed")


@pytest.mark.parametrize(
    "options, call, text",
    [
        (dict(qkv_features=13), {}, "num_heads must divide.*qkv_features=13"),
        (dict(head_dim=5, qkv_features=21), {}, "qkv_features=21.*head_dim=5"),
        (dict(num_kv_heads=3), {}, "multiple of num_kv_heads.*num_kv_heads=3"),
        (dict(out_features=0), {}, "out_features must be an int, 1"),
        (dict(qk_norm="lyaer"), {}, "Did you mean 'layer'"),
        (dict(qk_norm="rms", normalize_qk=True), {}, "qk_norm='rms'.*Give one"),
        ({}, dict(inputs_v=MEMORY), "`inputs_k` cannot be None.*alone"),
        ({}, dict(inputs_k=MEMORY, inputs_kv=MEMORY), "`inputs_kv` must be None"),
        ({}, dict(lengths=np.array([1, 2])), "without a cache.*lengths"),
        ({}, dict(inputs_k=MEMORY, is_causal=True), "T=5, S=7"),
        ({}, dict(mask=SHARED[0, 0]), r"mask must be \(\*B, N, T, S\)"),
        (dict(decode=True), {}, "decode=True needs a cache.*init"),
        (
            dict(attention_fn=jattn.attention_fn),
            dict(stats=True),
            "attention_fn.*stats",
        ),
    ],
    ids=id_of,
)
def test_what_does_not_fit_is_refused(options, call, text):
    message = "(?s)^MultiHeadDotProductAttention: .*" + text
    with pytest.raises(ValueError, match=message):
        OURS(**options).apply(params(), X, **call)


def test_what_is_of_the_wrong_kind_is_refused():
    for options, x, kind, text in (
        (dict(rope=3), X, TypeError, "rope must be a function"),
        (dict(attention_fn=3), X, TypeError, "attention_fn must be a function"),
        (dict(sinks="no"), X, TypeError, "sinks must be True or False"),
        ({}, [[1.0]], TypeError, "inputs_q must be an array, but got list"),
        ({}, X[0, 0], ValueError, r"inputs_q must be \(\*B, T, 12\)"),
        ({}, X.astype(np.complex64), TypeError, "must be floating point.*complex64"),
    ):
        with pytest.raises(kind, match=f"^MultiHeadDotProductAttention: .*{text}"):
            OURS(**options).apply(params(), x)


def test_options_of_two_caches_are_refused():
    cache = jattn.KVCache.init(2, 5, 4, 3, dtype=jnp.float32)
    for options, call, text in (
        (dict(decode=True), dict(cache=cache), "with decode=True.*cache"),
        (dict(decode=True), dict(query_positions=np.arange(5)), "query_positions"),
        ({}, dict(cache=cache, sow_weights=True), "with a cache.*sow_weights"),
        ({}, dict(cache=cache, key_positions=np.arange(5)), "key_positions"),
        ({}, dict(cache=cache, query_positions="end"), "must be integers.*end"),
        ({}, dict(cache=cache, inputs_k=MEMORY), r"inputs_k \(2, 7, 12\)"),
    ):
        variables = params() | dict(cache=decoding(OURS)[1])
        with pytest.raises(ValueError, match=f"(?s)^MultiHeadDot.*{text}"):
            OURS(**options).apply(variables, X, **call)


def test_old_ways_to_give_inputs_are_warned_about_as_in_flax():
    apply = functools.partial(jax.eval_shape, OURS().apply, params())
    with pytest.warns(DeprecationWarning, match="inputs_kv arg will be deprecated"):
        assert apply(X, inputs_kv=MEMORY).shape == X.shape
    square = jnp.ones((2, 12, 12))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        apply(X, square, square)
    with pytest.warns(DeprecationWarning, match="If it is a mask"):
        with pytest.raises(Exception, match="kernel"):
            apply(X, X, CAUSAL)


def test_a_compiled_function_may_close_over_a_cache():
    layer = MultiHeadDotProductAttention(4, decode=True)
    variables = layer.init(jax.random.key(0), X)

    def step(x):
        return layer.apply(variables, x, mutable=["cache"])[0]

    assert_close(jit(step)(X[:, :2]), step(X[:, :2]), jnp.float32)
