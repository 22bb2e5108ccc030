"""Masks: which query may look at which key.

Each is a rule over positions; arrays that belong to it are data; numbers, Python's and
integer scalars of numpy, are static. Compose them with `&`, `|` and `~`:

    >>> causal() & sliding_window(left=256)
    causal() & sliding_window(left=256)
    >>> prefix_lm = causal() | prefix(10)
    >>> streaming = causal() & (sliding_window(256) | prefix(4))
"""

from jattn.core.rules import EMPTY as EMPTY
from jattn.core.rules import FULL as FULL
from jattn.core.rules import PARTIAL as PARTIAL
from jattn.core.rules import Mask as Mask
from jattn.core.rules import Range as Range
from jattn.masks.by_array import dense as dense
from jattn.masks.by_array import lengths as lengths
from jattn.masks.by_array import padding as padding
from jattn.masks.by_array import segments as segments
from jattn.masks.by_block import block_sparse as block_sparse
from jattn.masks.by_block import chunked as chunked
from jattn.masks.by_function import everything as everything
from jattn.masks.by_function import nothing as nothing
from jattn.masks.by_function import rule as rule
from jattn.masks.by_position import causal as causal
from jattn.masks.by_position import dilated as dilated
from jattn.masks.by_position import prefix as prefix
from jattn.masks.by_position import sliding_window as sliding_window

__all__ = [
    "EMPTY",
    "FULL",
    "PARTIAL",
    "Mask",
    "Range",
    "block_sparse",
    "causal",
    "chunked",
    "dense",
    "dilated",
    "everything",
    "lengths",
    "nothing",
    "padding",
    "prefix",
    "rule",
    "segments",
    "sliding_window",
]
