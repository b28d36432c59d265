"""An upstream that is reached over a WebSocket: calls and replies are messages that are matched by id.

One socket carries all calls of a worker (`websocket_client.py`), up to a limit; others wait in a queue (`call_queue.py`). When
the socket is lost, the calls in flight fail, and each sink decides how to go on. Callers use it like any `Upstream`, except
that no call takes the short path.
"""

from __future__ import annotations

import re
import time
from collections.abc import Awaitable, Callable, Collection

from proxy.core import jsonrpc
from proxy.core.upstream_health import UpstreamHealth
from proxy.settings import LinkSettings
from proxy.wire.call_queue import CallQueue
from proxy.wire.http1 import ReplyHeaders
from proxy.wire.upstream import ReplySink, Upstream, UpstreamConnection
from proxy.wire.upstream_stream import UpstreamStream
from proxy.wire.waiting_calls import WaitingCall
from proxy.wire.websocket_client import WebSocketClient, WebSocketLink

_OK = ReplyHeaders(200, 0, close=False, plain=True)
# The id of a call, or of the first call in a batch: this program writes every request, so it is always a number in this place.
_ID = re.compile(rb'\[?\{"jsonrpc":"2\.0","id":([0-9]+)')


class WebSocketConnection(UpstreamConnection):
    """The socket as sinks see it. Calls share it, so it cannot be paused; it only replaces and removes sinks."""

    __slots__ = ()

    def replace(self, sink: ReplySink, successor: ReplySink) -> None:
        self.upstream.replace(sink, successor)

    def leave(self, sink: ReplySink) -> None:
        self.upstream.leave(sink)


class WebSocketUpstream(Upstream):
    __slots__ = ("_batches", "_client", "_connection", "_link", "_pending", "_queue", "_replied_at")

    def __init__(self, health: UpstreamHealth, link: LinkSettings, *, limit: int, batch: int) -> None:
        super().__init__(health, depth=1, batch=batch)
        self._link = WebSocketLink(link)
        self._connection = WebSocketConnection(self)
        self._queue = CallQueue(self, limit)
        self._pending: dict[bytes, ReplySink] = {}
        # The ids in `_pending` that are batches, oldest first.
        self._batches: dict[bytes, None] = {}
        self._replied_at = 0.0
        self._client = WebSocketClient(self._link, self.label, self._receive, self._on_lost)

    def __repr__(self) -> str:
        return f"<WebSocketUpstream {self.label}: {len(self._pending)} in flight, {len(self._queue)} waiting>"

    def send_call(self, sink: ReplySink, tail: bytes, params: bytes) -> int:
        return 0

    def submit(
        self, sink: ReplySink, *body: bytes, once: bool = False, fresh: bool = False, header: bytes = b""
    ) -> UpstreamConnection | None:
        text = b"".join(body)
        is_full = self._is_full()
        if not is_full and not self._queue:
            self._send(sink, text)
            return self._connection
        now = time.monotonic()
        if self._queue.push(WaitingCall(sink, (text,), sink.client, now, once, fresh), is_full=is_full):
            self._serve_waiting(now)
        return None

    def probe(self, sink: ReplySink, *body: bytes) -> None:
        self._send(sink, b"".join(body))

    def _send(self, sink: ReplySink, text: bytes) -> None:
        match = _ID.match(text)
        assert match is not None  # this program writes every body
        if text[:1] == b"[":
            self._batches[match[1]] = None
        self._pending[match[1]] = sink
        self._client.send(match[1], text)

    # Waiting

    @property
    def is_crowded(self) -> bool:
        return self._queue.is_crowded

    def in_flight(self) -> list[ReplySink]:
        return list(self._pending.values())

    def has_replied_since(self, moment: float) -> bool:
        return self._replied_at > moment

    def _is_full(self) -> bool:
        return self._queue.is_full(len(self._pending))

    def _serve_waiting(self, now: float) -> None:
        while (call := self._queue.next_call(now)) is not None:
            self._queue.sent(call, now)
            self._send(call.sink, call.request[0])

    def stream(self, on_lost: Callable[[], None], *, echoes_ids: bool = False) -> UpstreamStream:
        """A separate connection for subscriptions, not open yet. See `UpstreamStream`."""
        return UpstreamStream(
            self._link, self.label, on_lost, self.private_words, meter=self.health.meter, echoes_ids=echoes_ids
        )

    def leave(self, sink: ReplySink) -> bool:
        """A call that was not sent yet is dropped; the upstream works on one that was."""
        is_unsent = self._queue.leave(sink)
        for call_id in [call_id for call_id, waiting in self._pending.items() if waiting is sink]:
            self._take(call_id)
            if self._client.drop(call_id):
                is_unsent = True
            else:
                self._queue.abandoned(sink.client, self.now)
        if self._queue:
            self._queue.count_held()
            self._serve_waiting(time.monotonic())
        return is_unsent

    def replace(self, sink: ReplySink, successor: ReplySink) -> None:
        self._queue.replace(sink, successor)
        self._queue.replaced(sink, successor)
        for call_id, waiting in self._pending.items():
            if waiting is sink:
                self._pending[call_id] = successor

    def tick(self, now: float) -> None:
        self.update_time(now)
        for call_id, sink in tuple(self._pending.items()):
            # The check of another call may have ended this one.
            if self._pending.get(call_id) is sink:
                self.check(sink, self._connection, now)
        if self._queue.needs_tick:
            self._queue.tick(now, used=len(self._pending))
            self._serve_waiting(now)

    def close(self) -> Awaitable[None]:
        return self._client.close()

    # Called by the client

    def _receive(self, body: bytes) -> None:
        sink = self._sink_of(body)
        if sink is None:
            return
        self._replied_at = now = time.monotonic()
        if self._queue:
            self._queue.ended(sink, now)
            self._serve_waiting(now)
        sink.on_reply(self._connection, _OK, body)

    def _sink_of(self, body: bytes) -> ReplySink | None:
        """The sink of this reply; None for messages that are no reply, such as notifications."""
        try:
            if jsonrpc.is_batch(body):
                ids = jsonrpc.read_replies(body)
            else:
                reply = jsonrpc.read_any_reply(body)
                is_anonymous = jsonrpc.is_anonymous_error(reply)
                ids = {jsonrpc.NULL if is_anonymous else bytes(reply.id): reply}
        except (ValueError, *jsonrpc.NOT_JSON):
            return None
        for call_id in ids:
            if call_id in self._pending:
                return self._take(call_id)
        # JSON-RPC 2.0, 5: the id is null if the request's id could not be read, as when a batch is refused as a whole.
        if jsonrpc.NULL not in ids:
            return None
        if not self._batches and len(self._pending) == 1:
            return self._take(next(iter(self._pending)))
        return self._take(next(iter(self._batches), b""))

    def _take(self, call_id: bytes) -> ReplySink | None:
        self._batches.pop(call_id, None)
        return self._pending.pop(call_id, None)

    def _on_lost(self, reason: str, *, unsent: Collection[bytes]) -> None:
        """The socket was lost. A sink that retries here uses a new socket, and so do the calls that wait, unless none could be
        opened."""
        pending, self._pending = self._pending, {}
        self._batches.clear()
        waiting = self._queue.take_all() if pending and len(unsent) == len(pending) else []
        for call_id, sink in pending.items():
            sink.on_fail(self, reason, sent=call_id not in unsent)
        for call in waiting:
            call.sink.on_fail(self, reason, sent=False)
        if self._queue:
            self._queue.count_held()
            self._serve_waiting(time.monotonic())
