"""The door: every client connection, its deadlines and its limits.

A connection is aiohttp's own handler with a clock. It is *idle* until a byte comes, then *reading* until the head is
complete, then *busy* until the reply is written. aiohttp bounds the time of none of these but idling: the door does, with
one sweep a second over the connections whose clock runs. It also counts connections per address, answers what cannot be
parsed with the contract's error body, and leads everybody out when the worker drains.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
from collections import Counter
from collections.abc import Sequence
from typing import Any, Literal

from aiohttp import http_parser, web

from proxy import telemetry
from proxy.errors import RateLimited, RequestTimeout, StartError, of_status
from proxy.settings import Server
from proxy.web.reply import fault_reply, raw_fault

log = logging.getLogger("penstock.front")

SWEEP_S = 0.5
# A drained connection that was quiet for this long has no request on its way.
QUIET_S = 1.0
# Headers in one request; with max_line_size this bounds what the parser holds for a head that never ends.
MAX_HEADERS = 100
MAX_LINE_BYTES = 8190

_LATE_HEAD = raw_fault(RequestTimeout("the request's head did not arrive in time"))
_CROWDED = raw_fault(RateLimited("too many connections from this address", retry_after_s=1))


def require_c_parser() -> None:
    """aiohttp's Python parser accepts more malformed requests than its C parser: never run on it."""
    if http_parser.HttpRequestParser is http_parser.HttpRequestParserPy:
        raise StartError(
            ["aiohttp: its C parser is missing (AIOHTTP_NO_EXTENSIONS is set, or the wheel is incomplete)"]
        )


class Connection(web.RequestHandler):
    """One client connection."""

    __slots__ = ("_address", "_door", "_phase", "_since", "_stalled_since")

    def __init__(self, door: Door, server: web.Server, **options: Any) -> None:
        super().__init__(server, **options)
        self._door = door
        self._address = ""
        self._phase: Literal["idle", "reading", "busy"] = "idle"
        self._since = 0.0
        self._stalled_since = 0.0

    def __repr__(self) -> str:
        return f"<Connection {self._phase}>"

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        peer = transport.get_extra_info("peername")
        self._address = peer[0] if isinstance(peer, tuple) else ""
        self._since = self._door.now()
        if not self._door.enter(self, self._address):
            self._end_with(_CROWDED)

    def connection_lost(self, exc: BaseException | None) -> None:
        self._door.leave(self, self._address)
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

    def begin_request(self) -> None:
        """The head is complete and its handler runs."""
        self._phase = "busy"
        self._door.timed.discard(self)

    def end_request(self) -> None:
        self._phase = "idle"
        self._since = self._door.now()

    def check(self, now: float, limits: Server) -> None:
        """Called by the sweep while a clock runs."""
        if self._stalled_since and now - self._stalled_since > limits.write_timeout_s:
            if self.transport is not None:
                self.transport.abort()
        elif self._phase == "reading" and now - self._since > limits.head_timeout_s:
            self._end_with(_LATE_HEAD)
        elif self._phase != "reading" and not self._stalled_since:
            self._door.timed.discard(self)

    def close_if_quiet(self, now: float) -> None:
        if self._phase == "idle" and now - self._since >= QUIET_S:
            self.force_close()

    def _end_with(self, reply: bytes) -> None:
        if self.transport is not None:
            self.transport.write(reply)
        self.force_close()

    def handle_error(
        self, request: web.BaseRequest, status: int = 500, exc: BaseException | None = None, message: str | None = None
    ) -> web.StreamResponse:
        """What aiohttp could not parse, or a bug above all handlers: the contract's body, never a page."""
        if status >= 500:
            log.error("unhandled", exc_info=exc)
            reply = fault_reply(of_status(status, "internal error"))
        else:
            reply = fault_reply(of_status(status, "the request is not valid HTTP"))
        reply.force_close()
        return reply


class Door:
    """All connections of one worker."""

    def __init__(self, settings: Server) -> None:
        self._settings = settings
        self._trusted = [ipaddress.ip_network(block) for block in settings.trusted_proxies]
        self._by_address: Counter[str] = Counter()
        self._connections: set[Connection] = set()
        self._server: web.Server | None = None
        self._loop = asyncio.get_running_loop()
        self.now = self._loop.time
        self.timed: set[Connection] = set()
        self.draining = False

    def __repr__(self) -> str:
        return f"<Door {len(self._connections)} connections{', draining' if self.draining else ''}>"

    def open(self, server: web.Server) -> None:
        self._server = server

    def __call__(self) -> Connection:
        """A protocol for a new connection: what `create_server` wants."""
        assert self._server is not None
        return Connection(
            self,
            self._server,
            loop=self._loop,
            keepalive_timeout=self._settings.keepalive_s,
            access_log=None,
            max_line_size=MAX_LINE_BYTES,
            max_field_size=MAX_LINE_BYTES,
            max_headers=MAX_HEADERS,
            auto_decompress=False,
        )

    def enter(self, connection: Connection, address: str) -> bool:
        self._connections.add(connection)
        self._by_address[address] += 1
        telemetry.connections_open.set(len(self._connections))
        if len(self._connections) > self._settings.max_connections:
            telemetry.connections_refused_total.labels("full").inc()
            return False
        if self._by_address[address] > self._settings.connections_per_address and not self.trusts(address):
            telemetry.connections_refused_total.labels("address").inc()
            return False
        return True

    def leave(self, connection: Connection, address: str) -> None:
        self.timed.discard(connection)
        if connection not in self._connections:
            return
        self._connections.discard(connection)
        self._by_address[address] -= 1
        if not self._by_address[address]:
            del self._by_address[address]
        telemetry.connections_open.set(len(self._connections))

    def trusts(self, address: str) -> bool:
        if not self._trusted:
            return False
        try:
            parsed = ipaddress.ip_address(address)
        except ValueError:
            return False
        return any(parsed in block for block in self._trusted)

    def client_address(self, peer: str, forwarded: Sequence[str]) -> str:
        """The right-most address that no trusted proxy has: what stands left of it anyone can write."""
        if not self.trusts(peer):
            return peer
        for hop in reversed([part.strip() for line in forwarded for part in line.split(",")]):
            if not self.trusts(hop):
                return hop
        return peer

    async def sweep(self) -> None:
        """A supervised loop."""
        while True:
            await asyncio.sleep(SWEEP_S)
            now = self.now()
            for connection in tuple(self.timed):
                connection.check(now, self._settings)

    async def drain(self, deadline_s: float) -> None:
        """Let what is in flight finish. Replies say `Connection: close`; whoever is quiet is shown out."""
        self.draining = True
        end = self.now() + deadline_s
        while self._connections and self.now() < end:
            now = self.now()
            for connection in tuple(self._connections):
                connection.close_if_quiet(now)
            await asyncio.sleep(0.05)
        for connection in tuple(self._connections):
            connection.force_close()
