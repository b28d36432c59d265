"""The address of an upstream, and connecting to it: directly, through a proxy or over a Unix socket, with TLS or without."""

from __future__ import annotations

import asyncio
import base64
import socket
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar
from urllib.parse import SplitResult, urlsplit

from yarl import URL

from proxy.settings import LinkSettings
from proxy.wire.tls_client import TlsClient
from proxy.wire.tunnel import Tunnel, TunnelRefused

CONNECT_TIMEOUT_S = 3.0
# The header lines of JSON-RPC calls.
_OF_CALLS = ("Content-Type: application/json", "Accept: application/json")
P = TypeVar("P", bound=asyncio.Protocol)


@dataclass(frozen=True, slots=True)
class UpstreamAddress:
    """The address of an upstream, and the start of every request to it."""

    host: str
    port: int
    tls: TlsClient | None
    request_start: bytes = field(repr=False)
    proxy: SplitResult | None = field(default=None, repr=False)
    socket: str = ""
    # For requests of other kinds: the path and the query of the URL, and the header lines that all requests have.
    path: str = field(default="/", repr=False)
    query: str = field(default="", repr=False)
    lines: tuple[str, ...] = field(default=(), repr=False)

    @classmethod
    def of(cls, link: LinkSettings) -> UpstreamAddress:
        parsed = URL(link.url, encoded=True)
        host, port = parsed.host or "", parsed.port or (443 if parsed.scheme == "https" else 80)
        # RFC 3986, 3.2.2: an IPv6 address is written in brackets where a port may follow.
        named = f"[{host}]" if ":" in host else host
        first = f"Host: {named}" if parsed.is_default_port() else f"Host: {named}:{port}"
        lines = ["Accept-Encoding: gzip"] if link.asks_for_gzip else []
        if parsed.user is not None:
            pair = f"{parsed.user}:{parsed.password or ''}"
            lines.append(f"Authorization: Basic {base64.b64encode(pair.encode()).decode()}")
        lines += [f"{name}: {value}" for name, value in headers_of(link).items()]
        return cls(
            host,
            port,
            TlsClient(link, host) if link.uses_tls else None,
            "\r\n".join([f"POST {parsed.raw_path_qs} HTTP/1.1", first, *_OF_CALLS, *lines, "Content-Length: "]).encode(
                "latin-1"
            ),
            urlsplit(link.proxy) if link.proxy else None,
            link.socket,
            parsed.raw_path,
            parsed.raw_query_string,
            (first, *lines),
        )

    async def dial(self, protocol: Callable[[], P]) -> P:
        """Open a connection. Raises OSError or TimeoutError."""
        connection = protocol()
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            if self.tls is None:
                await self._connect(connection)
            else:
                await self.tls.join(connection, self._connect)
        return connection

    async def _connect(self, protocol: asyncio.Protocol) -> None:
        loop = asyncio.get_running_loop()
        if self.socket:
            await loop.create_unix_connection(lambda: protocol, self.socket)
        elif self.proxy is not None:
            await self._connect_through(self.proxy, protocol)
        else:
            await loop.create_connection(lambda: protocol, self.host, self.port)

    async def _connect_through(self, proxy: SplitResult, protocol: asyncio.Protocol) -> None:
        named = f"[{self.host}]" if ":" in self.host else self.host
        tunnel = Tunnel(f"{named}:{self.port}", proxy)
        transport, _ = await asyncio.get_running_loop().create_connection(
            lambda: tunnel, proxy.hostname or "", proxy.port or 80
        )
        try:
            await tunnel.opened
        except BaseException:
            transport.abort()
            raise
        transport.set_protocol(protocol)
        protocol.connection_made(transport)


def headers_of(link: LinkSettings) -> Mapping[str, str]:
    """The operator's headers of every request to the upstream."""
    return {"Authorization": f"Bearer {link.bearer}", **link.headers} if link.bearer else link.headers


# Why no connection was opened, for clients.
_REASONS: dict[type[BaseException], str] = {
    TimeoutError: "connection timed out",
    ssl.SSLError: "TLS handshake failed",
    socket.gaierror: "its host name is not known",
    TunnelRefused: "the proxy refused to connect",
}


def reason_of(failed: BaseException) -> str:
    return next((text for kind, text in _REASONS.items() if isinstance(failed, kind)), "connection refused")


def detail_of(failed: BaseException) -> str:
    """Why the operator's settings may be wrong; empty if the upstream just cannot be reached. Not for clients."""
    if isinstance(failed, ssl.SSLCertVerificationError):
        return f"its certificate is refused: {failed.verify_message}"
    if isinstance(failed, ssl.SSLError):
        return f"TLS handshake failed: {(failed.reason or 'no reason given').lower().replace('_', ' ')}"
    return str(failed) if isinstance(failed, TunnelRefused) else ""
