"""Keys and values of the tokens so far: append to them, and attend to them.

The layout is the one that is read fastest: heads in front, and keys transposed, so that
a step reads what is filled once and copies nothing.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jattn import execute
from jattn.cache_arguments import (
    check_overflow,
    check_places,
    check_tokens,
    check_window,
    counts_of,
    dtype_of,
    options_of,
)
from jattn.cache_slots import put
from jattn.choice import arrange
from jattn.core.arguments import known, static_int
from jattn.core.boundary import (
    Sizes,
    check_positions,
    check_rule,
    check_vectors,
)
from jattn.core.rules import Array
from jattn.core.tile import poison
from jattn.masks.by_slot import Written
from jattn.prepare import Call, rule_of


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class KVCache:
    """The keys and values of the tokens so far, for each row of a batch.

    A pytree that keeps its shapes: the carry of a loop, an argument to donate, a stack
    of layers. S is its capacity in slots; what a slot holds before a token is written
    there does not matter. `init` makes one. Two are equal if they are one object.

    In a loop of JAX, or in a function under `jit` to which the cache is donated, tokens
    are written in place, and the time of a step grows with what is filled, not with S.
    Anywhere else, as outside `jit`, each `append` copies the whole cache.

    Attributes:
        length: (B,), tokens that were appended so far.
        positions: (B, S), where the token in a slot stands.
        overflowed: (B,), whether a row got more tokens than it has slots, or a number
            of tokens out of range: what `attend` returns for it is NaN from then on.
        window: how many keys a query sees, its own the last. None: all.

    Example:
        >>> import jattn
        >>> cache = jattn.KVCache.init(2, 16, 2, 8, dtype="float32")
        >>> x = jax.random.normal(jax.random.key(0), (2, 5, 2, 8))  # (B, T, N, H)
        >>> cache = cache.append(x, x)
        >>> cache.attend(x, mask=jattn.masks.causal()).shape, cache.length.tolist()
        ((2, 5, 2, 8), [5, 5])
    """

    length: jax.Array
    positions: jax.Array
    overflowed: jax.Array
    _key_t: jax.Array  # (B, K, H, S)
    _value: jax.Array  # (B, K, S, D)
    _begin: jax.Array  # (B,), the length before the last append
    _end: jax.Array  # (B,), what it would be if all t tokens of it had counted
    window: int | None = dataclasses.field(default=None, metadata={"static": True})

    @classmethod
    def init(
        cls,
        batch: int,
        capacity: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        v_head_dim: int | None = None,
        window: int | None = None,
        dtype: Any,
    ) -> "KVCache":
        """A cache without tokens.

        Args:
            batch: B.
            capacity: S, how many slots a row has.
            num_kv_heads: K.
            head_dim: H.
            v_head_dim: D; by default H.
            window: a query sees so many keys, its own the last, and slots are used
                again: the cache never overflows. By default it sees all.
            dtype: of what is stored, floating point.

        Raises:
            ValueError: a size is not positive, or the window exceeds the capacity.
            TypeError: a size is not an int, or dtype is not floating point.
        """
        caller = "KVCache.init"
        given = dict(capacity=capacity, num_kv_heads=num_kv_heads, head_dim=head_dim)
        batch = static_int(caller, "batch", batch, 0)
        S, K, H = (static_int(caller, name, n, 1) for name, n in given.items())
        D = H if v_head_dim is None else static_int(caller, "v_head_dim", v_head_dim, 1)
        if window is not None:
            window = static_int(caller, "window", window, 1)
            if window > S:
                raise ValueError(
                    f"{caller}: window must not exceed capacity, but got {window=}, "
                    f"capacity={S}. To append t tokens at once takes window + t - 1 "
                    "slots."
                )
        dtype = dtype_of(caller, dtype)
        # An array each, so that all of them can be donated.
        length, begin, end = (jnp.zeros(batch, jnp.int32) for _ in range(3))
        return cls(
            length=length,
            positions=jnp.zeros((batch, S), jnp.int32),
            overflowed=jnp.zeros(batch, jnp.bool_),
            _key_t=jnp.zeros((batch, K, H, S), dtype),
            _value=jnp.zeros((batch, K, S, D), dtype),
            _begin=begin,
            _end=end,
            window=window,
        )

    @property
    def capacity(self) -> int:
        """S, the number of slots."""
        return self._key_t.shape[-1]

    def append(
        self,
        key: jax.Array,
        value: jax.Array,
        lengths: Array | None = None,
        *,
        positions: Array | None = None,
    ) -> "KVCache":
        """The cache with t more tokens in each row, or fewer.

        Args:
            key: (B, t, K, H); cast to the dtype of the cache.
            value: (B, t, K, D), likewise.
            lengths: integers, (B,): only so many tokens of a row count, from 0 to t;
                the others are padding on the right. By default t. Where a traced one
                is out of range, its row is `overflowed`, and a check of `checkify`
                fails.
            positions: integers that broadcast to (B, t): where the tokens stand, for
                rules. By default they count on: `length` + 0 to t - 1.

        Raises:
            ValueError: shapes do not fit, or there are not enough slots. Inside `jit`,
                where the number of tokens is not known, nothing that does not fit is
                written, `overflowed` says so, and a check of `checkify` fails.
            TypeError: an argument is of the wrong kind.
        """
        caller = "KVCache.append"
        check_tokens(caller, key, value, self._key_t, self._value)
        batch, t = key.shape[:2]
        check_window(caller, self.window, t, self.capacity)
        counts, wrong = counts_of(caller, lengths, batch, t)
        key, value = key.astype(self._key_t.dtype), value.astype(self._value.dtype)
        _, key, value = poison(key, key, value)
        if positions is None:
            positions = self.length[:, None] + np.arange(t, dtype=np.int32)[None, :]
        else:
            sizes = Sizes((batch,), t, self.capacity, 0, 0, 0)
            positions = check_positions(caller, "positions", positions, "T", sizes)
            positions = jnp.broadcast_to(positions, (batch, t))
        length, overflowed = self.length + counts, self.overflowed | wrong
        if self.window is None:
            check_overflow(caller, self.length, counts, self.capacity)
            overflowed = overflowed | (length > self.capacity)
            length = jnp.minimum(length, self.capacity)
        placed = functools.partial(put, self.length, length)
        return dataclasses.replace(
            self,
            length=length,
            positions=placed(self.positions, positions, 1),
            overflowed=overflowed,
            _key_t=placed(self._key_t, key, 3),
            _value=placed(self._value, value, 2),
            _begin=self.length,
            _end=self.length + t,
        )

    def attend(self, query: jax.Array, **options: Any) -> Any:
        """Attention of the tokens that were appended last to all that are cached.

        Query i of T belongs to token t - T + i of the t in the last `append`; one that
        is padding there gets 0. It sees the slots that are written, of a cache with a
        window the last so many, under the mask that is given: give `causal()` if a
        token must not see later ones of its own append.

        Args:
            query: (B, T, N, H); N a multiple of K.
            **options: those of `attention`, with S the capacity: an array with an axis
                for keys has an entry for each slot, where token n is in slot n, or n %
                S in a cache with a window. By default `query_positions` are the stored
                ones. Dropout goes by the number of a token in its row: with one key,
                all steps drop what one call for all tokens does. Not `key_positions`,
                which are stored, and not `empty_rows="mean"`.

        Returns:
            What `attention` returns.

        Raises:
            ValueError: `attention` would refuse the arguments, the mask counts keys
                (`lengths`) in a cache with a window, or there are more queries than
                tokens in the last `append`; inside `jit` they get NaN.
            TypeError: an argument is of the wrong kind.
        """
        caller = "KVCache.attend"
        options = options_of(caller, options)
        batch, K, H, S = self._key_t.shape
        key, value = (
            jax.ShapeDtypeStruct((batch, S, K, x.shape[axis]), x.dtype)
            for x, axis in ((self._key_t, 2), (self._value, 3))
        )
        call = Call(caller, check_vectors(caller, query, key, value))
        token = self._tokens(caller, call.sizes.T)
        written = self._written(jnp.where(token < self.length[:, None], token, -1))
        mask = rule_of(caller, options["mask"])
        check_places(caller, mask, self.window)
        hint = " With a cache S is its capacity."
        check_rule(caller, "mask", mask, call.sizes, hint)
        options["mask"] = written if mask is None else mask & written
        if options["query_positions"] is None:
            positions = jnp.take_along_axis(self.positions, token % S, axis=1)
            options["query_positions"] = positions
        options["key_positions"] = self.positions
        if options["implementation"] is None:
            # It takes the cache as it is. Others need it in their layout, as a copy.
            options["implementation"] = "decode"
        pairs, spec, _ = arrange(call, jnp.result_type(query, key, value), **options)
        vectors, rng = (query, self._key_t, self._value), options["dropout_rng"]
        tokens = written.query_tokens, written.key_tokens
        out, lse, stats = execute.attend(*vectors, pairs, rng, spec=spec, tokens=tokens)
        results = out
        if options["stats"]:
            results = out, stats
        elif options["return_lse"]:
            results = out, lse
        wrong = self.overflowed[:, None] | (token < self._begin[:, None])

        def marked(x: jax.Array) -> jax.Array:
            return jnp.where(
                wrong.reshape(*wrong.shape, *(1,) * (x.ndim - 2)), jnp.nan, x
            )

        return jax.tree.map(marked, results)

    def _tokens(self, caller: str, num_queries: int) -> jax.Array:
        """Which token of its row each query is, (B, T)."""
        begin, end = known(self._begin), known(self._end)
        if begin is not None and end is not None and begin.size:
            t = int(end[0] - begin[0])
            if num_queries > t:
                raise ValueError(
                    f"{caller}: queries must be of the tokens that were appended last, "
                    f"T <= t, but got T={num_queries}, {t=}. Append their keys and "
                    "values first."
                )
        column = np.arange(num_queries, dtype=np.int32)[None, :]
        return self._end[:, None] - num_queries + column

    def _written(self, query_tokens: jax.Array) -> Written:
        # The last token in a slot: of those n < length with n % S == slot, the largest.
        last = self.length[:, None] - 1
        slot = np.arange(self.capacity, dtype=np.int32)[None, :]
        return Written(query_tokens, last - (last - slot) % self.capacity, self.window)
