"""Requests that aiohttp accepts and HTTP does not."""

from __future__ import annotations

import pytest

from tests.flows.talk import Reply, rpc
from tests.sockets import handshake, refused
from tests.web.worker import Worker, on_uvloop, worker

NOWHERE = "http://127.0.0.1:1/"


async def get(found: Worker, *, line: str = "GET /healthz HTTP/1.1", host: str = "penstock", more: str = "") -> Reply:
    async with await found.talk() as talk:
        return await talk.ask(f"{line}\r\nHost: {host}\r\n{more}\r\n".encode())


@pytest.mark.parametrize("host", ["a", "a:80", "[::1]:80", "xn--a.example", "10.0.0.1", ""])
def test_host_that_is_one_is_accepted(host: str) -> None:
    @on_uvloop
    async def run() -> None:
        async with worker(NOWHERE) as found:
            assert (await get(found, host=host)).status == 200

    run()


@pytest.mark.parametrize("host", ["a b/../{}", "u@a", "a/b", "a:b", "[::1", "a?b"])
def test_host_that_is_none_is_refused(host: str) -> None:
    @on_uvloop
    async def run() -> None:
        async with worker(NOWHERE) as found:
            (await get(found, host=host)).fault(400)
            call = found.post(rpc("eth_chainId")).replace(b"Host: penstock", b"Host: " + host.encode())
            assert host.encode() in call
            async with await found.talk() as talk:
                (await talk.ask(call)).fault(400)

    run()


@on_uvloop
async def test_later_version_is_not_supported_and_the_reply_is_in_ours() -> None:
    async with worker(NOWHERE) as found:
        (await get(found, line="GET /healthz HTTP/2.0")).fault(505)


@on_uvloop
async def test_other_transfer_codings_are_not_implemented() -> None:
    async with worker(NOWHERE) as found:
        (await get(found, more="Transfer-Encoding: gzip, chunked\r\n")).fault(501)


@on_uvloop
async def test_fragment_in_the_target_is_refused() -> None:
    async with worker(NOWHERE) as found:
        (await get(found, line="GET /healthz#x HTTP/1.1")).fault(400)


@on_uvloop
async def test_two_different_keys_are_no_key() -> None:
    async with worker(NOWHERE) as found:
        found.add_key("other")
        keys = [f"X-API-Key: {found.keys[name]}\r\n" for name in ("main", "other", "main")]
        path = "GET /v1/wallets/0x HTTP/1.1"
        (await get(found, line=path, more=keys[0] + keys[1])).fault(401)
        assert (await get(found, line=path, more=keys[0] + keys[2])).status != 401


@on_uvloop
async def test_handshake_needs_http_1_1_and_one_key() -> None:
    async with worker(NOWHERE) as found:
        good = handshake(found)
        line = b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
        assert line in good
        for bad in (good.replace(b"HTTP/1.1", b"HTTP/1.0"), good.replace(line, line * 2)):
            async with await found.talk() as talk:
                reply = await talk.ask(bad)
            assert reply.status == 400, reply
        assert (await refused(found)).status == 101


@on_uvloop
async def test_unparsable_request_is_answered_under_our_name_with_a_request_id() -> None:
    async with worker(NOWHERE) as found:
        reply = await get(found, more="bad header line\r\n")
        reply.fault(400)
        assert reply.headers["server"] == "Penstock"
        assert reply.headers["x-request-id"].startswith("req_")
