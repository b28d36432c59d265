"""The client connections of a worker: how many there are, and how long each may take.

aiohttp limits only idle time, so the limiter adds deadlines for request headers, request bodies and unread replies; one sweep
checks the connections that have a deadline. The limiter also limits connections in total and per address, and closes all
connections on a drain. It uses every protocol of a connection through the interface `LimitedConnection`.
"""

from __future__ import annotations

import asyncio
import fcntl
import ipaddress
import re
import select
import sys
import termios
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Protocol

from aiohttp import web

from proxy import telemetry
from proxy.core.access import address_of, client_prefix_of
from proxy.errors import (
    Fault,
    InvalidRequest,
    RateLimited,
    RequestTimeout,
    Unavailable,
)
from proxy.memory_budget import BudgetLine
from proxy.settings import ServerSettings
from proxy.turn_queue import TurnQueue
from proxy.web.reply import fixed_headers, raw_fault
from proxy.web.request_ids import new_request_id

SWEEP_S = 0.5
# Connections that are checked in one loop turn: each takes a few microseconds, and a client may have thousands.
CHECKED_PER_TURN = 200
_FORWARDED = re.compile(rb"^X-Forwarded-For:([^\r\n]*)", re.IGNORECASE | re.MULTILINE)
# During a drain, a connection that was quiet for this long is closed: no request should be on its way.
QUIET_S = 1.0

_LATE_HEADERS = RequestTimeout("the request's headers did not arrive in time")
_TINY_CHUNKS = InvalidRequest("the chunks of the body are too small: send at least 20 bytes in each")
_NOT_HTTP = InvalidRequest("the request is not valid HTTP")
# Sent to refused connections, by the limit that was reached.
_REFUSALS = {
    "full": Unavailable("too many connections; try again shortly"),
    "address": RateLimited("too many connections from this address", retry_after_s=1),
}


class LimitedConnection(Protocol):
    """A connection as the limiter sees it."""

    @property
    def transport(self) -> asyncio.Transport | None: ...
    def check(self, now: float) -> None: ...
    def close_if_quiet(self, now: float, quiet_s: float) -> None: ...
    def force_close(self) -> None: ...


class ConnectionLimiter:
    """All connections of one worker."""

    def __init__(self, limits: ServerSettings, turns: TurnQueue, bodies: BudgetLine, *, site: str = "") -> None:
        """`bodies`: the memory for bodies that are still arriving. A body that arrives in one piece takes none. `site`: the
        public URL of this installation, if it is known, for links in errors."""
        self.site = site
        self.limits = limits
        self.turns = turns
        self._bodies = bodies
        self._fixed_headers = fixed_headers(limits.tls)
        self._trusted = [ipaddress.ip_network(block) for block in limits.trusted_proxies]
        self._by_prefix: Counter[str] = Counter()
        # In the order in which they came: a set's order would differ from run to run.
        self.connections: dict[LimitedConnection, None] = {}
        self.server: web.Server | None = None
        self._front: Callable[[], asyncio.Protocol] | None = None
        self._rate_headers: Callable[[str], Mapping[str, str]] | None = None
        self._loop = asyncio.get_running_loop()
        self.now = self._loop.time
        # Connections with a deadline that runs.
        self.timed: dict[LimitedConnection, None] = {}
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
        self.server = server
        self._front = front
        self._rate_headers = rate_headers

    def __call__(self) -> asyncio.Protocol:
        """The protocol factory for `create_server`."""
        assert self._front is not None
        return self._front()

    def add(self, connection: LimitedConnection, address: str) -> None:
        """Count a new connection, or refuse it."""
        self.connections[connection] = None
        prefix = client_prefix_of(address)
        self._by_prefix[prefix] += 1
        reason = None
        if len(self.connections) > self.limits.max_connections:
            reason = "full"
        elif self._by_prefix[prefix] > self.limits.connections_per_address and not self.trusts(address):
            reason = "address"
        if reason is not None:
            telemetry.connections_refused_total.labels(reason).inc()
            self._end_with(connection, _REFUSALS[reason])

    def deadline_runs(self, connection: LimitedConnection) -> None:
        """Have the sweep check the connection."""
        self.timed[connection] = None

    def deadline_ended(self, connection: LimitedConnection) -> None:
        self.timed.pop(connection, None)

    def remove(self, connection: LimitedConnection, address: str) -> None:
        self.deadline_ended(connection)
        if connection not in self.connections:
            return
        del self.connections[connection]
        prefix = client_prefix_of(address)
        self._by_prefix[prefix] -= 1
        if not self._by_prefix[prefix]:
            del self._by_prefix[prefix]

    def replace(self, old: LimitedConnection, new: LimitedConnection) -> None:
        """The same connection has another protocol object."""
        self.deadline_ended(old)
        self.connections.pop(old, None)
        self.connections[new] = None

    def watch_reader(
        self, connection: LimitedConnection, now: float, stalled_since: float, unsent: int
    ) -> tuple[float, int]:
        """Abort the connection of a client that reads its reply too slowly.

        `unsent` are the bytes that were unread at `stalled_since`, 0 before the first check. Returns both for the next check.
        They are reset when the client has read enough, and when more has been written.
        """
        if connection.transport is None:
            return stalled_since, unsent
        waiting, limits = _unread(connection.transport), self.limits
        if waiting > unsent or unsent - waiting > limits.min_read_rate * limits.write_timeout_s:
            return now, waiting
        if now - stalled_since > limits.write_timeout_s:
            connection.transport.abort()
        return stalled_since, unsent

    def take_body(self, client: str, size: int) -> Fault | None:
        """Take room for a body that arrives in parts, or for more of it. Returns the refusal if there is none."""
        client = client_prefix_of(client)
        if self._bodies.take(client, size):
            return None
        if self._bodies.holds(client):
            return RateLimited("too many large request bodies at a time: send fewer at once", retry_after_s=1)
        return Unavailable("too many request bodies are arriving; try again shortly")

    def give_back_body(self, client: str, size: int) -> None:
        self._bodies.give_back(client_prefix_of(client), size)

    def close_late_headers(self, connection: LimitedConnection) -> None:
        self._end_with(connection, _LATE_HEADERS)

    def close_tiny_chunks(self, connection: LimitedConnection) -> None:
        self._end_with(connection, _TINY_CHUNKS)

    def close_not_http(self, connection: LimitedConnection) -> None:
        """Refuse a request line without a version, which aiohttp would serve as HTTP/0.9."""
        self._end_with(connection, _NOT_HTTP)

    def _end_with(self, connection: LimitedConnection, fault: Fault) -> None:
        if connection.transport is not None:
            peer = connection.transport.get_extra_info("peername")
            connection.transport.write(raw_fault(fault, self.site, self.headers_for(peer[0] if peer else "")))
        connection.force_close()

    def headers_for(self, address: str) -> dict[str, str]:
        """The common headers of a reply to a request that cannot be read."""
        assert self._rate_headers is not None
        return {**self._fixed_headers, "X-Request-Id": new_request_id(), **self._rate_headers(address)}

    def trusts(self, address: str) -> bool:
        if not self._trusted:
            return False
        parsed = address_of(address)
        return parsed is not None and any(parsed in block for block in self._trusted)

    def client_of_headers(self, peer: str, data: bytes) -> str:
        """The address that a trusted proxy forwards in these unparsed headers. Empty if the peer is not trusted."""
        if not self.trusts(peer):
            return ""
        headers = data.partition(b"\r\n\r\n")[0]
        return self.client_address(peer, [line.decode("latin-1") for line in _FORWARDED.findall(headers)])

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
            await self._check(now)
            if now >= idle_check_at:
                idle_check_at = now + min(5.0, self.limits.keepalive_s / 4)
                await self._close_quiet(now)
                telemetry.connections_open.set(len(self.connections))

    # Separate from the loop above, whose variables would keep the last connection in memory.

    async def _check(self, now: float) -> None:
        async for connection in _in_turns(self.timed):
            connection.check(now)

    async def _close_quiet(self, now: float) -> None:
        async for connection in _in_turns(self.connections):
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


async def _in_turns(connections: dict[LimitedConnection, None]) -> AsyncIterator[LimitedConnection]:
    """Each of the connections, a few in a turn of the event loop. Those that are removed meanwhile are left out."""
    for index, connection in enumerate(tuple(connections), 1):
        if connection in connections:
            yield connection
        if index % CHECKED_PER_TURN == 0:
            await asyncio.sleep(0)


def _unread(transport: asyncio.Transport) -> int:
    """Bytes that the client has not acknowledged: in our buffer and in the kernel's, which can hold megabytes."""
    queued = fcntl.ioctl(transport.get_extra_info("socket").fileno(), termios.TIOCOUTQ, bytes(4))
    return transport.get_write_buffer_size() + int.from_bytes(queued, sys.byteorder)


# Linux reports that a client has closed its side, even if bytes before that are unread. Other systems report only a reset.
_LEAVING = getattr(select, "POLLRDHUP", 0)


def has_left(transport: asyncio.Transport) -> bool:
    """Whether the client has closed the connection, or its side of it. A transport does not notice this while it is paused."""
    poll = select.poll()
    poll.register(transport.get_extra_info("socket").fileno(), _LEAVING)
    return bool(poll.poll(0))
