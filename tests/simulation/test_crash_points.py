"""A process that is killed at any of its writes leaves a state from which the next one reaches the right end."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

import pytest

from tests.database import MIGRATED, Server, connected
from tests.simulation.crash_cases import CASES, Case, Explored
from tests.simulation.crash_points import spread, writes_of

# The suite tries some of the points. `CRASH_POINTS=1000` tries all of them.
POINTS = int(os.environ.get("CRASH_POINTS", "6"))


async def explore(server: Server, case: Case, die_before: int) -> int:
    """Run the case with a crash before this write, and a restart. Returns the number of writes of the last process."""
    name = await server.create(MIGRATED)
    try:
        async with case(server.url(name)) as explored:
            if die_before:
                await writes_of(explored.work, die_before=die_before)
            count = await writes_of(explored.work)
            await explored.check()
    finally:
        await server.drop(name)
    assert count is not None
    return count


@pytest.mark.parametrize("name", CASES)
async def test_restart_after_a_crash_at_any_write_reaches_the_same_end(server: Server, name: str) -> None:
    count = await explore(server, CASES[name], 0)
    assert count >= 5
    for die_before in spread(count, POINTS):
        await explore(server, CASES[name], die_before)


async def insert(url: str) -> None:
    """Work that must not be done twice, and is."""
    async with connected(url) as connection:
        await connection.execute("insert into once values (1)")
        await connection.execute("select 1")


@asynccontextmanager
async def repeated(url: str) -> AsyncIterator[Explored]:
    async with connected(url) as connection:
        await connection.execute("create table once (n int)")

        async def check() -> None:
            assert await connection.fetchval("select count(*) from once") == 1

        yield Explored(partial(insert, url), check)


async def test_work_that_is_done_twice_is_found(server: Server) -> None:
    count = await explore(server, repeated, 0)
    failed = 0
    for die_before in range(1, count + 1):
        try:
            await explore(server, repeated, die_before)
        except AssertionError:
            failed += 1
    # The process has inserted the row before its last two writes: the statement after that, and the end of the connection.
    assert failed == 2


def test_points_are_spread_evenly() -> None:
    assert [*spread(3, 6)] == [1, 2, 3]
    assert [*spread(10, 5)] == [1, 3, 5, 7, 9]
