"""An upstream that is reached over HTTP/1.1, and the pool of its connections.

The pool opens connections as calls need them, up to a limit, and keeps idle ones in a stack, so that the one used last is used
next. Calls that find none wait in a queue that is bounded in time (`waiting_calls.py`). The address contains credentials and
stays in this module: no error, log line or header includes it.

*Load.* The limit follows the upstream's latency (`core/concurrency.py`). A call whose client left closes its connection, but
the upstream still works on it: it counts against the limit for as long as calls usually take. *Shares.* A few connections are
reserved for clients that hold fewer than are free, so that one client cannot hold them all. A reserved connection rests in
`_reserve` and not in `idle`, so that the short path never takes it. Calls in flight are counted by client only while calls
wait. *Probes* have a connection to themselves when all others are busy.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable
from typing import Final

from proxy.core.concurrency import ConcurrencyLimit
from proxy.core.jsonrpc import HEAD
from proxy.core.routing import UpstreamHealth
from proxy.wire.address import UpstreamAddress
from proxy.wire.http_connection import HttpConnection
from proxy.wire.upstream import CROWDED, ReplySink, Upstream, UpstreamConnection
from proxy.wire.waiting_calls import UpstreamRequest, WaitingCall, WaitingCalls, patience_s
from proxy.wire.write_buffer import DEFER_BELOW, WriteBuffer

# Calls that may wait for a connection, of all clients.
MAX_WAITING = 4096
# One of so many connections is reserved, one at least in a pool that is not tiny.
RESERVE_SHARE: Final = 32
TINY: Final = 8
# While calls wait, a reply whose reader has kept its connection waiting for longer is read to its end, or dropped.
STALLED_S: Final = 2.0
# A call that was given up counts for as long as this share of calls takes at most, and never longer than so many seconds.
ABANDONED_QUANTILE: Final = 0.95
LONGEST_ABANDONED_S: Final = 10.0
# Many servers close connections after 5 s without a call. A call that must not be sent twice avoids those idle for this long.
WARM_S = 1.0

# The ids of the short path. All have the same length, so that the length of a request follows from its method and params.
_IDS: Final = [b"%d" % number for number in range(700, 956)]


def _length(size: int) -> bytes:
    """The end of a request's head and the start of its body, for a method and params of this size."""
    return b"%d\r\n\r\n%b" % (size + len(HEAD) + 3 + 1, HEAD)


_LENGTHS: Final = [_length(size) for size in range(1024)]


class HttpUpstream(Upstream):
    __slots__ = (
        "_abandoned", "_address", "_busy", "_connecting", "_corked", "_crowded_since", "_held", "_loop", "_open", "_out",
        "_probes", "_reserve", "_reserved", "_tasks", "_waiting", "_waits_since", "_write_buffer", "concurrency", "head",
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
        self.concurrency = ConcurrencyLimit(max(2, limit // depth) if depth > 1 else limit)
        self._address = address
        self.head = address.head
        self._write_buffer = write_buffer
        self._loop = asyncio.get_running_loop()
        self._open: set[UpstreamConnection] = set()
        self._waiting = WaitingCalls()
        # Since when calls have been waiting; and since when although all connections are open, or 0.0.
        self._waits_since = 0.0
        self._crowded_since = 0.0
        # While calls wait: the calls in flight, by client and in total.
        self._held: dict[str, int] = {}
        self._busy = 0
        # Clients that left while the upstream worked on their call, and until when each is counted.
        self._abandoned: list[tuple[float, str]] = []
        # How many connections are reserved, and those of them that are idle.
        self._reserved = max(1, limit // RESERVE_SHARE) if depth == 1 and limit >= TINY else 0
        self._reserve: list[UpstreamConnection] = []
        # A pool of one connection, for probes that find all others busy.
        self._probes: HttpUpstream | None = None
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
            self._wait(sink, request, fresh=True)
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
        self._wait(sink, request, once=once)
        return None

    def probe(self, sink: ReplySink, *body: bytes) -> None:
        if self.idle or not self._open:
            self.submit(sink, *body)
            return
        if self._probes is None:
            self._probes = HttpUpstream(self.health, self._address, self._write_buffer, limit=1, depth=1, batch=1)
        self._probes.submit(sink, *body)

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

    # Waiting

    @property
    def is_crowded(self) -> bool:
        return self._crowded_since > 0.0

    def _wait(self, sink: ReplySink, request: UpstreamRequest, *, once: bool = False, fresh: bool = False) -> None:
        now = time.monotonic()
        if not self._waiting:
            self._waits_since = now
            self._count_held()
        call = WaitingCall(sink, request, sink.client, now, once, fresh)
        if len(self._waiting) >= MAX_WAITING or (self._is_full() and self._is_beyond_share(call, now)):
            self._refuse(call)
            return
        self._waiting.push(call)
        self.rests = False
        self._serve_waiting(now)

    def _is_full(self) -> bool:
        """Whether calls wait for other calls to end, and not for a connection to open."""
        return self._used() >= self.concurrency.allowed - self._reserved

    def _used(self) -> int:
        """Connections, including those that calls would occupy which were given up."""
        return len(self._open) + self._connecting + len(self._abandoned) // self.depth

    def _is_beyond_share(self, call: WaitingCall, now: float) -> bool:
        """Whether the call could not be served in time: of each client so many may wait as will be served until then."""
        latency_s = self.concurrency.latency_s
        if not latency_s or not call.client:
            return False
        slots = self.concurrency.allowed * self.depth
        bound = slots + int(slots * self._patience_s(now) / latency_s)
        return self._waiting.exceeds_share(call.client, bound)

    def _patience_s(self, now: float) -> float:
        return patience_s(now - self._crowded_since if self._crowded_since else 0.0, self.concurrency.latency_s)

    def _count_held(self) -> None:
        """Count what each client has in flight."""
        held: dict[str, int] = {}
        for connection in self._open:
            for sink in connection.sinks:
                held[sink.client] = held.get(sink.client, 0) + 1
        self._busy = sum(held.values())
        for _, client in self._abandoned:
            held[client] = held.get(client, 0) + 1
        self._held = held

    def _next_call(self, now: float) -> WaitingCall | None:
        """The call that comes next, if its client may have one more in flight."""
        waiting = self._waiting
        while waiting:
            client = waiting.next_client(self._held)
            free = self.concurrency.allowed * self.depth - self._busy - len(self._abandoned)
            if free <= self._reserved and self._held.get(client, 0) >= free:
                return None
            call = waiting.pop(client)
            if not self._crowded_since or not call.is_too_old(now, self._patience_s(now)):
                return call
            self._refuse(call)
        return None

    def _serve_waiting(self, now: float) -> None:
        """Send the calls that may be sent on connections that are open, and open one more if that is not enough."""
        waiting = self._waiting
        while waiting:
            connection = self._vacant()
            if connection is None:
                self._open_another()
                return
            call = self._next_call(now)
            if call is None:
                self._rest(connection)
                return
            if call.fresh:
                self._replace_for(call, connection)
                return
            if call.once and now - connection.idle_since > WARM_S:
                waiting.push(call)
                self.retire(connection)
                continue
            self._send(call, connection, now)
        self._relax()

    def _replace_for(self, call: WaitingCall, connection: UpstreamConnection) -> None:
        """The call needs a new connection: open one more, or one in the place of this one."""
        self._waiting.push(call)
        if self._is_full():
            self.retire(connection)
        else:
            self._rest(connection)
            self._open_another()

    def _vacant(self) -> UpstreamConnection | None:
        """An idle connection. With several calls on each, a call that waits has found all of them full."""
        if self._reserve:
            return self._reserve.pop()
        return self.idle.pop() if self.idle else None

    def _send(self, call: WaitingCall, connection: UpstreamConnection, now: float) -> None:
        self._held[call.client] = self._held.get(call.client, 0) + 1
        self._busy += 1
        connection.sent_at = now
        connection.sinks.append(call.sink)
        self._write(connection, call.request)

    def _rest(self, connection: UpstreamConnection) -> None:
        """The connection has no call. While calls wait, only those may take it whose turn it is."""
        if self.depth > 1:
            return
        if self._waiting or len(self._open) - len(self._reserve) > self.concurrency.allowed - self._reserved:
            self._reserve.append(connection)
        else:
            self.idle.append(connection)

    def _relax(self) -> None:
        """No call waits: give back the connections that are not reserved."""
        if self.depth > 1:
            return
        most = self.concurrency.allowed - self._reserved
        while self._reserve and len(self._open) - len(self._reserve) < most:
            self.idle.append(self._reserve.pop())
        self.rests = len(self._open) - len(self._reserve) <= most

    # Connections

    def _open_another(self) -> None:
        """Open a connection if a call waits for one and the limit allows it."""
        if self._used() < self.concurrency.allowed and self._connecting < len(self._waiting):
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
        connection.idle_since = self.now
        self.release(connection, None)

    def _fail_waiting(self, reason: str) -> None:
        """Fail one waiting call, or all of them if no connection is open."""
        if not self._open:
            calls = self._waiting.take_all()
        elif self._waiting:
            calls = [self._waiting.pop(self._waiting.next_client(self._held))]
        else:
            return
        for call in calls:
            call.sink.on_fail(self, reason, sent=False)

    def release(self, connection: UpstreamConnection, ended: ReplySink | None) -> None:
        connection.idle_since = self.now
        if not self._waiting:
            if not connection.sinks and self.depth == 1:
                self._rest(connection)
                self._relax()
            return
        now = time.monotonic()
        if ended is not None:
            self._count_end(connection, ended, now)
        while len(connection.sinks) < self.depth:
            call = self._next_call(now)
            if call is None:
                break
            self._send(call, connection, now)
        if not connection.sinks:
            self._rest(connection)
        if not self._waiting:
            self._relax()

    def _count_end(self, connection: UpstreamConnection, ended: ReplySink, now: float) -> None:
        self._busy -= 1
        self._held[ended.client] = self._held.get(ended.client, 1) - 1
        # A connection that was last used on the short path shows an older time.
        if connection.sent_at >= self._waits_since and self.depth == 1:
            self.concurrency.observe(now - connection.sent_at, now)

    def tick(self, now: float) -> None:
        self.update_time(now)
        for connection in tuple(self._open):
            for sink in tuple(connection.sinks):
                sink.on_tick(connection, now)
        if self._abandoned:
            self._abandoned = [each for each in self._abandoned if each[0] > now]
        if self._waiting:
            self._tick_waiting(now)
        else:
            self._crowded_since = 0.0
            self._relax()
        if self._probes is not None:
            self._probes.tick(now)

    def _tick_waiting(self, now: float) -> None:
        for waiting in self._waiting.all():
            waiting.sink.on_tick(None, now)
        if not self._is_full() or self._connecting >= len(self._waiting):
            self._crowded_since = 0.0
        elif not self._crowded_since:
            self._crowded_since = now
        if self._crowded_since:
            self._free_stalled(now)
            for call in self._waiting.take_old(now, self._patience_s(now)):
                self._refuse(call)
        self._count_held()
        self._serve_waiting(now)

    def _free_stalled(self, now: float) -> None:
        """Take connections from readers that keep them from calls that wait; first from those that have done so longest."""
        stalled = [each for each in self._open if each.on_stalled is not None and each.stalled_s(now) > STALLED_S]
        stalled.sort(key=lambda each: -each.stalled_s(now))
        for connection in stalled[: len(self._waiting)]:
            on_stalled, connection.on_stalled = connection.on_stalled, None
            if on_stalled is not None:
                on_stalled()

    def abandoned(self, sink: ReplySink) -> None:
        usual = self.health.quantile_s(ABANDONED_QUANTILE) or self.health.latency_s
        self._abandoned.append((self.now + min(usual, LONGEST_ABANDONED_S), sink.client))

    def has_replied_since(self, moment: float) -> bool:
        return any(connection.has_replied and connection.idle_since > moment for connection in self._open)

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
        elif connection in self._reserve:
            self._reserve.remove(connection)
        if connection is self._corked:
            self._corked = None
            self._out = []
        if self._waiting:
            self._count_held()
            self._open_another()

    def leave(self, sink: ReplySink) -> None:
        for connection in tuple(self._open):
            if sink in connection.sinks:
                connection.leave(sink)
                return
        self._waiting.remove(sink)
        if self._probes is not None:
            self._probes.leave(sink)

    def replace(self, sink: ReplySink, successor: ReplySink) -> None:
        for waiting in self._waiting.all():
            if waiting.sink is sink:
                waiting.sink = successor

    def _refuse(self, call: WaitingCall) -> None:
        """Report it in the next turn of the loop: the sink may send the call elsewhere at once, or here."""
        self.shed += 1
        self._loop.call_soon(self._report_refusal, call)

    def _report_refusal(self, call: WaitingCall) -> None:
        call.sink.on_fail(self, CROWDED, sent=False)

    def close(self) -> Awaitable[None]:
        for task in tuple(self._tasks):
            task.cancel()
        self._waiting.take_all()
        for connection in tuple(self._open):
            connection.abort()
        if self._probes is not None:
            return self._probes.close()
        return asyncio.sleep(0)


def _load(connection: UpstreamConnection) -> int:
    return len(connection.sinks)
