"""Writes the replies of a client connection on the hot path.

A call ends with a result, an error, a fault, or a large result in pieces; a batch ends with the replies of its items. The call
of a REST route has no id, and its result is a record of the reply (`core/rest_routes.py`). The
writer is the `Waiter` of the request under way, and holds all that the reply needs. One request of a connection is served at
a time, so one writer is reused for all of them and nothing is allocated per request.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Final, final

import msgspec
import orjson

from proxy.core import encodings, jsonrpc
from proxy.core.encodings import MAX_PREFIX
from proxy.core.jsonrpc import MalformedCall, RawCall
from proxy.core.rest_routes import RECORD_BODY
from proxy.core.usage import Outcome, outcome_of
from proxy.errors import BROKEN_REPLY, Fault, InternalError
from proxy.services.rpc.batches import CallBatch
from proxy.services.rpc.flights import Flight
from proxy.services.rpc.held_body import FREE_BYTES, NO_ROOM
from proxy.services.rpc.method_policy import MethodPolicy
from proxy.services.rpc.rpc_service import fault_of
from proxy.web.front.front_context import NEVER, FrontContext
from proxy.web.front.record_draft import RecordDraft
from proxy.web.front.record_starts import RecordStart
from proxy.web.front.reply_lines import (
    CACHE,
    CLOSE,
    JSON_START,
    REPLY_LENGTHS,
    VARIES,
    cost_line,
    fault_bytes,
    found_lines,
    length_line,
    reply_length,
    units_line,
    upstream_line,
)
from proxy.web.front.reply_stream import ReplyStream
from proxy.web.front.request_headers import RequestHeaders
from proxy.web.front.request_reader import RequestReader
from proxy.web.rest_replies import body_of, reply_to_error
from proxy.wire.upstream import Piece, UpstreamConnection
from proxy.wire.write_buffer import DEFER_BELOW

# A body from this size on is compressed in a thread: on the loop, it would delay other clients by half a millisecond or more.
OFF_LOOP: Final = 262_144
# A reply up to this size is written at once.
AT_ONCE: Final = 262_144
# Bytes of a batch's reply that are sent in one turn: the kernel may take megabytes at once, and other clients would wait.
TURN_BYTES: Final = 65_536
_monotonic: Final = time.monotonic


@final
class ReplyWriter:
    __slots__ = (
        "_awaits_turn",
        "_context",
        "_on_free",
        "_reader",
        "_sent_in_turn",
        "_streamed",
        "batch",
        "began",
        "block",
        "busy",
        "cache",
        "draft",
        "flight",
        "id",
        "left",
        "paused_reading",
        "policy",
        "request_headers",
        "stream",
        "transport",
        "units",
        "waited_s",
        "was_refused",
    )

    def __init__(self, context: FrontContext, reader: RequestReader, on_free: Callable[[], None]) -> None:
        """`on_free` is called after a reply when the client has sent more, or when its reading was paused."""
        self._context = context
        self._reader = reader
        self._on_free = on_free
        self.transport: asyncio.Transport | None = None
        # Replies that may still be sent on this connection: with one left, the next reply is the last.
        self.left = context.max_requests
        # Whether reading from the client is paused because it has sent too much ahead.
        self.paused_reading = False
        # Whether the last request was refused or failed: the next one waits for its turn.
        self.was_refused = False
        # The request under way.
        self.busy = False
        self.request_headers: RequestHeaders | None = None
        self.began = 0.0
        self.id = b""
        self.policy: MethodPolicy | None = None
        self.units = 0
        self.cache = ""
        # A block that the state behind the result has reached, unless there is a flight, which has its own; 0 if it is unknown.
        self.block = 0
        # How long the call waited for its account's rate limit.
        self.waited_s = 0.0
        self.flight: Flight | None = None
        self.batch: CallBatch | None = None
        # The batch whose reply is being sent in parts, the bytes that were sent in this turn, and whether the next turn is
        # awaited.
        self._streamed: CallBatch | None = None
        self._sent_in_turn = 0
        self._awaits_turn = False
        self.stream = ReplyStream(context.held, context.turns)
        # For the record of the request.
        self.draft = RecordDraft(context.accounting)

    def __repr__(self) -> str:
        return f"<ReplyWriter {'busy' if self.busy else 'idle'}, {self.left} replies left>"

    @property
    def client(self) -> str:
        """The account whose request is under way, or was the last."""
        return "" if self.request_headers is None else self.request_headers.key.account.id

    @property
    def streams(self) -> bool:  # False for a notification, which has no reply.
        return bool(self.id) or self._is_get

    @property
    def _is_get(self) -> bool:
        return self.request_headers is not None and self.request_headers.rest is not None

    def open(self, transport: asyncio.Transport) -> None:
        self.transport = transport
        self.stream.open(transport)

    def pause_reading(self) -> None:
        """The client has sent too much ahead."""
        if not self.paused_reading and self.transport is not None:
            self.paused_reading = True
            self.transport.pause_reading()

    def resume_reading(self) -> None:
        if self.paused_reading and self.transport is not None:
            self.paused_reading = False
            self.transport.resume_reading()

    def expect_last(self) -> None:
        """The client has announced its last request."""
        self.left = 1

    # The request under way, until its outcome

    def await_turn(self) -> None:
        """A request was read that waits for the connection's turn."""
        self.busy = True

    def turn_came(self) -> None:
        self.busy = self.was_refused = False

    def begin_call(
        self, headers: RequestHeaders, policy: MethodPolicy, id_: bytes, now: float, block: int, cache: str
    ) -> None:
        """A call was admitted on the short path. Sets everything in one step, because almost every request passes here."""
        self.busy = True
        self.request_headers = headers
        self.policy = policy
        self.id = id_
        self.began = now
        self.block = block
        self.cache = cache
        self.units = policy.units
        self.waited_s = 0.0

    def begin(self, headers: RequestHeaders, now: float) -> None:
        """A request begins. Only its headers are known yet."""
        self.busy = True
        self.request_headers = headers
        self.policy = None
        self.began = now
        self.block = 0
        self.cache = ""
        self.units = 0
        self.waited_s = 0.0
        self.draft.begin(b"")

    def on_parsed(self, call: RawCall) -> None:
        """The request is a single call."""
        assert self.request_headers is not None
        self.id = call[2]
        if self.request_headers.key.records_params:
            self.draft.begin(call[1])

    def await_batch(self, batch: CallBatch) -> None:
        """The request is this batch, unless it was answered already."""
        if self.busy:
            self.batch = batch

    def on_checked(self, policy: MethodPolicy) -> None:
        self.policy = policy

    def on_admitted(self, units: int) -> None:
        self.units = units

    def on_source(self, cache: str, block: int) -> None:
        self.cache, self.block = cache, block

    def on_flight(self, flight: Flight) -> None:
        self.flight = flight

    # Outcomes

    def on_result(self, result: bytes | msgspec.Raw) -> None:
        if self.id:
            self.write_result(result, _monotonic())
        elif self._is_get:
            self.write_record(bytes(result), _monotonic())
        else:
            self._count("results")
            self._finish(self._no_content())

    def write_result(self, result: bytes | msgspec.Raw, now: float) -> None:
        """Count a good call and send its reply. One long function for speed, since almost every request ends here."""
        context = self._context
        headers: RequestHeaders = self.request_headers  # type: ignore[assignment]
        policy: MethodPolicy = self.policy  # type: ignore[assignment]
        took_s = now - self.began
        tally = headers.key.tallies[policy.tally]
        if took_s == 0.0 and self.cache == "hit":
            tally.count_hit(self.units)
        else:
            tally.count("results", self.cache, self.units, took_s - self.waited_s)
        size = len(self.id) + len(result)
        if size >= context.compress_from and headers.encoding:
            self._write_encoded(headers.encoding, result)
            return
        if size > FREE_BYTES:
            self._write_whole(result)
            return
        limit, remaining, reset = context.rate_lines(headers.key, now)
        state = headers.route.state
        block = self.block if self.flight is None else self.flight.block
        kept_lines = state.tip_lines.get(self.cache) if block == state.tip else None
        request_id = headers.request_id or context.request_id()
        reply = (
            context.ok_stamp,
            request_id,
            limit,
            remaining,
            reset,
            units_line(self.units),
            found_lines(state, self.cache, block) if kept_lines is None else kept_lines,
            self._extra_lines() if context.adds_lines or self.left <= 1 else b"",
            REPLY_LENGTHS[size] if size < 1024 else reply_length(size),
            self.id,
            b',"result":',
            result,
            b"}",
        )
        self._note_good(headers, 200, request_id, took_s, size)
        self._finish(b"".join(reply))

    def _note_good(self, headers: RequestHeaders, status: int, request_id: bytes, took_s: float, size: int) -> None:
        """Log and record a good call, if it is to be."""
        context, account = self._context, headers.key.account
        if context.logs:
            context.accounting.log_request(headers, self, status, request_id, took_s)
        if account.unsampled <= 1 or took_s > context.slow_s or headers.directives is not None:
            self.draft.record(headers, self, status, request_id, took_s, size=size)
        else:
            account.passed_over()

    def write_record(self, record: bytes, now: float) -> None:
        """The same for the record of a reply to a GET."""
        context = self._context
        headers: RequestHeaders = self.request_headers  # type: ignore[assignment]
        policy: MethodPolicy = self.policy  # type: ignore[assignment]
        took_s = now - self.began
        tally = headers.key.tallies[policy.tally]
        if took_s == 0.0 and self.cache == "hit":
            tally.count_hit(self.units)
        else:
            tally.count("results", self.cache, self.units, took_s - self.waited_s)
        start, body = context.records.split(record)
        size = len(body)
        is_large = size >= context.compress_from
        if size > FREE_BYTES or (is_large and headers.encoding) or not size:
            self._write_unusual(start, body, record)
            return
        limit, remaining, reset = context.rate_lines(headers.key, now)
        state = headers.route.state
        block = self.block if self.flight is None else self.flight.block
        kept_lines = state.tip_lines.get(self.cache) if block == state.tip else None
        request_id = headers.request_id or context.request_id()
        reply = (
            start.lines_of_any,
            context.stamp,
            b"X-Request-Id: ",
            request_id,
            limit,
            remaining,
            reset,
            units_line(self.units),
            found_lines(state, self.cache, block) if kept_lines is None else kept_lines,
            self._extra_lines() if context.adds_lines or self.left <= 1 else b"",
            VARIES if is_large else b"",
            length_line(size),
            body,
        )
        self._note_good(headers, start.status, request_id, took_s, size)
        self._finish(b"".join(reply))

    def _write_unusual(self, start: RecordStart, body: Piece, record: bytes) -> None:
        """Send a reply to a GET that is compressed, empty, or so large that its memory is counted until the client has read
        most of it."""
        size = len(body)
        encoding = self._encoding_for(size)
        if size > FREE_BYTES:
            stream, client = self.stream, self.client
            if not (stream.hold(client, size) if encoding else stream.hold_whole(client, record)):
                self._finish_error(NO_ROOM)
                return
        # The compressed form of cached records is kept, as that of cached results.
        if encoding and encoding != encodings.BROTLI and self.cache == "hit" and size < OFF_LOOP:
            packed = self._context.encoded.get(bytes(body), encoding).between(b"", b"")
            self._finish(self._ok(len(packed), encoding, start) + packed)
        elif encoding or size <= FREE_BYTES:
            self._finish_body(bytes(body), start)
        else:
            self._finish_large(self._ok(size, 0, start), body)

    def _finish_error(self, error: bytes) -> None:
        """Send the reply to a GET whose call has ended with an error."""
        reply = reply_to_error(error)
        if isinstance(reply, Fault):
            start = RecordStart(reply.status, {"Content-Type": "application/json", **reply.headers})
            self._finish_body(orjson.dumps(reply.body(self._context.site)), start)
        else:
            self._finish_body(body_of(reply), RecordStart(reply.status, reply.headers))

    def _write_whole(self, result: bytes | msgspec.Raw) -> None:
        """Send a large result that was not streamed: a cached one, or one that several callers wait for. It is not copied, and
        its memory is counted until the client has read most of it."""
        if not self.stream.hold_whole(self.client, result):
            self._finish_body(jsonrpc.error_reply(self.id, NO_ROOM))
            return
        start = jsonrpc.result_start(self.id)
        self._finish_large(self._ok(len(start) + len(result) + 1) + start, memoryview(result), b"}")

    def on_error(self, error: bytes) -> None:
        self._count("errors")
        if self._is_get:
            self.draft.failed(error.decode("utf-8", "replace"), "errors")
            self._finish_error(error)
            return
        if not self.id:
            self._finish(self._no_content())
            return
        self.draft.failed(error.decode("utf-8", "replace"), "errors")
        self._finish_body(jsonrpc.error_reply(self.id, error))

    def _write_encoded(self, encoding: int, result: bytes | msgspec.Raw) -> None:
        """Send a large result compressed. For a cached result, the compressed form is kept for later callers."""
        if len(result) > FREE_BYTES and not self.stream.hold(self.client, len(result)):
            self._finish_body(jsonrpc.error_reply(self.id, NO_ROOM))
            return
        start = jsonrpc.result_start(self.id)
        # Only cached results come again as the same object, so only their compressed form is kept.
        is_kept = self.cache == "hit" and encoding != encodings.BROTLI
        if is_kept and len(start) <= MAX_PREFIX and len(result) < OFF_LOOP:
            body = self._context.encoded.get(bytes(result), encoding).between(start, b"}")
            self._finish(self._ok(len(body), encoding) + body)
        else:
            self._finish_body(b"".join((start, result, b"}")))

    def _finish_body(self, body: bytes, start: RecordStart = JSON_START) -> None:
        """Send a reply with this body, compressed if it is large and the client accepts that."""
        encoding = self._encoding_for(len(body))
        if not encoding:
            self._finish(self._ok(len(body), 0, start) + body)
        elif len(body) < OFF_LOOP:
            packed = encodings.compress(encoding, body)
            self._finish(self._ok(len(packed), encoding, start) + packed)
        else:
            # The headers are built now, while the call's state is still there. The reply is sent as a large one even if it has
            # become small, because memory may be held for it.
            headers = self._ok_lines(0, encoding, start)
            self.flight = None
            self._context.compress_apart(
                self.client,
                encoding,
                body,
                lambda packed: self._finish_large(headers + length_line(len(packed)) + packed),
            )

    def _encoding_for(self, size: int) -> int:
        return (
            0 if self.request_headers is None or size < self._context.compress_from else self.request_headers.encoding
        )

    def on_fault(self, fault: Fault) -> None:
        self._refund(fault)
        self.was_refused = True
        self._reader.forget_known()
        self.draft.failed(fault.message, outcome_of(fault))
        self._finish(self._fault(fault))

    def on_charged(self, units: int) -> bool:
        self.units += units
        return True

    def on_waited(self, waited_s: float) -> None:
        self.waited_s += waited_s

    def _refund(self, fault: Fault) -> None:
        """Refund a call that failed through our fault, and count it. It still costs the further upstream calls that were made
        for it."""
        assert self.request_headers is not None
        self.units = self._context.accounting.refund(self.request_headers.key, fault, self.units)
        self._count(outcome_of(fault))

    def on_batch(self, batch: CallBatch) -> None:
        self.batch = None
        assert self.request_headers is not None
        self.units = self._context.accounting.settle_batch(self.request_headers.key, batch)
        self.block = batch.reached
        body = batch.body()
        self.draft.batch_answered(batch)
        if body:
            self._finish_body(body)
        else:
            self._finish(self._no_content())

    def leave_batch(self) -> bool:
        """The client is gone. False if no batch is under way."""
        if self.batch is None or self.request_headers is None:
            return False
        batch, self.batch = self.batch, None
        self._context.accounting.leave_batch(self.request_headers.key, batch)
        return True

    def on_batch_refused(self, why: Fault | MalformedCall, ids: Sequence[bytes]) -> None:
        self.batch = None
        self.on_fault(fault_of(why))

    # A large reply to a batch, in parts

    def on_batch_begin(self, batch: CallBatch) -> None:
        """Send the headers. Their price is that of all items: items that fail later are refunded, but the header stays."""
        self._context.write_buffer.flush()
        self._streamed = batch
        self.units = batch.units
        self.block = 0
        self.draft.await_end()
        self.stream.begin(self.client, self._encoding_for(NEVER), chunked=True)
        self._write(self._ok(None, self.stream.encoding))

    def on_batch_part(self, part: Piece) -> None:
        self.stream.send(part)
        self._sent_in_turn += len(part)
        if self._sent_in_turn > TURN_BYTES and not self._awaits_turn:
            self._awaits_turn = True
            self._context.turns.add(self.client, self._next_turn)

    def _next_turn(self) -> bool:
        self._awaits_turn, self._sent_in_turn = False, 0
        if self._streamed is not None and not self.stream.stalled_since:
            self._streamed.flush()
        return True

    def on_batch_source(self, connection: UpstreamConnection | None) -> None:
        self.stream.take_from(connection)

    def on_batch_end(self, batch: CallBatch) -> None:
        self.batch = self._streamed = None
        self.stream.end()
        assert self.request_headers is not None
        self.units = self._context.accounting.settle_batch(self.request_headers.key, batch)
        self.draft.record_end(self.request_headers, self, self.began, batch=batch)
        batch.share.give_all()
        self._done()

    def on_batch_broken(self) -> None:
        self.draft.record_end(self.request_headers, self, self.began)
        self.stream.break_off()

    def refuse_incomplete(self, fault: Fault) -> None:
        """Send a fault about a request whose body is not complete. No other request is read."""
        headers: RequestHeaders = self._reader.known  # type: ignore[assignment]
        self.begin(headers, _monotonic())
        self.expect_last()
        self.draft.failed(fault.message, outcome_of(fault))
        self._count(outcome_of(fault))
        self._write(self._fault(fault))

    # Large results, in pieces

    def on_stream(self, beginning: memoryview, left: int | None, connection: UpstreamConnection) -> None:
        """Send our headers and the beginning of the result. Without a length, the reply is chunked."""
        self._context.write_buffer.flush()
        if self._is_get:
            self._stream_record(bytes(beginning), left, connection)
            return
        start = jsonrpc.result_start(self.id)
        if left == len(beginning) and (encoding := self._encoding_for(left)):
            packed = encodings.compress(encoding, start + beginning)
            self._write(self._ok(len(packed), encoding) + packed)
            return
        stream = self.stream
        stream.begin(self.client, self._encoding_for(NEVER), chunked=left is None)
        stream.take_from(connection)
        headers = self._ok(None if left is None or stream.chunked else left + len(start), stream.encoding)
        if stream.chunked:
            self._write(headers)
            stream.send(start + beginning)
        elif self.transport is not None:
            self.transport.writelines((headers + start, beginning))

    def _stream_record(self, beginning: bytes, left: int | None, connection: UpstreamConnection) -> None:
        """Send our headers and the beginning of the body of a reply to a GET."""
        at = beginning.find(RECORD_BODY)
        start = self._context.records.start(beginning[:at])
        assert start is not None  # Our upstreams' connections write it.
        at += len(RECORD_BODY)
        size = None if left is None else left - at
        stream = self.stream
        stream.begin(self.client, 0, chunked=left is None)
        stream.take_from(connection)
        # It is never compressed, so it varies with nothing.
        headers = self._ok_lines(size or 0, 0, start) + _framing(size)
        if stream.chunked:
            self._write(headers)
            stream.send(beginning[at:])
        elif self.transport is not None:
            self.transport.writelines((headers, memoryview(beginning)[at:]))

    def leave_flight(self, flight: Flight) -> None:
        """The client is gone. A request counts once the body of its reply has begun."""
        if flight.streaming and self._is_get:
            self._count("results")
        flight.leave(self)

    def on_stream_piece(self, piece: Piece) -> None:
        self.stream.send(piece)

    def on_stream_end(self) -> None:
        self.stream.end()
        self._count("results")
        self._done()

    def on_stream_broken(self) -> None:
        self._refund(InternalError(BROKEN_REPLY, reason="upstream"))
        self.draft.record_end(self.request_headers, self, self.began)
        self.stream.break_off()

    # A client that does not read

    @property
    def is_stalled(self) -> bool:
        """Whether held parts have to wait: for the client, which does not read, or for its next turn."""
        return self.stream.stalled_since > 0.0 or self._awaits_turn

    def resume(self) -> None:
        """The client reads again."""
        if self.stream.resume_slices():
            return
        self.stream.read_again()
        if self._streamed is not None:
            self._streamed.flush()
        if not self.stream.has_source and not self.busy:
            self._on_free()

    # The end of a request

    def _finish(self, reply: bytes) -> None:
        if len(reply) < DEFER_BELOW:
            self._context.write_buffer.write(self, reply)
            self._done()
        else:
            self._finish_large(reply)

    def _finish_large(self, *parts: Piece) -> None:
        if sum([len(part) for part in parts]) <= AT_ONCE:
            self._context.write_buffer.write_at_once(self, *parts)
            self._sent_whole()
            return
        self._context.write_buffer.flush()
        self.stream.send_slices(self.client, parts, self._sent_whole)

    def _sent_whole(self) -> None:
        self.stream.sent_whole()
        self._done()

    def _done(self) -> None:
        self.busy = False
        self.flight = None
        self.left -= 1
        if self.left <= 0 or self._context.draining:
            self._close_after_reply()
        elif self._reader.ahead or self.paused_reading:
            self._on_free()

    def _close_after_reply(self) -> None:
        self._reader.drop_ahead()  # RFC 9112, 9.6: requests after the last one are not served, even if scheduled.
        self._context.write_buffer.flush()
        if self.transport is not None:
            self.transport.close()

    def close(self) -> None:
        """The connection is lost or has changed its protocol. Also breaks the reference cycle with its owner."""
        self.transport = None
        self.stream.close()
        self._on_free = _ignore

    def _write(self, data: Piece) -> None:
        if self.transport is not None:
            self.transport.write(data)

    def _count(self, outcome: Outcome) -> None:
        if self.request_headers is not None:
            self._context.accounting.count(self.request_headers.key, self, outcome, _monotonic() - self.began)

    # The bytes of other replies

    def _ok(self, size: int | None, encoding: int = 0, start: RecordStart = JSON_START) -> bytes:
        """The headers of a reply with a body of this size; None means a chunked body."""
        varies = start is not JSON_START and size is not None and size >= self._context.compress_from
        lines = self._ok_lines(size or 0, encoding, start, varies=varies)
        return lines + (b"\r\n" if start.has_no_content else _framing(size))

    def _ok_lines(self, size: int, encoding: int, start: RecordStart, *, varies: bool = False) -> bytes:
        assert self.request_headers is not None
        block = self.block if self.flight is None else self.flight.block
        return b"".join(
            (
                start.lines_of_any if size or encoding else start.lines,
                self._context.stamp,
                self._common_lines(start.status, size),
                units_line(self.units),
                found_lines(self.request_headers.route.state, self.cache, block),
                self._upstream_line() if self._context.shows_upstream else b"",
                self._cost_line() if self._context.shows_cost else b"",
                encodings.LINES[encoding] or (VARIES if varies else b""),
            )
        )

    def _no_content(self) -> bytes:
        lines = (self._context.stamp, self._common_lines(204, 0), units_line(self.units), CACHE[self.cache])
        return b"".join((b"HTTP/1.1 204 No Content", *lines, b"\r\n"))

    def _fault(self, fault: Fault) -> bytes:
        body = orjson.dumps(fault.body(self._context.site))
        common = self._common_lines(fault.status, len(body)) + (units_line(self.units) if self.units else b"")
        return fault_bytes(fault, body, self._context.stamp, common)

    def _common_lines(self, status: int, size: int) -> bytes:
        """The request id, the three rate headers, and `Connection: close` on the last reply. `size`: the body's bytes, for the
        record of the request."""
        headers = self.request_headers
        assert headers is not None
        request_id = headers.request_id or self._context.request_id()
        now = _monotonic()
        self._context.accounting.log_request(headers, self, status, request_id, now - self.began)
        self.draft.record(headers, self, status, request_id, now - self.began, size=size)
        # The rates of an expired key are not shown, like those of an unknown one.
        if now < headers.key.expires_at:
            rates = b"".join(self._context.rate_lines(headers.key, now))
        else:
            rates = self._context.rate_lines_without_key(self.transport)
        return b"".join((b"X-Request-Id: ", request_id, rates, self._close_line()))

    def _extra_lines(self) -> bytes:
        upstream = self._upstream_line() if self._context.shows_upstream else b""
        return upstream + (self._cost_line() if self._context.shows_cost else b"") + self._close_line()

    def _close_line(self) -> bytes:
        return CLOSE if self.left <= 1 or self._context.draining else b""

    def _upstream_line(self) -> bytes:
        assert self.request_headers is not None
        return upstream_line(self.request_headers.route, self)

    def _cost_line(self) -> bytes:
        assert self.request_headers is not None
        return cost_line(self.request_headers.directives, self)


def _framing(size: int | None) -> bytes:
    return b"Transfer-Encoding: chunked\r\n\r\n" if size is None else length_line(size)


def _ignore() -> None:
    pass
