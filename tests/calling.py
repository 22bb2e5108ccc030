"""Attention and its oracle in random calls, compiled once for each frame."""

import contextlib
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import drawing
import jax
import numpy as np
import pytest
from drawing import Drawn
from frames import FRAMES, Frame
from hypothesis import given, seed, settings
from hypothesis import strategies as st
from oracle import dense_jax, jit

import jattn

EVERY_DAY = FRAMES[:5]
PARTS = [
    pytest.param(0, id="everyday"),
    *(pytest.param(i, id=f"deep{i}", marks=pytest.mark.deep) for i in (1, 2, 3, 4)),
]


class Case(NamedTuple):
    """A random call: the number of its frame, and what its data are drawn from."""

    number: int
    seed: int
    special: float
    sizes: int

    @property
    def frame(self) -> Frame:
        """What is static about it."""
        return FRAMES[self.number]

    @property
    def algorithms(self) -> tuple[Any, ...]:
        """None, for the reference, and the block sizes for blockwise."""
        return None, self.frame.blocks[self.sizes]

    def draw(self, **kwargs: bool) -> Drawn:
        """Its data."""
        return drawing.draw(self.frame, self.seed, self.special, **kwargs)

    def x64(self):
        """The context in which its arrays may be of 64 bits, if they are."""
        wide = self.frame.dtype == "float64"
        return jax.enable_x64(True) if wide else contextlib.nullcontext()

    def cotangents(self) -> tuple[np.ndarray, np.ndarray]:
        """Of out, in the dtype of a query, and of lse."""
        f, rng = self.frame, np.random.default_rng(self.seed + 1)
        out = rng.standard_normal((*f.batch, f.T, f.N, f.D)).astype(f.dtype)
        return out, rng.standard_normal(out.shape[:-1]).astype(f.wide)

    def answer(self, blocks, drawn=None, cotangents=None) -> tuple[Any, ...]:
        """(out, lse, gradients), in numpy."""
        drawn = drawn or self.draw()
        cotangents = cotangents or self.cotangents()
        return self.run(compiled, blocks, drawn, cotangents)

    def run(self, program, blocks, drawn: Drawn, *more: Any) -> Any:
        """The results of a program for its frame and these blocks, in numpy."""
        with self.x64():
            results = program(self.number, blocks)(drawn.floats, drawn.others, *more)
            return jax.tree.map(np.asarray, results)

    def true_answer(self) -> tuple[Any, ...]:
        """The answer by dense autodiff in float64."""
        drawn = self.draw()
        floats, cotangents = jax.tree.map(np.float64, (drawn.floats, self.cotangents()))
        with jax.enable_x64(True), jax.numpy_rank_promotion("allow"):
            fn = compiled_oracle(self.number)
            results = fn(floats, drawn.allowed, drawn.at, cotangents)
            return jax.tree.map(np.asarray, results)


def holds(suits: Callable[[Frame], bool] = lambda f: True, most: int = 99):
    """Makes tests of a claim about a `Case`, for each of `PARTS`.

    Args:
        suits: of which frames the claim is made.
        most: in how many of them it is tested every day.
    """

    def tests_of(claim: Callable[[Case], None]):
        @pytest.mark.parametrize("part", PARTS)
        def test(part, request):
            pool = FRAMES if part else EVERY_DAY
            numbers = [FRAMES.index(f) for f in pool if suits(f)]
            numbers = numbers if part else numbers[:most]
            cases = st.builds(
                Case,
                st.sampled_from(numbers),
                st.integers(0, 2**32 - 1),
                st.sampled_from([1.0, 0.0, -0.0, 2.0, -2.0, 1e-20]),
                st.integers(0, 1 if part else 0),
            )
            profile = settings.get_profile("deep" if part else "everyday")
            first = int(request.config.option.hypothesis_seed)
            check = seed(first + part if part else 0)(profile(given(cases)(claim)))
            check()

        test.__name__, test.__doc__ = claim.__name__, claim.__doc__
        return test

    return tests_of


def has_pairs(f: Frame) -> bool:
    return 0 not in (*f.batch, f.T, f.S, f.N)


def placed(f: Frame) -> dict[str, str]:
    """Where its queries stand, as a keyword, if that is static."""
    if f.positions in ("start", "end"):
        return {"query_positions": f.positions}
    return {"query_positions": "start"} if f.positions == "keys" else {}


def attend(number: int, blocks, others, floats, **options):
    """attention by blocks, or by the reference without them."""
    implementation = "blockwise" if blocks else "reference"
    options |= dict(implementation=implementation, block_sizes=blocks)
    return jattn.attention(**floats, **others, **placed(FRAMES[number]), **options)


def with_gradients(fn, floats, cotangents):
    results, pull = jax.vjp(fn, floats)
    return *results, pull(cotangents)[0]


@functools.cache
def compiled(number: int, blocks) -> Callable[..., Any]:
    """(out, lse, gradients) from floats, others and cotangents."""

    def fn(floats, others, cotangents):
        attention = functools.partial(attend, number, blocks, others, return_lse=True)
        return with_gradients(attention, floats, cotangents)

    return jit(fn)


@functools.cache
def compiled_tangents(number: int, blocks) -> Callable[..., Any]:
    """The tangents of (out, lse) from floats, others and their tangents."""

    def fn(floats, others, tangents):
        attention = functools.partial(attend, number, blocks, others, return_lse=True)
        return jax.jvp(attention, (floats,), (tangents,))[1]

    return jit(fn)


@functools.cache
def compiled_laws(number: int, blocks) -> Callable[..., Any]:
    """The outputs under both sides of two laws, from floats, others and masks."""

    def fn(floats, others, a, b, c):
        sides = a & (b | c), (a & b) | (a & c), a | (b & c), (a | b) & (a | c)
        return [attend(number, blocks, others | {"mask": m}, floats) for m in sides]

    return jit(fn)


@functools.cache
def compiled_stats(number: int, blocks) -> Callable[..., Any]:
    """(weights, out, stats) from floats and others."""

    def fn(floats, others):
        pairs = {name: x for name, x in floats.items() if name != "value"}
        weights = jattn.attention_weights(**pairs, **others, **placed(FRAMES[number]))
        return weights, *attend(number, blocks, others, floats, stats=True)

    return jit(fn)


@functools.cache
def compiled_oracle(number: int) -> Callable[..., Any]:
    """(out, lse, gradients) from floats, allowed pairs, positions and cotangents."""

    def fn(floats, allowed, at, cotangents):
        def dense(x):
            def score(s):
                for name, rule in zip(FRAMES[number].scores, x["score"], strict=True):
                    s = drawing.scored(name, rule, s, at)
                return s

            vectors = (x[name] for name in ("query", "key", "value"))
            scale, bias, sinks = (x.get(name) for name in ("scale", "bias", "sinks"))
            return dense_jax(*vectors, allowed, scale, score, bias, sinks)

        return with_gradients(dense, floats, cotangents)

    return jit(fn)
