"""Workers of several hosts that share a database, and use up the budget of their upstreams."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from tests.database import Server
from tests.http_client import rpc
from tests.metering_upstream import MeteringUpstream, billing_by
from tests.rpc_upstreams import Chain, scripted
from tests.web.worker import LIVE, Worker, running_worker

ADDRESS = "0x" + "22" * 20


@asynccontextmanager
async def hosts(
    server: Server, count: int, given: list[dict[str, Any]], *, name: str = ""
) -> AsyncIterator[list[Worker]]:
    """Workers of several hosts, with one database (`name`, or a new one) and the same upstreams."""
    name = name or await server.create("migrated")
    async with AsyncExitStack() as stack:
        found = []
        for _ in range(count):
            worker = await stack.enter_async_context(
                running_worker(
                    {LIVE: given},
                    database={"url": server.url(name)},
                    cache={"enabled": False},
                    usage={"flush_s": 0.2},
                )
            )
            await worker.app.pool.open()
            await worker.app.budgets.start()
            worker.app.tasks.start("budgets", worker.app.budgets.run)
            await worker.app.plane.trackers[LIVE].look()
            found.append(worker)
        yield found
    await server.drop(name)


async def use_up(worker: Worker) -> None:
    """Call until the budget is used up."""
    (meter,) = worker.app.networks.meters()
    number = 0
    while meter.budget is None or not meter.budget.is_over or meter.affords("eth_call"):
        number += 1
        reply = await worker.send(rpc("eth_call", [{"to": ADDRESS, "data": hex(number)}, "latest"]))
        assert reply.status in (200, 503), reply


async def billed_of_budget(server: Server, limit: int) -> int:
    """Let three hosts use up a hard budget. Returns what the provider bills."""
    async with scripted(1, Chain(), billing_by("alchemy")) as (stub,):
        assert isinstance(stub, MeteringUpstream)
        given = [{"url": stub.url, "cost": "alchemy", "budget": {"credits": limit}}]
        async with hosts(server, 3, given) as workers:
            await asyncio.gather(*[use_up(worker) for worker in workers])
            return stub.billed
