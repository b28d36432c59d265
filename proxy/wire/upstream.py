"""Calls to upstream nodes over HTTP.

An upstream is known by its label; its address, where credentials live, stays in this room: no error, log line or header
carries it.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import aiohttp
from yarl import URL

# The most that is read of one reply: a bomb must not fill the memory.
MAX_REPLY_BYTES = 25 * 1024 * 1024
_HEADERS = {"Content-Type": "application/json", "Accept": "application/json", "Accept-Encoding": "identity"}


class UpstreamFailed(Exception):
    """The upstream gave no usable answer. `sent`: whether the call may have reached it."""

    def __init__(self, reason: str, *, sent: bool) -> None:
        super().__init__(reason)
        self.reason = reason
        self.sent = sent


@dataclass(frozen=True, slots=True)
class Upstream:
    label: str
    url: str

    def __repr__(self) -> str:
        return f"<Upstream {self.label}>"


class UpstreamClient:
    """One session of keep-alive connections to all upstreams."""

    def __init__(self) -> None:
        self._session: aiohttp.ClientSession | None = None

    async def open(self) -> None:
        # Compressed replies are refused, not expanded: 204 KB can become 200 MB.
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, limit_per_host=256, keepalive_timeout=4.0),
            auto_decompress=False,
            timeout=aiohttp.ClientTimeout(total=None),
            trust_env=False,
        )

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def post(self, upstream: Upstream, body: bytes, *, timeout_s: float) -> bytes:
        """The reply's body, whole, or UpstreamFailed."""
        assert self._session is not None
        try:
            async with (
                asyncio.timeout(timeout_s),
                self._session.post(URL(upstream.url, encoded=True), data=body, headers=_HEADERS) as response,
            ):
                reply = await _read_capped(response)
                if response.status != 200:
                    raise UpstreamFailed(f"status {response.status}", sent=True)
                return reply
        except TimeoutError:
            raise UpstreamFailed("time-out", sent=True) from None
        except aiohttp.ClientConnectorError:
            raise UpstreamFailed("connection refused", sent=False) from None
        except (aiohttp.ClientError, OSError):
            raise UpstreamFailed("connection lost", sent=True) from None


async def _read_capped(response: aiohttp.ClientResponse) -> bytes:
    if response.headers.get("Content-Encoding", "identity") != "identity":
        raise UpstreamFailed("compressed reply", sent=True)
    parts: list[bytes] = []
    size = 0
    async for part in response.content.iter_chunked(1 << 16):
        size += len(part)
        if size > MAX_REPLY_BYTES:
            raise UpstreamFailed("reply too large", sent=True)
        parts.append(part)
    return b"".join(parts)
