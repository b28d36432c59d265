"""An upstream that is reached over HTTP/1.1, and the pool of its connections.

The pool opens connections as calls need them, up to a limit, and keeps idle ones in a stack, so that the one used last is used
next. Calls that find none wait in a bounded queue. The address contains credentials and stays in this module: no error, log
line or header includes it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable
from dataclasses import dataclass
from typing import Final, TypeAlias

from proxy.core.jsonrpc import HEAD
from proxy.core.routing import UpstreamHealth
from proxy.wire.address import UpstreamAddress
from proxy.wire.http_connection import HttpConnection
from proxy.wire.upstream import CROWDED, ReplySink, Upstream, UpstreamConnection
from proxy.wire.write_buffer import DEFER_BELOW, WriteBuffer

# Calls that may wait for a connection. Above this the upstream counts as down.
MAX_WAITING = 4096
# Many servers close connections after 5 s without a call. A call that must not be sent twice avoids those idle for this long.
WARM_S = 1.0

# The ids of the short path. All have the same length, so that the length of a request follows from its method and params.
_IDS: Final = [b"%d" % number for number in range(700, 956)]


def _length(size: int) -> bytes:
    """The end of a request's head and the start of its body, for a method and params of this size."""
    return b"%d\r\n\r\n%b" % (size + len(HEAD) + 3 + 1, HEAD)


_LENGTHS: Final = [_length(size) for size in range(1024)]


# In parts, so that large requests are not copied.
UpstreamRequest: TypeAlias = tuple[bytes, ...]


@dataclass(slots=True)
class QueuedCall:
    sink: ReplySink
    request: UpstreamRequest


class HttpUpstream(Upstream):
    __slots__ = (
        "_address", "_connecting", "_corked", "_loop", "_open", "_out", "_tasks", "_waiting", "_write_buffer", "head",
        "limit",
    )  # fmt: skip

    def __init__(
        self,
        health: UpstreamHealth,
        address: UpstreamAddress,
        write_buffer: WriteBuffer,
        *,
        limit: int,
        depth: int,
        batch: int,
    ) -> None:
        super().__init__(health, depth=depth, batch=batch)
        # With several calls on each, fewer connections suffice, and more calls leave in one segment.
        self.limit = max(2, limit // depth) if depth > 1 else limit
        self._address = address
        self.head = address.head
        self._write_buffer = write_buffer
        self._loop = asyncio.get_running_loop()
        self._open: set[UpstreamConnection] = set()
        self._waiting: deque[QueuedCall] = deque()
        self._connecting = 0
        self._tasks: set[asyncio.Task[UpstreamConnection]] = set()
        # With depth > 1: the connection that takes the calls of this loop turn, and their bytes.
        self._corked: UpstreamConnection | None = None
        self._out: list[bytes] = []

    def __repr__(self) -> str:
        return (
            f"<HttpUpstream {self.label}: {len(self._open)} open, {len(self.idle)} idle, {len(self._waiting)} waiting>"
        )

    def send_call(self, sink: ReplySink, tail: bytes, params: bytes) -> bytes | None:
        """Ids rotate on each connection. Replies arrive in order, so a stray one meets the next call at the latest, which has
        another id: a few ids suffice.
        """
        idle = self.idle
        if idle:
            connection = idle.pop()
        elif self.depth == 1:
            return None
        else:
            found = self._corked
            if found is None or len(found.sinks) >= self.depth:
                found = self._cork()
                if found is None:
                    return None
            connection = found
        connection.sinks.append(sink)
        connection.id_index = id_index = (connection.id_index + 1) & 255
        call_id = _IDS[id_index]
        size = len(tail) + len(params)
        parts = (self.head, _LENGTHS[size] if size < 1024 else _length(size), call_id, tail, params, b"}")
        if self.depth == 1:
            self._write_buffer.write(connection, b"".join(parts))
        else:
            self._out += parts
        return call_id

    def submit(
        self, sink: ReplySink, *body: bytes, once: bool = False, fresh: bool = False
    ) -> UpstreamConnection | None:
        request = (self.head, b"%d\r\n\r\n" % sum(map(len, body)), *body)
        if fresh:
            self._wait(sink, request)
            return None
        if self.depth > 1 and not once:
            return self._submit_corked(sink, request)
        idle = self.idle if self.depth == 1 else [each for each in self._open if not each.sinks]
        while idle:
            connection = idle.pop()
            if once and self.now - connection.idle_since > WARM_S:
                self.retire(connection)
                continue
            connection.sinks.append(sink)
            self._write(connection, request)
            return connection
        self._wait(sink, request)
        return None

    def _write(self, connection: UpstreamConnection, request: UpstreamRequest) -> None:
        """Write in the order in which the connection's sinks were added."""
        if connection is self._corked:
            self._out += request
        elif sum(map(len, request)) > DEFER_BELOW:
            self._write_buffer.write_at_once(connection, *request)
        else:
            self._write_buffer.write(connection, b"".join(request))

    def _submit_corked(self, sink: ReplySink, request: UpstreamRequest) -> UpstreamConnection | None:
        connection = self._corked
        if connection is None or len(connection.sinks) >= self.depth:
            connection = self._cork()
            if connection is None:
                self._wait(sink, request)
                return None
        connection.sinks.append(sink)
        self._out += request
        return connection

    def _cork(self) -> UpstreamConnection | None:
        """The calls of one loop turn go to the connection with the fewest calls in flight until it is full, in one segment."""
        connection = min(self._open, key=_load, default=None)
        if connection is None or len(connection.sinks) >= self.depth:
            return None
        if self._corked is None:
            self._loop.call_soon(self._uncork)
        else:
            self._uncork()
        self._corked = connection
        return connection

    def _uncork(self) -> None:
        connection, self._corked = self._corked, None
        out, self._out = self._out, []
        if out and connection is not None and connection.transport is not None:
            # Data that was queued for this connection before goes first.
            self._write_buffer.flush()
            connection.transport.write(b"".join(out))

    def _wait(self, sink: ReplySink, request: UpstreamRequest) -> None:
        if len(self._waiting) >= MAX_WAITING:
            self._loop.call_soon(self._refuse, sink)
            return
        self._waiting.append(QueuedCall(sink, request))
        self.rests = False
        self._open_another()

    def _open_another(self) -> None:
        """Open a connection if a call waits for one and the limit allows it."""
        if len(self._open) + self._connecting < self.limit and self._connecting < len(self._waiting):
            self._connecting += 1
            task = self._loop.create_task(self._address.dial(self._connection))
            self._tasks.add(task)
            task.add_done_callback(self._dialled)

    def _connection(self) -> HttpConnection:
        return HttpConnection(self)

    def _dialled(self, task: asyncio.Task[UpstreamConnection]) -> None:
        self._tasks.discard(task)
        self._connecting -= 1
        if task.cancelled():
            return
        if failed := task.exception():
            self._fail_waiting("connection timed out" if isinstance(failed, TimeoutError) else "connection refused")
            return
        connection = task.result()
        # An upstream may close the connection before this task runs.
        if connection.transport is None or connection.transport.is_closing():
            self._fail_waiting("connection lost")
            return
        self._open.add(connection)
        self.release(connection)

    def _fail_waiting(self, reason: str) -> None:
        """Fail one waiting call, or all of them if no connection is open."""
        if self._open:
            if self._waiting:
                self._waiting.popleft().sink.on_fail(self, reason, sent=False)
            return
        while self._waiting:
            self._waiting.popleft().sink.on_fail(self, reason, sent=False)

    def release(self, connection: UpstreamConnection) -> None:
        while self._waiting and len(connection.sinks) < self.depth:
            first = self._waiting.popleft()
            connection.sinks.append(first.sink)
            self._write(connection, first.request)
        if not connection.sinks:
            connection.idle_since = self.now
            if self.depth == 1:
                self.rests = not self._waiting
                self.idle.append(connection)

    def tick(self, now: float) -> None:
        self.update_time(now)
        for connection in tuple(self._open):
            for sink in tuple(connection.sinks):
                sink.on_tick(connection, now)
        for waiting in tuple(self._waiting):
            waiting.sink.on_tick(None, now)

    def retire(self, connection: UpstreamConnection) -> None:
        """Calls behind the last reply would never be answered, so they fail."""
        if connection.sinks:
            connection.abort()
            return
        self.lost(connection)
        if connection.transport is not None:
            connection.transport.close()

    def lost(self, connection: UpstreamConnection) -> None:
        self._open.discard(connection)
        if connection in self.idle:
            self.idle.remove(connection)
        if connection is self._corked:
            self._corked = None
            self._out = []
        self._open_another()

    def leave(self, sink: ReplySink) -> None:
        for connection in tuple(self._open):
            if sink in connection.sinks:
                connection.leave(sink)
                return
        self._waiting = deque(waiting for waiting in self._waiting if waiting.sink is not sink)

    def replace(self, sink: ReplySink, successor: ReplySink) -> None:
        for waiting in self._waiting:
            if waiting.sink is sink:
                waiting.sink = successor

    def _refuse(self, sink: ReplySink) -> None:
        sink.on_fail(self, CROWDED, sent=False)

    def close(self) -> Awaitable[None]:
        for task in tuple(self._tasks):
            task.cancel()
        self._waiting.clear()
        for connection in tuple(self._open):
            connection.abort()
        return asyncio.sleep(0)


def _load(connection: UpstreamConnection) -> int:
    return len(connection.sinks)
