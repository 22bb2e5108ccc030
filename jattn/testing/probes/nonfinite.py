"""NaN and Inf in what may not be seen, and in what may."""

from typing import Any

import numpy as np

from jattn.testing import dense
from jattn.testing.compare import all_close, check, close, exactly, finite, normal
from jattn.testing.probe import probe, some_pairs, vectors
from jattn.testing.subject import Subject


def _hidden_key() -> tuple[np.ndarray, ...]:
    """Vectors and a mask that hides key 10 from everybody."""
    mask = some_pairs()
    mask[..., 10] = False
    return (*vectors(), mask)


@probe("NaN", "mask")
def NaN_in_a_masked_key_stays_there(f: Subject) -> None:
    """The output is as if the key were not there."""
    q, k, v, mask = _hidden_key()
    want = dense.attend(q, k, v, mask=mask).out
    k[:, 10] = np.nan
    close("out", f.out(q, k, v, mask=mask), want, because="key 10 is NaN and masked")


@probe("NaN", "mask")
def NaN_in_a_masked_value_stays_there(f: Subject) -> None:
    """0 x NaN is not summed, nor 0 x Inf."""
    q, k, v, mask = _hidden_key()
    want = dense.attend(q, k, v, mask=mask).out
    v[0, 10], v[1, 10] = np.nan, np.inf
    out = f.out(q, k, v, mask=mask)
    close("out", out, want, because="value 10 is NaN or Inf, and masked")


@probe("NaN", "mask", "grad")
def NaN_in_a_masked_key_reaches_no_gradient(f: Subject) -> None:
    """All gradients are as if the key were not there; its own is zero."""
    q, k, v, mask = _hidden_key()
    _same_gradients(f, q, k, v, mask, "key")


@probe("NaN", "mask", "grad")
def NaN_in_a_masked_value_reaches_no_gradient(f: Subject) -> None:
    """All gradients are as if the value were not there; its own is zero."""
    q, k, v, mask = _hidden_key()
    _same_gradients(f, q, k, v, mask, "value")


def _same_gradients(f: Subject, q: Any, k: Any, v: Any, mask: Any, where: str) -> None:
    d_out = normal(6, *q.shape)
    want = dense.gradients(q, k, v, d_out, mask=mask)
    (k if where == "key" else v)[:, 10] = np.nan
    got = f.gradients(q, k, v, d_out, mask=mask)
    got["out"] = want["out"]  # the subject of other claims
    all_close(got, want, because=f"{where} 10 is NaN and masked")


@probe("NaN", "mask", "grad")
def NaN_in_a_padding_query_reaches_no_gradient(f: Subject) -> None:
    """A query that is NaN and sees nothing leaves every key and value alone."""
    q, k, v = vectors()
    mask, d_out = some_pairs(), normal(6, *q.shape)
    mask[0, :, 1] = False
    d_out[0, 1] = 0
    want = dense.gradients(q, k, v, d_out, mask=mask)
    q[0, 1] = np.nan
    got = f.gradients(q, k, v, d_out, mask=mask)
    for name in ("key", "value"):
        reason = "query 1 of row 0 is NaN, sees nothing and is not in the loss"
        close(f"gradient of {name}", got[name], want[name], because=reason)


@probe("NaN", "is_causal|mask")
def NaN_in_the_future_stays_there(f: Subject) -> None:
    """Keys and values after t that are NaN leave the output up to t as it was."""
    q, k, v = vectors(T=11)
    before = f.out(q, k, v, causal=True)
    k[:, 6:], v[:, 6:] = np.nan, np.nan
    after = f.out(q, k, v, causal=True)
    exactly(
        "out[:, :6]", after[:, :6], before[:, :6], "keys and values from 6 on are NaN"
    )


@probe("NaN", "mask")
def NaN_in_a_padding_document_stays_there(f: Subject) -> None:
    """Packed documents beside padding that is NaN: their rows are as alone."""
    q, k, v = vectors(T=11)
    ids = np.repeat([1, 2, 0], [4, 3, 4])
    pairs = (ids[:, None] == ids) & (ids > 0)
    mask = np.broadcast_to(pairs, (2, 1, 11, 11))
    want = dense.attend(q, k, v, mask=mask & np.tri(11, dtype=bool)).out
    k[:, 7:], v[:, 7:] = np.nan, np.nan
    out = f.out(q, k, v, mask=mask, causal=True)
    reason = "the padding, from 7 on, is NaN"
    close("out[:, :7]", out[:, :7], want[:, :7], because=reason)


@probe("NaN", "key_value_seq_lengths")
def NaN_in_slots_not_yet_written_stays_there(f: Subject) -> None:
    """A cache filled with NaN, of which lengths says what is written."""
    q, k, v = vectors()
    lengths = np.array([7, 3], np.int32)
    written = np.arange(11) < lengths[:, None]
    want = dense.attend(q, k, v, mask=written[:, None, None]).out
    k[~written], v[~written] = np.nan, np.nan
    out = f.out(q, k, v, key_value_seq_lengths=lengths)
    close("out", out, want, because="slots after lengths (7, 3) are NaN")


@probe("NaN", "mask")
def NaN_that_may_be_seen_is_shown(f: Subject) -> None:
    """Exactly the rows that see a NaN become NaN: nothing is hidden, or spread."""
    mask = some_pairs()
    sees = np.zeros((2, 5), bool)
    sees[0] = mask[0, 0, :, 4]
    for place, name in ((1, "key"), (2, "value")):
        given = vectors()
        given[place][0, 4] = np.nan
        out = f.out(*given, mask=mask)
        hidden = np.isfinite(out[sees]).any()
        check(not hidden, f"a row that sees a NaN {name} has a finite output")
        finite("out", out, ~sees[..., None, None])
