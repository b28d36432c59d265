"""Strangers' text: nothing in it that cannot be seen."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.core.display_text import cleaned


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("USD Coin", "USD Coin"),
        ("  USD\t\n Coin ", "USD Coin"),
        ("Odd\0\a\x1b[31m Coin\u202e\n", "Odd[31m Coin"),
        ("O\0DD\u200b", "ODD"),
        ("Ünïcödé ✓ 硬币", "Ünïcödé ✓ 硬币"),
        ("", None),
        ("\0\x01", None),
        (" \u2028 ", None),
        (None, None),
    ],
)
def test_text_is_cleaned(text: str | None, shown: str | None) -> None:
    assert cleaned(text, 64) == shown


def test_long_text_is_cut() -> None:
    assert cleaned("x" * 10**6, 64) == "x" * 64
    assert cleaned("ab cd", 3) == "ab"


@given(st.text(), st.integers(1, 50))
def test_cleaned_text_is_printable_short_and_stable(text: str, limit: int) -> None:
    shown = cleaned(text, limit)
    assert shown is None or (shown.isprintable() and 0 < len(shown) <= limit and cleaned(shown, limit) == shown)
