"""How much of what tokens differ in a layer leaves.

Source: Dong et al. 2021, arXiv:2103.03404.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx

from experiments.config import ConfigError
from experiments.timing import slope
from jattn.nnx import EncoderBlock

SMALL = (1e-2, 1e-3)  # what tokens differ in where the order of a layer is taken


class Arm(NamedTuple):
    """What a layer has besides attention."""

    residual: bool
    feed_forward: bool
    norm: bool


def layer(block: EncoderBlock, x: jax.Array, arm: Arm) -> jax.Array:
    """One layer of some parts of a block; of all of them it is the block."""
    steps = [(block.attention_norm, block.attention)]
    if arm.feed_forward:
        steps.append((block.feed_forward_norm, block.feed_forward))
    for norm, f in steps:
        y = f(norm(x) if arm.norm else x)
        x = x + y if arm.residual else y
    return x


compiled_layer = nnx.jit(layer, static_argnames="arm")


def through(step: Callable[..., Any], blocks: Sequence[Any], x: Any) -> list[float]:
    """The residual before the first layer and after each.

    Raises:
        ConfigError: tokens become infinite.
    """
    found = [residual_of(x)]
    for depth, block in enumerate(blocks, start=1):
        x = np.asarray(step(block, x))
        if not np.isfinite(x).all():
            raise ConfigError(f"tokens are not finite after {depth} layers; give fewer")
        found.append(residual_of(x))
    return found


def residual_of(x: Any) -> float:
    """The share of the norm in which tokens differ: |X - 1 mean(X)^T| / |X|.

    In the Frobenius norm the mean is the nearest common token; 0 says that all tokens
    are equal, as they are if they are 0, and 1 that they have nothing in common.
    """
    x = np.asarray(x)
    # A power of two changes no digit, and keeps squares from becoming 0 or infinite.
    x = np.ldexp(x, -np.frexp(np.abs(x).max())[1])
    size = np.linalg.norm(x)
    return float(np.linalg.norm(x - x.mean(axis=0)) / size) if size else 0.0


def order(step: Callable[..., Any], tokens: np.ndarray) -> float | None:
    """The power p of the residual r that a layer makes of it, c r^p for small r."""
    common, others = tokens[:1], tokens[1:]
    small = [common + size * others for size in SMALL]
    after = [residual_of(step(x)) for x in small]
    return slope([residual_of(x) for x in small], after)
