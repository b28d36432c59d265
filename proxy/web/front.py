"""The hot path: complete, length-framed POSTs on RPC routes with a known key. Bytes in, bytes out.

Every connection starts here; `messages.py` reads it. A message that is anything else changes the connection's protocol for
good: aiohttp's own handler gets the bytes, from the start of that message. One request of a connection is under way at a
time, so the connection can hold all the state that its request needs, and nothing is allocated for it.

Most calls take the *short way*: a plain read, an idle connection to the one upstream, a good reply. The front is then the
upstream connection's sink itself, and both halves, `_ask` and `on_reply`, are written out in one piece: a function
call costs 0.1 µs, half a percent of the time that nginx takes for a whole request. Whatever does not go that
way becomes a `Flight` or goes through `Rpc`, with the same outcome.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from typing import TYPE_CHECKING

import msgspec

from proxy.core import jsonrpc
from proxy.core.access import Key
from proxy.core.caching import key_of
from proxy.core.jsonrpc import Malformed
from proxy.errors import Fault, InternalError, InvalidRequest
from proxy.services.rpc.calls import Batch
from proxy.services.rpc.flights import Flight
from proxy.services.rpc.networks import ANY_SCOPE, Plan, Route
from proxy.telemetry import LATENCY_S
from proxy.web.heads import Head
from proxy.web.hot import DIGITS as _DIGITS
from proxy.web.hot import REPLY_LENGTHS as _REPLY_LENGTHS
from proxy.web.hot import reply_length
from proxy.web.messages import Messages
from proxy.wire.connection import NEVER
from proxy.wire.connection import Connection as UpstreamConnection
from proxy.wire.http1 import ReplyHead
from proxy.wire.upstream import Upstream

if TYPE_CHECKING:
    from proxy.web.door import Door
    from proxy.web.hot import Hot

# Replies larger than this are written at once: to queue them would only copy them.
DEFER_BELOW = 8192
# A call that has been under way for this long is looked at by the sweep.
LOOK_AFTER_S = 0.05
_OPENERS = b"[{"
_LATEST = (b'"latest"]', b"[]")
_monotonic = time.monotonic
_envelope = jsonrpc.read_envelope
_reply = jsonrpc.read_any_reply
_NOT_ONE = jsonrpc.NOT_JSON
_NO_REPLY = jsonrpc.Reply()
_ID_STARTS = jsonrpc.ID_STARTS
_HIT = b"X-Cache: hit\r\n"


class Front(Messages):
    """One client connection on the hot path; the waiter of its request, and on the short way its sink."""

    __slots__ = (
        "_edge", "_params", "_upstream", "_wire_id", "batch", "cache", "chunked", "flight", "id", "plan", "units",
    )  # fmt: skip

    def __init__(self, door: Door, hot: Hot) -> None:
        super().__init__(door, hot)
        # The request under way.
        self._params = b""
        self._wire_id = b""
        self._edge = 0.0
        self._upstream: Upstream | None = None
        self.plan: Plan | None = None
        self.flight: Flight | None = None
        self.batch: Batch | None = None
        self.id = b""
        self.units = 0
        self.cache = ""
        self.chunked = False

    # What the transport calls, and what its bytes come to

    def data_received(self, data: bytes) -> None:
        if not self.busy and not self._ahead and data.startswith(self._known_bytes):
            head = self._known
            if len(data) == head.total and head.key.alive:  # type: ignore[union-attr]
                self.busy = True
                self._head = head
                body = data[head.size :]  # type: ignore[union-attr]
                self._ask(head, body)  # type: ignore[arg-type]
                return
        self._unusual(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self.transport = None
        self._door.leave(self, self._address)
        self._known_bytes = NEVER
        self._source = None
        if self.flight is not None:
            self.flight.leave(self)
        elif self._upstream is not None:
            upstream, self._upstream = self._upstream, None
            upstream.health.inflight -= 1
            upstream.leave(self)
        elif self.batch is not None:
            self.batch.leave()

    # A request

    def _ask(self, head: Head, body: bytes) -> None:
        """Ask on the short way, if the call may take it; nothing is taken from a key whose call then goes the long one."""
        try:
            envelope = _envelope(body)
        except _NOT_ONE:
            self._ask_long(head, body, None)
            return
        plan = head.plans.get(envelope.method)
        params, call_id = bytes(envelope.params), bytes(envelope.id)
        if (
            plan is None
            or not params
            or params[0] not in _OPENERS
            or not call_id
            or call_id[0] not in _ID_STARTS
            or len(call_id) > 64
            or (plan.has_block and not params.endswith(_LATEST))
            or not body.isascii()
        ):
            self._ask_long(head, body, envelope)
            return
        key, hot = head.key, self._hot
        windows, units = hot.windows, plan.units
        self._began = now = _monotonic()
        if windows.take(key.slot, now, key.request_s, units * key.unit_s):
            self._ask_long(head, body, envelope)
            return
        self._edge = windows.edge_taken
        self.plan = plan
        self.id = call_id
        self.units = units
        route = head.route
        if plan.shared:
            self._ask_memory(route, key, plan, params, now)
            return
        upstream: Upstream = route.only  # type: ignore[assignment]
        sent = upstream.send_call(self, plan.request_tail, params) if upstream.health.free else None
        if sent is None:
            self.cache = ""
            hot.rpc.answer(self, route, key, plan, params, now)
            return
        self._params = params
        self._wire_id = sent
        self._upstream = upstream
        upstream.health.inflight += 1

    def _ask_memory(self, route: Route, key: Key, plan: Plan, params: bytes, now: float) -> None:
        """A call whose answer may be known, or asked for already."""
        if route.marks.moves != route.seen_moves:
            route.catch_up()
        slot = key_of(plan.request_tail, params)
        known = route.replies.get(slot) if route.keeps else None
        if known is None or self._ahead or self.left <= 1 or self._hot.careful:
            self._hot.rpc.answer(self, route, key, plan, params, now, slot=slot)
            return
        tally = plan.tally
        tally.results += 1
        tally.hits += 1
        tally.units += self.units
        tally.buckets[0] += 1
        self._reply_shortly(known, plan, now, _HIT)

    def _ask_long(self, head: Head, body: bytes, envelope: jsonrpc.Envelope | None) -> None:
        """The way of everything else. The envelope is given where it was read already: a large one takes its time."""
        self._began = now = _monotonic()
        self.plan = None
        self.units = 0
        self.cache = ""
        key = head.key
        if key.disabled or key.dies_at <= now or not key.scopes & ANY_SCOPE or (head.route.is_live and not key.live):
            self.on_fault(self._hot.refusal(head, now))
            return
        try:
            if envelope is None and jsonrpc.is_batch(body):
                self._ask_batch(head, jsonrpc.parse_batch(body), now)
            else:
                call = jsonrpc.parse(body, envelope)
                self.id = call[2]
                self._hot.rpc.ask(self, head.route, key, call, now, fresh=head.fresh)
        except Malformed as exc:
            self.on_fault(InvalidRequest(exc.message, details={"rpc_code": exc.code}))

    def _ask_batch(self, head: Head, items: list[jsonrpc.Call | Malformed], now: float) -> None:
        asked = self._hot.rpc.ask_batch(items, head.route, head.key, now, self._on_batch, fresh=head.fresh)
        if isinstance(asked, Fault):
            self.on_fault(asked)
        elif self.busy:
            self.batch = asked

    # A sink's side: the short way back

    def on_reply(self, connection: UpstreamConnection, head: ReplyHead, body: bytes) -> None:
        upstream = connection.upstream
        try:
            reply = _reply(body)
        except _NOT_ONE:
            reply = _NO_REPLY
        result = reply.result
        if (
            not result
            or reply.error
            or bytes(reply.id) != self._wire_id
            or head.status != 200
            or not head.plain
            or not body.isascii()
        ):
            self._take_off(upstream).on_reply(connection, head, body)
            return
        now = _monotonic()
        took = now - self._began
        self._upstream = None
        health = upstream.health
        health.inflight -= 1
        health.good += 1
        # The averages need not see every call: one in eight says as much.
        if not health.good & 7 or health.failures_in_a_row or health.pause_s:
            health.succeeded(took)
            health.good -= 1
        plan: Plan = self.plan  # type: ignore[assignment]
        units = self.units
        tally = plan.tally
        tally.results += 1
        tally.units += units
        tally.seconds += took
        tally.buckets[bisect_left(LATENCY_S, took)] += 1
        hot = self._hot
        if self._ahead or self.left <= 1 or hot.careful:
            self.cache = ""
            self._finish(hot.result(self, result, now))
            return
        self._reply_shortly(result, plan, now, b"")

    def _reply_shortly(self, result: bytes | msgspec.Raw, plan: Plan, now: float, cache: bytes) -> None:
        """Write what `Hot.result` would, put together from the same parts with less ado."""
        hot = self._hot
        client: Head = self._head  # type: ignore[assignment]
        key = client.key
        edge = self._edge
        rate = key.requests_per_second
        held = int((now - edge) * rate)
        resets = int(edge + hot.resets)
        size = len(self.id) + len(result)
        turn = hot.turn
        if not turn.queue:
            turn.arm()
        request_id = client.request_id or hot.request_id()
        reply = (
            hot.ok_stamp,
            request_id,
            key.limit_line,
            _DIGITS[held if held < rate else rate] if held < 1024 else b"%d" % (held if held < rate else rate),
            hot.reset_lines.get(resets) or hot.reset_line(resets),
            plan.units_line,
            cache,
            _REPLY_LENGTHS[size] if size < 1024 else reply_length(size),
            self.id,
            b',"result":',
            result,
            b"}",
        )
        turn.queue.append((self, b"".join(reply)))
        if hot.log is not None:
            self.cache = "hit" if cache else ""
            hot.note(self, 200, request_id, now)
        self.left -= 1
        self.busy = False

    def _take_off(self, upstream: Upstream) -> Flight:
        """The call becomes a flight: it did not go as usual."""
        assert self._head is not None
        assert self.plan is not None
        self._upstream = None
        self.flight = flight = Flight.taking_over(
            self._head.route, self.plan, self._params, self, upstream, id_=self._wire_id, began=self._began
        )
        return flight

    def on_fail(self, upstream: Upstream, reason: str, *, sent: bool) -> None:
        self._take_off(upstream).on_fail(upstream, reason, sent=sent)

    def on_large(self, connection: UpstreamConnection, head: ReplyHead, beginning: bytes) -> bool:
        flight = self._take_off(connection.upstream)
        connection.replace(self, flight)
        return flight.on_large(connection, head, beginning)

    def on_tick(self, connection: UpstreamConnection | None, now: float) -> None:
        if connection is not None and now - self._began > LOOK_AFTER_S:
            flight = self._take_off(connection.upstream)
            connection.replace(self, flight)
            flight.on_tick(connection, now)

    def on_piece(self, connection: UpstreamConnection, piece: bytes) -> None:
        raise AssertionError("a large reply is a flight's")

    def on_end(self, connection: UpstreamConnection) -> None:
        raise AssertionError("a large reply is a flight's")

    # A waiter's side: what the call's end brings

    def on_result(self, result: bytes | msgspec.Raw) -> None:
        self._count("results")
        self._finish(self._hot.result(self, result, _monotonic()) if self.id else self._hot.empty(self))

    def on_error(self, error: bytes) -> None:
        self._count("errors")
        self._finish(self._hot.error(self, error) if self.id else self._hot.empty(self))

    def on_fault(self, fault: Fault) -> None:
        self._give_back(fault)
        self._finish(self._hot.fault(self, fault))

    def _give_back(self, fault: Fault) -> None:
        """A fault costs nothing: it was refused before it was charged, or it is ours."""
        self._hot.rpc.refund(self.head.key, fault, 1, self.units)
        self.units = 0
        self._count("faults")

    def _on_batch(self, batch: Batch) -> None:
        self.batch = None
        assert self._head is not None
        self.units = self._hot.rpc.settle_batch(self._head.key, batch)
        body = batch.body()
        self._finish(self._hot.ok(self, len(body)) + body if body else self._hot.empty(self))

    def on_stream(self, beginning: bytes, left: int | None, connection: UpstreamConnection) -> None:
        """The beginning of a large result, under our own head. Without a length it goes out in chunks."""
        self._hot.turn.flush()
        self.chunked = left is None
        start = b'%b%b,"result":' % (jsonrpc.HEAD, self.id)
        self._source = connection
        if self._stalled_since:
            connection.pause()
        self._write(self._hot.ok(self, None if left is None else left + len(start)))
        self.on_stream_piece(start + beginning)

    def on_stream_piece(self, piece: bytes) -> None:
        self._write(b"%x\r\n%b\r\n" % (len(piece), piece) if self.chunked else piece)

    def on_stream_end(self) -> None:
        # First: a write may call pause_writing, which must not pause a connection that was given back.
        self._source = None
        if self.chunked:
            self._write(b"0\r\n\r\n")
            self.chunked = False
        self._count("results")
        self._done()

    def on_stream_broken(self) -> None:
        """Half a reply is no reply: the client sees its connection break."""
        self._source = None
        self.chunked = False
        self._give_back(InternalError("the upstream's reply broke off"))
        if self.transport is not None:
            self.transport.abort()

    def _write_late(self, fault: Fault) -> None:
        self.plan = None
        self._write(self._hot.fault(self, fault))

    def _write(self, data: bytes) -> None:
        if self.transport is not None:
            self.transport.write(data)

    def _finish(self, reply: bytes) -> None:
        if self.transport is not None:
            if len(reply) < DEFER_BELOW:
                self._hot.turn.write(self, reply)
            else:
                self._hot.turn.flush()
                self.transport.write(reply)
        self._done()

    def _done(self) -> None:
        self.busy = False
        self.flight = None
        self.left -= 1
        if self.left <= 0 or self._hot.draining:
            self._close_after_reply()
        elif self._ahead or self._paused_reading:
            self._go_on()

    def _close_after_reply(self) -> None:
        self._hot.turn.flush()
        if self.transport is not None:
            self.transport.close()

    def _count(self, outcome: str) -> None:
        if self.plan is not None:
            self.plan.tally.count(outcome, self.cache, self.units, _monotonic() - self._began)

    @property
    def streams(self) -> bool:
        """A notification has no reply, however large its result is."""
        return bool(self.id)

    @property
    def head(self) -> Head:
        assert self._head is not None
        return self._head

    @property
    def began(self) -> float:
        return self._began
