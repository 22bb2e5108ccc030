"""A list in two parts, and the two parts as a list again."""

from collections.abc import Sequence


def partition(chosen: Sequence[bool], items: Sequence) -> tuple[list, list]:
    """The items that are chosen, and the others."""
    pairs = list(zip(chosen, items, strict=True))
    return [x for yes, x in pairs if yes], [x for yes, x in pairs if not yes]


def merge(chosen: Sequence[bool], these: Sequence, others: Sequence) -> list:
    """The inverse of `partition`; what is left over at the ends is left out."""
    sources = {True: iter(these), False: iter(others)}
    return [next(sources[yes]) for yes in chosen]
