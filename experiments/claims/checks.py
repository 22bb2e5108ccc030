"""Settings that are possible, but not beside each other."""

from collections.abc import Sequence

from experiments.config import ConfigError, Data
from experiments.data import Corpus, evaluation_batches, split_of


def check_heads(d_model: int, heads: int, rotary: bool = False) -> None:
    """Refuse a width that heads cannot share.

    Raises:
        ConfigError: there is a rest, or rotary positions cannot turn an odd share.
    """
    size, rest = divmod(d_model, heads)
    if rest:
        raise ConfigError(
            f"d_model = {d_model} must be a multiple of heads = {heads}, which share it"
        )
    if rotary and size % 2:
        raise ConfigError(
            f"d_model / heads = {size} must be even: rotary positions turn pairs"
        )


def check_text(
    corpus: Corpus,
    data: Data,
    wanted: int,
    setting: str,
    parts: Sequence[str] = ("validation",),
) -> None:
    """Refuse to take more tokens from the text than there are, before any training.

    Args:
        corpus: the text.
        data: how it is split, cut into tokens, and into windows.
        wanted: how many tokens are to be predicted.
        setting: the setting that says so, and its value.
        parts: of the split, from each of which they are taken.

    Raises:
        ConfigError: a part is too short.
    """
    split = split_of(corpus, data)
    for part in parts:
        tokens = getattr(split, part).tokens
        sizes = dict(tokens_wanted=wanted, batch=data.batch, context=data.context)
        try:
            evaluation_batches(tokens, **sizes)
        except ConfigError:
            raise ConfigError(
                f"{setting} needs more text than the {len(tokens)} tokens of the "
                f"{part} split; lower it or use a longer text"
            ) from None


def check_ascending(name: str, values: Sequence[int]) -> None:
    """Refuse a list in which nothing grows, or not always.

    Raises:
        ConfigError: it has less than two numbers, or one is not above the one before.
    """
    if len(values) < 2 or list(values) != sorted(set(values)):
        raise ConfigError(
            f"{name} = {list(values)} must be two or more numbers that ascend"
        )
