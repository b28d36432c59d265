"""Batches to the one upstream of a network: one request and one reply, and whatever else happens on the way."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from proxy.wire.http_upstream import HttpUpstream
from tests.faults import Mode
from tests.rpc_harness import RpcHarness, rpc_harness
from tests.rpc_upstreams import Refused, value_of
from tests.service import until
from tests.web.worker import NO_CACHE, on_uvloop

Call = tuple[str, list[Any]]


def calls_of(turn: int, count: int = 10) -> list[Call]:
    return [("eth_call", [{"data": hex(turn * 100 + n)}, "latest"]) for n in range(count)]


async def check(harness: RpcHarness, turn: int) -> None:
    calls = calls_of(turn)
    reply = await harness.batch(*calls)
    assert [item["id"] for item in reply.json] == list(range(len(calls)))
    assert [item.get("result") for item in reply.json] == [value_of("eth_call", params) for _, params in calls]


@on_uvloop
async def test_plain_reads_are_one_request_and_leave_nothing_behind() -> None:
    async with rpc_harness(1, **NO_CACHE) as harness:
        before = harness.upstreams[0].requests
        for turn in range(5):
            await check(harness, turn)
        assert harness.upstreams[0].requests == before + 5
        assert harness.route.upstreams[0].health.inflight == 0


@on_uvloop
async def test_error_of_one_item_is_its_own() -> None:
    def refuse(params: list[Any]) -> Any:
        if params[0]["data"] == "0x3":
            raise Refused(3, "execution reverted")
        return value_of("eth_call", params)

    async with rpc_harness(1, **NO_CACHE) as harness:
        harness.upstreams[0].answers["eth_call"] = refuse
        reply = await harness.batch(*calls_of(0))
        assert [item["id"] for item in reply.json if "error" in item] == [3]
        assert reply.json[3]["error"]["code"] == 3
        assert reply.headers["x-compute-units"] == "30"
        assert harness.route.upstreams[0].health.inflight == 0
        await check(harness, 1)


@pytest.mark.parametrize("mode", ["reset", "half", "garbage"])
@on_uvloop
async def test_broken_batch_is_retried_call_by_call(mode: Mode) -> None:
    async with rpc_harness(1, faults=True, **NO_CACHE) as harness:
        harness.proxies[0].reset_after = 0
        for turn in range(3):
            await harness.proxies[0].switch(mode, times=1)
            await check(harness, turn)
        assert harness.route.upstreams[0].health.inflight == 0


@on_uvloop
async def test_batch_that_takes_long_is_waited_for() -> None:
    async with rpc_harness(1, faults=True, **NO_CACHE) as harness:
        await harness.proxies[0].switch("slow", times=1)
        await check(harness, 1)
        await check(harness, 2)
        assert harness.route.upstreams[0].health.inflight == 0


@on_uvloop
async def test_client_that_leaves_takes_its_batch_back() -> None:
    async with rpc_harness(1, faults=True, **NO_CACHE) as harness:
        health = harness.route.upstreams[0].health
        for wait_s in (0.0, 0.2):
            await harness.proxies[0].switch("black_hole")
            async with asyncio.TaskGroup() as group:
                asking = group.create_task(harness.batch(*calls_of(1)))
                await until(lambda: health.inflight > 0, every_s=0.001)
                # Long enough, the second time, that the sweep has made flights of it.
                await asyncio.sleep(wait_s)
                asking.cancel()
            await until(lambda: health.inflight == 0)
        await harness.proxies[0].switch("pass")
        await until(lambda: health.free)
        await check(harness, 3)


@on_uvloop
async def test_method_denied_for_the_only_upstream_is_not_sent() -> None:
    async with rpc_harness(1, options=[{"deny": ["eth_getProof"]}], **NO_CACHE) as harness:
        reply = await harness.batch(*calls_of(0, 2), ("eth_getProof", ["0x" + "ab" * 20, [], "latest"]))
        assert ["error" in item for item in reply.json] == [False, False, True]
        assert harness.upstreams[0].count("eth_getProof") == 0


@on_uvloop
async def test_batch_that_waits_for_a_connection_has_its_deadline_there_too() -> None:
    async with rpc_harness(1, faults=True, options=[{"connections": 1}], **NO_CACHE) as harness:
        upstream = harness.route.upstreams[0]
        await check(harness, 0)
        await harness.proxies[0].switch("black_hole")
        async with asyncio.TaskGroup() as group:
            first = group.create_task(harness.batch(*calls_of(1)))
            await until(lambda: upstream.health.inflight > 0, every_s=0.001)
            second = group.create_task(harness.batch(*calls_of(2)))
            assert isinstance(upstream, HttpUpstream)
            await until(lambda: len(upstream._queue) == 1, every_s=0.001)
            # Older than any deadline, while the one that has the connection is young.
            waiting: Any = upstream._queue.all()[0].sink
            waiting.began -= 1000.0
            assert all("error" in item for item in (await second).json)
            assert not first.done()
            first.cancel()
