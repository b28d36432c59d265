"""Deadlines and limits of client connections, on a service with small limits."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp import web

from proxy.core import access
from tests import service as service_room
from tests.flows.upstream import Upstream, reply
from tests.http_client import Closed, HttpClient, Reply, fresh_call, post, request, rpc, send_once
from tests.service import Service, owner_of, until

# A deadline of one second, the sweep that enforces it, and slack for a busy machine.
DEADLINE_S = 6.0
CONNECTIONS = 40
FAILURES = 20
MAX_HEAD = 4096
REQUESTS = 200
READ = rpc("eth_chainId")
SMALL = {
    "PENSTOCK_SERVER__HEADER_TIMEOUT_S": "1",
    "PENSTOCK_SERVER__BODY_TIMEOUT_S": "1",
    "PENSTOCK_SERVER__WRITE_TIMEOUT_S": "1",
    "PENSTOCK_SERVER__KEEPALIVE_S": "2",
    "PENSTOCK_SERVER__KEEPALIVE_REQUESTS": str(REQUESTS),
    "PENSTOCK_SERVER__MAX_HEADER_BYTES": str(MAX_HEAD),
    "PENSTOCK_SERVER__CONNECTIONS_PER_ADDRESS": str(CONNECTIONS),
    "PENSTOCK_KEYS__AUTH_FAILURES_PER_MINUTE": str(FAILURES),
}


@pytest.fixture(scope="module")
async def front(tmp_path_factory: pytest.TempPathFactory, upstream_server: Upstream) -> AsyncIterator[Service]:
    """One worker, so that its counts are those of the service."""
    words = ("--workers", "1", "--upstream", f"ethereum/sepolia={upstream_server.url}")
    running = await service_room.start(tmp_path_factory.mktemp("front"), *words, env=SMALL)
    yield running
    await service_room.stop(running)


@pytest.fixture
def key(front: Service) -> str:
    return front.keys["enterprise"]


async def trickle(client: HttpClient, data: bytes, *, every_s: float) -> Reply:
    """Send bytes slowly until the server replies. Raises Closed if it closes the connection."""
    answer = asyncio.ensure_future(client.reply(within_s=DEADLINE_S))  # noqa: TID251 - awaited in the end
    try:
        for byte in data:
            if answer.done():
                break
            await client.write(bytes([byte]))
            await asyncio.sleep(every_s)
    except Closed:
        pass
    return await answer


async def test_slow_head_gets_408_after_its_deadline(front: Service, key: str) -> None:
    async with await HttpClient.open(front.port) as client:
        reply = await trickle(client, post(READ, key=key), every_s=0.2)
        assert "head" in reply.fault(408)["message"]
        assert await client.is_closed(within_s=DEADLINE_S)


async def test_slow_head_of_a_later_request_gets_408_too(front: Service, key: str) -> None:
    async with await HttpClient.open(front.port) as client:
        assert (await client.call(key=key)).status == 200
        (await trickle(client, post(READ, key=key), every_s=0.2)).fault(408)


async def test_slow_body_gets_408_after_its_deadline(front: Service, key: str) -> None:
    data = post(READ, key=key)
    async with await HttpClient.open(front.port) as client:
        await client.write(data[: -len(READ)])
        reply = await trickle(client, READ, every_s=0.2)
        assert "body" in reply.fault(408)["message"]
        assert reply.headers["x-ratelimit-limit"]
        assert reply.closes


async def test_body_that_waits_for_its_units_is_not_late(front: Service) -> None:
    """3.6 MB take a Free account longer to pay than a body may take to arrive."""
    body = b'{"unknown": 1' + b" " * 3_600_000 + b"}"
    account = await front.new_account("free")
    made = await front.new_key(account["id"])
    data = request("POST", "/v1/webhooks", body, key=made["key"])
    async with await HttpClient.open(front.port) as client:
        await client.write(data[:-1])
        await asyncio.sleep(1.5)
        await client.write(data[-1:])
        assert "bytes besides lists" in (await client.reply(within_s=DEADLINE_S)).fault(400)["message"]


async def test_request_without_a_key_is_refused_before_its_body_is_read(front: Service) -> None:
    """No body is read for an unknown client."""
    data = post(READ, key=access.mint("live", bytes(32)))
    async with await HttpClient.open(front.port) as client:
        await client.write(data[: -len(READ)])
        (await client.reply(within_s=DEADLINE_S)).fault(401)


async def test_slow_connections_do_not_delay_others(front: Service, key: str) -> None:
    slow = [await HttpClient.open(front.port) for _ in range(CONNECTIONS - 5)]
    for client in slow:
        await client.write(b"POST /v1/rpc/dev/mainnet HTTP/1.1\r\nHost: x\r\nX-")
    assert (await send_once(front, post(READ, key=key))).status == 200
    for client in slow:
        assert await client.is_closed(within_s=DEADLINE_S)
        await client.close()


async def test_idle_connection_is_closed_without_a_reply(front: Service, key: str) -> None:
    async with await HttpClient.open(front.port) as client:
        assert (await client.call(key=key)).status == 200
        async with asyncio.timeout(DEADLINE_S):
            assert await client.reader.read() == b""


async def test_connection_that_never_sends_a_byte_is_closed(front: Service) -> None:
    async with await HttpClient.open(front.port) as client:
        assert await client.is_closed(within_s=DEADLINE_S)


async def test_connection_is_closed_after_its_last_allowed_request(front: Service, key: str) -> None:
    async with await HttpClient.open(front.port) as client:
        for index in range(1, REQUESTS + 1):
            reply = await client.call("eth_chainId", key=key)
            assert reply.status == 200
            assert reply.closes == (index == REQUESTS), index
        assert await client.is_closed(within_s=DEADLINE_S)


async def test_connections_of_one_address_are_limited(front: Service, key: str) -> None:
    clients = [await HttpClient.open(front.port) for _ in range(CONNECTIONS)]
    async with await HttpClient.open(front.port) as one_more:
        reply = await one_more.reply(within_s=DEADLINE_S)
        assert "connections" in reply.fault(429)["message"]
        assert int(reply.headers["retry-after"]) >= 1
        assert await one_more.is_closed(within_s=DEADLINE_S)
    for client in clients[:10]:
        assert (await client.call(key=key)).status == 200
    for client in clients:
        await client.close()
    assert (await until(lambda: _status(front, key))) == 200


async def _status(front: Service, key: str) -> int:
    try:
        reply = await send_once(front, post(READ, key=key))
    except Closed:
        return 0
    return reply.status if reply.status == 200 else 0


async def test_head_over_its_limit_is_refused(front: Service, key: str) -> None:
    wide = {f"X-{index}": "a" * 500 for index in range(10)}
    reply = await send_once(front, post(READ, key=key, **wide))
    assert reply.status in (400, 431)
    assert str(MAX_HEAD) in reply.fault(reply.status)["message"]
    narrow = {f"X-{index}": "a" * 300 for index in range(10)}
    assert (await send_once(front, post(READ, key=key, **narrow))).status == 200


async def test_request_target_counts_towards_the_head(front: Service, key: str) -> None:
    reply = await send_once(front, request("GET", "/" + "a" * (MAX_HEAD + 1), key=key))
    assert reply.status in (400, 414, 431)
    reply.fault(reply.status)


async def test_client_that_does_not_read_its_reply_is_disconnected(
    front: Service, upstream: Upstream, key: str
) -> None:
    async def large(call: dict[str, Any]) -> web.StreamResponse:
        return reply(call, result="0x" + "00" * 8_000_000)

    upstream.act = large
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(client, ("127.0.0.1", front.port))
    port, pids = client.getsockname()[1], front.worker_pids()
    await until(lambda: owner_of(front.port, port, pids))
    await loop.sock_sendall(client, post(fresh_call(), key=key, network="ethereum/sepolia"))
    await until(lambda: owner_of(front.port, port, pids) is None, within_s=DEADLINE_S * 2)
    client.close()
    assert (await send_once(front, post(READ, key=key))).status == 200


async def test_slow_reader_that_makes_progress_gets_all_of_its_reply(
    front: Service, upstream: Upstream, key: str
) -> None:
    """The deadline is for no progress, not for the whole reply."""

    async def large(call: dict[str, Any]) -> web.StreamResponse:
        return reply(call, result="0x" + "00" * 4_000_000)

    upstream.act = large
    async with await HttpClient.open(front.port) as client:
        await client.write(post(fresh_call(), key=key, network="ethereum/sepolia"))
        got = b""
        for _ in range(30):
            got += await client.reader.read(60_000)
            await asyncio.sleep(0.1)
        async with asyncio.timeout(DEADLINE_S):
            while not got.endswith(b'"}'):
                part = await client.reader.read(1 << 20)
                assert part, f"ended after {len(got)} bytes"
                got += part


async def test_guessing_keys_is_limited_by_address_and_valid_keys_still_work(front: Service, key: str) -> None:
    guess = post(READ, key=access.mint("live", bytes(32)))
    async with await HttpClient.open(front.port) as client:
        replies = [await client.send(guess) for _ in range(3 * FAILURES)]
        assert {reply.status for reply in replies} == {401, 429}
        assert "authentications" in replies[-1].fault(429)["message"]
        assert 1 <= int(replies[-1].headers["retry-after"]) <= 60
        assert (await client.call(key=key)).status == 200
        (await client.send(post(READ, key=None))).fault(429)
        (await client.send(post(READ, key=key[:-1] + "!"))).fault(429)
