"""The language model: what its options change, and that it sees no future."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from experiments.config import Model
from experiments.model import LogN, causal_lm, logit_scale

pytestmark = pytest.mark.usefixtures("quick_compiler")
SMALL = Model(layers=2, d_model=12, heads=3, d_k=6, d_v=5, d_ff=14)
TOKENS = jnp.asarray(np.random.default_rng(0).integers(256, size=(2, 7)))


def model_of(**changes):
    return causal_lm(dataclasses.replace(SMALL, **changes), rngs=nnx.Rngs(0))


def test_there_is_a_logit_for_every_byte_at_every_position():
    dims = chex.Dimensions(B=2, T=7, V=256)
    chex.assert_shape(model_of()(TOKENS), dims["BTV"])


def test_the_future_has_an_exactly_zero_gradient():
    model = model_of()

    def logits(embedded):
        x = embedded
        for block in model.blocks:
            x = block(x)
        return model.head(model.norm(x))[0, 3].sum()

    gradient = jax.grad(logits)(model.embed(TOKENS))
    assert (gradient[0, 4:] == 0).all() and (gradient[0, :4] != 0).any(axis=-1).all()


@pytest.mark.parametrize(
    ("scale", "factor"), [("sqrt", 6**-0.5), ("none", 1), ("inv", 1 / 6), ("init", 1)]
)
def test_the_factor_of_the_logits_is_the_one_that_was_asked_for(scale, factor):
    assert logit_scale(dataclasses.replace(SMALL, scale=scale)) == pytest.approx(factor)


def test_the_factor_is_an_argument_of_the_call():
    model = model_of()
    with_default, explicit = model(TOKENS), model(TOKENS, scale=6**-0.5)
    np.testing.assert_allclose(with_default, explicit, rtol=1e-6)
    assert not np.allclose(with_default, model(TOKENS, scale=1.0), rtol=1e-3)


def test_log_n_leaves_a_query_of_a_whole_context_and_every_later_one_as_it_is():
    score, context = jnp.full((6, 1), 2.0), 4
    got = LogN(context)(score, np.arange(6)[:, None], np.arange(1)[None])
    want = 2 * np.log([1, 2, 3, 4, 4, 4]) / np.log(4)
    np.testing.assert_allclose(got[:, 0], want, rtol=1e-6)


def test_a_model_applies_the_rules_of_its_scores_whoever_calls_it():
    flat = model_of()(TOKENS, scale=0.0)
    np.testing.assert_allclose(model_of(soft_cap=1e-6)(TOKENS), flat, atol=1e-5)
    (log_n, cap) = model_of(log_n=True, soft_cap=3.0).score
    assert log_n == LogN(64) and cap(jnp.full((1, 1), 99.0), None, None) <= 3
    assert model_of().score == ()
    assert nnx.split(model_of(log_n=True))[0] == nnx.split(model_of(log_n=True))[0]
    assert nnx.split(model_of(log_n=True))[0] != nnx.split(model_of())[0]


def test_positions_are_those_that_were_asked_for():
    # Equal tokens at other places: without positions nothing tells them apart.
    tokens = jnp.full((1, 7), 65)
    for positions in ("rotary", "none"):
        assert np.ptp(model_of(positions=positions)(tokens), axis=1).max() < 1e-5
    for positions in ("learned", "sinusoidal"):
        assert np.ptp(model_of(positions=positions)(tokens), axis=1).max() > 0.1
    sizes = dict(vocabulary=11, context=5, rngs=nnx.Rngs(0))
    model = causal_lm(dataclasses.replace(SMALL, positions="learned"), **sizes)
    assert model.embed.position_embedding.shape == (5, 12)
    assert model.head.kernel.shape == (12, 11)


def test_in_init_the_factor_starts_in_the_kernels_and_the_logits_are_those_of_sqrt():
    model, scaled = model_of(scale="init"), model_of(scale="sqrt")
    got, want = model(TOKENS, scale=1.0), scaled(TOKENS, scale=6**-0.5)
    np.testing.assert_allclose(got, want, atol=1e-5)


def test_only_the_kernels_of_queries_and_keys_depend_on_d_k():
    shapes = [
        {
            jax.tree_util.keystr(path): leaf.shape
            for path, leaf in jax.tree_util.tree_leaves_with_path(
                nnx.state(model_of(d_k=d_k), nnx.Param)
            )
        }
        for d_k in (6, 8)
    ]
    differ = {path for path in shapes[0] if shapes[0][path] != shapes[1][path]}
    assert len(differ) == 4  # two layers
    assert all("query" in path or "key" in path for path in differ)


def test_lecun_kernels_have_a_std_of_one_over_sqrt_width_and_gpt2_ones_of_2_percent():
    for init, std in (("lecun", 64**-0.5), ("gpt2", 0.02)):
        config = Model(d_k=64, init=init)
        attention = causal_lm(config, rngs=nnx.Rngs(0)).blocks[0].attention
        for kernel in (attention.query.kernel, attention.value.kernel):
            assert float(jnp.std(kernel[...])) == pytest.approx(std, rel=0.05)
