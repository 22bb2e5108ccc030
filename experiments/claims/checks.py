"""Settings that are possible, but not beside each other."""

from collections.abc import Sequence

from experiments.config import ConfigError


def check_heads(d_model: int, heads: int) -> None:
    """Refuse a width that heads cannot share.

    Raises:
        ConfigError: there is a rest.
    """
    if d_model % heads:
        raise ConfigError(
            f"d_model = {d_model} must be a multiple of heads = {heads}, which share it"
        )


def check_ascending(name: str, values: Sequence[int]) -> None:
    """Refuse a list in which nothing grows, or not always.

    Raises:
        ConfigError: it has less than two numbers, or one is not above the one before.
    """
    if len(values) < 2 or list(values) != sorted(set(values)):
        raise ConfigError(
            f"{name} = {list(values)} must be two or more numbers that ascend"
        )
