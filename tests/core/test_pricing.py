"""Prices, as the shipped table has them."""

from __future__ import annotations

import pytest

from proxy import settings
from proxy.core.pricing import UnitPrices

PRICES: UnitPrices = settings.load_tables().prices


@pytest.mark.parametrize(
    ("method", "units"),
    [
        ("eth_chainId", 0),
        ("eth_blockNumber", 1),
        ("eth_getBalance", 2),
        ("eth_call", 3),
        ("eth_sendRawTransaction", 5),
        ("eth_getLogs", 8),
        ("trace_block", 20),
        ("debug_traceTransaction", 40),
        ("trace_replayTransaction", 50),
    ],
)
def test_evm_methods_cost_what_is_published(method: str, units: int) -> None:
    assert PRICES.of_family("evm")[method] == units


@pytest.mark.parametrize(("method", "units"), [("getSlot", 2), ("getBlock", 4), ("getProgramAccounts", 20)])
def test_svm_methods_cost_what_is_published(method: str, units: int) -> None:
    assert PRICES.of_family("svm")[method] == units


def test_archive_read_costs_at_least_twenty() -> None:
    assert PRICES.archive_minimum == 20


def test_no_price_is_more_than_the_smallest_plan_holds() -> None:
    smallest = min(plan.units_per_second for plan in settings.load_tables().plans.values())
    methods = [units for prices in PRICES.families.values() for units in prices.values()]
    every = [*methods, *PRICES.rest.values(), *PRICES.bundler.values()]
    assert min(every) >= 0
    assert max(every) <= smallest


def test_unknown_family_has_no_prices() -> None:
    with pytest.raises(KeyError):
        PRICES.of_family("move")
