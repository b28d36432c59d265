"""WebSocket clients for tests, and a feed that a test controls.

`SocketClient` uses aiohttp, which checks the protocol itself; `RawSocket` writes any bytes and reads single frames.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import orjson

from proxy.services.feed.topics import FeedEvent, Listener, Topic
from proxy.web.websocket import frames
from tests.http_client import HttpClient, Reply
from tests.web.worker import LIVE, Worker

REPLY_S = 20.0


class SocketClient:
    """One open socket. Notifications and replies are kept apart, each in the order of arrival."""

    def __init__(self, ws: aiohttp.ClientWebSocketResponse) -> None:
        self.ws = ws
        self.events: list[dict[str, Any]] = []
        self._ids = itertools.count(1)

    async def message(self) -> Any:
        """The next message of any kind."""
        async with asyncio.timeout(REPLY_S):
            found = await self.ws.receive()
        assert found.type is aiohttp.WSMsgType.TEXT, (found.type, found.data, self.ws.close_code)
        return orjson.loads(found.data)

    async def send(self, data: Any) -> None:
        await self.ws.send_str(data if isinstance(data, str) else orjson.dumps(data).decode())

    async def reply(self, id_: Any) -> dict[str, Any]:
        """The reply with this id; events that come before it are kept."""
        while True:
            found = await self.message()
            if isinstance(found, dict) and "method" in found:
                self.events.append(found["params"])
            else:
                assert not isinstance(found, list), found
                assert found["id"] == id_, found
                return dict(found)

    async def call(self, method: str, *params: Any) -> dict[str, Any]:
        id_ = next(self._ids)
        await self.send({"jsonrpc": "2.0", "id": id_, "method": method, "params": list(params)})
        return await self.reply(id_)

    async def result(self, method: str, *params: Any) -> Any:
        reply = await self.call(method, *params)
        assert "result" in reply, reply
        return reply["result"]

    async def error(self, method: str, *params: Any) -> dict[str, Any]:
        reply = await self.call(method, *params)
        assert "error" in reply, reply
        return dict(reply["error"])

    async def event(self) -> dict[str, Any]:
        """The params of the next notification."""
        if self.events:
            return self.events.pop(0)
        found = await self.message()
        assert "method" in found, found
        return dict(found["params"])

    async def closed(self) -> tuple[int | None, str]:
        """The code and the reason of the server's close frame; messages before it are skipped."""
        async with asyncio.timeout(REPLY_S):
            while (found := await self.ws.receive()).type is aiohttp.WSMsgType.TEXT:
                pass
        assert found.type in (aiohttp.WSMsgType.CLOSE, aiohttp.WSMsgType.CLOSED, aiohttp.WSMsgType.CLOSING), found
        return self.ws.close_code, str(found.extra or "")


def address(worker: Worker, *, key: str | None = "main", network: str = LIVE) -> str:
    query = f"?apiKey={worker.keys.get(key, key)}" if key else ""
    return f"http://127.0.0.1:{worker.port}/v1/ws/{network}{query}"


@asynccontextmanager
async def connected(worker: Worker, **options: Any) -> AsyncIterator[SocketClient]:
    async with (
        aiohttp.ClientSession() as session,
        session.ws_connect(address(worker, **options), autoping=True, max_msg_size=0) as ws,
    ):
        yield SocketClient(ws)


class RawSocket:
    """A connection after its handshake: any bytes out, frames in."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    def write(self, payload: bytes, opcode: int = frames.TEXT, *, final: bool = True) -> None:
        head = frames.frame_header(len(payload), opcode)
        first = head[0] if final else head[0] & 0x7F
        mask = os.urandom(4)
        self.writer.write(bytes((first, head[1] | 0x80)) + head[2:] + mask + frames.unmask(payload, mask))

    async def frame(self) -> tuple[int, bytes]:
        """The next frame: its opcode and its payload."""
        async with asyncio.timeout(REPLY_S):
            first, second = await self.reader.readexactly(2)
            assert first & 0xF0 == 0x80, "server frames must be unfragmented and without extensions"
            assert second < 0x80, "server frames must not be masked"
            size = second
            if second >= 126:
                size = int.from_bytes(await self.reader.readexactly(2 if second == 126 else 8), "big")
            return first & 0x0F, await self.reader.readexactly(size)

    async def json(self) -> Any:
        """The next message; pings are skipped."""
        while (found := await self.frame())[0] == frames.PING:
            pass
        assert found[0] == frames.TEXT, found
        return orjson.loads(found[1])

    async def close_code(self) -> int:
        """The code of the server's close frame; messages and pings before it are skipped."""
        while (found := await self.frame())[0] != frames.CLOSE:
            pass
        return int.from_bytes(found[1][:2], "big")

    async def ended(self) -> bool:
        """Whether the server closes the connection; data before that is skipped."""
        async with asyncio.timeout(REPLY_S):
            try:
                while await self.reader.read(1 << 16):
                    pass
            except ConnectionError:
                pass
        return True


def handshake(worker: Worker, *, key: str | None = "main", network: str = LIVE, **headers: str) -> bytes:
    """A complete handshake request. Headers with an empty value are left out."""
    path = address(worker, key=key, network=network).partition(str(worker.port))[2]
    lines = {
        "Host": "127.0.0.1",
        "Upgrade": "websocket",
        "Connection": "Upgrade",
        "Sec-WebSocket-Version": "13",
        "Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25jZQ==",
        **{name.replace("_", "-"): value for name, value in headers.items()},
    }
    sent = "".join(f"{name}: {value}\r\n" for name, value in lines.items() if value)
    return f"GET {path} HTTP/1.1\r\n{sent}\r\n".encode()


async def refused(worker: Worker, **options: Any) -> Reply:
    """The HTTP reply to a handshake."""
    async with await worker.connect() as client:
        return await client.send(handshake(worker, **options))


@asynccontextmanager
async def bare(worker: Worker, *, small_buffer: bool = False, **options: Any) -> AsyncIterator[RawSocket]:
    """An open socket. `small_buffer` limits what the kernel holds for a client that does not read."""
    made = socket.socket()
    if small_buffer:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    made.setblocking(False)
    await asyncio.get_running_loop().sock_connect(made, ("127.0.0.1", worker.port))
    reader, writer = await asyncio.open_connection(sock=made, limit=1 << 16)
    client = HttpClient(reader, writer)
    try:
        await client.write(handshake(worker, **options))
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 101 "), head
        yield RawSocket(reader, writer)
    finally:
        await client.close()


class ScriptedFeed:
    """A network's feed that the test controls."""

    def __init__(self) -> None:
        self.listeners: dict[Topic, list[Listener]] = {}
        self.replays: list[tuple[Topic, int]] = []
        # The events of a replay, in batches.
        self.past: list[list[FeedEvent]] = []
        self.refusal: Exception | None = None

    async def subscribe(self, topic: Topic, listener: Listener) -> None:
        if self.refusal is not None:
            raise self.refusal
        self.listeners.setdefault(topic, []).append(listener)

    async def subscribe_from(self, topic: Topic, listener: Listener, from_block: int) -> None:
        self.replays.append((topic, from_block))
        for batch in self.past:
            await listener.room()
            listener.on_events(batch)
        await self.subscribe(topic, listener)

    def check_from(self, topic: Topic, from_block: int) -> None: ...

    def unsubscribe(self, topic: Topic, listener: Listener) -> None:
        found = self.listeners.get(topic, [])
        if listener in found:
            found.remove(listener)
        if not found:
            self.listeners.pop(topic, None)

    async def run(self) -> None: ...

    def emit(self, topic: Topic, *events: FeedEvent) -> None:
        for listener in [*self.listeners.get(topic, ())]:
            listener.on_events(events)

    @property
    def count(self) -> int:
        return sum(map(len, self.listeners.values()))


def replace_feed(worker: Worker, network: str = LIVE) -> ScriptedFeed:
    """Replace a network's feed."""
    found = ScriptedFeed()
    worker.app.feeds.by_network[network] = found
    return found


def head(number: int, *, size: int = 0) -> FeedEvent:
    """A new head, padded to about `size` bytes."""
    filling = {"extraData": "0x" + "00" * (size // 2)} if size else {}
    return FeedEvent(orjson.dumps({"number": hex(number), **filling}), number)


def heads(numbers: Sequence[int], **options: int) -> list[FeedEvent]:
    return [head(number, **options) for number in numbers]


HEADS = Topic("newHeads")
