"""One HTTP/1.1 connection to an upstream, on a bare transport.

Calls go out in order and replies come back in order. Most connections carry one call at a time, some several (see `Upstream`).

A reply larger than LARGE is offered to its sink in pieces as they arrive, so that 100 MB need not fit in memory. A sink that
declines receives it whole, up to MAX_REPLY_BYTES. Whole replies to clients' calls above COUNTED_FROM take memory from the
upstream's `memory` budget: their Content-Length with the first bytes of the body, or without one as much as has arrived.
"""

from __future__ import annotations

import asyncio
from typing import Final

from proxy.core.encodings import GzipReader, TooMuchData, decompress
from proxy.turn_queue import Step, TurnQueue
from proxy.wire.call_queue import LONGEST_ABANDONED_S
from proxy.wire.http1 import CHUNKED, MAX_HEADER_BYTES, UNTIL_CLOSE, BadReply, Chunks, ReplyHeaders, read_headers
from proxy.wire.sliced_reading import SlicedReading
from proxy.wire.upstream import (
    MAX_REPLY_BYTES,
    MOST_SHARED,
    NO_MEMORY,
    STALE,
    TOO_LARGE,
    Piece,
    ReplySink,
    Upstream,
    UpstreamConnection,
)

LARGE: Final = 65_536
# A large reply is offered once this much of it has arrived: enough to recognise it.
BEGINNING = 512
# Replies that are received whole are counted in the memory budget above this size.
COUNTED_FROM: Final = 1 << 20
# Failures of a single call. Other calls on the connection fail only because it is then closed.
_OF_ONE_CALL: Final = (TOO_LARGE, NO_MEMORY)
_END: Final = b"\r\n\r\n"
_START = b"HTTP/1."
# A placeholder for "no headers known": received data is always shorter, so it never starts with this.
NEVER: Final = bytes(1 << 20)


class HttpConnection(UpstreamConnection):
    __slots__ = (
        "_chunks",
        "_collected",
        "_counted",
        "_counted_for",
        "_gzip",
        "_headers",
        "_known",
        "_known_bytes",
        "_known_total",
        "_left",
        "_may_stream",
        "_offered_from",
        "_part",
        "_paused",
        "_paused_s",
        "_paused_since",
        "_reads_soon",
        "_size",
        "_slices",
        "_streams",
        "_turns",
        "_usual",
    )

    def __init__(self, upstream: Upstream, turns: TurnQueue) -> None:
        super().__init__(upstream)
        self._turns = turns
        self._part = b""
        # The last header block, and its parsed form: upstreams repeat header blocks, so most replies need no parsing.
        self._known_bytes = NEVER
        self._known: ReplyHeaders | None = None
        self._known_total = 0
        # Whether no reply is partly read.
        self._usual = True
        # While a body is being read: its headers, the bytes left, and the pieces collected so far.
        self._headers: ReplyHeaders | None = None
        self._left = 0
        self._chunks: Chunks | None = None
        self._gzip: GzipReader | None = None
        self._collected: list[Piece] = []
        self._size = 0
        # The bytes that are counted in the upstream's memory, and for which account.
        self._counted = 0
        self._counted_for = ""
        self._may_stream = False
        self._offered_from = LARGE
        self._streams = False
        self._paused = False
        # Whether reading waits for the client's turn, and the protocol that receives the rest of a large reply.
        self._reads_soon = False
        self._slices: SlicedReading | None = None
        # When this reply was last paused by its reader, and for how long in total before that.
        self._paused_since = 0.0
        self._paused_s = 0.0

    def __repr__(self) -> str:
        state = "lost" if self.transport is None else f"{len(self.sinks)} in flight"
        return f"<HttpConnection {self.upstream.label} {state}>"

    # Called by the transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]
        self.idle_since = self.upstream.now

    def data_received(self, data: bytes) -> None:
        # The usual case, kept short: the same headers as last time, a whole body, and one call in flight.
        if (
            data.startswith(self._known_bytes)
            and len(data) == self._known_total
            and self._usual
            and len(self.sinks) == 1
        ):
            sink = self.sinks.popleft()
            upstream = self.upstream
            self.idle_since = upstream.now
            if upstream.rests:
                upstream.idle.append(self)
            else:
                upstream.release(self, sink)
            sink.on_reply(self, self._known, data[len(self._known_bytes) :])  # type: ignore[arg-type]
            return
        is_much = len(data) > LARGE or self._slices is not None
        try:
            if self._headers is not None:
                data = bytes(self._continue_body(data))
            if data:
                self._read_replies(data)
            self._usual = self._is_between_replies()
            if is_much:
                self._read_in_turn()
        except BadReply as exc:
            self.fail(str(exc) if str(exc) in _OF_ONE_CALL else f"malformed reply: {exc}")

    def eof_received(self) -> None:
        # Leave the pool now, before the transport closes: no call may be sent on a connection that is ending.
        self.upstream.lost(self)
        if self._headers is not None and self._headers.length == UNTIL_CLOSE:
            try:
                self._finish_body()
            except BadReply as exc:
                self.fail(f"malformed reply: {exc}")

    def connection_lost(self, exc: Exception | None) -> None:
        self.transport = None
        self._give_memory()
        self.upstream.lost(self)
        is_stale = self._known is not None and self._headers is None and not self._part
        self._fail_all(STALE if is_stale else "connection lost")

    def pause_writing(self) -> None:
        pass  # The size of a request is limited, and the pool limits how many are in flight.

    def resume_writing(self) -> None:
        pass

    # Called by sinks and by the upstream's pool

    def pause(self) -> None:
        if self.transport is not None and not self._paused:
            self._paused = True
            self._paused_since = self.upstream.now
            if not self._reads_soon:
                self.transport.pause_reading()

    def resume(self) -> None:
        if self._paused and self.transport is not None:
            self._paused = False
            self._paused_s += self.upstream.now - self._paused_since
            self.idle_since = self.upstream.now
            if not self._reads_soon:
                self.transport.resume_reading()

    def _read_in_turn(self) -> None:
        """Read the rest of a large reply in slices, after other clients' turns. The transport would read up to 8 MB at once."""
        if self.transport is None or self._reads_soon:
            return
        if self._usual or not self.sinks:
            self._end_slices()
            return
        self._reads_soon = True
        if not self._paused:
            self.transport.pause_reading()
        if self._slices is None:
            self._slices = SlicedReading(self)
            self.transport.set_protocol(self._slices)
        self._turns.add(self.sinks[0].client, self._read_on)

    def _end_slices(self) -> None:
        """The large reply has ended: receive data without slices again. The transport looks at the kind of its protocol only
        when reading starts, so reading is stopped and started."""
        if self._slices is not None and self.transport is not None:
            self._slices = None
            if not self._paused:
                self.transport.pause_reading()
            self.transport.set_protocol(self)
            if not self._paused:
                self.transport.resume_reading()

    def _read_on(self) -> bool:
        self._reads_soon = False
        if self.transport is not None and not self._paused:
            self.transport.resume_reading()
        return True

    def in_turn(self, client: str, step: Step) -> None:
        self._turns.add(client, step)

    @property
    def has_replied(self) -> bool:
        return self._known is not None

    @property
    def header_block(self) -> bytes:
        """The headers of the reply that is being delivered, as received."""
        return self._known_bytes

    @property
    def bytes_left(self) -> int:
        return max(0, self._left)

    def stalled_s(self, now: float) -> float:
        return self._paused_s + (now - self._paused_since if self._paused else 0.0)

    def is_stuck(self, now: float, after_s: float) -> bool:
        return not self._paused and now - self.idle_since > after_s

    def leave(self, sink: ReplySink) -> None:
        """Discard the sink's reply. If no other sink is left, the connection is closed, so that the reply cannot reach a later
        call. A call that the upstream bills is completed instead: whether a call that is cut off is billed depends on how far
        it got, which is not known here."""
        if sink in self.sinks:
            self.sinks[self.sinks.index(sink)] = AbsentSink(sink, self.upstream.now)
            if not self.is_abandoned or (self._headers is None and self.upstream.health.meter is not None):
                return
            if self._headers is None:
                self.upstream.abandoned(sink)
            self.abort()

    @property
    def is_abandoned(self) -> bool:
        """Whether all sinks of calls in flight have left."""
        return all(isinstance(sink, AbsentSink) for sink in self.sinks)

    def replace(self, sink: ReplySink, successor: ReplySink) -> None:
        self.sinks[self.sinks.index(sink)] = successor
        self.upstream.replaced(sink, successor)

    def abort(self) -> None:
        self.upstream.lost(self)
        self._give_memory()
        if self.transport is not None:
            self.transport.abort()

    def fail(self, reason: str) -> None:
        # Before sinks are notified: a sink may retry at once, and must not get this connection.
        self.abort()
        if reason in _OF_ONE_CALL and self.sinks:
            self._headers = None
            self.sinks.popleft().on_fail(self.upstream, reason, sent=True)
            reason = STALE
        self._fail_all(reason)

    def _fail_all(self, reason: str) -> None:
        self._headers = None
        while self.sinks:
            self.sinks.popleft().on_fail(self.upstream, reason, sent=True)

    # Reading

    def _read_replies(self, data: bytes) -> None:
        if self._part:
            data = self._part + data
            self._part = b""
        at, end = 0, len(data)
        while at < end:
            if data.startswith(self._known_bytes, at):
                headers = self._known
                body_at = at + len(self._known_bytes)
            else:
                body_at = data.find(_END, at) + 4
                if body_at == 3:
                    self._keep_part(data[at:])
                    return
                headers = self._learn(data[at:body_at])
            assert headers is not None
            length = headers.length
            body_end = body_at + length
            if length >= 0 and body_end <= end and length <= LARGE and headers.status >= 200:
                if not self.sinks:
                    raise BadReply("no call is in flight")
                sink = self.sinks[0]
                at = body_end
                body = data[body_at:body_end]
                if headers.decoded is not None:
                    body = _decoded(body)
                self.sinks.popleft()
                self._after_reply(headers, sink)
                sink.on_reply(self, headers.decoded or headers, body)
                if headers.close:
                    return
            elif headers.status < 200:
                at = body_at
            else:
                self._begin_body(headers)
                rest = self._continue_body(memoryview(data)[body_at:])
                at = end - len(rest)
                if headers.close:
                    return

    def _keep_part(self, part: bytes) -> None:
        # Fail at once if the bytes cannot become headers.
        if not _START.startswith(part[: len(_START)]):
            raise BadReply("no headers")
        if len(part) > MAX_HEADER_BYTES:
            raise BadReply("headers too long")
        self._part = part

    def _learn(self, raw: bytes) -> ReplyHeaders:
        headers = read_headers(raw)
        self._known_bytes, self._known = raw, headers
        # Replies that need special handling never match this size.
        is_plain = (
            0 <= headers.length <= LARGE and headers.status >= 200 and not headers.close and headers.decoded is None
        )
        self._known_total = len(raw) + headers.length if is_plain else -1
        return headers

    def _after_reply(self, headers: ReplyHeaders, sink: ReplySink) -> None:
        """Return the connection to the pool before its sink is notified: the sink may send the next call on it."""
        self.idle_since = self.upstream.now
        if headers.close:
            self.upstream.retire(self)
        else:
            self.upstream.release(self, sink)

    def _is_between_replies(self) -> bool:
        return self._headers is None and not self._part

    def _begin_body(self, headers: ReplyHeaders) -> None:
        if not self.sinks:
            raise BadReply("no call is in flight")
        # Only a connection with one call may be paused by its reader: other replies could wait behind a streamed one. A reply
        # that ends with the connection is not streamed either, because its end looks like a failure, and pieces that were
        # passed on cannot be taken back.
        self._may_stream = self.upstream.depth == 1 and headers.length != UNTIL_CLOSE
        if headers.length > MAX_REPLY_BYTES and not self._may_stream:
            raise BadReply(TOO_LARGE)
        self._headers = headers
        self._left = headers.length
        self._chunks = Chunks() if headers.length == CHUNKED else None
        self._gzip = GzipReader(MAX_REPLY_BYTES) if headers.decoded is not None else None
        self._collected = []
        self._size = 0
        self._streams = False
        self._offered_from = LARGE
        self._paused_s = 0.0

    def _continue_body(self, data: Piece) -> Piece:
        """Read the rest of the body. Returns the bytes after it, which belong to the next reply."""
        assert self._headers is not None
        piece: Piece
        rest: Piece = b""
        if self._chunks is not None:
            piece = self._chunks.feed(bytes(data))
            done, rest = self._chunks.done, self._chunks.rest
        elif self._headers.length == UNTIL_CLOSE:
            piece, done = data, False
        else:
            piece, rest = (data, b"") if len(data) <= self._left else (data[: self._left], data[self._left :])
            self._left -= len(piece)
            done = self._left == 0
        if piece and self._gzip is not None:
            piece = self._unpacked(self._gzip, piece)
        if piece:
            self._take_piece(piece)
        # The sink that took the piece may have closed the connection.
        if done and not self._is_between_replies():
            self._finish_body()
        return rest

    def _unpacked(self, reader: GzipReader, piece: Piece) -> bytes:
        try:
            return reader.feed(piece)
        except TooMuchData as exc:
            raise BadReply(TOO_LARGE if str(exc) == "too large" else str(exc)) from None

    def _take_piece(self, piece: Piece) -> None:
        if self._streams:
            self.idle_since = self.upstream.now
            self.sinks[0].on_piece(self, piece)
            return
        assert self._headers is not None
        self._collected.append(piece)
        self._size += len(piece)
        is_large = max(self._size, self._headers.length) > self._offered_from
        is_offered = self._may_stream and self._size >= BEGINNING and is_large
        if is_offered and self._offer(self._headers):
            return
        if self._size > MAX_REPLY_BYTES:
            raise BadReply(TOO_LARGE)
        if max(self._size, self._headers.length) > COUNTED_FROM:
            self._count(max(self._size, self._headers.length))

    def _count(self, size: int) -> None:
        """Take memory for a reply that is received whole. `size`: its Content-Length, or its bytes so far. Replies to our own
        calls are not counted."""
        client, memory = self.sinks[0].client, self.upstream.memory
        if memory is None or not client or size <= self._counted:
            return
        if not memory.take(self._counted_for or client, size - self._counted):
            raise BadReply(NO_MEMORY)
        self._counted, self._counted_for = size, self._counted_for or client

    def _give_memory(self) -> None:
        if self._counted and self.upstream.memory is not None:
            self.upstream.memory.give_back(self._counted_for, self._counted)
            self._counted, self._counted_for = 0, ""

    def _offer(self, headers: ReplyHeaders) -> bool:
        """Offer a large reply to its sink. One whose length is not known is offered again when it has become larger. Returns
        whether the sink takes it in pieces."""
        shown = headers.decoded or headers
        self._may_stream = shown.length < 0 and self._offered_from < MOST_SHARED
        self._offered_from = MOST_SHARED
        self.idle_since = self.upstream.now
        beginning = self._collected[0] if len(self._collected) == 1 else b"".join(self._collected)
        self._streams = self.sinks[0].on_large(self, shown, beginning)
        if self._streams:
            # The sink counts what it holds.
            self._give_memory()
            self.upstream.is_streamed(self.sinks[0])
        self._collected = [] if self._streams else [beginning]
        if headers.length > MAX_REPLY_BYTES and not self._streams:
            raise BadReply(TOO_LARGE)
        return self._streams

    def _finish_body(self) -> None:
        headers, collected = self._headers, self._collected
        assert headers is not None
        if self._gzip is not None and not self._gzip.is_whole:
            raise BadReply("gzip data is cut off")
        self._headers, self._collected, self._chunks = None, [], None
        self.on_stalled = None
        # The reader may have paused the connection at the last piece: the next reply must be read.
        self.resume()
        self._paused_s = 0.0
        sink = self.sinks.popleft()
        self._after_reply(headers, sink)
        if self._streams:
            self._streams = False
            sink.on_end(self)
        else:
            body = b"".join(collected)
            collected.clear()
            self._give_memory()  # The sink counts what it holds.
            sink.on_reply(self, headers.decoded or headers, body)


def _decoded(body: bytes) -> bytes:
    try:
        return decompress(body, MAX_REPLY_BYTES)
    except TooMuchData as exc:
        raise BadReply(TOO_LARGE if str(exc) == "too large" else str(exc)) from None


class AbsentSink:
    """Takes the place of a sink that left. The call still counts for its client. If its connection is kept for the reply alone,
    it closes the connection when the reply is large or takes too long."""

    def __init__(self, left: ReplySink, since: float) -> None:
        self.client = left.client
        self._left = left
        self._since = since

    def on_reply(self, connection: UpstreamConnection, headers: ReplyHeaders, body: bytes) -> None:
        if connection.upstream.health.meter is not None:
            self._left.on_late(connection.upstream, headers, body)

    def on_large(self, connection: UpstreamConnection, headers: ReplyHeaders, beginning: Piece) -> bool:
        return True

    def on_piece(self, connection: UpstreamConnection, piece: Piece) -> None:
        if isinstance(connection, HttpConnection) and connection.is_abandoned:
            connection.abort()

    def on_late(self, upstream: Upstream, headers: ReplyHeaders, body: bytes) -> None: ...
    def on_end(self, connection: UpstreamConnection) -> None: ...

    def on_fail(self, upstream: Upstream, reason: str, *, sent: bool) -> None: ...

    def on_tick(self, connection: UpstreamConnection | None, now: float) -> None:
        if (
            isinstance(connection, HttpConnection)
            and now - self._since > LONGEST_ABANDONED_S
            and connection.is_abandoned
        ):
            connection.abort()
