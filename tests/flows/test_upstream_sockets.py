"""Plain calls to an upstream behind a WebSocket: late, lost, left, in batches; and transactions."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from proxy.wire.websocket_upstream import WebSocketUpstream
from tests.http_client import rpc
from tests.rpc_upstreams import Chain, tx_hash, value_of
from tests.service import until
from tests.socket_upstream import SocketServer
from tests.web.worker import LIVE, NO_CACHE, Worker, on_uvloop, running_worker

SEND = "eth_sendRawTransaction"
RAW = "0xf86c" + "07" * 20


@asynccontextmanager
async def socket_harness(
    options: Mapping[str, Any] | None = None, **sections: Mapping[str, Any]
) -> AsyncIterator[tuple[Worker, SocketServer, WebSocketUpstream]]:
    server = SocketServer(Chain())
    await server.open()
    try:
        async with running_worker({LIVE: [{"url": server.url, **(options or {})}]}, **sections) as worker:
            upstream = worker.app.networks.routes[LIVE].upstreams[0]
            assert isinstance(upstream, WebSocketUpstream)
            yield worker, server, upstream
    finally:
        server.cut()
        await server.close()


def call(n: int) -> tuple[bytes, str]:
    params = [{"data": hex(n)}, "latest"]
    return rpc("eth_call", params), value_of("eth_call", params)


@on_uvloop
async def test_calls_share_one_socket_and_each_has_its_own_answer() -> None:
    async with socket_harness(**NO_CACHE) as (worker, server, upstream):
        async with asyncio.TaskGroup() as group:
            asked = [(group.create_task(worker.send(body)), result) for body, result in map(call, range(40))]
        assert all(task.result().json["result"] == result for task, result in asked)
        assert server.opened == 1
        assert not upstream._pending


@on_uvloop
async def test_call_that_is_late_is_given_up_and_leaves_nothing_behind() -> None:
    async with socket_harness(rpc={"call_timeout_s": 0.2}, **NO_CACHE) as (worker, server, upstream):
        server.held = {"eth_call"}
        async with asyncio.TaskGroup() as group:
            asked = [group.create_task(worker.send(call(n)[0])) for n in range(10)]
        assert {task.result().status for task in asked} == {504}
        assert (len(upstream._pending), len(upstream._client._queue), upstream.health.inflight) == (0, 0, 0)
        # Late replies are discarded.
        server.gate.set()
        assert (await worker.send(rpc("eth_chainId"))).status in (200, 503)


@on_uvloop
async def test_client_that_leaves_takes_its_call_back() -> None:
    async with socket_harness(**NO_CACHE) as (worker, server, upstream):
        server.held = {"eth_call"}
        client = await worker.connect()
        await client.write(worker.post(call(1)[0]))
        await until(lambda: server.count("eth_call") == 1, every_s=0.001)
        await client.close()
        await until(lambda: not upstream._pending)
        assert upstream.health.inflight == 0


@on_uvloop
async def test_reads_on_a_lost_socket_are_sent_again_on_another() -> None:
    async with socket_harness(**NO_CACHE) as (worker, server, upstream):
        server.held = {"eth_call"}
        worker.app.networks.routes[LIVE].dispatcher.budget.earn()
        for turn in range(3):
            async with asyncio.TaskGroup() as group:
                body, result = call(turn)
                asking = group.create_task(worker.send(body))
                await until(lambda turn=turn: server.count("eth_call") == 2 * turn + 1, every_s=0.001)
                server.cut()
                await until(lambda turn=turn: server.count("eth_call") == 2 * turn + 2, every_s=0.001)
                server.gate.set()
            server.gate.clear()
            assert asking.result().json["result"] == result
            for _ in range(20):
                worker.app.networks.routes[LIVE].dispatcher.budget.earn()
        assert not upstream._pending
        assert server.opened == 4


@on_uvloop
async def test_transaction_on_a_socket_that_is_lost_is_not_sent_again() -> None:
    async with socket_harness() as (worker, server, upstream):
        assert (await worker.send(rpc(SEND, [RAW]))).json["result"] == tx_hash(RAW)
        # It is known by now.
        assert (await worker.send(rpc(SEND, [RAW]))).json["result"] == tx_hash(RAW)
        server.held = {SEND}
        async with asyncio.TaskGroup() as group:
            asking = group.create_task(worker.send(rpc(SEND, [RAW])))
            await until(lambda: server.count(SEND) == 3, every_s=0.001)
            server.cut()
        asking.result().fault(500)
        server.gate.set()
        assert (await worker.send(rpc("eth_chainId"))).status == 200
        assert server.count(SEND) == 3
        assert not upstream._pending


@on_uvloop
async def test_call_that_waits_while_the_socket_is_lost_is_sent_on_another() -> None:
    """Our own calls wait for longer than a slow machine takes."""
    async with socket_harness({"connections": 1}, **NO_CACHE) as (worker, server, upstream):
        server.held = {"eth_call"}
        network = worker.app.networks.routes[LIVE].network
        several = [[{"data": hex(n)}, "latest"] for n in range(2)]
        async with asyncio.TaskGroup() as group:
            asked = []
            for params in several:
                asked.append(group.create_task(worker.app.internal_calls.call(network, "eth_call", *params)))
                await until(lambda: server.count("eth_call") == 1, every_s=0.001)
            await until(lambda: len(upstream._queue) == 1, every_s=0.001)
            server.gate.set()
            server.cut()
        assert [each.result() for each in asked] == [value_of("eth_call", params) for params in several]
        assert server.count("eth_call") == 3
        assert not upstream._queue


@on_uvloop
async def test_calls_that_wait_fail_if_no_socket_can_be_opened() -> None:
    async with socket_harness({"connections": 1}, rpc={"call_timeout_s": 20.0}, **NO_CACHE) as (
        worker,
        server,
        upstream,
    ):
        server.cut()
        await server.close()
        async with asyncio.timeout(10), asyncio.TaskGroup() as group:
            asked = [group.create_task(worker.send(call(n)[0])) for n in range(4)]
        assert {each.result().status for each in asked} <= {500, 503}
        assert (len(upstream._pending), len(upstream._queue), upstream.health.inflight) == (0, 0, 0)


async def _batch(worker: Worker, turn: int) -> None:
    calls = [call(turn * 100 + n) for n in range(12)]
    reply = await worker.send(b"[" + b",".join(body for body, _ in calls) + b"]")
    assert [item["result"] for item in reply.json] == [result for _, result in calls]


@on_uvloop
async def test_batch_goes_out_in_one_message_and_one_that_is_refused_in_smaller_ones() -> None:
    for sections in ({}, NO_CACHE):
        async with socket_harness(**sections) as (worker, server, upstream):
            await _batch(worker, 0)
            assert upstream.batches.of("acc_1") == 20
            server.batch = 3
            for turn in range(1, 5):
                await _batch(worker, turn)
            assert upstream.batches.of("acc_1") == 3
            assert upstream.health.bad == 0
            assert (len(upstream._pending), upstream.health.inflight) == (0, 0)
