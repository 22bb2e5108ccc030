"""Encoders and decoders: token by token, sharded, scanned, recomputed, in bfloat16."""

import dataclasses
import functools
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dense_blocks import block, filled, normed
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from oracle import assert_close, assert_gradient_close, jit

from jattn import masks, rope
from jattn.nnx import (
    AXIS_NAMES,
    Decoder,
    EncoderDecoder,
    TransformerConfig,
    stack_layers,
    unstack_layers,
)

pytestmark = pytest.mark.usefixtures("quick_compiler")

TINY = TransformerConfig(
    vocab_size=13, num_layers=2, d_model=12, num_heads=3, head_dim=4, d_ff=11
)
TOKENS = np.random.default_rng(0).integers(0, 13, (2, 7))


def tiny(**options):
    return dataclasses.replace(TINY, **options)


def made(kind=Decoder, **options):
    model, _ = filled(lambda: kind(tiny(**options), rngs=nnx.Rngs(0)))
    return model


@pytest.mark.parametrize("norm_first", [True, False])
def test_a_decoder_is_an_embedding_blocks_and_a_head(x64, norm_first):
    config = tiny(
        norm_first=norm_first,
        positions="learned",
        max_length=9,
        tie_embeddings=norm_first,
        param_dtype=jnp.float64,
    )
    model, params = filled(lambda: Decoder(config, rngs=nnx.Rngs(0)))
    places = np.array([[0, 1, 2, 0, 1, 2, 3], [8, 7, 6, 5, 4, 3, 2]])
    got = jit(lambda tokens: model(tokens, positions=places, is_causal=False))(TOKENS)
    table = params["embed"]["embedding"]
    x = table[TOKENS] + params["embed"]["position_embedding"][places]
    for index in range(2):
        x = block(params["blocks"][index], x, config, allowed=True)
    want = normed(params["norm"], x, "rms") @ table.T if norm_first else x
    if not norm_first:
        want = x @ params["head"]["kernel"]
    assert_close(got, want, jnp.float64)


HEADS = {"MHA": 4, "GQA": 2, "MQA": 1}
ROPES = {
    "half": rope.plain(),
    "interleaved": rope.plain(style="interleaved"),
    "linear": rope.linear(2.0),
    "ntk": rope.ntk(2.0),
    "yarn": rope.yarn(2.0, original_length=32),
    "llama3": rope.llama3(2.0, original_length=32),
    "partial": rope.plain(rotary_dim=4),
}
LENGTH, PROMPT, CAPACITY = 71, 7, 80


def cases():
    """What a token may see, as data: a window, a prefix, packed rows; and positions."""
    far, nothing = np.int32(1000), np.zeros(2, int)
    ids, counted = np.ones((2, LENGTH), int), np.tile(np.arange(LENGTH), (2, 1))
    yield "causal", (far, nothing, ids, counted)
    yield "window", (np.int32(9), nothing, ids, counted)
    yield "prefix", (far, np.array([5, 3]), ids, counted)
    # The second row begins with padding, of four tokens.
    sizes = np.array([[0, 30, 41], [4, 40, 27]])
    ids = np.stack([np.repeat([0, 1, 2], row) for row in sizes])
    starts = np.stack([np.repeat(np.cumsum(row) - row, row) for row in sizes])
    yield "packed with padding on the left", (far, nothing, ids, counted - starts)


def rule(case, query_ids, key_ids):
    left, prefix, *_ = case
    seen = masks.causal() & masks.sliding_window(left) | masks.prefix(prefix)
    return seen & masks.segments(query_ids, key_ids)


def pad(x, length):
    return jnp.pad(x, ((0, 0), (0, length - x.shape[1])))


def decoding(heads, chunk, ropes):
    """The logits of all at once, and of a prompt and then chunks, as programs."""
    graphdef, state = nnx.split(
        made(
            num_heads=4,
            num_kv_heads=HEADS[heads],
            head_dim=8,
            param_dtype=jnp.float64,
            scan_layers=True,
        )
    )

    def model(kind):
        def turn(x, positions):
            turns = [functools.partial(ROPES[name], x, positions) for name in ropes]
            return jax.lax.switch(kind, turns)

        one = nnx.merge(graphdef, state)
        one.blocks.attention.rope = turn
        return functools.partial(one, is_causal=False), one.init_cache

    @jit
    def full(kind, case, tokens):
        call, _ = model(kind)
        *_, ids, positions = case
        return call(tokens, mask=rule(case, ids, ids), positions=positions)

    @jit
    def decode(kind, case, tokens):
        call, init_cache = model(kind)
        *_, ids, positions = case
        slots = pad(ids, CAPACITY)

        def step(cache, parts):
            tokens, ids, positions, lengths = parts
            logits, cache = call(
                tokens,
                mask=rule(case, ids, slots),
                positions=positions,
                cache=cache,
                lengths=lengths,
            )
            return cache, logits

        arrays = tokens, ids, positions
        prompt = [x[:, :PROMPT] for x in arrays]
        cache, first = step(init_cache(2, CAPACITY), (*prompt, None))
        starts = np.arange(PROMPT, LENGTH, chunk)
        lengths = np.repeat(np.minimum(LENGTH - starts, chunk)[:, None], 2, axis=1)
        chunks = [
            jnp.stack(
                jnp.split(pad(x[:, PROMPT:], len(starts) * chunk), len(starts), 1)
            )
            for x in arrays
        ]
        _, rest = jax.lax.scan(step, cache, (*chunks, lengths))
        return jnp.concatenate([first, *rest], axis=1)[:, :LENGTH]

    return full, decode


EVERY = [(heads, chunk, tuple(ROPES)) for heads in HEADS for chunk in (1, 7, 64)]


@pytest.mark.parametrize(
    ("heads", "chunk", "ropes"),
    [
        pytest.param("GQA", 7, ("yarn", "partial"), id="GQA-7-two ropes"),
        *(pytest.param(*x, marks=pytest.mark.slow, id=f"{x[0]}-{x[1]}") for x in EVERY),
    ],
)
def test_decoding_is_the_full_pass_for_every_mask_and_rope(x64, heads, chunk, ropes):
    full, decode = decoding(heads, chunk, ropes)
    tokens = np.random.default_rng(1).integers(0, 13, (2, LENGTH))
    sums = set()
    for name, case in cases():
        real = case[2] != 0
        for kind, turn in enumerate(ropes):
            want = np.asarray(full(kind, case, tokens))[real]
            got = np.asarray(decode(kind, case, tokens))[real]
            assert_close(got, want, jnp.float64, f"{name}, {turn}")
            margin = np.diff(np.sort(want)[:, -2:])[:, 0]
            sure = margin > 1e-11
            assert sure.mean() > 0.99
            assert (got.argmax(-1) == want.argmax(-1))[sure].all()
            sums.add(round(want.sum(), 6))
    assert len(sums) == len(ropes) * 4  # so no mask and no rope was left out


def test_a_rolling_cache_is_a_window(x64):
    model = made(num_kv_heads=1, param_dtype=jnp.float64)
    tokens = np.random.default_rng(1).integers(0, 13, (2, 23))
    want = jit(lambda x: model(x, mask=masks.sliding_window(4)))(tokens)

    @jit
    def decode(tokens):
        cache = model.init_cache(2, 7, window=5)

        def step(cache, tokens):
            logits, cache = model(tokens, cache=cache)
            return cache, logits

        cache, first = step(cache, tokens[:, :2])
        chunks = jnp.stack(jnp.split(tokens[:, 2:], 7, axis=1))
        return jnp.concatenate([first, *jax.lax.scan(step, cache, chunks)[1]], axis=1)

    assert_close(decode(tokens), want, jnp.float64)


def test_rules_speak_of_the_positions_that_are_given():
    model = made(num_kv_heads=1)
    places = np.stack([np.arange(7) + 5, np.arange(7)[::-1] + 1])
    rule = masks.chunked(3)

    @jit
    def run(tokens):
        cache, parts = model.init_cache(2, 8), []
        for part in (slice(0, 4), slice(4, 7)):
            out, cache = model(
                tokens[:, part], positions=places[:, part], mask=rule, cache=cache
            )
            parts.append(out)
        return (
            model(tokens, positions=places, mask=rule),
            jnp.concatenate(parts, axis=1),
            model(tokens, positions=places, mask=masks.segments(places // 3 + 1)),
        )

    full, parts, want = map(np.asarray, run(TOKENS))
    assert_close(full, want)
    # A token sees none of a later call, whatever the positions say.
    assert_close(parts[0], want[0])


def test_padding_of_a_source_reaches_nothing_and_decoding_projects_it_once():
    model = made(EncoderDecoder, num_kv_heads=1)
    lengths = np.array([7, 4])
    known = masks.lengths(lengths)
    # No table holds 99, so that its vector is NaN.
    padded = np.where(np.arange(7) < lengths[:, None], TOKENS, 99)
    target = TOKENS[:, 1:6]

    @jit
    def full(source):
        return model(source, target, source_mask=known)

    @jit
    def decode(source):
        cache = model.init_cache(model.encode(source, mask=known), capacity=5)
        first, cache = model.decode(target[:, :4], cache=cache, memory_mask=known)
        last, cache = model.decode(target[:, 4:], cache=cache, memory_mask=known)
        return jnp.concatenate([first, last], axis=1), cache

    want = np.asarray(full(np.where(padded == 99, 3, padded)))
    assert_close(full(padded), want)
    logits, cache = decode(padded)
    assert_close(logits, want)
    assert cache[0].memory.key.shape == (2, 7, 1, 4)
    step = jax.make_jaxpr(lambda x, cache: model.decode(x, cache=cache))
    assert "[2,7,12]" in str(full.trace(padded).jaxpr)
    assert "[2,7,12]" not in str(step(target[:, :1], cache))


def test_a_mask_of_the_source_is_not_guessed_for_the_target():
    model = made(EncoderDecoder)
    for mask in (
        masks.sliding_window(2, 2),
        masks.segments(TOKENS),
        masks.lengths(4, query_lengths=4),
        np.ones((2, 1, 7, 7), bool),
    ):
        with pytest.raises(
            ValueError, match="source_mask .* names keys alone, but got"
        ):
            model(TOKENS, TOKENS[:, :5], source_mask=mask)


def on_a_mesh():
    """A model, its parameters here and on a mesh, and tokens on the mesh."""
    model = made(num_heads=4, num_kv_heads=2, vocab_size=14, d_ff=10)
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"))
    sharded = {"heads", "kv_heads", "mlp", "vocab"}
    rules = [(name, "model" if name in sharded else None) for name in AXIS_NAMES]
    graphdef, state = nnx.split(model)
    with nnx.logical_axis_rules(rules):
        places = nnx.get_named_sharding(state, mesh)
    tokens = np.concatenate([TOKENS, TOKENS[::-1] + 1])
    place = NamedSharding(mesh, PartitionSpec("data", None))
    return graphdef, state, jax.device_put(state, places), jax.device_put(tokens, place)


def collectives(compiled):
    kinds = "all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter"
    pattern = rf"= (\S+?)(?:{{[\d,]*}})? ({kinds})(?:-start)?\("
    return [" ".join(one) for one in re.findall(pattern, compiled.as_text())]


def test_a_mesh_shards_heads_features_and_vocabulary():
    graphdef, state, placed, tokens = on_a_mesh()
    params = nnx.to_pure_dict(jax.tree.map(lambda x: x.sharding.spec, placed))
    attention, feed = (params["blocks"][1][x] for x in ("attention", "feed_forward"))
    for name in ("query", "key", "value"):
        assert attention[name]["kernel"] == PartitionSpec(None, "model", None)
    assert attention["out"]["kernel"] == PartitionSpec("model", None, None)
    for name in ("gate", "up"):
        assert feed[name]["kernel"] == PartitionSpec(None, "model")
    assert feed["down"]["kernel"] == PartitionSpec("model", None)
    assert params["embed"]["embedding"] == PartitionSpec("model", None)

    def logits(state, tokens):
        return nnx.merge(graphdef, state)(tokens)

    compiled = jit(logits).lower(placed, tokens).compile()
    want = jit(logits)(state, np.asarray(tokens))
    assert_gradient_close(compiled(placed, tokens), np.asarray(want))
    # The stream is summed over the shards of what ends in it: the vocabulary, and in
    # each block heads and features. Attention itself sends nothing.
    assert collectives(compiled) == ["f32[1,7,12] all-reduce"] * 5


@pytest.mark.slow
def test_gradients_on_a_mesh_are_those_on_one_device():
    graphdef, state, placed, tokens = on_a_mesh()

    def loss(state, tokens):
        return jnp.mean(nnx.merge(graphdef, state)(tokens) ** 2)

    gradient = jit(jax.grad(loss))
    compiled = gradient.lower(placed, tokens).compile()
    assert {x.split()[-1] for x in collectives(compiled)} == {"all-reduce"}
    want = jax.tree.map(np.asarray, gradient(state, np.asarray(tokens)))
    jax.tree.map(assert_gradient_close, compiled(placed, tokens), want)


ATTENTION_ONLY = jax.checkpoint_policies.save_only_these_names(
    "attention_out", "attention_lse"
)


@functools.cache
def trained(scan_layers, remat):
    """Two losses with dropout, the gradient of the first, and parameters, unstacked."""
    config = tiny(scan_layers=scan_layers, remat=remat, dropout_rate=0.3)

    def make():
        return Decoder(config, rngs=nnx.Rngs(0))

    graphdef = nnx.graphdef(nnx.eval_shape(make))
    params, others = jit(lambda: nnx.split(make(), nnx.Param, ...)[1:])()

    @jit
    def step(params, others):
        model = nnx.merge(graphdef, params, others)
        run = nnx.value_and_grad(lambda model: jnp.mean(model(TOKENS) ** 2))
        value, gradient = run(model)
        return value, nnx.state(model, nnx.Not(nnx.Param)), gradient

    first, others, gradient = step(params, others)
    second, *_ = step(params, others)
    trees = [nnx.to_pure_dict(x) for x in (gradient, params)]
    return first, second, *(unstack_layers(x) if scan_layers else x for x in trees)


@pytest.mark.parametrize(
    ("scan_layers", "remat"),
    [
        pytest.param(True, ATTENTION_ONLY, id="scanned, recomputed but for attention"),
        pytest.param(True, False, marks=pytest.mark.slow, id="scanned"),
        pytest.param(False, True, marks=pytest.mark.slow, id="recomputed"),
    ],
)
def test_scan_and_remat_change_no_draw_no_output_and_no_gradient(scan_layers, remat):
    *losses, gradient, params = trained(scan_layers, remat)
    *want, want_gradient, want_params = trained(False, False)
    assert_close(losses, want)
    assert abs(want[0] - want[1]) > 1e-3  # dropout goes on
    chex.assert_trees_all_equal(params, want_params)
    jax.tree.map(
        assert_gradient_close, gradient, jax.tree.map(np.asarray, want_gradient)
    )


@pytest.mark.slow
def test_recomputing_takes_less_memory_and_attention_can_be_kept():
    memory, work = [], []
    for remat in (False, ATTENTION_ONLY, True):
        config = tiny(
            num_layers=4, d_model=64, num_heads=4, scan_layers=True, remat=remat
        )
        model = nnx.eval_shape(lambda c=config: Decoder(c, rngs=nnx.Rngs(0)))
        graphdef, state = nnx.split(model)

        def loss(state, tokens, graphdef=graphdef):
            return jnp.mean(nnx.merge(graphdef, state)(tokens) ** 2)

        tokens = jax.ShapeDtypeStruct((2, 256), jnp.int32)
        compiled = jax.jit(jax.grad(loss)).lower(state, tokens).compile()
        memory.append(compiled.memory_analysis().temp_size_in_bytes)
        work.append(compiled.cost_analysis()["flops"])
    assert memory[1] < memory[0] / 2 > memory[2]
    assert work[0] < work[1] < work[2]


def test_parameters_of_a_list_of_layers_can_be_stacked():
    listed, stacked = (
        nnx.to_pure_dict(nnx.state(made(scan_layers=x), nnx.Param))
        for x in (False, True)
    )
    got = stack_layers(listed)
    assert jax.tree.structure(got) == jax.tree.structure(stacked)
    chex.assert_trees_all_equal_shapes(got, stacked)
    chex.assert_trees_all_equal(unstack_layers(got), listed)


def test_a_model_can_be_called_within_a_loop_it_was_not_made_in():
    for options in (dict(scan_layers=True), dict(remat=True)):
        model = made(dropout_rate=0.1, **options)
        model.eval()

        def step(carry, _, model=model):
            logits, cache = model(carry[0], cache=carry[1])
            token = logits.argmax(-1).astype(carry[0].dtype)
            return (token, cache), token

        start = TOKENS[:, :1], model.init_cache(2, 4)
        loop = functools.partial(jax.lax.scan, step, length=4)
        _, tokens = jax.eval_shape(loop, start)
        assert tokens.shape == (4, 2, 1)


@pytest.mark.parametrize("scan_layers", [False, True])
def test_statistics_of_every_layer_come_out_of_scanned_and_recomputed_ones(scan_layers):
    model = made(scan_layers=scan_layers, remat=True)
    run = nnx.capture(lambda model: model(TOKENS, stats=True), nnx.Intermediate)
    _, found = nnx.eval_shape(run, model)
    shapes = {x.shape for x in jax.tree.leaves(nnx.to_pure_dict(found))}
    assert shapes == {(2, 2, 7, 3) if scan_layers else (2, 7, 3)}


def test_bfloat16_computes_with_float32_parameters_norms_and_logits():
    options = dict(num_layers=1, tie_embeddings=False)
    model, full = made(dtype=jnp.bfloat16, **options), made(**options)
    logits, want = jit(lambda tokens: (model(tokens), full(tokens)))(TOKENS)
    assert logits.dtype == jnp.float32
    assert_gradient_close(logits, np.asarray(want), jnp.bfloat16)
    params = nnx.state(model, nnx.Param)
    assert {x.dtype for x in jax.tree.leaves(params)} == {np.dtype("float32")}
    text = str(jax.make_jaxpr(model)(TOKENS))
    assert set(re.findall(r"(\w+)\[[\d,]*\] = rsqrt", text)) == {"f32"}
    assert model.norm(jnp.ones((1, 12), jnp.bfloat16)).dtype == jnp.float32
    products = re.findall(r"(\w+)\[[\d,]*\] = dot_general", text)
    # The seven kernels of the block; what attention and the head sum is float32.
    assert products.count("bf16") == 7


def test_a_cache_of_another_model_is_refused():
    model = made()
    one = model.init_cache(2, 7)
    for cache in (one[:1], one[0], jax.tree.map(lambda *x: jnp.stack(x), *one)):
        with pytest.raises(
            ValueError, match="cache must be that of a model with num_l"
        ):
            model(TOKENS, cache=cache)
    with pytest.raises(
        ValueError, match=r"here \(2, t, 1, 4\), but got \(2, 7, 3, 4\)"
    ):
        model(TOKENS, cache=made(num_kv_heads=1).init_cache(2, 7))


def test_what_a_decoder_would_ignore_is_refused():
    model = made()
    memory = np.ones((2, 7, 12), np.float32)
    with pytest.raises(ValueError, match="Decoder: lengths are for a cache"):
        model(TOKENS, lengths=np.array([3, 4]))
    with pytest.raises(TypeError, match="Decoder: positions must be integers, but got"):
        model(TOKENS, positions="end")
    with pytest.raises(ValueError, match="memory and memory_mask are for cross-att"):
        model(TOKENS, memory)
    with pytest.raises(ValueError, match="memory and memory_mask are for cross-att"):
        model.init_cache(2, 7, memory=memory)
    both = made(EncoderDecoder)
    with pytest.raises(ValueError, match=r"here B=3, d_model=12, but got \(2, 7, 12\)"):
        both.decoder.init_cache(3, 7, memory=memory)
    with pytest.raises(ValueError, match=r"Decoder: memory .* B=1, .* \(2, 7, 12\)"):
        both.decode(TOKENS[:1], memory)
    with pytest.raises(TypeError, match="EncoderDecoder: mask must be"):
        both(TOKENS, TOKENS, source_mask=[[1, 0]])
    with pytest.raises(ValueError, match="same d_model, but got 12 and 24"):
        EncoderDecoder(tiny(d_model=24), TINY, rngs=nnx.Rngs(0))


def test_a_prompt_is_neither_empty_nor_longer_than_the_cache():
    model = made()
    with pytest.raises(ValueError, match=r"T at least 1, but got \(2, 0\)"):
        model(TOKENS[:, :0], cache=model.init_cache(2, 7))
    for options in (dict(), dict(scan_layers=True), dict(remat=True)):
        model = made(**options)
        with pytest.raises(ValueError, match="Decoder: .* capacity=6"):
            model(TOKENS, cache=model.init_cache(2, 6))
    with pytest.raises(ValueError, match=r"tokens \(2, 7\), a cache of B=3"):
        model(TOKENS, cache=model.init_cache(3, 7))


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(dict(scan_layers=True, remat=True), id="stacked"),
        pytest.param(dict(remat=True), id="listed", marks=pytest.mark.slow),
    ],
)
def test_a_second_call_outside_jit_compiles_nothing(compiled, options):
    model = made(num_layers=1, **options)
    cache = model.init_cache(2, 3)
    counts = []
    for step in range(3):
        rule = masks.prefix(np.array([step, 2]))  # other data
        model(TOKENS, mask=rule)
        _, cache = model(TOKENS[:, :1], mask=rule, cache=cache)
        counts.append(len(compiled))
    assert 0 < counts[0] and counts[1] == counts[2]


def test_memory_of_decoding_stacked_layers_is_that_of_one_token():
    model = made(scan_layers=True)
    graphdef, state = nnx.split(model)

    def step(state, cache):
        return nnx.merge(graphdef, state)(TOKENS[:, :1], cache=cache)

    sizes = []
    for capacity in (1000, 3000):
        cache = model.init_cache(2, capacity)
        compiled = jit(step, donate_argnums=1).lower(state, cache).compile()
        stored = sum(x.nbytes for x in jax.tree.leaves(cache))
        sizes.append((compiled.memory_analysis().temp_size_in_bytes, stored))
    (less, few), (more, many) = sizes
    # A copy of one of the two layers would be half. The rules know of each slot.
    assert (more - less) / (many - few) < 0.3


def test_cross_attention_knows_where_tokens_stand():
    model = made(EncoderDecoder, num_layers=1).decoder
    memory = 0.4 * np.random.default_rng(2).normal(size=(2, 5, 12)).astype(np.float32)
    places = np.stack([np.arange(7), np.arange(7)[::-1]])
    rule = masks.causal()

    @jit
    def run(tokens):
        dense = places[:, None, :, None] >= np.arange(5)
        full = model(tokens, memory, memory_mask=rule)
        want = model(tokens, memory, memory_mask=dense[:1])
        cache, parts = model.init_cache(2, 7, memory=memory), []
        for part in (slice(0, 5), slice(5, 7)):
            out, cache = model(tokens[:, part], memory_mask=rule, cache=cache)
            parts.append(out)
        placed = model(tokens, memory, memory_mask=rule, positions=places)
        placed_want = model(tokens, memory, memory_mask=dense, positions=places)
        return want, (full, jnp.concatenate(parts, axis=1)), placed_want, placed

    want, same, placed_want, placed = jax.tree.map(np.asarray, run(TOKENS))
    for one in same:
        assert_close(one, want)
    assert_close(placed, placed_want)


def test_trees_of_another_kind_are_not_stacked():
    listed, stacked = (
        nnx.to_pure_dict(nnx.state(made(scan_layers=x), nnx.Param))
        for x in (False, True)
    )
    for tree in (stacked, {"blocks": [1]}, {"blocks": {}}):
        with pytest.raises(ValueError, match="stack_layers: .* a tree for each layer"):
            stack_layers(tree)
    for tree in (listed, {"blocks": {}}, {"blocks": {"a": 1.0}}):
        with pytest.raises(ValueError, match="unstack_layers: .* a first axis"):
            unstack_layers(tree)
    with pytest.raises(ValueError, match='with a part "blocks"'):
        stack_layers({"a": 1})


def test_a_cache_can_be_donated():
    arrays = jax.tree.leaves(made().init_cache(1, 4))
    assert len({x.unsafe_buffer_pointer() for x in arrays}) == len(arrays)
