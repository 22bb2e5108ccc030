"""Of which kind each option of a transformer must be."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
from flax import nnx

from jattn.core.arguments import check_callable, positive, static_int
from jattn.core.boundary import check_floating, one_of
from jattn.layer import flags
from jattn.prepare import check_rate

CALLER = "TransformerConfig"
GATED = {"swiglu": nnx.silu, "geglu": nnx.gelu, "reglu": nnx.relu}
PLAIN = {"gelu": nnx.gelu, "relu": nnx.relu, "silu": nnx.silu}
NAMES = {
    "norm": ("rms", "layer"),
    "activation": (*GATED, *PLAIN),
    "positions": ("rotary", "learned", "sinusoidal", "none"),
    "qk_norm": ("layer", "rms", "l2"),
}
SIZES = (
    "vocab_size",
    "num_layers",
    "d_model",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "v_head_dim",
    "d_ff",
)


def _check_name(caller: str, name: str, given: Any) -> None:
    one_of(caller, name, given, NAMES[name])


def _check_flag(caller: str, name: str, given: Any) -> None:
    flags(caller, **{name: given})


def _check_size(caller: str, name: str, given: Any) -> None:
    static_int(caller, name, given, 1)


def _check_dtype(caller: str, name: str, given: Any) -> None:
    check_floating(caller, name, jax.ShapeDtypeStruct((), given))


def _check_remat(caller: str, name: str, given: Any) -> None:
    if not isinstance(given, bool) and not callable(given):
        raise TypeError(
            f"{caller}: {name} must be True, False or a policy, but got {given!r}. "
            "Policies are in jax.checkpoint_policies."
        )


CHECKS: tuple[tuple[tuple[str, ...], Callable[[str, str, Any], Any]], ...] = (
    (tuple(NAMES), _check_name),
    ((*SIZES, "max_length"), _check_size),
    (("norm_epsilon",), positive),
    (("dropout_rate",), lambda caller, _, rate: check_rate(caller, rate)),
    (("dtype", "param_dtype"), _check_dtype),
    (("remat",), _check_remat),
    (("rope", "kernel_init", "out_kernel_init", "embedding_init"), check_callable),
    (
        (
            "norm_first",
            "sinks",
            "use_bias",
            "tie_embeddings",
            "scale_embeddings",
            "scan_layers",
        ),
        _check_flag,
    ),
)
"""Which options are of which kind."""


def check_kinds(config: Any) -> None:
    """Raises unless each option of a `TransformerConfig` is of its kind.

    None is of any kind where it is the default.
    """
    defaults = {x.name: x.default for x in dataclasses.fields(config)}
    for names, check in CHECKS:
        for name in names:
            given = getattr(config, name)
            if given is not None or defaults[name] is not None:
                check(CALLER, name, given)
