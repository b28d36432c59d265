"""Writes the replies of a client connection on the hot path.

A call ends with a result, an error, a fault, or a large result in pieces; a batch ends with the replies of its items. The
writer is the `Waiter` of the request under way, and holds all that the reply needs. One request of a connection is served at
a time, so one writer is reused for all of them and nothing is allocated per request.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any, Final, final

import msgspec

from proxy.core import encodings, jsonrpc
from proxy.core.encodings import MAX_PREFIX
from proxy.core.jsonrpc import MalformedCall
from proxy.core.limits import TOLERANCE_S
from proxy.errors import Fault, InternalError
from proxy.services.rpc.batches import CallBatch
from proxy.services.rpc.flights import Flight
from proxy.services.rpc.method_policy import MethodPolicy
from proxy.services.rpc.rpc_service import BatchUnderWay, fault_of
from proxy.services.rpc.short_batch import ShortBatch
from proxy.web.front.front_context import NEVER, FrontContext
from proxy.web.front.reply_lines import (
    CACHE,
    CLOSE,
    DIGITS,
    LOG_LINE,
    REPLY_LENGTHS,
    UNITS,
    fault_bytes,
    length_line,
    reply_length,
    units_line,
)
from proxy.web.front.request_heads import RequestHead
from proxy.web.front.request_reader import RequestReader
from proxy.web.front.stream_form import StreamForm
from proxy.wire.upstream import Piece, UpstreamConnection
from proxy.wire.write_buffer import DEFER_BELOW

# A body from this size on is compressed in a thread: on the loop, it would delay other clients by half a millisecond and more.
OFF_LOOP: Final = 262_144
_monotonic: Final = time.monotonic


@final
class ReplyWriter:
    __slots__ = (
        "_answered", "_context", "_failure", "_form", "_held_bytes", "_holds", "_on_free", "_reader", "_size", "_source",
        "_streamed", "batch", "began", "block", "busy", "cache", "flight", "head", "id", "left", "params", "paused_reading",
        "policy", "stalled_since", "transport", "units", "was_refused",
    )  # fmt: skip

    def __init__(self, context: FrontContext, reader: RequestReader, on_free: Callable[[], None]) -> None:
        """`on_free` is called after a reply when the client has sent more, or when its reading was paused."""
        self._context = context
        self._reader = reader
        self._on_free = on_free
        self.transport: asyncio.Transport | None = None
        # Replies that may still be sent on this connection: with one left, the next reply is the last.
        self.left = context.max_requests
        # When the client stopped reading; 0.0 while it reads.
        self.stalled_since = 0.0
        # Whether reading from the client is paused because it has sent too much ahead.
        self.paused_reading = False
        # Whether the last request was refused or failed: the next one waits for its turn.
        self.was_refused = False
        # The request under way.
        self.busy = False
        self.head: RequestHead | None = None
        self.began = 0.0
        self.id = b""
        self.policy: MethodPolicy | None = None
        self.units = 0
        self.cache = ""
        # A block that the state behind the result has reached, unless there is a flight, which has its own; 0 if it is unknown.
        self.block = 0
        self.flight: Flight | None = None
        self.batch: BatchUnderWay | None = None
        # The batch whose reply is being sent in parts.
        self._streamed: CallBatch | None = None
        # The upstream connection that streams the reply, and the form in which its pieces are sent.
        self._source: UpstreamConnection | None = None
        self._form = StreamForm()
        # Whether the reply is read from the upstream although the client does not read it, and the bytes so held.
        self._holds = False
        self._held_bytes = 0
        # For the record of the request: its params, if they are recorded, its error, its batch, and the size of its reply.
        self.params = b""
        self._failure = ""
        self._answered: CallBatch | ShortBatch | None = None
        self._size = 0

    def __repr__(self) -> str:
        return f"<ReplyWriter {'busy' if self.busy else 'idle'}, {self.left} replies left>"

    @property
    def streams(self) -> bool:
        """A notification has no reply, so there is nothing to stream."""
        return bool(self.id)

    # Outcomes

    def on_result(self, result: bytes | msgspec.Raw) -> None:
        self._count("results")
        if self.id:
            self.write_result(result, _monotonic())
        else:
            self._finish(self._no_content())

    def write_result(self, result: bytes | msgspec.Raw, now: float) -> None:
        """Send the reply to a good call. In one piece, since almost every request ends here."""
        context = self._context
        head: RequestHead = self.head  # type: ignore[assignment]
        size = len(self.id) + len(result)
        if size >= context.compress_from and head.encoding:
            self._write_encoded(head.encoding, result)
            return
        key = head.key
        limit = key.rate if key.own_rate is None else context.windows.tighter(key.rate, key.own_rate, now)
        # The bucket's state now: other calls may have taken from it since this one was admitted.
        edge = context.windows.edge(limit.slot)
        if edge < now - 1.0:
            edge = now - 1.0
        rate = limit.requests_per_second
        remaining = int((now - edge + TOLERANCE_S) * rate)
        if remaining < 0:
            remaining = 0
        elif remaining > rate:
            remaining = rate
        resets = int(edge + context.resets)
        state = head.route.state
        block = self.block if self.flight is None else self.flight.block
        units = self.units
        request_id = head.request_id or context.request_id()
        reply = (
            context.ok_stamp,
            request_id,
            limit.limit_line,
            DIGITS[remaining] if remaining < 1024 else b"%d" % remaining,
            context.reset_lines.get(resets) or context.reset_line(resets),
            UNITS[units] if units < 256 else units_line(units),
            CACHE[self.cache],
            state.block_line if block == state.tip else state.line_of(block),
            self._extra_lines() if context.adds_lines or self.left <= 1 else b"",
            REPLY_LENGTHS[size] if size < 1024 else reply_length(size),
            self.id,
            b',"result":',
            result,
            b"}",
        )
        if context.log is not None:
            self._log(200, request_id, now)
        account = key.account
        if account.unsampled <= 1 or now - self.began > context.slow_s or head.directives is not None:
            self._record(200, request_id, now, size)
        else:
            account.unsampled -= 1
        self._finish(b"".join(reply))

    def on_error(self, error: bytes) -> None:
        self._count("errors")
        if not self.id:
            self._finish(self._no_content())
            return
        self._failure = error.decode("utf-8", "replace")
        self._finish_body(jsonrpc.error_reply(self.id, error))

    def _write_encoded(self, encoding: int, result: bytes | msgspec.Raw) -> None:
        """Send a large result compressed. A cached one was compressed for an earlier caller, or is now for the next ones."""
        start = jsonrpc.result_start(self.id)
        # A reply that is not cached has no bytes of its own: it is a part of the upstream's.
        if self.cache == "hit" and len(start) <= MAX_PREFIX and len(result) < OFF_LOOP:
            body = self._context.encoded.get(bytes(result), encoding).between(start, b"}")
            self._finish(self._ok(len(body), encoding) + body)
        else:
            self._finish_body(b"".join((start, result, b"}")))

    def _finish_body(self, body: bytes) -> None:
        """Send a 200 with this body, compressed if it is large and the client accepts that."""
        encoding = self._encoding_for(len(body))
        if not encoding:
            self._finish(self._ok(len(body)) + body)
        elif len(body) < OFF_LOOP:
            packed = encodings.compress(encoding, body)
            self._finish(self._ok(len(packed), encoding) + packed)
        else:
            # Its parts are known only now, and the call itself is over.
            head = self._ok_lines(encoding)
            self.flight = None
            self._context.compress_apart(
                encoding, body, lambda packed: self._finish(head + length_line(len(packed)) + packed)
            )

    def _encoding_for(self, size: int) -> int:
        return 0 if self.head is None or size < self._context.compress_from else self.head.encoding

    def on_fault(self, fault: Fault) -> None:
        self._refund(fault)
        self.was_refused = True
        self._reader.forget_known()
        self._failure = fault.message
        self._finish(self._fault(fault))

    def _refund(self, fault: Fault) -> None:
        """A fault costs nothing: the call was refused before it was charged, or the failure is ours."""
        assert self.head is not None
        self._context.rpc.refund(self.head.key, fault, 1, self.units)
        self.units = 0
        self._count("faults")

    def on_batch(self, batch: CallBatch | ShortBatch) -> None:
        self.batch = None
        assert self.head is not None
        self.units = self._context.rpc.settle_batch(self.head.key, batch)
        self.block = batch.reached
        body = batch.body()
        self._answered = batch
        if body:
            self._finish_body(body)
        else:
            self._finish(self._no_content())

    def on_batch_refused(self, why: Fault | MalformedCall, ids: Sequence[bytes]) -> None:
        self.batch = None
        self.on_fault(fault_of(why))

    # A large reply to a batch, in parts

    @property
    def is_stalled(self) -> bool:
        return self.stalled_since > 0.0

    def on_batch_begin(self, batch: CallBatch) -> None:
        """The price is that of all items: refunds of items that fail later do not show in the header."""
        self._context.write_buffer.flush()
        self._streamed = batch
        self.units = batch.units
        self.block = 0
        self._form.begin(self._encoding_for(NEVER), chunked=True)
        self._write(self._ok(None, self._form.encoding))

    def on_batch_part(self, part: Piece) -> None:
        self.on_stream_piece(part)

    def on_batch_source(self, connection: UpstreamConnection | None) -> None:
        self._source = connection
        if connection is not None:
            connection.on_stalled = self._on_stalled
            if self.stalled_since and not self._holds:
                connection.pause()

    def on_batch_end(self, batch: CallBatch) -> None:
        self.batch = self._streamed = None
        self._source = None
        self._write(self._form.end())
        assert self.head is not None
        self._context.rpc.settle_batch(self.head.key, batch)
        batch.share.give_all()
        self._done()

    def on_batch_broken(self) -> None:
        """Abort the connection, so that the client cannot take half a reply for a whole one."""
        self._source = None
        self._form.stop()
        self._drop()

    def refuse_incomplete(self, fault: Fault) -> None:
        """Send a fault about a request whose body is not complete. The caller closes the connection."""
        self.head, self.left = self._reader.known, 0
        self.policy = None
        self._write(self._fault(fault))

    # Large results, in pieces

    def on_stream(self, beginning: memoryview, left: int | None, connection: UpstreamConnection) -> None:
        """Send our head and the beginning of the result. Without a length the reply is chunked."""
        self._context.write_buffer.flush()
        start = jsonrpc.result_start(self.id)
        if left == len(beginning) and (encoding := self._encoding_for(left)):
            packed = encodings.compress(encoding, start + beginning)
            self._write(self._ok(len(packed), encoding) + packed)
            return
        self._form.begin(self._encoding_for(NEVER), chunked=left is None)
        self._source = connection
        connection.on_stalled = self._on_stalled
        if self.stalled_since:
            connection.pause()
        chunked = self._form.chunked
        head = self._ok(None if left is None or chunked else left + len(start), self._form.encoding)
        if chunked:
            self._write(head)
            self.on_stream_piece(start + beginning)
        elif self.transport is not None:
            self.transport.writelines((head + start, beginning))

    def on_stream_piece(self, piece: Piece) -> None:
        if self._holds and not self._hold(len(piece)):
            self._drop()
            return
        data = self._form.frame(piece)
        if data:
            self._write(data)

    def on_stream_end(self) -> None:
        # Cleared before the write: a write may call pause_writing, and the upstream connection is no longer ours to pause.
        self._source = None
        if self._form.chunked:
            self._write(self._form.end())
        self._count("results")
        self._done()

    def on_stream_broken(self) -> None:
        self._refund(InternalError("the upstream's reply broke off"))
        self.on_batch_broken()

    def pause(self, now: float) -> None:
        """The client does not read: stop reading its reply from the upstream."""
        self.stalled_since = now
        if self._source is not None and not self._holds:
            self._source.pause()

    def _on_stalled(self) -> None:
        """Others need the upstream connection: hold the rest of the reply in memory, or drop the client."""
        source, head = self._source, self.head
        if source is None or head is None:
            return
        if self._context.held.has_room(head.key.account.id, source.bytes_left):
            self._holds = True
            source.resume()
        else:
            self._drop()

    def _hold(self, size: int) -> bool:
        assert self.head is not None
        if not self._context.held.take(self.head.key.account.id, size):
            return False
        self._held_bytes += size
        return True

    def _drop(self) -> None:
        if self.transport is not None:
            self.transport.abort()

    def _let_go(self) -> None:
        """What was held has been sent, or is not wanted any more."""
        self._holds = False
        if self._held_bytes and self.head is not None:
            self._context.held.give_back(self.head.key.account.id, self._held_bytes)
            self._held_bytes = 0

    def resume(self) -> None:
        self.stalled_since = 0.0
        self._let_go()
        if self._streamed is not None:
            self._streamed.flush()
        if self._source is not None:
            self._source.resume()
        elif not self.busy:
            self._on_free()

    # The end of a request

    def _finish(self, reply: bytes) -> None:
        if len(reply) < DEFER_BELOW:
            self._context.write_buffer.write(self, reply)
        else:
            self._context.write_buffer.write_at_once(self, reply)
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
        # RFC 9112, 9.6: requests behind the last reply are not served, even if one is scheduled already.
        self._reader.drop_ahead()
        self._context.write_buffer.flush()
        if self.transport is not None:
            self.transport.close()

    def close(self) -> None:
        """The connection is lost or has changed its protocol. Also breaks the reference cycle with its owner."""
        self.transport = None
        self._source = None
        self._let_go()
        self._on_free = _ignore

    def _write(self, data: Piece) -> None:
        if self.transport is not None:
            self.transport.write(data)

    def _count(self, outcome: str) -> None:
        if self.policy is not None and self.head is not None:
            tally = self.head.key.sheet[self.policy.tally]
            tally.count(outcome, self.cache, self.units, _monotonic() - self.began)

    # The bytes of other replies

    def _ok(self, size: int | None, encoding: int = 0) -> bytes:
        """The head of a 200 with a body of this size; None means a chunked body."""
        self._size = size or 0
        return self._ok_lines(encoding) + (b"Transfer-Encoding: chunked\r\n\r\n" if size is None else length_line(size))

    def _ok_lines(self, encoding: int) -> bytes:
        return b"".join(
            (
                b"HTTP/1.1 200 OK\r\nContent-Type: application/json",
                self._context.stamp,
                self._common_lines(200),
                units_line(self.units),
                CACHE[self.cache],
                self._block_line(),
                self._upstream_line() if self._context.shows_upstream else b"",
                encodings.LINES[encoding],
            )
        )

    def _no_content(self) -> bytes:
        stamp, common, units = self._context.stamp, self._common_lines(204), units_line(self.units)
        return b"".join((b"HTTP/1.1 204 No Content", stamp, common, units, CACHE[self.cache], b"\r\n"))

    def _fault(self, fault: Fault) -> bytes:
        return fault_bytes(fault, self._context.stamp, self._common_lines(fault.status))

    def _common_lines(self, status: int) -> bytes:
        """The request id, the three rate headers, and `Connection: close` on the last reply."""
        head = self.head
        assert head is not None
        request_id = head.request_id or self._context.request_id()
        now = _monotonic()
        self._log(status, request_id, now)
        self._record(status, request_id, now, self._size)
        # The rates of an expired key are not shown, like those of an unknown one.
        if now < head.key.dies_at:
            rates = self._context.rate_lines(head.key, now)
        else:
            rates = self._context.rate_lines_without_key(self.transport)
        return b"".join((b"X-Request-Id: ", request_id, rates, self._close_line()))

    def _extra_lines(self) -> bytes:
        return (self._upstream_line() if self._context.shows_upstream else b"") + self._close_line()

    def _close_line(self) -> bytes:
        return CLOSE if self.left <= 1 or self._context.draining else b""

    def _block_line(self) -> bytes:
        assert self.head is not None
        return self.head.route.state.line_of(self.block if self.flight is None else self.flight.block)

    def _upstream_line(self) -> bytes:
        """Which upstream answered, by its label. Cached replies, batches and refusals have none."""
        assert self.head is not None
        route = self.head.route
        if self.flight is not None:
            label = self.flight.answered_label
        else:
            is_short = self.policy is not None and self.policy.short and not self.cache and route.only is not None
            label = route.upstreams[0].label if is_short else ""
        return b"X-Upstream: %b\r\n" % label.encode() if label else b""

    def _record(self, status: int, request_id: bytes, now: float, size: int) -> None:
        """Record what happened to the request, if it is to be recorded."""
        head, requests, took_s = self.head, self._context.requests, now - self.began
        failure, batch = self._failure, self._answered
        self._failure, self._answered, self._size = "", None, 0
        if head is None:
            return
        key, network, directives = head.key, head.route.network.id, head.directives
        name = request_id.decode()
        if batch is not None:
            requests.note_batch(
                name, key, batch, network=network, took_s=took_s, directives=directives, units=self.units, bytes=size
            )
            return
        reason = requests.reason(key.account, took_s, directives, failed=failure != "")
        if reason is not None:
            requests.note(
                name,
                key,
                reason,
                surface="http",
                network=network,
                method=self.policy.method.name if self.policy is not None else "",
                status=status,
                took_s=took_s,
                flight=self.flight,
                params=self.params,
                error=failure,
                units=self.units,
                cache=self.cache,
                bytes=size,
                **self._short_attempt(took_s),
            )

    def _short_attempt(self, took_s: float) -> dict[str, Any]:
        """The block and the attempt of a call without a flight."""
        if self.flight is not None:
            return {}
        assert self.head is not None
        only = self.head.route.only
        is_short = only is not None and self.policy is not None and self.policy.short and not self.cache and self.units
        attempts = ((only.label, 0.0, took_s, "answered"),) if only is not None and is_short else ()
        return {"block": self.block, "attempts": attempts}

    def _log(self, status: int, request_id: bytes, now: float) -> None:
        """Add the request's line to the access log."""
        log, head = self._context.log, self.head
        if log is None or head is None:
            return
        log.add(
            LOG_LINE
            % (
                self._context.log_time,
                request_id,
                head.route.network.id.encode(),
                self.policy.method.name.encode() if self.policy else b"",
                status,
                (now - self.began) * 1000,
                head.key.id.encode(),
                self.units,
                self.cache.encode(),
            )
        )


def _ignore() -> None:
    pass
