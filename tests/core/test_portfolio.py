"""The balance list's order and values, against plain arithmetic."""

from __future__ import annotations

from collections.abc import Iterable
from decimal import Decimal
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from proxy.core.portfolio import Holding, TokenInfo, TokenList, described

TEXTS = st.one_of(st.none(), st.text(max_size=3))
HOLDINGS = st.builds(
    Holding,
    st.builds(TokenInfo, st.text(max_size=4), TEXTS, TEXTS, st.one_of(st.none(), st.integers(0, 255))),
    st.integers(0, 2**256 - 1),
    st.one_of(st.none(), st.decimals("0.00000001", 10**6, allow_nan=False, places=8)),
)


def held(symbol: str | None, raw: int, price: str | None = None, decimals: int | None = 0) -> Holding:
    return Holding(TokenInfo(f"0x{symbol}", "", symbol, decimals), raw, None if price is None else Decimal(price))


def listed(holdings: Iterable[Holding]) -> list[dict[str, Any]]:
    """Added one by one and all together."""
    found, parts = TokenList(), TokenList()
    given = [*holdings]
    found.add(given)
    for each in given:
        parts.add([each])
    items = [*found.items()]
    assert sorted(map(str, parts.items())) == sorted(map(str, items))
    return items


def symbols(*holdings: Holding) -> list[str | None]:
    return [item["symbol"] for item in listed(holdings)]


def test_most_valuable_is_first_and_what_has_no_price_last() -> None:
    found = symbols(held("A", 9), held("B", 1, "2"), held("C", 10, "1"), held("D", 1, "0.5"), held(None, 5))
    assert found == ["C", "B", "D", "A", None]


def test_price_without_decimals_is_no_value() -> None:
    assert listed([held("A", 9, "1", decimals=None)])[0]["usd_value"] is None


def test_equal_values_are_ordered_by_symbol_then_contract() -> None:
    twins = [Holding(TokenInfo(contract, None, "T", 0), 1, Decimal(1)) for contract in ("0xb", "0xa")]
    found = listed([*twins, held("S", 1, "1")])
    assert [(item["symbol"], item["contract"]) for item in found] == [("S", "0xS"), ("T", "0xa"), ("T", "0xb")]


def test_enormous_values_that_differ_in_the_last_digit_are_in_order() -> None:
    """A float, or a decimal of 28 digits, would call these equal and order them by symbol."""
    assert symbols(held("A", 2**256 - 2, "1"), held("B", 2**256 - 1, "1")) == ["B", "A"]


def test_zero_is_left_out() -> None:
    assert symbols(held("A", 0, "1"), held("B", 1)) == ["B"]


@given(st.lists(HOLDINGS, max_size=12))
def test_order_does_not_depend_on_the_order_of_asking(holdings: list[Holding]) -> None:
    """As far as two differ at all in what they are ordered by."""
    unique = {(each.token.symbol, each.token.contract): each for each in holdings}.values()
    assert listed(unique) == listed(reversed([*unique]))
    assert len(listed(unique)) == sum(each.raw > 0 for each in unique)


def test_token_is_described_with_its_market_value() -> None:
    found = described(TokenInfo("0xA", "Coin", "C", 6), 25 * 10**15, Decimal("1.0001"), None)
    assert (found["formatted_total_supply"], found["price_usd"], found["market_cap_usd"]) == (
        "25000000000", "1.0001", "25002500000.00",
    )  # fmt: skip


def test_nothing_is_made_up_for_what_a_token_does_not_say() -> None:
    found = described(TokenInfo("0xA"), None, Decimal(1), None)
    empty = {"name", "symbol", "decimals", "total_supply", "formatted_total_supply", "market_cap_usd", "logo_url"}
    assert {name for name, value in found.items() if value is None} == empty
