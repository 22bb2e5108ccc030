"""Masks and biases that are arrays: what their entries and their shapes mean."""

from typing import Any

import numpy as np

from jattn.testing import dense
from jattn.testing.compare import Difference, check, close, exactly, normal
from jattn.testing.probe import probe, some_pairs, vectors
from jattn.testing.subject import Subject


@probe("masks", "mask")
def True_means_may_look(f: Subject) -> None:
    """True keeps a key, False hides it."""
    q, k, v = vectors()
    mask = some_pairs()
    close("out", f.out(q, k, v, mask=mask), dense.attend(q, k, v, mask=mask).out)


@probe("masks", "mask")
def axes_of_one_are_broadcast(f: Subject) -> None:
    """A mask (1, N, 1, S) is one per head and key."""
    q, k, v = vectors()
    mask = some_pairs(T=1, B=1, N=3)
    close("out", f.out(q, k, v, mask=mask), dense.attend(q, k, v, mask=mask).out)


@probe("masks", "mask")
def no_score_is_low_enough_for_a_masked_key_to_win(f: Subject) -> None:
    """Scores of -2e4 and -1e30 at the only keys that may be seen."""
    q, k, v = vectors()
    mask = np.arange(11)[None, None, None] < 2
    mask = np.broadcast_to(mask, (2, 1, 5, 11))
    for size in (2e4, 1e30):
        q[:], k[:], v[:, 2:] = np.sqrt(size), np.sqrt(size / 8), 100.0
        k[:, :2] *= -1
        out = f.out(q, k, v, mask=mask)
        want = np.broadcast_to(v[:, :2].mean(1, keepdims=True), out.shape)
        close("out", out, want, because=f"allowed scores are -{size:g}")


@probe("masks", "mask", "bias")
def a_bias_cannot_revive_a_masked_key(f: Subject) -> None:
    """The mask comes after the bias, be that 1e5."""
    q, k, v = vectors()
    mask = some_pairs()
    bias = np.where(mask, 0.0, 1e5).astype(np.float32)
    want = dense.attend(q, k, v, mask=mask).out
    close("out", f.out(q, k, v, mask=mask, bias=bias), want)


@probe("masks", "mask")
def padding_of_keys_is_not_padding_of_queries(f: Subject) -> None:
    """(B, 1, 1, S) hides keys from all; (B, 1, T, 1) leaves other queries alone."""
    q, k, v = vectors(T=11)
    real = np.arange(11) < np.array([11, 6])[:, None]
    want = dense.attend(q[1:], k[1:, :6], v[1:, :6]).out
    out = f.out(q, k, v, mask=real[:, None, None, :])
    close("out[1:]", out[1:], want, because="keys from 6 on are padding")
    out = f.out(q, k, v, mask=real[:, None, :, None])
    close("out[1:, :6]", out[1:, :6], dense.attend(q[1:, :6], k[1:], v[1:]).out)


@probe("masks", "mask")
def a_query_without_keys_gets_zero(f: Subject) -> None:
    """Neither NaN nor the mean of the values that it may not see."""
    q, k, v = vectors()
    mask = some_pairs()
    mask[0, :, 1] = False
    out = f.out(q, k, v, mask=mask)
    exactly("out[0, 1]", out[0, 1], np.zeros((3, 8)), _if_mean(out[0, 1], v[0]))
    close("out", out, dense.attend(q, k, v, mask=mask).out)


def _if_mean(rows: np.ndarray, values: np.ndarray) -> str:
    mean = np.allclose(rows, values.mean(0), atol=1e-4)
    return "it is the mean of all values, which the mask forbids" if mean else ""


@probe("masks", "bias")
def a_bias_of_minus_infinity_is_a_mask(f: Subject) -> None:
    """-inf at single pairs gives them no weight; in a whole row, zero."""
    got, want = with_infinite_bias(f)
    close("out", got["out"], want["out"])


def with_infinite_bias(f: Subject) -> tuple[dict[str, Any], dict[str, Any]]:
    """Results under a bias of which some entries and a whole row are -inf."""
    q, k, v = vectors()
    allowed, d_out = some_pairs(), normal(6, *q.shape)
    allowed[0, :, 1] = False
    bias = normal(7, 2, 1, 5, 11)
    want = dense.gradients(q, k, v, d_out, mask=allowed, bias=bias)
    want["bias"] = want["bias"].sum(1, keepdims=True)
    bias[~allowed] = -np.inf
    return f.results(q, k, v, d_out, bias=bias), want


@probe("masks", "mask", refusal=True)
def a_mask_of_two_axes_is_not_guessed(f: Subject) -> None:
    """Padding (B, S) with B = T is refused, or read as padding; never as (T, S)."""
    q, k, v = vectors(T=4, S=4, B=4)
    pad = np.arange(4) < np.array([4, 3, 2, 1])[:, None]
    read = {"padding": pad[:, None, None, :], "(T, S)": pad[None, None]}
    _refused_or(f.out(q, k, v, mask=pad), read, q, k, v, "(B, S)")


@probe("masks", "mask", refusal=True)
def a_mask_of_three_axes_is_not_guessed(f: Subject) -> None:
    """(B, T, S) with B = N is refused, or read so; never as (N, T, S)."""
    q, k, v = vectors(N=2)
    mask = some_pairs()[:, 0]
    read = {"(B, T, S)": mask[:, None], "(N, T, S)": mask[None]}
    _refused_or(f.out(q, k, v, mask=mask), read, q, k, v, "(B, T, S)")


def _refused_or(
    out: Any, read: dict[str, Any], q: Any, k: Any, v: Any, given: str
) -> None:
    """Raises unless `out` is that of the first way to read a mask."""
    (right, first), (other, second) = read.items()
    want = dense.attend(q, k, v, mask=first).out
    wrong = dense.attend(q, k, v, mask=second).out
    if np.allclose(out, wrong, atol=1e-3) and not np.allclose(out, want, atol=1e-3):
        off = np.abs(out - want).max()
        raise Difference(f"a mask {given} was read as {other}; off by {off:.2g}")
    close("out", out, want, because=f"a mask {given} must be read as {right}")


@probe("masks", "mask", refusal=True)
def a_mask_of_zeros_and_ones_is_read_as_one(f: Subject) -> None:
    """Integers 0 and 1 are refused, or hide and keep; they are not added."""
    q, k, v = vectors()
    mask = some_pairs()
    out = f.out(q, k, v, mask=mask.astype(np.int32))
    close("out", out, dense.attend(q, k, v, mask=mask).out)


@probe("masks", "bias", refusal=True)
def a_Boolean_bias_is_not_added(f: Subject) -> None:
    """A mask that was given as bias= is refused, or hides; it is not added."""
    q, k, v = vectors()
    mask = some_pairs()
    out = f.out(q, k, v, bias=mask)
    added = dense.attend(q, k, v, bias=mask).out
    check(
        not np.allclose(out, added, atol=1e-4),
        f"the Boolean array {mask.shape} was added to the scores as 0 and 1",
    )
    close("out", out, dense.attend(q, k, v, mask=mask).out)


@probe("masks", "mask")
def packed_documents_do_not_see_each_other(f: Subject) -> None:
    """Causal documents in one row are as alone; the others cannot be noticed."""
    q, k, v = vectors(T=11)
    ids = np.repeat([1, 2, 3], [4, 2, 5])
    mask = np.broadcast_to(ids[:, None] == ids, (2, 1, 11, 11))
    out = f.out(q, k, v, mask=mask, causal=True)
    tri = np.tri(11, dtype=bool)
    for document in (1, 2, 3):
        at = np.flatnonzero(ids == document)
        alone = dense.attend(
            q[:, at], k[:, at], v[:, at], mask=tri[: len(at), : len(at)]
        )
        close(f"out of document {document}", out[:, at], alone.out)
    k[:, :4] += 9
    v[:, :4] -= 9
    again = f.out(q, k, v, mask=mask, causal=True)
    exactly("out[:, 4:]", again[:, 4:], out[:, 4:], "only document 1 changed")
