"""Planted faults are found, and said where; what is right raises no alarm."""

import functools

import faulty
import flax.linen
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from faulty import DOCUMENTS, IDS, PADDED, VALID, B, H, N, T, right
from flax import nnx
from oracle import exact

import jattn
from jattn import masks
from jattn.diagnostics import (
    leaks,
    measured_scale,
    memory_against_length,
    nan_safety,
    rows,
)
from jattn.diagnostics.leak_changes import blind_changes, covered

CAUSAL = masks.causal()
PACKED = CAUSAL & masks.segments(IDS)
LEFT_PADDED = CAUSAL & masks.padding(VALID)
WINDOW = masks.sliding_window(2)


@pytest.fixture(scope="module", autouse=True)
def compiled_sooner():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("jattn.diagnostics.bench.quick_jit", oracle.jit)
        yield


def vectors(*shape, dtype=jnp.float32):
    shape = shape or (B, T, N, H)
    return tuple(jnp.asarray(exact(i, *shape), dtype) for i in range(3))


def leaks_of(attend, **options):
    return leaks(lambda x: attend(*x), vectors(), **options)


def near(T, left=2, right=0):
    offsets = faulty.distance(T)[None]
    return (offsets <= left) & (offsets >= -right)


def window(left, right):
    return functools.partial(faulty.right, allowed=near(T, left, right))


def without_output(x):
    """A layer whose output projection was forgotten at its initial zeros."""
    return x[0] + faulty.right(*x) @ np.zeros((H, H), np.float32)


def scale_of(attend, H=8, T=2, **options):
    return measured_scale(oracle.jit(attend), head_dims=[H], lengths=[T], **options)


def growth(attend):
    def make(n):
        return (jax.ShapeDtypeStruct((1, n, 1, 4), jnp.float32),) * 3

    return memory_against_length(attend, make, lengths=(64, 128, 256))


FAULTS = {
    # what is wrong: how it is audited, the check that finds it, and what it says
    "keys are not transposed": (
        lambda: rows(faulty.keys_not_transposed),
        "softmax",
        "not 0.07777; all are those of keys not transposed",
    ),
    "softmax over queries": (
        lambda: rows(faulty.softmax_over_queries),
        "sum",
        "columns sum to one: a softmax over queries",
    ),
    "softmax over heads": (
        lambda: rows(faulty.softmax_over_heads),
        "softmax",
        "those of a softmax over heads",
    ),
    "mask after the softmax, in the weights": (
        lambda: rows(faulty.mask_after_softmax, mask=CAUSAL),
        "softmax",
        "those of a mask after the softmax",
    ),
    "mask after the softmax": (
        lambda: leaks_of(faulty.mask_after_softmax, means=["gradient"]),
        "gradient",
        "output (0, 0) depends on input (0, 1)",
    ),
    "output projection of zeros": (
        lambda: leaks(without_output, vectors()),
        "control",
        "0 of 12 outputs depend on other positions",
    ),
    "mask one key too far": (
        lambda: leaks_of(faulty.one_key_further, means=["perturbation"]),
        "perturbation",
        "output (0, 0) depends on input (0, 1): it moves by",
    ),
    "mask one key too far, in the weights": (
        lambda: rows(faulty.one_key_further, mask=CAUSAL),
        "forbidden",
        "weight (0, 0, 0, 1) is",
    ),
    "mask without the own key": (
        lambda: rows(faulty.own_key_hidden, mask=CAUSAL),
        "softmax",
        "those of a mask without a query's own key",
    ),
    "a millionth of the future": (
        lambda: leaks_of(faulty.future_by_a_millionth, means=["perturbation"]),
        "perturbation",
        "output (0, 0) depends on input (0, 1)",
    ),
    "padding is read": (
        lambda: leaks_of(right, mask=LEFT_PADDED, means=["perturbation"]),
        "perturbation",
        "output (0, 1) depends on input (0, 0)",
    ),
    "the other document is read": (
        lambda: leaks_of(right, mask=PACKED, means=["gradient"]),
        "gradient",
        "output (0, 3) depends on input (0, 0)",
    ),
    "mask along the wrong axis": (
        lambda: rows(faulty.mask_transposed, mask=CAUSAL),
        "softmax",
        "those of a mask transposed",
    ),
    "mask of batch rows read as heads'": (
        lambda: rows(faulty.mask_by_heads, mask=PACKED),
        "softmax",
        "those of a mask by heads instead of batch",
    ),
    "mask of batch rows read as heads', by its leak": (
        lambda: leaks_of(faulty.mask_by_heads, mask=PACKED, means=["perturbation"]),
        "perturbation",
        "output (0, 3) depends on input (0, 0)",
    ),
    "batch rows are mixed": (
        lambda: leaks_of(faulty.batch_mixed, means=["perturbation"]),
        "perturbation",
        "output (1, 0) depends on input (0, 0)",
    ),
    "batch rows of values are mixed": (
        lambda: rows(faulty.batch_mixed, mask=CAUSAL),
        "sum",
        "row (0, 0, 0) sums to 4, not 1",
    ),
    "heads are mixed": (
        lambda: rows(faulty.heads_mixed, mask=CAUSAL),
        "softmax",
        "weight (0, 0, 1, 0) is",
    ),
    "a sentinel of -3": (
        lambda: leaks_of(faulty.sentinel(-3.0), means=["perturbation"]),
        "perturbation",
        "output (0, 0) depends on input (0, 1)",
    ),
    "a sentinel of -50": (
        lambda: leaks_of(faulty.sentinel(-50.0), means=["gradient"]),
        "gradient",
        "output (0, 0) depends on input (0, 1)",
    ),
    "a sentinel of -50, in the weights": (
        lambda: rows(faulty.sentinel(-50.0), mask=CAUSAL),
        "forbidden",
        "weight (0, 0, 0, 1) is",
    ),
    "batch rows of values are five apart": (
        lambda: rows(
            oracle.jit(lambda q, k, v: right(q, k, jnp.roll(v, 5, 0), True)),
            query=vectors(10, 3, 1, 2)[0],
            key=vectors(10, 3, 1, 2)[1],
        ),
        "sum",
        "row (0, 0, 0) sums to 32, not 1",
    ),
    "a scale of 1 in place of another": (
        lambda: rows(functools.partial(right, scale=1.0), mask=CAUSAL, scale=3),
        "softmax",
        "those of a scale of 1 instead",
    ),
    "another scale, twice": (
        lambda: rows(functools.partial(right, scale=9.0), mask=CAUSAL, scale=3),
        "softmax",
        "those of a scale applied twice",
    ),
    "values are pooled": (
        lambda: rows(faulty.values_pooled),
        "softmax",
        "those of a mean of all values",
    ),
    "a window of one key too many": (
        lambda: leaks_of(window(3, 0), mask=WINDOW, means=["perturbation"]),
        "perturbation",
        "output (0, 3) depends on input (0, 0)",
    ),
    "a window with a key of the future": (
        lambda: leaks_of(window(2, 1), mask=WINDOW, means=["gradient"]),
        "gradient",
        "output (0, 0) depends on input (0, 1)",
    ),
    "positions that depend on the length": (
        lambda: leaks_of(faulty.positions_from_the_end, means=["prefix"]),
        "prefix",
        "of the first 4 inputs alone is",
    ),
    "dropout is on": (
        lambda: leaks_of(faulty.Dropout()),
        "repeat",
        "two equal calls differ at output (0, 0)",
    ),
    "scaled twice": (
        lambda: scale_of(faulty.scaled_twice, 8, 2),
        "H=8, T=2",
        "0.125 = 0.35355 x expected: 1/H, or scaled twice",
    ),
    "not scaled": (
        lambda: scale_of(faulty.unscaled, 32, 2),
        "H=32, T=2",
        "1 = 5.6569 x expected: no scaling",
    ),
    "scaled by the width of the model": (
        lambda: scale_of(faulty.scaled_by_width, 8, 9),
        "H=8, T=9",
        "0.5 x expected: 1/sqrt(N H), by the width of the model",
    ),
    "scaled by the length": (
        lambda: measured_scale(oracle.jit(faulty.scaled_by_length)),
        "length",
        "the factor at T=9 is not that at T=2",
    ),
    "a soft cap": (
        lambda: scale_of(faulty.capped, 8, 2),
        "H=8, T=2",
        "no constant factor",
    ),
    "a soft cap in bfloat16": (
        lambda: scale_of(faulty.capped, 8, 3, dtype=jnp.bfloat16),
        "H=8, T=3",
        "no constant factor",
    ),
    "normalised queries": (
        lambda: scale_of(faulty.queries_normalised, 32, 2),
        "H=32, T=2",
        "no constant factor",
    ),
    "-1e9 in float16": (
        lambda: nan_safety(faulty.minus_billion),
        "float16 empty row",
        "row (0, 4) is nan",
    ),
    "the mean of values on an empty row": (
        lambda: nan_safety(faulty.mean_on_empty_rows),
        "empty row",
        "row (0, 4) is the mean of all values, forbidden or not",
    ),
    "a NaN behind the mask, backwards": (
        lambda: nan_safety(faulty.nan_in_the_backward_pass),
        "masked key, gradient",
        "nan there makes d query (0, 0, 0, 0) nan",
    ),
    "memory of all pairs": (
        lambda: growth(faulty.everything_kept),
        "growth",
        "quadratic, like n^1.99: 64: 34.1 kB",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found_and_said_where(name):
    audit, check, says = FAULTS[name]
    report = audit()
    assert not report.ok, report
    found = report[check]
    assert found.verdict in ("wrong", "inconclusive"), report
    assert says in found.detail, report
    assert says in str(report)


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (NotImplementedError, "NotImplementedError"),
        (NotImplementedError("not\n here"), "NotImplementedError: not here"),
        (AssertionError("shapes"), "AssertionError: shapes"),
    ],
)
def test_what_is_refused_is_no_fault_and_no_proof(error, says):
    def refuses(query, key, value, *, mask):
        raise error

    report = nan_safety(refuses)
    assert {finding[1:3] for finding in report} == {("refused", says)}
    assert report.verdict == "refused" and report.first is None
    assert f"refused       masked key         {says}" in str(report)


def test_a_function_without_a_signature_can_be_audited():
    assert nan_safety(max).verdict == "refused"


def test_weights_that_are_nearly_right_are_not_those_of_a_mistake():
    def nearly(q, k, v):
        return right(q, k, v, True) * (1 + 2e-4)

    report = rows(nearly)
    assert not report.ok and "all are those of" not in str(report)


def model(allowed=faulty.causal, *, layers=2, rope=False):
    """Embeddings, layers with normalisation and a head; allowed(T) is (B, T, S)."""
    rng = np.random.default_rng(3)
    table = rng.standard_normal((11, 6)).astype(np.float32)
    weights = (rng.standard_normal((layers, 4, 6, 2, 4)) / 3).astype(np.float32)

    def normalised(x):
        x = x - x.mean(-1, keepdims=True)
        return x / jnp.sqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-5)

    def apply(x):
        if jnp.issubdtype(x.dtype, jnp.integer):
            x = jnp.asarray(table)[x]
        for of_q, of_k, of_v, of_out in weights:
            y = normalised(x)
            q, k, v = (jnp.einsum("btd,dnh->btnh", y, w) for w in (of_q, of_k, of_v))
            if rope:
                q, k = jattn.rotary(q), jattn.rotary(k)
            y = right(q, k, v, allowed(x.shape[1]))
            x = x + jnp.einsum("btnh,dnh->btd", y, of_out)
        return jnp.einsum("btd,vd->btv", normalised(x), table)

    return apply


def of_nnx(x):
    layer = nnx.MultiHeadAttention(2, 6, decode=False, rngs=nnx.Rngs(0))
    return jax.jit(lambda x: layer(x, mask=nnx.make_causal_mask(x[..., 0])))


def of_linen(x):
    layer = flax.linen.MultiHeadDotProductAttention(2)
    parameters = layer.init(jax.random.key(0), x)
    return lambda x: layer.apply(
        parameters, x, mask=flax.linen.make_causal_mask(x[..., 0])
    )


def dense(q, k, v):
    return right(q, k, v, faulty.causal(q.shape[1]))


def rotated(q, k, v):
    return dense(jattn.rotary(q), jattn.rotary(k), v)


def row_by_row(q, k, v):
    """Linear memory, one query at a time."""

    def one(row):
        t, query = row
        return jax.nn.softmax(jnp.where(jnp.arange(len(k)) <= t, k @ query, -1e9)) @ v

    return jax.lax.map(one, (jnp.arange(len(q)), q))


TOKENS = np.random.default_rng(1).integers(0, 11, (B, T))
(FLOATS,) = vectors(B, T, 6)[:1]
GROUPED = dict(query=vectors(B, T, 4, H)[0], key=vectors(B, T, 2, H)[1])
WEIGHTS = jattn.attention_weights(**GROUPED, mask=PACKED)
attend = jattn.attention
with_causal = functools.partial(attend, mask=CAUSAL)

RIGHT = {
    "dense": lambda: leaks_of(dense),
    "in tiles": lambda: leaks_of(
        oracle.jit(functools.partial(attend, mask=PACKED & WINDOW, block_sizes=(3, 2))),
        mask=PACKED & WINDOW,
        means=["perturbation"],
    ),
    "under jit, a Boolean array": lambda: leaks_of(
        jax.jit(right), mask=faulty.causal(T)[:, None]
    ),
    "without batch": lambda: leaks(
        oracle.jit(lambda x: dense(x[None], x[None], x[None])[0]),
        FLOATS[0, :, None],
        axis=0,
        means=["perturbation"],
    ),
    "under vmap": lambda: leaks_of(
        jax.vmap(lambda *x: dense(*(y[None] for y in x))[0]), means=["perturbation"]
    ),
    "in bfloat16": lambda: leaks(
        lambda x: right(*x), vectors(dtype=jnp.bfloat16), means=["gradient"]
    ),
    "in float16": lambda: leaks(
        oracle.jit(lambda x: right(*x)),
        vectors(dtype=jnp.float16),
        means=["perturbation"],
    ),
    "a layer of nnx": lambda: leaks(of_nnx(FLOATS), FLOATS, means=["gradient"]),
    "a layer of linen": lambda: leaks(of_linen(FLOATS), FLOATS, means=["perturbation"]),
    "a model of tokens": lambda: leaks(
        oracle.jit(model()), TOKENS, num_tokens=11, means=["perturbation"]
    ),
    "a model with rotary positions": lambda: leaks(
        model(rope=True), FLOATS, means=["prefix"]
    ),
    "packed documents": lambda: leaks(model(lambda T: DOCUMENTS), TOKENS, mask=PACKED),
    "padding on the left": lambda: leaks(
        model(lambda T: PADDED, layers=1), FLOATS, mask=LEFT_PADDED
    ),
    "a prefix LM": lambda: leaks(
        model(lambda T: faulty.causal(T) | (np.arange(T) < 3)),
        FLOATS,
        mask=CAUSAL | masks.prefix(3),
    ),
    "two layers of windows": lambda: leaks(model(near), TOKENS, mask=WINDOW, layers=2),
    "weights of jax.nn": lambda: rows(
        oracle.jit(functools.partial(jax.nn.dot_product_attention, is_causal=True)),
        mask=CAUSAL,
    ),
    "weights of jax.nn on empty rows": lambda: rows(
        oracle.jit(
            functools.partial(jax.nn.dot_product_attention, mask=PADDED[:, None])
        ),
        mask=LEFT_PADDED,
        empty_rows="mean",
    ),
    "weights of grouped heads": lambda: rows(
        oracle.jit(with_causal), mask=CAUSAL, **GROUPED
    ),
    "weights of the last queries": lambda: rows(
        oracle.jit(functools.partial(with_causal, query_positions="end")),
        query=vectors(B, 3, N, H)[0],
        key=vectors()[1],
        mask=CAUSAL,
        query_positions="end",
    ),
    "weights in bfloat16": lambda: rows(
        oracle.jit(dense), mask=CAUSAL, dtype=jnp.bfloat16
    ),
    "weights in float16": lambda: rows(
        oracle.jit(dense), mask=CAUSAL, dtype=jnp.float16
    ),
    "weights under a soft cap": lambda: rows(
        oracle.jit(functools.partial(attend, score=jattn.scores.soft_cap(2.0))),
        score=lambda s: 2 * np.tanh(s / 2),
    ),
    "weights as an array": lambda: rows(WEIGHTS, mask=PACKED, **GROUPED),
    "weights of something": lambda: rows(WEIGHTS, mask=PACKED),
    "scale of jax.nn": lambda: scale_of(jax.nn.dot_product_attention),
    "scale of grouped heads": lambda: scale_of(with_causal, 6, 3, num_kv_heads=2),
    "scale with rotary positions": lambda: scale_of(rotated, 8, 5),
    "scale in bfloat16": lambda: measured_scale(dense, dtype=jnp.bfloat16, lengths=[5]),
    "scale of 1/H": lambda: measured_scale(
        oracle.jit(faulty.scaled_twice), lengths=[2], expected=lambda H: 1 / H
    ),
    "NaN in grouped heads": lambda: nan_safety(
        attend, num_heads=4, num_kv_heads=2, head_dim=3, per_head_mask=True
    ),
    "memory of rows": lambda: memory_against_length(
        row_by_row,
        lambda n: (jax.ShapeDtypeStruct((n, 4), jnp.float32),) * 3,
        lengths=(256, 512, 1024),
    ),
}


SLOW = {
    "in bfloat16",
    "under vmap",
    "a layer of nnx",
    "a layer of linen",
    "a model with rotary positions",
    "a prefix LM",
    "two layers of windows",
    "scale in bfloat16",
}
CASES = [
    pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else [])
    for name in RIGHT
]


@pytest.mark.parametrize("name", CASES)
def test_what_is_right_raises_no_alarm(name):
    report = RIGHT[name]()
    assert report.ok, report
    assert report.first is None
    assert len(str(report).splitlines()) < 20
    assert max(map(len, str(report).splitlines())) < 120


@pytest.mark.parametrize("means", ["perturbation", "gradient"])
def test_the_one_leaking_pair_is_named(means):
    """Among 2 x 2 x 7 x 7 pairs; it must not hide behind others that are allowed."""
    x = vectors(B, T, 3)[0]

    def fn(x):
        return jnp.cumsum(x, 1).at[1, 2, 0].add(1e-3 * x[1, 5, 1])

    report = leaks(fn, x, means=[means])
    assert (report.first.output, report.first.input) == ((1, 2), (1, 5))
    assert report.first.check == means and 0 < report.first.size < 1


def test_every_pair_is_tried_up_to_64_places_and_some_beyond():
    rng = np.random.default_rng(0)
    for allowed in rng.random((3, 2, 64, 64)) < rng.random((3, 1, 1, 1)):
        changes = blind_changes(allowed, 64)
        assert covered(changes, allowed) == (~allowed).sum()
        assert not any(
            (x.outputs[..., None] & x.inputs[:, None] & allowed).any() for x in changes
        )
    x = np.ones((1, 90, 1), np.float32)
    report = leaks(lambda x: np.cumsum(x, 1), x, max_changes=4, means=["perturbation"])
    assert report.ok and report.covered < report.forbidden == 90 * 89 / 2
    assert f"{report.covered} of {report.forbidden} forbidden pairs" in str(report)


def test_windows_reach_further_through_layers():
    report = leaks(model(near), FLOATS, mask=WINDOW, means=["gradient"])
    assert report.first.output == (0, 3) and report.first.input == (0, 0)


def test_own_input_counts_where_there_is_no_residual():
    x = vectors(B, T, 3)[0]
    assert leaks(lambda x: jnp.cumsum(x, 1), x).ok
    hidden = masks.rule(lambda q_pos, k_pos: k_pos < q_pos)
    report = leaks(lambda x: jnp.cumsum(x, 1), x, mask=hidden, residual=False)
    assert report.first.output == report.first.input == (0, 0)


def test_what_cannot_be_differentiated_or_cut_is_said():
    x = np.ones((2, 5, 1), np.float32)
    report = leaks(lambda x: np.cumsum(np.asarray(x), 1) + np.zeros((2, 5, 1)), x)
    assert report.ok and report["perturbation"].verdict == "right"
    assert report["gradient"].verdict == report["prefix"].verdict == "not run"
    assert "JAX cannot differentiate fn" in report["gradient"].detail
    assert "fn fails on 3 of 5 positions" in report["prefix"].detail


@pytest.mark.parametrize("stop", [jax.lax.stop_gradient, lambda x: x.astype(int)])
def test_where_there_is_no_gradient_none_is_proved_to_be_0(stop):
    x = vectors(B, T, 3)[0]

    def fn(x):
        return stop(jnp.cumsum(x, 1))

    report = leaks(fn, x)
    assert report.ok and report["gradient"].verdict == "not run"
    report = leaks(fn, x, means=["gradient"])
    assert report.first == report["gradient"] and report.verdict == "inconclusive"
    assert report.first.detail == "no output has a gradient in any input"


def test_keys_of_another_length_than_queries():
    q, k = vectors(B, 5, N, H)[0], vectors()[1]
    valid = np.arange(T)[None] < np.array([[3], [6]])

    mask = masks.padding(valid)
    options = dict(mask=mask, means=["perturbation"])
    assert leaks(lambda x: right(q, x, x, valid[:, None]), k, **options).ok
    report = leaks(lambda x: right(q, x, x, True), k, **options)
    assert report.first.output == (0, 0) and report.first.input == (0, 3)


def test_memory_grows_as_the_derivative_does():
    def make(n):
        return jax.ShapeDtypeStruct((n, 4), jnp.float32)

    def fn(x):
        return jnp.sin(x @ x.T)

    for derivative in ("gradient", "hvp"):
        found = memory_against_length(
            fn, make, lengths=(128, 256), derivative=derivative, limit="quadratic"
        )
        assert found.ok and found.growth == "quadratic", found
    root = memory_against_length(
        lambda x: jnp.outer(x[: int(len(x) ** 0.5), 0], x[:128, 1]),
        make,
        lengths=(256, 1024, 4096),
        limit="constant",
    )
    assert not root.ok and abs(root.order - 0.5) < 0.1, root
    linear = memory_against_length(jnp.cumsum, make, lengths=(128, 256, 512))
    assert linear.growth == "linear" and abs(linear.order - 1) < 0.1
    a, b, c = linear.num_bytes.values()
    assert linear.at(512) == c and abs(linear.at(1024) - (2 * c)) < 0.1 * c


WRONG_CALLS = {
    "leaks: fn must be a function": lambda: leaks(3, FLOATS),
    "leaks: axis must be an int from 0 on": lambda: leaks(abs, FLOATS, axis=-2),
    "leaks: inputs must be floats or integers": lambda: leaks(abs, FLOATS > 0),
    "leaks: all inputs must be": lambda: leaks(abs, (FLOATS, FLOATS[:, 1:])),
    "leaks: there must be two positions": lambda: leaks(abs, FLOATS[:, :1]),
    "leaks: every output must be": lambda: leaks(jnp.sum, FLOATS),
    "leaks: layers must be a positive int": lambda: leaks(abs, FLOATS, layers=0),
    "leaks: more than one layer needs": lambda: leaks(
        lambda x: x[:, :3], FLOATS, layers=2
    ),
    "leaks: the mask must forbid something": lambda: leaks(
        abs, FLOATS[:1], mask=masks.everything()
    ),
    "leaks: means must be a sequence": lambda: leaks(abs, FLOATS, means="prefix"),
    "leaks: means must be one of": lambda: leaks(abs, FLOATS, means=["prefixes"]),
    "leaks: a gradient needs inputs that are floats": lambda: leaks(
        abs, TOKENS, means=["gradient"]
    ),
    "leaks: prefixes need a mask": lambda: leaks(
        abs, FLOATS, mask=~CAUSAL, means=["prefix"]
    ),
    "leaks: num_tokens is for integer inputs": lambda: leaks(abs, FLOATS, num_tokens=3),
    "leaks: tokens must lie in": lambda: leaks(abs, TOKENS, num_tokens=3),
    "leaks: mask must be": lambda: leaks(abs, FLOATS, mask=DOCUMENTS),
    "measured_scale: H and T must be 2 or more": lambda: measured_scale(
        attend, lengths=[1]
    ),
    "measured_scale: attention_fn must be a function": lambda: measured_scale(3),
    "measured_scale: attention_fn must return": lambda: measured_scale(
        lambda q, k, v: attend(q, k, v)[0]
    ),
    "rows: empty_rows must be one of": lambda: rows(attend, empty_rows="means"),
    "rows: attention_fn must return": lambda: rows(lambda q, k, v: v[..., :1]),
    "rows: attention_fn, if it is no function, must be floating": lambda: rows(
        DOCUMENTS
    ),
    "rows: attention_fn, if it is no function, must be an array": lambda: rows(3),
    "rows: with T != S": lambda: rows(attend, mask=CAUSAL, query=vectors()[0][:, :3]),
    "rows: score must be a function of scaled scores": lambda: rows(
        attend, score=jattn.scores.soft_cap(2.0)
    ),
    "rows: scale must be a number or [(]N,[)]": lambda: rows(attend, scale=np.ones(3)),
    "rows: scale and score are of the logits": lambda: rows(WEIGHTS, scale=1.0),
    "rows: weights must be [(][*]B, N, T, S[)], and": lambda: rows(FLOATS[0]),
    "rows: weights must be [(][*]B, N, T, S[)] of": lambda: rows(FLOATS, **GROUPED),
    "rows: query and key go together": lambda: rows(WEIGHTS, query=GROUPED["query"]),
    "nan_safety: attention_fn must return .* got tuple": lambda: nan_safety(
        lambda q, k, v, mask: (q, k)
    ),
    "nan_safety: N must be a multiple of K": lambda: nan_safety(attend, num_kv_heads=3),
    "nan_safety: attention_fn must be a function": lambda: nan_safety(3),
    "nan_safety: attention_fn must return": lambda: nan_safety(
        lambda q, k, v, mask: attend(q, k, v, mask=mask)[0]
    ),
    "memory_against_length: make must be a function": lambda: memory_against_length(
        abs, (FLOATS,)
    ),
    "memory_against_length: lengths must be": lambda: memory_against_length(
        abs, lambda n: (FLOATS,), lengths=(4, 4)
    ),
    "memory_against_length: derivative must be": lambda: memory_against_length(
        abs, lambda n: (FLOATS,), derivative="grad"
    ),
}


@pytest.mark.parametrize("says", WRONG_CALLS)
def test_a_wrong_call_says_what_to_do(says):
    with pytest.raises((TypeError, ValueError), match=says) as caught:
        WRONG_CALLS[says]()
    assert str(caught.value)[-1] in ".?"


@pytest.mark.slow
def test_a_nan_stays_in_its_tiles():
    tiles = functools.partial(attend, implementation="blockwise", block_sizes=(4, 4))
    report = nan_safety(tiles)
    assert report.ok, report
