"""The WebSocket endpoint: its handshake, calls, batches, and bad input."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import orjson
import pytest

from proxy.core import access
from proxy.core.access import Limits
from proxy.web.websocket import client_socket, frames
from tests.http_client import rpc
from tests.rpc_upstreams import Chain, ScriptedUpstream, scripted, value_of
from tests.service import until
from tests.sockets import RawSocket, bare, connected, handshake, refused, replace_feed
from tests.web.worker import LIVE, TEST, Worker, on_uvloop, running_worker

BALANCE = ("0x" + "11" * 20, "0x1")


@asynccontextmanager
async def served(**sections: Any) -> AsyncIterator[tuple[Worker, ScriptedUpstream]]:
    async with scripted(1, Chain()) as (upstream,), running_worker(upstream.url, **sections) as running:
        yield running, upstream


# The handshake


@on_uvloop
async def test_handshake_follows_the_rfc_and_has_rate_headers() -> None:
    async with served() as (running, _), await running.connect() as client:
        reply = await client.send(handshake(running, X_Request_Id="my-own"))
        assert reply.status == 101
        assert reply.headers["upgrade"] == "websocket"
        assert reply.headers["connection"] == "Upgrade"
        token = hashlib.sha1(b"dGhlIHNhbXBsZSBub25jZQ==258EAFA5-E914-47DA-95CA-C5AB0DC85B11").digest()
        assert reply.headers["sec-websocket-accept"] == base64.b64encode(token).decode()
        assert "sec-websocket-extensions" not in reply.headers
        assert reply.headers["x-request-id"] == "my-own"
        assert reply.headers["x-ratelimit-limit"] == "100000"


@on_uvloop
async def test_bad_key_is_refused_with_the_error_body() -> None:
    async with served() as (running, _):
        unknown = access.mint("live", b"\xff" * 32)
        for key in (None, "nonsense", unknown, unknown[:-1] + "0"):
            (await refused(running, key=key)).fault(401)
        (await refused(running, key=None, X_API_Key=unknown)).fault(401)


@on_uvloop
async def test_key_is_accepted_in_either_header_too() -> None:
    async with served() as (running, _):
        key = running.keys["main"]
        for name, value in (("X_API_Key", key), ("Authorization", f"Bearer {key}")):
            headers: dict[str, Any] = {name: value}
            async with bare(running, key=None, **headers) as client:
                client.write(rpc("eth_chainId"))
                assert "result" in await client.json()


@on_uvloop
async def test_test_key_on_a_live_network_is_forbidden() -> None:
    async with served() as (running, _):
        running.add_key("test", live=False)
        assert "svc_test_" in (await refused(running, key="test")).fault(403)["message"]
        async with connected(running, key="test", network=TEST) as client:
            assert await client.result("eth_getBalance", *BALANCE)


@on_uvloop
async def test_disabled_or_scopeless_or_expired_key_is_refused() -> None:
    async with served() as (running, _):
        running.add_key("off", disabled=True)
        running.add_key("other", scopes=["data:read"])
        running.add_key("old", lives_s=-1.0)
        (await refused(running, key="off")).fault(403)
        (await refused(running, key="other")).fault(403)
        (await refused(running, key="old")).fault(401)


@on_uvloop
async def test_unknown_network_is_not_found() -> None:
    async with served() as (running, _):
        assert "nochain/main" in (await refused(running, network="nochain/main")).fault(404)["message"]
        assert "no upstream" in (await refused(running, network="polygon/mainnet")).fault(404)["message"]


@on_uvloop
async def test_request_that_is_not_a_handshake_gets_426() -> None:
    async with served() as (running, _):
        for headers in ({"Upgrade": ""}, {"Connection": "close"}, {"Upgrade": "h2c"}, {"Sec-WebSocket-Version": "8"}):
            reply = await refused(running, **headers)
            reply.fault(426)
            assert reply.headers["upgrade"] == "websocket"
            assert reply.headers["sec-websocket-version"] == "13"
        for token in ("", "short", "!!!!", base64.b64encode(bytes(17)).decode()):
            reply = await refused(running, **{"Sec-WebSocket-Key": token})
            assert "Sec-WebSocket-Key" in reply.fault(400)["message"]


@on_uvloop
async def test_refused_connection_serves_further_requests() -> None:
    """A refused client may try again, or call over HTTP."""
    async with served() as (running, _), await running.connect() as client:
        (await client.send(handshake(running, key="nonsense"))).fault(401)
        (await client.send(handshake(running, Upgrade=""))).fault(426)
        assert (await client.send(running.post(rpc("eth_chainId")))).status == 200
        assert (await client.send(handshake(running))).status == 101


@on_uvloop
async def test_frames_sent_with_the_handshake_are_not_lost() -> None:
    async with served() as (running, _), await running.connect() as client:
        call = rpc("eth_getBalance", BALANCE)
        mask = b"\x01\x02\x03\x04"
        await client.write(handshake(running) + bytes((0x81, 0x80 | len(call))) + mask + frames.unmask(call, mask))
        assert (await client.reply()).status == 101
        assert "result" in await RawSocket(client.reader, client.writer).json()


@on_uvloop
async def test_sockets_of_an_account_are_limited_by_its_plan() -> None:
    async with served() as (running, _):
        first = running.add_key("few")
        first.account.plan = "free"
        running.add_key("second", beside=first)
        opened = [bare(running, key=key) for key in ("few", "second") * 10]
        for each in opened:
            await each.__aenter__()
        for key in ("few", "second"):
            reply = await refused(running, key=key)
            assert "20 open sockets" in reply.fault(429)["message"]
            assert reply.headers["retry-after"] == "1"
        async with bare(running):
            pass
        await opened.pop().__aexit__(None, None, None)
        await until(lambda: len(running.app.sockets) == 19)
        async with bare(running, key="few"):
            pass
        for each in opened:
            await each.__aexit__(None, None, None)
        await until(lambda: len(running.app.sockets) == 0)
        assert not running.app.limiter.connections


# Calls


@on_uvloop
async def test_calls_are_answered_by_the_same_cache_and_upstreams_as_on_http() -> None:
    async with served() as (running, upstream), connected(running) as client:
        await running.send(rpc("eth_getBalance", BALANCE))
        asked = upstream.count("eth_getBalance")
        wanted = value_of("balance", BALANCE[0], upstream.chain.hash_of(1))
        assert await client.result("eth_getBalance", *BALANCE) == wanted
        assert await client.result("eth_getBalance", BALANCE[0], "0x2") != wanted
        assert upstream.count("eth_getBalance") <= asked + 2


@on_uvloop
async def test_slow_call_does_not_delay_others() -> None:
    async with served() as (running, upstream), connected(running) as client:
        upstream.held.add("eth_estimateGas")
        await client.send({"jsonrpc": "2.0", "id": "slow", "method": "eth_estimateGas", "params": [{}]})
        await until(lambda: upstream.count("eth_estimateGas"))
        assert await client.result("eth_chainId")
        upstream.gate.set()
        assert (await client.reply("slow"))["result"] == value_of("eth_estimateGas", [{}])


@on_uvloop
async def test_id_comes_back_byte_for_byte_and_a_notification_has_no_reply() -> None:
    async with served() as (running, _), bare(running) as client:
        for id_ in (b'"x"', b"0", b"123456789012345678901234567890", b'"\\u20ac"', b"1.50"):
            client.write(b'{"jsonrpc":"2.0","method":"eth_chainId"}')
            client.write(b'{"jsonrpc":"2.0","id":%b,"method":"eth_chainId"}' % id_)
            _, reply = await client.frame()
            assert reply.startswith(b'{"jsonrpc":"2.0","id":%b,"result":' % id_)


@on_uvloop
async def test_batches_are_answered_in_order_each_item_on_its_own() -> None:
    async with served() as (running, upstream), connected(running) as client:
        await client.send(
            [
                {"jsonrpc": "2.0", "id": 1, "method": "eth_getBalance", "params": list(BALANCE)},
                {"jsonrpc": "2.0", "id": 2, "method": "eth_nope"},
                7,
                {"jsonrpc": "2.0", "method": "eth_chainId"},
                {"jsonrpc": "2.0", "id": 3, "method": "eth_call", "params": [{"to": BALANCE[0]}, "latest"]},
            ]
        )
        replies = await client.message()
        assert [reply["id"] for reply in replies] == [1, 2, None, 3]
        assert replies[0]["result"] == value_of("balance", BALANCE[0], upstream.chain.hash_of(1))
        assert replies[1]["error"]["code"] == -32601
        assert replies[2]["error"]["code"] == -32600
        await client.send([{"jsonrpc": "2.0", "method": "eth_chainId"}])
        assert await client.result("eth_chainId")


@on_uvloop
async def test_upstreams_error_passes_through() -> None:
    async with served() as (running, upstream), connected(running) as client:
        from tests.rpc_upstreams import Refused

        def revert(_: Any) -> Any:
            raise Refused(3, "execution reverted", data="0x08c379a0")

        upstream.answers["eth_call"] = revert
        error = await client.error("eth_call", {"to": BALANCE[0]}, "latest")
        assert error == {"code": 3, "message": "execution reverted", "data": "0x08c379a0"}


@on_uvloop
async def test_large_result_arrives_whole() -> None:
    async with served() as (running, upstream), connected(running) as client:
        large = "0x" + "ab" * 3_000_000
        upstream.answers["eth_getCode"] = lambda _: large
        assert await client.result("eth_getCode", BALANCE[0], "latest") == large
        assert await client.result("eth_chainId")


@on_uvloop
async def test_every_call_needs_its_scope() -> None:
    async with served() as (running, upstream):
        running.add_key("reader", scopes=["rpc:read"])
        running.add_key("writer", scopes=["rpc:write"])
        replace_feed(running)
        async with connected(running, key="reader") as client:
            assert await client.result("eth_chainId")
            assert (await client.error("eth_sendRawTransaction", "0x00"))["code"] == -32016
        async with connected(running, key="writer") as client:
            assert await client.result("eth_sendRawTransaction", "0x00")
            assert (await client.error("eth_chainId"))["code"] == -32016
            assert (await client.error("eth_subscribe", "newHeads"))["code"] == -32016
        assert upstream.count("eth_sendRawTransaction") == 1


@on_uvloop
async def test_calls_cost_the_same_as_on_http_and_a_refusal_has_a_retry_time() -> None:
    async with served() as (running, _):
        running.add_key("tight", limits=Limits(5, 200, 0))
        async with connected(running, key="tight") as client:
            for _ in range(5):
                assert await client.result("eth_gasPrice")
            error = await client.error("eth_gasPrice")
            assert error["code"] == -32005
            assert error["data"]["retryAfter"] == 1
            items = [{"jsonrpc": "2.0", "id": n, "method": "eth_gasPrice"} for n in range(4)]
            await client.send(items)
            assert [(reply["id"], "result" in reply) for reply in await client.message()] == [
                (n, True) for n in range(4)
            ]

            async def works() -> bool:
                return "result" in await client.call("eth_gasPrice")

            await until(works, every_s=0.1)


@on_uvloop
async def test_failing_upstreams_cost_nothing_and_close_no_socket() -> None:
    async with served() as (running, upstream):
        key = running.add_key("paying", limits=Limits(100, 100, 0))
        async with connected(running, key="paying") as client:
            assert await client.result("eth_gasPrice")
            await upstream.close()
            error = await client.error("eth_getBalance", "0x" + "22" * 20, "latest")
            assert error["code"] == -32603
            buckets = running.app.admission.buckets
            # All calls but the first were refunded, or their units have been refilled since.
            assert buckets.take(key.rate.bucket_index, time.monotonic(), 0.98, 0.98) == 0.0
            assert (await client.error("eth_nope"))["code"] == -32601


@on_uvloop
async def test_sockets_of_one_account_share_its_rate() -> None:
    async with served() as (running, _):
        first = running.add_key("first", limits=Limits(4, 1000, 0))
        running.add_key("second", beside=first)
        async with connected(running, key="first") as one, connected(running, key="second") as other:
            began = time.monotonic()
            replies = [await client.call("eth_gasPrice") for client in (one, other) * 8]
            took = time.monotonic() - began
            assert 4 <= sum("result" in reply for reply in replies) <= 4 + 4 * took


# Bad input


@pytest.mark.parametrize(
    ("text", "code", "word"),
    [
        ("", -32700, ""),
        ("   ", -32700, ""),
        ("hello", -32700, ""),
        ('{"jsonrpc":"2.0","id":1', -32700, ""),
        ("[" * 100_000, -32700, ""),
        ("7", -32600, ""),
        ('"text"', -32600, ""),
        ("null", -32600, ""),
        ("[]", -32600, "empty"),
        ("{}", -32600, "jsonrpc"),
        ('{"jsonrpc":"1.0","id":1,"method":"eth_chainId"}', -32600, "jsonrpc"),
        ('{"jsonrpc":"2.0","id":1}', -32600, "method"),
        ('{"jsonrpc":"2.0","id":1,"method":7}', -32600, ""),
        ('{"jsonrpc":"2.0","id":1,"method":"eth_chainId","METHOD":"eth_sendRawTransaction"}', -32600, "METHOD"),
        ('{"jsonrpc":"2.0","id":{},"method":"eth_chainId"}', -32600, "id"),
        ('{"jsonrpc":"2.0","id":1,"method":"eth_chainId","params":"x"}', -32600, "params"),
        ('{"jsonrpc":"2.0","id":1,"method":"eth_cha\\u0000inId"}', -32601, ""),
        ("[" + ",".join(["1"] * 1001) + "]", -32600, "1000"),
    ],
)
def test_bad_message_gets_an_error_and_the_connection_stays(text: str, code: int, word: str) -> None:
    @on_uvloop
    async def check() -> None:
        async with served() as (running, _), connected(running) as client:
            await client.send(text)
            found = await client.message()
            assert found["error"]["code"] == code
            assert word in found["error"]["message"]
            assert await client.result("eth_chainId")

    check()


@on_uvloop
async def test_malformed_messages_are_charged() -> None:
    async with served() as (running, _):
        running.add_key("tight", limits=Limits(5, 200, 0))
        async with connected(running, key="tight") as client:
            codes = []
            for _ in range(7):
                await client.send("nonsense")
                codes.append((await client.message())["error"]["code"])
            assert codes[:5] == [-32700] * 5
            assert -32005 in codes


BROKEN = [
    (b"\x81\x02hi", 1002),
    (b"\xc1\x80\x00\x00\x00\x00", 1002),
    (b"\x83\x80\x00\x00\x00\x00", 1002),
    (b"\x81\x81\x00\x00\x00\x00\xff", 1007),
    (b"\x81\xff" + (1 << 40).to_bytes(8, "big"), 1009),
    (b"\x88\x82\x00\x00\x00\x00" + (1005).to_bytes(2, "big"), 1002),
    (b"\x80\x80\x00\x00\x00\x00", 1002),
]


@on_uvloop
async def test_broken_frame_closes_with_its_code() -> None:
    async with served() as (running, _), AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(bare(running)) for _ in BROKEN]
        for client, (data, _) in zip(clients, BROKEN, strict=True):
            client.writer.write(data)
        assert [await client.close_code() for client in clients] == [code for _, code in BROKEN]
        for client in clients:
            assert await client.ended()
        await until(lambda: len(running.app.sockets) == 0)


@on_uvloop
async def test_message_over_the_limit_is_refused_and_one_at_the_limit_is_not() -> None:
    async with served(sockets={"max_message_bytes": 4096}) as (running, _), bare(running) as client:
        client.write(b"x" * 4096)
        assert (await client.json())["error"]["code"] == -32700
        client.write(b"x" * 4097)
        assert await client.close_code() == 1009


@on_uvloop
async def test_fragments_with_a_ping_between_are_one_call() -> None:
    async with served() as (running, _), bare(running) as client:
        call = rpc("eth_chainId")
        client.write(call[:10], final=False)
        client.write(b"are you there", frames.PING)
        client.write(call[10:], frames.CONTINUATION)
        assert await client.frame() == (frames.PONG, b"are you there")
        assert "result" in await client.json()


@on_uvloop
async def test_close_is_answered_with_its_code_and_ends_the_connection() -> None:
    async with served() as (running, _), bare(running) as client:
        client.write((4001).to_bytes(2, "big") + b"enough", frames.CLOSE)
        assert await client.close_code() == 4001
        assert await client.ended()
        await until(lambda: len(running.app.sockets) == 0)


@on_uvloop
async def test_connection_of_a_client_that_compresses_ends_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """RFC 6455, 5.5.1. A subscription and small replies do not delay it."""
    monkeypatch.setattr(client_socket, "CLOSE_REPLY_S", 1000.0)
    monkeypatch.setattr(client_socket, "DECOMPRESS_S", 1000.0)

    compressed: dict[str, Any] = {"Sec_WebSocket_Extensions": "permessage-deflate"}
    async with served() as (running, _), bare(running, **compressed) as client:
        client.write(rpc("eth_subscribe", ["newHeads"]))
        assert "result" in await client.json()
        client.write((1000).to_bytes(2, "big"), frames.CLOSE)
        assert await client.close_code() == 1000
        assert await client.ended()


@pytest.mark.parametrize("message", [b"", b"\x00", b"\xff", b"\xff\xfe\x00", b"x" * 500])
@on_uvloop
async def test_binary_message_that_is_not_json_gets_one_answer(message: bytes) -> None:
    async with served() as (running, _), bare(running) as client:
        client.write(message, frames.BINARY)
        assert (await client.json())["error"]["code"] == -32700
        client.write(rpc("eth_chainId"), frames.BINARY)
        assert "result" in await client.json()


@on_uvloop
async def test_message_that_never_completes_is_timed_out() -> None:
    async with served(server={"body_timeout_s": 0.2}) as (running, _), bare(running) as client:
        client.write(b'{"jsonrpc":', final=False)
        assert await client.close_code() == 1008


# Limits of one socket


@on_uvloop
async def test_messages_beyond_the_in_flight_limit_wait_and_none_is_lost() -> None:
    async with served(sockets={"max_in_flight": 3}) as (running, upstream), bare(running) as client:
        upstream.held.add("eth_estimateGas")
        for n in range(200):
            client.write(rpc("eth_estimateGas", [{"data": hex(n)}], id=n))
        await until(lambda: upstream.count("eth_estimateGas") == 3)
        client.write(b"", frames.PING)
        for _ in range(20):
            await asyncio.sleep(0)
        assert upstream.count("eth_estimateGas") == 3
        upstream.gate.set()
        found = [await client.frame() for _ in range(201)]
        assert sorted(orjson.loads(text)["id"] for opcode, text in found if opcode == frames.TEXT) == [*range(200)]
        assert found.count((frames.PONG, b"")) == 1
        assert upstream.most_at_once <= 3


@on_uvloop
async def test_calls_of_a_client_that_leaves_are_cancelled() -> None:
    async with served() as (running, upstream):
        async with bare(running) as client:
            upstream.held.add("eth_estimateGas")
            client.write(rpc("eth_estimateGas", [{}]))
            client.write(b"[" + rpc("eth_estimateGas", [{"data": "0x1"}]) + b"]")
            await until(lambda: upstream.count("eth_estimateGas") == 2)
        await until(lambda: len(running.app.sockets) == 0)
        assert not running.app.networks.routes[LIVE].state.flights
        upstream.gate.set()
        async with connected(running) as again:
            assert await again.result("eth_chainId")


@on_uvloop
async def test_silent_client_is_pinged_and_closed_and_one_that_answers_is_not() -> None:
    async with (
        served(sockets={"ping_s": 0.5, "idle_s": 1.0}) as (running, _),
        connected(running) as lively,
        bare(running) as silent,
        asyncio.TaskGroup() as group,
    ):
        listening = group.create_task(lively.ws.receive())
        assert (await silent.frame())[0] == frames.PING
        assert await silent.close_code() == 1008
        assert not listening.done()
        listening.cancel()
