"""Connections to webhook receivers on bare transports: one POST at a time on each, kept open for a moment.

At thousands of deliveries per second, this costs a third of what aiohttp's client costs. The guard's rules are the same: its
resolver looks up names, and it opens each socket for the address that the kernel will get.

The outcome is known once the headers arrive. The headers and the beginning of the body are kept for the webhook's owner; for a
success, only the part of the body that arrives with the headers. The rest is read and dropped, so that the connection can be
reused. A connection whose reply takes too long, or exceeds the limit, is closed. Accounts with the same receiver do not share
connections: bytes that follow the reply to one could be read as the reply to the other.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
import time
from contextlib import suppress
from ipaddress import ip_address

import aiohappyeyeballs
from yarl import URL

from proxy.tasks import client_of_task
from proxy.wire.http1 import CHUNKED, MAX_HEADER_BYTES, UNTIL_CLOSE, BadReply, Chunks, ReplyHeaders, read_known_headers
from proxy.wire.outbound_guard import GuardedResolver, OutboundGuard

# A longer reply is not read to its end: its connection is closed.
MAX_REPLY = 64 * 1024
# Bytes of a body that are kept, and how long a body may take after the headers.
SHOWN = 4096
BODY_S = 1.0
# Many servers close idle connections after 2 s or 5 s: this side closes them first.
KEEPALIVE_S = 1.5
# After this time without a connection, the next address of a name is tried as well (RFC 8305, 5).
STAGGER_S = 0.25
# Characters of a Retry-After header that are kept. A date is shorter.
LONGEST_RETRY_AFTER = 64

# Scheme, host and port.
Origin = tuple[str, str, int]


class ConnectionBroken(ConnectionError):
    """The connection was lost. `unused`: before any part of a reply arrived."""

    def __init__(self, *, unused: bool) -> None:
        super().__init__("the connection was lost")
        self.unused = unused


class ReceiverReply:
    """The parts of a reply that are used."""

    __slots__ = ("body", "headers", "retry_after", "status")

    def __init__(self, status: int, body: bytes, retry_after: str, *, headers: bytes) -> None:
        self.status = status
        self.body = body
        self.retry_after = retry_after
        # As received.
        self.headers = headers


class ReceiverConnection(asyncio.Protocol):
    """One connection. `post` may be called while it is idle; it reports `on_idle` when it is idle again."""

    def __init__(self, pool: ReceiverConnections, origin: Origin, client: str) -> None:
        self._pool = pool
        self.origin = origin
        # The account that it serves, and only this one.
        self.client = client
        self.idle_since = 0.0
        self.is_used = False
        self.is_open = False
        self._transport: asyncio.Transport | None = None
        self._waiter: asyncio.Future[ReceiverReply] | None = None
        # The deadlines of the reply and of its body.
        self._deadline: asyncio.TimerHandle | None = None
        self._body_deadline: asyncio.TimerHandle | None = None
        self._raw = b""
        self._headers: ReplyHeaders | None = None
        self._header_bytes = b""
        self._chunks: Chunks | None = None
        self._body = bytearray()
        self._read = 0

    def __repr__(self) -> str:
        state = "closed" if not self.is_open else "busy" if self._waiter or self._headers else "idle"
        return f"<ReceiverConnection to {self.origin[1]}:{self.origin[2]} {state}>"

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]
        self.is_open = True

    def post(self, request: bytes, within_s: float) -> asyncio.Future[ReceiverReply]:
        """The reply. Raises TimeoutError after this time."""
        assert self._transport is not None
        loop = asyncio.get_running_loop()
        self._waiter = loop.create_future()
        self._deadline = loop.call_later(within_s, self._fail, TimeoutError())
        self._transport.write(request)
        return self._waiter

    def data_received(self, data: bytes) -> None:
        try:
            if self._headers is None:
                data = self._take_headers(data)
            if self._headers is not None:
                self._take_body(data)
                self._resolve_success()
        except BadReply as exc:
            self._fail(exc)

    def _take_headers(self, data: bytes) -> bytes:
        """Collect the headers. Returns the bytes after them. Those of a 1xx are skipped."""
        if self._waiter is None:
            raise BadReply("no request is in flight")
        self._raw += data
        while (end := self._raw.find(b"\r\n\r\n")) >= 0:
            raw, rest = self._raw[: end + 4], self._raw[end + 4 :]
            headers = read_known_headers(raw)
            self._raw = rest
            if headers.status >= 200:
                self._raw = b""
                self._header_bytes = raw
                self._begin(headers)
                return rest
        if len(self._raw) > MAX_HEADER_BYTES:
            raise BadReply("headers too long")
        return b""

    def _begin(self, headers: ReplyHeaders) -> None:
        self._headers = headers
        self._chunks = Chunks() if headers.length == CHUNKED else None
        self._body.clear()
        self._read = 0

    def _take_body(self, data: bytes) -> None:
        headers = self._headers
        assert headers is not None
        self._read += len(data)
        piece = data if self._chunks is None else self._chunks.feed(data)
        if self._waiter is not None:
            self._body += piece[: SHOWN - len(self._body)]
        if self._is_whole(headers):
            self._end(headers)
            return
        if self._waiter is not None and len(self._body) >= SHOWN:
            self._resolve()
        if self._read > MAX_REPLY:
            self.abort()
        elif self._body_deadline is None:
            self._body_deadline = asyncio.get_running_loop().call_later(BODY_S, self.abort)

    def _is_whole(self, headers: ReplyHeaders) -> bool:
        if self._chunks is not None:
            return self._chunks.done
        if headers.length != UNTIL_CLOSE and self._read > headers.length:
            raise BadReply("longer than its Content-Length")
        return self._read == headers.length

    def _end(self, headers: ReplyHeaders) -> None:
        """The reply is complete: the connection is idle, unless the receiver wants it closed."""
        has_more = self._chunks is not None and bool(self._chunks.rest)
        self._resolve()
        self._stop_timer()
        self._headers = None
        if headers.close or has_more:
            self.abort()
        else:
            self.is_used = True
            self.idle_since = time.monotonic()
            self._pool.on_idle(self)

    def _resolve_success(self) -> None:
        """A success does not wait for the rest of its body."""
        if self._headers is not None and 200 <= self._headers.status < 300:
            self._resolve()

    def _resolve(self) -> None:
        waiter = self._take_waiter()
        if waiter is not None and not waiter.done():
            assert self._headers is not None
            retry_after = self._headers.retry_after[:LONGEST_RETRY_AFTER].decode("latin-1")
            waiter.set_result(
                ReceiverReply(self._headers.status, bytes(self._body), retry_after, headers=self._header_bytes)
            )

    def _take_waiter(self) -> asyncio.Future[ReceiverReply] | None:
        waiter, self._waiter = self._waiter, None
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
        return waiter

    def _fail(self, exc: Exception) -> None:
        waiter = self._take_waiter()
        if waiter is not None and not waiter.done():
            waiter.set_exception(exc)
        self.abort()

    def abort(self) -> None:
        """Close the connection. A reply whose headers have arrived is complete."""
        self._stop_timer()
        if self._headers is not None:
            self._resolve()
        self.is_open = False
        if self._transport is not None:
            self._transport.abort()

    def _stop_timer(self) -> None:
        if self._body_deadline is not None:
            self._body_deadline.cancel()
            self._body_deadline = None

    def eof_received(self) -> None:
        """A body without a length ends here. The transport closes itself."""
        if self._headers is not None:
            self.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_open = False
        self._stop_timer()
        if self._headers is not None:
            self._resolve()
        else:
            self._fail(ConnectionBroken(unused=not self._raw))
        self._pool.on_lost(self)


class ReceiverConnections:
    """All connections to receivers."""

    def __init__(self, guard: OutboundGuard, *, tls: ssl.SSLContext | None = None) -> None:
        self._guard = guard
        self._tls = tls or ssl.create_default_context()
        self._resolver = guard.resolver or GuardedResolver()
        self._idle: dict[tuple[str, Origin], list[ReceiverConnection]] = {}
        self._sweep: asyncio.TimerHandle | None = None

    def __repr__(self) -> str:
        return f"<ReceiverConnections {sum(map(len, self._idle.values()))} idle>"

    def kept(self, origin: Origin) -> ReceiverConnection | None:
        """The idle connection that the current task's account used last, if one is open."""
        key = client_of_task.get(), origin
        connections = self._idle.get(key)
        while connections:
            connection = connections.pop()
            if not connections:
                del self._idle[key]
            if connection.is_open:
                return connection
        return None

    async def connect(self, origin: Origin) -> ReceiverConnection:
        """Open a connection. Raises OSError, or Blocked if the address is not allowed."""
        scheme, host, port = origin
        connection = ReceiverConnection(self, origin, client_of_task.get())
        sock = await aiohappyeyeballs.start_connection(
            await self._addresses(host, port),
            happy_eyeballs_delay=STAGGER_S,
            interleave=1,
            socket_factory=self._guard.open_socket,
        )
        try:
            with suppress(OSError):
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            await asyncio.get_running_loop().create_connection(
                lambda: connection,
                sock=sock,
                ssl=self._tls if scheme == "https" else None,
                server_hostname=host.rstrip(".") if scheme == "https" else None,
            )
        except BaseException:
            sock.close()
            raise
        return connection

    async def _addresses(self, host: str, port: int) -> list[aiohappyeyeballs.AddrInfoType]:
        try:
            literal = ip_address(host)
        except ValueError:
            addresses = [
                (each["family"], each["host"]) for each in await self._resolver.resolve(host, port, socket.AF_UNSPEC)
            ]
        else:
            addresses = [(socket.AF_INET if literal.version == 4 else socket.AF_INET6, host)]
        return [
            (
                socket.AddressFamily(family),
                socket.SOCK_STREAM,
                socket.IPPROTO_TCP,
                "",
                (at, port) if family == socket.AF_INET else (at, port, 0, 0),
            )
            for family, at in addresses
        ]

    def on_idle(self, connection: ReceiverConnection) -> None:
        self._idle.setdefault((connection.client, connection.origin), []).append(connection)
        if self._sweep is None:
            self._sweep = asyncio.get_running_loop().call_later(KEEPALIVE_S, self._sweep_idle)

    def on_lost(self, connection: ReceiverConnection) -> None:
        key = connection.client, connection.origin
        connections = self._idle.get(key)
        if connections and connection in connections:
            connections.remove(connection)
            if not connections:
                del self._idle[key]

    def _sweep_idle(self) -> None:
        """Close connections that were idle for too long."""
        self._sweep = None
        old = time.monotonic() - KEEPALIVE_S
        idle = [connection for connections in self._idle.values() for connection in connections]
        for connection in [connection for connection in idle if connection.idle_since <= old]:
            connection.abort()
            self.on_lost(connection)
        if self._idle:
            self._sweep = asyncio.get_running_loop().call_later(KEEPALIVE_S / 2, self._sweep_idle)

    async def close(self) -> None:
        if self._sweep is not None:
            self._sweep.cancel()
        for connection in [connection for connections in self._idle.values() for connection in connections]:
            connection.abort()
        self._idle.clear()
        await self._resolver.close()


def origin_of(url: URL) -> Origin:
    assert url.raw_host is not None
    assert url.port is not None
    return url.scheme, url.raw_host, url.port


def request_start_of(url: URL, headers: dict[str, str]) -> bytes:
    """The start of every request to this URL, percent-encoded, with our own headers."""
    named = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    return f"POST {url.raw_path_qs or '/'} HTTP/1.1\r\nHost: {url.host_port_subcomponent}\r\n{named}".encode("ascii")
