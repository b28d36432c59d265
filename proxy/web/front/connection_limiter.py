"""The door: every client connection, its deadlines and its limits.

A connection comes in as a `Front` (the hot path) and becomes a `Visitor`, which is aiohttp's own handler with a clock, when
it asks for anything else. aiohttp bounds no time but idling: the door bounds the head, the body and the taking of replies,
with one sweep over the connections whose clock runs. It also counts connections per address, answers what cannot be parsed
with the contract's error body, and leads everybody out when the worker drains.
"""

from __future__ import annotations

import asyncio
import fcntl
import ipaddress
import logging
import sys
import termios
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol

from aiohttp import http_parser, web
from aiohttp.http_exceptions import LineTooLong

from proxy import telemetry
from proxy.core.access import address_of
from proxy.errors import InvalidRequest, RateLimited, RequestTimeout, StartError, Unavailable, of_status
from proxy.settings import ServerSettings
from proxy.web.reply import fault_reply, raw_fault

log = logging.getLogger("penstock.front")

SWEEP_S = 0.5
# A drained connection that was quiet for this long has no request on its way.
QUIET_S = 1.0
# Headers in one request; with MAX_LINE_BYTES this bounds what the parser holds for a head that never ends.
MAX_HEADERS = 100
MAX_LINE_BYTES = 8190

_LATE_HEAD = raw_fault(RequestTimeout("the request's head did not arrive in time"))
_NOT_HTTP = raw_fault(InvalidRequest("the request is not valid HTTP"))
# To whoever is turned away: by whose doing there is no room.
_NO_ROOM = {
    "full": raw_fault(Unavailable("too many connections; try again shortly")),
    "address": raw_fault(RateLimited("too many connections from this address", retry_after_s=1)),
}


def require_c_parser() -> None:
    """aiohttp's Python parser accepts more malformed requests than its C parser: never run on it."""
    if http_parser.HttpRequestParser is http_parser.HttpRequestParserPy:
        raise StartError(
            ["aiohttp: its C parser is missing (AIOHTTP_NO_EXTENSIONS is set, or the wheel is incomplete)"]
        )


class LimitedConnection(Protocol):
    """A connection as the door sees it."""

    transport: asyncio.Transport | None

    def check(self, now: float) -> None: ...
    def close_if_quiet(self, now: float, quiet_s: float) -> None: ...
    def force_close(self) -> None: ...


class HandlerConnection(web.RequestHandler):
    """One connection in aiohttp's hands: *idle* until a byte comes, *reading* until the head is complete, then *busy*."""

    __slots__ = ("_address", "_door", "_left", "_phase", "_since", "_stalled_since", "_unsent", "on_lost")

    def __init__(self, door: ConnectionLimiter, address: str, server: web.Server, **options: Any) -> None:
        super().__init__(server, **options)
        self._door = door
        self._address = address
        self._phase: Literal["idle", "reading", "busy"] = "idle"
        self._left = door.limits.keepalive_requests
        self._since = door.now()
        self._stalled_since = 0.0
        self._unsent = 0
        # aiohttp lets a handler run on when its client has left; one that must know sets this.
        self.on_lost: Callable[[], object] | None = None

    def __repr__(self) -> str:
        return f"<HandlerConnection {self._phase}>"

    def connection_lost(self, exc: BaseException | None) -> None:
        self._door.leave(self, self._address)
        if self.on_lost is not None:
            self.on_lost()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._phase == "idle":
            self._phase = "reading"
            self._since = self._door.now()
            self._door.timed.add(self)
        super().data_received(data)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stalled_since = self._door.now()
        self._door.timed.add(self)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stalled_since = 0.0

    def release(self) -> tuple[asyncio.Transport | None, str, bytes]:
        """The connection is no longer HTTP's: its transport, its address, and what came behind the request.

        To aiohttp it looks as if the client had left; no transport where it really has.
        """
        transport, ahead = self.transport, self._message_tail
        self.transport = None
        if transport is not None:
            web.RequestHandler.connection_lost(self, None)
        return transport, self._address, ahead

    def begin_request(self) -> None:
        """The head is complete and its handler runs."""
        self._phase = "busy"
        self._left -= 1
        self._door.timed.discard(self)

    @property
    def has_had_its_share(self) -> bool:
        """Whether its request is the last that the connection may make."""
        return self._left <= 0

    def end_request(self) -> None:
        self._phase = "idle"
        self._since = self._door.now()

    def check(self, now: float) -> None:
        limits = self._door.limits
        if self._stalled_since:
            self._stalled_since, self._unsent = self._door.watch_reader(self, now, self._stalled_since, self._unsent)
        elif self._phase != "reading":
            self._door.timed.discard(self)
        elif now - self._since > limits.head_timeout_s:
            self._door.show_out(self)

    def close_if_quiet(self, now: float, quiet_s: float) -> None:
        if self._phase == "idle" and now - self._since >= quiet_s:
            self.force_close()

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        """What aiohttp itself refuses before the gate sees it, such as an expectation on a path that nobody serves."""
        if isinstance(resp, web.HTTPException):
            resp = self.handle_error(request, resp.status)
        return await super().finish_response(request, resp, start_time)

    def handle_error(
        self, request: web.BaseRequest, status: int = 500, exc: BaseException | None = None, message: str | None = None
    ) -> web.StreamResponse:
        """What aiohttp could not parse, or a bug above all handlers: the contract's body, never a page."""
        if status >= 500:
            # A client that leaves in the middle of its request is nobody's error.
            if not isinstance(exc, ConnectionError):
                log.error("unhandled", exc_info=exc)
            reply = fault_reply(of_status(status, "internal error"))
        else:
            reply = fault_reply(of_status(status, _words_of(exc)))
        reply.force_close()
        return reply


class ConnectionLimiter:
    """All connections of one worker."""

    def __init__(self, limits: ServerSettings) -> None:
        self.limits = limits
        self._trusted = [ipaddress.ip_network(block) for block in limits.trusted_proxies]
        self._by_address: Counter[str] = Counter()
        self.guests: set[LimitedConnection] = set()
        self._server: web.Server | None = None
        self._front: Callable[[], asyncio.Protocol] | None = None
        self._loop = asyncio.get_running_loop()
        self.now = self._loop.time
        self.timed: set[LimitedConnection] = set()
        self.draining = False

    def __repr__(self) -> str:
        return f"<ConnectionLimiter {len(self.guests)} connections{', draining' if self.draining else ''}>"

    def open(self, server: web.Server, front: Callable[[], asyncio.Protocol]) -> None:
        self._server = server
        self._front = front

    def __call__(self) -> asyncio.Protocol:
        """A protocol for a new connection: what `create_server` wants."""
        assert self._front is not None
        return self._front()

    def enter(self, guest: LimitedConnection, address: str) -> None:
        """Count a new connection in, or turn it away."""
        self.guests.add(guest)
        self._by_address[address] += 1
        reason = None
        if len(self.guests) > self.limits.max_connections:
            reason = "full"
        elif self._by_address[address] > self.limits.connections_per_address and not self.trusts(address):
            reason = "address"
        if reason is not None:
            telemetry.connections_refused_total.labels(reason).inc()
            self._end_with(guest, _NO_ROOM[reason])

    def leave(self, guest: LimitedConnection, address: str) -> None:
        self.timed.discard(guest)
        if guest not in self.guests:
            return
        self.guests.discard(guest)
        self._by_address[address] -= 1
        if not self._by_address[address]:
            del self._by_address[address]

    def hand_over(self, front: LimitedConnection, transport: asyncio.Transport, address: str, data: bytes) -> None:
        """The connection is aiohttp's from here on; the bytes of its message are replayed."""
        assert self._server is not None
        self.timed.discard(front)
        self.guests.discard(front)
        visitor = HandlerConnection(
            self,
            address,
            self._server,
            loop=self._loop,
            keepalive_timeout=self.limits.keepalive_s,
            access_log=None,
            max_line_size=MAX_LINE_BYTES,
            max_field_size=MAX_LINE_BYTES,
            max_headers=MAX_HEADERS,
            auto_decompress=False,
        )
        self.guests.add(visitor)
        transport.set_protocol(visitor)
        visitor.connection_made(transport)
        visitor.data_received(data)

    def take_over(self, visitor: LimitedConnection, guest: LimitedConnection) -> None:
        """The same connection, in other hands."""
        self.timed.discard(visitor)
        self.guests.discard(visitor)
        self.guests.add(guest)

    def watch_reader(
        self, guest: LimitedConnection, now: float, stalled_since: float, unsent: int
    ) -> tuple[float, int]:
        """A client that takes some of its reply, however slowly, goes on; one that takes none for too long is dropped."""
        if guest.transport is None:
            return stalled_since, unsent
        waiting = _untaken(guest.transport)
        if waiting != unsent:
            return now, waiting
        if now - stalled_since > self.limits.write_timeout_s:
            guest.transport.abort()
        return stalled_since, unsent

    def show_out(self, guest: LimitedConnection) -> None:
        """Too slow."""
        self._end_with(guest, _LATE_HEAD)

    def turn_away(self, guest: LimitedConnection) -> None:
        """A request line without a version: aiohttp would take it for HTTP/0.9 and answer in kind."""
        self._end_with(guest, _NOT_HTTP)

    def _end_with(self, guest: LimitedConnection, reply: bytes) -> None:
        if guest.transport is not None:
            guest.transport.write(reply)
        guest.force_close()

    def trusts(self, address: str) -> bool:
        if not self._trusted:
            return False
        found = address_of(address)
        return found is not None and any(found in block for block in self._trusted)

    def client_address(self, peer: str, forwarded: Sequence[str]) -> str:
        """The right-most address that no trusted proxy has: what stands left of it anyone can write."""
        if not self.trusts(peer):
            return peer
        for hop in reversed([part.strip() for line in forwarded for part in line.split(",")]):
            if not self.trusts(hop):
                return hop
        return peer

    async def sweep(self) -> None:
        """A supervised loop: deadlines of the few whose clock runs, idleness of all."""
        idle_check_at = 0.0
        while True:
            await asyncio.sleep(SWEEP_S)
            now = self.now()
            for guest in tuple(self.timed):
                guest.check(now)
            if now >= idle_check_at:
                idle_check_at = now + min(5.0, self.limits.keepalive_s / 4)
                self._close_idle(now)
                telemetry.connections_open.set(len(self.guests))

    def _close_idle(self, now: float) -> None:
        for guest in tuple(self.guests):
            guest.close_if_quiet(now, self.limits.keepalive_s)

    async def drain(self, deadline_s: float) -> None:
        """Let what is in flight finish. Replies say `Connection: close`; whoever is quiet is shown out."""
        self.draining = True
        end = self.now() + deadline_s
        while self.guests and self.now() < end:
            now = self.now()
            for guest in tuple(self.guests):
                guest.close_if_quiet(now, QUIET_S)
            await asyncio.sleep(0.05)
        for guest in tuple(self.guests):
            guest.force_close()


def _words_of(exc: BaseException | None) -> str:
    """The parser's own words repeat what it was given."""
    if isinstance(exc, LineTooLong):
        return f"a line of the request's head is longer than {MAX_LINE_BYTES} bytes"
    return "the request is not valid HTTP"


def _untaken(transport: asyncio.Transport) -> int:
    """Bytes that the client has not taken: ours, and those in the kernel, which holds megabytes before it asks for more."""
    asked = fcntl.ioctl(transport.get_extra_info("socket").fileno(), termios.TIOCOUTQ, bytes(4))
    return transport.get_write_buffer_size() + int.from_bytes(asked, sys.byteorder)
