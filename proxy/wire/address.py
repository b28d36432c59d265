"""The address of an upstream, and connecting to it."""

from __future__ import annotations

import asyncio
import base64
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from yarl import URL

CONNECT_TIMEOUT_S = 3.0
P = TypeVar("P", bound=asyncio.BaseProtocol)


@dataclass(frozen=True, slots=True)
class UpstreamAddress:
    """An upstream's host and port, and the start of every request to it."""

    host: str
    port: int
    tls: ssl.SSLContext | None
    head: bytes = field(repr=False)

    @classmethod
    def of(cls, url: str, headers: Mapping[str, str]) -> UpstreamAddress:
        parsed = URL(url, encoded=True)
        host, port = parsed.host or "", parsed.port or (443 if parsed.scheme == "https" else 80)
        # RFC 3986, 3.2.2: an IPv6 address is written in brackets where a port may follow.
        named = f"[{host}]" if ":" in host else host
        lines = [
            f"POST {parsed.raw_path_qs} HTTP/1.1",
            f"Host: {named}" if parsed.is_default_port() else f"Host: {named}:{port}",
            "Content-Type: application/json",
            "Accept: application/json",
        ]
        if parsed.user is not None:
            pair = f"{parsed.user}:{parsed.password or ''}"
            lines.append(f"Authorization: Basic {base64.b64encode(pair.encode()).decode()}")
        lines += [f"{name}: {value}" for name, value in headers.items()]
        tls = ssl.create_default_context() if parsed.scheme == "https" else None
        return cls(host, port, tls, "\r\n".join([*lines, "Content-Length: "]).encode("latin-1"))

    async def dial(self, protocol: Callable[[], P]) -> P:
        """Open a connection. Raises OSError or TimeoutError."""
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            loop = asyncio.get_running_loop()
            _, made = await loop.create_connection(protocol, self.host, self.port, ssl=self.tls)
        return made
