"""Request bodies that arrive slowly: bounded for each client and for the worker, whichever way they are read."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

import pytest

from tests.http_client import HttpClient, rpc
from tests.rpc_harness import RpcHarness, rpc_harness
from tests.service import until
from tests.web.worker import LIVE, Worker, on_uvloop

# Bodies may take 250,000 bytes of it. An account may send one body of this size at a time; after those of two accounts, less
# than the size of one would stay free for others.
BOUND = 400_000
LARGE = 70_000


@asynccontextmanager
async def bounded() -> AsyncIterator[RpcHarness]:
    async with rpc_harness(1, server={"max_held_bytes": BOUND}) as harness:
        for number in range(8):
            harness.worker.add_key(f"other {number}")
        yield harness
        await until(lambda: not harness.worker.held_bytes)


def beginning(worker: Worker, way: str, key: str) -> bytes:
    """A request whose body is not complete."""
    head = f"POST /v1/rpc/{LIVE} HTTP/1.1\r\nHost: p\r\nX-API-Key: {worker.keys[key]}\r\n"
    if way == "chunked":
        return head.encode() + b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%b\r\n" % (LARGE, b" " * LARGE)
    return head.encode() + b"Content-Length: %d\r\n\r\n  " % LARGE


async def begin(worker: Worker, stack: contextlib.AsyncExitStack, way: str, key: str) -> HttpClient:
    client = await stack.enter_async_context(await worker.connect())
    await client.write(beginning(worker, way, key))
    return client


def arriving(worker: Worker) -> int:
    return worker.app.budget.of("bodies").total


@pytest.mark.parametrize("way", ["length", "chunked"])
@on_uvloop
async def test_one_account_may_send_so_many_bodies_at_a_time(way: str) -> None:
    async with bounded() as harness, contextlib.AsyncExitStack() as stack:
        worker = harness.worker
        await begin(worker, stack, way, "other 0")
        await until(lambda: arriving(worker) == LARGE)
        refused = await begin(worker, stack, way, "other 0")
        fault = (await refused.reply()).fault(429)
        assert "bodies" in fault["message"]
        # Another account is not affected, with a body in two parts.
        body = rpc("eth_chainId").ljust(LARGE)
        async with await worker.connect() as client:
            request = worker.post(body)
            await client.write(request[:-10])
            await until(lambda: arriving(worker) == 2 * LARGE)
            await client.write(request[-10:])
            assert (await client.reply()).status == 200
        assert arriving(worker) == LARGE


@pytest.mark.parametrize("way", ["rpc", "rest"])
@on_uvloop
async def test_client_that_is_still_sending_reads_why_it_was_refused(way: str) -> None:
    """Closing the connection with unread bytes would reset it, and the client might never see the reply."""

    async with bounded() as harness, contextlib.AsyncExitStack() as stack:
        worker = harness.worker
        await begin(worker, stack, "length", "other 0")
        await until(lambda: arriving(worker) == LARGE)
        size, path = (1_000_000, f"/v1/rpc/{LIVE}") if way == "rpc" else (3_000_000, "/v1/wallets/create")
        head = (
            f"POST {path} HTTP/1.1\r\nHost: p\r\nX-API-Key: {worker.keys['other 0']}\r\nContent-Length: {size}\r\n\r\n"
        )
        async with await worker.connect() as client:
            await client.write(head.encode())
            for _ in range(0, size, 50_000):
                await client.write(b" " * 50_000)
            (await client.reply()).fault(429 if way == "rpc" else 413)
            assert await client.reader.read() == b""
        await until(lambda: len(worker.app.limiter.connections) == 1)


@on_uvloop
async def test_refused_body_is_recorded() -> None:
    async with bounded() as harness, contextlib.AsyncExitStack() as stack:
        worker = harness.worker
        await begin(worker, stack, "length", "other 0")
        await until(lambda: arriving(worker) == LARGE)
        refused = await begin(worker, stack, "length", "other 0")
        reply = await refused.reply()
        reply.fault(429)
        (record,) = [each for each in worker.app.recorder.waiting if each.id == reply.headers["x-request-id"]]
        assert record.status == 429
        assert "bodies" in record.error
        assert record.took_s < 1


@on_uvloop
async def test_worker_refuses_more_bodies_than_it_has_room_for() -> None:
    async with bounded() as harness, contextlib.AsyncExitStack() as stack:
        worker = harness.worker
        for number in range(2):
            await begin(worker, stack, "length", f"other {number}")
        await until(lambda: arriving(worker) == 2 * LARGE)
        refused = await begin(worker, stack, "length", "other 7")
        reply = await refused.reply()
        reply.fault(503)
        assert "retry-after" in reply.headers
        # A body that arrives whole needs no room.
        assert (await worker.send(rpc("eth_chainId"))).status == 200


@on_uvloop
async def test_bodies_of_clients_behind_one_proxy_count_for_each_of_them() -> None:
    server = {"max_held_bytes": BOUND, "trusted_proxies": ["127.0.0.1/32"]}
    async with rpc_harness(1, server=server) as harness, contextlib.AsyncExitStack() as stack:
        worker = harness.worker
        for number in range(3):
            client = await stack.enter_async_context(await worker.connect())
            head = f"POST /v1/dashboard/sign-in HTTP/1.1\r\nHost: p\r\nX-Forwarded-For: 203.0.113.{number}\r\n"
            await client.write(head.encode() + b"Content-Type: application/json\r\nContent-Length: 9\r\n\r\n ")
        clients = {f"203.0.113.{number}" for number in range(3)}
        await until(lambda: {getattr(each, "client", "") for each in worker.app.limiter.connections} == clients)
        await asyncio.sleep(0)


@on_uvloop
async def test_body_that_waits_for_other_clients_turns_is_not_late() -> None:
    """It has arrived: only we have not read it yet."""
    async with rpc_harness(1, server={"body_timeout_s": 1}) as harness:
        worker, turns, ends = harness.worker, harness.worker.app.limiter.turns, time.monotonic() + 3

        def busy(client: str) -> bool:
            time.sleep(0.001)
            if time.monotonic() < ends:
                turns.add(client, partial(busy, client))
            return True

        for number in range(100):
            turns.add(f"busy {number}", partial(busy, f"busy {number}"))
        body = rpc("eth_chainId").ljust(400_000)
        head = f"POST /v1/rpc/{LIVE} HTTP/1.1\r\nHost: p\r\nX-API-Key: {worker.keys['main']}\r\n"
        async with await worker.connect() as client:
            await client.write(head.encode() + b"Transfer-Encoding: chunked\r\n\r\n")
            await client.write(b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body))
            assert (await client.reply()).status == 200
        assert time.monotonic() > ends - 1
