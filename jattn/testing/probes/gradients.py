"""Gradients of the vectors and the bias."""

import numpy as np

from jattn.testing import dense
from jattn.testing.compare import all_close, close, exactly, normal
from jattn.testing.probe import probe, some_pairs, vectors
from jattn.testing.probes.arrays import with_infinite_bias
from jattn.testing.subject import Subject


@probe("gradients", "grad")
def gradients_are_those_of_the_formula(f: Subject) -> None:
    """Of query, key and value, where everything may be seen."""
    q, k, v = vectors()
    d_out = normal(6, *q.shape)
    got = f.gradients(q, k, v, d_out)
    all_close(got, dense.gradients(q, k, v, d_out))


@probe("gradients", "grad", "mask")
def gradients_stop_at_masked_keys(f: Subject) -> None:
    """A key that nobody sees has a gradient of exactly zero; the rest is right."""
    q, k, v = vectors()
    mask, d_out = some_pairs(), normal(6, *q.shape)
    mask[..., 7] = False
    got = f.gradients(q, k, v, d_out, mask=mask)
    all_close(got, dense.gradients(q, k, v, d_out, mask=mask))
    for name in ("key", "value"):
        at = f"gradient of {name}[:, 7]"
        exactly(at, got[name][:, 7], np.zeros((2, 3, 8)), "nobody sees it")


@probe("gradients", "grad", "mask")
def a_query_without_keys_has_no_gradient(f: Subject) -> None:
    """Its output is a constant: nothing reaches any query, key or value."""
    q, k, v = vectors()
    mask, d_out = some_pairs(), np.zeros_like(q)
    mask[0, :, 1] = False
    d_out[0, 1] = 1
    got = f.gradients(q, k, v, d_out, mask=mask)
    reason = "the loss is of a query without keys"
    for name in ("query", "key", "value"):
        exactly(f"gradient of {name}", got[name], np.zeros_like(got[name]), reason)


@probe("gradients", "grad", "is_causal|mask")
def no_gradient_reaches_the_future(f: Subject) -> None:
    """A loss on query 4 has gradients of exactly zero at keys and values after it."""
    q, k, v = vectors(T=11)
    d_out = np.zeros_like(q)
    d_out[:, 4] = normal(6, *q[:, 4].shape)
    got = f.gradients(q, k, v, d_out, causal=True)
    all_close(got, dense.gradients(q, k, v, d_out, mask=np.tri(11, dtype=bool)))
    for name in ("key", "value"):
        later = got[name][:, 5:]
        exactly(f"gradient of {name}[:, 5:]", later, np.zeros_like(later))


@probe("gradients", "grad", "bias")
def a_bias_of_minus_infinity_leaves_gradients_finite(f: Subject) -> None:
    """Single entries and a whole row of -inf: no NaN, and zero at those entries."""
    got, want = with_infinite_bias(f)
    all_close(got | {"out": want["out"]}, want)


@probe("gradients", "grad", "bias")
def a_broadcast_bias_collects_its_gradient(f: Subject) -> None:
    """(1, N, 1, S): summed over the axes of one."""
    q, k, v = vectors()
    bias, d_out = normal(7, 1, 3, 1, 11), normal(6, *q.shape)
    got = f.gradients(q, k, v, d_out, bias=bias)
    want = dense.gradients(q, k, v, d_out, bias=bias)["bias"]
    close("gradient of bias", got["bias"], want.sum((0, 2), keepdims=True))


@probe("gradients", "grad", "scale", optional=True)
def a_scale_that_is_an_array_is_learned(f: Subject) -> None:
    """A traced scale is accepted, and has a gradient."""
    q, k, v = vectors()
    scale, d_out = np.array(0.3, np.float32), normal(6, *q.shape)
    got = f.gradients(q, k, v, d_out, scale=scale)
    want = dense.gradients(q, k, v, d_out, scale=0.3)["scale"]
    close("gradient of scale", got["scale"], want)
