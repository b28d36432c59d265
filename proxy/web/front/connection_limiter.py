"""The client connections of a worker: how many there are, and how long each may take.

A connection starts as a `FrontConnection` (the hot path). It becomes a `HandlerConnection`, aiohttp's own handler with
deadlines, when it sends any other request. aiohttp limits only idle time, so the limiter adds deadlines for request heads,
request bodies and unread replies; one sweep checks the connections that have one running. The limiter also caps connections
in total and per address, answers unparsable requests with the API's error body, and closes all connections on a drain.
"""

from __future__ import annotations

import asyncio
import fcntl
import ipaddress
import logging
import sys
import termios
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Literal, Protocol

from aiohttp import HttpVersion11, StreamReader, http_parser, web, web_protocol
from aiohttp.http_exceptions import BadHttpMessage, LineTooLong

from proxy import telemetry
from proxy.core.access import address_of, place_of
from proxy.errors import (
    Fault,
    HeadTooLarge,
    InvalidRequest,
    RateLimited,
    RequestTimeout,
    StartError,
    TargetTooLong,
    Unavailable,
    of_status,
)
from proxy.settings import ServerSettings
from proxy.web.front.turn_queue import TurnQueue
from proxy.web.reply import SERVER, fault_reply, raw_fault
from proxy.web.request_ids import new_request_id

log = logging.getLogger("penstock.front")

# aiohttp's parser stops after each request until that one is taken up. If it read on, an error in what follows would replace
# the requests that it has read.
web_protocol.MAX_MSG_QUEUE_SIZE = 1

SWEEP_S = 0.5
# During a drain, a connection that was quiet for this long has no request on its way.
QUIET_S = 1.0
# Headers in one request. With MAX_LINE_BYTES this bounds the parser's memory for a head that never ends.
MAX_HEADERS = 100
MAX_LINE_BYTES = 8190
# RFC 9112, 3: request lines of at least 8000 bytes should be supported. Its own figure, which tells its error from a line's.
MAX_TARGET_BYTES = 8000
# Bytes of one connection that aiohttp parses in one step, and the line ends in them. A chunk has two, and costs up to 5 µs.
PARSE_BYTES = 8192
PARSE_LINES = 50
# Bytes of a body that no handler has read, after its reply. Up to that they are skipped, so that the connection can be kept.
MAX_UNWANTED_BYTES = 16_384
# Bytes around the chunks of a body, besides a quarter of the body itself. Many tiny chunks cost far more time than their bytes.
MAX_CHUNK_OVERHEAD = 16_384

_LATE_HEAD = RequestTimeout("the request's head did not arrive in time")
_TINY_CHUNKS = InvalidRequest("the chunks of the body are too small: send at least 20 bytes in each")
_NOT_HTTP = InvalidRequest("the request is not valid HTTP")
# Sent to refused connections, by the limit that was reached.
_REFUSALS = {
    "full": Unavailable("too many connections; try again shortly"),
    "address": RateLimited("too many connections from this address", retry_after_s=1),
}


def require_c_parser() -> None:
    """Refuse to start on aiohttp's Python parser, which accepts more malformed requests than its C parser."""
    if http_parser.HttpRequestParser is http_parser.HttpRequestParserPy:
        raise StartError(["aiohttp has no C parser: unset AIOHTTP_NO_EXTENSIONS, or install a wheel with extensions"])


class LimitedConnection(Protocol):
    """A connection as the limiter sees it."""

    @property
    def transport(self) -> asyncio.Transport | None: ...
    def check(self, now: float) -> None: ...
    def close_if_quiet(self, now: float, quiet_s: float) -> None: ...
    def force_close(self) -> None: ...


class HandlerConnection(web.RequestHandler):
    """A connection served by aiohttp: *idle* until a byte comes, *reading* until the head is complete, then *busy*."""

    __slots__ = (
        "_address", "_body_bytes", "_left", "_limiter", "_parsed", "_parses_soon", "_phase", "_since", "_stalled_since",
        "_unparsed", "_unsent", "_unwanted", "_unwanted_bytes", "client", "on_lost",
    )  # fmt: skip

    def __init__(self, limiter: ConnectionLimiter, address: str, server: web.Server, **options: Any) -> None:
        super().__init__(server, **options)
        self._limiter = limiter
        self._address = address
        # The account of its last request, or its address: connections of one client share a place in the queue for turns.
        self.client = address
        self._phase: Literal["idle", "reading", "busy"] = "idle"
        self._left = limiter.limits.keepalive_requests
        self._since = limiter.now()
        self._stalled_since = 0.0
        self._unsent = 0
        # Received, and left for later turns of the loop from `_parsed` on.
        self._unparsed = b""
        self._parsed = 0
        self._parses_soon = False
        # Bytes since the head of the request that is being served.
        self._body_bytes = 0
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
        if self._messages and self._current_request is None and self._task_handler is not None:
            # A request was parsed in this turn. aiohttp would serve it with what `connection_lost` takes away.
            self._task_handler.cancel()
        super().connection_lost(exc)

    async def start(self) -> None:
        """Do nothing if the client has left before this task's first turn: aiohttp asserts that it has not."""
        if self._manager is not None:
            await super().start()

    def data_received(self, data: bytes) -> None:
        """Parse what came, a share in each turn. Empty data is aiohttp's own call, to parse what its parser holds."""
        if not data:
            super().data_received(data)
            return
        if self._phase == "idle":
            self._phase = "reading"
            self._since = self._limiter.now()
            self._limiter.timed.add(self)
        self._unparsed = self._bytes_left() + data
        self._parsed = 0
        if len(self._unparsed) > PARSE_BYTES:
            self._pause_transport_reading()
        self._parse_soon()

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
        if not self._unparsed or self._is_held() or self.transport is None:
            return False
        data = self._next_share()
        self._parsed += len(data)
        if self._parsed == len(self._unparsed):
            self._drop_unparsed()
        self._parse(data)
        if not self._is_held():
            self._resume_transport_reading()
        return True

    def _next_share(self) -> bytes:
        size = PARSE_BYTES
        while size > PARSE_LINES and self._unparsed.count(b"\n", self._parsed, self._parsed + size) > PARSE_LINES:
            size //= 2
        return self._unparsed[self._parsed : self._parsed + size]

    def _is_held(self) -> bool:
        """Whether aiohttp wants no more bytes at the moment."""
        return self._reading_paused or self._buffer_paused

    def _parse(self, data: bytes) -> None:
        if self._unwanted is not None:
            self._unwanted_bytes += len(data)
            if self._unwanted.is_eof():
                self._unwanted = None
            elif self._unwanted_bytes > MAX_UNWANTED_BYTES:
                # aiohttp reads the body up to its end, or up to a timeout.
                self._stop_reading(self._unwanted, TimeoutError())
                self.force_close()
                return
        super().data_received(data)
        self._body_bytes += len(data)
        request = self._current_request
        if request is not None and self._has_tiny_chunks(request.content):
            self._stop_reading(request.content, ConnectionResetError("the chunks of the body are too small"))
            self._limiter.close_tiny_chunks(self)

    def _has_tiny_chunks(self, body: StreamReader) -> bool:
        size = body.total_bytes
        return not body.is_eof() and self._body_bytes > size + size // 4 + MAX_CHUNK_OVERHEAD

    def _stop_reading(self, body: StreamReader, reason: Exception) -> None:
        """End the body for its reader, who would take the closed connection for a bug."""
        self._drop_unparsed()
        body.set_exception(reason)

    def _resume_transport_reading(self) -> None:
        """Called by aiohttp too, when a body has been read: first comes what was left for later."""
        if self._unparsed:
            self._parse_soon()
        else:
            super()._resume_transport_reading()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stalled_since = self._limiter.now()
        self._unsent = 0
        self._limiter.timed.add(self)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stalled_since = 0.0

    def release(self) -> tuple[asyncio.Transport | None, str, bytes]:
        """Detach the connection from aiohttp: its transport, its address, and the bytes behind the request.

        aiohttp sees a client that has left. The transport is None if the client really has.
        """
        transport, ahead = self.transport, self._message_tail + self._bytes_left()
        if self._unparsed:
            self._drop_unparsed()
            self._resume_transport_reading()
        self.transport = None
        if transport is not None:
            web.RequestHandler.connection_lost(self, None)
        return transport, self._address, ahead

    def begin_request(self) -> None:
        """Called when the head is complete, before its handler runs."""
        self._phase = "busy"
        self._left -= 1
        self._limiter.timed.discard(self)

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
            self._limiter.timed.discard(self)
        elif now - self._since > limits.head_timeout_s:
            self._limiter.close_late_head(self)

    def close_if_quiet(self, now: float, quiet_s: float) -> None:
        if self._phase == "idle" and now - self._since >= quiet_s:
            self.force_close()

    async def _handle_request(
        self,
        request: web.BaseRequest,
        start_time: float | None,
        request_handler: Callable[[web.BaseRequest], Awaitable[web.StreamResponse]],
    ) -> tuple[web.StreamResponse, bool]:
        """Start handlers in turn: none is short, and many connections may send their requests at the same moment."""

        async def handle(request: web.BaseRequest) -> web.StreamResponse:
            await self._limiter.turns.wait(self.client)
            return await request_handler(request)

        self._body_bytes = 0
        return await super()._handle_request(request, start_time, handle)

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        """Replace aiohttp's error pages with ours, such as the 404 it sends before the gate sees the request."""
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
            reply = fault_reply(of_status(status, "internal error"))
        else:
            reply = fault_reply(
                _parse_fault(exc) if status == 400 else of_status(status, "the request is not valid HTTP")
            )
        reply.headers.update(self._limiter.headers_for(self._address))
        # aiohttp takes a request that it could not parse for one of HTTP/1.0.
        request._version = HttpVersion11
        reply.force_close()
        return reply


class ConnectionLimiter:
    """All connections of one worker."""

    def __init__(self, limits: ServerSettings) -> None:
        self.limits = limits
        self._trusted = [ipaddress.ip_network(block) for block in limits.trusted_proxies]
        self._by_place: Counter[str] = Counter()
        self.connections: set[LimitedConnection] = set()
        self._server: web.Server | None = None
        self._front: Callable[[], asyncio.Protocol] | None = None
        self._rate_headers: Callable[[str], Mapping[str, str]] | None = None
        self._loop = asyncio.get_running_loop()
        self.now = self._loop.time
        self.turns = TurnQueue(self._loop)
        self.timed: set[LimitedConnection] = set()
        self.draining = False

    def __repr__(self) -> str:
        return f"<ConnectionLimiter {len(self.connections)} connections{', draining' if self.draining else ''}>"

    def open(
        self,
        server: web.Server,
        front: Callable[[], asyncio.Protocol],
        rate_headers: Callable[[str], Mapping[str, str]],
    ) -> None:
        """`rate_headers`: those of a client's address, for replies to requests that cannot be read."""
        self._server = server
        self._front = front
        self._rate_headers = rate_headers

    def __call__(self) -> asyncio.Protocol:
        """A protocol for a new connection: what `create_server` wants."""
        assert self._front is not None
        return self._front()

    def add(self, connection: LimitedConnection, address: str) -> None:
        """Count a new connection, or refuse it."""
        self.connections.add(connection)
        place = place_of(address)
        self._by_place[place] += 1
        reason = None
        if len(self.connections) > self.limits.max_connections:
            reason = "full"
        elif self._by_place[place] > self.limits.connections_per_address and not self.trusts(address):
            reason = "address"
        if reason is not None:
            telemetry.connections_refused_total.labels(reason).inc()
            self._end_with(connection, _REFUSALS[reason])

    def remove(self, connection: LimitedConnection, address: str) -> None:
        self.timed.discard(connection)
        if connection not in self.connections:
            return
        self.connections.discard(connection)
        place = place_of(address)
        self._by_place[place] -= 1
        if not self._by_place[place]:
            del self._by_place[place]

    def hand_over(self, front: LimitedConnection, transport: asyncio.Transport, address: str, data: bytes) -> None:
        """Give a connection to aiohttp for good, and replay the bytes of its message."""
        assert self._server is not None
        self.timed.discard(front)
        self.connections.discard(front)
        handler = HandlerConnection(
            self,
            address,
            self._server,
            loop=self._loop,
            keepalive_timeout=self.limits.keepalive_s,
            access_log=None,
            max_line_size=MAX_TARGET_BYTES,
            max_field_size=MAX_LINE_BYTES,
            max_headers=MAX_HEADERS,
            auto_decompress=False,
        )
        self.connections.add(handler)
        transport.set_protocol(handler)
        handler.connection_made(transport)
        handler.data_received(data)

    def replace(self, old: LimitedConnection, new: LimitedConnection) -> None:
        """The same connection has another protocol object."""
        self.timed.discard(old)
        self.connections.discard(old)
        self.connections.add(new)

    def watch_reader(
        self, connection: LimitedConnection, now: float, stalled_since: float, unsent: int
    ) -> tuple[float, int]:
        """Abort the connection of a client that reads its reply too slowly.

        `unsent` are the bytes that were unread at `stalled_since`, 0 before the first check. Returns both again. They start
        again when the client has read enough, and when more has been written.
        """
        if connection.transport is None:
            return stalled_since, unsent
        waiting, limits = _unread(connection.transport), self.limits
        if waiting > unsent or unsent - waiting > limits.min_read_rate * limits.write_timeout_s:
            return now, waiting
        if now - stalled_since > limits.write_timeout_s:
            connection.transport.abort()
        return stalled_since, unsent

    def close_late_head(self, connection: LimitedConnection) -> None:
        self._end_with(connection, _LATE_HEAD)

    def close_tiny_chunks(self, connection: LimitedConnection) -> None:
        self._end_with(connection, _TINY_CHUNKS)

    def close_not_http(self, connection: LimitedConnection) -> None:
        """Refuse a request line without a version, which aiohttp would serve as HTTP/0.9."""
        self._end_with(connection, _NOT_HTTP)

    def _end_with(self, connection: LimitedConnection, fault: Fault) -> None:
        if connection.transport is not None:
            peer = connection.transport.get_extra_info("peername")
            connection.transport.write(raw_fault(fault, self.headers_for(peer[0] if peer else "")))
        connection.force_close()

    def headers_for(self, address: str) -> dict[str, str]:
        """The common headers of a reply to a request that cannot be read."""
        assert self._rate_headers is not None
        return {"Server": SERVER, "X-Request-Id": new_request_id(), **self._rate_headers(address)}

    def trusts(self, address: str) -> bool:
        if not self._trusted:
            return False
        found = address_of(address)
        return found is not None and any(found in block for block in self._trusted)

    def client_address(self, peer: str, forwarded: Sequence[str]) -> str:
        """The right-most forwarded address that is not a trusted proxy. Clients can forge those left of it."""
        if not self.trusts(peer):
            return peer
        for hop in reversed([part.strip() for line in forwarded for part in line.split(",")]):
            if not self.trusts(hop):
                return hop
        return peer

    async def sweep(self) -> None:
        """A supervised loop: check the deadlines that run, and now and then all connections for idleness."""
        idle_check_at = 0.0
        while True:
            await asyncio.sleep(SWEEP_S)
            now = self.now()
            for connection in tuple(self.timed):
                connection.check(now)
            if now >= idle_check_at:
                idle_check_at = now + min(5.0, self.limits.keepalive_s / 4)
                self._close_idle(now)
                telemetry.connections_open.set(len(self.connections))

    def _close_idle(self, now: float) -> None:
        for connection in tuple(self.connections):
            connection.close_if_quiet(now, self.limits.keepalive_s)

    async def drain(self, deadline_s: float) -> None:
        """Let requests in flight finish, with `Connection: close` in their replies; close quiet connections."""
        self.draining = True
        end = self.now() + deadline_s
        while self.connections and self.now() < end:
            now = self.now()
            for connection in tuple(self.connections):
                connection.close_if_quiet(now, QUIET_S)
            await asyncio.sleep(0.05)
        for connection in tuple(self.connections):
            connection.force_close()


def _parse_fault(exc: BaseException | None) -> Fault:
    """The fault of an unparsable request. Its message does not repeat the client's bytes, as the parser's own does."""
    if isinstance(exc, LineTooLong) and exc.args[1] == MAX_TARGET_BYTES:
        return TargetTooLong(f"the request target is longer than {MAX_TARGET_BYTES} bytes")
    if isinstance(exc, LineTooLong):
        return HeadTooLarge(f"a header is longer than {MAX_LINE_BYTES} bytes")
    if isinstance(exc, BadHttpMessage) and "Too many headers" in exc.message:
        return HeadTooLarge(f"the request has more than {MAX_HEADERS} headers")
    return InvalidRequest("the request is not valid HTTP")


def _unread(transport: asyncio.Transport) -> int:
    """Bytes that the client has not acknowledged: in our buffer and in the kernel's, which can hold megabytes."""
    queued = fcntl.ioctl(transport.get_extra_info("socket").fileno(), termios.TIOCOUTQ, bytes(4))
    return transport.get_write_buffer_size() + int.from_bytes(queued, sys.byteorder)
