"""Requests that aiohttp accepts and HTTP does not."""

from __future__ import annotations

import asyncio
import gc
import socket
import struct
from typing import Any

import pytest

from tests.http_client import Reply, rpc
from tests.sockets import handshake, refused
from tests.web.worker import Worker, on_uvloop, running_worker

NOWHERE = "http://127.0.0.1:1/"


async def get(worker: Worker, *, line: str = "GET /healthz HTTP/1.1", host: str = "penstock", more: str = "") -> Reply:
    async with await worker.connect() as client:
        return await client.send(f"{line}\r\nHost: {host}\r\n{more}\r\n".encode())


@pytest.mark.parametrize("host", ["a", "a:80", "[::1]:80", "xn--a.example", "10.0.0.1", ""])
@on_uvloop
async def test_host_that_is_one_is_accepted(host: str) -> None:
    async with running_worker(NOWHERE) as worker:
        assert (await get(worker, host=host)).status == 200


@pytest.mark.parametrize("host", ["a b/../{}", "u@a", "a/b", "a:b", "[::1", "a?b"])
@on_uvloop
async def test_host_that_is_none_is_refused(host: str) -> None:
    async with running_worker(NOWHERE) as worker:
        (await get(worker, host=host)).fault(400)
        call = worker.post(rpc("eth_chainId")).replace(b"Host: penstock", b"Host: " + host.encode())
        assert host.encode() in call
        async with await worker.connect() as client:
            (await client.send(call)).fault(400)


@on_uvloop
async def test_later_version_is_not_supported_and_the_reply_is_in_ours() -> None:
    async with running_worker(NOWHERE) as worker:
        (await get(worker, line="GET /healthz HTTP/2.0")).fault(505)


@on_uvloop
async def test_older_version_is_refused_and_the_reply_is_in_ours() -> None:
    async with running_worker(NOWHERE) as worker, await worker.connect() as client:
        await client.write(b"GET /healthz HTTP/0.9\r\nHost: penstock\r\n\r\n")
        assert (await client.reader.readline()).startswith(b"HTTP/1.1 400 ")


@on_uvloop
async def test_other_transfer_codings_are_not_implemented() -> None:
    async with running_worker(NOWHERE) as worker:
        (await get(worker, more="Transfer-Encoding: gzip, chunked\r\n")).fault(501)


@on_uvloop
async def test_fragment_in_the_target_is_refused() -> None:
    async with running_worker(NOWHERE) as worker:
        (await get(worker, line="GET /healthz#x HTTP/1.1")).fault(400)


@on_uvloop
async def test_two_different_keys_are_refused() -> None:
    async with running_worker(NOWHERE) as worker:
        worker.add_key("other")
        keys = [f"X-API-Key: {worker.keys[name]}\r\n" for name in ("main", "other", "main")]
        path = "GET /v1/wallets/0x HTTP/1.1"
        assert "two different" in (await get(worker, line=path, more=keys[0] + keys[1])).fault(400)["message"]
        assert (await get(worker, line=path, more=keys[0] + keys[2])).status != 401
        bearers = [each.replace("X-API-Key:", "Authorization: Bearer") for each in keys]
        (await get(worker, line=path, more=bearers[0] + bearers[1])).fault(400)
        (await get(worker, line=path, more=keys[0] + bearers[1])).fault(400)
        assert (await get(worker, line=path, more=bearers[0] + bearers[2])).status != 401
        call = worker.post(rpc("eth_chainId"), key=None).replace(
            b"\r\n\r\n", f"\r\n{bearers[0]}{bearers[1]}\r\n".encode()
        )
        async with await worker.connect() as client:
            (await client.send(call)).fault(400)


@on_uvloop
async def test_two_different_keys_of_a_socket_are_refused() -> None:
    async with running_worker(NOWHERE) as worker:
        key = worker.keys["main"].encode()
        for other, status in ((b"svc_live_other", 400), (key, 101)):
            asked = handshake(worker).replace(b"apiKey=" + key, b"apiKey=%b&apiKey=%b" % (key, other))
            assert other in asked
            async with await worker.connect() as client:
                assert (await client.send(asked)).status == status


@on_uvloop
async def test_handshake_needs_http_1_1_and_one_key() -> None:
    async with running_worker(NOWHERE) as worker:
        good = handshake(worker)
        line = b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
        assert line in good
        for bad in (good.replace(b"HTTP/1.1", b"HTTP/1.0"), good.replace(line, line * 2)):
            async with await worker.connect() as client:
                reply = await client.send(bad)
            assert reply.status == 400, reply
        assert (await refused(worker)).status == 101


@on_uvloop
async def test_unparsable_request_is_answered_under_our_name_with_a_request_id() -> None:
    async with running_worker(NOWHERE) as worker:
        reply = await get(worker, more="bad header line\r\n")
        reply.fault(400)
        assert reply.headers["server"] == "Penstock"
        assert reply.headers["x-request-id"].startswith("req_")


@on_uvloop
async def test_too_many_headers_and_too_long_ones_are_refused_as_such() -> None:
    async with running_worker(NOWHERE) as worker:
        many = "".join(f"X-A{number}: b\r\n" for number in range(150))
        for more in (many, f"X-A: {'b' * 8200}\r\n", many.replace("b", "b" * 300)):
            (await get(worker, more=more)).fault(431)
        (await get(worker, line=f"GET /{'a' * 8001} HTTP/1.1")).fault(414)
        (await get(worker, more="Expect: the-unexpected\r\n")).fault(417)


@pytest.mark.parametrize(
    "head",
    [
        b"GET /healthz HTTP/1.1\nHost: penstock\n\n",
        b"GET /healthz HTTP/1.1\r\nHost: penstock\n\n",
        b"GET /healthz HTTP/1.1\r\nHost: penstock\r\n\n",
        b"GET /healthz HTTP/1.1\r\nHost: penstock\r\nX-A: b\nX-C: d\r\n\r\n",
        b"POST /v1/rpc/ethereum/mainnet HTTP/1.1\nHost: penstock\nContent-Length: 2\n\n{}",
    ],
)
@on_uvloop
async def test_bare_line_feed_is_refused_at_once(head: bytes) -> None:
    async with running_worker(NOWHERE, server={"header_timeout_s": 300.0}) as worker:
        async with await worker.connect() as client:
            (await client.send(head)).fault(400)
        async with await worker.connect() as client:
            # The same behind a request that aiohttp has served.
            assert (await client.send(b"GET /healthz HTTP/1.1\r\nHost: penstock\r\n\r\n")).status == 200
            (await client.send(head)).fault(400)


@pytest.mark.parametrize("junk", [b"\0junk\r\n\r\n", b"GET\r\n\r\n", b"GET / HTTP/1.1\r\nbad header\r\n\r\n"])
@on_uvloop
async def test_junk_behind_a_request_does_not_take_its_reply(junk: bytes) -> None:
    async with running_worker(NOWHERE) as worker:
        good = b"GET /healthz HTTP/1.1\r\nHost: penstock\r\n\r\n"
        with_body = b"POST /healthz HTTP/1.1\r\nHost: penstock\r\nContent-Length: 2\r\n\r\n{}"
        async with await worker.connect() as client:
            assert (await client.send(good + good + with_body + junk)).status == 200
            assert (await client.reply()).status == 200
            (await client.reply()).fault(405)
            (await client.reply()).fault(400)
            assert await client.is_closed()


@on_uvloop
async def test_client_that_leaves_before_its_request_is_taken_up_is_no_error() -> None:
    errors: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context))
    async with running_worker(NOWHERE) as worker:
        for _ in range(50):
            with socket.create_connection(("127.0.0.1", worker.port)) as client:
                # Reset instead of a close: the connection is lost in the turn that takes up the second request.
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                client.send(worker.post(b"{") + b"GET /healthz HTTP/1.1\r\nHost: penstock\r\n\r\n")
            await asyncio.sleep(0)
        assert (await get(worker)).status == 200
    gc.collect()
    assert not errors
