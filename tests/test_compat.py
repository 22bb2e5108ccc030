"""`jattn.dot_product_attention` in the place of that of `jax.nn`."""

import inspect
import itertools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracle import (
    assert_close,
    assert_gradient_close,
    assert_same_bits,
    dense_attention,
    dense_jax,
    exact,
    jit,
)

import jattn
from jattn import masks
from jattn.compat import jax_nn

DIMS = chex.Dimensions(B=2, T=5, S=7, N=6, K=3, H=4, x=1)
theirs = jax.nn.dot_product_attention
ours = jattn.dot_product_attention


def vectors(dtype=jnp.float32, dims=DIMS):
    shapes = dims["BTNH"], dims["BSKH"], dims["BSKH"]
    return [jnp.asarray(exact(n, *shape), dtype) for n, shape in enumerate(shapes)]


def kinds_of(dims):
    """Of each kind of argument, its values and the pairs that each allows."""
    queries, keys = np.arange(dims.T)[:, None], np.arange(dims.S)[None]
    lengths = np.array([3, 5], np.int32), np.array([dims.S, dims.S - 3], np.int32)
    of_queries, of_keys = (
        (index < n[:, None, None])[:, None]
        for index, n in zip((queries, keys), lengths, strict=True)
    )
    mask = np.random.default_rng(5).random(dims["BNTS"]) < 0.6
    mask[1, 2, 3] = False
    both = dict(query_seq_lengths=lengths[0], key_value_seq_lengths=lengths[1])
    none = (dict(), True)
    return [
        [none, (dict(mask=mask), mask)],
        [none, (dict(is_causal=True), keys <= queries)],
        [
            none,
            (dict(local_window_size=2), abs(queries - keys) <= 2),
            (
                dict(local_window_size=(3, 1)),
                (queries - keys <= 3) & (keys - queries <= 1),
            ),
        ],
        [
            none,
            (dict(query_seq_lengths=lengths[0]), of_queries),
            (dict(key_value_seq_lengths=lengths[1]), of_keys),
            (both, of_queries & of_keys),
        ],
        [none, (dict(scale=0.3), True)],
    ]


def call(dims, *indices):
    """The arguments of a call with one value of each kind, and what they allow."""
    options, allowed = dict(), np.ones(dims["BNTS"], bool)
    for values, index in zip(kinds_of(dims), indices, strict=True):
        some, pairs = values[index]
        options, allowed = options | some, allowed & pairs
    return options, allowed


def test_its_parameters_are_those_of_jax_nn():
    def shown(fn):
        parameters = inspect.signature(fn).parameters.values()
        return [(p.name, p.kind, p.default) for p in parameters]

    assert shown(ours) == shown(theirs)


@pytest.mark.parametrize(
    "indices", [(1, 1, 2, 3, 1), (0, 0, 1, 1, 0)], ids=["all", "some"]
)
def test_arguments_act_together_and_all_derivatives_are_right(indices, x64):
    options, allowed = call(DIMS, *indices)
    arguments = (*vectors(jnp.float64), jnp.asarray(exact(3, *DIMS["xNTS"])))

    def attend(q, k, v, bias):
        return ours(q, k, v, bias, return_residual=True, **options)

    def dense(q, k, v, bias):
        return dense_jax(q, k, v, allowed, options.get("scale"), bias=bias)

    @jit
    def run(*arguments):
        results, pull = jax.vjp(attend, *arguments)
        wanted, pull_wanted = jax.vjp(dense, *arguments)
        d_out, d_lse = (jnp.cos(jnp.arange(x.size).reshape(x.shape)) for x in wanted)
        cotangents = d_out, jnp.where(jnp.isneginf(wanted[1]), 0.0, d_lse)
        return results, pull(cotangents), pull_wanted(cotangents)

    (out, lse), gradients, wanted = run(*arguments)
    q, k, v, bias = arguments
    want = dense_attention(q, k, v, allowed, options.get("scale"), bias=bias)
    assert_close(out, want.out, jnp.float64)
    assert_close(lse, want.lse, jnp.float64)
    for got, one in zip(gradients, wanted, strict=True):
        assert_gradient_close(got, np.asarray(one), jnp.float64)


def test_beyond_one_tile_nothing_changes():
    dims = chex.Dimensions(B=2, T=5, S=293, N=4, K=2, H=3, x=1)
    options, allowed = call(dims, 1, 1, 2, 3, 1)
    out, lse = jit(lambda *x: ours(*x, return_residual=True, **options))(
        *vectors(dims=dims)
    )
    want = dense_attention(*vectors(dims=dims), allowed, 0.3)
    assert_close(out, want.out)
    assert_close(lse, want.lse)


def test_no_bias_lets_a_query_look_at_a_forbidden_key():
    x = jnp.asarray(exact(0, 4, 1, 3), jnp.float32)

    def first_row(value, bias):
        return ours(x, x, value, bias, is_causal=True)[0, 0].sum()

    gradient_of = jit(jax.grad(first_row))

    for number, seen in ((jnp.finfo(jnp.float32).min, 1.0), (-jnp.inf, 0.0)):
        bias = jnp.zeros((1, 4, 4)).at[..., 0].set(number)
        gradient = gradient_of(x, bias)
        np.testing.assert_array_equal(gradient[0], np.full((1, 3), seen))
        np.testing.assert_array_equal(gradient[1:], np.zeros((3, 1, 3)))


def test_a_nan_that_no_query_may_look_at_changes_no_bit():
    options, _ = call(DIMS, 0, 1, 0, 3, 0)

    @jit
    def run(*arguments):
        out, pull = jax.vjp(lambda *x: ours(*x, **options), *arguments)
        return out, *pull(jnp.ones_like(out))

    q, k, v = vectors()
    spoilt = q.at[0, 3:].set(jnp.nan), k.at[1, 4:].set(jnp.nan), v.at[1, 4:].set(np.inf)
    for got, want in zip(run(*spoilt), run(q, k, v), strict=True):
        assert_same_bits(got, want)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_narrow_inputs_keep_their_dtype_and_an_lse_in_float32(dtype):
    q, k, v = vectors(dtype)
    out, lse = jit(lambda *x: ours(*x, return_residual=True))(q, k, v)
    assert (out.dtype, lse.dtype) == (dtype, jnp.float32)
    want = dense_attention(q, k, v)
    assert_close(out, want.out, dtype)
    assert_close(lse, want.lse)


def test_missing_axes_are_the_first_ones_as_in_jax_nn():
    q, k, v = vectors()
    calls = [((q, k, v), shape) for shape in ((), (5, 7), (6, 1, 7), (1, 1, 7))]
    calls += [((q[1], k[1], v[1:]), shape) for shape in ((6, 5, 7), (1, 6, 1, 7))]
    calls = [(x, jnp.asarray(exact(3, *shape), jnp.float32)) for x, shape in calls]

    @jit
    def run():
        return [
            [fn(*x, array, array > -1, return_residual=True) for x, array in calls]
            for fn in (ours, theirs)
        ]

    for got, want in zip(*run(), strict=True):
        chex.assert_trees_all_equal_shapes_and_dtypes(got, want)
        rows = np.asarray(want[1]) > -1e38
        assert rows.any()
        assert_close(got[0][rows], want[0][rows])
        assert_close(got[1][rows], want[1][rows])


@pytest.mark.parametrize("name", ["bias", "mask"])
def test_an_array_whose_first_axis_may_be_the_batch_is_refused(name):
    q = jnp.ones((2, 2, 2, 4))  # B = T = N
    for shape, per_row, for_all in [
        ((2, 2, 2), r"x\[:, None\]", r"x\[None\]"),
        ((2, 2), r"x\[:, None, None\]", r"x\[None, None\]"),
    ]:
        array = jnp.ones(shape, bool if name == "mask" else float)
        cure = rf"{name} must be \(B, N, T, S\).*write {per_row}; for .*{for_all}"
        with pytest.raises(ValueError, match=cure):
            ours(q, q, q, **{name: array})
        one = jax.eval_shape(lambda x, a: ours(x, x, x, **{name: a}), q[0], array)
        assert one.shape == (2, 2, 4), "without a batch there is no doubt"


BAD = {
    "dtypes": dict(query=np.ones(DIMS["BTNH"], jnp.bfloat16)),
    "value": dict(value=np.ones((*DIMS["BSK"], 9))),
    "heads": dict(query=np.ones((*DIMS["BT"], 4, DIMS.H))),
    "five axes": dict(query=np.ones(DIMS["xBTNH"]), key=np.ones(DIMS["xBSKH"])),
    "numbers as mask": dict(mask=np.ones(DIMS["BNTS"])),
    "bias of five axes": dict(bias=np.ones(DIMS["xBNTS"])),
    "lengths of floats": dict(query_seq_lengths=np.ones(2)),
    "one length": dict(query_seq_lengths=np.int32(3)),
    "lengths of another batch": dict(key_value_seq_lengths=np.ones(3, jnp.int32)),
    "a window of three": dict(local_window_size=(1, 2, 3)),
    "implementation": dict(implementation="xlaa"),
}


@pytest.mark.parametrize("change", BAD.values(), ids=BAD)
def test_what_jax_nn_refuses_with_a_value_error_is_one_here_with_a_cure(change):
    arguments = dict(zip(("query", "key", "value"), vectors(), strict=True)) | change
    with pytest.raises(ValueError):
        theirs(**arguments)
    with pytest.raises(
        ValueError, match=r"(?s)^dot_product_attention: .*, but got .*\."
    ):
        ours(**arguments)


MISREAD = {
    "integers as vectors": (TypeError, dict(query=np.ones(DIMS["BTNH"], jnp.int32))),
    "a Boolean bias": (TypeError, dict(bias=np.ones(DIMS["BNTS"], bool))),
    "an integer bias": (TypeError, dict(bias=np.ones(DIMS["BNTS"], jnp.int32))),
    "a window below 0": (ValueError, dict(local_window_size=(-1, 2))),
    "a Boolean window": (TypeError, dict(local_window_size=True)),
    "a scale with an axis": (ValueError, dict(scale=np.ones(DIMS["N"]))),
    "two axes": (
        ValueError,
        dict(query=np.ones(DIMS["NH"]), key=np.ones(DIMS["SKH"])),
    ),
    "a mask for other queries": (ValueError, dict(mask=np.ones((2, 1, 4, 7), bool))),
    "a rule": (TypeError, dict(mask=masks.causal())),
    "lengths below 0": (ValueError, dict(query_seq_lengths=np.array([-1, 3]))),
}


@pytest.mark.parametrize(("error", "change"), MISREAD.values(), ids=MISREAD)
def test_what_means_nothing_or_two_things_is_refused(error, change):
    arguments = dict(zip(("query", "key", "value"), vectors(), strict=True)) | change
    with pytest.raises(error, match=r"(?s)^dot_product_attention: .*, but got .*\."):
        ours(**arguments)


def test_vmap_over_any_one_argument():
    q, k, v = vectors()
    options, _ = call(DIMS, 1, 1, 2, 3, 1)
    bias = jnp.asarray(exact(3, *DIMS["BNTS"]), jnp.float32)
    lengths = [jnp.asarray(x) for x in list(options.values())[-3:-1]]
    window = options["local_window_size"]
    first = [q, k, v, bias, jnp.asarray(options["mask"]), *lengths, jnp.float32(0.3)]
    second = [2 * q, -k, v + 1, -bias, ~first[4], *(x - 1 for x in lengths), 0.7]

    def attend(q, k, v, bias, mask, of_queries, of_keys, scale):
        return ours(
            q,
            k,
            v,
            bias,
            mask,
            is_causal=True,
            local_window_size=window,
            query_seq_lengths=of_queries,
            key_value_seq_lengths=of_keys,
            scale=scale,
        )

    def with_second(n):
        return [second[i] if i == n else first[i] for i in range(len(first))]

    @jit
    def mapped():
        results = []
        for n in range(len(first)):
            both = jnp.stack([first[n], second[n]])
            arguments = [both if i == n else first[i] for i in range(len(first))]
            axes = [0 if i == n else None for i in range(len(first))]
            results.append(jax.vmap(attend, axes)(*arguments))
        return results

    one = jit(attend)
    for n, got in enumerate(mapped()):
        assert_close(got[0], one(*first), name=str(n))
        assert_close(got[1], one(*with_second(n)), name=str(n))


def test_what_forbids_pairs_arrives_as_rules_and_nothing_is_expanded(monkeypatch):
    given = {}

    def attend_as(caller, query, key, value, **options):
        given.update(options)
        return query

    monkeypatch.setattr(jax_nn, "attend_as", attend_as)
    options, _ = call(DIMS, 0, 1, 2, 3, 0)
    ours(*vectors(), mask=np.ones(DIMS["BxxS"], bool), **options)
    rules = [
        type(x).__name__ for x in given["mask"].walk() if type(x).__name__ != "And"
    ]
    assert rules == ["Causal", "SlidingWindow", "Lengths", "Dense"]
    assert sorted(x.shape for x in jax.tree.leaves(given["mask"])) == [
        (2,),
        (2,),
        DIMS["BxxS"],
    ]
    assert given["query_positions"] == "start"
    ours(*vectors())
    assert given["mask"] is None


def test_memory_does_not_grow_with_the_square_of_the_length():
    n = 4096
    x = jax.ShapeDtypeStruct((1, n, 1, 8), jnp.float32)
    mask = jax.ShapeDtypeStruct((1, 1, 1, n), bool)
    lengths = jax.ShapeDtypeStruct((1,), jnp.int32)

    def loss(x, mask, lengths):
        out = ours(x, x, x, mask=mask, is_causal=True, key_value_seq_lengths=lengths)
        return out.sum()

    compiled = jit(jax.grad(loss)).lower(x, mask, lengths).compile()
    temporary = compiled.memory_analysis().temp_size_in_bytes
    assert temporary < n * n / 4, "a Boolean for each pair takes n * n"


def test_lengths_of_any_integer_type_and_without_an_axis(x64):
    q, k, v = (x[0] for x in vectors())
    one = jit(lambda x: ours(q, k, v, key_value_seq_lengths=x))
    want = dense_attention(q, k, v, np.arange(7) < 4).out
    for length in (np.int64(4), np.array([4], np.uint8)):
        assert_close(one(length), want)


def test_sizes_of_zero():
    q, k, v = vectors()
    for T, S, N, K in ((0, 7, 6, 3), (5, 0, 6, 3), (5, 7, 0, 0)):
        some = q[:, :T, :N], k[:, :S, :K], v[:, :S, :K]
        out, lse = ours(*some, is_causal=True, return_residual=True)
        chex.assert_shape((out, lse), ((2, T, N, 4), (2, T, N)))
        np.testing.assert_array_equal(out, np.zeros(out.shape))
        np.testing.assert_array_equal(lse, np.full(lse.shape, -np.inf))


def test_cudnn_is_that_of_jax_nn_on_a_gpu_and_declines_elsewhere(monkeypatch):
    options, _ = call(DIMS, 1, 1, 1, 3, 1)
    q, k, v = vectors()
    with pytest.raises(NotImplementedError, match="needs a GPU .* backend 'cpu'"):
        ours(q, k, v, implementation="cudnn")
    passed = {}

    def record(query, *arrays, **options):
        passed.update(options, arrays=len(arrays))
        return query, query[..., 0]

    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax.nn, "dot_product_attention", record)
    out, lse = ours(q, k, v, implementation="cudnn", return_residual=True, **options)
    assert (out.shape, lse.shape) == (q.shape, q.shape[:-1])
    names = set(inspect.signature(theirs).parameters)
    assert passed.pop("arrays") == 4
    assert set(passed) == names - {"query", "key", "value", "bias", "mask"}
    assert (passed["implementation"], passed["local_window_size"]) == ("cudnn", (2, 2))


@pytest.mark.slow
def test_every_combination_is_right_and_that_of_jax_nn_where_there_are_keys():
    q, k, v = vectors()
    *kinds, _ = kinds_of(DIMS)
    every = itertools.product(*(range(len(values)) for values in kinds))
    calls = [call(DIMS, *indices, 1) for indices in every]

    @jit
    def run(q, k, v):
        return [
            [fn(q, k, v, return_residual=True, **options) for fn in (ours, theirs)]
            for options, _ in calls
        ]

    for (options, allowed), results in zip(calls, run(q, k, v), strict=True):
        want = dense_attention(q, k, v, allowed, options.get("scale"))
        some = np.isfinite(want.lse)
        for (out, lse), rows in zip(results, (np.ones_like(some), some), strict=True):
            assert_close(out[rows], want.out[rows], name=str(options))
            assert_close(lse[rows], want.lse[rows], name=str(options))
