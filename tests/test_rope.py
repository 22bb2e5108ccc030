"""Rotary positions for longer contexts: their frequencies, and that they are used."""

import functools
import math

import jax.numpy as jnp
import numpy as np
import pytest
from oracle import assert_close, assert_same_bits, exact, jit

from jattn import rope, rotary

PLAIN = rope.plain()
KINDS = {
    "plain": rope.plain(base=500.0),
    "linear": rope.linear(4.0),
    "ntk": rope.ntk(4.0),
    "yarn": rope.yarn(4.0, original_length=256),
    "llama3": rope.llama3(4.0, original_length=256, base=10_000.0),
}


def turns(pair, num_pairs, base, length):
    """How often a pair, whole or not, turns in a length."""
    return length * base ** (-pair / num_pairs) / (2 * math.pi)


def pair_of(wanted, num_pairs, base, length):
    """The pair that makes so many turns, by bisection."""
    fast, slow = -10.0 * num_pairs, 10.0 * num_pairs
    for _ in range(100):
        middle = (fast + slow) / 2
        enough = turns(middle, num_pairs, base, length) > wanted
        fast, slow = (middle, slow) if enough else (fast, middle)
    return fast


def slowed_as_in_yarn(num_pairs, base, length, betas, truncate):
    """The share of the factor in each pair, one by one."""
    first, last = (pair_of(beta, num_pairs, base, length) for beta in betas)
    if truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, 2 * num_pairs - 1)
    return [min(max((i - first) / (last - first), 0), 1) for i in range(num_pairs)]


YARNS = [
    dict(factor=4.0, original_length=4096),
    dict(factor=40.0, original_length=4096, rotary_dim=64),
    dict(factor=32.0, original_length=4096, base=150_000.0, truncate=False),
    dict(factor=8.0, original_length=1000, beta_fast=20.0, beta_slow=2.0, base=500.0),
]


@pytest.mark.parametrize("options", YARNS)
def test_yarn_slows_pairs_along_a_ramp_over_their_indices(options):
    ours = rope.yarn(**options)
    num_pairs = (ours.rotary_dim or 128) // 2
    slowed = slowed_as_in_yarn(
        num_pairs,
        ours.base,
        ours.original_length,
        (ours.beta_fast, ours.beta_slow),
        ours.truncate,
    )
    plain = ours.base ** (-np.arange(num_pairs) / num_pairs)
    want = [
        (1 - s) * f + s * f / ours.factor for f, s in zip(plain, slowed, strict=True)
    ]
    np.testing.assert_allclose(ours.frequencies(128), want, rtol=1e-12)
    assert 0 in slowed and 1 in slowed and len(set(slowed)) > 3


def test_yarn_leaves_the_first_pairs_and_slows_the_last_by_the_whole_factor():
    plain = PLAIN.frequencies(128)
    ours = rope.yarn(8.0, original_length=4096).frequencies(128)
    assert_same_bits(ours[:21], plain[:21])  # 64 ln(4096 / 64 pi) / ln 10^4 = 20.9
    assert_same_bits(ours[46:], plain[46:] / 8)  # 64 ln(4096 / 2 pi) / ln 10^4 = 45.03
    assert (ours[21:46] < plain[21:46]).all()


def test_yarn_where_all_pairs_are_slow_or_all_are_fast():
    plain = PLAIN.frequencies(16)
    slow = rope.yarn(8.0, original_length=3).frequencies(16)
    assert_same_bits(slow[1:], plain[1:] / 8)
    fast = rope.yarn(8.0, original_length=10**9).frequencies(16)
    assert_same_bits(fast, plain)


def test_yarn_multiplies_what_turns_by_its_magnitude():
    x = exact(1, 2, 3, 64).astype(np.float32)
    for options, magnitude in (({}, 0.1 * math.log(4) + 1), ({"magnitude": 0.9}, 0.9)):
        ours = rope.yarn(4.0, original_length=256, **options)
        want = rotary(x, frequencies=ours.frequencies(64))
        assert_close(ours(x), magnitude * np.asarray(want))


def slowed_as_in_llama(frequency, factor, length, low, high):
    wavelength = 2 * math.pi / frequency
    if wavelength < length / high:
        return frequency
    if wavelength > length / low:
        return frequency / factor
    smooth = (length / wavelength - low) / (high - low)
    return (1 - smooth) * frequency / factor + smooth * frequency


@pytest.mark.parametrize(
    "factor, length, low, high", [(8.0, 8192, 1.0, 4.0), (3.0, 1000, 2.0, 3.5)]
)
def test_llama3_slows_pairs_by_their_wavelength(factor, length, low, high):
    options = dict(low_freq_factor=low, high_freq_factor=high)
    ours = rope.llama3(factor, original_length=length, **options).frequencies(128)
    plain = 500_000.0 ** (-np.arange(64) / 64)
    want = [slowed_as_in_llama(f, factor, length, low, high) for f in plain]
    np.testing.assert_allclose(ours, want, rtol=1e-12)
    fast, slow = plain > 2 * math.pi * high / length, plain < 2 * math.pi * low / length
    assert_same_bits(ours[fast], plain[fast])
    assert_same_bits(ours[slow], plain[slow] / factor)
    assert fast.sum() > 9 and slow.sum() > 9 and (~fast & ~slow).sum() > 1


def test_ntk_is_a_larger_base_that_slows_the_last_pair_by_the_factor():
    ours, plain = rope.ntk(5.0).frequencies(64), PLAIN.frequencies(64)
    larger = rope.plain(base=10_000.0 * 5.0 ** (64 / 62))
    np.testing.assert_allclose(ours, larger.frequencies(64), rtol=1e-12)
    assert ours[0] == 1 and ours[-1] == pytest.approx(plain[-1] / 5, rel=1e-12)


def test_linear_at_later_positions_is_plain_at_earlier_ones():
    x, positions = exact(1, 7, 3, 10).astype(np.float32), np.arange(7) + 10**6
    later = rope.linear(3.0)(x, 3 * positions)
    assert_close(later, np.asarray(PLAIN(x, positions)))


@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_is_rotary_with_its_frequencies(kind):
    x, positions = exact(1, 5, 3, 12).astype(np.float32), np.arange(5) + 10**6
    part = KINDS[kind]
    for style, size in (("half", None), ("interleaved", 8)):
        options = {f: getattr(part, f) for f in part.__dataclass_fields__}
        ours = type(part)(**options | dict(style=style, rotary_dim=size))
        frequencies = ours.frequencies(12)
        assert frequencies.dtype == np.float64
        want = rotary(
            x,
            positions,
            style=style,
            rotary_dim=size,
            frequencies=frequencies,
            magnitude=0.1 * math.log(4) + 1 if kind == "yarn" else 1.0,
        )
        assert_same_bits(ours(x, positions), want)


def test_without_a_longer_context_all_are_plain():
    plain = PLAIN.frequencies(128)
    length = dict(original_length=4096)
    for ours in (
        rope.linear(1.0),
        rope.ntk(1.0),
        rope.yarn(1.0, **length),
        rope.llama3(1.0, base=10_000.0, **length),
    ):
        np.testing.assert_allclose(ours.frequencies(128), plain, rtol=1e-15)


def test_kinds_are_values_and_static():
    for make in (
        rope.plain,
        lambda: rope.linear(4.0, style="interleaved"),
        lambda: rope.yarn(4.0, original_length=256),
    ):
        assert make() == make() and hash(make()) == hash(make())
        assert isinstance(make(), rope.Rope)
    assert len(set(KINDS.values())) == len(KINDS)
    assert rope.linear(4.0) != rope.ntk(4.0) and rope.linear(4.0) != rope.linear(2.0)

    traces = []

    @functools.partial(jit, static_argnums=0)
    def turned(kind, x):
        traces.append(kind)
        return kind(x)

    for _ in range(2):
        turned(rope.linear(4.0), jnp.ones((2, 3, 4)))
    assert len(traces) == 1


@pytest.mark.parametrize(
    "make, kind, text",
    [
        (
            lambda: rope.linear(0.5),
            ValueError,
            "linear: factor must be 1 or more, .*=0.5",
        ),
        (lambda: rope.ntk(math.inf), ValueError, "ntk: factor must be .* finite"),
        (lambda: rope.ntk("4"), TypeError, "ntk: factor must be a number, .*'4'"),
        (lambda: rope.plain(base=0.0), ValueError, "plain: base must be positive"),
        (lambda: rope.plain(style="neox"), ValueError, "plain: style must be one of"),
        (
            lambda: rope.plain(rotary_dim=5),
            ValueError,
            "plain: rotary_dim must be even",
        ),
        (lambda: rope.plain(rotary_dim=4.0), TypeError, "plain: rotary_dim must be an"),
        (
            lambda: rope.plain(rotary_dim=8).frequencies(6),
            ValueError,
            "rotary_dim=8, H=6",
        ),
        (lambda: rope.plain().frequencies(7), ValueError, "plain: .*even, but got H=7"),
        (lambda: rope.plain()([[[1.0]]]), TypeError, "plain: x must be an array"),
        (lambda: rope.ntk(2.0).frequencies(2), ValueError, "ntk: R must be 4 or more"),
        (
            lambda: rope.yarn(2.0, original_length=0),
            ValueError,
            "yarn: original_length",
        ),
        (lambda: rope.yarn(2.0, original_length=9.0), TypeError, "must be an int, 1"),
        (
            lambda: yarn(beta_fast=1.0),
            ValueError,
            "beta_slow must be less than beta_fast",
        ),
        (lambda: yarn(beta_slow=-1.0), ValueError, "yarn: beta_slow must be positive"),
        (lambda: yarn(base=1.0), ValueError, "yarn: base must be more than 1"),
        (lambda: yarn(truncate=1), TypeError, "yarn: truncate must be a bool"),
        (lambda: yarn(magnitude=0), ValueError, "yarn: magnitude must be positive"),
        (
            lambda: rope.llama3(8.0, original_length=8192, low_freq_factor=4.0),
            ValueError,
            "llama3: low_freq_factor must be less than high_freq_factor, .*=4.0,",
        ),
    ],
)
def test_a_mistake_is_named(make, kind, text):
    with pytest.raises(kind, match=r"^rope\." + f"(?s:.*){text}"):
        make()


def yarn(**options):
    return rope.yarn(2.0, original_length=4096, **options)
