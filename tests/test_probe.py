"""The probe is exact: it agrees with a dense model in float64 that shares no code."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from oracle import assert_close

from experiments.config import Model, Probe
from experiments.model import causal_lm, logit_scale
from experiments.probe import probe, shifted

pytestmark = pytest.mark.usefixtures("quick_compiler")
SIZES = Model(layers=2, d_model=12, heads=3, d_k=6, d_v=5, d_ff=14, scale="none")
TOKENS = np.random.default_rng(0).integers(256, size=(2, 12))
CONTEXT = 11
SETTINGS = Probe(dead_below=0.01, saturated_above=0.6)


def tell_norms_apart(model):
    """Gives norms scales that are not 1, as they are at first."""
    rng = np.random.default_rng(1)
    for block in model.blocks:
        for norm in (block.attention_norm, block.feed_forward_norm):
            norm.scale[...] *= rng.uniform(0.5, 1.5, 12)


def layer_norm(x, p):
    x = x - x.mean(-1, keepdims=True)
    x = x / jnp.sqrt((x**2).mean(-1, keepdims=True) + 1e-6)
    return x * p["scale"][None, None]


def turn(x):
    """Rotary positions of (B, T, N, H), pair by pair."""
    half = x.shape[-1] // 2
    angle = np.arange(x.shape[1])[:, None] * 10_000.0 ** -(np.arange(half) / half)
    cos, sin = np.cos(angle)[None, :, None], np.sin(angle)[None, :, None]
    a, b = x[..., :half], x[..., half:]
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], -1)


def textbook(params, eps, tokens, factor, model):
    """The loss with eps added to the logits, and the logits of every layer."""
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    x = params["embed"]["embedding"][inputs]
    causal = np.tril(np.ones((inputs.shape[1],) * 2, bool))[None, None]
    kept = []
    for layer, p in params["blocks"].items():
        y, a = layer_norm(x, p["attention_norm"]), p["attention"]
        q, k, v = (
            jnp.einsum("btd,dnh->btnh", y, a[name]["kernel"])
            for name in ("query", "key", "value")
        )
        s = jnp.einsum("btnh,bsnh->bnts", turn(q), turn(k)) * factor
        if model.log_n:
            n = np.arange(1, s.shape[2] + 1).reshape(1, 1, -1, 1)
            s = s * np.log(n) / np.log(CONTEXT)
        if model.soft_cap:
            s = model.soft_cap * jnp.tanh(s / model.soft_cap)
        s = s + eps[layer]
        s = jnp.where(causal, s, -1e300)
        kept.append(s)
        weights = jax.nn.softmax(s, axis=-1)
        heads = jnp.einsum("bnts,bsnh->btnh", weights, v)
        x = x + jnp.einsum("btnh,nhd->btd", heads, a["out"]["kernel"])
        y, f = layer_norm(x, p["feed_forward_norm"]), p["feed_forward"]
        x = x + jax.nn.gelu(y @ f["up"]["kernel"]) @ f["down"]["kernel"]
    logits = layer_norm(x, params["norm"]) @ params["head"]["kernel"]
    logits = jax.nn.log_softmax(logits)
    return -jnp.take_along_axis(logits, targets[..., None], -1).mean(), kept


def measures_of_head(s, ds, tokens_in_batch):
    """Every measure of one head, row by row in plain numpy: (B, T, T)."""
    rows = [
        (s[b, t, : t + 1], np.linalg.norm(ds[b, t]) * tokens_in_batch)
        for b in range(len(s))
        for t in range(1, s.shape[1])
    ]
    norms = np.array([norm for _, norm in rows])
    p = [np.exp(row - row.max()) / np.exp(row - row.max()).sum() for row, _ in rows]
    return {
        "row_norm_median": np.median(norms),
        "row_norm_rms": np.sqrt(np.mean(norms**2)),
        "dead_share": np.mean(norms < 0.01),
        "entropy": np.mean([-(x * np.log(x)).sum() / np.log(len(x)) for x in p]),
        "max_probability": np.mean([x.max() for x in p]),
        "saturated_share": np.mean([x.max() > 0.6 for x in p]),
        "softmax_derivative": np.mean([1 - (x**2).sum() for x in p]),
        "logit_std": np.mean([row.std() for row, _ in rows]),
        "logit_max": np.abs(np.concatenate([row for row, _ in rows])).max(),
    }


@pytest.mark.parametrize(
    "changes",
    [
        {},
        pytest.param({"scale": "sqrt"}, marks=pytest.mark.slow),
        pytest.param({"soft_cap": 0.8, "log_n": True}, marks=pytest.mark.slow),
    ],
    ids=lambda changes: "-".join(changes),
)
def test_every_measure_is_that_of_a_dense_float64_model(x64, changes):
    model = dataclasses.replace(SIZES, **changes)
    sizes = dict(context=CONTEXT, param_dtype=jnp.float64)
    wide = causal_lm(model, **sizes, rngs=nnx.Rngs(0))
    tell_norms_apart(wide)
    graph, params = nnx.split(wide, nnx.Param)
    factor = logit_scale(model)
    got = probe(
        graph, params, scale=jnp.asarray(factor), tokens=TOKENS, settings=SETTINGS
    )

    plain = nnx.to_pure_dict(params)
    eps = {layer: jnp.zeros((2, 3, 11, 11)) for layer in plain["blocks"]}
    (dparams, deps), logits = jax.grad(textbook, (0, 1), has_aux=True)(
        plain, eps, jnp.asarray(TOKENS), factor, model
    )
    for layer in range(2):
        for head in range(3):
            want = measures_of_head(
                np.asarray(logits[layer])[:, head], np.asarray(deps[layer])[:, head], 22
            )
            attention = dparams["blocks"][layer]["attention"]
            for name, projection in (("wq", "query"), ("wk", "key")):
                kernel = np.asarray(attention[projection]["kernel"])[:, head]
                want[f"{name}_gradient_norm"] = np.linalg.norm(kernel)
            assert got["heads"][layer][head].keys() == want.keys()
            for name, value in want.items():
                assert_close(got["heads"][layer][head][name], value, "float64", name)
    shares = [h["dead_share"] for layer in got["heads"] for h in layer]
    assert 0 < np.mean(shares) < 1  # a share that can't move tests nothing
    for name, value in got["mean"].items():
        every = [head[name] for layer in got["heads"] for head in layer]
        assert value == pytest.approx(np.mean(every), rel=1e-12)


def test_a_shift_of_0_changes_nothing_and_any_other_reaches_the_heads_of_its_layer():
    model = causal_lm(SIZES, rngs=nnx.Rngs(0))
    tell_norms_apart(model)
    tokens, zeros = TOKENS[:, :7], [jnp.zeros((2, 7, 3, 5))] * 2
    want = model(tokens, scale=0.7)
    got, _ = shifted(model, tokens, scale=0.7, shifts=zeros)
    assert_close(got, want)
    one = [zeros[0], zeros[1].at[:, 3].set(9.0)]
    changed = ~np.isclose(
        shifted(model, tokens, scale=0.7, shifts=one)[0], want, atol=1e-3
    )
    assert (changed.any(axis=(0, 2)) == (np.arange(7) == 3)).all()


def test_rows_that_are_not_finite_are_dead_and_saturated():
    graph, params = nnx.split(causal_lm(SIZES, rngs=nnx.Rngs(0)), nnx.Param)
    params = jax.tree.map(lambda x: x * np.nan, params)
    got = probe(graph, params, scale=jnp.float32(1), tokens=TOKENS, settings=SETTINGS)
    for head in sum(got["heads"], []):
        assert head["dead_share"] == head["saturated_share"] == 1
        assert np.isnan(head["entropy"]) and np.isnan(head["logit_max"])
