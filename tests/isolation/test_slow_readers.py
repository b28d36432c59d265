"""Clients that ask for large replies and hardly read them hold no upstream connection that other clients need."""

from __future__ import annotations

import asyncio
import socket
from contextlib import AsyncExitStack, suppress

import pytest
from prometheus_client import REGISTRY

from tests.http_client import rpc
from tests.service import until
from tests.web.worker import NO_CACHE, Worker, on_uvloop, running_worker
from tests.wire.upstreams import Exchange, Script, Scripted, huge, stub

MB = 1 << 20
REPLY = 30 * MB
READERS = 80
SLOW_METHOD = "eth_estimateGas"


def mostly_small(*, has_length: bool, took_s: float = 0.0) -> Script:
    """Huge replies to one method, small ones to all others after this time."""
    large, small = huge(REPLY, has_length=has_length), stub()

    async def act(exchange: Exchange) -> None:
        is_slow = (await exchange.call())["method"] == SLOW_METHOD
        await asyncio.sleep(0.0 if is_slow else took_s)
        await (large if is_slow else small)(exchange)

    return act


async def slow_reader(worker: Worker, number: int, *, key: str = "slow") -> socket.socket:
    """A client that asks for a large reply. It has a small receive buffer, so that little of the reply is in the kernel."""
    loop = asyncio.get_running_loop()
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.setblocking(False)
    await loop.sock_connect(client, ("127.0.0.1", worker.port))
    await loop.sock_sendall(client, worker.post(rpc(SLOW_METHOD, [number]), key=key))
    return client


def held_replies_shown() -> float | None:
    return REGISTRY.get_sample_value("penstock_held_bytes", {"kind": "replies"})


def unread(worker: Worker) -> list[int]:
    """Bytes of replies in our memory, by connection."""
    transports = [each.transport for each in worker.app.limiter.connections]
    return [each.get_write_buffer_size() for each in transports if each is not None]


@pytest.mark.parametrize("has_length", [True, False], ids=["length", "chunked"])
@on_uvloop
async def test_slow_readers_take_no_upstream_from_others(has_length: bool) -> None:
    held_bytes = 32 * MB
    async with AsyncExitStack() as stack:
        upstream = await stack.enter_async_context(Scripted(mostly_small(has_length=has_length)))
        worker = await stack.enter_async_context(
            running_worker(upstream.url, server={"max_held_bytes": held_bytes}, **NO_CACHE)
        )
        worker.add_key("slow")
        readers = [await slow_reader(worker, number) for number in range(READERS)]
        for each in readers:
            stack.callback(each.close)
        await until(lambda: sum(size > 0 for size in unread(worker)) > 50)
        most = 0

        async def make_calls(number: int) -> None:
            nonlocal most
            async with await worker.connect() as client:
                for round_ in range(40):
                    reply = await client.send(worker.post(rpc("eth_getBalance", [f"{number} {round_}"])))
                    assert reply.status == 200, (number, round_, reply.body)
                    most = max(most, sum(unread(worker)))
                    await asyncio.sleep(0.1)

        async with asyncio.TaskGroup() as group:
            for number in range(4):
                group.create_task(make_calls(number))
        assert most < held_bytes + READERS * MB
        assert worker.app.front.held.total <= held_bytes


@pytest.mark.parametrize("has_length", [True, False], ids=["length", "chunked"])
@pytest.mark.parametrize(("connections", "accounts"), [(1, 6), (8, 20), (40, 84), (40, 1)])
@on_uvloop
async def test_slow_readers_fail_no_call_of_another_account(connections: int, accounts: int, has_length: bool) -> None:
    """They hold all connections of the upstream, also those that each account leaves to others, and come back when they are
    disconnected. One account holds all but the one that it leaves, which is too few for the calls of the other."""

    async with AsyncExitStack() as stack:
        script = mostly_small(has_length=has_length, took_s=0.05 if accounts == 1 else 0.0)
        upstream = await stack.enter_async_context(Scripted(script))
        networks = {"ethereum/mainnet": [{"url": upstream.url, "connections": connections}]}
        worker = await stack.enter_async_context(
            running_worker(networks, server={"max_held_bytes": 64 * MB}, **NO_CACHE)
        )
        group = await stack.enter_async_context(asyncio.TaskGroup())

        async def read_slowly(number: int) -> None:
            loop = asyncio.get_running_loop()
            while True:
                client = await slow_reader(worker, number, key=f"slow {number % accounts}")
                with client, suppress(ConnectionError):
                    data = b"-"
                    while data:
                        data = await loop.sock_recv(client, 3072)
                        await asyncio.sleep(1.0)
                await asyncio.sleep(0.02)

        for number in range(accounts):
            worker.add_key(f"slow {number}")
        hostile = [group.create_task(read_slowly(number)) for number in range(2 * connections + 4)]
        await until(lambda: sum(size > 0 for size in unread(worker)) >= connections - (accounts == 1))

        async def make_calls(number: int) -> None:
            async with await worker.connect() as client:
                for round_ in range(40):
                    reply = await client.send(worker.post(rpc("eth_getBalance", [f"{number} {round_}"])))
                    assert reply.status == 200, (number, round_, reply.body)
                    await asyncio.sleep(0.05)

        async with asyncio.TaskGroup() as calls:
            for number in range(8):
                calls.create_task(make_calls(number))
        for each in hostile:
            each.cancel()


@on_uvloop
async def test_reply_that_is_held_for_its_reader_arrives_whole() -> None:
    async with (
        Scripted(mostly_small(has_length=True)) as upstream,
        running_worker({"ethereum/mainnet": [{"url": upstream.url, "connections": 1}]}, **NO_CACHE) as worker,
    ):
        worker.add_key("slow")
        client = await slow_reader(worker, 1)
        await until(lambda: sum(unread(worker)) > 0)

        async def is_answered() -> bool:
            return (await worker.send(rpc("eth_getBalance", ["other"]))).status == 200

        await until(is_answered)
        assert worker.app.front.held.total > REPLY // 2
        assert held_replies_shown() == worker.app.front.held.total
        loop, got = asyncio.get_running_loop(), 0
        while got < REPLY:
            part = await loop.sock_recv(client, MB)
            assert part
            got += len(part)
        await until(lambda: not worker.app.front.held.total)
        assert held_replies_shown() == 0
        client.close()


@on_uvloop
async def test_reader_below_the_minimum_rate_is_dropped() -> None:
    settings = {"write_timeout_s": 1.0, "min_read_rate": 100_000}
    async with Scripted(huge(REPLY)) as upstream, running_worker(upstream.url, server=settings, **NO_CACHE) as worker:
        worker.add_key("slow")
        client = await slow_reader(worker, 1)

        async def is_dropped() -> bool:
            await asyncio.get_running_loop().sock_recv(client, 300)
            return not worker.app.limiter.connections

        await until(is_dropped, every_s=0.1)
        client.close()
