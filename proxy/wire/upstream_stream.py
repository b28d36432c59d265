"""What an upstream tells by itself: subscriptions on a WebSocket of their own, apart from the one that carries calls.

One stream is one connection, used once: when it is lost it says so, and whoever wants more opens another, perhaps
elsewhere. A notice reaches its subscription's function in the order in which the upstream sent it, beginning with the first
after the confirmation. Its address, where credentials live, stays in this room.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Mapping
from contextlib import suppress

import aiohttp
import msgspec
from yarl import URL

from proxy.core import jsonrpc
from proxy.wire.address import CONNECT_TIMEOUT_S
from proxy.wire.upstream import MAX_REPLY_BYTES

# A connection that says nothing is asked whether it is there; without an answer in half this time it is lost.
HEARTBEAT_S = 10.0
# How long an upstream may take to confirm a subscription.
ANSWER_S = 5.0

OnNotice = Callable[[bytes], None]


class StreamLost(Exception):
    """The connection is gone, or could not be had. The words are for an operator."""


class SubscriptionRefused(Exception):
    """The upstream's error object, as it came."""

    def __init__(self, error: bytes) -> None:
        super().__init__(error)
        self.error = error


class _Params(msgspec.Struct, gc=False):
    subscription: msgspec.Raw
    result: msgspec.Raw


class _Message(msgspec.Struct, gc=False):
    """A reply or a notice."""

    id: msgspec.Raw = msgspec.Raw()
    result: msgspec.Raw = msgspec.Raw()
    error: msgspec.Raw = msgspec.Raw()
    params: _Params | None = None


_read = msgspec.json.Decoder(_Message).decode


class UpstreamStream:
    """`on_lost` is called once, when an open stream ends without `close`."""

    def __init__(self, url: URL, headers: Mapping[str, str], label: str, on_lost: Callable[[], None]) -> None:
        self.label = label
        self._url = url
        self._headers = headers
        self._on_lost = on_lost
        self._ids = itertools.count(1)
        self._asked: dict[bytes, tuple[asyncio.Future[bytes], OnNotice | None]] = {}
        self._told: dict[bytes, OnNotice] = {}
        self._session: aiohttp.ClientSession | None = None
        self._socket: aiohttp.ClientWebSocketResponse[bool] | None = None
        self._reader: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        state = "open" if self.is_open else "closed"
        return f"<UpstreamStream {self.label} {state}, {len(self._told)} subscriptions>"

    @property
    def is_open(self) -> bool:
        return self._reader is not None and not self._reader.done()

    async def open(self) -> None:
        """Connect; Lost where that fails."""
        self._session = aiohttp.ClientSession(trust_env=False)
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                self._socket = await self._session.ws_connect(
                    self._url,
                    headers=self._headers,
                    heartbeat=HEARTBEAT_S,
                    max_msg_size=MAX_REPLY_BYTES,
                    compress=0,
                    decode_text=False,
                )
        except (aiohttp.ClientError, OSError, TimeoutError):
            raise StreamLost(f"{self.label} cannot be connected to") from None
        loop = asyncio.get_running_loop()
        self._reader = loop.create_task(self._run(self._socket), name=f"stream {self.label}")

    async def close(self) -> None:
        self._on_lost = _nothing
        try:
            if self._reader is not None:
                self._reader.cancel()
                # To await the reader itself would not tell its cancellation from ours.
                await asyncio.wait([self._reader])
        finally:
            if self._session is not None:
                await self._session.close()

    async def subscribe(self, method: str, params: bytes, on_notice: OnNotice) -> bytes:
        """The upstream's id of the subscription. Refused or Lost."""
        return await self._ask(method, params, on_notice)

    async def unsubscribe(self, method: str, subscription: bytes) -> None:
        """Nothing is told from now on; whether the upstream agrees is its own affair."""
        self._told.pop(subscription, None)
        with suppress(SubscriptionRefused):
            await self._ask(method, b"[%b]" % subscription, None)

    def forget(self, subscription: bytes) -> None:
        """The upstream has ended it."""
        self._told.pop(subscription, None)

    async def _ask(self, method: str, params: bytes, on_notice: OnNotice | None) -> bytes:
        if self._socket is None or not self.is_open:
            raise StreamLost(f"{self.label} is not connected")
        call_id = b"%d" % next(self._ids)
        answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._asked[call_id] = (answer, on_notice)
        body = b"".join((jsonrpc.HEAD, call_id, jsonrpc.request_tail(method), params, b"}"))
        try:
            async with asyncio.timeout(ANSWER_S):
                await self._socket.send_str(body.decode())
                return await answer
        except (aiohttp.ClientError, OSError, TimeoutError):
            raise StreamLost(f"{self.label} does not answer") from None
        finally:
            self._asked.pop(call_id, None)

    async def _run(self, socket: aiohttp.ClientWebSocketResponse[bool]) -> None:
        try:
            async for message in socket:
                if message.type is aiohttp.WSMsgType.TEXT:
                    self._receive(message.data)
        except (aiohttp.ClientError, OSError):
            pass
        finally:
            for answer, _ in self._asked.values():
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
            on_notice = self._told.get(bytes(message.params.subscription))
            if on_notice is not None:
                on_notice(bytes(message.params.result))
            return
        answer, on_notice = self._asked.get(bytes(message.id), (None, None))
        if answer is None or answer.done():
            return
        if message.error and bytes(message.error) != jsonrpc.NULL:
            answer.set_exception(SubscriptionRefused(bytes(message.error)))
            return
        result = bytes(message.result)
        if on_notice is not None:
            # At once: the first notice may stand in the same segment.
            self._told[result] = on_notice
        answer.set_result(result)


def _nothing() -> None: ...
