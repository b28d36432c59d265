"""An upstream that is reached over a WebSocket: calls and replies are messages that are matched by id.

One socket carries all calls of a worker (`websocket_client.py`). When it is lost, the calls in flight fail, and each sink
decides how to go on. Callers use it like any `Upstream`, except that no call takes the short path.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Collection

from yarl import URL

from proxy.core import jsonrpc
from proxy.core.routing import UpstreamHealth
from proxy.wire.http1 import ReplyHead
from proxy.wire.http_upstream import MAX_WAITING
from proxy.wire.upstream import CROWDED, ReplySink, Upstream, UpstreamConnection
from proxy.wire.upstream_stream import UpstreamStream
from proxy.wire.websocket_client import WebSocketClient

_OK = ReplyHead(200, 0, close=False, plain=True)
# The id of a call, or of the first call in a batch: this program writes every request, so it is always a number in this place.
_ID = re.compile(rb'\[?\{"jsonrpc":"2\.0","id":([0-9]+)')


class WebSocketSlot(UpstreamConnection):
    """The socket as sinks see it: it has no bytes to pause, only sinks to replace."""

    __slots__ = ()

    def replace(self, sink: ReplySink, successor: ReplySink) -> None:
        self.upstream.replace(sink, successor)

    def leave(self, sink: ReplySink) -> None:
        self.upstream.leave(sink)


class WebSocketUpstream(Upstream):
    __slots__ = ("_batches", "_client", "_headers", "_loop", "_pending", "_slot", "_url")

    def __init__(self, health: UpstreamHealth, url: str, headers: dict[str, str], *, batch: int) -> None:
        super().__init__(health, depth=1, batch=batch)
        self._loop = asyncio.get_running_loop()
        self._url = URL(url, encoded=True)
        self._headers = headers
        self._slot = WebSocketSlot(self)
        self._pending: dict[bytes, ReplySink] = {}
        # The ids in `_pending` that are batches, oldest first.
        self._batches: dict[bytes, None] = {}
        self._client = WebSocketClient(self._url, headers, self.label, self._receive, self._fail_all)

    def __repr__(self) -> str:
        return f"<WebSocketUpstream {self.label}: {len(self._pending)} in flight>"

    def send_call(self, sink: ReplySink, tail: bytes, params: bytes) -> bytes | None:
        return None

    def submit(
        self, sink: ReplySink, *body: bytes, once: bool = False, fresh: bool = False
    ) -> UpstreamConnection | None:
        text = b"".join(body)
        found = _ID.match(text)
        assert found is not None  # this program writes every body
        if len(self._pending) >= MAX_WAITING:
            self._loop.call_soon(self._refuse, sink)
            return None
        if text[:1] == b"[":
            self._batches[found[1]] = None
        self._pending[found[1]] = sink
        self._client.send(found[1], text)
        return self._slot

    def _refuse(self, sink: ReplySink) -> None:
        sink.on_fail(self, CROWDED, sent=False)

    def stream(self, on_lost: Callable[[], None]) -> UpstreamStream:
        """A separate connection for subscriptions, not open yet."""
        stream = UpstreamStream(self._url, self._headers, self.label, on_lost)
        stream.private_words = self.private_words
        return stream

    def leave(self, sink: ReplySink) -> None:
        """Discard the sink's reply. A call that was not sent yet is dropped."""
        left = [call_id for call_id, waiting in self._pending.items() if waiting is sink]
        for call_id in left:
            self._take(call_id)
        self._client.drop(left)

    def replace(self, sink: ReplySink, successor: ReplySink) -> None:
        for call_id, waiting in self._pending.items():
            if waiting is sink:
                self._pending[call_id] = successor

    def tick(self, now: float) -> None:
        self.update_time(now)
        for sink in tuple(self._pending.values()):
            sink.on_tick(self._slot, now)

    def close(self) -> Awaitable[None]:
        return self._client.close()

    # Called by the client

    def _receive(self, body: bytes) -> None:
        sink = self._sink_of(body)
        if sink is not None:
            sink.on_reply(self._slot, _OK, body)

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

    def _fail_all(self, reason: str, *, unsent: Collection[bytes]) -> None:
        """The socket was lost. A sink that retries here uses a new socket."""
        pending, self._pending = self._pending, {}
        self._batches.clear()
        for call_id, sink in pending.items():
            sink.on_fail(self, reason, sent=call_id not in unsent)
