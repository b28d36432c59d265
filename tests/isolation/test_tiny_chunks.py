"""Bodies in tiny chunks, on requests that aiohttp serves: parsed a share at a time, and ended where none is expected."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from proxy.web.front.handler_connection import (
    MAX_CHUNK_OVERHEAD,
    MAX_UNWANTED_BYTES,
    PARSE_BYTES,
    PARSE_LINES,
    HandlerConnection,
)
from tests.http_client import Closed, rpc
from tests.isolation.attack import beside, steady_load
from tests.rpc_harness import rpc_harness
from tests.service import until
from tests.web.worker import LIVE, on_uvloop, running_worker

CALLS = 200
CHUNK = b"1\r\nx\r\n"
# The smallest chunks in which a large body may come.
CHUNK_BYTES = 24
LAST = b"0\r\n\r\n"
CHUNKED = b"Host: penstock\r\nTransfer-Encoding: chunked\r\n\r\n"
HEALTH = b"GET /healthz HTTP/1.1\r\n" + CHUNKED


@on_uvloop
async def test_tiny_chunks_of_an_unexpected_body_end_their_connection_and_nobody_elses() -> None:
    async with no_errors(), rpc_harness(1) as harness:
        ended = 0

        async def attack() -> None:
            nonlocal ended
            async with await harness.worker.connect() as client:
                assert (await client.send(HEALTH)).status == 200
                sent = 0
                try:
                    while sent < 10 * MAX_UNWANTED_BYTES:
                        await client.write(CHUNK * 10_000)
                        sent += len(CHUNK) * 10_000
                    assert await client.is_closed()
                except Closed:
                    pass
                ended += 1

        async with beside(attack, at_once=3):
            await steady_load(harness, CALLS)
            await until(lambda: ended)


@on_uvloop
async def test_large_call_in_tiny_chunks_is_refused_and_delays_no_other() -> None:
    async with no_errors(), rpc_harness(1) as harness:
        harness.worker.add_key("attacker")
        head = f"POST /v1/rpc/{LIVE} HTTP/1.1\r\nX-API-Key: {harness.worker.keys['attacker']}\r\n".encode()
        refused = 0

        async def attack() -> None:
            nonlocal refused
            async with await harness.worker.connect() as client:
                async with asyncio.TaskGroup() as group:
                    group.create_task(_send(client.writer, head + CHUNKED + CHUNK * 100_000, 0))
                    (await client.reply()).fault(400)
                refused += 1

        async with beside(attack, at_once=3):
            await steady_load(harness, CALLS)
            await until(lambda: refused)


@on_uvloop
async def test_small_unexpected_body_is_skipped_and_the_connection_kept() -> None:
    async with running_worker("http://127.0.0.1:1/") as worker, await worker.connect() as client:
        for chunks in (0, 1, 1000):
            assert (await client.send(HEALTH + CHUNK * chunks + LAST)).status == 200


@pytest.mark.parametrize("cut", [0, 1000])
@on_uvloop
async def test_body_in_many_chunks_is_read_whole(cut: int) -> None:
    async with rpc_harness(1) as harness, await harness.worker.connect() as client:
        # Longer than one share of a turn, and longer than one read of the transport.
        call = rpc("eth_call", [{"to": "0x" + "11" * 20, "data": "0x" + "ab" * 80_000}, "latest"])
        parts = [call[at : at + CHUNK_BYTES] for at in range(0, len(call), CHUNK_BYTES)]
        body = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts) + LAST
        head = f"POST /v1/rpc/{LIVE} HTTP/1.1\r\nX-API-Key: {harness.worker.keys['main']}\r\n".encode()
        request = head + b"Content-Type: application/json\r\n" + CHUNKED + body
        assert len(request) > 10 * PARSE_BYTES
        for _ in range(2):
            async with asyncio.TaskGroup() as group:
                group.create_task(_send(client.writer, request, cut))
                reply = await client.reply()
            assert "result" in reply.json


@asynccontextmanager
async def no_errors() -> AsyncIterator[None]:
    """A client that is disconnected for its fault is no error of ours."""
    found: list[str] = []

    class Errors(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            found.append(self.format(record))

    handler = Errors(logging.ERROR)
    logging.getLogger().addHandler(handler)
    try:
        yield
    finally:
        logging.getLogger().removeHandler(handler)
    assert not found, found[0]


async def _send(writer: asyncio.StreamWriter, data: bytes, cut: int) -> None:
    for at in range(0, len(data), cut or len(data)):
        writer.write(data[at : at + (cut or len(data))])
        with contextlib.suppress(ConnectionError):
            await writer.drain()


@on_uvloop
async def test_one_turn_parses_a_bounded_number_of_bytes() -> None:
    async with running_worker("http://127.0.0.1:1/") as worker, await worker.connect() as client:
        assert (await client.send(HEALTH + LAST)).status == 200
        connection = worker.only_connection
        assert isinstance(connection, HandlerConnection)
        get = b"GET /healthz HTTP/1.1\r\nHost: penstock\r\n\r\n"
        requests = 20 * PARSE_BYTES // len(get)
        connection.data_received(get * requests)
        assert connection._request_count <= 1 + PARSE_BYTES // len(get)
        for _ in range(requests):
            assert (await client.reply()).status == 200


@on_uvloop
async def test_one_turn_parses_few_chunks() -> None:
    async with running_worker("http://127.0.0.1:1/") as worker, await worker.connect() as client:
        post = f"POST /v1/rpc/{LIVE} HTTP/1.1\r\nX-API-Key: {worker.keys['main']}\r\n".encode()
        await client.write(post + CHUNKED)
        await until(lambda: isinstance(worker.only_connection, HandlerConnection))
        connection = worker.only_connection
        assert isinstance(connection, HandlerConnection)
        await until(lambda: connection.body_being_read is not None)
        body = connection.body_being_read
        assert body is not None
        chunks = MAX_CHUNK_OVERHEAD // len(CHUNK) // 2
        connection.data_received(CHUNK * chunks)
        parsed = [body.total_bytes]
        while parsed[-1] < chunks:
            await asyncio.sleep(0)
            parsed.append(body.total_bytes)
        assert max(after - before for before, after in itertools.pairwise(parsed)) <= PARSE_LINES


@on_uvloop
async def test_client_that_leaves_at_once_leaves_no_traceback(caplog: pytest.LogCaptureFixture) -> None:
    async with running_worker("http://127.0.0.1:1/") as worker:
        for _ in range(20):
            async with await worker.connect() as client:
                client.writer.write(b"GET /healthz HTTP/1.1\r\nHost: penstock\r\n\r\n")
                client.writer.transport.abort()
        front = await worker.connect()
        await until(lambda: len(worker.app.limiter.connections) == 1)
        # The connection is lost in the turn in which it is handed over, or in which its request is parsed.
        worker.only_connection.data_received(b"GET /healthz HTTP/1.1\r\nHost: penstock\r\n\r\n")
        await until(lambda: isinstance(worker.only_connection, HandlerConnection))
        handler = worker.only_connection
        assert isinstance(handler, HandlerConnection)
        handler.connection_lost(None)
        await asyncio.sleep(0.01)
        await front.close()
    assert "AssertionError" not in caplog.text
