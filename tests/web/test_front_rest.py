"""Routes of REST chains on the hot path: GET requests get the same replies as from aiohttp's handler.

As in `test_front_differential.py`, a request with `TE: trailers` is the same request on the other path.
"""

from __future__ import annotations

import asyncio
import random
import zlib
from contextlib import AsyncExitStack
from typing import Any

import pytest
import zstandard
from aiohttp.base_protocol import BaseProtocol
from aiohttp.http_parser import HttpRequestParser

from proxy.chains.families import family_of
from proxy.core.access import AllowedUses, Limits
from proxy.core.rest_routes import write_params
from proxy.web.front.record_starts import RecordSplitter
from proxy.web.front.request_headers import RequestHeaderReader
from proxy.web.front.rest_requests import LONGEST_TARGET
from proxy.web.request_targets import read_target
from proxy.web.rest_targets import RestTarget, split_target
from tests.beacon_stub import beacon_stub
from tests.flows.test_rest_calls import HEADERS, NETWORK, RestHarness, counted, rest_harness
from tests.http_client import Reply, rpc
from tests.service import until
from tests.web.test_front_differential import COLD, RESULTS, compared, protocols_of, until_empty
from tests.web.worker import LIVE, on_uvloop, running_worker
from tests.wire.upstreams import Scripted, stub

BLOCK = f"{HEADERS}/80"
STATE = "/eth/v2/debug/beacon/states/head"
SSZ = "application/octet-stream"
FUZZED = 20_000
# The headers that a request has on each path.
WAYS: tuple[dict[str, Any], ...] = ({}, COLD)


async def both_ways(harness: RestHarness, target: str, *, hot: bool = True, **options: Any) -> Reply:
    """The reply, which must be equal on both paths. `hot`: whether the hot path accepts the request."""
    options.setdefault("X_Request_Id", "the-same-for-both")
    if not target.startswith("/v1/"):
        target = f"/v1/rest/{NETWORK}{target}"
    found = []
    for way, is_hot in zip(WAYS, (hot, False), strict=True):
        async with await harness.worker.connect() as client:
            found.append(await client.send(harness.request(target, **options, **way)))
            assert protocols_of(harness.worker) == ["FrontConnection" if is_hot else "HandlerConnection"], target
        await until_empty(harness.worker)
    assert compared(found[0]) == compared(found[1]), target
    return found[0]


@on_uvloop
async def test_replies_are_equal_on_both_paths() -> None:
    async with rest_harness() as harness:
        stub = harness.stubs[0]
        asked = f"{HEADERS}/80?slot=1%202&a=%26"
        known = [
            BLOCK,
            asked,
            "/eth/v2/beacon/blocks/50",
            f"{HEADERS}/{stub.root(51)}",
            f"{HEADERS}/head",
            f"{HEADERS}/1",
        ]
        for path in known:
            await harness.get(path)
            assert (await both_ways(harness, path)).headers["x-cache"] == "hit"
        assert (await both_ways(harness, "/eth/v1/node/version")).json["data"]["version"] == "stub/1"
        assert (await both_ways(harness, "/eth/v1/node/health")).body == b""
        assert (await both_ways(harness, f"{HEADERS}/97")).status == 404
        for way in ("json", "ssz"):
            accept = {"json": "application/json, */*;q=0.1", "ssz": SSZ}[way]
            await harness.get("/eth/v2/beacon/blocks/80", Accept=accept)
            reply = await both_ways(harness, "/eth/v2/beacon/blocks/80", Accept=accept)
            assert reply.headers["x-cache"] == "hit"
            assert reply.body.startswith(b"ssz") == (way == "ssz")
        large = await both_ways(harness, STATE, Accept=SSZ)
        assert len(large.body) == 8 << 20


@on_uvloop
async def test_failures_are_equal_on_both_paths() -> None:
    async with rest_harness() as harness:
        for status in (400, 401, 404, 410, 414, 418, 429, 500, 503):
            with harness.stubs[0].failing(status):
                await both_ways(harness, f"{HEADERS}/{status % 60 + 1}")
                await asyncio.sleep(0)


@on_uvloop
async def test_compressed_replies_are_equal() -> None:
    async with rest_harness(server={"compress_from": 256}) as harness:
        plain = (await harness.get(BLOCK)).body
        assert (await both_ways(harness, BLOCK)).headers["vary"] == "Accept-Encoding"
        assert "vary" not in (await both_ways(harness, "/eth/v1/node/version")).headers
        for name in ("gzip", "zstd", "br"):
            replies = []
            for way in WAYS:
                reply = await harness.get(BLOCK, Accept_Encoding=name, X_Request_Id="same", **way)
                status, headers, body = compared(reply)
                headers.pop("content-length")
                if name == "gzip":
                    assert zlib.decompress(body, 31) == plain
                elif name == "zstd":
                    assert zstandard.ZstdDecompressor().decompressobj().decompress(body) == plain
                replies.append((status, headers))
            assert replies[0] == replies[1]
            assert replies[0][1]["content-encoding"] == name


@on_uvloop
async def test_keys_are_checked_equally() -> None:
    async with rest_harness() as harness:
        worker = harness.worker
        worker.add_key("disabled", disabled=True)
        worker.add_key("test", live=False)
        worker.add_key("writes", scopes=["rpc:write"])
        worker.add_key("daily", limits=Limits(1000, 1000, 100_000))
        worker.add_key("mortal", lives_s=1000.0)
        worker.add_key("in url", allow_in_url=True)
        worker.add_key("narrow", uses=AllowedUses(methods=frozenset({"GET /eth/v1/beacon/genesis"})))
        await harness.get(BLOCK)
        for name in ("disabled", "test", "writes"):
            (await both_ways(harness, BLOCK, key=name)).fault(403)
        for name in ("daily", "mortal"):
            assert (await both_ways(harness, BLOCK, key=name)).headers["x-cache"] == "hit"
        (await both_ways(harness, BLOCK, key="narrow", hot=False)).fault(403)
        (await both_ways(harness, BLOCK, key="", hot=False)).fault(401)
        (await both_ways(harness, BLOCK, key="", Authorization="Bearer nope", hot=False)).fault(401)
        text = worker.keys["in url"]
        for target in (f"/v1/rest/{NETWORK}/{text}{BLOCK}", f"/v1/rest/{NETWORK}{BLOCK}?apiKey={text}"):
            assert (await both_ways(harness, target, key="")).status == 200
        refused = f"/v1/rest/{NETWORK}/{worker.keys['main']}{BLOCK}"
        (await both_ways(harness, refused, key="", hot=False)).fault(403)


@on_uvloop
async def test_revoked_and_expired_keys_are_refused_on_an_open_connection() -> None:
    async with rest_harness() as harness:
        for event in ("revoked", "expired"):
            key = harness.worker.add_key(event)
            request = harness.request(f"/v1/rest/{NETWORK}{BLOCK}", key=event)
            async with await harness.worker.connect() as client:
                for _ in range(3):
                    assert (await client.send(request)).status == 200
                if event == "revoked":
                    harness.worker.app.keyring.remove(key)
                else:
                    key.expires_at = 0.0
                    key.invalidate()
                (await client.send(request)).fault(401)


@on_uvloop
async def test_rate_limits_hold_on_both_paths() -> None:
    async with rest_harness() as harness:
        await harness.get(BLOCK)
        replies = []
        for name, way in zip(("hot", "cold"), WAYS, strict=True):
            key = harness.worker.add_key(name, limits=Limits(2, 1000, 0))
            request = harness.request(f"/v1/rest/{NETWORK}{BLOCK}", key=name, X_Request_Id="same", **way)
            async with await harness.worker.connect() as client:
                assert [(await client.send(request)).status for _ in range(2)] == [200, 200]
                replies.append(await client.send(request))
            assert counted(key)[0] == 2
        assert [each.status for each in replies] == [429, 429]
        assert compared(replies[0]) == compared(replies[1])


@on_uvloop
async def test_a_hit_costs_and_counts_what_the_long_path_says() -> None:
    async with rest_harness() as harness:
        harness.stubs[0].head = 5000
        await harness.look()
        await until(lambda: asyncio.sleep(0, harness.route.heads.tip == 5000))
        await harness.get(BLOCK)
        units = {}
        for name, way in zip(("hot", "cold"), WAYS, strict=True):
            key = harness.worker.add_key(name)
            async with await harness.worker.connect() as client:
                request = harness.request(f"/v1/rest/{NETWORK}{BLOCK}", key=name, **way)
                replies = [await client.send(request) for _ in range(4)]
            assert {each.headers["x-cache"] for each in replies} == {"hit"}
            units[name] = counted(key), {each.headers["x-compute-units"] for each in replies}
        assert units["hot"] == units["cold"]


@on_uvloop
async def test_directives_are_obeyed_equally() -> None:
    async with rest_harness() as harness:
        await harness.get(BLOCK)
        given: dict[str, Any] = {"X_Min_Block": "90", "X_Timeout_Ms": "4000", "X_Retry": "0", "X_Max_Stale": "5"}
        for name, value in given.items():
            assert (await both_ways(harness, BLOCK, **{name: value})).headers["x-cache"] == "hit", name
        assert (await both_ways(harness, BLOCK, Cache_Control="no-cache")).headers["x-cache"] == "miss"
        assert (await both_ways(harness, BLOCK, X_Min_Block="many", hot=False)).status == 400


@on_uvloop
async def test_other_requests_are_left_to_aiohttp() -> None:
    async with rest_harness() as harness:
        await harness.get(BLOCK)
        left: dict[str, dict[str, Any]] = {
            "an unlisted route": {"target": "/eth/v1/node/nothing"},
            "a refused route": {"target": "/eth/v1/node/peers"},
            "dots": {"target": "/eth/v1/beacon/../node/peers"},
            "an encoded slash": {"target": f"{HEADERS}/%2f"},
            "a doubled slash": {"target": f"/{HEADERS}/80"},
            "another network": {"target": f"/v1/rest/ethereum-beacon/hoodi{BLOCK}"},
            "a long target": {"target": f"{BLOCK}?x={'a' * LONGEST_TARGET}"},
            "a type that is not served": {"target": BLOCK, "Accept": "text/html"},
            "a cookie": {"target": BLOCK, "Cookie": "a=b"},
            "an origin": {"target": BLOCK, "Origin": "https://x.example"},
            "a header that is too long": {"target": BLOCK, "Eth_Consensus_Version": "x" * 300},
        }
        await harness.get(left["a long target"]["target"])
        for options in left.values():
            await both_ways(harness, options.pop("target"), hot=False, **options)
        assert (await both_ways(harness, BLOCK, Content_Length="0")).status == 200
        for line in ("GET {} HTTP/1.0", "HEAD {} HTTP/1.1"):
            first = line.format(f"/v1/rest/{NETWORK}{BLOCK}")
            reader, writer = await asyncio.open_connection("127.0.0.1", harness.worker.port)
            writer.write(f"{first}\r\nHost: x\r\nX-API-Key: {harness.worker.keys['main']}\r\n\r\n".encode())
            assert (await reader.readline()).startswith(b"HTTP/1.")
            assert protocols_of(harness.worker) == ["HandlerConnection"]
            writer.close()
            await until_empty(harness.worker)


@on_uvloop
async def test_last_request_closes_the_connection() -> None:
    async with rest_harness() as harness:
        await harness.get(BLOCK)
        replies = []
        for way in WAYS:
            async with await harness.worker.connect() as client:
                request = harness.request(f"/v1/rest/{NETWORK}{BLOCK}", Connection="close", X_Request_Id="same", **way)
                replies.append(await client.send(request))
                assert replies[-1].headers["connection"] == "close"
                assert await client.reader.read() == b""
        assert compared(replies[0]) == compared(replies[1])


@on_uvloop
async def test_requests_sent_ahead_are_answered_in_order_with_calls_between() -> None:
    async with AsyncExitStack() as stack:
        beacon = await stack.enter_async_context(beacon_stub())
        node = await stack.enter_async_context(Scripted(stub(RESULTS)))
        worker = await stack.enter_async_context(running_worker({NETWORK: [beacon.url], LIVE: [node.url]}))
        harness = RestHarness(worker, NETWORK)
        await harness.look()
        await harness.shows("up")
        sent, wanted = [], []
        for index in range(60):
            if index % 3 == 2:
                sent.append(worker.post(rpc("eth_getCode", ["0x" + "11" * 20, "latest"], id=index)))
                wanted.append(str(index))
            else:
                slot = index % 20 + 1 if (index % 20 + 1) % 10 != 7 else 8
                sent.append(harness.request(f"/v1/rest/{NETWORK}{HEADERS}/{slot}"))
                wanted.append(beacon.root(slot))
        data = b"".join(sent)
        for size in (len(data), 1000, 37, 1):
            async with await worker.connect() as client:
                for at in range(0, len(data), size):
                    client.writer.write(data[at : at + size])
                    if size < 100 and at % 640 < size:
                        await client.writer.drain()
                        await asyncio.sleep(0)
                replies = [await client.reply() for _ in sent]
                assert protocols_of(worker) == ["FrontConnection"]
            shown = [str(each.json["id"]) if "id" in each.json else each.json["data"]["root"] for each in replies]
            assert shown == wanted, size
            await until_empty(worker)


@on_uvloop
async def test_unusual_request_behind_others_hands_the_connection_over() -> None:
    async with rest_harness() as harness:
        good = harness.request(f"/v1/rest/{NETWORK}{BLOCK}")
        bad = harness.request(f"/v1/rest/{NETWORK}/eth/v1/node/peers")
        async with await harness.worker.connect() as client:
            client.writer.write(good + good + bad + good)
            assert [(await client.reply()).status for _ in range(4)] == [200, 200, 404, 200]
            assert protocols_of(harness.worker) == ["HandlerConnection"]


@on_uvloop
async def test_client_that_leaves_frees_its_call() -> None:
    async with rest_harness() as harness:
        key = harness.worker.add_key("leaver")
        harness.stubs[0].hangs = True
        async with await harness.worker.connect() as client:
            client.writer.write(harness.request(f"/v1/rest/{NETWORK}{BLOCK}", key="leaver"))
            await until(lambda: asyncio.sleep(0, harness.stubs[0].asked(BLOCK) == 1))
        await until(lambda: asyncio.sleep(0, not any(each.in_flight() for each in harness.route.upstreams)))
        harness.stubs[0].hangs = False
        assert (await harness.get(BLOCK)).status == 200
        assert counted(key)[0] == 0


@on_uvloop
async def test_reader_that_stalls_loses_its_own_connection_only() -> None:
    async with rest_harness() as harness:
        request = harness.request(f"/v1/rest/{NETWORK}{STATE}", Accept=SSZ)
        async with await harness.worker.connect() as slow:
            slow.writer.write(request)
            await slow.reader.readexactly(1000)
            for slot in range(1, 6):
                assert (await harness.get(f"{HEADERS}/{slot}")).status == 200
        held = harness.worker.held_bytes
        await until(lambda: asyncio.sleep(0, harness.worker.held_bytes == 0))
        assert held >= 0


# Random requests: what the reader accepts must mean the same to aiohttp's parser.

_PARTS = (
    "/eth/v1/beacon/headers/80", "/eth/v1/beacon/headers", "/eth/v2/beacon/blocks/", "head", "%41", "%2f", "%25", "..", "//",
    "?", "&", "=", "slot=1", "a=b+c", "%20", "%", "apiKey", "#", ";", "~", "@", ":", ",", "\t", "é", "0x" + "ab" * 32,
)  # fmt: skip
_LINES = (
    "Accept: */*", "Accept: application/octet-stream", "accept:text/html", "Accept : x", "ACCEPT:\tapplication/json ",
    "Eth-Consensus-Version: deneb", "Eth-Consensus-Version:", "User-Agent: x", "Connection: close", "Cookie: a", "Host: y",
    "Content-Length: 0", "Content-Length: 1", "Transfer-Encoding: chunked", "X-Request-Id: abc", "Content-Type: text/plain",
)  # fmt: skip


def _made(chance: random.Random, key: str) -> bytes:
    target = f"/v1/rest/{NETWORK}{chance.choice(_PARTS[:2])}"
    for _ in range(chance.choice((0, 0, 1, 2, 3))):
        target += chance.choice(_PARTS)
    lines = ["Host: x", f"X-API-Key: {key}", *chance.sample(_LINES, chance.choice((0, 0, 1, 2)))]
    chance.shuffle(lines)
    verb, version = chance.choice(("GET", "GET", "GET", "HEAD", "GET ")), chance.choice(("1.1", "1.1", "1.1", "1.0"))
    return f"{verb} {target} HTTP/{version}\r\n".encode() + "".join(f"{line}\r\n" for line in lines).encode() + b"\r\n"


@on_uvloop
async def test_accepted_requests_mean_the_same_to_aiohttp() -> None:
    async with rest_harness() as harness:
        app, chance = harness.worker.app, random.Random(1)
        reader: RequestHeaderReader = app.front.header_reader
        rest = family_of(harness.route.network).rest
        assert rest is not None
        loop, accepted = asyncio.get_running_loop(), 0
        for _ in range(FUZZED):
            raw = _made(chance, harness.worker.keys["main"])
            ours = reader.read(raw)
            if ours is None:
                continue
            accepted += 1
            assert ours.rest is not None, raw
            parser = HttpRequestParser(BaseProtocol(loop), loop, 2**16)
            ((message, payload),), _, tail = parser.feed_data(raw)
            assert (message.method, message.version, message.upgrade, message.chunked) == ("GET", (1, 1), False, False)
            assert payload.is_eof()
            assert not tail
            assert message.should_close == ours.closes
            chain, network, path, query = split_target(read_target(message.url.raw_path_qs).text)
            assert f"{chain}/{network}" == NETWORK
            accept = ",".join(message.headers.getall("Accept", ()))
            theirs = app.rest_targets.read(RestTarget("GET", path, query, accept, message.headers), harness.route, rest)
            assert ours.rest.call[:2] == (theirs[0], write_params(theirs[1])), raw
            assert (ours.size, ours.total) == (len(raw), len(raw))
        assert accepted > FUZZED // 20


@pytest.mark.parametrize(
    ("record", "status", "body"),
    [
        (b'{"status":200,"headers":{},"body":{"body":1}}', 200, b'{"body":1}'),
        (b'{"status": 200, "headers": {}, "body": {"a":1,"body":2}}', 200, b'{"a":1,"body":2}'),
        (b'{"body":{"a":1,"body":2},"status":201}', 201, b'{"a":1,"body":2}'),
        (b'{"status":202,"headers":{"a":",\\"body\\":"},"body":null}', 202, b""),
        (b'{"status":203,"headers":{},"base64":"eHl6"}', 203, b"xyz"),
        (b'{"status":299,"body":[1,{"x":2,"body":3}],"headers":{"b":"c"}}', 299, b'[1,{"x":2,"body":3}]'),
    ],
)
def test_records_are_split_whatever_their_form(record: bytes, status: int, body: bytes) -> None:
    reader = RecordSplitter()
    for _ in range(2):
        start, found = reader.split(record)
        assert (start.status, bytes(found)) == (status, body)
        assert start.lines.startswith(b"HTTP/1.1 %d " % status)
        assert b"\r\n\r\n" not in start.lines
