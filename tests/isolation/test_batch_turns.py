"""Large batches are parsed, checked and refused in short steps, in turn with other clients."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any

import orjson
import pytest

from proxy.core.access import Limits
from proxy.services.request_recorder import MOST_OF_BATCH
from proxy.services.rpc.upstream_batch import MAX_BATCH_REPLY_BYTES
from tests.service import until
from tests.sockets import bare
from tests.web.worker import LIVE, NO_CACHE, Worker, on_uvloop, running_worker
from tests.wire.upstreams import Exchange, Scripted, head_of

MANY = 1000
# Steps of 25 items. On a fast machine some of them share a turn of the loop.
LEAST_TURNS = 10


async def echo(exchange: Exchange) -> None:
    body = await exchange.call()
    given = body if isinstance(body, list) else [body]
    replies = [{"jsonrpc": "2.0", "id": call["id"], "result": "0x1"} for call in given]
    reply = orjson.dumps(replies if isinstance(body, list) else replies[0])
    await exchange.send(head_of(200, {"Content-Length": str(len(reply))}), reply)


def calls(method: str, params: Any, count: int = MANY) -> list[dict[str, Any]]:
    return [{"jsonrpc": "2.0", "id": number, "method": method, "params": params} for number in range(count)]


async def answered_in_turns(worker: Worker, asked: Coroutine[Any, Any, Any]) -> tuple[Any, int]:
    """The reply, and in how many turns of the loop steps waited in the queue until then."""
    turns = 0
    async with asyncio.TaskGroup() as group:
        task = group.create_task(asked)
        while not task.done():
            turns += "<TurnQueue 0 " not in repr(worker.app.turns)
            await asyncio.sleep(0)
    return task.result(), turns


@pytest.mark.parametrize(
    ("batch", "codes"),
    [
        (calls("eth_chainId", {}), {-32600}),
        (calls("eth_nothing", []), {-32601}),
        ([{}] * MANY, {-32600}),
        (calls("eth_getBalance", ["0x" + "11" * 20, "latest"]), set()),
    ],
    ids=["mistaken", "unknown", "empty", "good"],
)
@pytest.mark.parametrize("way", ["http", "chunked", "socket"])
@on_uvloop
async def test_large_batch_takes_many_turns(batch: Sequence[Any], codes: set[int], way: str) -> None:
    async with (
        Scripted(echo) as server,
        running_worker({LIVE: [{"url": server.url, "batch": 50}]}, **NO_CACHE) as worker,
    ):
        items, turns = await answered_in_turns(worker, send(worker, orjson.dumps(batch), way))
        assert {item["error"]["code"] for item in items if "error" in item} == codes
        assert len(items) == MANY
        assert turns >= LEAST_TURNS


async def send(worker: Worker, body: bytes, way: str, key: str = "main") -> list[Any]:
    if way == "socket":
        async with bare(worker) as socket:
            socket.write(body)
            found: list[Any] = await socket.json()
            return found
    async with await worker.connect() as client:
        request = worker.post(body, key=key)
        if way == "chunked":
            head = f"POST /v1/rpc/{LIVE} HTTP/1.1\r\nHost: p\r\nX-API-Key: {worker.keys['main']}\r\n".encode()
            request = head + b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
        found = (await client.send(request)).json
        return found


@on_uvloop
async def test_items_above_the_rate_are_refused_in_turns() -> None:
    async with Scripted(echo) as server, running_worker(server.url, rpc={"batch_wait_s": 0.0}, **NO_CACHE) as worker:
        worker.add_key("slow", limits=Limits(10, 1000, 0))
        batch = orjson.dumps(calls("eth_getBalance", ["0x" + "11" * 20, "latest"]))
        async with await worker.connect() as client:
            reply, turns = await answered_in_turns(worker, client.send(worker.post(batch, key="slow")))
        items = reply.json
        assert turns >= LEAST_TURNS
        assert [item["id"] for item in items] == list(range(MANY))
        assert {item["error"]["code"] for item in items if "error" in item} == {-32005}
        assert 10 <= sum("result" in item for item in items) < 100


@on_uvloop
async def test_client_that_leaves_a_batch_half_read_leaves_nothing_behind() -> None:
    async with Scripted(echo) as server, running_worker(server.url, **NO_CACHE) as worker:
        async with await worker.connect() as client:
            await client.write(worker.post(orjson.dumps(calls("eth_nothing", []))))
            # Every turn of the loop: all steps together take a few milliseconds.
            await until(lambda: "<TurnQueue 0 " not in repr(worker.app.turns), every_s=0.0)
            client.writer.transport.abort()
        await until(lambda: not worker.app.limiter.connections)
        await until(lambda: "<TurnQueue 0 " in repr(worker.app.turns))
        assert not server.bodies
        assert len(worker.app.rpc.waiting_batches) == 0


@pytest.mark.parametrize("body", [b"[" + b"{}," * 300, b"[1" + b",1" * 1000 + b"]", b"[]"])
@on_uvloop
async def test_body_that_is_no_batch_is_refused_whole(body: bytes) -> None:
    async with Scripted(echo) as server, running_worker(server.url, **NO_CACHE) as worker:
        (await worker.send(body)).fault(400)
        async with bare(worker) as socket:
            socket.write(body)
            assert (await socket.json())["error"]["code"] in (-32600, -32700)
            socket.write(orjson.dumps(calls("net_version", [], 1)[0]))
            assert (await socket.json())["result"]


@pytest.mark.parametrize("batch", [calls("eth_nothing", []), calls("eth_call", [1])], ids=["unknown", "failed"])
@on_uvloop
async def test_few_items_of_a_batch_are_recorded(batch: Sequence[Any]) -> None:
    """To record all of them would take milliseconds."""

    async with Scripted(failure) as server, running_worker({LIVE: [{"url": server.url, "batch": 50}]}) as worker:
        items = await send(worker, orjson.dumps(batch), "http")
        assert all("error" in item for item in items)
        assert len(worker.app.recorder.waiting) == 1 + MOST_OF_BATCH


async def failure(exchange: Exchange) -> None:
    body = await exchange.call()
    error = {"code": -32602, "message": "invalid params"}
    replies = [
        {"jsonrpc": "2.0", "id": call["id"], "error": error} for call in (body if isinstance(body, list) else [body])
    ]
    reply = orjson.dumps(replies if isinstance(body, list) else replies[0])
    await exchange.send(head_of(200, {"Content-Length": str(len(reply))}), reply)


LARGE_CALLS = 20


@on_uvloop
async def test_calls_with_large_results_are_sent_one_in_each_turn() -> None:
    """The reply to all of them together is too large to be read. For a while, later ones of the account go alone at once."""
    together = 0

    async def act(exchange: Exchange) -> None:
        nonlocal together
        body = await exchange.call()
        if isinstance(body, list):
            together += 1
            await exchange.send(head_of(200, {"Content-Length": str(2 * MAX_BATCH_REPLY_BYTES)}), b"[" + b" " * 100_000)
        else:
            await echo(exchange)

    batch = [
        {"jsonrpc": "2.0", "id": number, "method": "eth_getCode", "params": [f"0x{number:040x}", "latest"]}
        for number in range(LARGE_CALLS)
    ]
    async with (
        Scripted(act) as server,
        running_worker({LIVE: [{"url": server.url, "batch": LARGE_CALLS}]}, **NO_CACHE) as worker,
    ):
        async with asyncio.TaskGroup() as group:
            task = group.create_task(send(worker, orjson.dumps(batch), "http"))
            waiting = set()
            while not task.done():
                waiting.add(repr(worker.app.turns))
                await asyncio.sleep(0)
        assert [item["result"] for item in task.result()] == ["0x1"] * LARGE_CALLS
        # The first is sent at the end of the turn in which the reply was given up.
        assert {f"<TurnQueue {steps} steps of 1 clients>" for steps in range(1, LARGE_CALLS - 1)} <= waiting
        assert together == 1
        await send(worker, orjson.dumps(batch), "http")
        assert together == 1
        worker.add_key("other")
        await send(worker, orjson.dumps(batch), "http", "other")
        assert together == 2
