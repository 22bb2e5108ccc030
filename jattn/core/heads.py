"""From one head to heads, groups of heads and batch."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jattn.core.letters import letters_of, lift
from jattn.core.tile import Pairs


def over_heads(
    fn: Callable[..., Any],
    queries: tuple[jax.Array, ...],
    keys: tuple[jax.Array, ...],
    pairs: Pairs,
    align: str,
    out_axes: Mapping[str, int],
    key_axes: Sequence[str] = ("SKH", "SKH"),
) -> Any:
    """Calls `fn(*queries, *keys, pairs)` for one head, mapped over K, G and batch.

    Args:
        fn: what to do for one head.
        queries: arrays (*B, T, N, ...), the first of them (*B, T, N, H).
        keys: (key,) or (key, value), (*B, S, K, ...) or as `key_axes` says.
        pairs: the rules, with arrays for all heads and the whole batch.
        align: where the queries stand if `pairs` has no positions for them.
        out_axes: where K and G stand in the results; 0 if not given.
        key_axes: the axes of each of `keys` but *B, H for that of a vector.

    Returns:
        The results of `fn`, with the leading axes in front.
    """
    *batch, num_queries, num_heads, head_dim = queries[0].shape
    sizes = dict(zip(key_axes[0], keys[0].shape[-3:], strict=True))
    num_keys, num_kv_heads = sizes["S"], sizes["K"]
    groups = (num_kv_heads, num_heads // num_kv_heads)
    pairs = pairs.placed(num_queries, num_keys, align)
    if pairs.scale is None:
        pairs = dataclasses.replace(pairs, scale=head_dim**-0.5)
    pairs = pairs.bind(num_queries, num_keys, num_heads)

    # One symbol per leading axis, K and G for N, and a dot where nothing is named.
    leading = "abcdefghijklmnopqrstuvwxyz"[: len(batch)]
    arrays, structure = jax.tree.flatten(pairs)
    names = []
    for i, letters in enumerate(letters_of(pairs)):
        letters = letters.replace("B", leading)
        ndim = np.ndim(arrays[i])
        letters = letters[len(letters) - ndim :] if letters else "." * ndim
        if "N" in letters:
            axis = letters.index("N")
            size = np.shape(arrays[i])
            split = groups if size[axis] == num_heads else (1, 1)
            arrays[i] = arrays[i].reshape(*size[:axis], *split, *size[axis + 1 :])
        names.append(letters.replace("N", "KG"))

    vectors = [
        *(x.reshape(*batch, num_queries, *groups, x.shape[-1]) for x in queries),
        *keys,
    ]
    axes = ["TKGH"] * len(queries) + list(key_axes[: len(keys)])

    def one_head(*tile: Any) -> Any:
        rules = jax.tree.unflatten(structure, tile[len(vectors) :])
        return fn(*tile[: len(vectors)], rules)

    return lift(
        one_head,
        [*vectors, *arrays],
        [*(leading + x for x in axes), *names],
        leading + "KG",
        out_axes,
    )
