"""Blocks against the same in numpy, and what configs and embeddings promise."""

import dataclasses
import pickle

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dense_blocks import ACTIVATIONS, block, fed_forward, filled
from flax import nnx
from oracle import assert_close, exact, id_of, jit

import jattn
from jattn.nnx import (
    AXIS_NAMES,
    Decoder,
    DecoderBlock,
    Embedding,
    EncoderBlock,
    EncoderDecoderBlock,
    FeedForward,
    TransformerConfig,
    sinusoidal,
)

pytestmark = pytest.mark.usefixtures("quick_compiler")

DIMS = chex.Dimensions(B=2, T=5, S=7, N=3, D=12, F=11)
TINY = TransformerConfig(
    vocab_size=13, num_layers=2, d_model=12, num_heads=3, d_ff=11, positions="none"
)
DOUBLE = dataclasses.replace(TINY, param_dtype=jnp.float64)
X, MEMORY = exact(1, *DIMS["BTD"]), exact(2, *DIMS["BSD"])
F32 = X.astype(np.float32)
CAUSAL = np.tri(DIMS.T, dtype=bool)
KNOWN = np.arange(DIMS.S) < np.array([7, 4])[:, None, None, None]


def tiny(**options):
    return dataclasses.replace(TINY, **options)


def made_of(kind, config, seed=0):
    """A module, and its parameters in numpy."""
    return filled(lambda: kind(config, rngs=nnx.Rngs(0)), seed)


@pytest.mark.parametrize(
    "options",
    [
        dict(),
        dict(norm_first=False, norm="layer", activation="relu", use_bias=True),
        dict(norm="layer", num_kv_heads=1, head_dim=6, v_head_dim=5),
    ],
    ids=["pre-LN", "post-LN", "other sizes"],
)
def test_blocks_are_what_the_papers_write(x64, options):
    config = dataclasses.replace(DOUBLE, **options)
    kinds = EncoderBlock, DecoderBlock, EncoderDecoderBlock
    made = [made_of(kind, config, seed) for seed, kind in enumerate(kinds)]
    blocks, params = zip(*made, strict=True)
    known = jattn.masks.lengths(np.array([7, 4]))
    got = jit(
        lambda x, memory: (
            blocks[0](x, mask=jattn.masks.lengths(4)),
            blocks[1](x),
            blocks[2](x, memory, memory_mask=known),
        )
    )(X, MEMORY)
    want = (
        block(params[0], X, config, allowed=np.arange(DIMS.T) < 4),
        block(params[1], X, config, allowed=CAUSAL),
        block(params[2], X, config, allowed=CAUSAL, memory=MEMORY, seen=KNOWN),
    )
    for kind, one, other in zip(kinds, got, want, strict=True):
        assert_close(one, other, jnp.float64, kind.__name__)


def test_a_feed_forward_network_has_the_activation_of_its_name():
    made = {
        name: made_of(FeedForward, tiny(activation=name, use_bias=True))
        for name in ACTIVATIONS
    }
    got = jit(lambda x: {name: layer(x) for name, (layer, _) in made.items()})(F32)
    for name, (_, params) in made.items():
        assert_close(got[name], fed_forward(params, X, name), name=name)


def test_the_past_knows_nothing_of_what_a_decoder_block_sees_later():
    decoder, encoder = (made_of(x, TINY)[0] for x in (DecoderBlock, EncoderBlock))
    cotangent = np.zeros_like(F32)
    cotangent[:, 2] = 1

    @jit
    def influence(x):
        _, pull = jax.vjp(lambda x: (decoder(x), encoder(x)), x)
        return pull((cotangent, 0 * cotangent))[0], pull((0 * cotangent, cotangent))[0]

    ahead, both = influence(F32)
    assert (np.asarray(ahead[:, 3:]) == 0).all() and ahead[:, :3].any(-1).all()
    assert both.any(-1).all()


def test_sinusoidal_positions_are_those_of_the_paper_near_and_far(x64):
    positions = np.array([[0, 1, 70_001, 2**29, -3]])
    angles = positions[..., None] / 10_000 ** (np.arange(0, 6, 2) / 6)
    want = np.stack([np.sin(angles), np.cos(angles)], axis=-1).reshape(1, 5, 6)
    for dtype, error in (("float32", 2e-7), ("float64", 1e-7), ("bfloat16", 2e-7)):
        got = sinusoidal(positions, 6, dtype)
        assert got.dtype == ("float64" if dtype == "float64" else "float32")
        np.testing.assert_allclose(got, want, rtol=0, atol=error)
    with pytest.raises(ValueError, match="sinusoidal: width must be even"):
        sinusoidal(positions, 5)


def test_embeddings_are_rows_of_their_tables():
    config = tiny(positions="learned", max_length=7, scale_embeddings=True)
    layer, params = made_of(Embedding, config)
    tokens, positions = np.array([[3, 0, 12]]), np.array([[6, 0, 2]])
    rows = params["embedding"][tokens] * 12**0.5
    places = params["position_embedding"]
    assert_close(layer(tokens), rows + places[:3])
    assert_close(layer(tokens, positions), rows + places[positions])
    config = tiny(positions="sinusoidal")
    layer, params = made_of(Embedding, config)
    rows = params["embedding"][tokens] * 12**0.5
    assert_close(layer(tokens, positions), rows + np.asarray(sinusoidal(positions, 12)))


def test_what_no_table_holds_is_nan():
    layer, _ = made_of(Embedding, tiny(positions="learned", max_length=7))
    tokens, positions = np.array([[12, 13, -1, 5]]), np.array([[6, 0, 0, 7]])
    known = np.isfinite(layer(tokens, positions)).all(-1)
    unknown = np.isnan(layer(tokens, positions)).all(-1)
    assert known[0].tolist() == [True, False, False, False]
    assert unknown[0].tolist() == [False, True, True, True]
    far = np.array([[5, 2**32 + 5, -(2**32) + 5]])
    assert np.isnan(layer(far, 0 * far)).all(-1).tolist() == [[False, True, True]]
    assert np.isnan(layer(far[:, 1:].astype(np.uint64))).all()
    assert np.isfinite(layer(np.array([[5]], np.int8))).all()


@pytest.mark.parametrize("scan_layers", [False, True])
def test_every_parameter_names_its_axes(scan_layers):
    for qk_norm in ("layer", "l2"):
        config = tiny(
            use_bias=True,
            norm="layer",
            qk_norm=qk_norm,
            sinks=True,
            positions="learned",
            max_length=7,
            tie_embeddings=False,
            scan_layers=scan_layers,
        )
        model = nnx.eval_shape(
            lambda config=config: Decoder(
                config, cross_attention=True, rngs=nnx.Rngs(0)
            )
        )
        found = set()
        for path, param in nnx.iter_graph(model):
            if isinstance(param, nnx.Param):
                names = param.get_metadata("out_sharding")
                assert len(names) == len(param.shape), path
                assert ("layers" in names) == (scan_layers and path[0] == "blocks")
                found |= set(names)
        assert found == set(AXIS_NAMES) - (set() if scan_layers else {"layers"})


def test_a_config_is_a_value_whose_defaults_follow_from_the_rest():
    config = TransformerConfig(vocab_size=13, d_model=96, num_heads=4)
    same = TransformerConfig(vocab_size=13, d_model=96, num_heads=4)
    assert config == same and hash(config) == hash(same)
    wider = dataclasses.replace(config, d_model=192, activation="gelu").resolve()
    assert (wider.head_dim, wider.v_head_dim, wider.num_kv_heads) == (48, 48, 4)
    assert (wider.d_ff, wider.dtype) == (768, jnp.float32)
    assert wider.rope is jattn.rotary and wider == wider.resolve()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            dict(num_heads=5),
            "num_heads must divide d_model, but got num_heads=5, d_model=12",
        ),
        (
            dict(num_kv_heads=2),
            "multiple of num_kv_heads, but got num_heads=3, num_kv_heads=2",
        ),
        (dict(num_layers=0), "num_layers must be an int, 1 or more, but got 0"),
        (dict(d_ff=0), "d_ff must be an int, 1 or more, but got 0"),
        (
            dict(activation="swish"),
            "activation must be one of 'swiglu'.* but got 'swish'",
        ),
        (dict(norm="rmsnorm"), "norm must be one of .* Did you mean 'rms'"),
        (
            dict(positions="learned"),
            'max_length=None. Give it with positions="learned"',
        ),
        (dict(max_length=7), "got positions='none', max_length=7"),
        (dict(rope=jattn.rotary), 'rope is used with positions="rotary" only'),
        (dict(d_model=9, positions="sinusoidal"), "an even d_model, but got d_model=9"),
        (dict(dropout_rate=1.0), r"dropout_rate must be in \[0, 1\), but got 1.0"),
        (dict(qk_norm="rmz"), "qk_norm must be one of .* Did you mean 'rms'"),
        (dict(norm_epsilon=0.0), "norm_epsilon must be positive and finite"),
        (dict(positions="learned", max_length=0), "max_length must be an int, 1 or"),
    ],
    ids=id_of,
)
def test_a_config_that_means_nothing_is_refused(options, message):
    with pytest.raises(ValueError, match=f"TransformerConfig: .*{message}"):
        tiny(**options)


def test_an_option_of_another_kind_is_refused_by_its_name():
    flags = "norm_first sinks use_bias tie_embeddings scan_layers scale_embeddings"
    wrong = dict.fromkeys(flags.split(), "no") | dict(
        num_heads="3",
        norm_epsilon="small",
        dropout_rate="much",
        dtype=jnp.int32,
        param_dtype=jnp.int32,
        remat="yes",
        rope=3,
        kernel_init=3,
        num_layers=None,
    )
    for name, option in wrong.items():
        with pytest.raises(TypeError, match=f"TransformerConfig: {name} must be "):
            tiny(**{"positions": "rotary", name: option})
    with pytest.raises(TypeError, match="max_length must be an int"):
        tiny(positions="learned", max_length=4.5)


def test_a_config_can_be_pickled():
    config = tiny(positions="rotary", rope=jattn.rope.linear(2.0), qk_norm="l2")
    assert pickle.loads(pickle.dumps(config)) == config


def test_rngs_and_what_blocks_would_ignore_are_refused():
    for make in (Decoder, EncoderBlock, FeedForward, Embedding):
        with pytest.raises(TypeError, match=f"{make.__name__}: rngs must be nnx.Rngs"):
            make(TINY, rngs=0)
    layer, _ = made_of(EncoderBlock, TINY)
    cache = jattn.KVCache.init(2, 7, 3, 4, dtype=jnp.float32)
    with pytest.raises(ValueError, match="EncoderBlock: .* has no cache"):
        layer(F32, cache=cache)
    with pytest.raises(TypeError, match="is_causal must be True or False"):
        made_of(DecoderBlock, TINY)[0](F32, is_causal="no")


@pytest.mark.parametrize(
    ("tokens", "error", "message"),
    [
        (np.ones((2, 5)), TypeError, "integers, but got float64"),
        ([[1, 2]], TypeError, "an array of integers, but got <class 'list'>"),
        (np.ones(5, int), ValueError, r"\(B, T\), T at least 1, but got \(5,\)"),
        (np.ones((2, 0), int), ValueError, r"\(B, T\), T at least 1, but got \(2, 0\)"),
        (np.ones((2, 8), int), ValueError, r"tokens \(2, 8\), max_length=7"),
    ],
    ids=["floats", "a list", "no batch", "no token", "too long"],
)
def test_tokens_that_mean_nothing_are_refused(tokens, error, message):
    layer, _ = made_of(Embedding, tiny(positions="learned", max_length=7))
    with pytest.raises(error, match=message):
        layer(tokens)


def test_a_block_takes_a_memory_or_a_cache_that_holds_it():
    layer, _ = made_of(EncoderDecoderBlock, TINY)
    with pytest.raises(ValueError, match="memory must be given, .* but got neither"):
        layer(F32)
    for memory in (MEMORY[..., :5], np.ones((2, 7), int)):
        with pytest.raises(ValueError, match=r"memory must be \(B, S, d_model\)"):
            layer(F32, memory)
