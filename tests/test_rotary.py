"""Rotary positions: what they keep, what they depend on, and how exactly."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracle import assert_close, exact

import jattn
from jattn import rotary

T, N, H = 7, 3, 10
STYLES = ["half", "interleaved"]


def vectors(seed=1):
    return jnp.float32(exact(seed, T, N, H))


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


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("base", [10_000.0, 5e5])
def test_each_pair_turns_by_its_own_angle(style, base):
    positions = np.array([0, 1, 2, 5, 17, 3, 100])
    got = rotary(vectors(), positions, style=style, base=base)
    want = by_complex_numbers(vectors(), positions, style, base)
    np.testing.assert_allclose(got, want, atol=3e-5)


@pytest.mark.parametrize("style", STYLES)
def test_position_0_is_the_identity_and_norms_are_kept(style):
    x = vectors()
    np.testing.assert_array_equal(rotary(x, np.zeros(T, int), style=style), x)
    turned = rotary(x, np.arange(T) * 1000, style=style)
    norms = np.linalg.norm(np.asarray(x, np.float64), axis=-1)
    np.testing.assert_allclose(np.linalg.norm(turned, axis=-1), norms, rtol=1e-6)


@pytest.mark.parametrize("style", STYLES)
def test_products_depend_on_the_distance_only(style):
    q, k = vectors(1), vectors(2)

    def products(first):
        positions = np.arange(T) + first
        turned = (rotary(x, positions, style=style) for x in (q, k))
        return jnp.einsum("tnh,snh->nts", *turned)

    assert_close(products(1234), np.asarray(products(0)), jnp.bfloat16)
    np.testing.assert_allclose(products(50), products(0), atol=2e-5)
    plain = jnp.einsum("tnh,snh->nts", q, k)
    assert not np.allclose(products(0), plain, atol=0.1)


def test_the_styles_differ_by_a_permutation_of_the_channels():
    x, positions = vectors(), np.arange(T)
    permuted = jnp.concatenate([x[..., ::2], x[..., 1::2]], -1)
    half = rotary(permuted, positions, style="half")
    back = jnp.stack(jnp.split(half, 2, -1), -1).reshape(x.shape)
    interleaved = rotary(x, positions, style="interleaved")
    np.testing.assert_allclose(back, interleaved, atol=1e-6)
    assert not np.allclose(interleaved, rotary(x, positions, style="half"), atol=0.1)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_angles_are_exact_at_long_positions_whatever_the_dtype(dtype):
    # Pairs (1, 0) become (cos, sin); the rule is 1e-6 + 1e-7 position, and rounding
    # to the dtype of x on top of it.
    positions = np.array([0, 1, 255, 257, 4097, 65535, 65537])
    x = jnp.concatenate([jnp.ones((T, 1, H // 2)), jnp.zeros((T, 1, H // 2))], -1)
    turned = rotary(x.astype(dtype), positions)
    assert turned.dtype == dtype
    error = np.abs(
        np.asarray(turned, np.float64) - by_complex_numbers(x, positions, "half")
    )
    rounding = 0 if dtype == jnp.float32 else 2**-9
    assert (error <= (1e-6 + 1e-7 * positions + rounding)[:, None, None]).all()


def test_positions_may_differ_per_batch_row():
    x = jnp.float32(exact(3, 2, T, N, H))
    positions = np.stack([np.arange(T), np.arange(T)[::-1] + 5])
    got = rotary(x, positions)
    for b in range(2):
        assert_close(got[b], np.asarray(rotary(x[b], positions[b])))
    assert_close(rotary(x), np.asarray(rotary(x, np.arange(T))))


def test_positions_may_be_traced():
    x, positions = vectors(), np.arange(T)
    got = jax.jit(rotary)(x, positions)
    assert_close(got, np.asarray(rotary(x, positions)))


@pytest.mark.parametrize(
    "x, options, kind, text",
    [
        (jnp.ones((T, N, 5)), {}, ValueError, r"even head size H.*\(7, 3, 5\)"),
        (jnp.ones((T, 4)), {}, ValueError, r"\(\*B, T, N, H\)"),
        (jnp.ones((T, N, 4)), dict(style="neox"), ValueError, "'half', 'interleaved'"),
        (jnp.ones((T, N, 4)), dict(positions=np.ones(T)), TypeError, "integers"),
        (jnp.ones((T, N, 4)), dict(positions=np.arange(3)), ValueError, r"\(3,\)"),
    ],
)
def test_a_mistake_is_named(x, options, kind, text):
    with pytest.raises(kind, match="(?s)^rotary: .*" + text):
        jattn.rotary(x, **options)


@pytest.mark.parametrize("size", [2, 98, 154, 196, 392])
def test_every_even_head_size_has_a_frequency_for_each_pair(size):
    x = jnp.ones((3, 1, size))
    first = np.asarray(rotary(x))[1, 0, 0]
    assert rotary(x).shape == x.shape
    assert first == pytest.approx(np.cos(1) - np.sin(1), abs=1e-6)
