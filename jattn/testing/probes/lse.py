"""The log-sum-exp of a row's scores, and what it is for."""

import jax.numpy as jnp
import numpy as np

from jattn.testing import dense
from jattn.testing.compare import all_close, check, close, exactly, normal
from jattn.testing.probe import probe, some_pairs, vectors
from jattn.testing.subject import Subject


@probe("lse", "return_lse")
def lse_is_the_log_of_the_denominator(f: Subject) -> None:
    """The natural log of the sum of exp(scores), for each query and head."""
    q, k, v = vectors()
    out, lse = f.with_lse(q, k, v)
    want = dense.attend(q, k, v)
    close("out", out, want.out)
    close("lse", lse, want.lse)


@probe("lse", "return_lse", "mask")
def lse_of_a_query_without_keys_is_minus_infinity(f: Subject) -> None:
    """The empty sum is zero, and its log is -inf: such a part has no weight."""
    q, k, v = vectors()
    mask = some_pairs()
    mask[0, :, 1] = False
    _, lse = f.with_lse(q, k, v, mask=mask)
    exactly("lse[0, 1]", lse[0, 1], np.full(3, -np.inf))
    close("lse", lse, dense.attend(q, k, v, mask=mask).lse)


@probe("lse", "return_lse", "grad")
def lse_has_a_gradient(f: Subject) -> None:
    """A loss on lse (a z-loss) trains query and key, alone and beside one on out."""
    q, k, v = vectors()
    d_lse = normal(8, 2, 5, 3)
    for d_out in (np.zeros_like(q), normal(6, *q.shape)):
        got = f.gradients(q, k, v, d_out, d_lse)
        want = dense.gradients(q, k, v, d_out, d_lse)
        all_close(got, want, because="lse is in the loss")


@probe("lse", "return_lse", "mask")
def parts_merge_by_their_lse(f: Subject) -> None:
    """Three parts of the keys, one of them hidden, make the whole."""
    q, k, v = vectors()
    mask = some_pairs()
    mask[..., 3:6] = False
    part = np.digitize(np.arange(11), (3, 6))
    parts = [f.with_lse(q, k, v, mask=mask & (part == i)) for i in range(3)]
    outs, lses = (np.stack(x).astype(np.float64) for x in zip(*parts, strict=True))
    weights = np.exp(lses - lses.max(0))[..., None]
    weights /= weights.sum(0)
    want = dense.attend(q, k, v, mask=mask).out
    close("merged out", (weights * outs).sum(0), want)


@probe("lse", "return_lse", "bfloat16")
def lse_is_not_rounded_to_bfloat16(f: Subject) -> None:
    """For bfloat16 vectors it is kept in float32: parts are weighted by exp(lse)."""
    q, k, v = vectors(dtype=jnp.bfloat16)
    q = 4 * q
    _, lse = f.with_lse(q, k, v)
    want = dense.attend(q, k, v).lse
    off = np.abs(lse.astype(np.float64) - want).max()
    check(
        lse.dtype == np.float32,
        f"lse of bfloat16 vectors is {lse.dtype}, off by {off:.2g}: the share by which "
        "the weight of a part is off",
    )
    close("lse", lse, want, because="query and key are bfloat16")
