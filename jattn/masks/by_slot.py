"""The mask of a cache, whose slots hold tokens in any order, or none."""

from typing import Any

from jattn.core.letters import leaf
from jattn.core.rules import Array, Mask, Range, verdict_of


class Written(Mask):
    """Allows the slots that hold a token; with a window, those near the query.

    Attributes:
        query_tokens: which token of its row each query is, from 0; below 0: none.
        key_tokens: which one each slot holds; below 0: none.
        window: how many keys a query sees, its own the last. None: all.
    """

    positional = False

    query_tokens: Array = leaf("BT")
    key_tokens: Array = leaf("BS")
    window: int | None = None

    def allowed(self, q_pos: Array, k_pos: Array) -> Any:
        q, k = self.query_tokens[:, None], self.key_tokens[None, :]
        real = (q >= 0) & (k >= 0)
        return real if self.window is None else real & (k <= q) & (q < k + self.window)

    def verdict(self, q_range: Range, k_range: Range) -> Any:
        q, k = (Range(x.min(), x.max()) for x in (self.query_tokens, self.key_tokens))
        some, every = (q.hi >= 0) & (k.hi >= 0), (q.lo >= 0) & (k.lo >= 0)
        if self.window is not None:
            some = some & (k.lo <= q.hi) & (q.lo < k.hi + self.window)
            every = every & (k.hi <= q.lo) & (q.hi < k.lo + self.window)
        return verdict_of(some, every)
