"""Amounts and values are exact, whatever their size."""

from __future__ import annotations

from decimal import Decimal
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.core import units

AMOUNTS = st.integers(0, 2**256 - 1)
DECIMALS = st.integers(0, 255)
PRICES = st.decimals("0.000000000000000001", 10**9, allow_nan=False, places=18)


@pytest.mark.parametrize(
    ("raw", "decimals", "text"),
    [
        (1500250000, 6, "1500.25"),
        (10**18, 18, "1"),
        (1, 18, "0.000000000000000001"),
        (0, 18, "0"),
        (0, 0, "0"),
        (7, 0, "7"),
        (10**77, 0, "1" + "0" * 77),
        (10**77, 77, "1"),
        (5, 255, "0." + "0" * 254 + "5"),
    ],
)
def test_amount_is_written_in_full_without_zeros_at_its_end(raw: int, decimals: int, text: str) -> None:
    assert units.formatted(raw, decimals) == text


@given(AMOUNTS, DECIMALS)
def test_text_of_an_amount_means_the_amount(raw: int, decimals: int) -> None:
    text = units.formatted(raw, decimals)
    assert Fraction(text) == Fraction(raw, 10**decimals)
    assert "e" not in text.lower()
    assert len(text) <= 400


@given(AMOUNTS, DECIMALS, PRICES)
def test_worth_is_the_product_with_nothing_lost(raw: int, decimals: int, price: Decimal) -> None:
    assert Fraction(units.worth(raw, decimals, price)) == Fraction(raw, 10**decimals) * Fraction(price)


@given(AMOUNTS, DECIMALS, PRICES)
def test_dollars_are_within_half_of_the_last_place(raw: int, decimals: int, price: Decimal) -> None:
    exact = units.worth(raw, decimals, price)
    text = units.dollars(exact)
    assert abs(Fraction(text) - Fraction(exact)) <= Fraction(1, 2 * 10**8)
    assert 2 <= len(text.partition(".")[2]) <= 8


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("1", "1.00"),
        ("1.5", "1.50"),
        ("1.234567891", "1.23456789"),
        ("0.000000001", "0.00"),
        ("1E+3", "1000.00"),
        ("0", "0.00"),
    ],
)
def test_dollars_have_cents_and_at_most_eight_places(value: str, text: str) -> None:
    assert units.dollars(Decimal(value)) == text


def test_price_is_written_with_all_its_digits() -> None:
    assert units.plain(Decimal("0.000000000012")) == "0.000000000012"
    assert units.plain(Decimal("1E-20")) == "0." + "0" * 19 + "1"
    assert units.plain(Decimal("3000")) == "3000.00"
