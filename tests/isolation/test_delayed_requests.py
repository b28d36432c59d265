"""Requests that a fault plan delays: they are held in memory, so one account may have a limited number of them."""

from __future__ import annotations

from contextlib import AsyncExitStack

import pytest

from proxy.core.fault_plans import FaultPlan
from proxy.web import fault_injection
from tests.http_client import HttpClient, rpc
from tests.rpc_harness import RpcHarness, rpc_harness
from tests.service import until
from tests.sockets import HEADS, bare, head, replace_feed
from tests.web.worker import TEST, on_uvloop

MOST = 3


async def sent(harness: RpcHarness, stack: AsyncExitStack, plan: str, body: bytes, key: str) -> HttpClient:
    client = await stack.enter_async_context(await harness.worker.connect())
    await client.write(harness.worker.post(body, key=key, network=TEST, X_Fault=plan))
    return client


@pytest.mark.parametrize("plan", ["latency=30s", "slow-body=16B/s"])
@on_uvloop
async def test_account_has_few_delayed_requests_at_a_time(plan: str) -> None:
    body = rpc("eth_chainId") + b" " * 100_000
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fault_injection, "MOST_OF_ACCOUNT", MOST)
        async with rpc_harness(1, network=TEST) as harness, AsyncExitStack() as stack:
            for name in ("attacker", "good"):
                harness.worker.add_key(name, live=False)
            faults, held = harness.worker.app.api.faults, AsyncExitStack()
            for count in range(1, MOST + 1):
                await sent(harness, held, plan, body, "attacker")
                await until(lambda count=count: repr(faults).startswith(f"<FaultInjection {count} delayed"))
            size = MOST * len(body) if plan.startswith("latency") else 0
            assert repr(faults) == f"<FaultInjection {MOST} delayed requests>"
            assert harness.worker.held_bytes == size
            reply = await (await sent(harness, stack, plan, body, "attacker")).reply()
            assert "X-Fault delays too many requests" in reply.fault(429)["message"]
            # Another account has its own places.
            await sent(harness, held, plan, body, "good")
            await until(lambda: repr(faults).startswith(f"<FaultInjection {MOST + 1} delayed"))
            await held.aclose()
            await until(lambda: repr(faults) == "<FaultInjection 0 delayed requests>")


@on_uvloop
async def test_bodies_of_delayed_requests_are_bounded() -> None:
    body = rpc("eth_chainId") + b" " * 100_000
    # An account may hold two of them.
    server = {"max_held_bytes": 8 * len(body)}
    async with rpc_harness(1, network=TEST, server=server) as harness, AsyncExitStack() as stack:
        harness.worker.add_key("attacker", live=False)
        faults = harness.worker.app.api.faults
        for count in (1, 2):
            await sent(harness, stack, "latency=30s", body, "attacker")
            await until(lambda count=count: repr(faults).startswith(f"<FaultInjection {count} delayed"))
        assert (await (await sent(harness, stack, "latency=30s", body, "attacker")).reply()).status == 429
        await stack.aclose()
        await until(lambda: not harness.worker.held_bytes)


@on_uvloop
async def test_delayed_messages_are_bounded_for_all_sockets_of_an_account() -> None:
    message = rpc("eth_chainId") + b" " * 100_000
    server = {"max_held_bytes": 8 * len(message)}
    async with rpc_harness(1, network=TEST, server=server) as harness, AsyncExitStack() as stack:
        worker = harness.worker
        worker.add_key("attacker", live=False)
        for _ in range(2):
            socket = await stack.enter_async_context(bare(worker, key="attacker", network=TEST, X_Fault="latency=30s"))
            socket.write(message)
        await until(lambda: worker.app.budget.of("bodies").total == 2 * len(message))
        socket = await stack.enter_async_context(bare(worker, key="attacker", network=TEST, X_Fault="latency=30s"))
        socket.write(message)
        assert (await socket.json())["error"]["code"] == -32005
        await stack.aclose()
        await until(lambda: not worker.held_bytes)


@on_uvloop
async def test_delayed_events_count_as_memory_of_the_account() -> None:
    server = {"max_held_bytes": 1 << 20}
    async with rpc_harness(1, network=TEST, server=server) as harness:
        harness.worker.add_key("attacker", live=False, fault=FaultPlan(delay_ms=30_000))
        feed = replace_feed(harness.worker, TEST)
        async with bare(harness.worker, key="attacker", network=TEST) as socket:
            socket.write(rpc("eth_subscribe", ["newHeads"]))
            assert "result" in await socket.json()
            feed.emit(HEADS, head(1, size=100_000))
            assert 100_000 < harness.worker.held_bytes < 110_000
            for number in range(2, 20):
                feed.emit(HEADS, head(number, size=100_000))
            assert await socket.close_code() == 1013
            assert harness.worker.held_bytes < 600_000
