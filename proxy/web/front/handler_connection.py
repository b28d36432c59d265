"""A connection that aiohttp serves, in turns and with deadlines.

A connection starts as a `FrontConnection` (the hot path). When it sends a request of another form, `hand_over` makes it a
`HandlerConnection` for good. Received bytes are parsed a share at a time, so that no connection blocks the event loop for
others. Requests that cannot be parsed get the API's error body.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Literal

from aiohttp import HttpVersion11, StreamReader, web
from aiohttp.http_exceptions import BadHttpMessage, LineTooLong

from proxy.errors import Fault, HeadersTooLarge, InvalidRequest, StartError, TargetTooLong, of_status, without_frames
from proxy.web.aiohttp_internals import AiohttpConnection, RequestServer, has_c_parser, reply_in_version
from proxy.web.front.connection_limiter import ConnectionLimiter, LimitedConnection
from proxy.web.front.lingering import LingeringConnection
from proxy.web.reply import fault_reply
from proxy.wire.sliced_reading import SlicedReading

log = logging.getLogger("penstock.front")

# Headers in one request. With MAX_LINE_BYTES this bounds the parser's memory for headers that never end.
MAX_HEADERS = 100
MAX_LINE_BYTES = 8190
# RFC 9112, 3: request lines of at least 8000 bytes should be supported. It differs from MAX_LINE_BYTES so that the two errors
# can be distinguished.
MAX_TARGET_BYTES = 8000
# The bytes and line ends that aiohttp parses in one step. A chunk has two line ends, and takes up to 5 µs.
PARSE_BYTES = 16_384
PARSE_LINES = 50
# After a reply, up to this many bytes of a body that its handler did not read are skipped, so that the connection can be kept.
# Beyond it, the connection is closed once the client has read the reply.
MAX_UNWANTED_BYTES = 16_384
# The most bytes of chunk framing, besides a quarter of the body's size: many tiny chunks cost far more time than their bytes.
MAX_CHUNK_OVERHEAD = 16_384


def require_c_parser() -> None:
    """Refuse to start on aiohttp's Python parser, which accepts more malformed requests than its C parser."""
    if not has_c_parser():
        raise StartError(["aiohttp has no C parser: unset AIOHTTP_NO_EXTENSIONS, or install a wheel with extensions"])


class HandlerConnection(AiohttpConnection):
    """A connection served by aiohttp: *idle* until a byte comes, *reading* until the headers are complete, then *busy*."""

    __slots__ = (
        "_address",
        "_body_bytes",
        "_left",
        "_limiter",
        "_parsed",
        "_parses_soon",
        "_phase",
        "_read_error",
        "_since",
        "_stalled_since",
        "_unparsed",
        "_unsent",
        "_unwanted",
        "_unwanted_bytes",
        "client",
        "on_lost",
    )

    def __init__(self, limiter: ConnectionLimiter, address: str, server: web.Server) -> None:
        super().__init__(
            server,
            loop=asyncio.get_running_loop(),
            keepalive_timeout=limiter.limits.keepalive_s,
            access_log=None,  # type: ignore[arg-type]
            max_line_size=MAX_TARGET_BYTES,
            max_field_size=MAX_LINE_BYTES,
            max_headers=MAX_HEADERS,
            auto_decompress=False,
        )
        self._limiter = limiter
        self._address = address
        # The account of its last request, or its address. All connections of a client share its turns.
        self.client = address
        self._phase: Literal["idle", "reading", "busy"] = "idle"
        self._left = limiter.limits.keepalive_requests
        self._since = limiter.now()
        self._stalled_since = 0.0
        self._unsent = 0
        # Received bytes; those from `_parsed` on are parsed in later turns.
        self._unparsed = b""
        self._parsed = 0
        self._parses_soon = False
        # Bytes since the headers of the request that is being served.
        self._body_bytes = 0
        # Why the rest of a body was not read.
        self._read_error: Exception | None = None
        # A body that was still arriving when its request was answered, and the bytes since.
        self._unwanted: StreamReader | None = None
        self._unwanted_bytes = 0
        # aiohttp does not cancel a handler whose client has left. A handler that needs to know sets this callback.
        self.on_lost: Callable[[], object] | None = None

    def __repr__(self) -> str:
        return f"<HandlerConnection {self._phase}>"

    def connection_lost(self, exc: BaseException | None) -> None:
        self._limiter.remove(self, self._address)
        if self.on_lost is not None:
            self.on_lost()
        self.drop_unserved_request()
        super().connection_lost(exc)

    async def start(self) -> None:
        """Do nothing if the client has left before this task's first turn: aiohttp asserts that it has not."""
        try:
            if self.is_open:
                await super().start()
        finally:
            if self._read_error is not None:
                without_frames(self._read_error)

    def data_received(self, data: bytes) -> None:
        """Queue the bytes, to be parsed a share in each turn. aiohttp itself calls this with empty data, so that bytes which
        its parser holds are parsed."""
        if not data:
            super().data_received(data)
            return
        if self._phase == "idle":
            self._phase = "reading"
            self._since = self._limiter.now()
            self._limiter.deadline_runs(self)
            # A trusted proxy sends requests of many clients on one connection.
            self.client = self._limiter.client_of_headers(self._address, data) or self.client
        self._unparsed = self._bytes_left() + data
        self._parsed = 0
        if len(self._unparsed) > PARSE_BYTES:
            self.pause_input()
        self._parse_soon()

    @property
    def has_unparsed(self) -> bool:
        return bool(self._unparsed)

    def _bytes_left(self) -> bytes:
        return self._unparsed[self._parsed :]

    def _drop_unparsed(self) -> None:
        self._unparsed, self._parsed = b"", 0

    def _parse_soon(self) -> None:
        if not self._parses_soon:
            self._parses_soon = True
            self._limiter.turns.add(self.client, self._parse_next)

    def _parse_next(self) -> bool:
        """Parse a share, which wakes the task that waits for it."""
        self._parses_soon = False
        if not self._unparsed or self.is_held or self.transport is None:
            return False
        data = self._next_share()
        self._parsed += len(data)
        if self._parsed == len(self._unparsed):
            self._drop_unparsed()
        self._parse(data)
        if not self.is_held:
            self.resume_input()
        return True

    def _next_share(self) -> bytes:
        at, size = self._parsed, PARSE_BYTES
        # Counting takes 10 µs, searching a hundredth of that, and most bodies are one line.
        if self._unparsed.find(b"\n", at, at + size) >= 0:
            while size > PARSE_LINES and self._unparsed.count(b"\n", at, at + size) > PARSE_LINES:
                size //= 2
        return self._unparsed[at : at + size]

    def _parse(self, data: bytes) -> None:
        if self._unwanted is not None:
            self._unwanted_bytes += len(data)
            if self._unwanted.is_eof():
                self._unwanted = None
            elif self._unwanted_bytes > MAX_UNWANTED_BYTES:
                # aiohttp reads the body up to its end, or up to a timeout.
                self._stop_reading(self._unwanted, TimeoutError())
                transport, address, _ = self.release()
                if transport is not None:
                    LingeringConnection(self._limiter, transport, address, self.client).begin(self)
                return
        super().data_received(data)
        self._body_bytes += len(data)
        body = self.body_being_read
        if body is not None and self._has_tiny_chunks(body):
            self._stop_reading(body, ConnectionResetError("the chunks of the body are too small"))
            self._limiter.close_tiny_chunks(self)

    def _has_tiny_chunks(self, body: StreamReader) -> bool:
        size = body.total_bytes
        return not body.is_eof() and self._body_bytes > size + size // 4 + MAX_CHUNK_OVERHEAD

    def _stop_reading(self, body: StreamReader, reason: Exception) -> None:
        """Drop the rest of the body and raise `reason` in the code that reads it, which would otherwise treat the closed
        connection as a bug."""
        self._drop_unparsed()
        self._read_error = reason
        body.set_exception(reason)

    def resume_input(self) -> None:
        """Parse bytes that were deferred before more are read."""
        if self._unparsed:
            self._parse_soon()
        else:
            super().resume_input()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stalled_since = self._limiter.now()
        self._unsent = 0
        self._limiter.deadline_runs(self)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stalled_since = 0.0

    def release(self) -> tuple[asyncio.Transport | None, str, bytes]:
        """Detach the connection from aiohttp. Returns its transport, its address, and the bytes after the request.

        To aiohttp, the client has left. The transport is None if it really has.
        """
        transport, ahead = self.transport, self.bytes_behind_request + self._bytes_left()
        if self._unparsed:
            self._drop_unparsed()
            self.resume_input()
        self.transport = None
        if transport is not None:
            web.RequestHandler.connection_lost(self, None)
        return transport, self._address, ahead

    def begin_request(self) -> None:
        """Called when the headers are complete, before the handler runs."""
        self._phase = "busy"
        self._left -= 1
        self._limiter.deadline_ended(self)

    @property
    def is_at_last_request(self) -> bool:
        """Whether this request is the last that the connection may make."""
        return self._left <= 0

    def end_request(self) -> None:
        self._phase = "idle"
        self._since = self._limiter.now()

    def check(self, now: float) -> None:
        limits = self._limiter.limits
        if self._stalled_since:
            self._stalled_since, self._unsent = self._limiter.watch_reader(self, now, self._stalled_since, self._unsent)
        elif self._phase != "reading":
            self._limiter.deadline_ended(self)
        elif now - self._since > limits.header_timeout_s:
            self._limiter.close_late_headers(self)

    def close_if_quiet(self, now: float, quiet_s: float) -> None:
        if self._phase == "idle" and now - self._since >= quiet_s:
            self.force_close()

    async def serve(self, request: web.BaseRequest, handler: RequestServer) -> web.StreamResponse:
        """Run the handler in the client's next turn: handlers take long, and many connections may send requests at once."""
        self._body_bytes = 0
        await self._limiter.turns.wait(self.client)
        return await handler(request)

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        """Replace aiohttp's error pages with ours, such as the 404 it sends before the middleware sees the request."""
        if isinstance(resp, web.HTTPException):
            resp = self.handle_error(request, resp.status)
        finished = await super().finish_response(request, resp, start_time)
        if not request.content.is_eof():
            self._unwanted, self._unwanted_bytes = request.content, 0
        return finished

    def handle_error(
        self, request: web.BaseRequest, status: int = 500, exc: BaseException | None = None, message: str | None = None
    ) -> web.StreamResponse:
        """Answer an unparsable request, or a bug outside all handlers, with the API's error body."""
        if status >= 500:
            # A client that leaves in the middle of its request is not an error.
            if not isinstance(exc, ConnectionError):
                log.error("unhandled", exc_info=exc)
            reply = fault_reply(of_status(status, "internal error"), self._limiter.site)
        else:
            fault = _parse_fault(exc) if status == 400 else of_status(status, "the request is not valid HTTP")
            reply = fault_reply(fault, self._limiter.site)
        reply.headers.update(self._limiter.headers_for(self._address))
        # aiohttp treats a request that it could not parse as HTTP/1.0.
        reply_in_version(request, HttpVersion11)
        reply.force_close()
        return reply


def hand_over(
    front: LimitedConnection, limiter: ConnectionLimiter, transport: asyncio.Transport, address: str, data: bytes
) -> None:
    """Hand a connection over to aiohttp for good, and replay the bytes of its message."""
    # RFC 9112, 2.2: empty lines before a request are ignored.
    data = data.lstrip(b"\r\n")
    end = data.find(b"\r\n")
    if data and data.find(b" HTTP/", 0, len(data) if end < 0 else end) < 0:
        limiter.close_not_http(front)
        return
    assert limiter.server is not None
    handler = HandlerConnection(limiter, address, limiter.server)
    limiter.replace(front, handler)
    transport.set_protocol(SlicedReading(handler))
    handler.connection_made(transport)
    handler.data_received(data)


def _parse_fault(exc: BaseException | None) -> Fault:
    """The fault of an unparsable request. Its message does not repeat the client's bytes, as the parser's own does."""
    if isinstance(exc, LineTooLong) and exc.args[1] == MAX_TARGET_BYTES:
        return TargetTooLong(f"the request target is longer than {MAX_TARGET_BYTES} bytes")
    if isinstance(exc, LineTooLong):
        return HeadersTooLarge(f"a header is longer than {MAX_LINE_BYTES} bytes")
    if isinstance(exc, BadHttpMessage) and "Too many headers" in exc.message:
        return HeadersTooLarge(f"the request has more than {MAX_HEADERS} headers")
    return InvalidRequest("the request is not valid HTTP")
