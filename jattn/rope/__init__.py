"""Rotary positions, as they are or for contexts longer than those of training.

Each kind is called as `jattn.rotary` is, and has frequencies of its own:

    >>> import jax.numpy as jnp
    >>> turn = yarn(4.0, original_length=4096)
    >>> turn(jnp.ones((2, 7, 3, 64)), jnp.arange(7) + 10**6).shape
    (2, 7, 3, 64)

They are equal and hash by value, so that a module may hold one and `jax.jit` take it as
a static argument. Queries and keys are turned by the same one.
"""

from jattn.rope.by_factor import Rope as Rope
from jattn.rope.by_factor import linear as linear
from jattn.rope.by_factor import ntk as ntk
from jattn.rope.by_factor import plain as plain
from jattn.rope.by_turns import llama3 as llama3
from jattn.rope.by_turns import yarn as yarn

__all__ = ["Rope", "linear", "llama3", "ntk", "plain", "yarn"]
