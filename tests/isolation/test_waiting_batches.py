"""Batches above the rate wait in memory: that of their account, within that of the worker, and at nobody else's cost."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from proxy.core.access import Limits
from tests.rpc_harness import rpc_harness
from tests.service import until
from tests.web.worker import NO_CACHE, on_uvloop

FREE, GROWTH = Limits(10, 200, 0), Limits(100, 2_000, 0)
ROOM = 24 << 20


def reads(count: int) -> list[tuple[str, list[Any]]]:
    return [("eth_call", [{"data": hex(n)}, "latest"]) for n in range(count)]


@pytest.mark.parametrize("accounts", [12, 40])
@on_uvloop
async def test_batches_of_many_accounts_cost_no_item_of_another(accounts: int) -> None:
    server = {"max_held_bytes": ROOM}
    async with rpc_harness(1, server=server, rpc={"batch_wait_s": 4.0}, **NO_CACHE) as harness:
        for n in range(accounts):
            harness.worker.add_key(f"free {n}", limits=FREE)
        harness.worker.add_key("growth", limits=GROWTH)
        memory = harness.worker.app.budget.of("batches")
        async with asyncio.TaskGroup() as group:
            floods = [
                group.create_task(harness.batch(*reads(1000), key=f"free {n}"))
                for n in range(accounts)
                for _ in range(8)
            ]
            await until(lambda: memory.total > ROOM // 8, every_s=0.01)
            reply = await harness.batch(*reads(300), key="growth")
            assert memory.total <= ROOM
            assert [item["id"] for item in reply.json] == [*range(300)]
            assert [item["id"] for item in reply.json if "error" in item] == []
        assert {(await flood).status for flood in floods} <= {200, 429}
        assert harness.worker.held_bytes == 0
        assert len(harness.worker.app.rpc.waiting_batches) == 0


@on_uvloop
async def test_large_batches_of_one_account_wait_for_its_own_memory() -> None:
    async with rpc_harness(1, server={"max_held_bytes": 6 << 20}, **NO_CACHE) as harness:
        replies = await asyncio.gather(*(harness.batch(*reads(1000)) for _ in range(12)))
        assert {reply.status for reply in replies} == {200}
        assert not [item for reply in replies for item in reply.json if "error" in item]
        assert harness.worker.held_bytes == 0


@on_uvloop
async def test_client_that_leaves_gives_the_memory_of_its_batches_back() -> None:
    async with rpc_harness(1, server={"max_held_bytes": 6 << 20}, **NO_CACHE) as harness:
        harness.worker.add_key("free", limits=FREE)
        loop = asyncio.get_running_loop()
        asking = [loop.create_task(harness.batch(*reads(1000), key="free")) for _ in range(12)]
        await until(lambda: harness.worker.app.budget.of("batches").total > 0, every_s=0.01)
        for each in asking:
            each.cancel()
        await asyncio.gather(*asking, return_exceptions=True)
        await until(lambda: harness.worker.held_bytes == 0)
        assert len(harness.worker.app.rpc.waiting_batches) == 0
