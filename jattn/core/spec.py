"""What is static about a call: the options that select code, not data."""

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True)
class AttentionSpec:
    """The static options of one attention call; hashable, a part of the jit cache key.

    Attributes:
        implementation: name of the algorithm.
        dtype: what the products of vectors multiply; their sums are wider.
        block_sizes: (queries, keys) of a tile.
        adapt_blocks: whether the tiles may be smaller, where that fits the mask.
        empty_rows: what a query without keys gets: "zero", or "mean" of all values.
        align: where the queries stand among the keys when no positions are given,
            "start" or "end".
        precision: of the matrix products, as in `jax.lax.dot_general`.
        stats: whether the statistics of every row are wanted.
        dropout_rate: the share of weights that are dropped.
    """

    implementation: str = "reference"
    dtype: Any = "float32"
    block_sizes: tuple[int, int] = (256, 256)
    adapt_blocks: bool = False
    empty_rows: str = "zero"
    align: str = "start"
    precision: Any = None
    stats: bool = False
    dropout_rate: float = 0.0
