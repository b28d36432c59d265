"""A WebSocket connection to an upstream.

The socket is opened when a message is sent and none is open.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Collection
from typing import Protocol

import aiohttp

from proxy.wire.address import CONNECT_TIMEOUT_S
from proxy.wire.websocket_link import WebSocketLink

HEARTBEAT_S = 20.0


class OnLost(Protocol):
    """Called when the socket is lost, with the reason and the messages that were not sent."""

    def __call__(self, reason: str, *, unsent: Collection[bytes]) -> None: ...


class WebSocketClient:
    def __init__(self, link: WebSocketLink, label: str, on_message: Callable[[bytes], None], on_lost: OnLost) -> None:
        self._link = link
        self._label = label
        self._on_message = on_message
        self._on_lost = on_lost
        # Messages that were not sent yet, each with the id of its call.
        self._queue: deque[tuple[bytes, bytes]] = deque()
        self._wake = asyncio.Event()
        self._runner: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._session: aiohttp.ClientSession | None = None

    def __repr__(self) -> str:
        return f"<WebSocketClient {self._label}: {len(self._queue)} to send>"

    def send(self, call_id: bytes, text: bytes) -> None:
        self._queue.append((call_id, text))
        self._wake.set()
        if self._runner is None or self._runner.done():
            loop = asyncio.get_running_loop()
            self._runner = loop.create_task(self._run(), name=f"socket {self._label}")
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
        finally:
            if self._session is not None:
                await self._session.close()

    async def _run(self) -> None:
        """Open the socket, exchange messages until it is lost, and report the loss."""
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                socket = await self._connect()
        except (aiohttp.ClientError, OSError, TimeoutError):
            self._lose("connection refused")
            return
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

    async def _connect(self) -> aiohttp.ClientWebSocketResponse:
        if self._session is None:
            self._session = self._link.session()
        return await self._link.open(self._session, heartbeat_s=HEARTBEAT_S)

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
                self._on_message(message.data.encode())
