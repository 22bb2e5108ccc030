"""The contract: what every algorithm must do in every case, with every derivative."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

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
from jattn import masks, scores

NAMES = ("reference", "blockwise", "decode")
# decode has the derivatives of blockwise: its forward pass is held by tests of its own.
ALGORITHMS = (*NAMES[:2], pytest.param("decode", marks=pytest.mark.deep))
DIMS = chex.Dimensions(B=2, T=7, S=11, N=6, K=3, H=5, D=13)
i, j = np.arange(DIMS.T)[:, None], np.arange(DIMS.S)[None, :]
random = np.random.default_rng(3)


class Case(NamedTuple):
    """A call of attention, and what it means.

    options gives attention's keywords from the case's own arrays; allowed, score,
    bias, scale and sinks say the same to the oracle. Floating arrays are
    differentiated.
    """

    name: str
    options: Callable[[dict], dict] = lambda a: {}
    arrays: dict[str, np.ndarray] = {}
    allowed: Any = True
    score: Callable[[Any, dict], Any] = lambda s, a: s
    bias: Callable[[dict], Any] = lambda a: None
    scale: Callable[[dict], Any] = lambda a: None
    sinks: Callable[[dict], Any] = lambda a: None
    blocks: tuple[int, int] = (4, 3)
    sizes: dict[str, Any] = {}

    def inputs(self):
        """All arrays in float64 (or integers and Booleans)."""
        dims = dict(B=(2,), T=7, S=11, N=6, K=3, H=5, D=13) | self.sizes
        q = exact(1, *dims["B"], dims["T"], dims["N"], dims["H"])
        k = exact(2, *dims["B"], dims["S"], dims["K"], dims["H"])
        v = exact(3, *dims["B"], dims["S"], dims["K"], dims["D"])
        return dict(q=q, k=k, v=v, **self.arrays)

    def attend(self, algorithm, x):
        blocks = self.blocks if algorithm == "blockwise" else None
        return jattn.attention(
            x["q"],
            x["k"],
            x["v"],
            implementation=algorithm,
            block_sizes=blocks,
            return_lse=True,
            **self.options(x),
        )

    def dense(self, x):
        return dense_jax(
            x["q"],
            x["k"],
            x["v"],
            self.allowed,
            self.scale(x),
            lambda s: self.score(s, x),
            self.bias(x),
            self.sinks(x),
        )


def is_float(x):
    return jnp.issubdtype(x.dtype, jnp.floating)


def with_vjp(fn, inputs, cotangents):
    """fn's results, and the gradients of its floating-point inputs."""
    floats = {name: x for name, x in inputs.items() if is_float(x)}
    results, pull = jax.vjp(lambda floats: fn(inputs | floats), floats)
    return results, pull(cotangents)[0]


def cotangents_of(results):
    """Of every row, also of those without keys."""
    return tuple(exact(50 + n, *x.shape) for n, x in enumerate(results))


@functools.cache
def answers(name):
    """Results and gradients of a case in float64, by dense autodiff."""
    case = CASES[name]
    with jax.enable_x64(True):
        inputs = jax.tree.map(jnp.asarray, case.inputs())
        cotangents = cotangents_of(jax.eval_shape(case.dense, inputs))
        fn = jit(functools.partial(with_vjp, case.dense))
        results, gradients = fn(inputs, cotangents)
        return jax.tree.map(np.asarray, (results, gradients, cotangents))


def slope(s, q_pos, k_pos, slope, table):
    slope, table = slope.astype(s.dtype), table.astype(s.dtype)
    return s - slope * jnp.abs(q_pos - k_pos) + table[(q_pos + k_pos) % 3]


def dense_slope(s, a, first=0):
    far = a["slopes"][:, None, None] * np.abs(i + first - j)[None]
    return s - far[None] + a["table"][(i + first + j) % 3][None, None]


def near(q_pos, k_pos, reach, seen):
    return (jnp.abs(q_pos - k_pos) <= reach) & seen


def bias_with_holes():
    bias = exact(10, DIMS.B, DIMS.N, DIMS.T, DIMS.S)
    bias[random.random(bias.shape) < 0.2] = -np.inf
    bias[0, 1, 2] = -np.inf
    return np.asarray(jnp.asarray(bias, jnp.bfloat16), np.float64)


REACH = np.array([0, 1, 2, 3, 5, 20], np.int32)
SEEN = random.random((DIMS.B, DIMS.S)) < 0.6
QUERY_SEEN = random.random((DIMS.B, DIMS.T)) < 0.6
DENSE = random.random((DIMS.B, DIMS.N, DIMS.T, DIMS.S)) < 0.5
DENSE[1, 2, 3] = False
QUERY_IDS = np.array([[1, 1, 1, 2, 2, 0, 7], [3, 3, 4, 4, 4, 4, 5]], np.int32)
KEY_IDS = np.array(
    [[1, 1, 1, 1, 2, 2, 2, 2, 0, 0, 0], [3, 4, 4, 4, 4, 5, 5, 5, 5, 5, 5]], np.int32
)
SAME = (QUERY_IDS[:, :, None] == KEY_IDS[:, None, :]) & (KEY_IDS[:, None, :] != 0)
Q_POS = random.permutation(20)[: 2 * DIMS.T].reshape(2, DIMS.T).astype(np.int32)
K_POS = random.permutation(15)[: DIMS.S].astype(np.int32)
PREFIXES = np.array([0, 8], np.int32)
LAYOUT = exact(9, DIMS.N, 4, 3) < 0.3
CAPS = exact(11, DIMS.N) ** 2 + 0.5
CAPS = np.asarray(jnp.asarray(CAPS, jnp.bfloat16), np.float64)
SLOPES, TABLE, SCALES = exact(12, DIMS.N), exact(13, 3), exact(14, DIMS.N)
SINKS = exact(19, DIMS.N)
SINKS[1] = -np.inf


def dense_case(axes):
    kept = [slice(None if is_full else 1) for is_full in axes]
    array = DENSE[tuple(kept)]
    full = "".join(x for x, is_full in zip("BNTS", axes, strict=True) if is_full)
    return Case(
        f"dense {full or 'scalar'}", lambda a: dict(mask=a["m"]), dict(m=array), array
    )


_CASES = [
    Case("grouped heads, value of another width"),
    Case("as many key heads as query heads", sizes=dict(N=3)),
    Case("one key head", sizes=dict(K=1)),
    Case(
        "causal from the start",
        lambda a: dict(mask=masks.causal(), query_positions="start"),
        allowed=j <= i,
    ),
    Case(
        "causal to the end",
        lambda a: dict(mask=masks.causal(), query_positions="end"),
        allowed=j <= i + 4,
    ),
    Case(
        "causal at traced positions",
        lambda a: dict(
            mask=masks.causal(), query_positions=a["at"], key_positions=a["key_at"]
        ),
        dict(at=Q_POS, key_at=K_POS),
        (K_POS[None, None, :] <= Q_POS[:, :, None])[:, None],
    ),
    Case(
        "window",
        lambda a: dict(mask=masks.sliding_window(2, 1), query_positions="end"),
        allowed=(i + 4 - 2 <= j) & (j <= i + 4 + 1),
    ),
    Case(
        "window per head",
        lambda a: dict(mask=masks.sliding_window(a["w"]), query_positions="start"),
        dict(w=REACH),
        (j <= i) & (i - j <= REACH[:, None, None]),
    ),
    Case(
        "lengths of keys, one of them 0",
        lambda a: dict(mask=masks.lengths(a["n"])),
        dict(n=np.array([0, 8], np.int32)),
        np.array([0, 8])[:, None, None, None] > j,
    ),
    Case(
        "lengths of keys and queries",
        lambda a: dict(mask=masks.lengths(9, a["n"])),
        dict(n=np.array([4, 7], np.int32)),
        (j < 9) & (np.array([4, 7])[:, None, None, None] > i),
    ),
    Case(
        "segments with padding",
        lambda a: dict(mask=masks.segments(a["q_ids"], a["k_ids"])),
        dict(q_ids=QUERY_IDS, k_ids=KEY_IDS),
        SAME[:, None],
    ),
    Case(
        "padding with holes",
        lambda a: dict(mask=masks.padding(a["seen"], a["sees"])),
        dict(seen=SEEN, sees=QUERY_SEEN),
        (SEEN[:, None, :] & QUERY_SEEN[:, :, None])[:, None],
    ),
    Case(
        "custom mask with axes",
        lambda a: dict(
            mask=masks.rule(near, a["reach"], a["seen"], axes=["N", "BS"]),
            query_positions="start",
        ),
        dict(reach=REACH, seen=SEEN),
        (np.abs(i - j) <= REACH[:, None, None]) & SEEN[:, None, None, :],
    ),
    Case(
        "composition with or and not",
        lambda a: dict(
            mask=(masks.causal() | ~masks.segments(a["q_ids"], a["k_ids"]))
            & ~masks.sliding_window(1, 1),
            query_positions="end",
        ),
        dict(q_ids=QUERY_IDS, k_ids=KEY_IDS),
        ((j <= i + 4) | ~SAME[:, None]) & (np.abs(i + 4 - j) > 1),
    ),
    Case(
        "prefix",
        lambda a: dict(mask=masks.prefix(5), query_positions="start"),
        allowed=j < 5,
    ),
    Case(
        "prefix LM, a prefix per batch row",
        lambda a: dict(
            mask=masks.causal() | masks.prefix(a["n"]), query_positions="end"
        ),
        dict(n=PREFIXES),
        (j <= i + 4) | (j < PREFIXES[:, None, None, None]),
    ),
    Case(
        "window and a prefix",
        lambda a: dict(
            mask=masks.causal() & (masks.sliding_window(1) | masks.prefix(2)),
            query_positions="end",
        ),
        allowed=(j <= i + 4) & ((i + 4 - j <= 1) | (j < 2)),
    ),
    Case(
        "layout of blocks",
        lambda a: dict(mask=masks.block_sparse(a["blocks"], 5), query_positions="end"),
        dict(blocks=LAYOUT[0]),
        LAYOUT[0][(i + 4) // 5, j // 5],
    ),
    Case(
        "layout of blocks per head, keys beyond it",
        lambda a: dict(mask=masks.block_sparse(a["blocks"], 3), query_positions="end"),
        dict(blocks=LAYOUT),
        LAYOUT[:, (i + 4) // 3, np.minimum(j // 3, 2)] & (j < 9),
    ),
    Case(
        "soft cap",
        lambda a: dict(score=scores.soft_cap(0.75)),
        score=lambda s, a: 0.75 * jnp.tanh(s / 0.75),
    ),
    Case(
        "soft cap per head",
        lambda a: dict(score=scores.soft_cap(a["cap"])),
        dict(cap=CAPS),
        score=lambda s, a: (
            a["cap"].reshape(1, -1, 1, 1) * jnp.tanh(s / a["cap"].reshape(1, -1, 1, 1))
        ),
    ),
    Case(
        "bias with -inf entries and rows",
        lambda a: dict(bias=a["bias"]),
        dict(bias=bias_with_holes()),
        bias=lambda a: a["bias"],
    ),
    Case(
        "bias broadcast over batch and queries",
        lambda a: dict(bias=a["bias"]),
        dict(bias=exact(15, 1, DIMS.N, 1, DIMS.S)),
        bias=lambda a: a["bias"],
    ),
    Case(
        "bias broadcast over heads and keys",
        lambda a: dict(bias=a["bias"], mask=a["m"]),
        dict(bias=exact(16, DIMS.B, 1, DIMS.T, 1), m=DENSE),
        DENSE,
        bias=lambda a: a["bias"],
    ),
    Case(
        "custom score with arrays, after a soft cap",
        lambda a: dict(
            score=(
                scores.soft_cap(2.0),
                scores.rule(slope, a["slopes"], a["table"], axes=["N", ""]),
            ),
            query_positions="start",
        ),
        dict(slopes=SLOPES, table=TABLE),
        score=lambda s, a: dense_slope(2 * jnp.tanh(s / 2), a),
    ),
    Case("scale a number", lambda a: dict(scale=0.3), scale=lambda a: 0.3),
    Case(
        "scale a scalar array",
        lambda a: dict(scale=a["scale"]),
        dict(scale=exact(17)),
        scale=lambda a: a["scale"],
    ),
    Case(
        "scale per head",
        lambda a: dict(scale=a["scale"]),
        dict(scale=SCALES),
        scale=lambda a: a["scale"],
    ),
    Case(
        "no batch",
        lambda a: dict(mask=a["m"]),
        dict(m=DENSE[0, :1]),
        DENSE[0, :1],
        sizes=dict(B=()),
    ),
    Case(
        "two leading axes",
        lambda a: dict(mask=masks.lengths(a["n"])),
        dict(n=np.array([[4], [9]], np.int32)),
        np.array([4, 9])[:, None, None, None, None] > j,
        sizes=dict(B=(2, 3)),
    ),
    Case("one query and one key", sizes=dict(T=1, S=1)),
    Case("one query", lambda a: dict(query_positions="end"), sizes=dict(T=1)),
    Case("blocks larger than the arrays", blocks=(64, 32)),
    Case("blocks that divide the lengths", blocks=(1, 11)),
    dense_case((1, 1, 1, 1)),
    dense_case((1, 0, 0, 1)),
    dense_case((0, 1, 1, 0)),
    Case(
        "everything at once",
        lambda a: dict(
            mask=masks.causal() & masks.segments(a["q_ids"], a["k_ids"]),
            score=(
                scores.soft_cap(2.0),
                scores.rule(slope, a["slopes"], a["table"], axes=["N", ""]),
            ),
            bias=a["bias"],
            scale=a["scale"],
            sinks=a["sinks"],
            query_positions="end",
        ),
        dict(
            q_ids=QUERY_IDS,
            k_ids=KEY_IDS,
            slopes=SLOPES / 4,
            table=TABLE,
            bias=exact(18, 1, DIMS.N, DIMS.T, DIMS.S),
            scale=SCALES,
            sinks=SINKS,
        ),
        SAME[:, None] & (j <= i + 4),
        score=lambda s, a: dense_slope(2 * jnp.tanh(s / 2), a, first=4),
        bias=lambda a: a["bias"],
        scale=lambda a: a["scale"],
        sinks=lambda a: a["sinks"],
    ),
]
CASES = {case.name: case for case in _CASES}
EVERYTHING = CASES["everything at once"]


def cast(x, dtype):
    return x.astype(dtype) if is_float(x) else x


LEFT_TO_THE_SLOW_RUN = {
    "prefix",
    "window and a prefix",
    "layout of blocks",
    "as many key heads as query heads",
    "one key head",
    "one query",
    "causal from the start",
    "window",
    "soft cap",
    "scale a scalar array",
    "blocks that divide the lengths",
    "lengths of keys and queries",
    "padding with holes",
    "soft cap per head",
    "scale a number",
    "bias broadcast over heads and keys",
    "blocks larger than the arrays",
    "dense scalar",
    "dense BS",
}
"""Cases that differ least from others of the list."""


def dtypes():
    """Most cases in float64, the slow run in bfloat16, and one case in every dtype.

    Random cases in every dtype are those of test_properties.py.
    """
    for name in CASES:
        for dtype in (jnp.float64, jnp.float32, jnp.float16, jnp.bfloat16):
            if dtype in (jnp.float32, jnp.float16) and name != EVERYTHING.name:
                continue
            double = dtype == jnp.float64 and name not in LEFT_TO_THE_SLOW_RUN
            everyday = double or name == EVERYTHING.name
            marks = () if everyday else pytest.mark.slow
            yield pytest.param(name, dtype, marks=marks, id=f"{name}-{dtype.__name__}")


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("name, dtype", list(dtypes()))
def test_results_and_gradients_are_those_of_dense_autodiff(name, dtype, algorithm):
    case = CASES[name]
    results, gradients, cotangents = answers(name)
    with jax.enable_x64(dtype == jnp.float64):
        inputs = {n: jnp.asarray(cast(x, dtype)) for n, x in case.inputs().items()}
        rows = dtype if dtype == jnp.float64 else jnp.float32
        cotangents = (cotangents[0].astype(dtype), cotangents[1].astype(rows))
        fn = jit(lambda x, c: with_vjp(functools.partial(case.attend, algorithm), x, c))
        got = fn(inputs, cotangents)
        again = fn(inputs, cotangents)
    (out, lse), got_gradients = got
    assert (out.dtype, lse.dtype) == (dtype, rows)
    assert_close(out, results[0], dtype, "out")
    assert_close(lse, results[1], dtype, "lse")
    for n, x in got_gradients.items():
        assert x.dtype == inputs[n].dtype, n
        assert_gradient_close(x, gradients[n], dtype, f"gradient of {n}")
    jax.tree.map(assert_same_bits, again, got)


@pytest.mark.parametrize("name", ["grouped heads, value of another width", "no batch"])
def test_the_dense_oracle_in_jax_is_the_one_in_numpy(name, x64):
    case = CASES[name]
    x = case.inputs()
    want = dense_attention(x["q"], x["k"], x["v"], case.allowed)
    out, lse = answers(name)[0]
    assert_close(out, want.out, jnp.float64)
    assert_close(lse, want.lse, jnp.float64)


@pytest.mark.parametrize("empty", ["B", "T", "S"])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_an_empty_axis_gives_zeros_and_zero_gradients(algorithm, empty):
    sizes = {"B": dict(B=(0,)), "T": dict(T=0), "S": dict(S=0)}[empty]
    case = Case("empty", sizes=sizes)
    inputs = {n: jnp.asarray(x, jnp.float32) for n, x in case.inputs().items()}
    q = inputs["q"]
    cotangents = jnp.ones((*q.shape[:-1], DIMS.D)), jnp.ones(q.shape[:-1])
    attend = functools.partial(case.attend, algorithm)
    fn = jit(functools.partial(with_vjp, attend))
    (out, lse), gradients = fn(inputs, cotangents)
    assert_same_bits(out, np.zeros((*q.shape[:-1], DIMS.D), np.float32))
    assert_same_bits(lse, np.full(q.shape[:-1], -np.inf, np.float32))
    for name, x in gradients.items():
        assert_same_bits(x, np.zeros_like(inputs[name]))


def floats_of(inputs):
    return {name: x for name, x in inputs.items() if is_float(x)}


def scalar(fn, inputs, cotangents):
    """A function of the floating inputs: results dotted with cotangents, squared."""

    def loss(floats):
        out, lse = fn(inputs | floats)
        seen = jnp.isfinite(lse)
        lse = jnp.where(seen, lse, 0)
        return jnp.vdot(out, cotangents[0]) ** 2 / 8 + jnp.vdot(lse, cotangents[1])

    return loss


def tangents_like(floats):
    return {name: exact(90 + n, *floats[name].shape) for n, name in enumerate(floats)}


def derivatives(loss, floats, tangents):
    """Forward mode, and the Hessian-vector product in both orders."""
    forward = jax.jvp(loss, (floats,), (tangents,))[1]
    forward_reverse = jax.jvp(jax.grad(loss), (floats,), (tangents,))[1]

    def slope_along(x):
        parts = jax.tree.map(jnp.vdot, jax.grad(loss)(x), tangents)
        return sum(jax.tree.leaves(parts))

    return forward, forward_reverse, jax.grad(slope_along)(floats)


@functools.cache
def everything():
    """The case of everything in float64: inputs, and derivatives by dense autodiff."""
    inputs = jax.tree.map(jnp.asarray, EVERYTHING.inputs())
    cotangents = answers(EVERYTHING.name)[2]
    tangents = tangents_like(floats_of(inputs))
    loss = scalar(EVERYTHING.dense, inputs, cotangents)
    want = jit(functools.partial(derivatives, loss))(floats_of(inputs), tangents)
    return inputs, cotangents, tangents, want


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_forward_mode_and_both_hessian_vector_products(algorithm, x64):
    inputs, cotangents, tangents, want = everything()
    fn = functools.partial(EVERYTHING.attend, algorithm)
    loss = scalar(fn, inputs, cotangents)
    got = jit(functools.partial(derivatives, loss))(floats_of(inputs), tangents)
    modes = ("jvp", "forward-reverse", "reverse-reverse")
    for mode, a, b in zip(modes, got, want, strict=True):
        if mode == "jvp":
            a, b = {"all": a}, {"all": b}
        for name in b:
            assert_gradient_close(a[name], b[name], jnp.float64, f"{mode} {name}")


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_gradient_is_the_slope_of_central_differences(algorithm, x64):
    inputs, cotangents, tangents, (slope_along, *_) = everything()
    fn = functools.partial(EVERYTHING.attend, algorithm)
    loss = jit(scalar(fn, inputs, cotangents))
    floats, h = floats_of(inputs), 1e-5

    def moved(step):
        return loss(jax.tree.map(lambda x, dx: x + step * dx, floats, tangents))

    difference = (moved(h) - moved(-h)) / (2 * h)
    np.testing.assert_allclose(difference, slope_along, rtol=1e-7)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_second_derivative_is_the_third_joint_moment(algorithm, x64):
    # With queries a q: d out / d a = Cov(s, v), d2 out / d a2 = E (s - m)^2 (v - vbar).
    q, k, v = exact(20, 1, 1, 5), exact(21, 11, 1, 5), exact(22, 11, 1, 13)
    blocks = (4, 3) if algorithm == "blockwise" else None

    def out(a):
        return jattn.attention(
            a * q, k, v, implementation=algorithm, block_sizes=blocks
        )[0, 0]

    s = (q[0] @ k[:, 0].T)[0] / np.sqrt(5)
    p = np.exp(s - s.max()) / np.exp(s - s.max()).sum()
    s, centred = s - p @ s, v[:, 0] - p @ v[:, 0]
    assert_close(jit(jax.jacfwd(out))(1.0), (p * s) @ centred, jnp.float64)
    hessian = jit(jax.jacfwd(jax.jacrev(out)))(1.0)
    assert_close(hessian, (p * s**2) @ centred, jnp.float64)


def segmented(algorithm, x, query_ids):
    blocks = (4, 3) if algorithm == "blockwise" else None
    mask = masks.segments(query_ids, KEY_IDS[:1])
    out, lse = jattn.attention(
        x["q"],
        x["k"],
        x["v"],
        mask=mask,
        implementation=algorithm,
        block_sizes=blocks,
        return_lse=True,
    )
    return jnp.sum(out**2) + jnp.sum(jnp.where(jnp.isfinite(lse), lse, 0))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_vmap_of_a_gradient_over_vectors_and_leaves_of_a_mask(algorithm, x64):
    case = Case("one", sizes=dict(B=(2, 1)))
    x = jax.tree.map(jnp.asarray, case.inputs())
    ids = jnp.asarray(QUERY_IDS)[:, None]
    gradient = jax.grad(functools.partial(segmented, algorithm))
    first_row = jax.tree.map(lambda x: x[0], x)
    mapped = jit(jax.vmap(gradient))(x, ids)
    over_the_mask = jit(jax.vmap(gradient, in_axes=(None, 0)))(first_row, ids)
    gradient = jit(gradient)
    for n in range(2):
        one = gradient(jax.tree.map(lambda x, n=n: x[n], x), ids[n])
        first = gradient(first_row, ids[n])
        for name in one:
            assert_close(mapped[name][n], one[name], jnp.float64, name)
            assert_close(over_the_mask[name][n], first[name], jnp.float64, name)


def test_checkpoint_and_scan_change_no_gradient(x64):
    x = jax.tree.map(lambda x: jnp.asarray(x[:1]), Case("one").inputs())
    ids = jnp.asarray(QUERY_IDS)[:, None]
    one = functools.partial(segmented, "blockwise")

    def scanned(x):
        def add(total, ids):
            return total + jax.checkpoint(one)(x, ids), None

        return jax.lax.scan(add, 0.0, ids)[0]

    got = jit(jax.grad(scanned))(x)
    gradient = jit(jax.grad(one))
    want = jax.tree.map(jnp.add, gradient(x, ids[0]), gradient(x, ids[1]))
    jax.tree.map(lambda a, b: assert_close(a, b, jnp.float64), got, want)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_huge_bias_for_a_whole_row_leaves_weights_that_sum_to_one(algorithm):
    x = jnp.asarray(exact(23, 4, 1, 3), jnp.float32)
    bias = jnp.full((1, 4, 4), -1e9)

    def total(v):
        return jattn.attention(x, x, v, bias=bias, implementation=algorithm).sum()

    assert_close(jit(jax.grad(total))(x), np.ones(x.shape))


@pytest.mark.parametrize("blocks", [(1, 1), (2, 5), (7, 11), (64, 1)])
def test_block_sizes_change_nothing(blocks, x64):
    case = EVERYTHING._replace(blocks=blocks)
    out, lse = jit(functools.partial(case.attend, "blockwise"))(case.inputs())
    assert_close(out, answers(case.name)[0][0], jnp.float64)
    assert_close(lse, answers(case.name)[0][1], jnp.float64)


@pytest.mark.parametrize("length", [1, 37])
def test_ones_stay_ones_at_every_length(length):
    x = jnp.ones((length, 1, 3))

    def both(v):
        attend = functools.partial(jattn.attention, x, x, block_sizes=(16, 32))
        out, pull = jax.vjp(attend, v)
        return out, *pull(jnp.ones_like(x))

    for ones in jit(both)(x):
        assert_close(ones, np.ones(x.shape))


def test_query_head_n_reads_key_head_n_over_G():
    q = jnp.zeros((1, 6, 5))
    v = jnp.broadcast_to(jnp.arange(3.0)[None, :, None], (4, 3, 1))
    for algorithm in NAMES:
        attend = functools.partial(jattn.attention, implementation=algorithm)
        out = jit(attend)(q, v.repeat(5, -1), v)
        np.testing.assert_array_equal(out[0, :, 0], [0, 0, 1, 1, 2, 2])


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_states_of_split_keys_merge_to_the_whole(algorithm):
    x = {n: jnp.asarray(x, jnp.bfloat16) for n, x in Case("").inputs().items()}

    options = dict(implementation=algorithm, return_lse=True)
    attend = jit(functools.partial(jattn.attention, **options))

    def part(keys):
        return attend(x["q"], x["k"][:, keys], x["v"][:, keys])

    parts = [part(slice(0, 4)), part(slice(4, 4)), part(slice(4, 11))]
    lses = np.stack([lse for _, lse in parts])
    out, lse = part(slice(0, 11))
    np.testing.assert_allclose(np.logaddexp.reduce(lses), lse, rtol=0, atol=1e-4)
    shares = np.exp(lses - np.asarray(lse))[..., None]
    outs = np.stack([np.asarray(out, np.float64) for out, _ in parts])
    merged = np.sum(shares * outs, axis=0)
    assert_close(out, merged, jnp.bfloat16)
