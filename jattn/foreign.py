"""A function of somebody else: checked, asked for its names, its errors in one line."""

import inspect
import textwrap
from collections.abc import Callable
from typing import Any

import jax


def refuses(error: BaseException) -> bool:
    """Whether an error is the refusal of a call; else it is a crash."""
    kinds = ValueError, TypeError, RuntimeError, AssertionError
    of_xla = isinstance(error, jax.errors.JaxRuntimeError)
    return isinstance(error, kinds) and not of_xla


class WrongShape(ValueError):
    """Not a refusal: the function is not what it must be."""


def check_returned(caller: str, out: Any, want: tuple[int, ...]) -> None:
    """Raises WrongShape unless attention returned an array of this shape."""
    got = getattr(out, "shape", type(out).__name__)
    if got != want:
        raise WrongShape(
            f"{caller}: attention_fn must return (*B, T, N, H), here {want}, but got "
            f"{got}. Transpose in a lambda if its layout is another."
        )


def parameters_of(fn: Callable[..., Any]) -> set[str]:
    """The names of its parameters, as far as it shows them."""
    try:
        return set(inspect.signature(fn).parameters)
    except (TypeError, ValueError):  # a builtin without a signature
        return set()


def quick_jit(fn: Callable[..., Any]) -> Callable[..., Any]:
    """`jax.jit` for programs that run a few times."""
    # LLVM's optimiser is not under test, and takes a third of the time.
    quick = {"xla_backend_optimization_level": 0}
    on_cpu = jax.default_backend() == "cpu"
    return jax.jit(fn, compiler_options=quick if on_cpu else None)


def in_one_line(error: BaseException, width: int = 150) -> str:
    """The kind of an error and the beginning of what it says."""
    text = f"{type(error).__name__}: {error}".strip().removesuffix(":")
    return textwrap.shorten(text, width, placeholder=" ...")
