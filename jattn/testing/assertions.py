"""Shape assertions in the letters of attention, for one's own tests."""

from typing import Any

AXES = {"query": "TNH", "key": "SKH", "value": "SKD", "out": "TND", "lse": "TN"}


def assert_attention_shapes(
    query: Any, key: Any, value: Any, out: Any, lse: Any = None
) -> None:
    """Asserts that the arrays of a call fit one another, letter by letter.

    Letters: *B any leading axes, T queries, S keys, N query heads, K key heads (N is a
    multiple of it), H head size, D width of a value.

    Args:
        query: (*B, T, N, H); an array, or anything else with a shape.
        key: (*B, S, K, H).
        value: (*B, S, K, D).
        out: (*B, T, N, D).
        lse: (*B, T, N), if given.

    Raises:
        AssertionError: they do not; it names the letters and every shape.
        ModuleNotFoundError: chex is not installed.

    Example:
        >>> import jax.numpy as jnp, jattn
        >>> q, k = jnp.ones((2, 5, 4, 8)), jnp.ones((2, 7, 2, 8))
        >>> out, lse = jattn.attention(q, k, k, return_lse=True)
        >>> jattn.testing.assert_attention_shapes(q, k, k, out, lse)
    """
    try:
        import chex
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "assert_attention_shapes: chex must be installed, but it is not. Run "
            "pip install chex.",
            name=error.name,
        ) from None
    given = {"query": query, "key": key, "value": value, "out": out}
    if lse is not None:
        given["lse"] = lse
    shapes = {name: tuple(array.shape) for name, array in given.items()}
    shown = ", ".join(f"{name} {shape}" for name, shape in shapes.items())
    for name, shape in shapes.items():
        if len(shape) < len(AXES[name]):
            raise _refusal(name, "", shown)
    dims = chex.Dimensions()
    dims["TNH"] = shapes["query"][-3:]
    dims["SK"] = shapes["key"][-3:-1]
    dims["D"] = shapes["value"][-1:]
    batch = shapes["query"][:-3]
    for name, array in given.items():
        letters = AXES[name]
        try:
            chex.assert_shape(array, (*batch, *dims[letters]))
        except AssertionError as error:
            sizes = zip(("*B", *letters), (batch, *dims[letters]), strict=True)
            values = ", ".join(f"{letter}={size}" for letter, size in sizes)
            raise _refusal(name, f" with {values}", shown) from error
    N, K = dims["NK"]
    if N % K if K else N:
        raise AssertionError(
            "assert_attention_shapes: query heads N must be a multiple of key heads K, "
            f"here {N=} and {K=}, but got {shown}."
        )


def _refusal(name: str, sizes: str, shown: str) -> AssertionError:
    axes = ", ".join(("*B", *AXES[name]))
    return AssertionError(
        f"assert_attention_shapes: {name} must be ({axes}){sizes}, but got {shown}."
    )
