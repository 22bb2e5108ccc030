"""The checks at the front door: every error in letters, before anything is traced."""

import difflib
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jattn.core.letters import WHOLE, letters_of
from jattn.core.rules import Rule, as_array

FLOATS = ("bfloat16", "float16", "float32", "float64")


class Sizes(NamedTuple):
    """The sizes of one call; `batch` holds the leading axes."""

    batch: tuple[int, ...]
    T: int
    S: int
    N: int
    K: int
    H: int

    def shape(self, letters: str) -> tuple[int, ...]:
        """The shape of an array with these axes; a dot, of any size, gives -1."""
        sizes = (self.batch if x == "B" else (getattr(self, x, -1),) for x in letters)
        return tuple(size for group in sizes for size in group)


def check_vectors(caller: str, query: Any, key: Any, value: Any | None = None) -> Sizes:
    """The sizes of query (*B, T, N, H), key (*B, S, K, H) and value (*B, S, K, D).

    Raises:
        TypeError: an argument is not a floating-point array.
        ValueError: the shapes do not fit one another.
    """
    given = {"query": query, "key": key}
    if value is not None:
        given["value"] = value
    for name, array in given.items():
        check_floating(caller, name, array)
    shapes = {name: tuple(array.shape) for name, array in given.items()}
    shown = ", ".join(f"{name} {shape}" for name, shape in shapes.items())
    axes = {"query": "(*B, T, N, H)", "key": "(*B, S, K, H)", "value": "(*B, S, K, D)"}

    def refuse(rule: str, cure: str) -> ValueError:
        return ValueError(f"{caller}: {rule}, but got {shown}. {cure}")

    for name, shape in shapes.items():
        if len(shape) < 3:
            raise refuse(
                f"{name} must be {axes[name]}, of three axes at least",
                "Give a single head its axis: x[..., None, :].",
            )
    *batch, T, N, H = shapes["query"]
    *key_batch, S, K, key_H = shapes["key"]
    if key_batch != batch:
        raise refuse(
            "query and key must have the same leading axes *B", "Broadcast one of them."
        )
    if value is not None and shapes["value"][:-1] != shapes["key"][:-1]:
        raise refuse(
            "value (*B, S, K, D) must have key's *B, S and K",
            "Only its last axis may differ.",
        )
    if key_H != H:
        raise refuse(
            f"query and key must have one head size H, here H={H} and {key_H}",
            "Project both to the same width.",
        )
    if H == 0:
        raise refuse("the head size H must be 1 or more", "There is nothing to score.")
    if (N % K if K else N) != 0:
        raise refuse(
            f"query heads N must be a multiple of key heads K, here {N=} and {K=}",
            "Give each key head the same number of query heads; if your layout is "
            "(*B, N, T, H), use jnp.swapaxes(x, -3, -2).",
        )
    return Sizes(tuple(batch), T, S, N, K, H)


def check_floating(caller: str, name: str, array: Any) -> None:
    """Raises TypeError unless `array` is an array of a dtype in `FLOATS`."""
    if not hasattr(array, "shape") or not hasattr(array, "dtype"):
        raise TypeError(
            f"{caller}: {name} must be an array, but got {type(array).__name__}. "
            "Convert it with jnp.asarray."
        )
    if str(array.dtype) not in FLOATS:
        raise TypeError(
            f"{caller}: {name} must be floating point ({', '.join(FLOATS)}), but got "
            f"{array.dtype} of shape {tuple(array.shape)}. Cast it, for example with "
            ".astype(jnp.float32)."
        )


def check_rule(
    caller: str, argument: str, rule: Rule | None, sizes: Sizes, hint: str = ""
) -> None:
    """Raises ValueError unless every array of `rule` has the axes it declares.

    An array that is all there is of an argument has its name, others their path. The
    error ends with the hint.
    """
    if rule is None:
        return
    arrays = jax.tree_util.tree_leaves_with_path(rule)
    for (path, array), letters in zip(arrays, letters_of(rule), strict=True):
        want, got = sizes.shape(letters), tuple(np.shape(array))
        scalar = got == () and not set("TS" + WHOLE) & set(letters)
        if not letters or scalar:
            continue
        if len(got) != len(want) or any(
            m >= 0 and n not in (1, m) for n, m in zip(got, want, strict=True)
        ):
            whole = letters == "BNTS" and len(arrays) == 1
            name = argument + ("" if whole else jax.tree_util.keystr(path))
            axes = ", ".join("*B" if x == "B" else x for x in letters)
            sizes_of = "each axis full or 1"
            if WHOLE in letters:
                sizes_of += f" and {WHOLE!r} of any size"
            shown = str(want).replace("-1", WHOLE)
            raise ValueError(
                f"{caller}: {name} must be ({axes}), {sizes_of}, here {shown}, but "
                f"got {got}. {_cure(got, want, letters)}{hint}"
            )


def _cure(got: tuple[int, ...], want: tuple[int, ...], letters: str) -> str:
    missing = len(want) - len(got)
    if letters == "BNTS" and len(got) == 2:
        return (
            f"For one (T, S) array for all, write x[{', '.join(['None'] * missing)}]; "
            "for padding of keys, jattn.masks.padding(x)."
        )
    if letters == "BNTS" and len(got) == 3 and len(want) == 4:
        return "For one per batch row, write x[:, None]; for one per head, x[None]."
    if len(got) < len(want):
        return "Give it the missing axes, of size 1 where it is the same for all."
    return "Nothing else is broadcast."


def one_of(caller: str, name: str, given: Any, options: tuple[str, ...]) -> str:
    """`given`, which must be one of the options.

    Raises:
        ValueError: it is not.
    """
    if given in options:
        return given
    near = difflib.get_close_matches(str(given), options, 1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    raise ValueError(
        f"{caller}: {name} must be one of {', '.join(map(repr, options))}, but got "
        f"{given!r}.{hint}"
    )


def unplaced(caller: str, who: str, num_queries: int, num_keys: int) -> ValueError:
    """The error for T != S where `who` needs positions and none were chosen."""
    return ValueError(
        f"{caller}: with T != S {who} needs to know where the queries stand, but got "
        f"T={num_queries}, S={num_keys} and query_positions=None. Choose "
        '"start" (the first query beside the first key), "end" (the last beside the '
        "last), or give integers."
    )


def positions_beside(
    caller: str, k_pos: Any, num_queries: int, num_keys: int, align: str
) -> Any:
    """Positions of T queries beside the first or the last of S keys, (..., T).

    Args:
        caller: the function that an error names.
        k_pos: positions of the keys, (..., S), or None for 0 to S - 1.
        num_queries: T.
        num_keys: S.
        align: "start" or "end".

    Raises:
        ValueError: T > S, and the positions of the keys are given.
    """
    first = num_keys - num_queries if align == "end" else 0
    if k_pos is None:
        return np.arange(first, first + num_queries, dtype=np.int32)
    if num_queries > num_keys:
        raise ValueError(
            f"{caller}: with T > S there is no key beside every query, but got "
            f"T={num_queries}, S={num_keys} and key_positions. Give query_positions as "
            "integers."
        )
    return k_pos[..., first : first + num_queries]


def check_positions(
    caller: str, name: str, given: Any, letter: str, sizes: Sizes
) -> Any:
    """Positions as an argument, of the rank of (*B, T) or (*B, S), `letter` in full.

    They are less than 2**30 in size, so that the difference of two fits int32. Traced
    ones of a wider dtype that are not become 2**30, or -2**30, which is no other's.

    Raises:
        TypeError: they are not integers.
        ValueError: they do not broadcast.
    """
    if isinstance(given, str):
        raise TypeError(
            f"{caller}: {name} must be integers, but got {given!r}. Only "
            "query_positions may be a string."
        )
    array: Any = as_array(given)
    if not jnp.issubdtype(array.dtype, jnp.integer):
        raise TypeError(
            f"{caller}: {name} must be integers, but got {array.dtype}. Cast them "
            "with .astype(int)."
        )
    want = sizes.shape("B" + letter)
    fits = array.ndim <= len(want) and all(
        n in (1, m) for n, m in zip(array.shape[::-1], want[::-1], strict=False)
    )
    if not fits:
        raise ValueError(
            f"{caller}: {name} must broadcast to (*B, {letter}), here {want}, but got "
            f"shape {array.shape}. Give one position for each."
        )
    array = array.reshape((1,) * (len(want) - array.ndim) + array.shape)
    known = array.size and not isinstance(array, jax.core.Tracer)
    if known and np.abs(np.asarray(array, np.float64)).max() >= 2**30:
        raise ValueError(
            f"{caller}: {name} must be less than 2**30 in size, so that differences "
            f"fit int32, but got {array.min()} to {array.max()}. Count from another "
            "start."
        )
    limits = np.iinfo(array.dtype)
    if isinstance(array, jax.core.Tracer) and limits.max > np.iinfo(np.int32).max:
        array = jnp.clip(array, max(-(2**30), limits.min), 2**30)
    array = array.astype(np.int32)
    if array.shape[-1] != want[-1]:
        numpy = jnp if isinstance(array, jax.Array) else np
        array = numpy.broadcast_to(array, (*array.shape[:-1], want[-1]))
    return array
