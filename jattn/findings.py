"""What `explain` finds, and how it reads."""

import dataclasses

from jattn.counting import Tiles


@dataclasses.dataclass(frozen=True)
class Explanation:
    """What `explain` found; as a string it is less than a screen.

    Attributes:
        shapes: of query, key, value and out.
        dtype: what the products of vectors multiply.
        backend: `jax.default_backend()`, for which the choice was made.
        devices: how many of which kind it has.
        implementation: the algorithm that was chosen.
        reasons: for every algorithm, why it was taken or not.
        tiles: what `blockwise` visits; None for whole rows, and where there is no pair.
        computed: pairs in tiles that are computed, as a share of the T S pairs of a
            head; above 1 where tiles overlap at the edges. None if that is known only
            at run time.
        flops: of the matrix products, forward and forward + backward, for all heads
            and batch rows; likewise.
        temp_bytes: temporary memory of the compiled program, forward and forward +
            backward with respect to query, key and value, as its compiler plans it.
            None if it was not asked for, or the compiler does not say.
        matrix_bytes: what one matrix of logits (*B, N, T, S) would take.
        out_bytes: what the output takes.
    """

    shapes: dict[str, tuple[int, ...]]
    dtype: str
    backend: str
    devices: str
    implementation: str
    reasons: dict[str, str]
    tiles: Tiles | None
    computed: float | None
    flops: tuple[int, int] | None
    temp_bytes: tuple[int, int] | None
    matrix_bytes: int
    out_bytes: int

    def __str__(self) -> str:
        vectors = ("query", "key", "value")
        shapes = ", ".join(f"{name} {self.shapes[name]}" for name in vectors)
        lines = [("call", f"{shapes}, {self.dtype}")]
        lines += [("backend", f"{self.backend}, {self.devices}")]
        for name, reason in self.reasons.items():
            chosen = name == self.implementation
            lines += [(name, f"{'chosen' if chosen else 'not taken'}: {reason}")]
        if self.tiles is not None:
            lines += _lines_of_tiles(self.tiles)
        share = UNKNOWN if self.computed is None else f"{self.computed:.1%} of T x S"
        lines += [("pairs", share)]
        if self.flops is not None:
            lines += [("FLOPs", "{:.3g}, {:.3g} with the gradient".format(*self.flops))]
        if self.temp_bytes is not None:
            forward, both = map(_size, self.temp_bytes)
            lines += [("temporary", f"{forward}, {both} with the gradient")]
        matrix = f"{_size(self.matrix_bytes)} for each matrix (*B, N, T, S)"
        lines += [("whole rows", matrix)]
        lines += [("output", f"{_size(self.out_bytes)}, {self.shapes['out']}")]
        return "\n".join(f"{name:<12}{text}" for name, text in lines)


UNKNOWN = "known only at run time"


def _lines_of_tiles(tiles: Tiles) -> list[tuple[str, str]]:
    (block_q, block_k), (rows, columns) = tiles.block_sizes, tiles.grid
    grid = f"{rows} x {columns} of {block_q} queries x {block_k} keys"
    if tiles.live is None or tiles.per_head is None:
        return [("tiles", f"{grid}; which are EMPTY is {UNKNOWN}")]
    counts = f"{tiles.full} FULL, {tiles.partial} PARTIAL, {tiles.empty} EMPTY"
    lines = [("tiles", grid), ("", counts)]
    if tiles.per_head != (tiles.live, tiles.live):
        fewest, most = tiles.per_head
        alone = f"{fewest}" if fewest == most else f"{fewest} to {most}"
        lines += [("", f"one head of one batch row needs {alone} of {tiles.live}")]
    return lines


def _size(num_bytes: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if num_bytes < 1000:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.3g} TB"
