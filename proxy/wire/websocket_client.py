"""A WebSocket connection to an upstream, for calls (websocket_upstream) or for subscriptions (upstream_stream), and the link on
which it is opened, which event streams (upstream_events) use too.

The socket is opened when a message is sent and none is open, or by `open`.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Collection, Coroutine, Mapping
from typing import Any, Protocol

import aiohttp
from yarl import URL

from proxy.settings import LinkSettings, client_context
from proxy.wire.address import CONNECT_TIMEOUT_S, headers_of
from proxy.wire.no_redirects import no_redirects
from proxy.wire.upstream import MAX_REPLY_BYTES

# A silent connection is pinged after this time, and is lost if no pong arrives within half of it.
HEARTBEAT_S = 10.0
NOT_CONNECTED = (aiohttp.ClientError, OSError, TimeoutError)


def _session(connector: aiohttp.BaseConnector) -> aiohttp.ClientSession:
    return aiohttp.ClientSession(trust_env=False, connector=connector, trace_configs=[no_redirects()])


class WebSocketLink:
    """The address contains credentials and stays here: no error, log line or `repr` includes it."""

    def __init__(self, link: LinkSettings) -> None:
        self._link = link
        self._url = URL(link.url, encoded=True)

    def __repr__(self) -> str:
        return "<WebSocketLink>"

    def session(self) -> aiohttp.ClientSession:
        link = self._link
        if link.socket:
            return _session(aiohttp.UnixConnector(link.socket))
        context = client_context(link.ca, link.cert, link.key, link.min_tls) if link.uses_tls else True
        return _session(aiohttp.TCPConnector(ssl=context))

    async def open(
        self, session: aiohttp.ClientSession, *, decode_text: bool = True
    ) -> aiohttp.ClientWebSocketResponse[Any]:
        return await session.ws_connect(
            self._url,
            headers=headers_of(self._link),
            heartbeat=HEARTBEAT_S,
            max_msg_size=MAX_REPLY_BYTES,
            compress=0,
            decode_text=decode_text,
            proxy=self._link.proxy or None,
            server_hostname=self._link.server_name or None,
        )

    async def get(
        self, session: aiohttp.ClientSession, target: str, headers: Mapping[str, str]
    ) -> aiohttp.ClientResponse:
        """The reply to a GET of this target at the same server. Its body has no deadline."""
        return await session.get(
            URL(str(self._url.origin()) + target, encoded=True),
            headers={**headers_of(self._link), **headers, **self._basic()},
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S),
            allow_redirects=False,
            proxy=self._link.proxy or None,
            server_hostname=self._link.server_name or None,
        )

    def _basic(self) -> dict[str, str]:
        """The credentials of the URL, which is not sent whole."""
        if self._url.user is None:
            return {}
        return {"Authorization": aiohttp.BasicAuth(self._url.user, self._url.password or "").encode()}


class OnLost(Protocol):
    """Called when the socket is lost, with the reason and the messages that were not sent."""

    def __call__(self, reason: str, *, unsent: Collection[bytes]) -> None: ...


class WebSocketClient:
    def __init__(
        self,
        link: WebSocketLink,
        label: str,
        on_message: Callable[[bytes], None],
        on_lost: OnLost,
        *,
        checks_text: bool = True,
    ) -> None:
        """`checks_text`: whether a message that is not valid UTF-8 ends the connection."""
        self._link = link
        self._label = label
        self._on_message = on_message
        self._on_lost = on_lost
        self._checks_text = checks_text
        # Messages that were not sent yet, each with the id of its call.
        self._queue: deque[tuple[bytes, bytes]] = deque()
        self._wake = asyncio.Event()
        self._runner: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._session: aiohttp.ClientSession | None = None
        self._socket: aiohttp.ClientWebSocketResponse[bool] | None = None

    def __repr__(self) -> str:
        return f"<WebSocketClient {self._label}: {len(self._queue)} to send>"

    @property
    def is_running(self) -> bool:
        """Whether the socket is open or being opened."""
        return self._runner is not None and not self._runner.done()

    async def open(self) -> None:
        """Connect now, rather than with the first message. Raises one of NOT_CONNECTED."""
        socket = await self._connect()
        self._start(self._exchange(socket))

    def send(self, call_id: bytes, text: bytes) -> None:
        self._queue.append((call_id, text))
        self._wake.set()
        if not self.is_running:
            self._start(self._run())

    def _start(self, work: Coroutine[None, None, None]) -> None:
        self._runner = asyncio.get_running_loop().create_task(work, name=f"socket {self._label}")
        self._tasks.add(self._runner)
        self._runner.add_done_callback(self._tasks.discard)

    def drop(self, call_id: bytes) -> bool:
        """Drop the message of this call. Returns False if it was sent."""
        left = deque(queued for queued in self._queue if queued[0] != call_id)
        is_dropped = len(left) < len(self._queue)
        self._queue = left
        return is_dropped

    async def close(self) -> None:
        try:
            # A caller may retry when its call fails, which opens another socket: close that too.
            while self._tasks:
                for task in self._tasks:
                    task.cancel()
                await asyncio.wait(self._tasks)
            if self._socket is not None:
                await self._socket.close()  # A task cancelled before it started has not closed it.
        finally:
            if self._session is not None:
                await self._session.close()

    async def _run(self) -> None:
        try:
            socket = await self._connect()
        except NOT_CONNECTED:
            self._lose("connection refused")
            return
        await self._exchange(socket)

    async def _exchange(self, socket: aiohttp.ClientWebSocketResponse[bool]) -> None:
        """Exchange messages until the socket is lost, and report the loss."""
        try:
            async with asyncio.TaskGroup() as group:
                writer = group.create_task(self._send_queue(socket))
                await self._read(socket)
                writer.cancel()
        except* (aiohttp.ClientError, OSError):
            pass
        finally:
            self._lose("connection lost")
            await socket.close()

    def _lose(self, reason: str) -> None:
        self._runner = None
        unsent = {call_id for call_id, _ in self._queue}
        self._queue.clear()
        self._on_lost(reason, unsent=unsent)

    async def _connect(self) -> aiohttp.ClientWebSocketResponse[bool]:
        if self._session is None:
            self._session = self._link.session()
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            self._socket = await self._link.open(self._session, decode_text=self._checks_text)
        return self._socket

    async def _send_queue(self, socket: aiohttp.ClientWebSocketResponse[bool]) -> None:
        while True:
            while self._queue:
                _, body = self._queue.popleft()
                await socket.send_str(body.decode())
            self._wake.clear()
            await self._wake.wait()

    async def _read(self, socket: aiohttp.ClientWebSocketResponse[bool]) -> None:
        async for message in socket:
            if message.type is aiohttp.WSMsgType.TEXT:
                self._on_message(message.data.encode() if self._checks_text else message.data)
