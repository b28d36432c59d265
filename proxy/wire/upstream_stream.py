"""Subscriptions at an upstream, on a WebSocket that is separate from the one for calls.

A stream is one connection and is used once: when it is lost, it reports that, and its owner opens another, perhaps to another
upstream. Notifications reach the callback of their subscription in the order in which the upstream sent them, starting with the
first after the confirmation. The address contains credentials and stays in this module.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from contextlib import suppress

import aiohttp
import msgspec

from proxy.core import jsonrpc
from proxy.wire.address import CONNECT_TIMEOUT_S
from proxy.wire.websocket_link import WebSocketLink

# A silent connection is pinged after this time, and is lost if no pong arrives within half of it.
HEARTBEAT_S = 10.0
# How long an upstream may take to confirm a subscription.
REPLY_S = 5.0

OnNotification = Callable[[bytes], None]


class StreamLost(Exception):
    """The connection is lost, or could not be opened. The message is for operators."""


class SubscriptionRefused(Exception):
    """The upstream's error object, as received."""

    def __init__(self, error: bytes) -> None:
        super().__init__(error)
        self.error = error


class _Params(msgspec.Struct, gc=False):
    subscription: msgspec.Raw
    result: msgspec.Raw


class _Message(msgspec.Struct, gc=False):
    """A reply or a notification."""

    id: msgspec.Raw = msgspec.Raw()
    result: msgspec.Raw = msgspec.Raw()
    error: msgspec.Raw = msgspec.Raw()
    params: _Params | None = None


_read = msgspec.json.Decoder(_Message).decode


class UpstreamStream:
    """`on_lost` is called once, when an open stream ends without `close`."""

    def __init__(
        self, link: WebSocketLink, label: str, on_lost: Callable[[], None], private_words: tuple[str, ...] = ()
    ) -> None:
        self.label = label
        # See `Upstream.private_words`.
        self.private_words = private_words
        self._link = link
        self._on_lost = on_lost
        self._ids = itertools.count(1)
        self._pending: dict[bytes, tuple[asyncio.Future[bytes], OnNotification | None]] = {}
        self._subscriptions: dict[bytes, OnNotification] = {}
        self._session: aiohttp.ClientSession | None = None
        self._socket: aiohttp.ClientWebSocketResponse[bool] | None = None
        self._reader: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        state = "open" if self.is_open else "closed"
        return f"<UpstreamStream {self.label} {state}, {len(self._subscriptions)} subscriptions>"

    @property
    def is_open(self) -> bool:
        return self._reader is not None and not self._reader.done()

    async def open(self) -> None:
        """Connect. Raises StreamLost."""
        self._session = self._link.session()
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                self._socket = await self._link.open(self._session, heartbeat_s=HEARTBEAT_S, decode_text=False)
        except (aiohttp.ClientError, OSError, TimeoutError):
            raise StreamLost(f"cannot connect to {self.label}") from None
        loop = asyncio.get_running_loop()
        self._reader = loop.create_task(self._run(self._socket), name=f"stream {self.label}")

    async def close(self) -> None:
        self._on_lost = _nothing
        try:
            if self._reader is not None:
                self._reader.cancel()
                # Awaiting the reader itself would not distinguish its cancellation from ours.
                await asyncio.wait([self._reader])
            if self._socket is not None:
                await self._socket.close()  # A reader that had not started has not done so.
        finally:
            if self._session is not None:
                await self._session.close()

    async def subscribe(self, method: str, params: bytes, on_notification: OnNotification) -> bytes:
        """Returns the upstream's id of the subscription. Raises SubscriptionRefused or StreamLost."""
        return await self._call(method, params, on_notification)

    async def unsubscribe(self, method: str, subscription: bytes) -> None:
        """Ignore notifications from now on, whether or not the upstream confirms."""
        self._subscriptions.pop(subscription, None)
        with suppress(SubscriptionRefused):
            await self._call(method, b"[%b]" % subscription, None)

    def forget(self, subscription: bytes) -> None:
        """The upstream ended the subscription."""
        self._subscriptions.pop(subscription, None)

    async def _call(self, method: str, params: bytes, on_notification: OnNotification | None) -> bytes:
        if self._socket is None or not self.is_open:
            raise StreamLost(f"{self.label} is not connected")
        call_id = b"%d" % next(self._ids)
        answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._pending[call_id] = (answer, on_notification)
        body = b"".join((jsonrpc.HEAD, call_id, jsonrpc.request_tail(method), params, b"}"))
        try:
            async with asyncio.timeout(REPLY_S):
                await self._socket.send_str(body.decode())
                return await answer
        except (aiohttp.ClientError, OSError, TimeoutError):
            raise StreamLost(f"{self.label} does not reply") from None
        finally:
            self._pending.pop(call_id, None)

    async def _run(self, socket: aiohttp.ClientWebSocketResponse[bool]) -> None:
        try:
            async for message in socket:
                if message.type is aiohttp.WSMsgType.TEXT:
                    self._receive(message.data)
        except (aiohttp.ClientError, OSError):
            pass
        finally:
            for answer, _ in self._pending.values():
                if not answer.done():
                    answer.set_exception(StreamLost(f"{self.label} closed the connection"))
            await socket.close()
            self._on_lost()

    def _receive(self, body: bytes) -> None:
        try:
            message = _read(body)
        except jsonrpc.NOT_JSON:
            return
        if message.params is not None:
            on_notification = self._subscriptions.get(bytes(message.params.subscription))
            if on_notification is not None:
                on_notification(bytes(message.params.result))
            return
        answer, on_notification = self._pending.get(bytes(message.id), (None, None))
        if answer is None or answer.done():
            return
        if message.error and bytes(message.error) != jsonrpc.NULL:
            answer.set_exception(SubscriptionRefused(bytes(message.error)))
            return
        result = bytes(message.result)
        if on_notification is not None:
            # At once, because the first notification may be in the same segment.
            self._subscriptions[result] = on_notification
        answer.set_result(result)


def _nothing() -> None: ...
