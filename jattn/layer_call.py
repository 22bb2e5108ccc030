"""What a call of an attention layer does, whichever library holds its parameters."""

import inspect
from typing import Any

import jax

from jattn.cache import KVCache
from jattn.core.dropout import Shared
from jattn.dispatch import attend_as, attention_weights


def check_options(caller: str, decode: bool, attention_fn: Any, **given: Any) -> None:
    """Checks that options which are neither None nor False go together.

    Args:
        caller: the class that an error names.
        decode: whether the layer attends to a cache of its own.
        attention_fn: what it attends with, if not `jattn.attention`.
        **given: the options cache, lengths, query_positions, key_positions,
            input_positions, stats and sow_weights.

    Raises:
        ValueError: two of them contradict each other.
        TypeError: the cache is none.
    """
    names = {name for name, x in given.items() if x is not None and x is not False}
    cache = given.get("cache")
    if cache is not None and not isinstance(cache, KVCache):
        raise TypeError(
            f"{caller}: cache must be a jattn.KVCache, but got {type(cache).__name__}. "
            "Make one with jattn.KVCache.init."
        )

    def refuse(when: str, forbidden: set[str], cure: str) -> None:
        found = ", ".join(sorted(names & forbidden))
        if found:
            raise ValueError(
                f"{caller}: {when} there must be no such argument, but got {found}. "
                f"{cure}"
            )

    if "input_positions" in names:
        refuse(
            "beside input_positions",
            {"query_positions", "key_positions"},
            "They are those of queries and keys: give one or the other.",
        )
    if attention_fn is not None:
        refuse(
            "with an attention_fn",
            {"cache", "stats"},
            "They come with jattn.attention, the default.",
        )
    if cache is None:
        refuse(
            "without a cache",
            {"lengths"},
            "For padding, give mask=jattn.masks.lengths(lengths).",
        )
    else:
        refuse(
            "with a cache",
            {"key_positions", "sow_weights"},
            "It has positions of its own, and a layout that weights do not fit.",
        )
    if decode:
        places = {"query_positions", "key_positions"}
        if knows_rules(attention_fn):
            places.add("input_positions")
        refuse(
            "with decode=True",
            {"cache"} | places,
            "The layer's own cache counts its slots. Leave decode out, and give a "
            "cache of jattn.KVCache.init, for positions, packed rows and padding.",
        )


def knows_rules(attention_fn: Any) -> bool:
    """Whether it takes what `jattn.attention_fn` takes, and not only what Flax's does.

    None, `jattn.attention` itself, does too.
    """
    if attention_fn is None:
        return True
    return "query_positions" in inspect.signature(attention_fn).parameters


def attend(
    caller: str,
    module: Any,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    cache: KVCache | None = None,
    dropout_rate: float = 0.0,
    dropout_rng: jax.Array | None = None,
    broadcast_dropout: bool = True,
    stats: bool = False,
    sow_weights: bool = False,
    weights_dtype: Any = None,
    **options: Any,
) -> jax.Array:
    """`jattn.attention` for a module of Flax, which sows what else is asked for.

    Args:
        caller: the class that an error names.
        module: its module; `sow` is all that is used of it.
        query: (*B, T, N, H).
        key: (*B, S, K, H).
        value: (*B, S, K, D).
        cache: attend to what it holds, in place of key and value.
        dropout_rate: counts if there is a dropout_rng.
        dropout_rng: None drops nothing.
        broadcast_dropout: whether all batch rows and heads drop the same weights.
        stats: whether to sow `attention_stats`, a `jattn.Stats`.
        sow_weights: whether to sow `attention_weights`, those before dropout.
        weights_dtype: of these; default that of the queries.
        **options: of `jattn.attention`.
    """
    dropout: dict[str, Any] = {}
    if dropout_rng is not None:
        rng: Any = Shared(dropout_rng) if broadcast_dropout else dropout_rng
        dropout = dict(dropout_rate=dropout_rate, dropout_rng=rng)
    if cache is None:
        out = attend_as(caller, query, key, value, stats=stats, **options, **dropout)
    else:
        given = {name: x for name, x in options.items() if x is not None}
        out = cache.attend(query, stats=stats, **given, **dropout)
    if stats:
        out, measured = out
        module.sow("intermediates", "attention_stats", measured)
    if sow_weights:
        weights = attention_weights(query, key, **options)
        weights = weights.astype(weights_dtype or query.dtype)
        module.sow("intermediates", "attention_weights", weights)
    return out
