"""Prices, as the shipped table has them."""

from __future__ import annotations

import pytest

from proxy.core.pricing import MOST_SIZE_UNITS, size_units
from tests.shipped_tables import TABLES

PRICES, METHODS = TABLES.prices, TABLES.methods


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
    assert METHODS["evm"][method].price == units


@pytest.mark.parametrize(("method", "units"), [("getSlot", 2), ("getBlock", 4), ("getProgramAccounts", 20)])
def test_svm_methods_cost_what_is_published(method: str, units: int) -> None:
    assert METHODS["svm"][method].price == units


def test_archive_read_costs_at_least_twenty() -> None:
    assert PRICES.archive_minimum == 20


def test_no_price_is_more_than_the_smallest_plan_holds() -> None:
    smallest = min(plan.units_per_second for plan in TABLES.plans.values())
    methods = [method.price for table in METHODS.values() for method in table.values()]
    every = [*methods, *PRICES.rest.values(), *PRICES.paymaster.values()]
    assert min(every) >= 0
    assert max(every) <= smallest
    assert max(methods) + MOST_SIZE_UNITS <= smallest


@pytest.mark.parametrize(
    ("size", "units"), [(0, 0), (16_384, 0), (16_385, 1), (24_576, 1), (24_577, 2), (1 << 20, 126), (1 << 30, 128)]
)
def test_calls_above_16_kib_cost_a_unit_for_each_8_kib(size: int, units: int) -> None:
    assert size_units(size) == units
