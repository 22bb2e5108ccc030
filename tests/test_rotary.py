"""Rotary positions: what they keep, what they depend on, and how exactly."""

import functools
import math
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracle import assert_close, assert_same_bits, exact, jit

import jattn
from jattn import rotary

T, N, H = 7, 3, 10
STYLES = ["half", "interleaved"]
FAR = 2**30 - 1
PLACES = np.array([0, 1, -1, 257, 4095, -15962, 65537, 10**6, 10**8 + 7, FAR, -FAR])


def vectors(seed=1):
    return exact(seed, T, N, H).astype(np.float32)


def by_complex_numbers(x, positions, style, base=10_000.0):
    """The rotation as a product of complex numbers, in float64."""
    x = np.asarray(x, np.float64)
    half = H // 2
    first, second = (
        (x[..., :half], x[..., half:])
        if style == "half"
        else (x[..., ::2], x[..., 1::2])
    )
    angles = positions[..., None, None] * base ** (-2 * np.arange(half) / H)
    turned = (first + 1j * second) * np.exp(1j * angles)
    if style == "half":
        return np.concatenate([turned.real, turned.imag], -1)
    return np.stack([turned.real, turned.imag], -1).reshape(x.shape)


def full_turn():
    """2 pi to 2^-200, by Machin's formula."""

    def arctan_of_inverse(n):
        terms = (2**256 // ((2 * k + 1) * n ** (2 * k + 1)) for k in range(60))
        return sum((-1) ** k * term for k, term in enumerate(terms))

    return Fraction(8 * (4 * arctan_of_inverse(5) - arctan_of_inverse(239)), 2**256)


def cos_and_sin(positions, frequencies):
    """Each (T, R/2), from products without rounding."""
    turn = full_turn()

    def of(position, frequency):
        angle = int(position) * Fraction(float(frequency)) % turn
        near = float(angle)
        left = float(angle - Fraction(near))
        cos, sin = math.cos(near), math.sin(near)
        return cos - left * sin, sin + left * cos

    table = [[of(p, f) for f in frequencies] for p in positions]
    return np.moveaxis(np.array(table), -1, 0)


def frequencies_of(size, base=10_000.0):
    return base ** (-np.arange(0, size, 2) / size)


def table_of(turn, positions, size, dtype):
    """What a function makes of vectors (1, 0) in each pair, "half": cosine and sine."""
    x = np.zeros((len(positions), 1, size), dtype)
    x[..., : size // 2] = 1
    turned = turn(x, positions)
    assert turned.dtype == dtype
    return np.moveaxis(np.asarray(turned, np.float64).reshape(-1, 2, size // 2), 1, 0)


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("base", [10_000.0, 5e5])
def test_each_pair_turns_by_its_own_angle(style, base):
    positions = np.array([0, 1, 2, 5, 17, 3, 100])
    got = rotary(vectors(), positions, style=style, base=base)
    assert_close(got, by_complex_numbers(vectors(), positions, style, base))


@pytest.mark.parametrize("style", STYLES)
def test_position_0_is_the_identity_and_norms_are_kept(style):
    x = vectors()
    assert_same_bits(rotary(x, np.zeros(T, int), style=style), x)
    turned = rotary(x, np.arange(T) * 10**8, style=style)
    norms = np.linalg.norm(np.asarray(x, np.float64), axis=-1)
    np.testing.assert_allclose(np.linalg.norm(turned, axis=-1), norms, rtol=1e-6)


@pytest.mark.parametrize("style", STYLES)
def test_products_depend_on_the_distance_only_wherever_they_are(style):
    q, k = vectors(1), vectors(2)

    def products(first):
        positions = np.arange(T) + first
        turned = (rotary(x, positions, style=style) for x in (q, k))
        return np.einsum("tnh,snh->nts", *(np.asarray(x, np.float64) for x in turned))

    for first in (50, 10**8, -FAR):
        np.testing.assert_allclose(products(first), products(0), atol=4e-6)
    plain = np.einsum("tnh,snh->nts", q, k)
    assert not np.allclose(products(0), plain, atol=0.1)


def test_the_styles_differ_by_a_permutation_of_the_channels():
    x, positions = vectors(), np.arange(T)
    permuted = np.concatenate([x[..., ::2], x[..., 1::2]], -1)
    half = rotary(permuted, positions, style="half")
    back = np.stack(np.split(np.asarray(half), 2, -1), -1).reshape(x.shape)
    interleaved = rotary(x, positions, style="interleaved")
    assert_close(back, np.asarray(interleaved))
    assert not np.allclose(interleaved, rotary(x, positions, style="half"), atol=0.1)


@pytest.mark.parametrize("make", [np.asarray, jnp.asarray], ids=["static", "traced"])
def test_angles_are_exact_at_every_position(make):
    rng = np.random.default_rng(1)
    positions = np.concatenate([PLACES, rng.integers(-FAR, FAR, 30)])
    want = cos_and_sin(positions, frequencies_of(22))
    for dtype, rounding in ((jnp.float32, 0), (jnp.bfloat16, 2**-9)):
        got = table_of(rotary, make(positions), 22, dtype)
        assert np.abs(got - want).max() < 1.5e-7 + rounding


@pytest.mark.parametrize("make", [np.asarray, jnp.asarray], ids=["static", "traced"])
def test_angles_of_float64_are_exact_to_float64(make, x64):
    frequencies = [*frequencies_of(6), -12345.678, 1e9]
    turn = functools.partial(rotary, frequencies=frequencies)
    got = table_of(turn, make(PLACES), 10, np.float64)
    want = cos_and_sin(PLACES, frequencies)
    assert np.abs(got - want).max() < 3e-16


@pytest.mark.parametrize("length, entries", [(2**10, 2**11), (2**20, 2**20)])
def test_the_table_of_a_long_context_is_not_a_constant(length, entries):
    x = jax.ShapeDtypeStruct((length, 1, 4), jnp.float32)
    constants = jax.make_jaxpr(rotary)(x).consts
    assert max(map(np.size, constants)) == entries


def test_positions_may_differ_per_batch_row():
    x = exact(3, 2, T, N, H).astype(np.float32)
    positions = np.stack([np.arange(T), np.arange(T)[::-1] + 5])
    got = np.asarray(rotary(x, positions))
    for b in range(2):
        assert_close(got[b], by_complex_numbers(x[b], positions[b], "half"))
    assert_same_bits(rotary(x), rotary(x, np.arange(T)))


def test_gradients_turn_back_under_jit_and_vmap():
    x = exact(3, 2, T, N, H).astype(np.float32)
    positions = np.stack([np.arange(T) + 10**6, np.arange(T)[::-1]])

    def gradient(x, positions):
        return jax.grad(lambda x: (rotary(x, positions) * x[::-1]).sum())(x)

    def back(x, positions):
        # Of sum <R x, P x>: R' P x + P' R x, where P turns the order around.
        turned = by_complex_numbers(x[::-1], -positions, "half")
        return turned + by_complex_numbers(x, positions, "half")[::-1]

    got = np.asarray(jit(jax.vmap(gradient))(x, positions))
    for b in range(2):
        np.testing.assert_allclose(got[b], back(x[b], positions[b]), atol=3e-6)


def test_nothing_is_left_to_promotion_of_dtypes():
    x = jax.ShapeDtypeStruct((2, T, N, H), jnp.bfloat16)
    traced = jax.ShapeDtypeStruct((2, T), jnp.int32)

    def total(x, positions):
        turned = rotary(x, positions, rotary_dim=4, magnitude=1.5)
        return turned.astype(jnp.float32).sum()

    with jax.numpy_dtype_promotion("strict"):
        for positions in (traced, np.arange(T)):
            gradient = jax.eval_shape(jax.grad(total), x, positions)
            assert gradient.dtype == jnp.bfloat16


@pytest.mark.parametrize("style", STYLES)
def test_channels_beyond_rotary_dim_pass_through(style):
    x = vectors()
    x[..., 6:] = np.nan
    got = np.asarray(rotary(x, style=style, rotary_dim=6))
    assert_same_bits(got[..., 6:], x[..., 6:])
    assert_same_bits(got[..., :6], rotary(x[..., :6], style=style))


def test_frequencies_take_the_place_of_the_base():
    x, fs = vectors(), frequencies_of(H, 100.0)
    assert_same_bits(rotary(x, frequencies=fs), rotary(x, base=100.0))
    assert_same_bits(rotary(x, frequencies=tuple(fs)), rotary(x, base=100.0))
    quarter = np.asarray(rotary(x, np.ones(T, int), frequencies=[math.pi / 2] * 5))
    np.testing.assert_allclose(quarter[..., :5], -x[..., 5:], atol=1e-9)
    there = rotary(x, frequencies=100 * fs)
    assert_close(rotary(there, frequencies=-100 * fs), x)
    assert_same_bits(rotary(x, frequencies=np.zeros(5)), x)


def test_magnitude_multiplies_what_turns():
    x = vectors()
    got = np.asarray(rotary(x, magnitude=1.25, rotary_dim=4))
    plain = np.asarray(rotary(x, rotary_dim=4))
    assert_close(got[..., :4], 1.25 * plain[..., :4])
    assert_same_bits(got[..., 4:], x[..., 4:])


ONES = jnp.ones((T, N, 4))


@pytest.mark.parametrize(
    "x, options, kind, text",
    [
        (jnp.ones((T, N, 5)), {}, ValueError, "H must be even, but got H=5"),
        (jnp.ones((T, N, 0)), {}, ValueError, "H must be even, but got H=0"),
        (jnp.ones((T, 4)), {}, ValueError, r"\(\*B, T, N, H\)"),
        (ONES, dict(style="neox"), ValueError, "'half', 'interleaved'"),
        (ONES, dict(positions=np.ones(T)), TypeError, "integers"),
        (ONES, dict(positions=np.arange(3)), ValueError, r"\(3,\)"),
        (ONES, dict(rotary_dim=3), ValueError, "even and at most H, .* rotary_dim=3"),
        (ONES, dict(rotary_dim=6), ValueError, "rotary_dim=6, H=4"),
        (ONES, dict(rotary_dim=0), ValueError, "2 or more, but got 0"),
        (ONES, dict(rotary_dim=2.0), TypeError, "must be an int"),
        (ONES, dict(base="1e4"), TypeError, "base must be a number"),
        (ONES, dict(base=np.inf), ValueError, "base must be positive and finite"),
        (ONES, dict(base=1e4, frequencies=[1, 0.1]), ValueError, "Leave one out"),
        (ONES, dict(frequencies=[1.0]), ValueError, r"\(R/2,\), here \(2,\)"),
        (ONES, dict(frequencies=[1.0, np.nan]), ValueError, r"less than 2\*\*30"),
        (ONES, dict(magnitude=0.0), ValueError, "magnitude must be positive"),
        (ONES, dict(magnitude=jnp.ones(())), TypeError, r"float\(x\) makes one"),
    ],
)
def test_a_mistake_is_named(x, options, kind, text):
    with pytest.raises(kind, match="(?s)^rotary: .*" + text):
        jattn.rotary(x, **options)


def test_frequencies_are_known_when_the_program_is_made():
    with pytest.raises(TypeError, match="frequencies must be known numbers"):
        jax.eval_shape(lambda f: rotary(ONES, frequencies=f), jnp.ones(2))


@pytest.mark.parametrize("size", [2, 98])
def test_every_even_head_size_has_a_frequency_for_each_pair(size):
    want = cos_and_sin(np.arange(3), frequencies_of(size))
    got = table_of(rotary, np.arange(3), size, jnp.float32)
    assert np.abs(got - want).max() < 1.5e-7


def test_there_may_be_no_positions():
    assert rotary(jnp.ones((2, 0, N, H))).shape == (2, 0, N, H)
