"""Rows of score gradients, against the gradient of a bias of zeros."""

import functools
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracle import (
    assert_close,
    assert_gradient_close,
    assert_same_bits,
    dense_jax,
    exact,
    jit,
)
from test_contract import CASES, EVERYTHING, cast

import jattn
from jattn import masks, scores
from jattn.diagnostics import score_gradient_rows

DIMS = chex.Dimensions(B=2, T=7, S=11, N=6, K=3, H=5, D=13)
RNG = jax.random.key(5)
random = np.random.default_rng(11)
ALLOWED = random.random(DIMS["BNTS"]) < 0.5
ALLOWED[0, 2, 3] = ALLOWED[1, :, 5] = False


def vectors(dtype=jnp.float32):
    shapes = DIMS["BTNH"], DIMS["BSKH"], DIMS["BSKD"]
    return [jnp.asarray(exact(n, *shape), dtype) for n, shape in enumerate(shapes)]


def gradients_of(*rows, width=DIMS.D, dtype=jnp.float32):
    """Gradients of an output and its lse, for any loss."""
    out, lse = exact(30, *rows, width), exact(31, *rows)
    return jnp.asarray(out, dtype), jnp.asarray(lse, jnp.promote_types(dtype, "f4"))


OUT_GRADIENT, LSE_GRADIENT = gradients_of(*DIMS["BTN"])


def rows_of(case, x, out_gradient, lse_gradient):
    return score_gradient_rows(
        *(x["q"], x["k"], x["v"], out_gradient),
        lse_gradient=lse_gradient,
        block_sizes=case.blocks,
        **case.options(x),
    )


def norms(attend, shape, gradients):
    """Of the gradient of zeros (*B, N, T, S) that `attend` adds to its logits."""
    ds = jax.vjp(attend, jnp.zeros(shape))[1](gradients)[0]
    return jnp.swapaxes(jnp.linalg.norm(ds, axis=-1), -1, -2)


def dense_rows(case, x, *gradients):
    def attend(extra):
        bias = case.bias(x)
        extra = extra if bias is None else extra + bias
        return case._replace(bias=lambda a: extra).dense(x)

    *batch, T, N, _ = x["q"].shape
    return norms(attend, (*batch, N, T, x["k"].shape[-3]), gradients)


@functools.cache
def answer(name):
    """The rows of a case in float64, by dense autodiff."""
    case = CASES[name]
    with jax.enable_x64(True):
        x = case.inputs()
        gradients = gradients_of(*x["q"].shape[:-1], dtype=jnp.float64)
        return np.asarray(jit(functools.partial(dense_rows, case))(x, *gradients))


EVERYDAY = {
    "lengths of keys, one of them 0",
    "bias with -inf entries and rows",
    "one query and one key",
    EVERYTHING.name,
}


def cases():
    for name in CASES:
        marks = () if name in EVERYDAY else pytest.mark.slow
        yield pytest.param(name, marks=marks)


@pytest.mark.parametrize("name", list(cases()))
def test_rows_are_those_of_dense_autodiff(name, x64):
    case = CASES[name]
    x = jax.tree.map(jnp.asarray, case.inputs())
    gradients = gradients_of(*x["q"].shape[:-1], dtype=jnp.float64)
    got = jit(functools.partial(rows_of, case))(x, *gradients)
    assert got.dtype == jnp.float64
    assert_gradient_close(got, answer(name), jnp.float64)
    assert "one key" in name or answer(name).max() > 0.1


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    "dtype",
    [
        jnp.bfloat16,
        pytest.param(jnp.float16, marks=SLOW),
        pytest.param(jnp.float32, marks=SLOW),
    ],
)
def test_those_of_narrow_inputs_are_as_exact_as_of_float32(dtype):
    """All arrays are such that every dtype holds them."""
    case = EVERYTHING
    x = {n: jnp.asarray(cast(x, dtype)) for n, x in case.inputs().items()}
    out_gradient, lse_gradient = gradients_of(*DIMS["BTN"])
    got = jit(functools.partial(rows_of, case))(
        x, out_gradient.astype(dtype), lse_gradient
    )
    assert got.dtype == jnp.float32
    assert_gradient_close(got, answer(case.name))


@pytest.mark.slow
@pytest.mark.parametrize("blocks", [(1, 1), (2, 5), (64, 3), None], ids=str)
def test_block_sizes_change_nothing(blocks, x64):
    case = EVERYTHING._replace(blocks=blocks)
    gradients = gradients_of(*DIMS["BTN"], dtype=jnp.float64)
    got = jit(functools.partial(rows_of, case))(case.inputs(), *gradients)
    assert_gradient_close(got, answer(case.name), jnp.float64)


def test_they_are_of_the_logits_that_attention_has():
    """The way of the documentation: the gradient of zeros that a model adds."""
    arrays, bias = vectors(), jnp.zeros(DIMS["BNTS"])
    options = dict(
        mask=masks.causal() & masks.lengths(np.array([4, 11])),
        score=scores.soft_cap(0.5),
        sinks=jnp.arange(6.0) - 3,
        query_positions="end",
        block_sizes=(4, 3),
    )

    def loss(bias, out_extra, lse_extra):
        out, lse = jattn.attention(*arrays, bias=bias, return_lse=True, **options)
        out, lse = out + out_extra, lse + lse_extra
        return jnp.sum(jnp.sin(out)) + jnp.sum(lse**2)

    zeros = jnp.zeros(DIMS["BTND"]), jnp.zeros(DIMS["BTN"])
    of_bias, out, lse = jit(jax.grad(loss, (0, 1, 2)))(bias, *zeros)
    rows = functools.partial(score_gradient_rows, **options)
    got = jit(rows)(*arrays, out, lse_gradient=lse)
    want = np.linalg.norm(np.asarray(of_bias, np.float64), axis=-1)
    assert_gradient_close(got, want.swapaxes(1, 2))
    assert want.max() > 0.1


def test_dropout_drops_the_weights_that_attention_dropped(x64):
    arrays, rate = vectors(jnp.float64), 0.4
    options = dict(dropout_rate=rate, dropout_rng=RNG)
    weights = jattn.attention_weights(*arrays[:2], **options)
    kept = jnp.where(weights > 0, 1 / (1 - rate), 0)
    out_gradient, lse_gradient = gradients_of(*DIMS["BTN"], dtype=jnp.float64)

    def rows(q, k, v, g, lse_gradient):
        return score_gradient_rows(
            *(q, k, v, g),
            lse_gradient=lse_gradient,
            mask=ALLOWED,
            block_sizes=(4, 3),
            **options,
        )

    def attend(bias):
        return dense_jax(*arrays, ALLOWED, bias=bias, kept=kept)

    got = jit(rows)(*arrays, out_gradient, lse_gradient)
    dense = functools.partial(norms, attend, DIMS["BNTS"])
    want = jit(dense)((out_gradient, lse_gradient))
    assert_gradient_close(got, np.asarray(want), jnp.float64)
    assert 0 < kept[ALLOWED].mean() < 1 / (1 - rate)


@jit
def masked_rows(allowed, q, k, v, out_gradient, lse_gradient):
    return score_gradient_rows(
        *(q, k, v, out_gradient),
        lse_gradient=lse_gradient,
        mask=allowed,
        block_sizes=(4, 3),
    )


def test_an_lse_that_the_loss_does_not_use_has_a_gradient_of_zeros():
    arrays, zeros = vectors(), jnp.zeros(DIMS["BTN"])
    without = masked_rows(ALLOWED, *arrays, OUT_GRADIENT, None)
    got = masked_rows(ALLOWED, *arrays, OUT_GRADIENT, zeros)
    assert_same_bits(got, without)


def test_of_an_lse_alone_they_follow_from_the_statistics():
    """dL/ds = p dL/dlse, so the norm is |dL/dlse| sqrt(sum p^2)."""
    arrays, none = vectors(), jnp.zeros_like(OUT_GRADIENT)
    got = masked_rows(ALLOWED, *arrays, none, LSE_GRADIENT)
    stats = jattn.attention(*arrays, stats=True, mask=ALLOWED)[1]
    assert_close(got, np.abs(LSE_GRADIENT) * np.sqrt(stats.sum_p2))


def test_a_query_without_a_choice_has_none():
    arrays, zeros = (*vectors(), OUT_GRADIENT), jnp.zeros(DIMS["BTN"])
    itself = np.broadcast_to(np.eye(DIMS.T, DIMS.S, 4) > 0, DIMS["BNTS"])
    assert_close(masked_rows(itself, *arrays, zeros), np.zeros(DIMS["BTN"]))
    hidden = ~ALLOWED.any(-1).swapaxes(1, 2)
    some = masked_rows(ALLOWED, *arrays, LSE_GRADIENT)
    np.testing.assert_array_equal(some == 0, hidden)
    nothing = masked_rows(np.zeros_like(ALLOWED), *arrays, LSE_GRADIENT)
    assert_same_bits(nothing, np.zeros(DIMS["BTN"], np.float32))


def test_beside_a_sink_one_key_is_a_choice_and_none_is_not():
    @jit
    def rows(mask):
        return score_gradient_rows(
            *vectors(),
            OUT_GRADIENT,
            lse_gradient=LSE_GRADIENT,
            mask=mask,
            sinks=jnp.arange(6.0) - 3,
            block_sizes=(4, 3),
        )

    assert np.min(rows(np.broadcast_to(np.eye(7, 11) > 0, DIMS["BNTS"]))) > 1e-3
    nothing = rows(np.zeros(DIMS["BNTS"], bool))
    assert_same_bits(nothing, np.zeros(DIMS["BTN"], np.float32))


@pytest.mark.parametrize("empty", "BTS")
def test_an_empty_axis_gives_zeros(empty):
    sizes = dict(B=2, T=7, S=11) | {empty: 0}
    q = jnp.ones((sizes["B"], sizes["T"], DIMS.N, DIMS.H))
    k = jnp.ones((sizes["B"], sizes["S"], DIMS.K, DIMS.H))
    rows = score_gradient_rows(q, k, k, q, lse_gradient=q[..., 0], sinks=1.0)
    assert_same_bits(rows, np.zeros(q.shape[:-1], np.float32))


@pytest.mark.parametrize("number", [np.nan, np.inf])
def test_what_is_spoilt_spoils_the_rows_that_see_it_only(number):
    arrays = [*vectors(), OUT_GRADIENT, LSE_GRADIENT]
    rows = functools.partial(masked_rows, ALLOWED)
    clean = np.asarray(rows(*arrays))
    one_row, by_key = np.zeros(DIMS["BTN"], bool), np.zeros(DIMS["BTN"], bool)
    one_row[0, 3, 1] = True  # a query that two rows of tiles have
    by_key[1, :, 2:4] = ALLOWED[1, 2:4, :, 9].T  # a key that two columns have
    assert by_key.any() and not by_key[1, :, 2:4].all()
    for place, index, spoilt in (
        (0, (0, 3, 1, 2), one_row),
        (1, (1, 9, 1, 2), by_key),
        (2, (1, 9, 1, 2), by_key),
        (3, (0, 3, 1, 2), one_row),
        (4, (0, 3, 1), one_row),
    ):
        poisoned = list(arrays)
        poisoned[place] = arrays[place].at[index].set(number)
        got = np.asarray(rows(*poisoned))
        assert not np.isfinite(got[spoilt]).any(), place
        assert_same_bits(got[~spoilt], clean[~spoilt], place)


@pytest.mark.parametrize("number", [1e30, np.nan, np.inf])
def test_garbage_in_unseen_keys_and_values_changes_no_bit(number):
    unseen = ALLOWED.copy()
    unseen[..., 4] = False
    q, k, v = vectors()
    rest = OUT_GRADIENT, LSE_GRADIENT
    garbage = [x.at[:, 4].set(number) for x in (k, v)]
    got = masked_rows(unseen, q, *garbage, *rest)
    assert_same_bits(got, masked_rows(unseen, q, k, v, *rest))


@pytest.mark.parametrize("number", [np.nan, np.inf])
def test_whatever_comes_to_a_query_without_keys_it_stays_0(number):
    """The gradient of a loss of an lse of -inf is seldom finite."""
    hidden = ~ALLOWED.any(-1).swapaxes(1, 2)
    spoilt = (
        jnp.where(hidden[..., None], number, OUT_GRADIENT),
        jnp.where(hidden, number, LSE_GRADIENT),
    )
    got = masked_rows(ALLOWED, *vectors(), *spoilt)
    want = masked_rows(ALLOWED, *vectors(), OUT_GRADIENT, LSE_GRADIENT)
    assert_same_bits(got, want)
    assert hidden.any() and not np.asarray(got)[hidden].any()


def test_shapes_and_dtypes_are_those_of_lse(x64):
    for *dtypes, of_gradient, want in (
        ("bfloat16", "bfloat16", "bfloat16", "bfloat16", "float32"),
        ("bfloat16", "float32", "float16", "float64", "float32"),
        ("float32", "float32", "float64", "float32", "float64"),
    ):
        arrays = [x.astype(dtype) for x, dtype in zip(vectors(), dtypes, strict=True)]
        gradient = jax.ShapeDtypeStruct(DIMS["BTND"], of_gradient)
        rows = jax.eval_shape(score_gradient_rows, *arrays, gradient)
        assert (rows.shape, rows.dtype) == (DIMS["BTN"], want)


def test_they_are_constant_to_derivatives():
    arrays = *vectors(), OUT_GRADIENT, LSE_GRADIENT, jnp.arange(6.0)

    def rows(q, k, v, g, lse_gradient, sinks):
        return score_gradient_rows(
            *(q, k, v, g), lse_gradient=lse_gradient, sinks=sinks, block_sizes=(4, 3)
        )

    gradients = jit(jax.grad(lambda *x: rows(*x).sum(), tuple(range(6))))(*arrays)
    moves = [jnp.ones_like(x) for x in arrays]
    tangent = jit(lambda x, dx: jax.jvp(rows, x, dx)[1])(arrays, tuple(moves))
    for x in (*gradients, tangent):
        assert_same_bits(x, np.zeros_like(x))


def test_a_map_over_data_of_a_mask_is_each_of_them():
    arrays = *vectors(), OUT_GRADIENT
    lengths = np.array([[0, 11], [3, 5], [7, 1]])

    def rows(lengths):
        mask = masks.lengths(lengths)
        return score_gradient_rows(*arrays, mask=mask, block_sizes=(4, 3))

    got = jit(jax.vmap(rows))(lengths)
    for n, length in enumerate(lengths):
        seen = np.arange(DIMS.S) < length[:, None, None, None]
        seen = np.broadcast_to(seen, DIMS["BNTS"])
        want = masked_rows(seen, *arrays, jnp.zeros(DIMS["BTN"]))
        assert_close(got[n], np.asarray(want))


def test_memory_is_linear_in_length():
    def temporary(n):
        x = jax.ShapeDtypeStruct((n, 1, 16), jnp.float32)
        fn = functools.partial(
            score_gradient_rows, mask=masks.causal(), block_sizes=(64, 64)
        )
        compiled = jit(fn).lower(x, x, x, x).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    small, large = temporary(1024), temporary(4096)
    assert np.log(large / small) / np.log(4) <= 1.05
    assert large < 4096**2  # a quarter of one float32 score matrix


INTEGERS = np.zeros(DIMS["BTND"], np.int32)
WRONG = [
    (
        dict(out_gradient=OUT_GRADIENT[..., :5]),
        ValueError,
        r"out_gradient must be \(\*B, T, N, D\), here \(2, 7, 6, 13\).*"
        r"got \(2, 7, 6, 5\)",
    ),
    (dict(out_gradient=OUT_GRADIENT[0]), ValueError, r"\(7, 6, 13\)"),
    (dict(out_gradient=INTEGERS), TypeError, "out_gradient.*floating point.*int32"),
    (dict(out_gradient=None), TypeError, "out_gradient must be an array.*NoneType"),
    (dict(out_gradient=1.0), TypeError, "out_gradient must be an array.*float"),
    (
        dict(lse_gradient=OUT_GRADIENT),
        ValueError,
        r"lse_gradient must be \(\*B, T, N\), here \(2, 7, 6\).*\(2, 7, 6, 13\)",
    ),
    (
        dict(lse_gradient=LSE_GRADIENT.swapaxes(1, 2)),
        ValueError,
        r"lse_gradient.*\(2, 6, 7\)",
    ),
    (dict(lse_gradient=INTEGERS[..., 0]), TypeError, "lse_gradient.*int32"),
    (dict(query=INTEGERS[..., :5]), TypeError, "query must be floating point.*int32"),
    (dict(key=vectors()[1][:, :, :2]), ValueError, r"value \(\*B, S, K, D\)"),
    (dict(mask=masks.causal()), ValueError, "T=7, S=11.*start"),
    (dict(mask=ALLOWED[0]), ValueError, r"mask.*\(6, 7, 11\)"),
    (dict(bias=ALLOWED), TypeError, "bias must be floating point.*bool"),
    (dict(sinks=jnp.zeros(3)), ValueError, r"sinks.*\(3,\)"),
    (dict(scale=jnp.zeros(3)), ValueError, r"scale.*\(3,\)"),
    (dict(dropout_rate=0.5), ValueError, "needs dropout_rng"),
    (dict(dropout_rate=1.0, dropout_rng=RNG), ValueError, r"\[0, 1\), but got 1.0"),
    (dict(block_sizes=(0, 4)), ValueError, r"two positive ints.*\(0, 4\)"),
    (dict(block_sizes=[4, 0]), ValueError, r"two positive ints.*\[4, 0\]"),
    (dict(query_positions="middle"), ValueError, "'start', 'end'.*'middle'"),
]


@pytest.mark.parametrize("options, kind, text", WRONG)
def test_a_mistake_is_named_in_letters(options, kind, text):
    names = ("query", "key", "value")
    given = dict(zip(names, vectors(), strict=True), out_gradient=OUT_GRADIENT)
    given |= options
    places = [given.pop(name) for name in (*names, "out_gradient")]
    with pytest.raises(kind) as error:
        score_gradient_rows(*places, **given)
    assert type(error.value) is kind
    message = str(error.value)
    assert re.match("score_gradient_rows: .*but got.*[.]$", message), message
    assert re.search(text, message), message
