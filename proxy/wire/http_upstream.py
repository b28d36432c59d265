"""An upstream that is reached over HTTP/1.1, and the pool of its connections.

The pool opens connections as calls need them, up to a limit, and keeps idle ones in a stack, so that the one used last is used
next. Calls that find none wait in a queue (`call_queue.py`). The address contains credentials and stays in this module: no
error, log line or header includes it.

With one call on each connection, a connection that the queue's limit does not allow, or that is reserved, rests in `_reserve`
and not in `idle`, so that the short path never takes it. With several calls on each, the connections have room for more calls
than the limit may allow, and calls are counted. *Probes* have a connection to themselves when all others are busy.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable
from dataclasses import dataclass
from typing import Final

from proxy.core.jsonrpc import ENVELOPE_START
from proxy.core.upstream_health import UpstreamHealth
from proxy.turn_queue import TurnQueue
from proxy.wire.address import CONNECT_TIMEOUT_S, UpstreamAddress, detail_of, reason_of
from proxy.wire.call_queue import CallQueue
from proxy.wire.http_connection import AbsentSink, HttpConnection
from proxy.wire.upstream import ReplySink, Upstream, UpstreamConnection
from proxy.wire.waiting_calls import UpstreamRequest, WaitingCall
from proxy.wire.write_buffer import DEFER_BELOW, WriteBuffer

log = logging.getLogger("penstock.upstream")

# While calls wait, a client that has not read its reply for this long loses the connection: the rest of the reply is read into
# memory, or dropped. The second limit applies while such clients hold half of the connections or more.
STALLED_S: Final = 2.0
STALLED_BY_MANY_S: Final = 0.1
# Many servers close connections after 5 s without a call. A call that must not be sent twice avoids connections that have been
# idle for longer than this.
WARM_S = 1.0

# The ids of the short path. All have the same length, so that the length of a request follows from its method and params.
_FIRST_ID: Final = 700
_IDS: Final = [b"%d" % number for number in range(_FIRST_ID, _FIRST_ID + 256)]


def _length(size: int) -> bytes:
    """The end of a request's headers and the start of its body, for a method and params of this size."""
    return b"%d\r\n\r\n%b" % (size + len(ENVELOPE_START) + 3 + 1, ENVELOPE_START)


_LENGTHS: Final = [_length(size) for size in range(1024)]


@dataclass(frozen=True, slots=True)
class PoolTerms:
    """The target of a pool's connections, and how many it opens. `depth`: the calls on each at a time. `batch`: those in one
    request."""

    address: UpstreamAddress
    write_buffer: WriteBuffer
    turns: TurnQueue
    limit: int
    depth: int = 1
    batch: int = 1


class HttpUpstream(Upstream):
    __slots__ = (
        "_connecting",
        "_cork_depth",
        "_corked",
        "_failure",
        "_loop",
        "_open",
        "_out",
        "_probes",
        "_queue",
        "_reserve",
        "_tasks",
        "_terms",
        "_write_buffer",
        "request_start",
    )

    def __init__(self, health: UpstreamHealth, terms: PoolTerms) -> None:
        depth = terms.depth
        super().__init__(health, depth=depth, batch=terms.batch)
        # With several calls on each connection, fewer connections suffice, and more calls are sent in one segment.
        self._queue = CallQueue(self, max(2, terms.limit // depth) * depth if depth > 1 else terms.limit)
        self._terms = terms
        # Why no connection can be opened, if that was logged.
        self._failure = ""
        self.request_start = terms.address.request_start
        self._write_buffer = terms.write_buffer
        self._loop = asyncio.get_running_loop()
        # In the order in which they were opened, as the tasks below: a set's order would differ from run to run.
        self._open: dict[UpstreamConnection, None] = {}
        # Connections without a call that only calls from the queue may take.
        self._reserve: list[UpstreamConnection] = []
        # A pool of one connection, for probes that find all others busy.
        self._probes: HttpUpstream | None = None
        self._connecting = 0
        self._tasks: dict[asyncio.Task[UpstreamConnection], None] = {}
        # With depth > 1: the connection that takes the calls of this loop turn, how many it may carry, and their bytes.
        self._corked: UpstreamConnection | None = None
        self._cork_depth = depth
        self._out: list[bytes] = []

    def __repr__(self) -> str:
        return f"<HttpUpstream {self.label}: {len(self._open)} open, {len(self.idle)} idle, {len(self._queue)} waiting>"

    def send_call(self, sink: ReplySink, tail: bytes, params: bytes) -> int:
        """Each connection rotates through 256 ids. Replies arrive in order, so a reply too many would be read as the next
        call's, which has a different id: it is recognised.
        """
        idle = self.idle
        if idle:
            connection = idle.pop()
        elif self.depth == 1:
            return 0
        else:
            corked = self._corked
            if corked is None or len(corked.sinks) >= self._cork_depth:
                corked = self._cork()
                if corked is None:
                    return 0
            connection = corked
        id_index = connection.take_call(sink)
        size = len(tail) + len(params)
        parts = (
            self.request_start,
            _LENGTHS[size] if size < 1024 else _length(size),
            _IDS[id_index],
            tail,
            params,
            b"}",
        )
        if self.depth == 1:
            self._write_buffer.write(connection, b"".join(parts))
        else:
            self._out += parts
        return _FIRST_ID + id_index

    def submit(
        self, sink: ReplySink, *body: bytes, once: bool = False, fresh: bool = False, header: bytes = b""
    ) -> UpstreamConnection | None:
        request = (self.request_start, b"%d\r\n%b\r\n" % (sum(map(len, body)), header), *body)
        return self.send_request(sink, request, once=once, fresh=fresh)

    def send_request(
        self, sink: ReplySink, request: UpstreamRequest, *, once: bool, fresh: bool
    ) -> UpstreamConnection | None:
        """Send a whole request. See `submit`."""
        if fresh:
            self._wait(sink, request, fresh=True)
            return None
        if self.depth > 1 and not once:
            return self._submit_corked(sink, request)
        idle = self.idle if self.depth == 1 else self._empty()
        while idle:
            connection = idle.pop()
            if once and self.now - connection.idle_since > WARM_S:
                self.retire(connection)
                continue
            connection.sinks.append(sink)
            self._write(connection, request)
            return connection
        self._wait(sink, request, once=once)
        return None

    def probe(self, sink: ReplySink, *body: bytes) -> None:
        if self.idle or not self._open:
            self.submit(sink, *body)
            return
        if self._probes is None:
            self._probes = self.probe_pool()
        self._probes.submit(sink, *body)

    def probe_pool(self) -> HttpUpstream:
        return HttpUpstream(self.health, self.probe_terms)

    @property
    def probe_terms(self) -> PoolTerms:
        terms = self._terms
        return PoolTerms(terms.address, terms.write_buffer, terms.turns, limit=1)

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
        if connection is None or len(connection.sinks) >= self._cork_depth:
            connection = self._cork()
            if connection is None:
                self._wait(sink, request)
                return None
        connection.sinks.append(sink)
        self._out += request
        return connection

    def _cork(self) -> UpstreamConnection | None:
        """Choose the connection that takes the calls of this loop turn, which are sent in one segment: the one with the fewest
        calls in flight. None if there is no room, or if calls wait."""
        connection = self._least_loaded()
        room = self._queue.room(self._calls()) - self._queue.reserved
        if connection is None or room <= 0 or self._queue:
            return None
        if self._corked is None:
            self._loop.call_soon(self._uncork)
        else:
            self._uncork()
        self._corked = connection
        self._cork_depth = min(self.depth, len(connection.sinks) + room)
        return connection

    def _uncork(self) -> None:
        connection, self._corked = self._corked, None
        out, self._out = self._out, []
        if out and connection is not None and connection.transport is not None:
            # Data that was queued for this connection before goes first.
            self._write_buffer.flush()
            connection.transport.write(b"".join(out))

    def _least_loaded(self) -> UpstreamConnection | None:
        """The connection with the fewest calls, if it has room for one more. One on which a call was given up is not
        taken: replies come in order, and that one may never come."""
        connection = min(self._open, key=_load, default=None)
        if connection is not None and _is_held_up(connection):
            connection = min([each for each in self._open if not _is_held_up(each)], key=_load, default=None)
        return None if connection is None or len(connection.sinks) >= self.depth else connection

    def _empty(self) -> list[UpstreamConnection]:
        """With depth > 1: connections without a call, if a call may be sent past the queue."""
        if self._queue or self._queue.is_full(self._calls()):
            return []
        return [each for each in self._open if not each.sinks]

    # Waiting

    @property
    def is_crowded(self) -> bool:
        return self._queue.is_crowded

    def in_flight(self) -> list[ReplySink]:
        return [sink for connection in self._open for sink in connection.sinks]

    def _calls(self) -> int:
        return sum(map(_load, self._open))

    def _places(self) -> int:
        """Calls that the connections have room for, including those that are being opened."""
        return (len(self._open) + self._connecting) * self.depth

    def _is_full(self) -> bool:
        """Whether calls wait for other calls to end, and not for a connection to open."""
        return self._queue.is_full(self._places())

    def _wait(self, sink: ReplySink, request: UpstreamRequest, *, once: bool = False, fresh: bool = False) -> None:
        now = time.monotonic()
        call = WaitingCall(sink, request, sink.client, now, once, fresh)
        if self._queue.push(call, is_full=self._is_full()):
            self.rests = False
            self._serve_waiting(now)

    def _serve_waiting(self, now: float) -> None:
        """Send the calls that may be sent on connections that are open, and open one more if that is not enough."""
        queue = self._queue
        while queue:
            connection = self._vacant()
            if connection is None:
                self._open_another()
                return
            call = queue.next_call(now)
            if call is None:
                self._rest(connection)
                return
            if call.fresh or (call.once and connection.sinks and not self._is_full()):
                self._replace_for(call, connection)
                return
            if call.once and not connection.sinks and now - connection.idle_since > WARM_S:
                queue.push_back(call)
                self.retire(connection)
                continue
            self._send(call, connection, now)
        self._relax()

    def _replace_for(self, call: WaitingCall, connection: UpstreamConnection) -> None:
        """The call needs a new connection: open one, after closing this one if the limit allows no more."""
        self._queue.push_back(call)
        if self._is_full() and not connection.sinks:
            self.retire(connection)
        else:
            self._rest(connection)
            self._open_another()

    def _vacant(self) -> UpstreamConnection | None:
        """A connection for a call from the queue."""
        if self.depth > 1:
            return self._least_loaded()
        if self._reserve:
            return self._reserve.pop()
        return self.idle.pop() if self.idle else None

    def _send(self, call: WaitingCall, connection: UpstreamConnection, now: float) -> None:
        self._queue.sent(call, now)
        connection.sinks.append(call.sink)
        self._write(connection, call.request)

    def _rest(self, connection: UpstreamConnection) -> None:
        """The connection has no call. While calls wait, it goes to `_reserve`, where only the queue can use it."""
        if self.depth > 1:
            return
        if self._queue or self._spare() < 0:
            self._reserve.append(connection)
        else:
            self.idle.append(connection)

    def _relax(self) -> None:
        """No call waits: return the connections that are not reserved to `idle`."""
        if self.depth > 1:
            return
        while self._reserve and self._spare() > 0:
            self.idle.append(self._reserve.pop())
        self.rests = self._spare() >= 0

    def _spare(self) -> int:
        """How many more connections the limit allows outside of `_reserve`."""
        return self._queue.allowed - self._queue.reserved - len(self._open) + len(self._reserve)

    # Connections

    def _open_another(self) -> None:
        """Open a connection if a call waits for one and the limit allows it."""
        if self._queue.room(self._places()) > 0 and self._connecting < len(self._queue):
            self._connecting += 1
            task = self._loop.create_task(self._terms.address.dial(self._connection))
            self._tasks[task] = None
            task.add_done_callback(self._dialled)

    def _connection(self) -> HttpConnection:
        return HttpConnection(self, self._terms.turns)

    def _dialled(self, task: asyncio.Task[UpstreamConnection]) -> None:
        self._tasks.pop(task, None)
        self._connecting -= 1
        if task.cancelled():
            return
        if failed := task.exception():
            self._log_failure(detail_of(failed))
            self._fail_waiting(reason_of(failed))
            return
        self._failure = ""
        connection = task.result()
        # An upstream may close the connection before this task runs.
        if connection.transport is None or connection.transport.is_closing():
            self._fail_waiting("connection lost")
            return
        self._open[connection] = None
        self.release(connection, None)

    def _log_failure(self, detail: str) -> None:
        """Log each reason once, until a connection is opened."""
        if detail and detail != self._failure:
            log.warning("cannot connect to an upstream", extra={"upstream": self.label, "reason": detail})
        self._failure = detail

    def _fail_waiting(self, reason: str) -> None:
        """A connection could not be opened. If the upstream replied lately on others, waiting calls keep waiting, and the sweep
        tries to connect again. Otherwise the next call fails, or all of them if no connection is open."""
        now = time.monotonic()
        if self.has_replied_since(now - CONNECT_TIMEOUT_S):
            self.health.failed(now)
            return
        calls = self._queue.take_one() if self._open else self._queue.take_all()
        for call in calls:
            call.sink.on_fail(self, reason, sent=False)

    def release(self, connection: UpstreamConnection, ended: ReplySink | None) -> None:
        if self._queue:
            self._release_to_queue(connection, ended)
        elif not connection.sinks and self.depth == 1:
            self._rest(connection)
            self._relax()

    def _release_to_queue(self, connection: UpstreamConnection, ended: ReplySink | None) -> None:
        """Send the next call on this connection. It has just replied, so calls that must not be sent twice can use it too."""
        now = time.monotonic()
        queue = self._queue
        if ended is not None:
            queue.ended(ended, now)
        call = queue.next_call(now)
        if call is not None:
            self._send(call, connection, now)
        elif not connection.sinks:
            self._rest(connection)
        if self.depth > 1 or not queue:
            self._serve_waiting(now)

    def tick(self, now: float) -> None:
        self.update_time(now)
        for connection in tuple(self._open):
            if connection.sinks:
                for sink in tuple(connection.sinks):
                    # The check of another call may have ended this one.
                    if sink in connection.sinks:
                        self.check(sink, connection, now)
        # Most upstreams of a service that hardly anyone uses have nothing to do, many times a second.
        if self._queue.needs_tick or self._reserve or (self.depth == 1 and not self.rests):
            self._tick_queue(now)
        if self._probes is not None:
            self._probes.tick(now)

    def _tick_queue(self, now: float) -> None:
        if self._queue.is_crowded:
            self._free_stalled(now)
        readers = sum([each.stalled_s(now) > STALLED_BY_MANY_S for each in self._open]) if self._queue else 0
        self._queue.tick(now, used=self._places(), opening=self._connecting, readers=readers)
        self._serve_waiting(now)

    def _free_stalled(self, now: float) -> None:
        """Take connections from clients that do not read, for calls that wait. Those that have stalled longest come first."""
        after_s = STALLED_BY_MANY_S if self._queue.is_held_by_readers else STALLED_S
        stalled = [each for each in self._open if each.on_stalled is not None and each.stalled_s(now) > after_s]
        stalled.sort(key=lambda each: -each.stalled_s(now))
        for connection in stalled[: len(self._queue)]:
            if connection.on_stalled is not None:  # Evicting the reader before this one may have ended its reply.
                self._queue.evicted(connection.sinks[0].client, now)
                connection.evict_reader()

    def abandoned(self, sink: ReplySink) -> None:
        self._queue.abandoned(sink.client, self.now)

    def is_streamed(self, sink: ReplySink) -> None:
        self._queue.is_streamed(sink)

    def replaced(self, sink: ReplySink, successor: ReplySink) -> None:
        self._queue.replaced(sink, successor)

    def has_replied_since(self, moment: float) -> bool:
        return any(connection.has_replied and connection.idle_since > moment for connection in self._open)

    def retire(self, connection: UpstreamConnection) -> None:
        """Close the connection. Calls that were sent on it after the last reply would never be answered, so they fail."""
        if connection.sinks:
            connection.abort()
            return
        self.lost(connection)
        if connection.transport is not None:
            connection.transport.close()

    def lost(self, connection: UpstreamConnection) -> None:
        self._open.pop(connection, None)
        if connection in self.idle:
            self.idle.remove(connection)
        elif connection in self._reserve:
            self._reserve.remove(connection)
        if connection is self._corked:
            self._corked = None
            self._out = []
        if self._queue:
            self._queue.count_held()
            self._open_another()

    def leave(self, sink: ReplySink) -> bool:
        for connection in tuple(self._open):
            if sink in connection.sinks:
                connection.leave(sink)
                return False
        return self._queue.leave(sink) or (self._probes is not None and self._probes.leave(sink))

    def replace(self, sink: ReplySink, successor: ReplySink) -> None:
        self._queue.replace(sink, successor)

    def close(self) -> Awaitable[None]:
        for task in tuple(self._tasks):
            task.cancel()
        self._queue.take_all()
        for connection in tuple(self._open):
            connection.abort()
        if self._probes is not None:
            return self._probes.close()
        return asyncio.sleep(0)


def _load(connection: UpstreamConnection) -> int:
    return len(connection.sinks)


def _is_held_up(connection: UpstreamConnection) -> bool:
    """Whether the reply that comes next belongs to a call that was given up."""
    return bool(connection.sinks) and isinstance(connection.sinks[0], AbsentSink)
