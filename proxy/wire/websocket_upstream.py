"""An upstream behind a WebSocket: every call and every reply is a message, told apart by ids.

One socket carries all calls of a worker (`courier.py`); what was under way on one that is lost has failed, and each sink
decides what that means. To the rest of the house it is an `Upstream` like any other, only that nothing goes the short way.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Collection

from yarl import URL

from proxy.core import jsonrpc
from proxy.core.routing import UpstreamHealth
from proxy.wire.address import UpstreamAddress
from proxy.wire.connection import ReplySink, UpstreamConnection
from proxy.wire.http1 import ReplyHead
from proxy.wire.upstream import MAX_WAITING, Upstream
from proxy.wire.upstream_stream import UpstreamStream
from proxy.wire.websocket_client import WebSocketClient
from proxy.wire.write_buffer import WriteBuffer

_FINE = ReplyHead(200, 0, close=False, plain=True)
# The id of our own call, or of the first in a batch of ours: always a number, always in this place.
_ID = re.compile(rb'\[?\{"jsonrpc":"2\.0","id":([0-9]+)')


class WebSocketSlot(UpstreamConnection):
    """What sinks see of the socket: no bytes to pause, only places to change."""

    __slots__ = ()

    def replace(self, sink: ReplySink, successor: ReplySink) -> None:
        self.upstream.replace(sink, successor)

    def leave(self, sink: ReplySink) -> None:
        self.upstream.leave(sink)


class WebSocketUpstream(Upstream):
    __slots__ = ("_batches", "_courier", "_headers", "_line", "_pending", "_url")

    def __init__(
        self, health: UpstreamHealth, url: str, headers: dict[str, str], write_buffer: WriteBuffer, *, batch: int
    ) -> None:
        super().__init__(
            health, UpstreamAddress("", 0, tls=None, head=b""), write_buffer, limit=1, depth=1, batch=batch
        )
        self._url = URL(url, encoded=True)
        self._headers = headers
        self._line = WebSocketSlot(self)
        self._pending: dict[bytes, ReplySink] = {}
        # Of those the batches, oldest first.
        self._batches: dict[bytes, None] = {}
        self._courier = WebSocketClient(self._url, headers, self.label, self._receive, self._fail_all)

    def __repr__(self) -> str:
        return f"<WebSocketUpstream {self.label}: {len(self._pending)} under way>"

    def send_call(self, sink: ReplySink, tail: bytes, params: bytes) -> bytes | None:
        return None

    def submit(
        self, sink: ReplySink, *body: bytes, once: bool = False, fresh: bool = False
    ) -> UpstreamConnection | None:
        text = b"".join(body)
        found = _ID.match(text)
        assert found is not None  # every body is written by us
        if len(self._pending) >= MAX_WAITING:
            self._loop.call_soon(self._refuse, sink)
            return None
        if text[:1] == b"[":
            self._batches[found[1]] = None
        self._pending[found[1]] = sink
        self._courier.send(found[1], text)
        return self._line

    def stream(self, on_lost: Callable[[], None]) -> UpstreamStream:
        """A connection of its own, for subscriptions; not open yet."""
        return UpstreamStream(self._url, self._headers, self.label, on_lost)

    def leave(self, sink: ReplySink) -> None:
        """Nobody reads its reply, if one comes. What has not left yet stays here."""
        left = [call_id for call_id, waiting in self._pending.items() if waiting is sink]
        for call_id in left:
            self._take(call_id)
        self._courier.drop(left)

    def replace(self, sink: ReplySink, successor: ReplySink) -> None:
        for call_id, waiting in self._pending.items():
            if waiting is sink:
                self._pending[call_id] = successor

    def tick(self, now: float) -> None:
        self._tell_time(now)
        for sink in tuple(self._pending.values()):
            sink.on_tick(self._line, now)

    def close(self) -> Awaitable[None]:
        return self._courier.close()

    # What the courier brings

    def _receive(self, body: bytes) -> None:
        sink = self._sink_of(body)
        if sink is not None:
            sink.on_reply(self._line, _FINE, body)

    def _sink_of(self, body: bytes) -> ReplySink | None:
        """Whose reply this is; None for what nobody asked, such as a notification."""
        try:
            if jsonrpc.is_batch(body):
                ids = jsonrpc.read_replies(body)
            else:
                ids = {bytes(jsonrpc.read_any_reply(body).id): jsonrpc.UpstreamReply()}
        except (ValueError, *jsonrpc.NOT_JSON):
            return None
        for call_id in ids:
            if call_id in self._pending:
                return self._take(call_id)
        # JSON-RPC 2.0, 5: the id is null where that of the request could not be read, as of a batch that is refused whole.
        return self._take(next(iter(self._batches), b"")) if jsonrpc.NULL in ids else None

    def _take(self, call_id: bytes) -> ReplySink | None:
        self._batches.pop(call_id, None)
        return self._pending.pop(call_id, None)

    def _fail_all(self, reason: str, *, unsent: Collection[bytes]) -> None:
        """Whoever asks again does so over another socket."""
        pending, self._pending = self._pending, {}
        self._batches.clear()
        for call_id, sink in pending.items():
            sink.on_fail(self, reason, sent=call_id not in unsent)
