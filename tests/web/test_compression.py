"""Compressed replies: to clients that accept them, of every kind and size, and from upstreams."""

from __future__ import annotations

import gzip
import zlib
from typing import Any

import aiohttp
import brotli
import httpx
import orjson
import pytest
import zstandard

from proxy.core import encodings
from proxy.services.rpc.tracker import Tracker
from tests.http_client import Reply, rpc
from tests.service import until
from tests.web.worker import LIVE, NO_CACHE, on_uvloop, running_worker
from tests.wire.upstreams import Scripted, answer, http, replies, stub

SIZES = (10, 500, 1500, 30_000, 90_000, 400_000, 3_000_000)


def text(size: int) -> str:
    return ("0123456789abcdef" * (size // 16 + 1))[:size]


def call(size: int, **options: Any) -> bytes:
    return rpc("net_listening", [size], **options)


def by_size(asked: Any) -> bytes:
    return http(answer(asked, result=text(asked["params"][0])))


def plain(reply: Reply) -> Any:
    match reply.headers.get("content-encoding"):
        case "gzip":
            return orjson.loads(gzip.decompress(reply.body))
        case "zstd":
            return orjson.loads(zstandard.ZstdDecompressor().decompressobj().decompress(reply.body))
        case "br":
            return orjson.loads(brotli.decompress(reply.body))
        case None:
            return reply.json
        case other:
            raise AssertionError(other)


@pytest.mark.parametrize("accepts", ["gzip", "zstd, gzip", "br", ""])
@on_uvloop
async def test_replies_of_every_size_are_whole_and_compressed_from_the_limit(accepts: str) -> None:
    headers = {"Accept-Encoding": accepts} if accepts else {}
    expected = {"gzip": "gzip", "zstd, gzip": "zstd", "br": "br"}.get(accepts)

    async with (
        Scripted(replies(by_size)) as upstream,
        running_worker(upstream.url, **NO_CACHE) as worker,
        await worker.connect() as client,
    ):
        for number, size in enumerate(SIZES):
            reply = await client.send(worker.post(call(size, id=number), **headers))
            assert plain(reply) == {"jsonrpc": "2.0", "id": number, "result": text(size)}
            found = reply.headers.get("content-encoding")
            assert found == (expected if size >= 1024 else None), size
            assert ("vary" in reply.headers) == (found is not None)
            if found and size > 2000:
                assert len(reply.body) < size / 4


@on_uvloop
async def test_pipelined_replies_keep_their_order_whichever_takes_longer() -> None:
    sizes = (10, 600_000, 20, 90_000, 30, 3_000_000, 40)
    async with (
        Scripted(replies(by_size)) as upstream,
        running_worker(upstream.url, **NO_CACHE) as worker,
        await worker.connect() as client,
    ):
        sent = [worker.post(call(size, id=number), **{"Accept-Encoding": "gzip"}) for number, size in enumerate(sizes)]
        await client.write(b"".join(sent))
        for number, size in enumerate(sizes):
            assert plain(await client.reply()) == {"jsonrpc": "2.0", "id": number, "result": text(size)}


@on_uvloop
async def test_batches_and_errors_are_compressed() -> None:
    def script(asked: Any) -> bytes:
        items = asked if isinstance(asked, list) else [asked]
        found = [
            orjson.loads(answer(each, error={"code": 3, "message": "reverted", "data": "0x" + text(5000)}))
            if each["params"] == [0]
            else orjson.loads(answer(each, result=text(each["params"][0])))
            for each in items
        ]
        return http(orjson.dumps(found if isinstance(asked, list) else found[0]))

    async with Scripted(replies(script)) as upstream, running_worker(upstream.url, **NO_CACHE) as worker:
        for sizes in ((100, 2000), (0, 3000), (400_000, 10, 500_000), (0,)):
            body = b"[%b]" % b",".join(call(size, id=number) for number, size in enumerate(sizes))
            reply = await worker.send(body, **{"Accept-Encoding": "gzip"})
            assert reply.headers["content-encoding"] == "gzip"
            found = plain(reply)
            assert [each["id"] for each in found] == list(range(len(sizes)))
            assert [len(each.get("result", "")) for each in found] == list(sizes)
        reply = await worker.send(call(0), **{"Accept-Encoding": "gzip"})
        assert (reply.headers["content-encoding"], len(plain(reply)["error"]["data"])) == ("gzip", 5002)


@on_uvloop
async def test_cached_reply_is_compressed_once_for_all_ids() -> None:
    asked_for = rpc("eth_call", [{"to": "0x" + "1" * 40, "data": "0x"}, "latest"])
    result = "0x" + text(20_000)
    script = stub({"eth_blockNumber": "0x10", "eth_chainId": "0x1", "eth_call": result})
    async with Scripted(script) as upstream, running_worker({LIVE: [upstream.url]}) as worker:
        await Tracker(worker.app.networks.routes[LIVE].state).look()
        for number, accepts in enumerate(("gzip", "gzip", "zstd", "gzip", "zstd", "br", "")):
            call_id = orjson.dumps([7, "x" * 20, "y" * 200][number % 3])
            body = asked_for.replace(b'"id":1', b'"id":' + call_id)
            reply = await worker.send(body, **({"Accept-Encoding": accepts} if accepts else {}))
            assert reply.headers.get("content-encoding", "") == accepts
            assert (reply.headers["x-cache"] == "hit") == (number > 0)
            assert plain(reply) == {"jsonrpc": "2.0", "id": orjson.loads(call_id), "result": result}
        assert upstream.methods.count("eth_call") == 1
        kept = worker.app.front.encoded
        assert 0 < kept.bytes_used < 4 * len(result)


@on_uvloop
async def test_clients_of_the_trade_read_compressed_replies() -> None:
    async with Scripted(replies(by_size)) as upstream, running_worker(upstream.url, **NO_CACHE) as worker:
        url, headers = f"http://127.0.0.1:{worker.port}/v1/rpc/{LIVE}", {"X-API-Key": worker.keys["main"]}
        async with aiohttp.ClientSession() as session, httpx.AsyncClient() as other:
            for size in SIZES:
                async with session.post(url, data=call(size), headers=headers) as reply:
                    assert (await reply.json())["result"] == text(size)
                    assert ("Content-Encoding" in reply.headers) == (size >= 1024)
                said = await other.post(url, content=call(size), headers=headers)
                assert said.json()["result"] == text(size)
                assert said.headers.get("Content-Encoding") == ("zstd" if size >= 1024 else None)


@on_uvloop
async def test_pages_and_calls_of_web_pages_are_compressed_but_not_with_a_session() -> None:
    async with Scripted(replies(by_size)) as upstream, running_worker(upstream.url, **NO_CACHE) as worker:
        for options, encoding in (
            ({"Origin": "https://a.example.com", "Accept-Encoding": "gzip"}, "gzip"),
            ({"Origin": "https://a.example.com", "Accept-Encoding": "zstd"}, "zstd"),
            ({"Origin": "https://a.example.com", "Accept-Encoding": "br"}, "br"),
            ({"Origin": "https://a.example.com"}, None),
            ({"Origin": "https://a.example.com", "Accept-Encoding": "gzip", "Cookie": "session=x"}, None),
        ):
            for size in (5000, 500_000):
                reply = await worker.send(call(size), **options)
                assert reply.headers.get("content-encoding") == encoding
                assert plain(reply)["result"] == text(size)


@on_uvloop
async def test_compression_can_be_turned_off() -> None:
    async with (
        Scripted(replies(by_size)) as upstream,
        running_worker(upstream.url, **NO_CACHE, server={"compress_from": 0, "drain_s": 0.1}) as worker,
    ):
        for options in ({}, {"Origin": "https://a.example.com"}):
            reply = await worker.send(call(5000), **{"Accept-Encoding": "gzip", **options})
            assert "content-encoding" not in reply.headers
            assert reply.json["result"] == text(5000)


# From upstreams


def packed(body: bytes, *, chunked: bool = False) -> bytes:
    data = zlib.compress(body, 6, 31)
    if not chunked:
        head = b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: %d\r\n\r\n" % len(data)
        return head + data
    pieces = [data[at : at + 1000] for at in range(0, len(data), 1000)]
    body = b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces)
    return b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nTransfer-Encoding: chunked\r\n\r\n" + body + b"0\r\n\r\n"


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("accepts", ["gzip", "identity"])
@on_uvloop
async def test_gzip_of_an_upstream_is_read(chunked: bool, accepts: str) -> None:
    heads: list[bytes] = []

    async def script(exchange: Any) -> None:
        heads.append(exchange.head)
        asked = await exchange.call()
        await exchange.send(packed(answer(asked, result=text(asked["params"][0])), chunked=chunked))

    async with (
        Scripted(script) as upstream,
        running_worker({LIVE: [{"url": upstream.url, "compress": True}]}, **NO_CACHE) as worker,
        await worker.connect() as client,
    ):
        for size in SIZES:
            reply = await client.send(worker.post(call(size), **{"Accept-Encoding": accepts}))
            assert plain(reply)["result"] == text(size)
        assert upstream.connections == 1
        assert all(b"\r\nAccept-Encoding: gzip\r\n" in head for head in heads)


@on_uvloop
async def test_gzip_is_asked_for_only_over_https_unless_configured() -> None:
    heads: list[bytes] = []

    async def script(exchange: Any) -> None:
        heads.append(exchange.head)
        await replies(by_size)(exchange)

    async with Scripted(script) as upstream, running_worker(upstream.url, **NO_CACHE) as worker:
        await worker.send(call(10))
        await until(lambda: bool(heads))
        assert b"ccept-Encoding" not in heads[0]


@on_uvloop
async def test_bombs_and_broken_gzip_fail_the_call_only() -> None:
    bomb = zlib.compress(b'{"jsonrpc":"2.0","id":1,"result":"' + b"0" * 40_000_000 + b'"}', 9, 31)
    good = zlib.compress(b"{}", 6, 31)
    bodies = {1: bomb, 2: good[:-3], 3: good + b"more", 4: b"not gzip", 5: bomb[:-2000]}

    async def script(exchange: Any) -> None:
        asked = await exchange.call()
        if wrong := bodies.get(asked["params"][0]):
            head = b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: %d\r\n\r\n" % len(wrong)
            await exchange.send(head, wrong)
        else:
            await exchange.send(by_size(asked))

    async with (
        Scripted(script) as upstream,
        running_worker({LIVE: [{"url": upstream.url, "compress": True}]}, **NO_CACHE) as worker,
    ):
        for number in bodies:
            assert (await worker.send(call(number))).status in (413, 500, 502), number
        await until(lambda: not worker.app.networks.routes[LIVE].upstreams[0].in_flight())


def test_names_are_those_of_the_registry() -> None:
    assert set(encodings.NAMES.values()) == {"gzip", "zstd", "br"}
