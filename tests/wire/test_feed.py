"""Streams: subscriptions on a dedicated WebSocket, against a real server with scripted replies."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import orjson
import pytest
from aiohttp import WSMsgType, web
from aiohttp.test_utils import TestServer
from yarl import URL

from proxy.core.upstream_health import UpstreamHealth
from proxy.settings import LinkSettings
from proxy.wire import upstream_stream, websocket_client
from proxy.wire.no_redirects import Redirected
from proxy.wire.upstream_stream import StreamLost, SubscriptionRefused, UpstreamStream
from proxy.wire.websocket_client import WebSocketLink
from proxy.wire.websocket_upstream import WebSocketUpstream
from tests.service import until
from tests.web.worker import on_uvloop
from tests.wire.recorded_calls import RecordedCall

Answer = Callable[[web.WebSocketResponse, dict[str, Any]], Awaitable[None]]


def link(url: str, headers: dict[str, str] | None = None) -> WebSocketLink:
    return WebSocketLink(LinkSettings(url=url, headers=headers or {}))


class Server:
    """Replies to each call with `answer`, and records the calls."""

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.calls: list[dict[str, Any]] = []
        self.headers: dict[str, str] = {}
        self.requests: list[web.Request] = []
        self.url = URL()

    async def handle(self, request: web.Request) -> web.WebSocketResponse:
        self.requests.append(request)
        self.headers = dict(request.headers)
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        async for message in socket:
            if message.type is WSMsgType.TEXT:
                self.calls.append(orjson.loads(message.data))
                await self.answer(socket, self.calls[-1])
        return socket


@asynccontextmanager
async def serving(answer: Answer) -> AsyncIterator[Server]:
    server = Server(answer)
    application = web.Application()
    application.router.add_get("/key", server.handle)
    runner = web.AppRunner(application, access_log=None, shutdown_timeout=0.05)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    server.url = URL(f"ws://127.0.0.1:{runner.addresses[0][1]}/key")
    try:
        yield server
    finally:
        await runner.cleanup()


@asynccontextmanager
async def opened(server: Server, on_lost: Callable[[], None] = lambda: None) -> AsyncIterator[UpstreamStream]:
    stream = UpstreamStream(link(str(server.url), {"X-Secret": "s"}), "net#1", on_lost)
    await stream.open()
    try:
        yield stream
    finally:
        await stream.close()


def reply(call: dict[str, Any], result: Any) -> str:
    return orjson.dumps({"jsonrpc": "2.0", "id": call["id"], "result": result}).decode()


def notice(subscription: Any, result: Any) -> str:
    params = {"subscription": subscription, "result": result}
    return orjson.dumps({"jsonrpc": "2.0", "method": "eth_subscription", "params": params}).decode()


async def confirm(socket: web.WebSocketResponse, call: dict[str, Any]) -> None:
    """Confirm, and tell two things in the same breath; another subscription's notice and nonsense are between."""
    await socket.send_str(reply(call, "0xabc"))
    await socket.send_str(notice("0xabc", {"number": "0x1"}))
    await socket.send_str(notice("0xdef", {"number": "0x9"}))
    await socket.send_str("nonsense")
    await socket.send_str("[]")
    await socket.send_str(notice("0xabc", {"number": "0x2"}))


@on_uvloop
async def test_notices_reach_their_subscription_in_order_from_the_first_on() -> None:
    async with serving(confirm) as server, opened(server) as stream:
        heard: list[bytes] = []
        assert await stream.subscribe("eth_subscribe", b'["newHeads"]', heard.append) == b'"0xabc"'
        await until(lambda: len(heard) == 2)
        assert heard == [b'{"number":"0x1"}', b'{"number":"0x2"}']
        assert server.calls[0]["method"] == "eth_subscribe"
        assert server.calls[0]["params"] == ["newHeads"]
        assert server.headers["X-Secret"] == "s"


@on_uvloop
async def test_ids_may_be_numbers() -> None:
    async def answer(socket: web.WebSocketResponse, call: dict[str, Any]) -> None:
        await socket.send_str(reply(call, 17))
        await socket.send_str(notice(17, 1))

    async with serving(answer) as server, opened(server) as stream:
        heard: list[bytes] = []
        assert await stream.subscribe("slotSubscribe", b"[]", heard.append) == b"17"
        await until(lambda: heard == [b"1"])


@on_uvloop
async def test_no_notification_arrives_after_unsubscribing() -> None:
    sockets: list[web.WebSocketResponse] = []

    async def answer(socket: web.WebSocketResponse, call: dict[str, Any]) -> None:
        sockets.append(socket)
        await socket.send_str(reply(call, "0x1" if call["method"] == "eth_subscribe" else True))

    async with serving(answer) as server, opened(server) as stream:
        heard: list[bytes] = []
        other: list[bytes] = []
        name = await stream.subscribe("eth_subscribe", b"[]", heard.append)
        await stream.unsubscribe("eth_unsubscribe", name)
        assert server.calls[1]["params"] == ["0x1"]
        await stream.subscribe("eth_subscribe", b"[]", other.append)
        await sockets[0].send_str(notice("0x1", 5))
        await until(lambda: other == [b"5"])
        assert heard == []


@on_uvloop
async def test_refusal_is_raised_as_it_came() -> None:
    async def refuse(socket: web.WebSocketResponse, call: dict[str, Any]) -> None:
        error = {"code": -32601, "message": "no such subscription"}
        await socket.send_str(orjson.dumps({"jsonrpc": "2.0", "id": call["id"], "error": error}).decode())

    async with serving(refuse) as server, opened(server) as stream:
        with pytest.raises(SubscriptionRefused, match="no such subscription"):
            await stream.subscribe("eth_subscribe", b"[]", lambda _: None)
        assert stream.is_open


@on_uvloop
async def test_lost_connection_fails_pending_calls_and_is_reported_once() -> None:
    async def hang_up(socket: web.WebSocketResponse, call: dict[str, Any]) -> None:
        transport = server.requests[0].transport
        assert transport is not None
        transport.abort()

    lost: list[int] = []
    async with serving(hang_up) as server, opened(server, lambda: lost.append(1)) as stream:
        with pytest.raises(StreamLost):
            await stream.subscribe("eth_subscribe", b"[]", lambda _: None)
        await until(lambda: lost == [1])
        with pytest.raises(StreamLost):
            await stream.subscribe("eth_subscribe", b"[]", lambda _: None)
    assert lost == [1]


@on_uvloop
async def test_silent_upstream_is_not_waited_for() -> None:
    async def ignore(socket: web.WebSocketResponse, call: dict[str, Any]) -> None: ...

    limit, upstream_stream.REPLY_S = upstream_stream.REPLY_S, 0.1
    try:
        async with serving(ignore) as server, opened(server) as stream:
            with pytest.raises(StreamLost, match=r"net#1 does not reply"):
                await stream.subscribe("eth_subscribe", b"[]", lambda _: None)
    finally:
        upstream_stream.REPLY_S = limit


@on_uvloop
async def test_message_over_the_limit_ends_the_stream() -> None:
    limit = vars(websocket_client)["MAX_REPLY_BYTES"]
    vars(websocket_client)["MAX_REPLY_BYTES"] = 1000

    async def flood(socket: web.WebSocketResponse, call: dict[str, Any]) -> None:
        await socket.send_str(notice("0x1", "x" * 5000))

    try:
        lost = asyncio.Event()
        async with serving(flood) as server, opened(server, lost.set) as stream:
            with pytest.raises(StreamLost):
                await stream.subscribe("eth_subscribe", b"[]", lambda _: None)
            async with asyncio.timeout(10):
                await lost.wait()
    finally:
        vars(websocket_client)["MAX_REPLY_BYTES"] = limit


@pytest.mark.parametrize("url", ["ws://127.0.0.1:1/key", "ws://nowhere.invalid/key"])
@on_uvloop
async def test_unreachable_upstream_is_lost_and_its_address_is_not_shown(url: str) -> None:
    stream = UpstreamStream(link(url), "net#1", lambda: None)
    with pytest.raises(StreamLost) as lost:
        await stream.open()
    await stream.close()
    assert "key" not in str(lost.value)
    assert lost.value.__cause__ is None


@on_uvloop
async def test_closed_stream_says_nothing_and_leaves_nothing() -> None:
    lost: list[int] = []
    async with serving(confirm) as server:
        async with opened(server, lambda: lost.append(1)) as stream:
            await stream.subscribe("eth_subscribe", b"[]", lambda _: None)
        assert not stream.is_open
        assert repr(stream) == "<UpstreamStream net#1 closed, 1 subscriptions>"
    assert lost == []


@on_uvloop
async def test_cancellation_while_closing_a_stream_is_raised() -> None:
    async with serving(confirm) as server, opened(server) as stream:
        await stream.subscribe("eth_subscribe", b"[]", lambda _: None)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0):
                await stream.close()


@on_uvloop
async def test_cancellation_while_closing_an_upstream_is_raised() -> None:
    async def ignore(socket: web.WebSocketResponse, call: dict[str, Any]) -> None: ...

    async with serving(ignore) as server:
        upstream = WebSocketUpstream(UpstreamHealth("net#1"), LinkSettings(url=str(server.url)), limit=8, batch=1)
        upstream.submit(RecordedCall(), b'{"jsonrpc":"2.0","id":1,"method":"eth_chainId"}')
        await until(lambda: server.calls)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0):
                await upstream.close()
        await upstream.close()


async def test_redirect_of_a_handshake_is_not_followed() -> None:
    """The other host would get the upstream's key."""
    seen = list[str]()

    async def redirect(request: web.Request) -> web.Response:
        seen.append(request.path)
        raise web.HTTPTemporaryRedirect("/elsewhere")

    application = web.Application()
    application.router.add_get("/{any:.*}", redirect)
    async with TestServer(application, host="127.0.0.1") as server:
        opened = link(f"ws://127.0.0.1:{server.port}/v2", {"X-Key": "secret"})
        async with opened.session() as session:
            with pytest.raises(Redirected):
                await opened.open(session)
    assert seen == ["/v2"]
