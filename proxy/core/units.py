"""Amounts: raw integers, decimal text, and values in dollars. Exact at any size, without floats.

A raw amount has up to 78 digits, and a token up to 255 decimals. The decimal context holds the product of any amount
and any price, and rounding happens in one place only: in the text of a dollar value.
"""

from __future__ import annotations

from decimal import ROUND_HALF_EVEN, Context, Decimal

# More than enough digits for 256-bit amounts (78) times prices (_DIGITS).
EXACT = Context(prec=400, rounding=ROUND_HALF_EVEN)
MOST_DECIMALS = 255
# A price outside of these bounds is a mistake, or an attempt to exhaust memory by multiplication.
_LEAST, _MOST, _DIGITS = Decimal("1e-40"), Decimal("1e20"), 60
# The last place of a value in dollars.
FINEST = Decimal("0.00000001")


def formatted(raw: int, decimals: int) -> str:
    """The raw amount with its decimals applied: exact, without an exponent, without zeros at the end."""
    if decimals == 0:
        return str(raw)
    digits = str(raw).rjust(decimals + 1, "0")
    whole, part = digits[:-decimals], digits[-decimals:].rstrip("0")
    return f"{whole}.{part}" if part else whole


def worth(raw: int, decimals: int, price: Decimal) -> Decimal:
    """The exact value of an amount at a price for one whole token."""
    return EXACT.scaleb(EXACT.multiply(Decimal(raw), price), -decimals)


def is_price(value: Decimal) -> bool:
    """Whether a reported number is a plausible price."""
    return value.is_finite() and _LEAST <= value <= _MOST and len(value.as_tuple().digits) <= _DIGITS


def dollars(value: Decimal) -> str:
    """A value in dollars as text: rounded to eight places, shown with at least two."""
    return plain(value.quantize(FINEST, context=EXACT))


def plain(value: Decimal) -> str:
    """A decimal as text, all its digits, with at least two behind the point."""
    text = format(value, "f")
    whole, _, part = text.partition(".")
    return f"{whole}.{part.rstrip('0').ljust(2, '0')}"
