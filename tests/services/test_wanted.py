"""Work that is done while somebody wants it: who comes while it is ended is served by the next run, and not by a dead one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from proxy.services.feed.demand import Demand
from tests.service import until
from tests.web.worker import on_uvloop


class Work:
    """It is ready while it runs, and takes its time to end."""

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
async def running(wanted: Demand, work: Work) -> AsyncIterator[None]:
    async with asyncio.TaskGroup() as group:
        task = group.create_task(wanted.run(work.run, work.stopped))
        try:
            yield
        finally:
            work.end.set()
            task.cancel()


@on_uvloop
async def test_who_comes_while_the_work_ends_waits_for_the_next_run() -> None:
    work = Work()
    wanted = Demand(lambda: work.listeners > 0, linger_s=0.0)
    async with running(wanted, work):
        work.listeners = 1
        wanted.changed()
        await until(lambda: work.is_ready)
        work.listeners = 0
        wanted.changed()
        await until(lambda: work.is_ending)
        assert not work.is_ready
        work.listeners = 1
        wanted.changed()
        work.end.set()
        await until(lambda: work.is_ready)
        assert work.runs == 2


@on_uvloop
async def test_what_the_work_leaves_behind_while_it_ends_is_forgotten() -> None:
    work = Work()
    wanted = Demand(lambda: work.listeners > 0, linger_s=0.0)
    async with running(wanted, work):
        work.listeners = 1
        wanted.changed()
        await until(lambda: work.is_ready)
        work.listeners = 0
        wanted.changed()
        await until(lambda: work.is_ending)
        work.is_ready = True
        work.end.set()
        await until(lambda: not work.is_ready)


@on_uvloop
async def test_who_comes_in_the_very_turn_in_which_the_time_is_up_keeps_the_work() -> None:
    work = Work()
    asked = 0

    def is_wanted() -> bool:
        """Wanted; left; nobody is there when the waiting begins; and somebody when it is over."""
        nonlocal asked
        asked += 1
        return asked not in (2, 3)

    async with running(Demand(is_wanted, linger_s=0.0), work):
        await until(lambda: asked == 5)
        assert (work.runs, work.stops) == (1, 0)
