"""The cost matrix, in its short form: no input of one customer costs more than it pays for, or takes anything from others.

`make bench ARGS=costs` sends all cells. The bounds are those of `tests/costs/driver.py`, and SECURITY.md states them.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable

import pytest

from tests.costs import cells
from tests.costs.cells import Row
from tests.costs.driver import Cost, Driver
from tests.costs.service import running_service
from tests.database import MIGRATED, Server

HELD_S = 1.5


@pytest.fixture(scope="module")
async def driver(server: Server, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Driver]:
    name = await server.create(MIGRATED)
    async with running_service(server.url(name), tmp_path_factory.mktemp("costs")) as service:
        found = Driver(service)
        await found.prepare()
        yield found
    await server.drop(name)


ROWS: dict[str, Callable[[Row], bool]] = {
    "keys": lambda row: row.caller == "key" and " " not in row.name,
    "people": lambda row: row.caller in ("account", "none"),
    "operators": lambda row: row.caller == "admin",
    "calls": lambda row: not row.is_brief and " " in row.name and not row.name.startswith("rest "),
    "families": lambda row: row.is_brief,
    "routes": lambda row: row.name.startswith("rest "),
}


def check(costs: list[Cost]) -> None:
    """Fail on every cell above one of its bounds."""
    above = [f"{', '.join(faults)}: {cost}" for cost in costs if (faults := [*cost.faults()])]
    assert not above, "\n".join(above)


@pytest.mark.parametrize("part", ROWS)
async def test_every_input_is_within_its_bounds(driver: Driver, part: str) -> None:
    costs = []
    for row in cells.rows():
        if ROWS[part](row):
            costs += [cost async for cost in driver.measure(row, short=True)]
    check(costs)


async def test_every_subscription_is_within_its_bounds(driver: Driver) -> None:
    check([await driver.measure_subscriptions(row, seconds=HELD_S) for row in cells.subscriptions() if not row.is_long])


async def test_records_usage_and_deliveries_of_others_are_still_written(driver: Driver) -> None:
    assert await driver.unrecorded() == []
    assert await driver.is_usage_written()
    assert await driver.is_delivered()


def test_every_operation_and_every_kind_of_subscription_has_a_row() -> None:
    names = {row.name for row in cells.rows()}
    assert set(cells.SPEC.operations) - cells.BY_METHOD <= names
    methods = {row.method for row in cells.subscriptions()} | {name.removeprefix("rest ") for name in names}
    of_families = [method for family in cells.TABLES.methods.values() for method in family.values()]
    assert {each.name for each in of_families if each.kind == "subscription" and not _ends(each.name)} <= methods


def _ends(method: str) -> bool:
    return "nsubscribe" in method
