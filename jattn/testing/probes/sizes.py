"""Sizes of zero and one, odd sizes, and how many axes there are."""

import numpy as np

from jattn.testing import dense
from jattn.testing.compare import close, exactly
from jattn.testing.probe import probe, vectors
from jattn.testing.subject import Subject


@probe("sizes")
def without_batch_rows_there_is_no_output(f: Subject) -> None:
    """B = 0 gives (0, T, N, H)."""
    q, k, v = (x[:0] for x in vectors())
    exactly("out", f.out(q, k, v), q)


@probe("sizes")
def without_queries_there_is_no_output(f: Subject) -> None:
    """T = 0 gives (B, 0, N, H)."""
    q, k, v = vectors()
    exactly("out", f.out(q[:, :0], k, v), q[:, :0])


@probe("sizes")
def without_keys_the_output_is_zero(f: Subject) -> None:
    """S = 0 gives zeros of (B, T, N, H)."""
    q, k, v = vectors()
    exactly("out", f.out(q, k[:, :0], v[:, :0]), np.zeros_like(q))


@probe("sizes")
def one_key_gives_its_value(f: Subject) -> None:
    """All sizes 1: the softmax of one score is one."""
    q, k, v = vectors(1, 1, B=1, N=1, H=1)
    close("out", f.out(q, k, v), v)


@probe("sizes")
def one_query_sees_every_key(f: Subject) -> None:
    """T = 1 and S = 11, as in decoding."""
    q, k, v = vectors(1)
    close("out", f.out(q, k, v), dense.attend(q, k, v).out)


@probe("sizes")
def odd_lengths_fit_any_block(f: Subject) -> None:
    """T = 37 and S = 53 are multiples of no block."""
    q, k, v = vectors(37, 53, B=1, N=2, H=5)
    close("out", f.out(q, k, v), dense.attend(q, k, v).out)


@probe("sizes", "value_dim")
def a_value_has_a_width_of_its_own(f: Subject) -> None:
    """H = 8 and D = 6: out is (B, T, N, 6), the scale 1/sqrt(8)."""
    q, k, v = vectors(D=6)
    close("out", f.out(q, k, v), dense.attend(q, k, v).out)


@probe("sizes", "no_batch")
def the_batch_axis_may_be_absent(f: Subject) -> None:
    """(T, N, H) and (S, K, H) give (T, N, H)."""
    q, k, v = vectors()
    out = f.out(q[0], k[0], v[0])
    close("out", out, dense.attend(q, k, v).out[0])
