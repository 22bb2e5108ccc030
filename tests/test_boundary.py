"""Every mistake of a caller gets its kind, the letters, the values and the cure."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracle import assert_same_bits, exact, jit

import jattn
from jattn import masks, scores
from jattn.core.boundary import Sizes, check_positions

B, T, S, N, K, H, D = 2, 5, 7, 6, 3, 4, 8


def vectors(dtype=np.float32):
    shapes = (B, T, N, H), (B, S, K, H), (B, S, K, D)
    return [exact(n, *shape).astype(dtype) for n, shape in enumerate(shapes)]


def zeros(*shape, dtype=np.float32):
    return np.zeros(shape, dtype)


Q, KEY, V = vectors()
COMPLETE_SENTENCE = re.compile(r"^[a-zA-Z_.]+: .*[.?]$", re.DOTALL)


def bare(s, q_pos, k_pos):
    return s


def narrower(s, q_pos, k_pos):
    return s.astype(jnp.bfloat16)


def smaller(s, q_pos, k_pos):
    return s[:, :1]


WRONG_VECTORS = [
    (zeros(B, T, N, 5), KEY, V, ["one head size H", "H=5 and 4", "same width"]),
    (zeros(3, T, N, H), KEY, V, [r"leading axes \*B", r"\(3, 5, 6, 4\)", "Broadcast"]),
    (zeros(T, N, H), KEY, V, [r"leading axes \*B", r"query \(5, 6, 4\)"]),
    (Q, KEY, zeros(B, S, 2, D), [r"value \(\*B, S, K, D\)", r"\(2, 7, 2, 8\)"]),
    (Q, KEY, zeros(B, 6, K, D), ["key's", "last axis may differ"]),
    (zeros(T, H), zeros(S, H), zeros(S, D), ["three axes", r"x\[\.\.\., None, :\]"]),
    (
        zeros(B, T, 5, H),
        KEY,
        V,
        ["multiple of key heads K", "N=5 and K=3", "Give each"],
    ),
    (zeros(B, T, N, 0), zeros(B, S, K, 0), V, ["H must be 1 or more"]),
    (Q, zeros(B, S, 0, H), zeros(B, S, 0, D), ["multiple of key heads K", "K=0"]),
    (
        zeros(B, N, T, H),
        zeros(B, N, S, H),
        zeros(B, N, S, H),
        ["N=5 and K=7", r"if your layout is \(\*B, N, T, H\)", "swapaxes"],
    ),
]


@pytest.mark.parametrize("query, key, value, texts", WRONG_VECTORS)
def test_vectors_that_do_not_fit_are_named_in_letters(query, key, value, texts):
    with pytest.raises(ValueError) as error:
        jattn.attention(query, key, value)
    assert_says(error, "attention", texts)


def assert_says(error, caller, texts):
    message = str(error.value)
    assert message.startswith(caller + ": "), message
    assert "but got" in message, message
    assert COMPLETE_SENTENCE.match(message), message
    for text in texts:
        assert re.search(text, message), f"{text!r} is not in {message!r}"


@pytest.mark.parametrize("name, place", [("query", 0), ("key", 1), ("value", 2)])
def test_integer_and_list_inputs_are_refused(name, place):
    arrays = vectors()
    arrays[place] = arrays[place].astype(np.int32)
    with pytest.raises(TypeError) as error:
        jattn.attention(*arrays)
    assert_says(
        error, "attention", [f"{name} must be floating point", "int32", "astype"]
    )
    arrays[place] = arrays[place].tolist()
    with pytest.raises(TypeError) as error:
        jattn.attention(*arrays)
    assert_says(error, "attention", [f"{name} must be an array", "list", "jnp.asarray"])


ENDS = dict(query_positions="end")
BOOL = np.ones((B, N, T, S), bool)
WRONG_OPTIONS = [
    # masks
    (dict(mask=BOOL[0, 0]), ValueError, [r"\(\*B, N, T, S\)", r"\(5, 7\)", "padding"]),
    (
        dict(mask=BOOL[:, 0]),
        ValueError,
        [r"\(2, 5, 7\)", r"x\[:, None\]", r"x\[None\]"],
    ),
    (dict(mask=BOOL[..., :4]), ValueError, [r"\(2, 6, 5, 4\)", "each axis full or 1"]),
    (dict(mask=BOOL[:, :3]), ValueError, ["mask", r"\(2, 3, 5, 7\)"]),
    (dict(mask=BOOL.astype(int)), TypeError, ["mask must be Boolean", "int64", "!= 0"]),
    (dict(mask=BOOL.astype(np.float32)), TypeError, ["must be Boolean", "float32"]),
    (dict(mask=[[True]]), TypeError, ["mask must be an array or a rule", "list"]),
    (dict(mask=True), TypeError, ["mask must be an array or a rule", "bool"]),
    (dict(mask=masks.dense(BOOL[0, 0])), ValueError, ["mask must be", r"\(5, 7\)"]),
    (dict(mask=masks.padding(BOOL[0, 0, 0])), ValueError, [r"\(\*B, S\)", r"\(7,\)"]),
    (
        dict(mask=masks.padding(BOOL[:, 0, 0, :4])),
        ValueError,
        ["key_valid", r"\(2, 4\)"],
    ),
    (dict(mask=masks.segments(zeros(B, T, dtype=int))), ValueError, ["key_ids"]),
    (
        dict(mask=masks.lengths(np.array([1, 2, 3]))),
        ValueError,
        [r"\(\*B\)", r"\(3,\)"],
    ),
    (
        dict(mask=masks.sliding_window(np.array([1, 2])), **ENDS),
        ValueError,
        [r"mask.left", r"\(N\)", r"\(2,\)"],
    ),
    (
        dict(mask=masks.causal() & ~masks.padding(BOOL[0, 0, 0]), **ENDS),
        ValueError,
        ["mask.right.inner.key_valid"],
    ),
    # bias
    (dict(bias=BOOL), TypeError, ["bias must be floating point", "bool", "mask="]),
    (dict(bias=zeros(T, S)), ValueError, ["bias", r"\(5, 7\)", r"x\[None, None\]"]),
    (dict(bias=zeros(N, T, S)), ValueError, ["bias", r"\(6, 5, 7\)", r"x\[None\]"]),
    (dict(bias=0.5), TypeError, ["bias must be an array", "float"]),
    (dict(bias=zeros(1, 1, T, T)), ValueError, [r"\(1, 1, 5, 5\)"]),
    # scale
    (dict(scale=zeros(2)), ValueError, [r"\(N,\)", r"\(2,\)", "N=6"]),
    (dict(scale=zeros(N, 1)), ValueError, [r"\(6, 1\)"]),
    (
        dict(scale=jnp.ones((), bool)),
        TypeError,
        ["scale must be a number", "bool"],
    ),
    # positions
    (
        dict(mask=masks.causal()),
        ValueError,
        ["T=5, S=7", '"start"', '"end"', "integers"],
    ),
    (dict(score=scores.rule(bare)), ValueError, ["T=5, S=7", "None"]),
    (dict(mask=~masks.causal() | masks.nothing()), ValueError, ["T=5, S=7"]),
    (dict(query_positions="last"), ValueError, ["'start', 'end'", "'last'"]),
    (dict(query_positions="strat"), ValueError, ["Did you mean 'start'"]),
    (dict(query_positions=zeros(T)), TypeError, ["must be integers", "float"]),
    (dict(query_positions=np.arange(4)), ValueError, [r"\(\*B, T\)", r"\(2, 5\)"]),
    (dict(key_positions=np.arange(T)), ValueError, [r"\(\*B, S\)", r"\(2, 7\)"]),
    (
        dict(key_positions=np.ones((3, S), int)),
        ValueError,
        ["key_positions", r"\(3, 7\)"],
    ),
    # options
    (dict(block_sizes=(0, 4)), ValueError, [r"\(0, 4\)", "two positive ints"]),
    (dict(block_sizes=(4, -1)), ValueError, [r"\(4, -1\)", "jattn.tune"]),
    (dict(block_sizes=(True, 4)), ValueError, [r"\(True, 4\)"]),
    (dict(block_sizes=(1.5, 4)), ValueError, [r"\(1.5, 4\)"]),
    (dict(block_sizes=[4, 0]), ValueError, [r"\[4, 0\]"]),
    (dict(block_sizes=(4, 4, 4)), ValueError, [r"\(4, 4, 4\)"]),
    (dict(block_sizes=4), ValueError, ["got 4"]),
    (
        dict(block_sizes=(4, 4), implementation="reference"),
        ValueError,
        ["no tiles", "Leave one of them out"],
    ),
    (dict(implementation="blockwize"), ValueError, ["Did you mean 'blockwise'"]),
    (
        dict(implementation="flash"),
        ValueError,
        ["'reference', 'decode', 'blockwise'", "'flash'"],
    ),
    (dict(empty_rows="zeros"), ValueError, ["Did you mean 'zero'"]),
    (dict(empty_rows=None), ValueError, ["'zero', 'mean'", "None"]),
    # score rules
    (
        dict(score=bare),
        TypeError,
        ["score must be a rule", "function", r"scores.rule\(fn\)"],
    ),
    (dict(score=(scores.soft_cap(2.0), bare)), TypeError, ["function"]),
    (dict(score=masks.causal()), TypeError, ["score must be a rule", "Causal"]),
    (
        dict(score=scores.rule(narrower), **ENDS),
        ValueError,
        ["rule.narrower", "shape", "bfloat16", "float32", "cast"],
    ),
    (dict(score=scores.rule(smaller), **ENDS), ValueError, [r"\(5, 1\)", r"\(5, 7\)"]),
    (dict(score=scores.additive(zeros(T, S))), ValueError, [r"score\[0\] must be"]),
]


@pytest.mark.parametrize("options, kind, texts", WRONG_OPTIONS)
def test_an_option_that_does_not_fit_is_refused(options, kind, texts):
    with pytest.raises(kind) as error:
        jattn.attention(Q, KEY, V, **options)
    assert type(error.value) is kind
    assert_says(error, "attention", texts)


@pytest.mark.parametrize(
    "scale",
    ["0.5", np.ones(N, bool), True, [1.0, 2.0]],
    ids=["text", "Booleans", "True", "two numbers"],
)
def test_scale_is_a_number_or_one_per_head(scale):
    with pytest.raises((TypeError, ValueError), match="attention: scale must be"):
        jattn.attention(Q, KEY, V, scale=scale)


@pytest.mark.parametrize("name", ["causal", "is_causal", "dropout", "masks"])
def test_an_unknown_keyword_is_a_type_error(name):
    with pytest.raises(TypeError, match=name):
        jattn.attention(Q, KEY, V, **{name: True})


def test_a_mask_is_never_taken_by_position():
    with pytest.raises(TypeError, match="positional"):
        jattn.attention(Q, KEY, V, BOOL)


def test_the_same_mistakes_are_named_by_the_pure_functions():
    with pytest.raises(ValueError, match=r"^attention_weights: .*N=5 and K=3"):
        jattn.attention_weights(zeros(B, T, 5, H), KEY)
    with pytest.raises(ValueError, match=r"^attention_weights: mask.*\(5, 7\)"):
        jattn.attention_weights(Q, KEY, mask=BOOL[0, 0])
    with pytest.raises(ValueError, match=r"^scaled_scores: .*H=4 and 5"):
        jattn.scaled_scores(Q, zeros(B, S, K, 5))
    with pytest.raises(ValueError, match=r"^scaled_scores: scale .*\(2,\)"):
        jattn.scaled_scores(Q, KEY, zeros(2))
    with pytest.raises(TypeError, match=r"^mask_scores: .*Boolean.*allowed != 0"):
        jattn.mask_scores(jnp.zeros((2, 3)), jnp.ones((2, 3), int))


def test_errors_under_jit_and_grad_are_the_same():
    with pytest.raises(ValueError, match="T=5, S=7"):
        jax.grad(lambda q: jattn.attention(q, KEY, V, mask=masks.causal()).sum())(Q)
    with pytest.raises(ValueError, match="N=5 and K=3"):
        jax.jit(jattn.attention)(zeros(B, T, 5, H), KEY, V)


def test_a_rule_without_positions_asks_for_none():
    jattn.attention(Q, KEY, V, mask=masks.lengths(3), score=scores.soft_cap(2.0))


def test_a_batch_mask_is_not_read_as_heads_when_the_sizes_agree():
    x = zeros(3, 3, 3, H)
    with pytest.raises(ValueError, match=r"\(3, 3, 3\)"):
        jattn.attention(x, x, x, mask=np.ones((3, 3, 3), bool))


@pytest.mark.parametrize("algorithm", ["reference", "blockwise"])
def test_the_gradient_to_the_future_is_exactly_zero(algorithm):
    q, k, v = exact(1, T, 1, H), exact(2, T, 1, H), exact(3, T, 1, D)
    blocks = (2, 3) if algorithm == "blockwise" else None

    def sums(q, k, v):
        out, lse = jattn.attention(
            q,
            k,
            v,
            mask=masks.causal(),
            implementation=algorithm,
            block_sizes=blocks,
            return_lse=True,
        )
        return out.sum((1, 2)), lse[:, 0]

    arguments = [x.astype(np.float32) for x in (q, k, v)]
    outs, lses = jit(jax.jacrev(sums, (0, 1, 2)))(*arguments)
    future = np.triu(np.ones((T, T), bool), 1)
    for jacobian in (*outs[1:], lses[1]):
        jacobian = np.abs(np.asarray(jacobian)).sum((2, 3))  # (T, S)
        assert not jacobian[future].any()
        assert jacobian[~future][1:].all()


@pytest.mark.parametrize("algorithm", ["reference", "blockwise"])
@pytest.mark.parametrize("garbage", [3.0, 1e30, np.nan, np.inf])
def test_no_bit_depends_on_the_future(algorithm, garbage):
    x = exact(4, T, 1, H).astype(np.float32)
    changed = x.copy()
    changed[3:] = garbage
    blocks = (2, 3) if algorithm == "blockwise" else None
    out, other = (
        jattn.attention(
            x,
            keys,
            keys,
            mask=masks.causal(),
            implementation=algorithm,
            block_sizes=blocks,
        )
        for keys in (x, changed)
    )
    assert_same_bits(other[:3], out[:3])
    assert (np.asarray(other[3:]) != np.asarray(out[3:])).all()


def test_the_ends_of_the_queries_are_those_of_the_keys():
    x = jnp.asarray(np.random.default_rng(0).normal(size=(1, 8, 1, 4)), jnp.float32)
    late = np.arange(100, 108)
    for place, positions in (("start", late[:3]), ("end", late[5:])):
        named, given = (
            jattn.attention(
                x[:, :3],
                x,
                x,
                mask=masks.causal(),
                query_positions=p,
                key_positions=late,
            )
            for p in (place, positions)
        )
        np.testing.assert_array_equal(named, given)
        assert np.abs(named).min() > 0
    with pytest.raises(ValueError, match="T > S"):
        jattn.attention(
            x, x[:, :3], x[:, :3], query_positions="end", key_positions=late[:3]
        )


def test_positions_of_any_integer_type_have_the_differences_of_integers():
    x = jnp.ones((1, 8, 1, 4))
    window = masks.sliding_window(1, 1)
    for dtype in (np.uint8, np.int8, np.uint32, np.int64):
        p = np.arange(8, dtype=dtype)
        for given in (p, jnp.asarray(p)):
            weights = jattn.attention_weights(
                x, x, mask=window, query_positions=given, key_positions=given
            )
            assert int((weights > 0).sum()) == 22


BEYOND = 2**32 + 1
TOO_LARGE = [
    lambda: masks.segments(np.array([[1, BEYOND]])),
    lambda: masks.lengths(np.array([BEYOND])),
    lambda: masks.sliding_window(np.array(BEYOND)),
    lambda: masks.rule(lambda q, k, a: k < a, np.array(BEYOND)),
    lambda: jattn.rotary(jnp.ones((1, 1, 2)), np.array([BEYOND])),
    lambda: jattn.attention(
        jnp.ones((1, 1, 2)),
        *[jnp.ones((1, 1, 2))] * 2,
        query_positions=np.array([BEYOND]),
    ),
]


@pytest.mark.parametrize("call", TOO_LARGE)
def test_integers_that_would_be_cut_off_are_refused(call):
    with pytest.raises(ValueError, match=str(BEYOND)):
        call()


def test_a_bound_beyond_every_position_is_no_bound():
    assert masks.sliding_window(2**40) == masks.sliding_window(2**31 - 1)


@pytest.mark.parametrize("blocks", [(2, 3), None])
@pytest.mark.parametrize(
    "fn", [lambda q, k: (k <= q)[:, 0], lambda q, k: (k <= q)[None, None]]
)
def test_a_mask_rule_must_return_the_axes_of_a_tile(fn, blocks):
    with pytest.raises(ValueError, match="axes of scores") as error:
        jattn.attention(Q, KEY, V, mask=masks.rule(fn), block_sizes=blocks, **ENDS)
    assert "under the mask rule" in error.value.__notes__[0]


@pytest.mark.parametrize("blocks", [(2, 3), None])
def test_values_of_no_width_have_outputs_of_none(blocks):
    out, lse = jattn.attention(Q, KEY, V[..., :0], block_sizes=blocks, return_lse=True)
    assert out.shape == (B, T, N, 0) and np.isfinite(lse).all()


@pytest.mark.parametrize("blocks", [(2, 3), None])
def test_inputs_of_different_dtypes_are_computed_in_the_wider(blocks):
    q = Q.astype(jnp.bfloat16)
    out, lse = jattn.attention(q, KEY, V, block_sizes=blocks, return_lse=True)
    assert out.dtype == jnp.bfloat16 and lse.dtype == jnp.float32


def test_what_is_not_a_float_for_attention_is_refused():
    for x in (Q.astype(jnp.float8_e4m3fn), Q.astype(jnp.complex64), Q > 0):
        with pytest.raises(TypeError, match="query must be floating point"):
            jattn.attention(x, KEY, V)
        with pytest.raises(TypeError, match="rotary: x must be floating point"):
            jattn.rotary(x)


def test_a_function_is_not_a_mask_and_the_cure_is_named():
    with pytest.raises(TypeError, match=r"jattn\.masks\.rule\(fn\)"):
        jattn.attention(Q, KEY, V, mask=lambda q, k: k <= q)
    for make in (masks.rule, scores.rule):
        with pytest.raises(
            TypeError, match="fn must be a function, but got 7. Give the"
        ):
            make(7)


@pytest.mark.parametrize("padding_id", ["0", 0.5, True])
def test_padding_id_is_an_int(padding_id):
    with pytest.raises(TypeError, match="padding_id must be an int"):
        masks.segments(np.array([[1, 2]]), padding_id=padding_id)


ONE, TABLE = np.array([[1]]), np.ones((4, 1))
STATIC = [
    masks.sliding_window,
    masks.prefix,
    masks.lengths,
    masks.chunked,
    masks.dilated,
    scores.log_n_scale,
    lambda n: masks.segments(ONE, padding_id=n),
    lambda n: masks.block_sparse(ONE > 0, n),
    lambda n: scores.relative_bias(TABLE, bidirectional=False, max_distance=n),
]


@pytest.mark.parametrize("make", STATIC)
def test_an_integer_scalar_of_numpy_is_static_like_an_int(make):
    want = jax.tree.structure(make(5))
    for kind in (np.int64, np.uint8):
        assert jax.tree.structure(make(kind(5))) == want


def test_an_array_without_axes_is_data_or_refused():
    for make in STATIC[:3]:
        assert len(jax.tree.leaves(make(np.array(5)))) == 1
    for make in STATIC[3:]:
        with pytest.raises(TypeError, match=r"int\(x\) makes one of an array"):
            make(np.array(5))


@pytest.mark.parametrize("base", [0.0, -5.0, float("nan")])
def test_the_base_of_rotary_positions_is_positive(base):
    with pytest.raises(ValueError, match="base must be positive"):
        jattn.rotary(jnp.ones((1, 1, 2)), base=base)


@pytest.mark.parametrize("beyond", [-(2**31), 2**30])
@pytest.mark.parametrize("make", [np.asarray, jnp.asarray])
def test_positions_whose_differences_would_overflow_are_refused(make, beyond):
    positions = make(np.array([beyond] + [0] * (S - 1), np.int32))
    with pytest.raises(ValueError, match=r"less than 2\*\*30"):
        jattn.attention(Q, KEY, V, key_positions=positions, query_positions="end")


def test_a_traced_position_of_a_wide_dtype_never_becomes_another():
    def placed(positions):
        sizes = Sizes((), 1, 2, 1, 1, 1)
        return jax.jit(lambda x: check_positions("f", "x", x, "S", sizes))(positions)

    got = placed(np.array([2**32 - 5, 7], np.uint32))
    assert got.dtype == np.int32 and got.tolist() == [2**30, 7]
    with jax.enable_x64(True):
        assert placed(np.array([2**32 + 5, -(2**40)])).tolist() == [2**30, -(2**30)]


def test_the_cure_for_a_mask_of_two_axes_works():
    q, k, v = Q[0], KEY[0], V[0]
    with pytest.raises(ValueError, match=r"write x\[None\];"):
        jattn.attention(q, k, v, mask=BOOL[0, 0])
    jattn.attention(q, k, v, mask=BOOL[0, 0][None])
