"""Work runs while there is demand. A listener that arrives while a run ends is served by the next run."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from proxy.services.feed.demand import Demand
from tests.service import until
from tests.web.worker import on_uvloop


class Work:
    """Work that is ready while it runs and ends only when the test lets it."""

    def __init__(self) -> None:
        self.listeners = 0
        self.runs = 0
        self.is_ready = False
        self.is_ending = False
        self.stops = 0
        self.end = asyncio.Event()

    async def run(self) -> None:
        self.runs += 1
        self.is_ready = True
        try:
            await asyncio.Event().wait()
        finally:
            self.is_ending = True
            await self.end.wait()

    def stopped(self) -> None:
        self.is_ready = False
        self.stops += 1


@asynccontextmanager
async def running(demand: Demand, work: Work) -> AsyncIterator[None]:
    async with asyncio.TaskGroup() as group:
        task = group.create_task(demand.run(work.run, work.stopped))
        try:
            yield
        finally:
            work.end.set()
            task.cancel()


@asynccontextmanager
async def ending_work() -> AsyncIterator[tuple[Demand, Work]]:
    """Work that has lost its last listener and has not ended yet."""
    work = Work()
    demand = Demand(lambda: work.listeners > 0, linger_s=0.0)
    async with running(demand, work):
        work.listeners = 1
        demand.changed()
        await until(lambda: work.is_ready)
        work.listeners = 0
        demand.changed()
        await until(lambda: work.is_ending)
        yield demand, work


@on_uvloop
async def test_listener_that_arrives_while_the_work_ends_waits_for_the_next_run() -> None:
    async with ending_work() as (demand, work):
        assert not work.is_ready
        work.listeners = 1
        demand.changed()
        work.end.set()
        await until(lambda: work.is_ready)
        assert work.runs == 2


@on_uvloop
async def test_state_left_by_the_ending_work_is_reset() -> None:
    async with ending_work() as (_, work):
        work.is_ready = True
        work.end.set()
        await until(lambda: not work.is_ready)


@on_uvloop
async def test_demand_that_returns_in_the_turn_of_the_timeout_keeps_the_work_running() -> None:
    work = Work()
    checks = 0

    def exists() -> bool:
        """Demand at first, none while the linger time starts and runs, and demand again when it is over."""
        nonlocal checks
        checks += 1
        return checks not in (2, 3)

    async with running(Demand(exists, linger_s=0.0), work):
        await until(lambda: checks == 5)
        assert (work.runs, work.stops) == (1, 0)
