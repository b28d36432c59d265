"""The hot path and aiohttp give equal replies to equal requests.

The strict reader leaves requests with the header `TE: trailers` to aiohttp, and nothing else reacts to that header. A request
with it is therefore the same request on the other path.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import orjson
import pytest

from proxy.core.access import Limits
from proxy.services.rpc.tracker import Tracker
from tests.http_client import HttpClient, Reply, rpc
from tests.service import until
from tests.web.worker import LIVE, NO_CACHE, TEST, Worker, on_uvloop, running_worker
from tests.wire.upstreams import Scripted, answer, http, replies, stub

# Values that change with time: they must be present and may differ.
MOMENTARY = {"x-ratelimit-remaining", "x-ratelimit-reset"}
COLD = {"TE": "trailers"}
ERRORS = {
    "eth_call": {"code": 3, "message": "execution reverted: no", "data": "0x08c379a0"},
    "eth_estimateGas": {"code": -32000, "message": "insufficient funds for gas * price + value"},
    "eth_syncing": {"code": -32601, "message": "the method eth_syncing does not exist/is not available"},
}
RESULTS = {
    "eth_chainId": "0x1",
    "eth_getCode": "0x" + "60" * 300,
    "eth_blockNumber": "0x10",
    "eth_getFilterLogs": [],
    "eth_getBlockReceipts": [{"data": "0x" + "ab" * 500}] * 120,
}
WAYS = pytest.mark.parametrize("cache", [{}, NO_CACHE], ids=["cached", "short"])


def compared(reply: Reply) -> tuple[int, dict[str, str], bytes]:
    headers = {name: "…" if name in MOMENTARY else value for name, value in reply.headers.items() if name != "date"}
    assert "date" in reply.headers
    return reply.status, headers, reply.body


@asynccontextmanager
async def both_ways(**sections: Any) -> AsyncIterator[tuple[Worker, Scripted]]:
    async with Scripted(stub(RESULTS, errors=ERRORS)) as upstream, running_worker(upstream.url, **sections) as worker:
        yield worker, upstream


def protocols_of(worker: Worker) -> list[str]:
    """The classes of the open connections: `FrontConnection` or `HandlerConnection`."""
    return [type(connection).__name__ for connection in worker.app.limiter.connections]


async def send_both_ways(worker: Worker, body: bytes, *, hot: bool = True, **options: Any) -> Reply:
    """The reply, which must be equal on both paths. `hot`: whether the hot path accepts the request."""
    options.setdefault("X_Request_Id", "the-same-for-both")
    async with await worker.connect() as client:
        first = await client.send(worker.post(body, **options))
        assert protocols_of(worker) == ["FrontConnection" if hot else "HandlerConnection"]
    await until_empty(worker)
    async with await worker.connect() as client:
        second = await client.send(worker.post(body, **options, **COLD))
        assert protocols_of(worker) == ["HandlerConnection"]
    await until_empty(worker)
    assert compared(first) == compared(second)
    return first


async def until_empty(worker: Worker) -> None:
    await until(lambda: not worker.app.limiter.connections, every_s=0.0)


def batch(*calls: bytes) -> bytes:
    return b"[" + b",".join(calls) + b"]"


def notification(method: str) -> bytes:
    return orjson.dumps({"jsonrpc": "2.0", "method": method, "params": []})


CALL = rpc("eth_chainId")
GOOD: dict[str, bytes] = {
    "call": CALL,
    "call without params": b'{"jsonrpc":"2.0","id":1,"method":"eth_chainId"}',
    "spaces": b' \r\n{ "id" : 1 ,\t"jsonrpc":"2.0","method":"eth_chainId", "params" : [ ] } \n',
    "text as id": rpc("eth_gasPrice", id='a"b\\ü'),
    "null as id": rpc("eth_gasPrice", id=None),
    "huge id": b'{"jsonrpc":"2.0","id":123456789012345678901234567890,"method":"net_version"}',
    "long id": rpc("eth_gasPrice", id="x" * 254),
    "block": rpc("eth_getBalance", ["0x" + "11" * 20, "latest"]),
    "old block": rpc("eth_getBalance", ["0x" + "11" * 20, "0x1"]),
    "large result": rpc("eth_getCode", ["0x" + "11" * 20, "latest"]),
    "very large result": rpc("eth_getBlockReceipts", ["0x10"]),
    "head": rpc("eth_blockNumber"),
    "never kept": rpc("net_listening"),
    "write": rpc("eth_sendRawTransaction", ["0x02"]),
    "filter": rpc("eth_newBlockFilter"),
    "unknown filter": rpc("eth_getFilterLogs", ["0x00"]),
    "upstream's error": rpc("eth_call", [{}, "latest"]),
    "upstream's other error": rpc("eth_estimateGas", [{}]),
    "upstream lacks the method": rpc("eth_syncing"),
    "unknown method": rpc("eth_nope"),
    "subscription": rpc("eth_subscribe", ["newHeads"]),
    "batch": batch(CALL, rpc("eth_gasPrice", id="b"), rpc("eth_nope", id=3), rpc("eth_call", [{}, "latest"], id=4)),
    "batch of one": batch(CALL),
    "mixed batch": batch(notification("eth_gasPrice"), rpc("eth_chainId", id=2), b"1", b'{"jsonrpc":"2.0"}'),
}
SILENT: dict[str, bytes] = {
    "notification": notification("eth_gasPrice"),
    "notification of a write": notification("eth_sendRawTransaction"),
    "notification of an error": notification("eth_call"),
    "notification of an unknown method": notification("eth_nope"),
    "notification with a large result": notification("eth_getBlockReceipts"),
    "batch of notifications": batch(notification("eth_gasPrice"), notification("eth_nope")),
}
MALFORMED: dict[str, bytes] = {
    "no JSON": b'{"jsonrpc":"2.0",',
    "empty object": b"{}",
    "no object": b'"text"',
    "number": b"1",
    "version": b'{"jsonrpc":"1.0","id":1,"method":"eth_chainId"}',
    "no method": b'{"jsonrpc":"2.0","id":1}',
    "method is no text": b'{"jsonrpc":"2.0","id":1,"method":1}',
    "method is not ASCII": '{"jsonrpc":"2.0","id":1,"method":"eth_chainİd"}'.encode(),
    "params": b'{"jsonrpc":"2.0","id":1,"method":"eth_chainId","params":1}',
    "id": b'{"jsonrpc":"2.0","id":[],"method":"eth_chainId"}',
    "member": b'{"jsonrpc":"2.0","id":1,"method":"eth_chainId","METHOD":"eth_call"}',
    "empty batch": b"[]",
    "broken batch": b'[{"jsonrpc":"2.0","id":1,"method":"eth_chainId"},',
    "batch too long": batch(*[CALL] * 1001),
    "bytes": b"\xff\xfe",
    "deep": b'{"jsonrpc":"2.0","id":1,"method":"eth_call","params":' + b"[" * 50_000,
}


@WAYS
@on_uvloop
async def test_good_calls_have_equal_replies(cache: dict[str, Any]) -> None:
    async with both_ways(**cache) as (worker, _):
        for name, body in GOOD.items():
            reply = await send_both_ways(worker, body)
            assert reply.status == 200, (name, reply)
            assert reply.headers["x-compute-units"], name
            assert orjson.loads(reply.body), name


# Calls of JSON-RPC before 2.0. The hot path numbers the calls of its short path from 1 on, all others have larger ids.
OLD_CALL = b'{"jsonrpc":"1.0","id":"curltest","method":"gettxout","params":["ab",0]}'
OLD: dict[str, tuple[bytes, bool]] = {
    "1.0": (OLD_CALL, True),
    "1.1": (OLD_CALL.replace(b'"jsonrpc":"1.0"', b'"version":"1.1"'), True),
    "no version": (OLD_CALL.replace(b'"jsonrpc":"1.0",', b""), True),
    "2.0": (OLD_CALL.replace(b"1.0", b"2.0"), True),
    "2.0 and 1.1": (OLD_CALL.replace(b'"jsonrpc":"1.0"', b'"jsonrpc":"2.0","version":"1.1"'), True),
    "spaces": (OLD_CALL.replace(b":", b" : "), True),
    "a name in a text": (OLD_CALL.replace(b'"ab"', b'"\\"id\\""'), False),
    "null as id": (OLD_CALL.replace(b'"curltest"', b"null"), False),
    "long id": (OLD_CALL.replace(b"curltest", b"x" * 250), False),
    "no params": (OLD_CALL.replace(b',"params":["ab",0]', b""), False),
    "error": (OLD_CALL.replace(b"gettxout", b"getblockstats"), False),
    "unknown method": (OLD_CALL.replace(b"gettxout", b"nope"), False),
}
REPEATED = {
    "id": OLD_CALL.replace(b"{", b'{"id":1,', 1),
    "id without a version": b'{"method":"gettxout","params":[],"id":1,"id":2}',
    "version": OLD_CALL.replace(b'"jsonrpc":"1.0"', b'"version":"1.0","version":"1.1"'),
    "version of 2.0": OLD_CALL.replace(b'"jsonrpc":"1.0"', b'"version":"1.0","version":"1.1","jsonrpc":"2.0"'),
    "both versions": OLD_CALL.replace(b'"jsonrpc":"1.0"', b'"jsonrpc":"1.0","jsonrpc":"2.0"'),
    "an escaped name": OLD_CALL.replace(b'"params"', b'"\\u0069d":1,"params"'),
}


@on_uvloop
async def test_calls_of_old_versions_have_equal_replies_and_take_the_short_path() -> None:
    network, errors = "bitcoin/mainnet", {"getblockstats": {"code": -5, "message": "Block not found"}}
    async with (
        Scripted(stub(errors=errors)) as upstream,
        running_worker({network: [upstream.url]}, **NO_CACHE) as worker,
    ):
        await worker.send(OLD_CALL, network=network)  # The short path needs an open connection.
        upstream.bodies.clear()
        for name, (body, is_short) in OLD.items():
            reply = await send_both_ways(worker, body, network=network)
            assert reply.status == 200, name
            assert ("error" in reply.json) == (b'"2.0"' not in body), name
            ids = [call["id"] for call in upstream.calls]
            if ids and is_short:
                assert ids[0] < 1000 <= ids[1], name
            upstream.bodies.clear()
        for name, body in REPEATED.items():
            assert (await send_both_ways(worker, body, network=network)).status == 400, name
        assert not upstream.bodies


@WAYS
@on_uvloop
async def test_calls_without_an_id_have_no_reply(cache: dict[str, Any]) -> None:
    async with both_ways(**cache) as (worker, upstream):
        for name, body in SILENT.items():
            reply = await send_both_ways(worker, body)
            assert (reply.status, reply.body) == (204, b""), (name, reply)
        assert set(upstream.methods) == {"eth_gasPrice", "eth_sendRawTransaction", "eth_call", "eth_getBlockReceipts"}


@WAYS
@on_uvloop
async def test_bodies_that_are_not_calls_have_equal_replies(cache: dict[str, Any]) -> None:
    async with both_ways(**cache) as (worker, upstream):
        for name, body in MALFORMED.items():
            reply = await send_both_ways(worker, body)
            assert reply.fault(400)["details"]["rpc_code"] in (-32700, -32600), (name, reply)
            assert "x-compute-units" not in reply.headers
        assert not upstream.bodies


@on_uvloop
async def test_cached_results_have_equal_replies() -> None:
    async with both_ways() as (worker, upstream):
        for route in worker.app.networks.routes.values():
            await Tracker(route.state).look()
        upstream.bodies.clear()
        assert (await worker.send(CALL)).headers["x-cache"] == "miss"
        assert (await send_both_ways(worker, CALL)).headers["x-cache"] == "hit"
        assert len(upstream.bodies) == 1
        assert (await send_both_ways(worker, CALL, Cache_Control="no-cache")).headers["x-cache"] == "miss"
        assert (await send_both_ways(worker, CALL, Cache_Control="max-age=0, No-Cache")).headers["x-cache"] == "miss"
        assert (await send_both_ways(worker, CALL, Cache_Control="max-age=0")).headers["x-cache"] == "hit"
        assert len(upstream.bodies) == 5


@WAYS
@on_uvloop
async def test_refused_calls_that_cost_something_say_so(cache: dict[str, Any]) -> None:
    async with both_ways(**cache) as (worker, upstream):
        reply = await send_both_ways(worker, rpc("eth_sendRawTransaction", ["0x02"]), X_Verify="quorum 2/3")
        assert reply.fault(400)["param"] == "X-Verify"
        assert int(reply.headers["x-compute-units"]) > 0
        assert not upstream.bodies


# Keys


@WAYS
@on_uvloop
async def test_refused_keys_have_equal_replies(cache: dict[str, Any]) -> None:
    async with both_ways(**cache) as (worker, upstream):
        worker.add_key("disabled", disabled=True)
        worker.add_key("test", live=False)
        worker.add_key("reads", scopes=["rpc:read"])
        worker.add_key("writes", scopes=["rpc:write"])
        worker.add_key("neither", scopes=["data:read"])
        write = rpc("eth_sendRawTransaction", ["0x02"])
        for body in (CALL, write, batch(CALL), b"{}", rpc("eth_nope"), notification("eth_chainId")):
            (await send_both_ways(worker, body, key="disabled")).fault(403)
            (await send_both_ways(worker, body, key="test")).fault(403)
            (await send_both_ways(worker, body, key="neither")).fault(403)
        assert "rpc:write" in (await send_both_ways(worker, write, key="reads")).fault(403)["message"]
        assert "rpc:read" in (await send_both_ways(worker, CALL, key="writes")).fault(403)["message"]
        assert not upstream.bodies
        mixed = (
            await send_both_ways(worker, batch(CALL, rpc("eth_sendRawTransaction", ["0x02"], id=2)), key="reads")
        ).json
        assert [("error" in item) for item in mixed] == [False, True]
        assert (await send_both_ways(worker, CALL, key="test", network=TEST)).status == 200


@WAYS
@on_uvloop
async def test_key_revoked_between_two_requests_of_a_connection_is_refused(cache: dict[str, Any]) -> None:
    async with both_ways(**cache) as (worker, upstream):
        for way in ({}, COLD):
            key = worker.add_key("short-lived")
            request = worker.post(CALL, key="short-lived", **way)
            async with await worker.connect() as client:
                for _ in range(3):
                    assert (await client.send(request)).status == 200
                worker.app.keyring.remove(key)
                (await client.send(request)).fault(401)
        assert len(upstream.bodies) == 6
        (await send_both_ways(worker, CALL, key="short-lived", hot=False)).fault(401)


@WAYS
@on_uvloop
async def test_key_that_expires_between_two_requests_of_a_connection_is_refused(cache: dict[str, Any]) -> None:
    async with both_ways(**cache) as (worker, _):
        replies = []
        for way in ({}, COLD):
            key = worker.add_key("mortal", lives_s=1000.0)
            request = worker.post(CALL, key="mortal", X_Request_Id="same", **way)
            async with await worker.connect() as client:
                for _ in range(3):
                    assert (await client.send(request)).status == 200
                key.expires_at = 0.0
                replies.append(await client.send(request))
                (await client.send(request)).fault(401)
        replies[0].fault(401)
        assert compared(replies[0]) == compared(replies[1])


@on_uvloop
async def test_key_is_accepted_in_either_header() -> None:
    async with both_ways() as (worker, _):
        key = worker.keys["main"]
        good: list[dict[str, Any]] = [
            {"Authorization": f"Bearer {key}"},
            {"Authorization": f"bearer   {key}"},
            {"Authorization": f"BEARER {key}", "X_API_Key": ""},
            {"X_API_Key": f"  {key}  "},
            {"X_API_Key": key, "Authorization": "Basic abc"},
        ]
        for headers in good:
            assert (await send_both_ways(worker, CALL, key=None, **headers)).status == 200, headers
        for headers in ({"Authorization": key}, {"Authorization": f"Bearer\t{key}"}, {"X_API_Key": f"{key}é"}, {}):
            (await send_both_ways(worker, CALL, key=None, hot=False, **headers)).fault(401)


# Limits


@WAYS
@on_uvloop
async def test_rate_limited_calls_have_equal_replies(cache: dict[str, Any]) -> None:
    async with both_ways(**cache) as (worker, _):
        bodies = (CALL, rpc("eth_nope"), notification("eth_gasPrice"), rpc("eth_subscribe"), CALL)
        for name, way in (("hot", {}), ("cold", COLD)):
            worker.add_key(name, limits=Limits(1, 1000, 0))
            async with await worker.connect() as client:
                assert (await client.send(worker.post(CALL, key=name, **way))).status == 200
                for body in bodies:
                    await client.write(worker.post(body, key=name, X_Request_Id="same", **way))
                replies = [await client.reply() for _ in bodies]
            assert {reply.status for reply in replies} == {429}, name
            assert {reply.headers["retry-after"] for reply in replies} == {"1"}
            for reply in replies:
                assert compared(reply) == compared(replies[0])
                assert reply.headers["x-ratelimit-limit"] == "1"


@on_uvloop
async def test_bodies_of_unusual_size_or_type_have_equal_replies() -> None:
    async with both_ways(server={"max_body_bytes": 4096}) as (worker, _):
        padded = CALL[:-1] + b" " * (4096 - len(CALL)) + b"}"
        assert (await send_both_ways(worker, padded)).status == 200
        (await send_both_ways(worker, padded + b" ", hot=False)).fault(413)
        assert (await send_both_ways(worker, b"", hot=False)).fault(400)["details"]["rpc_code"] == -32700
        for kind in (
            "application/json; charset=utf-8",
            "Application/JSON;charset=UTF-8",
            "application/json ; charset=utf-8",
        ):
            assert (await send_both_ways(worker, CALL, Content_Type=kind)).status == 200, kind
        for kind in ("application/json; charset=latin-1", "application/json; x=y"):
            assert (await send_both_ways(worker, CALL, Content_Type=kind, hot=False)).status == 200, kind
        for kind in ("text/plain", "application/jsonx", "", "application/x-www-form-urlencoded"):
            (await send_both_ways(worker, CALL, Content_Type=kind, hot=False)).fault(415)


@WAYS
@on_uvloop
async def test_large_bodies_have_equal_replies(cache: dict[str, Any]) -> None:
    data = "0x" + "60806040" * 8192
    large = {
        "call": rpc("eth_getBalance", [data, "latest"], id=7),
        "old block": rpc("eth_getBalance", [data, "0x1"], id="x"),
        "no block": rpc("eth_gasPrice", [data]),
        "spaces": rpc("eth_gasPrice", []) + b" " * 20_000,
        "not ASCII": rpc("eth_gasPrice", ["ü" * 20_000]),
        "error": rpc("eth_call", [{"data": data}, "latest"]),
        "unknown method": rpc("eth_nope", [data]),
        "notification": orjson.dumps({"jsonrpc": "2.0", "method": "eth_gasPrice", "params": [data]}),
        "large id": rpc("eth_gasPrice", [], id=data),
        "large method": rpc(data, []),
        "no params": rpc("eth_gasPrice", {"a": data}).replace(b'"params":{"a":', b'"params":').replace(b'"}}', b'"}'),
        "control byte": rpc("eth_gasPrice", [data]).replace(b"60806040", b"60806\n40", 1),
        "broken": rpc("eth_gasPrice", [data])[:-3],
        "bytes": rpc("eth_gasPrice", [data]).replace(b"60806040", b"6080\xff640", 1),
        "batch": batch(rpc("eth_gasPrice", [data]), rpc("eth_getBalance", [data, "latest"], id=2)),
    }

    async with both_ways(**cache) as (worker, upstream):
        for name, body in large.items():
            upstream.bodies.clear()
            reply = await send_both_ways(worker, body)
            asked = [[call["method"], call["params"]] for call in upstream.calls]
            assert asked[: len(asked) // 2] == asked[len(asked) // 2 :] or reply.headers.get("x-cache"), name


@on_uvloop
async def test_heads_that_never_repeat_stay_on_the_hot_path() -> None:
    async with both_ways(**NO_CACHE) as (worker, _), await worker.connect() as client:
        for index in range(8):
            options = {"X_Request_Id": "the-same-for-both", "X_Trace_Id": f"{index:016x}"}
            varied = await client.send(worker.post(rpc("eth_gasPrice", id=index), **options))
            plain = await client.send(worker.post(rpc("eth_gasPrice", id=index), X_Request_Id="the-same-for-both"))
            assert compared(varied) == compared(plain)
        assert protocols_of(worker) == ["FrontConnection"]
        worker.app.keyring.find(worker.keys["main"], 0.0).alive = False  # type: ignore[union-attr]
        late = await client.send(worker.post(CALL, X_Trace_Id=f"{99:016x}"))
        assert protocols_of(worker) == ["HandlerConnection"], late


@on_uvloop
async def test_head_up_to_the_limit_is_served_and_beyond_it_refused() -> None:
    async with both_ways(server={"max_header_bytes": 2048}) as (worker, _):
        statuses = []
        for size in range(1700, 1900, 5):
            async with await worker.connect() as hot, await worker.connect() as cold:
                first = await hot.send(worker.post(CALL, X_Wide="a" * size, X_Request_Id="same"))
                # The header that selects the other path is part of the head.
                narrower = "a" * (size - len("TE: trailers\r\n"))
                second = await cold.send(worker.post(CALL, X_Wide=narrower, X_Request_Id="same", **COLD))
                assert compared(first) == compared(second), size
                statuses.append(first.status)
        assert statuses == sorted(statuses)
        assert set(statuses) == {200, 431}


@on_uvloop
async def test_every_path_of_a_network_is_served_and_no_other() -> None:
    async with both_ways() as (worker, _):
        for network, hot in ((LIVE, True), ("eth/mainnet", True), ("1/mainnet", False)):
            assert (await send_both_ways(worker, CALL, network=network, hot=hot)).status == 200
        for network in (
            "ethereum/nope",
            "ethereum/hoodi",
            "ETHEREUM/mainnet",
            "ethereum/mainnet?x",
            "ethereum//mainnet",
        ):
            reply = await send_both_ways(worker, CALL, network=network, hot=False)
            assert reply.status in (200, 404), (network, reply)


# Heads


@on_uvloop
async def test_headers_are_accepted_in_any_order_and_case() -> None:
    async with both_ways() as (worker, _):
        chance = random.Random(7)
        replies = set()
        body = rpc("net_listening")
        headers = {
            "Host": "x",
            "X-API-Key": worker.keys["main"],
            "Content-Type": "application/json",
            "Content-Length": str(len(body)),
            "X-Request-Id": "same",
            "Connection": "keep-alive",
            "User-Agent": "odd/1.0",
            "X-Trace": "é; a: b",
        }
        for _ in range(60):
            for way in ({}, COLD):
                lines = [(_any_case(name, chance), value) for name, value in {**headers, **way}.items()]
                chance.shuffle(lines)
                space = chance.choice((":", ": ", ":\t ", ":  "))
                head = "".join(f"{name}{space}{value}{chance.choice(('', ' '))}\r\n" for name, value in lines)
                data = f"POST /v1/rpc/{LIVE} HTTP/1.1\r\n{head}\r\n".encode() + body
                async with await worker.connect() as client:
                    status, found, reply_body = compared(await client.send(data))
                    replies.add((status, tuple(sorted(found.items())), reply_body))
                    assert protocols_of(worker) == (["HandlerConnection"] if way else ["FrontConnection"]), data
                await until_empty(worker)
        assert len(replies) == 1
        assert next(iter(replies))[0] == 200


def _any_case(name: str, chance: random.Random) -> str:
    return "".join(chance.choice((letter.lower(), letter.upper())) for letter in name)


# Framing: the same bytes, cut in every way


async def send_cut(client: HttpClient, data: bytes, cuts: Iterable[int]) -> None:
    """Send the data in segments, each after the service has read the one before."""
    at = 0
    for cut in (*cuts, len(data)):
        await client.write(data[at:cut])
        at = cut
        for _ in range(3):
            await asyncio.sleep(0)


async def answers(worker: Worker, data: bytes, count: int, every: Sequence[Sequence[int]]) -> set[Any]:
    """The set of distinct replies to the same requests, cut in each of these ways, on one connection."""
    replies = set()
    async with await worker.connect() as client:
        for cuts in every:
            await send_cut(client, data, cuts)
            got = [compared(await client.reply()) for _ in range(count)]
            replies.add(tuple((status, tuple(sorted(headers.items())), body) for status, headers, body in got))
    return replies


@WAYS
@on_uvloop
async def test_request_cut_at_any_byte_has_the_same_reply(cache: dict[str, Any]) -> None:
    async with both_ways(**cache) as (worker, _):
        replies = set()
        for way in ({}, COLD):
            data = worker.post(CALL, X_Request_Id="same", **way)
            replies |= await answers(worker, data, 1, [(), *((cut,) for cut in range(1, len(data)))])
            replies |= await answers(worker, data, 1, [range(1, len(data))])
        assert len(replies) == 1
        ((status, _, body),) = replies.pop()
        assert (status, body) == (200, b'{"jsonrpc":"2.0","id":1,"result":"0x1"}')


@WAYS
@on_uvloop
async def test_two_joined_requests_cut_at_any_byte_have_the_same_replies(cache: dict[str, Any]) -> None:
    async with both_ways(**cache) as (worker, _):
        replies = set()
        for way in ({}, COLD):
            first = worker.post(rpc("eth_chainId", id=1), X_Request_Id="first", **way)
            second = worker.post(batch(rpc("eth_gasPrice", id=2)), X_Request_Id="second", **way)
            data = first + second
            replies |= await answers(worker, data, 2, [(), *((cut,) for cut in range(1, len(data)))])
            replies |= await answers(worker, data, 2, [(len(first) - 1, len(first) + 1), range(1, len(data))])
        assert len(replies) == 1
        one, two = replies.pop()
        assert dict(one[1])["x-request-id"] == "first"
        assert dict(two[1])["x-request-id"] == "second"


@WAYS
@on_uvloop
async def test_pipelined_requests_are_answered_in_order(cache: dict[str, Any]) -> None:
    """Fast calls behind slow ones, faults between results, and a large result in the middle."""

    def make(call: Any) -> bytes:
        return http(answer(call, result=RESULTS.get(call["method"], call["params"])))

    async def act(exchange: Any) -> None:
        call = await exchange.call()
        await asyncio.sleep(0.02 if call["method"] == "eth_gasPrice" else 0)
        await replies(make)(exchange)

    bodies = [
        rpc("eth_gasPrice", id=1), rpc("eth_chainId", id=2), b"{}", rpc("eth_getBlockReceipts", ["0x10"], id=3),
        rpc("eth_nope", id=4), rpc("eth_gasPrice", id=5), notification("net_listening"), rpc("net_listening", [7], id=6),
    ]  # fmt: skip
    async with Scripted(act) as upstream, running_worker(upstream.url, **cache) as worker:
        seen = []
        for way in ({}, COLD):
            data = b"".join(worker.post(body, X_Request_Id=f"r{at}", **way) for at, body in enumerate(bodies))
            async with await worker.connect() as client:
                await client.write(data)
                got = [await client.reply() for _ in bodies]
            assert [reply.headers["x-request-id"] for reply in got] == [f"r{at}" for at in range(len(bodies))]
            assert [reply.status for reply in got] == [200, 200, 400, 200, 200, 200, 204, 200]
            seen.append([compared(reply) for reply in got])
        assert seen[0] == seen[1]


@on_uvloop
async def test_connection_is_handed_over_to_aiohttp_for_good() -> None:
    """In the middle of a pipeline; every request after it gets the same reply as before."""
    async with both_ways(**NO_CACHE) as (worker, _):
        hot, cold = (worker.post(CALL, X_Request_Id="same", **way) for way in ({}, COLD))
        async with await worker.connect() as client:
            await client.write(hot * 5 + cold + hot * 5)
            replies = [compared(await client.reply()) for _ in range(11)]
            assert replies == replies[:1] * 11
            assert protocols_of(worker) == ["HandlerConnection"]
            assert compared(await client.send(hot)) == replies[0]
