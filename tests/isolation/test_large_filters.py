"""One account subscribes with the largest filters that there are: the worker's memory is bounded, and others do not notice."""

from __future__ import annotations

import asyncio
import tracemalloc
from contextlib import AsyncExitStack
from typing import Any

from proxy.core.access import Limits
from tests.feed_upstreams import CONTRACTS, FeedHarness, feed_harness
from tests.service import until
from tests.sockets import SocketClient, connected
from tests.web.worker import on_uvloop

DEV = "dev/mainnet"
MB = 1 << 20
PER_SOCKET = 20


def largest(serial: int) -> dict[str, Any]:
    """A filter of 1,000 addresses and 4 x 1,000 topics."""
    first = serial * 1_000
    return {
        "address": [f"0x{number:040x}" for number in range(first, first + 1000)],
        "topics": [[f"0x{index}{number:063x}" for number in range(first, first + 1000)] for index in range(4)],
    }


async def subscribe(harness: FeedHarness, stack: AsyncExitStack, count: int) -> list[dict[str, Any]]:
    """The errors of so many subscriptions with large filters."""
    errors = []
    client: SocketClient | None = None
    for serial in range(count):
        if serial % PER_SOCKET == 0:
            client = await stack.enter_async_context(connected(harness.worker, key="free", network=DEV))
        assert client is not None
        reply = await client.call("eth_subscribe", "logs", largest(serial))
        if "error" in reply:
            errors.append(reply["error"])
    return errors


@on_uvloop
async def test_memory_of_large_filters_is_bounded_and_returned() -> None:
    """With a quarter of the memory and of the subscriptions, for speed."""
    async with (
        feed_harness(["ws"], network=DEV, server={"max_held_bytes": 32 * MB}) as harness,
        connected(harness.worker, network=DEV) as good,
    ):
        harness.worker.add_key("free", limits=Limits(1000, 100_000, 0))
        await good.result("eth_subscribe", "newHeads")
        tracemalloc.start()
        try:
            before = tracemalloc.get_traced_memory()[0]
            async with AsyncExitStack() as stack:
                errors = await subscribe(harness, stack, 50)
                assert tracemalloc.get_traced_memory()[0] - before < 16 * MB
                assert errors
                assert {error["code"] for error in errors} == {-32005}
                assert "unsubscribe from some" in errors[0]["message"]
                # Others can subscribe with a large filter, and receive their logs.
                wanted = largest(10_000)
                wanted["address"][0] = CONTRACTS[0]
                wanted["topics"] = []
                mine = await good.result("eth_subscribe", "logs", wanted)
                await harness.chain.mine(4)
                async with asyncio.timeout(45):
                    while (event := await good.event())["subscription"] != mine:
                        pass
                assert event["result"]["address"] == CONTRACTS[0]
                await good.result("eth_unsubscribe", mine)
            await until(lambda: tracemalloc.get_traced_memory()[0] - before < 4 * MB)
        finally:
            tracemalloc.stop()
        assert harness.worker.held_bytes == 0
        await until(lambda: not harness.evm.logs._index)


@on_uvloop
async def test_equal_filters_of_an_account_are_counted_once() -> None:
    async with feed_harness(["ws"], network=DEV) as harness, connected(harness.worker, network=DEV) as client:
        ids = [await client.result("eth_subscribe", "logs", largest(1)) for _ in range(50)]
        size = harness.worker.held_bytes
        assert 0 < size < MB
        for id_ in ids[1:]:
            await client.result("eth_unsubscribe", id_)
        assert harness.worker.held_bytes == size
        await client.result("eth_unsubscribe", ids[0])
        assert harness.worker.held_bytes == 0


@on_uvloop
async def test_filters_that_were_used_before_are_not_kept() -> None:
    """A socket remembers how often it subscribed to a topic, but not the topic."""
    async with feed_harness(["ws"], network=DEV) as harness, connected(harness.worker, network=DEV) as client:
        await client.result("eth_subscribe", "newHeads")
        tracemalloc.start()
        try:
            before = tracemalloc.get_traced_memory()[0]
            for serial in range(15):
                id_ = await client.result("eth_subscribe", "logs", largest(serial))
                await client.result("eth_unsubscribe", id_)
            await until(lambda: tracemalloc.get_traced_memory()[0] - before < 2 * MB)
        finally:
            tracemalloc.stop()
