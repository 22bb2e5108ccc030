"""How large the tiles are, where nobody says."""

import numpy as np

from jattn.core.plan import Grid, Plan, make_plan, static_verdicts
from jattn.core.spec import AttentionSpec
from jattn.core.tile import Pairs

BLOCK_SIZES = {"cpu": (256, 256), "gpu": (512, 512), "tpu": (512, 512)}
"""(queries, keys) of a tile, by backend.

For a CPU as measured; for a TPU by the compiler's own estimate of cycles, which is half
of that of (256, 256), with as much memory; for a GPU a guess.
"""


SMALLEST = 128
"""Below this, what a tile costs besides its products is no longer small."""


def default_block_sizes(backend: str, groups: int) -> tuple[int, int]:
    """The block sizes where none are given.

    The queries of all heads that share a key head stand in one tile, so each has a part
    of its rows.

    Args:
        backend: as `jax.default_backend()` names it.
        groups: G, query heads a key head.
    """
    block_q, block_k = BLOCK_SIZES.get(backend, BLOCK_SIZES["gpu"])
    return max(block_q // groups, 64), block_k


def plan_of(
    pairs: Pairs, num_queries: int, num_keys: int, spec: AttentionSpec
) -> tuple[Grid, Plan]:
    """The tiles, and which of them to visit.

    Smaller tiles fit a mask better. If sizes may be chosen and the mask is static, they
    are halved while that leaves out a fifth of the pairs: for a narrow window, or a
    length just above that of a tile.
    """

    def judged(block_q: int, block_k: int) -> tuple[Grid, np.ndarray | None, int]:
        grid = Grid.of(num_queries, num_keys, block_q, block_k)
        verdicts = static_verdicts(pairs, grid)
        tiles = 0 if verdicts is None else int(np.count_nonzero(verdicts))
        return grid, verdicts, tiles * grid.block_q * grid.block_k

    block_q, block_k = spec.block_sizes
    grid, verdicts, visited = judged(block_q, block_k)
    while spec.adapt_blocks and visited and block_k // 2 >= SMALLEST:
        block_q, block_k = block_q // 2, block_k // 2
        smaller = judged(block_q, block_k)
        if smaller[2] >= 0.8 * visited:
            break
        grid, verdicts, visited = smaller
    return grid, make_plan(pairs, grid, verdicts)
