"""What is static about random calls of attention: few programs, many calls."""

from typing import NamedTuple

DTYPES = dict(f16="float16", bf16="bfloat16", f32="float32", f64="float64")


class Frame(NamedTuple):
    """What is static about a call.

    masks and scores name rules. bias, scale and sinks hold the letters of the axes that
    these arrays have in full, None without them. positions: "none", or "start" or
    "end", or the arrays whose positions are data: "keys", "queries" or "both".
    """

    batch: tuple[int, ...]
    T: int
    S: int
    N: int
    K: int
    H: int
    D: int
    masks: tuple[str, ...]
    tree: str
    positions: str
    scores: tuple[str, ...]
    bias: str | None
    scale: str | None
    sinks: str | None
    dtype: str
    blocks: tuple[tuple[int, int], ...]

    @classmethod
    def from_row(cls, row: str) -> "Frame":
        """A frame as it stands in `TABLE`."""
        batch, *sizes, masks, tree, positions, scores, axes, dtype, blocks = row.split()
        optional = (None if x == "-" else x.strip("1") for x in axes.split(","))
        return cls(
            tuple(int(n) for n in batch.strip("-").split("x") if n),
            *map(int, sizes),
            tuple(masks.split(",")),
            tree,
            positions,
            tuple(x for x in scores.split(",") if x != "-"),
            *optional,
            DTYPES[dtype],
            tuple(tuple(map(int, x.split("x"))) for x in blocks.split(",")),
        )

    def shape(self, letters: str, full: str = "BNTS") -> tuple[int, ...]:
        """The shape of an array with these axes, 1 where they are not in `full`."""
        sizes = dict(B=self.batch, T=(self.T,), S=(self.S,), N=(self.N,))
        return tuple(n if x in full else 1 for x in letters for n in sizes[x])

    @property
    def wide(self) -> str:
        """The dtype of its scores."""
        return "float64" if self.dtype == "float64" else "float32"

    @property
    def rules(self) -> set[str]:
        """The names of its rules."""
        return {*self.masks, *self.scores}


TABLE = """
B    T  S N K H D masks                   tree place   scores      axes     type blocks
-    9  9 2 1 4 3 causal,window,far       xor  none    cap         -,-,-    f32  4x3,2x4
2    7 11 4 2 3 5 segments,dense,windows  any  both    caps,slope  NS,N,N   f32  4x3,2x5
3    5  8 2 2 3 7 lengths,causal,prefix   and  end     additive    -,1,-    bf16 2x3,5x8
2    4  0 2 1 3 2 causal,padding,all      or   end     -           T,-,N    f32  2x2,4x1
-    1  1 1 1 1 1 all,rows,heads          not  none    alibi       -,N,1    f32  1x1,2x2
0    3  5 2 2 2 2 window,all,all          and  start   caps        N,-,-    f32  2x2,3x4
2    0  7 2 1 2 3 segments,causal,all     or   start   -           -,-,N    f32  1x3,4x4
2    6  5 0 2 2 2 padding,all,all         and  none    -           -,N,N    f32  4x4,3x2
1    1 13 6 3 5 2 causal,prefix,packed    or   end     t5          -,-,N    f32  1x4,1x5
2   13  1 3 1 2 4 rule,dense,rows         xor  start   slope       BNTS,-,- f32  4x1,5x1
2x2  6  5 2 2 2 3 segments,padding,causal any  queries -           BNTS,1,1 f32  4x2,6x5
3    8 10 3 3 4 4 blocks,windows,heads    any  both    alibis      -,-,-    bf16 3x4,8x3
2   12 12 4 1 2 2 chunked,dilated,causal  xor  none    t5,cap      T,-,N    f32  5x5,3x4
-   10 15 2 2 3 1 dilated,window,chunked  not  keys    log_n       NTS,N,-  f32  4x4,3x7
2    9  7 2 1 3 3 dilated,windows,packed  any  both    alibi,t5    -,N,N    f32  4x4,2x6
2   11  6 4 2 5 3 blocks,rule,lengths     nor  start   additive    BS,-,N   f16  4x4,3x3
2    7  9 2 1 3 4 dense,segments,causal   not  queries caps,slope  NS,N,N   f64  3x4,7x2
-    8 14 6 2 2 3 windows,prefix,blocks   xor  end     log_n,slope -,N,N    f64  3x3,8x5
4    6  6 2 2 3 2 rows,heads,lengths      any  none    additive    -,-,-    f32  4x4,2x3
1   16 16 1 1 2 2 causal,far,all          and  none    -           -,-,-    f32  4x4,5x3
2   16 12 2 1 2 3 window,dilated,causal   nor  both    caps        S,1,-    bf16 4x4,8x4
3    5 17 3 1 4 2 padding,chunked,rule    or   both    slope,cap   -,-,1    f32  2x4,5x9
2    8  8 2 2 8 8 none,causal,segments    or   none    -           BT,-,N   bf16 3x3,4x8
2    7  9 4 2 3 3 all,none,all            nor  queries alibis      N,-,-    f32  4x5,3x3
"""
FRAMES = tuple(map(Frame.from_row, TABLE.strip().splitlines()[1:]))
"""The first few of them serve every day."""
