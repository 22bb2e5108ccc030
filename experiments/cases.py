"""What is measured: the cases of the tables, and the inputs of a case.

Letters: B batch, T queries and keys, N heads, H head size. Everything is self-attention
with as many key heads as query heads.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import jax.numpy as jnp
import numpy as np

from experiments.config import ConfigError
from experiments.settings import Cost


@dataclass(frozen=True)
class Case:
    """What is computed: attention of some size, with or without its gradient."""

    mask: str
    backward: bool
    length: int
    heads: int
    head_dim: int
    batch: int = 1
    dtype: str = "float32"
    window: int = 256
    documents: int = 12
    tile: int = 0

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(B, T, N, H)."""
        return self.batch, self.length, self.heads, self.head_dim


class Inputs:
    """Random arrays for a case, rounded to its dtype and held in float32."""

    def __init__(self, case: Case, seed: int) -> None:
        self.case = case
        rng = np.random.default_rng(seed)

        def draw() -> np.ndarray:
            exact = rng.standard_normal(case.shape, np.float32)
            return exact.astype(jnp.dtype(case.dtype)).astype(np.float32)

        self.query, self.key, self.value, self.cotangent = (draw() for _ in range(4))
        size = case.batch, min(case.documents, case.length) - 1
        ends = rng.integers(1, case.length, size)
        starts = np.arange(case.length) >= ends[:, :, None]
        self.ids = 1 + starts.sum(1, dtype=np.int32)
        """Document of each token, (B, T), from 1; the lengths are random."""

    @property
    def vectors(self) -> tuple[np.ndarray, ...]:
        """Query, key, value, and with a gradient its cotangent."""
        cotangent = (self.cotangent,) if self.case.backward else ()
        return self.query, self.key, self.value, *cotangent

    @cached_property
    def dense(self) -> np.ndarray:
        """The mask as an array, (B, 1, T, T)."""
        place = np.arange(self.case.length)
        allowed = place[:, None] >= place[None, :]
        if self.case.mask == "full":
            allowed = np.ones_like(allowed)
        if self.case.mask == "window":
            allowed &= place[:, None] - self.case.window < place[None, :]
        if self.case.mask == "packed":
            allowed = allowed & (self.ids[:, :, None] == self.ids[:, None, :])
        return np.broadcast_to(allowed, (self.case.batch, *allowed.shape[-2:]))[:, None]


def tables_of(settings: Cost) -> dict[str, list[tuple[Case, Sequence[str]]]]:
    """The cases of each table, and who is compared in them.

    Raises:
        ConfigError: a number of heads does not divide the width.
    """
    count, size = settings.head_count, settings.head_size
    kinds = [(m, p != "forward") for m in settings.masks for p in settings.passes]
    heads, head_dim, peers = settings.heads, settings.head_dim, settings.peers
    for n in count.counts:
        if count.width % n:
            raise ConfigError(
                f"head_count.counts: {n} heads do not divide the width {count.width}"
            )
    return {
        "length": [
            (case_of(settings, *kind, n, heads, head_dim), peers)
            for kind in kinds
            for n in settings.lengths
        ],
        "head_size": [
            (case_of(settings, *kind, size.length, heads, h), size.peers)
            for kind in kinds
            for h in size.sizes
        ],
        "head_count": [
            (case_of(settings, *kind, count.length, n, count.width // n), count.peers)
            for n in count.counts
            for kind in kinds[len(settings.passes) - 1 : len(settings.passes)]
        ],
        "memory": [
            (case_of(settings, *kind, n, heads, head_dim), settings.memory_peers)
            for kind in kinds
            for n in settings.memory_lengths
        ],
    }


def case_of(
    settings: Cost, mask: str, backward: bool, length: int, heads: int, head_dim: int
) -> Case:
    """A case of these sizes, and otherwise as the settings say."""
    return Case(
        mask=mask,
        backward=backward,
        length=length,
        heads=heads,
        head_dim=head_dim,
        batch=settings.batch,
        dtype=settings.dtype,
        window=settings.window,
        documents=settings.documents,
        tile=settings.tile,
    )
