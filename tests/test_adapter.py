"""`attention_fn` inside the modules of Flax, against Flax's own attention."""

import functools
import inspect
import warnings

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from oracle import (
    assert_close,
    assert_gradient_close,
    assert_same_bits,
    dense_attention,
    exact,
    jit,
)

import jattn
from jattn import masks, scores

pytestmark = pytest.mark.usefixtures("quick_compiler")

DIMS = chex.Dimensions(B=3, T=5, S=7, N=4, K=2, H=3, D=12)
X = exact(1, *DIMS["BTD"]).astype(np.float32)
MEMORY = exact(2, *DIMS["BSD"]).astype(np.float32)
LEFT = np.arange(DIMS.S) < np.array([7, 1, 5])[:, None]
PADDING = LEFT[:, None, None]  # (B, 1, 1, S)
RNG = jax.random.key(5)
RATE = 0.4


def vectors(dtype=np.float32):
    return [exact(n, *DIMS[x]).astype(dtype) for n, x in enumerate(["BTNH", "BSKH"])]


def attend(**options):
    q, k = vectors()
    return np.asarray(jattn.attention_fn(q, k, k, **options))


def dense(**options):
    q, k = vectors()
    return dense_attention(q, k, k, **options).out


class InNNX:
    """A module with this attention, as functions of its parameters."""

    def __init__(self, attention_fn, **options):
        heads = DIMS.K if options.pop("grouped", False) else None
        options |= dict(num_kv_heads=heads, attention_fn=attention_fn)
        options |= dict(decode=False, keep_rngs=False, rngs=nnx.Rngs(0))
        module = nnx.MultiHeadAttention(DIMS.N, DIMS.D, **options)
        self.graph, self.state = nnx.split(module)

    def __call__(self, state, *inputs, rng=None, **options):
        rngs = None if rng is None else nnx.Rngs(dropout=rng)
        return nnx.merge(self.graph, state)(*inputs, rngs=rngs, **options)

    def sown(self, *inputs, rng=None, **options):
        module = nnx.merge(self.graph, self.state)
        rngs = None if rng is None else nnx.Rngs(dropout=rng)
        options |= dict(sow_weights=True, rngs=rngs)
        out, found = nnx.capture(module, nnx.Intermediate)(*inputs, **options)
        (weights,) = found["attention_weights"].get_value()
        return out, weights

    def steps(self, tokens, **options):
        module = nnx.merge(self.graph, self.state)
        module.init_cache((DIMS.B, DIMS.S, DIMS.D))
        module.decode = True
        outs = [module(x[:, None], **options) for x in tokens.swapaxes(0, 1)]
        return np.concatenate(outs, axis=1)


class InLinen:
    """Likewise."""

    def __init__(self, attention_fn, module=nn.MultiHeadDotProductAttention, **options):
        self.module = module(num_heads=DIMS.N, attention_fn=attention_fn, **options)
        self.state = nn.MultiHeadDotProductAttention(num_heads=DIMS.N).init(RNG, X)

    def __call__(self, state, *inputs, rng=None, **options):
        rngs = None if rng is None else dict(dropout=rng)
        return self.module.apply(state, *inputs, rngs=rngs, **options)

    def sown(self, *inputs, rng=None, **options):
        rngs = None if rng is None else dict(dropout=rng)
        options |= dict(sow_weights=True, rngs=rngs)
        apply = functools.partial(self.module.apply, mutable="intermediates")
        out, found = apply(self.state, *inputs, **options)
        (weights,) = found["intermediates"]["attention_weights"]
        return out, weights

    def steps(self, tokens, **options):
        module = self.module.clone(decode=True)
        empty = jnp.zeros((DIMS.B, DIMS.S, DIMS.D))
        cache = module.init(RNG, empty)["cache"]
        outs = []
        for x in tokens.swapaxes(0, 1):
            variables = self.state | dict(cache=cache)
            apply = functools.partial(module.apply, mutable="cache")
            out, changed = apply(variables, x[:, None], **options)
            cache = changed["cache"]
            outs.append(out)
        return np.concatenate(outs, axis=1)


FLAXS = {InNNX: nnx.dot_product_attention, InLinen: nn.dot_product_attention}
FRAMEWORKS = pytest.mark.parametrize("framework", [InNNX, InLinen])
KINDS = [(InNNX, dict(grouped=True)), (InLinen, dict(precision="highest"))]


@pytest.mark.parametrize("framework, options", KINDS, ids=str)
def test_outputs_and_gradients_are_those_of_flax(framework, options):
    def passes(attention_fn):
        module = framework(attention_fn, **options)

        def run(state, *inputs):
            fn = functools.partial(module, mask=PADDING)
            out, pull = jax.vjp(fn, state, *inputs)
            return out, pull(jnp.cos(out))

        return jit(run)(module.state, X, MEMORY, 2 * MEMORY)

    ours, flaxs = passes(jattn.attention_fn), passes(FLAXS[framework])
    assert_close(ours[0], flaxs[0])
    jax.tree.map(assert_gradient_close, ours[1], flaxs[1])


@pytest.mark.parametrize("alias", [nn.MultiHeadAttention, nn.SelfAttention])
def test_linens_other_names_of_the_module_take_it_too(alias):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Linen's, of SelfAttention
        module = InLinen(jattn.attention_fn, alias)
        out = module(module.state, X)
    flaxs = InLinen(nn.dot_product_attention)
    assert_close(out, flaxs(flaxs.state, X))


@FRAMEWORKS
def test_every_argument_of_flaxs_own_is_there_in_its_place(framework):
    ours = inspect.signature(jattn.attention_fn).parameters
    flaxs = inspect.signature(FLAXS[framework]).parameters
    by_place = [n for n, x in ours.items() if x.kind is x.POSITIONAL_OR_KEYWORD]
    assert by_place == list(flaxs)[: len(by_place)] and by_place[-1] == "module"
    assert all(x.kind is not x.VAR_KEYWORD for x in ours.values())
    for name in set(flaxs) - {"promote_dtype"}:
        assert ours[name].default == flaxs[name].default, name
    call = inspect.signature(nnx.MultiHeadAttention.__call__).parameters
    passed = {"is_causal", "input_positions"} & set(call)
    assert passed < set(ours) and "promote_dtype" in ours


NEARER = scores.rule(lambda s, q_pos, k_pos: s - 0.5 * abs(q_pos - k_pos))
OFFSET = np.subtract.outer(np.arange(DIMS.T), np.arange(DIMS.S))
RULE = masks.sliding_window(2) & masks.padding(LEFT)
SEEN = (OFFSET >= 0) & (OFFSET <= 2) & PADDING  # the first queries by the first keys


@FRAMEWORKS
def test_a_mask_rule_passes_through_a_module_that_knows_only_arrays(framework):
    ours, flaxs = framework(jattn.attention_fn), framework(FLAXS[framework])
    if framework is InNNX:
        module = nnx.merge(ours.graph, ours.state)
        call = nnx.jit(lambda module, *x, mask: module(*x, mask=mask))
        out = call(module, X, MEMORY, mask=RULE)
    else:
        call = jit(lambda *x, mask: ours(*x, mask=mask))
        out = call(ours.state, X, MEMORY, mask=RULE)
    want = flaxs(flaxs.state, X, MEMORY, mask=jnp.asarray(SEEN))
    rows = SEEN.any(-1)[:, 0, :, None]  # of the others, Flax's are the mean of values
    assert rows.any() and not rows.all()
    assert_close(out * rows, want * rows)


def test_numbers_as_a_mask_forbid_where_they_are_0():
    want = attend(mask=SEEN)
    assert_close(want, dense(allowed=SEEN))
    for numbers in (SEEN.astype(np.int32), np.where(SEEN, -0.5, -0.0), SEEN * 3.0):
        assert_same_bits(attend(mask=numbers.astype(jnp.bfloat16)), want)
        assert_same_bits(attend(mask=jnp.asarray(numbers, jnp.float32)), want)


def test_is_causal_counts_from_the_first_key_and_joins_the_mask():
    causal = OFFSET >= 0
    assert_close(attend(is_causal=True), dense(allowed=causal))
    both = attend(is_causal=True, mask=PADDING.astype(int))
    assert_close(both, dense(allowed=causal & PADDING))


def test_options_of_attention_are_given_by_partial():
    bias, sinks = exact(6, 1, DIMS.N, 1, DIMS.S).astype(np.float32), np.arange(4.0)
    options = dict(scale=0.7, sinks=sinks, bias=bias, query_positions="end")
    options |= dict(score=(scores.soft_cap(2.0), NEARER), mask=SEEN)
    q, k = vectors()
    assert_same_bits(attend(**options), jattn.attention(q, k, k, **options))
    mean = attend(empty_rows="mean", mask=SEEN)
    assert_close(mean[~SEEN.any(-1)[:, 0]].min(), jnp.mean(k, 1)[1].min())


def test_precision_is_that_of_the_products():
    for precision, found in (("highest", True), (None, False)):
        fn = functools.partial(jattn.attention_fn, precision=precision)
        q, k = vectors()
        assert ("HIGHEST" in str(jax.make_jaxpr(fn)(q, k, k))) is found


@FRAMEWORKS
def test_score_rules_reach_flaxs_modules(framework):
    rule = scores.soft_cap(0.1)

    def direct(query, key, value, **_):
        return jattn.attention(query, key, value, score=rule)

    module = framework(functools.partial(jattn.attention_fn, score=rule))
    out = module(module.state, X)
    assert_same_bits(out, framework(direct)(module.state, X))
    plain = framework(jattn.attention_fn)(module.state, X)
    assert np.abs(out - plain).max() > 1e-3


@FRAMEWORKS
def test_the_dtype_of_a_module_is_that_of_its_output(framework):
    def run(attention_fn):
        module = framework(attention_fn, dtype=jnp.bfloat16)
        return jit(module)(module.state, X)

    out = run(jattn.attention_fn)
    assert out.dtype == jnp.bfloat16
    assert_close(out, np.asarray(run(FLAXS[framework]), np.float64), jnp.bfloat16)


def test_vectors_are_cast_to_one_dtype_as_flax_does():
    q, k = vectors()
    narrow = jnp.asarray(k, jnp.bfloat16)
    assert jattn.attention_fn(q, narrow, narrow).dtype == np.float32
    out = attend(dtype=jnp.bfloat16)
    assert out.dtype == jnp.bfloat16
    options = dict(promote_dtype=nnx.nn.dtypes.promote_dtype, dtype=jnp.bfloat16)
    assert_same_bits(attend(**options), out)
    asked = []

    def promote(arrays, *, dtype):
        asked.append(dtype)
        return tuple(jnp.asarray(x, jnp.bfloat16) for x in arrays)

    assert_same_bits(attend(promote_dtype=promote, dtype=np.float64), out)
    assert asked == [np.float64]


@pytest.mark.parametrize("framework, shared", [(InNNX, True), (InLinen, False)])
def test_a_module_in_training_drops_by_its_key(framework, shared):
    """All heads and batch rows alike, or each by the pattern of `attention`."""
    given = []

    @functools.wraps(jattn.attention_fn)
    def recorded(*args, **options):
        given.append((args, options["dropout_rng"]))
        return jattn.attention_fn(*args, **options)

    module = framework(recorded, dropout_rate=RATE, broadcast_dropout=shared)
    run = functools.partial(module, module.state, X)
    out = run(rng=RNG, deterministic=False)
    (q, k, v), rng = given[0]
    weights = np.asarray(jattn.attention_weights(q, k))
    drop = dict(dropout_rng=rng, dropout_rate=RATE)
    kept = np.asarray(jattn.attention_weights(q, k, **drop)) > 0
    kept = kept[:1, :1] if shared else kept
    heads = np.einsum("bnts,bsnd->btnd", kept * weights / (1 - RATE), v)
    same = framework(lambda *_, **__: jnp.asarray(heads), dropout_rate=RATE)
    assert_close(out, same(module.state, X, rng=RNG, deterministic=False))
    plain = framework(FLAXS[framework])
    assert_close(run(rng=RNG, deterministic=True), plain(module.state, X))
    assert np.abs(out - run(rng=RNG, deterministic=True)).max() > 0.1


@FRAMEWORKS
def test_weights_are_sown_where_flax_sows_them(framework):
    module = framework(jattn.attention_fn, dropout_rate=RATE)
    options = dict(mask=jnp.asarray(PADDING), deterministic=False, rng=RNG)
    out, weights = module.sown(X, MEMORY, **options)
    _, flaxs = framework(FLAXS[framework]).sown(X, MEMORY, mask=options["mask"])
    assert flaxs.shape == DIMS["BNTS"]
    assert_close(weights, flaxs)
    assert_same_bits(module(module.state, X, MEMORY, **options), out)


def test_sown_weights_have_the_dtype_that_is_asked_for():
    class Module:
        def sow(self, *args):
            self.sown = args

    found = {}
    for force in (False, True):
        module = Module()
        options = dict(dtype=jnp.bfloat16, force_fp32_for_softmax=force)
        attend(module=module, **options)
        collection, name, found[force] = module.sown
        assert (collection, name) == ("intermediates", "attention_weights")
    assert [x.dtype for x in found.values()] == [jnp.bfloat16, jnp.float32]
    assert_close(found[False], np.asarray(found[True]), jnp.bfloat16)


@FRAMEWORKS
def test_decoding_token_by_token_is_flaxs(framework):
    ours, flaxs = framework(jattn.attention_fn), framework(FLAXS[framework])
    tokens, mask = X[:, :3], jnp.asarray(PADDING)
    assert_close(ours.steps(tokens, mask=mask), flaxs.steps(tokens, mask=mask))


def test_a_query_without_keys_gets_0_and_a_nan_reaches_no_query_that_may_not_look():
    q, k = vectors()
    k[~LEFT] = np.nan
    lost = np.array([True, False, True])[:, None, None, None]
    mask = PADDING & ~lost

    def run(q, k):
        return jattn.attention_fn(q, k, k, mask=mask.astype(np.float32))

    def both(q, k):
        out, pull = jax.vjp(run, q, k)
        return out, pull(jnp.ones_like(out))

    out, gradients = jit(both)(q, k)
    assert not out[0].any() and not out[2].any()
    assert_close(out[1], dense(allowed=mask)[1])
    assert all(np.isfinite(x).all() for x in gradients)


def test_input_positions_are_those_of_queries_and_of_as_many_keys():
    q, k = vectors()
    places = np.array([[0], [3], [9]]) + np.arange(5)
    given = jattn.attention(q, k, k, query_positions=places, score=NEARER)
    assert_same_bits(attend(input_positions=places, score=NEARER), given)
    reverse, k = places[:, ::-1], k[:, :5]
    options = dict(is_causal=True, input_positions=reverse)
    given = jattn.attention_fn(q, k, k, **options)
    assert_close(given, dense_attention(q, k, k, np.triu(np.ones((5, 5), bool))).out)


WRONG = [
    (dict(mask=SEEN[0, 0]), ValueError, r"\(\*B, N, T, S\).*\(5, 7\).*x\[None, None\]"),
    (dict(mask=SEEN[:, 0]), ValueError, r"mask must be \(\*B, N, T, S\).*x\[:, None\]"),
    (dict(mask=[[1]]), TypeError, "mask must be an array or a rule.*list"),
    (dict(bias=SEEN), TypeError, "bias must be floating point.*bool"),
    (dict(bias=np.zeros((5, 7))), ValueError, r"bias must be \(\*B, N, T, S\)"),
    (dict(dtype=np.int32), TypeError, "query must be floating point.*int32"),
    (dict(dropout_rate=0.5), ValueError, "needs dropout_rng.*a rate of 0"),
    (dict(dropout_rate=1.0, dropout_rng=RNG), ValueError, r"dropout_rate.*\[0, 1\)"),
    (dict(dropout_rate=0.5, dropout_rng=3), TypeError, "must be a key.*int"),
    (dict(dropout_rate=None), TypeError, "dropout_rate must be a number.*None"),
    (dict(query_positions="last"), ValueError, "query_positions must be one of"),
    (dict(einsum_dot_general=np.dot), NotImplementedError, "must be None.*dot"),
    (dict(qk_attn_weights_einsum=np.einsum), NotImplementedError, "None.*einsum"),
    (dict(attn_weights_value_einsum=np.einsum), NotImplementedError, "None.*einsum"),
    (dict(input_positions=np.arange(7)), ValueError, r"input_pos.*\(\*B, T\).*\(7,\)"),
    (dict(input_positions=np.arange(5.0)), TypeError, "input_positions.*integers"),
    (
        dict(input_positions=np.arange(5), query_positions="end"),
        ValueError,
        "input_positions.*query_positions",
    ),
    (dict(implementation="cudnn"), ValueError, "implementation must be one of"),
    (dict(block_sizes=(0, 1)), ValueError, "block_sizes must be two positive"),
]


@pytest.mark.parametrize("options, kind, text", WRONG)
def test_what_cannot_be_honoured_is_refused(options, kind, text):
    with pytest.raises(kind, match=f"(?s)^attention_fn: .*{text}"):
        attend(**options)


def test_flaxs_own_products_by_name_are_its_defaults():
    products = dict(
        einsum_dot_general=jax.lax.dot_general,
        qk_attn_weights_einsum=jnp.einsum,
        attn_weights_value_einsum=jnp.einsum,
    )
    assert_same_bits(attend(**products), attend())


def test_what_the_frameworks_do_not_share_goes_by_name_only():
    q, k = vectors()
    with pytest.raises(TypeError, match="positional"):
        jattn.attention_fn(q, k, k, *[None] * 9, True)


def test_a_causal_flag_while_decoding_is_refused_and_not_read_from_the_first_key():
    """Flax 0.12.8 passes it on: every later token would see the first key alone."""
    q, k = vectors()
    with pytest.raises(ValueError, match=r"is_causal.*T=1.*S=7.*decode=True"):
        jattn.attention_fn(q[:, :1], k, k, is_causal=True)


@FRAMEWORKS
@pytest.mark.parametrize("rate", [-0.5, float("nan"), 1.5])
def test_a_rate_that_flax_reads_as_none_is_refused(framework, rate):
    module = framework(jattn.attention_fn, dropout_rate=rate)
    with pytest.raises(ValueError, match=rf"attention_fn: dropout_rate .*{rate}"):
        module(module.state, X, deterministic=True)


def test_a_score_that_counts_from_the_first_key_is_refused_for_one_query_of_a_cache():
    q, k = jnp.ones((2, 1, 3, 4)), jnp.ones((2, 7, 3, 4))
    rules = (scores.soft_cap(3.0), scores.alibi())
    with pytest.raises(ValueError, match="score counts from the first key, but got T="):
        jattn.attention_fn(q, k, k, score=rules)
    there = jattn.attention_fn(q, k, k, score=rules, query_positions="end")
    assert there.shape == q.shape
    assert jattn.attention_fn(q, k, k, score=rules[0]).shape == q.shape
