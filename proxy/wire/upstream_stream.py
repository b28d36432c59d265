"""Subscriptions at an upstream, on a WebSocket that is separate from the one for calls.

A stream is one connection and is used once: when it is lost, it reports that, and its owner opens another, perhaps to another
upstream. Notifications reach the callback of their subscription in the order in which the upstream sent them, starting with the
first after the confirmation. The address contains credentials and stays in this module.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Collection
from contextlib import suppress

import msgspec

from proxy.core import jsonrpc
from proxy.core.credits import EVENT, CreditMeter
from proxy.wire.websocket_client import NOT_CONNECTED, WebSocketClient, WebSocketLink

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
        self,
        link: WebSocketLink,
        label: str,
        on_lost: Callable[[], None],
        private_words: tuple[str, ...] = (),
        *,
        meter: CreditMeter | None = None,
        echoes_ids: bool = False,
    ) -> None:
        """`meter`: counts what the provider bills. `echoes_ids`: notifications have the form of replies to the call that
        subscribed, as those of CometBFT."""
        self.label = label
        self._meter = meter
        self._echoes_ids = echoes_ids
        # See `Upstream.private_words`.
        self.private_words = private_words
        self._client = WebSocketClient(link, label, self._receive, self._lost, checks_text=False)
        self._on_lost = on_lost
        self._ids = itertools.count(1)
        self._pending: dict[bytes, tuple[asyncio.Future[bytes], OnNotification | None]] = {}
        self._subscriptions: dict[bytes, OnNotification] = {}

    def __repr__(self) -> str:
        state = "open" if self.is_open else "closed"
        return f"<UpstreamStream {self.label} {state}, {len(self._subscriptions)} subscriptions>"

    @property
    def is_open(self) -> bool:
        return self._client.is_running

    async def open(self) -> None:
        """Connect. Raises StreamLost."""
        try:
            await self._client.open()
        except NOT_CONNECTED:
            raise StreamLost(f"cannot connect to {self.label}") from None

    async def close(self) -> None:
        self._on_lost = _nothing
        await self._client.close()

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
        if not self.is_open:
            raise StreamLost(f"{self.label} is not connected")
        call_id = b"%d" % next(self._ids)
        answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._pending[call_id] = (answer, on_notification)
        body = b"".join((jsonrpc.ENVELOPE_START, call_id, jsonrpc.request_tail(method), params, b"}"))
        if self._meter is not None:
            self._meter.began((method, "", ""))
        try:
            async with asyncio.timeout(REPLY_S):
                self._client.send(call_id, body)
                return await answer
        except TimeoutError:
            raise StreamLost(f"{self.label} does not reply") from None
        finally:
            self._pending.pop(call_id, None)
            self._client.drop(call_id)

    def _lost(self, reason: str, *, unsent: Collection[bytes]) -> None:
        for answer, _ in self._pending.values():
            if not answer.done():
                answer.set_exception(StreamLost(f"{self.label} closed the connection"))
        self._on_lost()

    def _receive(self, body: bytes) -> None:
        try:
            message = _read(body)
        except jsonrpc.NOT_JSON:
            return
        if message.params is not None:
            if self._meter is not None:
                self._meter.began((EVENT, "", ""))
            on_notification = self._subscriptions.get(bytes(message.params.subscription))
            if on_notification is not None:
                on_notification(bytes(message.params.result))
            return
        answer, on_notification = self._pending.get(bytes(message.id), (None, None))
        if answer is None or answer.done():
            if self._echoes_ids and bytes(message.id) in self._subscriptions:
                self._subscriptions[bytes(message.id)](bytes(message.result))
            return
        if message.error and bytes(message.error) != jsonrpc.NULL:
            answer.set_exception(SubscriptionRefused(bytes(message.error)))
            return
        result = bytes(message.id if self._echoes_ids else message.result)
        if on_notification is not None:
            # At once, because the first notification may be in the same segment.
            self._subscriptions[result] = on_notification
        answer.set_result(result)


def _nothing() -> None: ...
