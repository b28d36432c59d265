"""An upstream behind a WebSocket: every call and every reply is a message, told apart by ids.

One socket carries all calls of a worker. It is opened when the first call needs it and again when a call needs it after it was
lost; what was under way on it then has failed, and each sink decides what that means. To the rest of the house it is an
`Upstream` like any other, only that nothing goes the short way.
"""

from __future__ import annotations

import asyncio
import re
from collections import deque
from collections.abc import Callable

import aiohttp
from yarl import URL

from proxy.core import jsonrpc
from proxy.core.routing import Health
from proxy.wire.connection import MOST, Connection, Sink
from proxy.wire.feed import Stream
from proxy.wire.http1 import ReplyHead
from proxy.wire.turn import Turn
from proxy.wire.upstream import CONNECT_TIMEOUT_S, MAX_WAITING, Address, Upstream

HEARTBEAT_S = 20.0
_FINE = ReplyHead(200, 0, close=False, plain=True)
# The id of our own call, or of the first in a batch of ours: always a number, always in this place.
_ID = re.compile(rb'\[?\{"jsonrpc":"2\.0","id":([0-9]+)')


class Line(Connection):
    """What sinks see of the socket: no bytes to pause, only places to change."""

    __slots__ = ()

    def replace(self, sink: Sink, successor: Sink) -> None:
        self.upstream.replace(sink, successor)

    def leave(self, sink: Sink) -> None:
        self.upstream.leave(sink)


class SocketUpstream(Upstream):
    __slots__ = ("_batches", "_headers", "_line", "_pending", "_queue", "_runner", "_session", "_url", "_wake")

    def __init__(self, health: Health, url: str, headers: dict[str, str], turn: Turn, *, batch: int) -> None:
        super().__init__(health, Address("", 0, tls=False, head=b""), turn, limit=1, depth=1, batch=batch)
        self._url = URL(url, encoded=True)
        self._headers = headers
        self._line = Line(self)
        self._pending: dict[bytes, Sink] = {}
        # Of those the batches, oldest first.
        self._batches: dict[bytes, None] = {}
        self._queue: deque[tuple[bytes, bytes]] = deque()
        self._wake = asyncio.Event()
        self._runner: asyncio.Task[None] | None = None
        self._session: aiohttp.ClientSession | None = None

    def __repr__(self) -> str:
        return f"<SocketUpstream {self.label}: {len(self._pending)} under way>"

    def send_call(self, sink: Sink, tail: bytes, params: bytes) -> bytes | None:
        return None

    def submit(self, sink: Sink, *body: bytes, once: bool = False, fresh: bool = False) -> Connection | None:
        text = b"".join(body)
        found = _ID.match(text)
        assert found is not None  # every body is written by us
        if len(self._pending) >= MAX_WAITING:
            self._loop.call_soon(self._refuse, sink)
            return None
        if text[:1] == b"[":
            self._batches[found[1]] = None
        self._pending[found[1]] = sink
        self._queue.append((found[1], text))
        self._wake.set()
        if self._runner is None or self._runner.done():
            self._runner = self._loop.create_task(self._run(), name=f"socket {self.label}")
            self._tasks.add(self._runner)
            self._runner.add_done_callback(self._tasks.discard)
        return self._line

    def stream(self, on_lost: Callable[[], None]) -> Stream:
        """A connection of its own, for subscriptions; not open yet."""
        return Stream(self._url, self._headers, self.label, on_lost)

    def leave(self, sink: Sink) -> None:
        """Nobody reads its reply, if one comes. What has not left yet stays here."""
        left = [call_id for call_id, waiting in self._pending.items() if waiting is sink]
        for call_id in left:
            self._take(call_id)
        self._queue = deque(queued for queued in self._queue if queued[0] not in left)

    def replace(self, sink: Sink, successor: Sink) -> None:
        for call_id, waiting in self._pending.items():
            if waiting is sink:
                self._pending[call_id] = successor

    def tick(self, now: float) -> None:
        self._tell_time(now)
        for sink in tuple(self._pending.values()):
            sink.on_tick(self._line, now)

    async def close(self) -> None:
        try:
            # Whoever is told that its call failed may ask once more, over a socket that is then closed too.
            while self._tasks:
                for task in self._tasks:
                    task.cancel()
                await asyncio.wait(self._tasks)
        finally:
            if self._session is not None:
                await self._session.close()

    # The socket

    async def _run(self) -> None:
        """Open the socket, carry calls until it is lost, and say so to whoever was under way."""
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                socket = await self._dial()
        except (aiohttp.ClientError, OSError, TimeoutError):
            self._fail_all("connection refused", sent=False)
            return
        try:
            async with asyncio.TaskGroup() as group:
                writer = group.create_task(self._send_queue(socket))
                await self._read(socket)
                writer.cancel()
        except* (aiohttp.ClientError, OSError):
            pass
        finally:
            self._fail_all("connection lost", sent=True)
            await socket.close()

    async def _dial(self) -> aiohttp.ClientWebSocketResponse:
        if self._session is None:
            self._session = aiohttp.ClientSession(trust_env=False)
        return await self._session.ws_connect(
            self._url, headers=self._headers, heartbeat=HEARTBEAT_S, max_msg_size=MOST, compress=0
        )

    async def _send_queue(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        while True:
            while self._queue:
                _, body = self._queue.popleft()
                await socket.send_str(body.decode())
            self._wake.clear()
            await self._wake.wait()

    async def _read(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        async for message in socket:
            if message.type is aiohttp.WSMsgType.TEXT:
                self._receive(message.data.encode())

    def _receive(self, body: bytes) -> None:
        sink = self._sink_of(body)
        if sink is not None:
            sink.on_reply(self._line, _FINE, body)

    def _sink_of(self, body: bytes) -> Sink | None:
        """Whose reply this is; None for what nobody asked, such as a notification."""
        try:
            if jsonrpc.is_batch(body):
                ids = jsonrpc.read_replies(body)
            else:
                ids = {bytes(jsonrpc.read_any_reply(body).id): jsonrpc.Reply()}
        except (ValueError, *jsonrpc.NOT_JSON):
            return None
        for call_id in ids:
            if call_id in self._pending:
                return self._take(call_id)
        # JSON-RPC 2.0, 5: the id is null where that of the request could not be read, as of a batch that is refused whole.
        return self._take(next(iter(self._batches), b"")) if jsonrpc.NULL in ids else None

    def _take(self, call_id: bytes) -> Sink | None:
        self._batches.pop(call_id, None)
        return self._pending.pop(call_id, None)

    def _fail_all(self, reason: str, *, sent: bool) -> None:
        """What still stands in the queue never left us. Whoever asks again does so over another socket."""
        self._runner = None
        unsent = {call_id for call_id, _ in self._queue}
        pending, self._pending = self._pending, {}
        self._batches.clear()
        self._queue.clear()
        for call_id, sink in pending.items():
            sink.on_fail(self, reason, sent=sent and call_id not in unsent)
