"""Causal masks, lengths, windows and positions: who may see whom, said in a word."""

import numpy as np

from jattn.testing import dense
from jattn.testing.compare import Difference, check, close, exactly
from jattn.testing.probe import probe, vectors
from jattn.testing.subject import Subject


@probe("causal", "is_causal|mask")
def causal_is_the_lower_triangle(f: Subject) -> None:
    """Query t sees keys 0 to t."""
    q, k, v = vectors(T=11)
    tri = np.tri(11, dtype=bool)
    close("out", f.out(q, k, v, causal=True), dense.attend(q, k, v, mask=tri).out)


@probe("causal", "is_causal|mask", "mask")
def causal_and_padding_hold_together(f: Subject) -> None:
    """A padding mask (B, 1, 1, S) beside the causal one: both hide."""
    q, k, v = vectors(T=11)
    pad = (np.arange(11) < np.array([11, 7])[:, None])[:, None, None]
    want = dense.attend(q, k, v, mask=pad & np.tri(11, dtype=bool)).out
    close("out", f.out(q, k, v, mask=pad, causal=True), want)


@probe("causal", "is_causal", refusal=True)
def causal_with_fewer_queries_than_keys_is_aligned(f: Subject) -> None:
    """T < S is refused, or aligned at the first or at the last key."""
    q, k, v = vectors()
    out = f.out(q, k, v, causal=True)
    shifts = {"first": 0, "last": 6}
    wants = [
        dense.attend(q, k, v, mask=np.tri(5, 11, shift, dtype=bool)).out
        for shift in shifts.values()
    ]
    fits = any(np.allclose(out, want, atol=1e-4) for want in wants)
    check(fits, "out is neither that of the first nor that of the last 5 queries")


@probe("causal", "is_causal|mask")
def the_past_does_not_depend_on_the_future(f: Subject) -> None:
    """Other keys and values after t leave the output up to t the same bits."""
    q, k, v = vectors(T=11)
    before = f.out(q, k, v, causal=True)
    k[:, 6:], v[:, 6:] = 3 * k[:, 6:] + 1, 5 - v[:, 6:]
    after = f.out(q, k, v, causal=True)
    exactly("out[:, :6]", after[:, :6], before[:, :6], "only keys from 6 on changed")
    changed = (after[:, 6:] != before[:, 6:]).any(-1).all()
    check(changed, "later queries do not notice the keys that they may see")


@probe("lengths", "key_value_seq_lengths")
def lengths_hide_the_keys_after_them(f: Subject) -> None:
    """key_value_seq_lengths=(7, 3): the first 7 and 3 keys are seen."""
    q, k, v = vectors()
    lengths = np.array([7, 3], np.int32)
    mask = (np.arange(11) < lengths[:, None])[:, None, None]
    out = f.out(q, k, v, key_value_seq_lengths=lengths)
    close("out", out, dense.attend(q, k, v, mask=mask).out)


@probe("lengths", "key_value_seq_lengths")
def a_sequence_of_length_zero_gives_zero(f: Subject) -> None:
    """key_value_seq_lengths=(0, 3): batch row 0 is zero, not the mean of padding."""
    q, k, v = vectors()
    lengths = np.array([0, 3], np.int32)
    mask = (np.arange(11) < lengths[:, None])[:, None, None]
    out = f.out(q, k, v, key_value_seq_lengths=lengths)
    close("out", out, dense.attend(q, k, v, mask=mask).out)


@probe("lengths", "query_seq_lengths")
def queries_after_their_length_get_zero(f: Subject) -> None:
    """query_seq_lengths=(4, 2): later rows are zero, the others untouched."""
    q, k, v = vectors()
    lengths = np.array([4, 2], np.int32)
    mask = (np.arange(5) < lengths[:, None])[:, None, :, None]
    out = f.out(q, k, v, query_seq_lengths=lengths)
    close("out", out, dense.attend(q, k, v, mask=mask).out)


@probe("windows", "local_window_size|query_positions")
def a_window_counts_the_keys_beside_the_query(f: Subject) -> None:
    """(3, 2) is 3 keys before, the one at the query, and 2 after."""
    q, k, v = vectors(T=11)
    distance = np.arange(11)[:, None] - np.arange(11)
    inside = (distance <= 3) & (distance >= -2)
    out = f.out(q, k, v, window=(3, 2))
    close("out", out, dense.attend(q, k, v, mask=inside).out)


@probe("windows", "local_window_size", refusal=True)
def a_negative_window_is_refused(f: Subject) -> None:
    """(-1, 0) would leave every query without a key."""
    q, k, v = vectors(T=11)
    out = f.out(q, k, v, window=(-1, 0))
    mean = np.allclose(out, v.mean(1, keepdims=True), atol=1e-4)
    what = "every row is the mean of all values" if mean else "it was accepted"
    raise Difference(f"local_window_size=(-1, 0): {what}")


@probe("positions", "query_positions", "is_causal|mask")
def the_last_queries_of_a_sequence_see_its_past(f: Subject) -> None:
    """Queries with their positions are rows of one causal pass, in a window or not."""
    q, k, v = vectors(T=11)
    distance = np.arange(11)[:, None] - np.arange(11)
    for window, start, end in (
        (None, 3, 8),
        (None, 6, 11),
        ((2, 0), 6, 11),
        ((2, 0), 10, 11),
    ):
        mask = (distance >= 0) & (distance <= 2 if window else True)
        want = dense.attend(q, k, v, mask=mask).out[:, start:end]
        positions = np.arange(start, end, dtype=np.int32)[None]
        options = dict(causal=True, window=window, query_positions=positions)
        out = f.out(q[:, start:end], k, v, **options)
        close(f"out of queries {start} to {end - 1}", out, want)


@probe("positions", "query_positions", "key_positions", "is_causal|mask")
def positions_decide_and_not_the_order_of_slots(f: Subject) -> None:
    """A ring of keys after its wrap: position, not slot, is what the mask sees."""
    q, k, v = vectors(T=11)
    want = dense.attend(q, k, v, mask=np.tri(11, dtype=bool)).out
    order = np.roll(np.arange(11), 4)
    options = dict(query_positions=np.arange(11)[None], key_positions=order[None])
    out = f.out(q, k[:, order], v[:, order], causal=True, **options)
    close("out", out, want)
