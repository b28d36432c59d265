"""Prices of providers, and the meter that counts them."""

from __future__ import annotations

from decimal import Decimal

import pytest

from proxy.core.budgets import CreditBudget
from proxy.core.credits import EVENT, CallPrices, CreditMeter, CreditTable, in_usd
from tests.shipped_tables import TABLES

TABLE = CreditTable(
    default=20,
    methods={"eth_call": 26, "debug_*": 40, "debug_trace*": 60, "eth_chainId": 0},
    chains={"dear": 50},
    archive_factor=2,
    errors={"429": 0, "4xx": 5, "unknown_method": 0},
    event=3,
)


@pytest.mark.parametrize(
    ("method", "credits_"),
    [
        ("eth_call", 26),
        ("eth_getBalance", 20),
        ("debug_memStats", 40),
        ("debug_traceCall", 60),
        ("eth_chainId", 0),
        (EVENT, 3),
    ],
)
def test_longest_name_that_fits_decides(method: str, credits_: int) -> None:
    assert CallPrices(TABLE, "any").credits(method) == credits_


def test_prices_of_a_chain_change_by_its_base() -> None:
    prices = CallPrices(TABLE, "dear")
    assert (prices.credits("eth_getBalance"), prices.credits("eth_call"), prices.credits("eth_chainId")) == (50, 65, 0)


@pytest.mark.parametrize(("method", "credits_"), [("eth_getBalance", 40), ("debug_traceCall", 60)])
def test_old_blocks_cost_more_unless_the_method_has_a_price(method: str, credits_: int) -> None:
    assert CallPrices(TABLE, "any").credits(method, archive=True) == credits_


def test_prices_in_the_settings_replace_those_of_the_list() -> None:
    prices = CallPrices(TABLE, "dear", {"eth_call": 1, "*": 2})
    assert (prices.credits("eth_call"), prices.credits("eth_getLogs")) == (1, 2)


@pytest.mark.parametrize(
    ("outcome", "credits_"),
    [("429", 0), ("403", 5), ("503", 26), ("unknown_method", 0), ("error", 26), ("", 26)],
)
def test_failed_calls_cost_what_the_list_says(outcome: str, credits_: int) -> None:
    assert CallPrices(TABLE, "any").failed(26, outcome) == credits_


def test_failed_call_never_costs_more_than_a_good_one() -> None:
    assert CallPrices(TABLE, "any").failed(0, "403") == 0


def test_meter_counts_attempts_and_takes_back_what_is_not_billed() -> None:
    meter = CreditMeter("a#1", "a", CallPrices(TABLE, "any"), Decimal("0.45"))
    spender = ("eth_call", "acc", "key")
    costs = [meter.began(spender), meter.began(spender), meter.began(spender)]
    assert costs == [11_700] * 3
    assert meter.not_sent(spender) == -11_700
    assert meter.failed(spender, "429") == -11_700
    assert (meter.total.calls, meter.total.credits, meter.total.nanos) == (2, 26, 11_700)
    assert [*meter.take()] == [spender]
    assert not meter.take()
    assert meter.total.credits == 26


def test_amounts_are_exact() -> None:
    assert in_usd(11_700) == "0.000011700"


@pytest.mark.parametrize("name", ["alchemy", "ankr", "chainstack", "drpc", "infura", "quicknode"])
def test_every_shipped_list_has_its_day_and_source(name: str) -> None:
    table = TABLES.providers[name].credits
    assert table is not None
    assert table.date > "2026"
    assert table.source.startswith("https://")


@pytest.mark.parametrize(
    ("name", "chain", "prices"),
    [
        (
            "alchemy",
            "ethereum",
            {"eth_blockNumber": 10, "eth_call": 26, "eth_getLogs": 60, "trace_replayTransaction": 80},
        ),
        ("quicknode", "ethereum", {"eth_call": 20, "debug_traceCall": 40, "trace_replayTransaction": 80}),
        ("quicknode", "solana", {"getBlock": 30}),
        ("infura", "ethereum", {"eth_call": 80, "eth_getLogs": 255, "eth_getBlockReceipts": 1000}),
        ("drpc", "ethereum", {"eth_call": 20, "eth_chainId": 0}),
        ("chainstack", "ethereum", {"eth_call": 1, "debug_traceCall": 2}),
        ("ankr", "solana", {"getBlock": 500}),
        ("ankr", "base", {"eth_call": 200}),
    ],
)
def test_published_prices(name: str, chain: str, prices: dict[str, int]) -> None:
    table = TABLES.providers[name].credits
    assert table is not None
    found = CallPrices(table, chain)
    assert {method: found.credits(method) for method in prices} == prices


@pytest.mark.parametrize(
    ("nanos", "text"), [(0, "0.000000000"), (1, "0.000000001"), (-1, "-0.000000001"), (12_345_678_901, "12.345678901")]
)
def test_amounts_are_plain_numbers(nanos: int, text: str) -> None:
    assert in_usd(nanos) == text


def test_included_credits_cost_nothing_until_they_are_used_up() -> None:
    included = CreditBudget("included a", 100, per="month", hard=False)
    found = CreditMeter("a", "b", CallPrices(TABLE, "any"), Decimal("0.40"), included=included)
    included.leased(100, 0)
    assert [found.began(("eth_call", "", "")) for _ in range(4)] == [0, 0, 0, 0]
    assert found.cost_of("eth_call") == 0
    included.leased(0, 0)
    assert included.is_over
    assert found.cost_of("eth_call") == found.began(("eth_call", "", "")) == 26 * 400
    assert (found.total.credits, found.total.nanos) == (5 * 26, 26 * 400)
