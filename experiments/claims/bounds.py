"""Bounds in words, rounded to the side on which they remain true."""

from decimal import ROUND_CEILING, ROUND_FLOOR, Context


def rounded_up(value: float) -> str:
    """The least number of two digits that is not below, as in "3.5e-06"."""
    return _rounded(value, ROUND_CEILING)


def rounded_down(value: float) -> str:
    """The largest number of two digits that is not above, as in "4.6"."""
    return _rounded(value, ROUND_FLOOR)


def _rounded(value: float, rounding: str) -> str:
    number = Context(prec=2, rounding=rounding).create_decimal_from_float(value)
    return f"{float(number):.2g}"
