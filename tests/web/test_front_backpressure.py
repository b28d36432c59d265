"""Clients that do not read, and upstreams that send too much: unread data stays in the kernels and not in our memory."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path
from typing import Any

import pytest

from tests.http_client import Closed, Reply, rpc
from tests.service import until
from tests.web.worker import LIVE, NO_CACHE, Worker, on_uvloop, running_worker
from tests.wire import upstreams
from tests.wire.upstreams import Exchange, Scripted, huge, stub

CALL = rpc("net_listening", [1])
GOOD = b'{"jsonrpc":"2.0","id":1,"result":{"method":"net_listening","params":[1]}}'
WAYS = pytest.mark.parametrize("cache", [{}, NO_CACHE], ids=["cached", "short"])


def is_good(reply: Reply) -> bool:
    return (reply.status, reply.body) == (200, GOOD)


MB = 1 << 20


async def slow_client(worker: Worker) -> socket.socket:
    """A client with a small receive buffer, so that unread data shows up in the service."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.setblocking(False)
    await asyncio.get_running_loop().sock_connect(client, ("127.0.0.1", worker.port))
    return client


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


async def settled(upstream: Scripted) -> int:
    """The bytes that the upstream has sent, once it sends no more."""
    sent = -1
    while sent != upstream.sent:
        sent = upstream.sent
        await asyncio.sleep(0.1)
    return sent


@WAYS
@pytest.mark.parametrize("has_length", [True, False])
@on_uvloop
async def test_large_reply_to_a_client_that_does_not_read_stays_in_the_upstream(
    cache: dict[str, Any], has_length: bool
) -> None:
    size = 100 * MB if cache and has_length else 30 * MB
    async with Scripted(huge(size, has_length=has_length)) as upstream, running_worker(upstream.url, **cache) as worker:
        client = await slow_client(worker)
        loop = asyncio.get_running_loop()
        before = resident_bytes()
        await loop.sock_sendall(client, worker.post(CALL))
        assert 0 < await settled(upstream) < 16 * MB
        assert resident_bytes() - before < 20 * MB
        got = most = 0
        while got < size:
            part = await loop.sock_recv(client, MB)
            assert part
            got += len(part)
            most = max(most, resident_bytes())
        assert most - before < 20 * MB
        client.close()
        upstream.script = stub()
        assert is_good(await worker.send(CALL))


@on_uvloop
async def test_reply_that_starts_while_its_client_is_stalled_waits() -> None:
    """The client stalled during an earlier reply; pause_writing is not called again."""
    gate = asyncio.Event()
    script = upstreams.held(gate, huge(60 * MB))
    async with (
        Scripted(script) as upstream,
        running_worker(upstream.url, **NO_CACHE) as worker,
        await worker.connect() as client,
    ):
        await client.write(worker.post(CALL))
        await until(lambda: upstream.bodies)
        front = worker.only_connection
        front.pause_writing()
        gate.set()
        assert await settled(upstream) < 16 * MB
        front.resume_writing()
        assert len((await client.reply()).body) > 59 * MB


@on_uvloop
async def test_large_replies_to_many_slow_clients_stay_in_the_upstream() -> None:
    async with Scripted(huge(20 * MB)) as upstream, running_worker(upstream.url, **NO_CACHE) as worker:
        before = resident_bytes()
        clients = [await slow_client(worker) for _ in range(10)]
        for client in clients:
            await asyncio.get_running_loop().sock_sendall(client, worker.post(CALL))
        await settled(upstream)
        assert resident_bytes() - before < 30 * MB
        for client in clients:
            client.close()
        await until(lambda: not upstream.alive)


@WAYS
@on_uvloop
async def test_connection_serves_the_next_call_after_a_slow_end_of_a_large_reply(
    cache: dict[str, Any],
) -> None:
    """The client stops reading at the end: its upstream connection is back in the pool and must not be paused."""
    block = {"connections": 1}
    for size in (6 * MB, 6 * MB + 70_000, 7 * MB):
        async with (
            Scripted(huge(size)) as upstream,
            running_worker({LIVE: [{"url": upstream.url, **block}]}, **cache) as worker,
        ):
            client = await slow_client(worker)
            loop = asyncio.get_running_loop()
            await loop.sock_sendall(client, worker.post(CALL))
            got = 0
            (pool,) = worker.app.networks.routes[LIVE].upstreams
            while upstream.sent < size // 2 or not pool.idle:
                got += len(await loop.sock_recv(client, 16_384))
                await asyncio.sleep(0)
            upstream.script = stub()
            async with asyncio.timeout(30):
                assert is_good(await worker.send(CALL))
            while got < size:
                got += len(await loop.sock_recv(client, MB))
            client.close()
            assert upstream.connections == 1


@WAYS
@on_uvloop
async def test_client_that_leaves_in_the_middle_of_a_large_reply_closes_its_upstream_connection(
    cache: dict[str, Any],
) -> None:
    for method in ("net_listening", "eth_getFilterLogs", "eth_sendRawTransaction"):
        async with (
            Scripted(stub({"eth_newBlockFilter": "0x1"})) as upstream,
            running_worker(upstream.url, **cache) as worker,
        ):
            made = (await worker.send(rpc("eth_newBlockFilter"))).json["result"]
            upstream.script = huge(100 * MB)
            client = await slow_client(worker)
            await asyncio.get_running_loop().sock_sendall(client, worker.post(rpc(method, [made])))
            assert 0 < await settled(upstream) < 20 * MB
            client.close()
            await until(lambda: not upstream.alive)
            upstream.script = stub()
            assert is_good(await worker.send(CALL))


@pytest.mark.parametrize("has_length", [True, False])
@on_uvloop
async def test_half_a_large_reply_aborts_the_clients_connection(has_length: bool) -> None:
    script = huge(4 * MB, has_length=has_length, closes_early=True)
    async with Scripted(script) as upstream, running_worker(upstream.url) as worker:
        with pytest.raises(Closed):
            await worker.send(CALL)
        upstream.script = stub()
        assert is_good(await worker.send(CALL))


@on_uvloop
async def test_large_reply_that_stalls_in_the_middle_aborts_the_clients_connection() -> None:
    async def act(exchange: Exchange) -> None:
        start = upstreams.answer(await exchange.call(), result="")[:-2]
        await exchange.send(upstreams.http(length=MB), start, b"a" * 200_000)
        await asyncio.sleep(60)

    async with Scripted(act) as upstream, running_worker(upstream.url, rpc={"call_timeout_s": 0.3}) as worker:
        with pytest.raises(Closed):
            await worker.send(CALL)
        await until(lambda: not upstream.alive)
        upstream.script = stub()
        assert is_good(await worker.send(CALL))


@on_uvloop
async def test_slow_client_is_not_mistaken_for_a_stalled_upstream() -> None:
    size, timeout_s = 12 * MB, 2.0
    settings = {"call_timeout_s": timeout_s}
    async with Scripted(huge(size)) as upstream, running_worker(upstream.url, rpc=settings) as worker:
        client = await slow_client(worker)
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(client, worker.post(CALL))
        await settled(upstream)
        await asyncio.sleep(1.25 * timeout_s)
        got = 0
        while got < size:
            part = await loop.sock_recv(client, MB)
            assert part
            got += len(part)
        client.close()


@WAYS
@on_uvloop
async def test_pipelined_requests_of_a_client_that_does_not_read_are_not_served(cache: dict[str, Any]) -> None:
    size = 50_000
    script = stub({"net_listening": "a" * size})
    async with Scripted(script) as upstream, running_worker(upstream.url, **cache) as worker:
        client = await slow_client(worker)
        loop = asyncio.get_running_loop()
        before = resident_bytes()
        count = 600
        sending = loop.create_task(loop.sock_sendall(client, worker.post(CALL) * count))
        served = -1
        while served != len(upstream.bodies):
            served = len(upstream.bodies)
            await asyncio.sleep(0.1)
        assert 0 < served < 200, "10 MB of replies are waiting"
        assert resident_bytes() - before < 20 * MB
        got = 0
        whole = len((await worker.send(CALL)).body)
        while got < count * whole:
            part = await loop.sock_recv(client, MB)
            assert part
            got += len(part)
        await sending
        assert len(upstream.bodies) == count + 1
        client.close()


@WAYS
@on_uvloop
async def test_stalled_client_is_served_when_it_reads_again(cache: dict[str, Any]) -> None:
    async with (
        Scripted() as upstream,
        running_worker(upstream.url, **cache) as worker,
        await worker.connect() as client,
    ):
        data = worker.post(CALL)
        for cuts in ([], [], [20], [len(data) - 5], [20, len(data) - 5]):
            assert is_good(await client.send(data))
            front = worker.only_connection
            served = len(upstream.bodies)
            if cuts:
                # The request started before the stall.
                await client.write(data[: cuts[0]])
                await asyncio.sleep(0.01)
            front.pause_writing()
            for start, end in zip(cuts or [0], [*cuts[1:], len(data)], strict=True):
                await client.write(data[start:end])
                await asyncio.sleep(0.01)
            assert len(upstream.bodies) == served
            front.resume_writing()
            assert is_good(await client.reply())


@on_uvloop
async def test_client_that_sends_without_end_is_paused() -> None:
    """While its first request is under way, further bytes stay in the kernels."""
    gate = asyncio.Event()
    async with Scripted(upstreams.held(gate, stub())) as upstream, running_worker(upstream.url) as worker:
        client = await slow_client(worker)
        data = worker.post(CALL) * 5000
        sent = quiet = 0
        while sent < 40 * MB and quiet < 5:
            try:
                sent += client.send(data[sent % len(data) :])
                quiet = 0
            except BlockingIOError:
                await asyncio.sleep(0.05)
                quiet += 1
        assert len(upstream.bodies) == 1
        assert sent < 20 * MB
        client.close()
        gate.set()
