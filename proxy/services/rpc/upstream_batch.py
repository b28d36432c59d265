"""Several calls in one request to an upstream: a JSON-RPC batch.

When the reply arrives, each flight receives its own part and goes on alone, as if it had been sent alone. If the reply is not a
valid batch reply, or is large, the flights are sent again one by one, to other upstreams where possible. An upstream that
refuses the batch as such receives smaller ones of that client for a while, and in the end none (`core/batch_sizes.py`).

Plain reads for a network whose only upstream accepts batches have no flights at first (`PlainReads`): usually the replies come
in order and without an error, and are passed on together. For ten reads, that saves 40 µs of CPU time (compiled). In every
other case each read becomes a flight, and the batch an ordinary one.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from typing import Any, Final

from proxy.core import jsonrpc, upstream_errors
from proxy.core.batch_envelopes import SHORT_BATCH_ITEMS
from proxy.core.credits import CreditMeter, outcome_of_error
from proxy.core.jsonrpc import RawCall
from proxy.services.rpc.batches import CallBatch
from proxy.services.rpc.dispatcher import Dispatcher
from proxy.services.rpc.flights import Call, Flight, next_id
from proxy.services.rpc.method_policy import MethodPolicy
from proxy.wire.http1 import ReplyHeaders
from proxy.wire.upstream import OUT_OF_STEP, STALE, TOO_LARGE, Piece, Upstream, UpstreamConnection


def launch_all(dispatcher: Dispatcher, flights: Sequence[Flight], now: float) -> None:
    """Send the calls of one batch, in few requests if the upstream accepts batches."""
    together = [flight for flight in flights if may_go_together(flight.call)]
    upstream = dispatcher.choose(together[0].call, now, 0) if len(together) > 1 else None
    size = upstream.batches.of(together[0].client) if upstream is not None else 1
    if upstream is None or size < 2:
        together = []
    else:
        health = upstream.health
        together = [flight for flight in together if health.may_serve(flight.policy.method.name)]
        if health.method_limits:  # Each of them is admitted by itself.
            together = [flight for flight in together if health.limit_of(flight.policy.method.name) is None]
        together = [flight for flight in together if not health.head or health.head >= flight.call.least_head]
        if health.meter is not None and health.meter.budget is not None and health.meter.budget.hard:
            together = _afforded(together, health.meter, health.meter.budget.left)
    alone = set(flights).difference(together)
    for flight in flights:
        if flight in alone:
            dispatcher.launch(flight, now)
    for start in range(0, len(together), size):
        assert upstream is not None
        UpstreamBatch(dispatcher, together[start : start + size]).send(upstream, now)
    for _ in together:
        dispatcher.budget.earn()


def _afforded(flights: Sequence[Flight], meter: CreditMeter, credits_: int) -> list[Flight]:
    """The first of the calls, as many as this many credits are enough for."""
    afforded = []
    for flight in flights:
        credits_ -= meter.prices.credits(flight.policy.method.name)
        if credits_ < 0:
            break
        afforded.append(flight)
    return afforded


def may_go_together(call: Call) -> bool:
    """Whether the call can be sent with others to an upstream that was chosen for one of them."""
    is_free = call.oldest < 0 and call.holder is None and not call.policy.rules
    # Blocks of receipts or traces are megabytes: together, they would be asked for and left unread.
    is_short = call.policy.data_kind not in ("receipts", "traces")
    return call.policy.may_repeat and not call.archive and is_free and is_short


def send_plain_reads(
    dispatcher: Dispatcher,
    upstream: Upstream,
    batch: CallBatch,
    calls: list[tuple[MethodPolicy, RawCall]],
    *,
    client: str,
) -> None:
    """Send reads of a client to the network's only upstream, in one request."""
    plain = PlainReads(dispatcher, batch, calls, client)
    request = UpstreamBatch(dispatcher, (), plain)
    batch.begin_admission(request)
    request.send_plain(plain, upstream, batch.began)


def may_be_plain(policy: MethodPolicy, call: RawCall) -> bool:
    """Whether the call can be passed on as it is, unless it is about an old block: its result is not shared, and it expects a
    reply."""
    is_usual = policy.short and not policy.shared and not policy.looks_up_null
    return is_usual and not policy.is_observed and call[2] != b""


# Between two calls or replies, and before the first and after the last one.
_NEXT: Final = b"}," + jsonrpc.ENVELOPE_START
_FIRST: Final = b"[" + jsonrpc.ENVELOPE_START
_LAST: Final = b"}]"
# The last three digits of the ids in a batch: joining is faster than formatting a number for each call.
_PLACES: Final = [b"%03d" % index for index in range(SHORT_BATCH_ITEMS)]


class PlainReads:
    """The reads of a batch that are sent without a flight for each. No state is kept for one of them."""

    __slots__ = ("_batch", "_block", "_calls", "_dispatcher", "_first_id", "_ids", "client")

    def __init__(
        self,
        dispatcher: Dispatcher,
        batch: CallBatch,
        calls: list[tuple[MethodPolicy, RawCall]],
        client: str,
    ) -> None:
        self._dispatcher = dispatcher
        self._batch = batch
        self._calls = calls
        self.client = client
        # A block that the state behind all results has reached.
        self._block = dispatcher.state.tip
        self._first_id = 0
        self._ids = b""

    def __repr__(self) -> str:
        return f"<PlainReads {len(self._calls)}>"

    def request(self) -> bytes:
        # Multiplied by 1,000, far above the current ids of flights: flights that take over keep them.
        number = next_id()
        self._first_id = number * 1000
        start = b"%d" % number
        self._ids = start + (b"," + start).join(_PLACES[: len(self._calls)])
        parts: list[bytes] = []
        for index, (policy, call) in enumerate(self._calls):
            parts += (_NEXT, start, _PLACES[index], policy.request_tail, call[1])
        parts[0] = _FIRST
        parts.append(_LAST)
        return b"".join(parts)

    def answer(self, upstream: Upstream, headers: ReplyHeaders, body: bytes, took_s: float) -> bool:
        """Pass on the replies, if all are good and in order."""
        results = self._results(headers, body)
        if results is None:
            return False
        upstream.health.batch_answered(len(results), took_s)
        parts: list[bytes] = []
        for index, (_, call) in enumerate(self._calls):
            parts += (_NEXT, call[2], b',"result":', results[index])
        parts[0] = _FIRST
        parts.append(_LAST)
        self._batch.on_plain_replies(self._calls, b"".join(parts), took_s, self._block, upstream.label)
        return True

    def _results(self, headers: ReplyHeaders, body: bytes) -> list[Any] | None:
        """The results in order, as views of the reply; None if it is anything else."""
        if headers.status != 200 or not headers.plain or not body.isascii():
            return None
        try:
            replies = jsonrpc.read_any_replies(body)
        except jsonrpc.NOT_JSON:
            return None
        if len(replies) != len(self._calls):
            return None
        ids: list[Any] = []
        results: list[Any] = []
        for reply in replies:
            if not reply.result or reply.error:
                return None
            ids.append(reply.id)
            results.append(reply.result)
        return results if b",".join(ids) == self._ids else None

    def to_flights(self, upstream: Upstream, began: float) -> list[Flight]:
        """Give up the short path: each read becomes an item of the batch, and a flight."""
        batch = self._batch
        batch.end_admission()
        batch.expect(len(self._calls))
        flights = []
        for index, (policy, call) in enumerate(self._calls):
            item = batch.add(call[2])
            item.on_checked(policy)
            item.on_admitted(policy.units)
            flight = self._dispatcher.take_over(
                policy,
                call[1],
                item,
                upstream,
                id_=b"%d" % (self._first_id + index),
                began=began,
                client=self.client,
                block=self._block,
            )
            item.on_flight(flight)
            flights.append(flight)
        upstream.health.batch_split(len(flights))
        return flights


# A larger reply is not read: its calls are sent one by one, so that their results can be streamed.
MAX_BATCH_REPLY_BYTES = 1 << 20


class UpstreamBatch:
    __slots__ = ("_dispatcher", "_flights", "_headers", "_pieces", "_plain", "_size", "_upstream", "began")

    def __init__(self, dispatcher: Dispatcher, flights: Sequence[Flight], plain: PlainReads | None = None) -> None:
        """`plain`: reads that have no flights yet."""
        self._dispatcher = dispatcher
        self._flights = flights
        self._plain = plain
        # The upstream of the plain reads, until they are answered or become flights.
        self._upstream: Upstream | None = None
        self.began = 0.0
        # The part of a reply of unknown length that has arrived.
        self._headers: ReplyHeaders | None = None
        self._pieces: list[bytes] = []
        self._size = 0

    def __repr__(self) -> str:
        return f"<UpstreamBatch of {self._plain or len(self._flights)}>"

    @property
    def client(self) -> str:
        return self._flights[0].client if self._plain is None else self._plain.client

    def send(self, upstream: Upstream, now: float) -> None:
        self.began = now
        parts: list[bytes] = []
        for flight in self._flights:
            flight.begin(upstream, now)
            parts += (b",", jsonrpc.ENVELOPE_START, flight.id, flight.policy.request_tail, flight.params, b"}")
        parts[0] = b"["
        parts.append(b"]")
        upstream.submit(self, *parts)

    # Plain reads

    def send_plain(self, plain: PlainReads, upstream: Upstream, now: float) -> None:
        self.began = now
        self._upstream = upstream
        upstream.health.begin(now)
        upstream.submit(self, plain.request())

    def leave(self) -> None:
        """The client of plain reads is gone."""
        if self._upstream is not None:
            upstream, self._upstream = self._upstream, None
            upstream.health.ended()
            upstream.leave(self)

    def _to_flights(self) -> None:
        """Plain reads are slow, failed, or have an unusual reply."""
        if self._upstream is not None and self._plain is not None:
            upstream, self._upstream = self._upstream, None
            self._flights = self._plain.to_flights(upstream, self.began)

    # A sink of its connection

    def on_reply(self, connection: UpstreamConnection, headers: ReplyHeaders, body: bytes) -> None:
        upstream = connection.upstream
        now = time.monotonic()
        if self._upstream is not None and self._plain is not None:
            if self._plain.answer(upstream, headers, body, now - self.began):
                self._upstream = None
                return
            self._to_flights()
        self._bill_left(upstream, headers, body)
        if headers.wants_rest:
            for flight in self._still_carried(upstream):
                flight.ended(upstream)
                self._dispatcher.rate_limited(flight, upstream, now, headers)
            return
        if _is_refused(headers, body):
            upstream.batches.refused(self.client, len(self._flights), now)
            for flight in self._flights:
                flight.not_billed(upstream)  # None of its calls was executed.
            self._send_one_by_one(upstream, now)
            return
        try:
            if headers.status != 200 or not headers.plain:
                raise ValueError("not a usable reply")
            replies = jsonrpc.read_replies(body)
        except ValueError:
            # A single reply to a batch may be another call's: what follows cannot be trusted.
            if headers.status < 400 and (not connection.sinks or _is_single(body)):
                connection.fail(OUT_OF_STEP)
            self._on_invalid_reply(upstream, headers.status)
            return
        took = now - self.began
        for flight in self._still_carried(upstream):
            reply = replies.get(flight.id) or replies.get(jsonrpc.NULL)
            if reply is None:
                self._fail(flight, upstream, "an upstream did not reply to a call of a batch", blame=True)
            else:
                flight.ended(upstream)
                self._dispatcher.receive(flight, reply, upstream, now, took)

    def on_late(self, upstream: Upstream, headers: ReplyHeaders, body: bytes) -> None:
        self._bill_left(upstream, headers, body)

    def _bill_left(self, upstream: Upstream, headers: ReplyHeaders, body: bytes) -> None:
        """Calls that were given up may have failed, and then cost less."""
        left = [flight for flight in self._flights if not self._carries(flight, upstream)]
        if not left or upstream.health.meter is None or _is_refused(headers, body):
            return
        try:
            replies = jsonrpc.read_replies(body) if headers.status == 200 and headers.plain else {}
        except ValueError:
            return
        for flight in left:
            reply = replies.get(flight.id)
            if headers.status >= 400:
                flight.billed_as(upstream, str(headers.status))
            elif reply is not None and reply.error:
                error = bytes(reply.error)
                flight.billed_as(upstream, outcome_of_error(upstream_errors.classify(error).kind))

    def _send_one_by_one(self, upstream: Upstream, now: float) -> None:
        for flight in self._still_carried(upstream):
            flight.ended(upstream)
            self._dispatcher.send(flight, upstream, now)

    def _on_invalid_reply(self, upstream: Upstream, status: int) -> None:
        """A refusal may be caused by what the request contains: a reply of another upstream to the first call decides that."""
        for index, flight in enumerate(self._still_carried(upstream)):
            if status >= 400:
                flight.billed_as(upstream, str(status))
                if not index:
                    flight.suspect(upstream)
            blame = status < 400 and not index
            self._fail(flight, upstream, "an upstream sent an invalid reply to a batch", blame=blame)

    def _fail(self, flight: Flight, upstream: Upstream, reason: str, *, blame: bool) -> None:
        self._dispatcher.on_fail(flight, upstream, reason, sent=True, blame=blame)

    def _still_carried(self, upstream: Upstream) -> list[Flight]:
        """The flights whose attempt in this batch is under way."""
        return [flight for flight in self._flights if self._carries(flight, upstream)]

    def _carries(self, flight: Flight, upstream: Upstream) -> bool:
        """A flight may have ended elsewhere meanwhile, or been sent again to the same upstream: that attempt began later."""
        return not flight.done and flight.is_carried_by(upstream) and flight.began_at(upstream) == self.began

    def on_fail(self, upstream: Upstream, reason: str, *, sent: bool) -> None:
        """The failed request counts once against its upstream, however many calls it contained, and not at all if only the
        results together are too large."""
        self._to_flights()
        if not sent or reason == STALE:
            for flight in self._flights:
                if not self._carries(flight, upstream):  # The dispatcher does so for the others.
                    flight.not_billed(upstream)
        for index, flight in enumerate(self._still_carried(upstream)):
            blame = not index and reason != TOO_LARGE
            self._dispatcher.on_fail(flight, upstream, reason, sent=sent, blame=blame)

    def on_tick(self, connection: UpstreamConnection | None, now: float) -> None:
        if self._upstream is not None:
            if now - self.began <= self._upstream.health.late_after_s():
                return
            self._to_flights()
        for flight in self._flights:
            self._dispatcher.on_tick(flight, connection, now)
        if connection is not None and all(flight.done for flight in self._flights):
            connection.leave(self)

    def on_large(self, connection: UpstreamConnection, headers: ReplyHeaders, beginning: Piece) -> bool:
        self._to_flights()
        self._headers = headers
        if headers.length > MAX_BATCH_REPLY_BYTES:
            self._give_up(connection)
        else:
            self.on_piece(connection, beginning)
        return True

    def on_piece(self, connection: UpstreamConnection, piece: Piece) -> None:
        self._pieces.append(bytes(piece))
        self._size += len(piece)
        if self._size > MAX_BATCH_REPLY_BYTES:
            self._give_up(connection)

    def on_end(self, connection: UpstreamConnection) -> None:
        assert self._headers is not None
        self.on_reply(connection, self._headers, b"".join(self._pieces))

    def _give_up(self, connection: UpstreamConnection) -> None:
        """Leave the reply unread. Nothing speaks against the upstream, so this needs no retry budget. The calls have large
        results, so one is sent in each turn: otherwise many connections would be opened, read and closed in the same one. For a
        while, this client's calls go alone: each of these is made twice."""
        self._pieces = []
        connection.upstream.batches.refused(self.client, 1, time.monotonic())
        connection.leave(self)
        for flight in self._still_carried(connection.upstream):
            connection.in_turn(flight.client, partial(self._send_alone, flight, connection.upstream))

    def _send_alone(self, flight: Flight, upstream: Upstream) -> bool:
        if self._carries(flight, upstream):
            flight.ended(upstream)
            self._dispatcher.send(flight, upstream, time.monotonic())
        return True


def _is_single(body: bytes) -> bool:
    """Whether the reply is a single one with an id. Such a reply can only belong to another call."""
    try:
        return bytes(jsonrpc.read_any_reply(body).id) not in (b"", jsonrpc.NULL)
    except jsonrpc.NOT_JSON:
        return False


def _is_refused(headers: ReplyHeaders, body: bytes) -> bool:
    """Whether one error stands for all calls: the upstream accepts no batches, or none of this size. An error that the upstream
    is to blame for is not a refusal."""
    if headers.status >= 500 or not headers.plain or body[:1] != b"{":
        return False
    try:
        error = jsonrpc.read_any_reply(body).error
    except jsonrpc.NOT_JSON:
        return False
    return bool(error) and not upstream_errors.classify(bytes(error)).blame
