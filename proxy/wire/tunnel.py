"""Connecting through an HTTP proxy with CONNECT (RFC 9110, 9.3.6)."""

from __future__ import annotations

import asyncio
import base64
from urllib.parse import SplitResult, unquote

from proxy.wire.http1 import MAX_HEADER_BYTES, BadReply, read_headers

_END = b"\r\n\r\n"


class TunnelRefused(OSError):
    """The proxy did not connect."""


class Tunnel(asyncio.Protocol):
    """Asks the proxy for a connection to `target`, a host and port. `opened` is done when the proxy has connected, or fails
    with TunnelRefused."""

    def __init__(self, target: str, proxy: SplitResult) -> None:
        self._request = f"CONNECT {target} HTTP/1.1\r\nHost: {target}\r\n{_authorization(proxy)}\r\n".encode("latin-1")
        self._received = b""
        self.opened: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def __repr__(self) -> str:
        return f"<Tunnel {'open' if self.opened.done() else 'opening'}>"

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport.write(self._request)  # type: ignore[attr-defined]

    def data_received(self, data: bytes) -> None:
        """No data may follow the proxy's headers: upstreams send nothing before the first request."""
        self._received += data
        if self._received.endswith(_END):
            self._end(self._refusal())
        elif _END in self._received or len(self._received) > MAX_HEADER_BYTES:
            self._end("the proxy's reply is not valid")

    def _refusal(self) -> str:
        try:
            status = read_headers(self._received).status
        except BadReply:
            return "the proxy's reply is not valid"
        return "" if 200 <= status < 300 else f"the proxy replied with {status}"

    def connection_lost(self, exc: Exception | None) -> None:
        self._end("the proxy closed the connection")

    def _end(self, refusal: str) -> None:
        if self.opened.done():
            return
        if refusal:
            self.opened.set_exception(TunnelRefused(refusal))
        else:
            self.opened.set_result(None)


def _authorization(proxy: SplitResult) -> str:
    if proxy.username is None:
        return ""
    pair = f"{unquote(proxy.username)}:{unquote(proxy.password or '')}"
    return f"Proxy-Authorization: Basic {base64.b64encode(pair.encode()).decode()}\r\n"
