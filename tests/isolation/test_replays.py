"""One account replays as much as it may: others' replays go on, the worker's memory is bounded, and every call is paid for."""

from __future__ import annotations

import asyncio
import itertools
import time
import tracemalloc
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Any

import pytest

from proxy.core.access import Limits
from proxy.core.usage import Tally
from proxy.errors import RateLimited
from proxy.services.feed.topics import Topic
from tests.feed_upstreams import (
    CONTRACTS,
    HEADS,
    FeedHarness,
    FeedUpstream,
    RecordingListener,
    feed_harness,
    logs_topic,
)
from tests.rpc_upstreams import value_of
from tests.service import until
from tests.sockets import connected
from tests.web.worker import on_uvloop

# Blocks become final early here, so older logs are fetched in ranges.
DEV = "dev/mainnet"
MB = 1 << 20
BLOCKS = 10_000
BACK = 9_990
FREE = Limits(10, 200, 100_000)
# What an upstream charges for the calls of a replay, as config/methods lists it.
PRICES = {"eth_getLogs": 8, "eth_getBlockByNumber": 2, "eth_getBlockByHash": 2, "eth_getBlockReceipts": 5}
ARCHIVE_PRICE = 20


class DenseUpstream(FeedUpstream):
    """Every block has logs of a few hundred kilobytes for a range of 500."""

    LOGS = 20
    DATA = "0x" + "5a" * 100

    def _eth_getLogs(self, params: list[Any]) -> list[dict[str, Any]]:
        query = params[0]
        if "blockHash" in query:
            first = last = int(self.forking_chain.blocks[query["blockHash"]]["number"], 16)
        else:
            first, last = self._number(query["fromBlock"]), self._number(query["toBlock"])
        return [
            self._dense(number, index)
            for number, index in itertools.product(range(first, min(last, self.head) + 1), range(self.LOGS))
        ]

    def _dense(self, number: int, index: int) -> dict[str, Any]:
        block = self.canonical[number]
        return {
            "address": CONTRACTS[0],
            "topics": ["0x" + f"{number:064x}"],
            "data": self.DATA,
            "blockNumber": hex(number),
            "blockHash": block,
            "transactionHash": value_of("tx", number),
            "transactionIndex": "0x0",
            "logIndex": hex(index),
            "removed": False,
        }


@asynccontextmanager
async def replaying(harness: FeedHarness, replays: int, **members: Any) -> AsyncIterator[None]:
    """A Free key with so many replays of 9,990 blocks under way, each on its own socket."""
    first = hex(harness.chain.head - BACK)
    async with AsyncExitStack() as stack:
        for _ in range(replays):
            attacker = await stack.enter_async_context(connected(harness.worker, key="free", network=DEV))
            subscribe = partial(attacker.call, "eth_subscribe", "logs", {"fromBlock": first, **members})
            while "error" in await subscribe():  # noqa: ASYNC110 - its rate limit is no event
                await asyncio.sleep(0.2)
        yield


@on_uvloop
async def test_replays_of_one_account_do_not_stop_those_of_another() -> None:
    async with feed_harness(["http"], blocks=BLOCKS, network=DEV) as harness:
        harness.worker.add_key("free", limits=FREE)
        async with replaying(harness, 20), connected(harness.worker, network=DEV) as good:
            first = harness.chain.head - 200
            await good.result("eth_subscribe", "logs", {"fromBlock": hex(first)})
            async with asyncio.timeout(20):
                for number, index in itertools.product(range(first, harness.chain.head + 1), range(2)):
                    log = (await good.event())["result"]
                    assert (int(log["blockNumber"], 16), int(log["logIndex"], 16)) == (number, index)


@on_uvloop
async def test_calls_of_a_replay_are_paid_for_as_they_are_made() -> None:
    """No log matches, so no event is paid for."""
    async with feed_harness(["http"], blocks=BLOCKS, network=DEV) as harness:
        key = harness.worker.add_key("free", limits=FREE)
        await harness.worker.app.plane.track_heads()
        await harness.listen(logs_topic(address="0x" + "ee" * 20))
        before, began = list_price(harness), time.monotonic()
        async with replaying(harness, 10, address="0x" + "ee" * 20):
            while (took_s := time.monotonic() - began) < 5:
                await asyncio.sleep(0.1)
                assert list_price(harness) - before <= FREE.units_per_second * (took_s + 2)
            charged = sum(tally.units for tally in key.tallies.values())
            assert charged >= list_price(harness) - before - FREE.units_per_second
        await until(lambda: not harness.evm._waiting)


@pytest.mark.parametrize("topic", [HEADS, logs_topic()])
@on_uvloop
async def test_replay_ends_with_the_reason_if_its_account_has_no_units_for_long(topic: Topic) -> None:
    class PoorListener(RecordingListener):
        def charge(self, units: int, tally: Tally) -> bool:
            return len(self.events) < 40

        async def wait_for_units(self) -> None:
            raise RateLimited("daily quota exceeded", retry_after_s=3600)

    async with feed_harness(["http"], blocks=500, network=DEV) as harness:
        with pytest.raises(RateLimited, match="daily quota"):
            await harness.feed.subscribe_from(topic, PoorListener(), 1)
        assert harness.worker.held_bytes == 0


def list_price(harness: FeedHarness) -> int:
    calls = [call for upstream in harness.upstreams for call in upstream.calls]
    return sum(_price(call.method, call.params, harness.chain.head) for call in calls)


def _price(method: str, params: list[Any], head: int) -> int:
    if method == "eth_getBlockByNumber" and params[0] == "latest":
        return 0
    if method == "eth_getLogs" and "fromBlock" in params[0] and head - int(params[0]["fromBlock"], 16) >= 128:
        return ARCHIVE_PRICE
    return PRICES.get(method, 0)


@on_uvloop
async def test_memory_of_replays_is_bounded_and_returned() -> None:
    async with feed_harness(["http"], blocks=BLOCKS, network=DEV, kind=DenseUpstream) as harness:
        harness.worker.add_key("free", limits=FREE)
        harness.upstreams[0].calls.clear()
        await harness.listen(logs_topic(address=CONTRACTS[1]))
        tracemalloc.start()
        try:
            before = tracemalloc.get_traced_memory()[0]
            async with replaying(harness, 16):
                for _ in range(40):
                    await asyncio.sleep(0.1)
                    assert tracemalloc.get_traced_memory()[0] - before < 64 * MB
            await until(lambda: tracemalloc.get_traced_memory()[0] - before < 8 * MB)
        finally:
            tracemalloc.stop()
        assert harness.worker.held_bytes == 0
