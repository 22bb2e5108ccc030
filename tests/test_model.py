"""The language model: what its options change, and that it sees no future."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from experiments.config import Model
from experiments.model import CausalLM, logit_scale

SMALL = Model(layers=2, d_model=12, heads=3, d_k=6, d_v=5, d_ff=14)
TOKENS = jnp.asarray(np.random.default_rng(0).integers(256, size=(2, 7)))


def model_of(**changes):
    return CausalLM(dataclasses.replace(SMALL, **changes), rngs=nnx.Rngs(0))


def test_there_is_a_logit_for_every_byte_at_every_position():
    dims = chex.Dimensions(B=2, T=7, V=256)
    chex.assert_shape(model_of()(TOKENS), dims["BTV"])


def test_the_future_has_an_exactly_zero_gradient():
    model = model_of()

    def logits(embedded):
        x = embedded
        for block in model.blocks:
            x = block(x, model.scale)
        return model.head(model.norm(x))[0, 3].sum()

    gradient = jax.grad(logits)(model.embed(TOKENS))
    assert (gradient[0, 4:] == 0).all() and (gradient[0, :4] != 0).any(axis=-1).all()


@pytest.mark.parametrize(
    ("scale", "factor"), [("sqrt", 6**-0.5), ("none", 1), ("inv", 1 / 6), ("init", 1)]
)
def test_the_factor_of_the_logits_is_the_one_that_was_asked_for(scale, factor):
    config = dataclasses.replace(SMALL, scale=scale)
    assert logit_scale(config) == pytest.approx(factor)
    model = CausalLM(config, rngs=nnx.Rngs(0))
    with_default, explicit = model(TOKENS), model(TOKENS, scale=factor)
    np.testing.assert_allclose(with_default, explicit, rtol=1e-6)
    assert not np.allclose(with_default, model(TOKENS, scale=2 * factor), rtol=1e-3)


def test_in_init_the_factor_starts_in_the_kernels_and_the_logits_are_those_of_sqrt():
    queries, scaled = (
        model_of(scale=scale).projections(TOKENS)[0][:2] for scale in ("init", "sqrt")
    )
    logits = jnp.einsum("btnh,bsnh->bnts", *queries)
    wanted = jnp.einsum("btnh,bsnh->bnts", *scaled) * 6**-0.5
    np.testing.assert_allclose(logits, wanted, atol=1e-6)


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
        attention = CausalLM(config, rngs=nnx.Rngs(0)).blocks[0].attention
        for kernel in (attention.query.kernel, attention.value.kernel):
            assert float(jnp.std(kernel[...])) == pytest.approx(std, rel=0.05)


def test_a_shift_reaches_the_heads_of_its_layer():
    model = model_of()
    zeros = [jnp.zeros((2, 7, 3, 5)) for _ in model.blocks]
    np.testing.assert_array_equal(model(TOKENS, shifts=zeros), model(TOKENS))
    one = [zeros[0], zeros[1].at[:, 3].set(9.0)]
    changed = ~np.isclose(model(TOKENS, shifts=one), model(TOKENS), atol=1e-3)
    assert (changed.any(axis=(0, 2)) == (np.arange(7) == 3)).all()
