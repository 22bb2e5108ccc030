"""Which dtype goes in, which is computed in, and which comes out."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jattn.testing import dense
from jattn.testing.compare import all_close, check, close, finite, normal
from jattn.testing.probe import probe, some_pairs, vectors
from jattn.testing.subject import Subject


@probe("dtypes", "float64")
def float64_is_computed_in_float64(f: Subject) -> None:
    """Twelve digits in output and gradients, as a check by finite differences needs."""
    with jax.enable_x64(True):
        q, k, v = vectors(dtype=np.float64)
        d_out = normal(6, *q.shape, dtype=np.float64)
        got = f.results(q, k, v, d_out)
    for name, array in got.items():
        what = name if name == "out" else f"gradient of {name}"
        check(array.dtype == np.float64, f"{what} of float64 vectors is {array.dtype}")
    all_close(got, dense.gradients(q, k, v, d_out), np.float64)


@probe("dtypes", "bfloat16")
def bfloat16_comes_out_as_bfloat16(f: Subject) -> None:
    """The output has query's dtype, and is right within its rounding."""
    _dtype_kept(f, jnp.bfloat16)


@probe("dtypes", "float16", optional=True)
def float16_comes_out_as_float16(f: Subject) -> None:
    """The output has query's dtype, and is right within its rounding."""
    _dtype_kept(f, jnp.float16)


def _dtype_kept(f: Subject, dtype: Any) -> None:
    q, k, v = vectors(dtype=dtype)
    out = f.out(q, k, v)
    check(out.dtype == dtype, f"out of {jnp.dtype(dtype)} vectors is {out.dtype}")
    close("out", out, dense.attend(q, k, v).out, dtype)


@probe("dtypes", "float16", "mask", optional=True)
def float16_has_room_for_a_mask(f: Subject) -> None:
    """No sentinel overflows: masked keys have no weight, no row is NaN."""
    q, k, v = vectors(dtype=np.float16)
    mask = some_pairs()
    mask[0, :, 1] = False
    out = f.out(q, k, v, mask=mask)
    finite("out", out)
    live = np.any(mask, -1)[:, 0]
    want = dense.attend(q, k, v, mask=mask).out
    close("out of rows with keys", out[live], want[live], np.float16)


@probe("dtypes", "float16", optional=True)
def float16_scores_do_not_overflow(f: Subject) -> None:
    """Scores of 8e4, beyond the largest float16: the largest one wins."""
    q, k, v = vectors(dtype=np.float16)
    q[:], k[:], k[:, 4] = 170, 169, 170
    want = np.broadcast_to(v[:, 4:5], q.shape)
    close("out", f.out(q, k, v), want, np.float16, "one score is 8e4, ahead by 480")


@probe("dtypes", "bfloat16", "bias", "grad")
def a_float32_bias_does_not_widen_bfloat16(f: Subject) -> None:
    """The output stays bfloat16; every gradient has the dtype of its argument."""
    q, k, v = vectors(dtype=jnp.bfloat16)
    bias = normal(7, 2, 1, 5, 11)
    got = f.gradients(q, k, v, np.ones(q.shape, np.float32), bias=bias)
    want = dict.fromkeys(("out", "query", "key", "value"), jnp.bfloat16)
    for name, dtype in {**want, "bias": np.float32}.items():
        what = name if name == "out" else f"gradient of {name}"
        check(got[name].dtype == dtype, f"{what} is {got[name].dtype}")


@probe("dtypes", refusal=True)
def integer_vectors_are_refused(f: Subject) -> None:
    """Attention of int32 arrays is refused or computed in floating point."""
    q, k, v = (np.round(3 * x).astype(np.int32) for x in vectors())
    out = f.out(q, k, v)
    zero = " of zeros" if not out.any() else ""
    check(
        np.issubdtype(out.dtype, np.floating),
        f"int32 vectors give an output in {out.dtype}{zero}",
    )
    close("out", out, dense.attend(q, k, v).out)
