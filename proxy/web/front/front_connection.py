"""The hot path: complete, length-framed POSTs on RPC routes with a known key. Bytes in, bytes out.

Every connection starts here; `messages.py` reads it and `answers.py` writes to it. A message that is anything else changes
the connection's protocol for good: aiohttp's own handler gets the bytes, from the start of that message. One request of a
connection is under way at a time, so the connection can hold all the state that its request needs, and nothing is
allocated for it.

Most calls take the *short way*: a plain read, an idle connection to the one upstream, a good reply. The front is then the
upstream connection's sink itself, and both halves, `_ask` and `on_reply`, are written out in one piece: a function
call costs 0.1 µs, half a percent of the time that nginx takes for a whole request. Whatever does not go that
way becomes a `Flight` or goes through `Rpc`, with the same outcome.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from typing import TYPE_CHECKING, Final

from proxy.core import jsonrpc, outline
from proxy.core.access import Key
from proxy.core.caching import key_of
from proxy.core.jsonrpc import MAX_DEPTH, MalformedCall
from proxy.core.nesting import is_deeper
from proxy.core.usage import LATENCY_S
from proxy.errors import Fault, InvalidRequest
from proxy.services.rpc.flights import Flight, result_at
from proxy.services.rpc.method_policy import MethodPolicy
from proxy.services.rpc.networks import Route
from proxy.web.front.request_heads import RequestHead
from proxy.web.front.reply_writer import ReplyWriting
from proxy.wire.connection import NEVER, Piece, UpstreamConnection
from proxy.wire.http1 import ReplyHead
from proxy.wire.upstream import Upstream

if TYPE_CHECKING:
    from proxy.web.front.connection_limiter import ConnectionLimiter
    from proxy.web.front.front_context import FrontContext

# A call that has been under way for this long is looked at by the sweep.
LOOK_AFTER_S: Final = 0.05
_OPENERS: Final = b"[{"
_monotonic: Final = time.monotonic
_envelope: Final = jsonrpc.read_envelope
_reply: Final = jsonrpc.read_any_reply
_NOT_ONE: Final = jsonrpc.NOT_JSON
_NO_REPLY: Final = jsonrpc.UpstreamReply()
_ID_STARTS: Final = jsonrpc.ID_STARTS


class FrontConnection(ReplyWriting):
    """One client connection on the hot path; the waiter of its request, and on the short way its sink."""

    __slots__ = ("_params", "_upstream", "_wire_id")

    def __init__(self, door: ConnectionLimiter, hot: FrontContext) -> None:
        super().__init__(door, hot)
        # The request under way, on the short way.
        self._params = b""
        self._wire_id = b""
        self._upstream: Upstream | None = None

    # What the transport calls, and what its bytes come to

    def data_received(self, data: bytes) -> None:
        if not self.busy and not self._ahead and data.startswith(self._known_bytes):
            head: RequestHead = self._known  # type: ignore[assignment]
            if len(data) == head.total and head.key.alive:
                self.busy = True
                self._head = head
                self._ask(head, data[head.size :])
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

    def _ask(self, head: RequestHead, body: bytes) -> None:
        """Ask on the short way, if the call may take it; nothing is taken from a key whose call then goes the long one."""
        try:
            envelope = _envelope(body)
        except _NOT_ONE:
            self._ask_long(head, body, None)
            return
        policy = head.policies.get(envelope.method)
        params, call_id = bytes(envelope.params), bytes(envelope.id)
        if (
            policy is None
            or not params
            or params[0] not in _OPENERS
            or not call_id
            or call_id[0] not in _ID_STARTS
            or len(call_id) > 64
            or (
                policy.has_block
                and (params[1] != policy.opens or params.partition(policy.before_latest)[2] != policy.latest)
                and not policy.is_latest(params)
            )
            or not body.isascii()
            or (len(params) > MAX_DEPTH and is_deeper(params, MAX_DEPTH))
        ):
            self._ask_long(head, body, envelope)
            return
        key, hot = head.key, self._hot
        windows, units = hot.windows, policy.units
        self._began = now = _monotonic()
        if windows.take(key.slot, now, key.request_s, units * key.unit_s):
            self._ask_long(head, body, envelope)
            return
        self.policy = policy
        self.id = call_id
        self.units = units
        route = head.route
        if policy.shared:
            self._ask_memory(route, key, policy, params, now)
            return
        upstream: Upstream = route.only  # type: ignore[assignment]
        sent = upstream.send_call(self, policy.request_tail, params) if upstream.health.free else None
        if sent is None:
            self.cache = ""
            hot.rpc.answer(self, route, key, policy, params, now)
            return
        self._params = params
        self._wire_id = sent
        self._upstream = upstream
        upstream.health.inflight += 1

    def _ask_large(self, head: RequestHead, data: bytes, start: int) -> None:
        """The long way from the start: what the short one saves is nothing to what a copy of a large body costs."""
        call = outline.read_call(data, start)
        self._ask_long(head, b"" if call else data[start:], None, call=call)

    def _ask_memory(self, route: Route, key: Key, policy: MethodPolicy, params: bytes, now: float) -> None:
        """A call whose answer may be known, or asked for already."""
        if route.shared_head.moves != route.seen_moves:
            route.catch_up()
        slot = key_of(policy.request_tail, params)
        known = route.replies.get(slot) if route.keeps else None
        if known is None:
            flight = route.flights.get(slot)
            if flight is None:
                self._hot.rpc.answer(self, route, key, policy, params, now, slot=slot)
                return
            self.cache = "join"
            self.flight = flight
            flight.waiters.append(self)
            return
        if self._ahead or self.left <= 1 or self._hot.careful:
            self._hot.rpc.answer(self, route, key, policy, params, now, slot=slot)
            return
        self.cache = "hit"
        tally = key.sheet[policy.tally]
        tally.results += 1
        tally.hits += 1
        tally.units += self.units
        tally.buckets[0] += 1
        self._reply_shortly(known, policy, now)

    def _ask_long(
        self, head: RequestHead, body: bytes, envelope: jsonrpc.Envelope | None, *, call: jsonrpc.RawCall | None = None
    ) -> None:
        """The way of everything else. The envelope or the call is given where it was read already."""
        self._began = now = _monotonic()
        self.policy = None
        self.units = 0
        self.cache = ""
        key = head.key
        route = head.route
        if key.disabled or key.dies_at <= now or not key.scopes & route.any_scope or (route.is_live and not key.live):
            self.on_fault(self._hot.refusal(head, now))
            return
        try:
            if call is None and envelope is None and jsonrpc.is_batch(body):
                self._ask_batch(head, jsonrpc.parse_batch(body), now)
            else:
                call = call or jsonrpc.parse(body, envelope)
                self.id = call[2]
                self._hot.rpc.ask(self, route, key, call, now, fresh=head.fresh)
        except MalformedCall as exc:
            self.on_fault(InvalidRequest(exc.message, details={"rpc_code": exc.code}))

    def _ask_batch(self, head: RequestHead, items: list[jsonrpc.RawCall | MalformedCall], now: float) -> None:
        asked = self._hot.rpc.ask_batch(items, head.route, head.key, now, self._on_batch, fresh=head.fresh)
        if isinstance(asked, Fault):
            self.on_fault(asked)
        elif self.busy:
            self.batch = asked

    # A sink's side: the short way back

    def on_reply(self, connection: UpstreamConnection, head: ReplyHead, body: bytes) -> None:
        upstream = connection.upstream
        client: RequestHead = self._head  # type: ignore[assignment]
        policy: MethodPolicy = self.policy  # type: ignore[assignment]
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
            or (policy.asks_on and client.route.is_null(result))
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
        units = self.units
        tally = client.key.sheet[policy.tally]
        tally.results += 1
        tally.units += units
        tally.seconds += took
        tally.buckets[bisect_left(LATENCY_S, took)] += 1
        hot = self._hot
        self.cache = ""
        if self._ahead or self.left <= 1 or hot.careful:
            self._finish(hot.result(self, result, now))
            return
        self._reply_shortly(result, policy, now)

    def _take_off(self, upstream: Upstream) -> Flight:
        """The call becomes a flight: it did not go as usual."""
        assert self._head is not None
        assert self.policy is not None
        self._upstream = None
        self.cache = ""
        self.flight = flight = Flight.taking_over(
            self._head.route, self.policy, self._params, self, upstream, id_=self._wire_id, began=self._began
        )
        return flight

    def on_fail(self, upstream: Upstream, reason: str, *, sent: bool) -> None:
        self._take_off(upstream).on_fail(upstream, reason, sent=sent)

    def on_large(self, connection: UpstreamConnection, head: ReplyHead, beginning: Piece) -> bool:
        """One that is all there is passed on as it is; with others it takes a flight to see them to their end."""
        policy: MethodPolicy = self.policy  # type: ignore[assignment]
        start = result_at(policy, self._wire_id, head, beginning) if len(beginning) == head.length else 0
        if not start:
            flight = self._take_off(connection.upstream)
            connection.replace(self, flight)
            return flight.on_large(connection, head, beginning)
        self.cache = ""
        self.on_stream(memoryview(beginning)[start:], head.length - start, connection)
        return True

    def on_tick(self, connection: UpstreamConnection | None, now: float) -> None:
        if connection is not None and now - self._began > LOOK_AFTER_S:
            flight = self._take_off(connection.upstream)
            connection.replace(self, flight)
            flight.on_tick(connection, now)

    def on_end(self, connection: UpstreamConnection) -> None:
        self._upstream = None
        health = connection.upstream.health
        health.inflight -= 1
        health.succeeded(_monotonic() - self._began)
        self.on_stream_end()

    def on_piece(self, connection: UpstreamConnection, piece: Piece) -> None:
        raise AssertionError("what comes in pieces is a flight's")
