"""Faults on demand for test keys: every part of a plan, over HTTP and on sockets, and never for live keys."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import orjson
import pytest

from proxy.chains.evm.log_filter import LogFilter
from proxy.core.fault_plans import FaultPlan
from proxy.services.feed.topics import FeedEvent, Topic
from tests.http_client import Closed, rpc
from tests.rpc_harness import RpcHarness, rpc_harness
from tests.rpc_upstreams import value_of
from tests.service import until
from tests.sockets import HEADS, SocketClient, bare, connected, head, heads, refused, replace_feed
from tests.web.worker import TEST, on_uvloop

ADDRESS = "0x" + "ab" * 20
BALANCE = ("eth_getBalance", [ADDRESS, "latest"])


@asynccontextmanager
async def faulty() -> AsyncIterator[RpcHarness]:
    async with rpc_harness(1, network=TEST) as harness:
        harness.worker.add_key("test", live=False)
        yield harness


async def spoiled(harness: RpcHarness, plan: str, method: str = BALANCE[0], params: Any = BALANCE[1]) -> Any:
    return await harness.call(method, params, key="test", X_Fault=plan)


@on_uvloop
async def test_live_key_with_a_fault_is_refused() -> None:
    async with faulty() as harness:
        for plan in ("status=503", "latency=1ms"):
            assert "test keys" in (await harness.call(*BALANCE, X_Fault=plan)).fault(400)["message"]
        assert "X-Fault" in (await spoiled(harness, "explode")).fault(400)["message"]
        assert "test keys" in (await refused(harness.worker, network=TEST, X_Fault="reset")).fault(400)["message"]
        assert not harness.count("eth_getBalance")


@pytest.mark.parametrize("status", [429, 500, 503, 504])
@on_uvloop
async def test_reply_has_the_status(status: int) -> None:
    async with faulty() as harness:
        reply = await spoiled(harness, f"status={status}")
        assert "X-Fault" in reply.fault(status)["message"]
        assert ("retry-after" in reply.headers) is (status in (429, 503))
        assert not harness.count("eth_getBalance")


@on_uvloop
async def test_reply_is_an_error_of_the_code() -> None:
    async with faulty() as harness:
        reply = await spoiled(harness, "error=-32005")
        assert (reply.status, reply.json["id"], reply.json["error"]["code"]) == (200, 1, -32005)
        batch = await harness.batch(BALANCE, ("eth_chainId", []), key="test", X_Fault="error=-32000")
        assert [(each["id"], each["error"]["code"]) for each in batch.json] == [(0, -32000), (1, -32000)]


@on_uvloop
async def test_result_is_empty_or_stale() -> None:
    async with faulty() as harness:
        chain = harness.chain
        assert (await spoiled(harness, "empty")).json["result"] is None
        assert (await spoiled(harness, "empty", "eth_getLogs", [{"fromBlock": hex(chain.head)}])).json["result"] == []
        old = value_of("balance", ADDRESS, chain.hash_of(chain.head - 5))
        assert (await spoiled(harness, "stale=5")).json["result"] == old
        assert (await spoiled(harness, "stale=5", "eth_blockNumber", [])).json["result"] == hex(chain.head - 5)


@pytest.mark.parametrize("plan", ["reset", "truncate"])
@on_uvloop
async def test_connection_ends_before_the_reply_does(plan: str) -> None:
    async with faulty() as harness:
        with pytest.raises((Closed, ConnectionError, asyncio.IncompleteReadError)):
            await spoiled(harness, plan)
        assert (await harness.call(*BALANCE, key="test")).status == 200


@on_uvloop
async def test_late_or_slow_reply_is_whole() -> None:
    async with faulty() as harness:
        loop = asyncio.get_running_loop()
        for plan, least_s in (("latency=150ms", 0.15), ("slow-body=500B/s", 0.1)):
            began = loop.time()
            assert "result" in (await spoiled(harness, plan)).json
            # The loop counts in milliseconds.
            assert loop.time() - began > least_s - 0.01


@on_uvloop
async def test_share_of_requests_is_affected() -> None:
    async with faulty() as harness:
        found = {(await spoiled(harness, "status=503, p=0.5")).status for _ in range(60)}
        assert found == {200, 503}
        assert {(await spoiled(harness, "status=503, p=0")).status for _ in range(10)} == {200}


@on_uvloop
async def test_saved_plan_applies_without_the_header() -> None:
    async with faulty() as harness:
        harness.worker.add_key("spoiled", live=False, fault=FaultPlan(status=503))
        (await harness.call(*BALANCE, key="spoiled")).fault(503)
        reply = await harness.call(*BALANCE, key="spoiled", X_Fault="error=-32000")
        assert reply.json["error"]["code"] == -32000


@on_uvloop
async def test_plan_of_a_handshake_applies_to_every_message() -> None:
    async with faulty() as harness:
        options: dict[str, Any] = {"key": "test", "network": TEST}
        async with bare(harness.worker, **options, X_Fault="error=-32005,latency=20ms") as socket:
            for _ in range(2):
                socket.write(rpc(*BALANCE))
                assert (await socket.json())["error"]["code"] == -32005
        async with bare(harness.worker, **options, X_Fault="reset") as socket:
            socket.write(rpc(*BALANCE))
            assert await socket.ended()
        assert not harness.count("eth_getBalance")


@on_uvloop
async def test_results_on_a_socket_are_empty_or_stale() -> None:
    async with faulty() as harness:
        chain = harness.chain
        options: dict[str, Any] = {"key": "test", "network": TEST}
        old, head = value_of("balance", ADDRESS, chain.hash_of(chain.head - 5)), hex(chain.head - 5)
        calls: tuple[Any, ...] = (BALANCE, ("eth_blockNumber", []))
        for plan, results in (("empty", [None, None]), ("stale=5", [old, head])):
            async with bare(harness.worker, **options, X_Fault=plan) as socket:
                for call, result in zip(calls, results, strict=True):
                    socket.write(rpc(*call))
                    assert (await socket.json())["result"] == result
                batch = [{"jsonrpc": "2.0", "id": n, "method": m, "params": p} for n, (m, p) in enumerate(calls)]
                socket.write(orjson.dumps(batch))
                assert [each["result"] for each in await socket.json()] == results


@on_uvloop
async def test_deep_result_of_a_spoiled_socket_reaches_the_others() -> None:
    async with faulty() as harness:
        deep = b"[" * 600 + b"]" * 600
        harness.upstreams[0].answers["eth_getBalance"] = lambda params: orjson.Fragment(deep)
        options: dict[str, Any] = {"key": "test", "network": TEST}
        async with (
            bare(harness.worker, **options, X_Fault="stale=5") as spoiled_socket,
            bare(harness.worker, **options) as other,
        ):
            for socket in (spoiled_socket, other):
                socket.write(rpc("eth_getBalance", [ADDRESS, "0x1"]))
            for socket in (spoiled_socket, other):
                assert len(str((await socket.json())["result"])) == len(deep)


@on_uvloop
async def test_notifications_with_a_fault_get_no_reply() -> None:
    async with faulty() as harness:
        notifications = orjson.dumps([{"jsonrpc": "2.0", "method": "eth_getBalance", "params": [ADDRESS, "0x1"]}])
        assert (await harness.worker.send(notifications, network=TEST, key="test", X_Fault="empty")).status == 204
        async with bare(harness.worker, key="test", network=TEST, X_Fault="empty") as socket:
            socket.write(notifications.replace(b"0x1", b"0x2"))
            await until(lambda: harness.count("eth_getBalance", [ADDRESS, "0x2"]))
            socket.write(rpc(*BALANCE))
            assert (await socket.json())["result"] is None


PLANS = ("status=503", "error=-32005", "empty", "stale=5", "reset", "truncate", "slow-body=500B/s", "latency=20ms")


@pytest.mark.parametrize("plan", PLANS)
@on_uvloop
async def test_batch_is_spoiled_as_a_call_is(plan: str) -> None:
    calls: tuple[Any, ...] = (BALANCE, ("eth_blockNumber", []))
    async with faulty() as harness:
        old = hex(harness.chain.head - 5)
        if plan in ("reset", "truncate"):
            with pytest.raises((Closed, ConnectionError, asyncio.IncompleteReadError)):
                await harness.batch(*calls, key="test", X_Fault=plan)
            return
        reply = await harness.batch(*calls, key="test", X_Fault=plan)
        match plan.partition("=")[0]:
            case "status":
                reply.fault(503)
            case "error":
                assert [each["error"]["code"] for each in reply.json] == [-32005] * 2
            case "empty":
                assert [each["result"] for each in reply.json] == [None] * 2
            case "stale":
                assert reply.json[1]["result"] == old
            case _:
                assert [each["id"] for each in reply.json if each["result"]] == [0, 1]


async def numbers(client: SocketClient, count: int) -> list[int]:
    return [int((await client.event())["result"]["number"], 16) for _ in range(count)]


@on_uvloop
async def test_socket_is_dropped_after_so_many_events() -> None:
    async with faulty() as harness:
        feed = replace_feed(harness.worker, TEST)
        async with bare(harness.worker, key="test", network=TEST, X_Fault="drop=3") as socket:
            socket.write(rpc("eth_subscribe", ["newHeads"]))
            assert "result" in await socket.json()
            feed.emit(HEADS, *heads([1, 2]))
            feed.emit(HEADS, *heads([3, 4]))
            assert [(await socket.json())["params"]["result"]["number"] for _ in range(3)] == ["0x1", "0x2", "0x3"]
            with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
                await socket.frame()
        await until(lambda: feed.count == 0)


@on_uvloop
async def test_events_come_later_and_in_order() -> None:
    async with faulty() as harness:
        harness.worker.add_key("spoiled", live=False, fault=FaultPlan(delay_ms=100))
        feed, loop = replace_feed(harness.worker, TEST), asyncio.get_running_loop()
        async with connected(harness.worker, key="spoiled", network=TEST) as client:
            await client.result("eth_subscribe", "newHeads")
            began = loop.time()
            for number in range(1, 20):
                feed.emit(HEADS, head(number))
            assert await numbers(client, 19) == [*range(1, 20)]
            assert loop.time() - began > 0.09


@on_uvloop
async def test_blocks_are_taken_back_and_come_again() -> None:
    async with faulty() as harness:
        feed, logs = replace_feed(harness.worker, TEST), Topic("logs", LogFilter())
        harness.worker.add_key("spoiled", live=False, fault=FaultPlan(reorg=2))
        async with connected(harness.worker, key="spoiled", network=TEST) as client:
            await client.result("eth_subscribe", "newHeads")
            feed.emit(HEADS, *heads([1, 2]))
            feed.emit(HEADS, head(3))
            assert await numbers(client, 5) == [1, 2, 1, 2, 3]
            await client.result("eth_subscribe", "logs", {})
            for block in (1, 2):
                found = [{"logIndex": hex(index), "removed": False} for index in (2 * block, 2 * block + 1)]
                feed.emit(logs, *(FeedEvent(orjson.dumps(each), block) for each in found))
            seen = [(await client.event())["result"] for _ in range(12)]
            assert [(int(each["logIndex"], 16), each["removed"]) for each in seen] == [
                (2, False), (3, False), (4, False), (5, False),
                (5, True), (4, True), (3, True), (2, True),
                (2, False), (3, False), (4, False), (5, False),
            ]  # fmt: skip


@on_uvloop
async def test_other_sockets_of_the_topic_are_not_affected() -> None:
    async with faulty() as harness:
        feed = replace_feed(harness.worker, TEST)
        harness.worker.add_key("spoiled", live=False, fault=FaultPlan(reorg=1, drop=4))
        async with (
            connected(harness.worker, network=TEST) as live,
            connected(harness.worker, key="test", network=TEST) as test,
            connected(harness.worker, key="spoiled", network=TEST) as spoiled_client,
        ):
            for client in (live, test, spoiled_client):
                await client.result("eth_subscribe", "newHeads")
            for number in (1, 2, 3):
                feed.emit(HEADS, head(number))
            assert await numbers(spoiled_client, 4) == [1, 1, 2, 2]
            for client in (live, test):
                assert await numbers(client, 3) == [1, 2, 3]
