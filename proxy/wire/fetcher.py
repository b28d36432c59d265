"""Fetching documents from untrusted URLs.

A hostile URL can point anywhere, return a lot, or return it slowly. So every address is checked as text and again when it is
connected to, redirects included. A fetch has one deadline, and a limit on the bytes that are read or result from decompression.
Failures are not raised: the outcome is part of the return value.
"""

from __future__ import annotations

import asyncio
import zlib
from dataclasses import dataclass
from typing import Literal

from aiohttp import ClientError, ClientResponse, ClientSession, ClientTimeout, DummyCookieJar, TCPConnector
from yarl import URL

from proxy import __version__
from proxy.connection_queue import ConnectionQueue, TooManyWaiting
from proxy.tasks import client_of_task
from proxy.wire.outbound_guard import CONNECTIONS, MOST_OF_A_CLIENT, Blocked, OutboundGuard, UrlRefused

FetchOutcome = Literal["ok", "not_found", "unreachable", "refused", "too_large", "invalid", "timeout"]

REDIRECTS = 3
_MOVED = frozenset({301, 302, 303, 307, 308})
_HEADERS = {
    "User-Agent": f"penstock/{__version__}",
    "Accept": "application/json, image/svg+xml, */*;q=0.5",
    # Some servers compress anyway. The limits apply to these too.
    "Accept-Encoding": "identity",
}


@dataclass(frozen=True, slots=True)
class Fetched:
    """The outcome of a fetch, and the document."""

    outcome: FetchOutcome
    body: bytes = b""
    media_type: str = ""


class _Ended(Exception):
    def __init__(self, outcome: FetchOutcome) -> None:
        super().__init__(outcome)
        self.outcome: FetchOutcome = outcome


class Fetcher:
    """`get` is for untrusted URLs; `get(own=True)` for the operator's, which may be private."""

    def __init__(self, guard: OutboundGuard, *, timeout_s: float, max_bytes: int) -> None:
        self._guard = guard
        self._timeout_s = timeout_s
        self._max_bytes = max_bytes
        self._sessions: dict[bool, ClientSession] = {}
        # Shares the connections between clients, so that one client's slow documents do not use them all. Untrusted hosts and
        # the operator's hosts have separate connections.
        self._turns = {own: ConnectionQueue(CONNECTIONS, per_client=MOST_OF_A_CLIENT) for own in (False, True)}

    def __repr__(self) -> str:
        return f"<Fetcher {self._max_bytes} bytes in {self._timeout_s} s, {self._guard!r}>"

    async def get(self, url: str, *, own: bool = False) -> Fetched:
        try:
            turns, client = self._turns[own], client_of_task.get()
            async with asyncio.timeout(self._timeout_s), turns.turn(client, within_s=self._timeout_s):
                return await self._follow(url, own=own)
        except (TimeoutError, TooManyWaiting):
            return Fetched("timeout")
        except _Ended as exc:
            return Fetched(exc.outcome)
        except UrlRefused:
            return Fetched("refused")
        except (ClientError, OSError) as exc:
            was_blocked = isinstance(exc, Blocked) or isinstance(getattr(exc, "os_error", None), Blocked)
            return Fetched("refused" if was_blocked else "unreachable")
        except ValueError:  # The URL has a host or a header that cannot be sent.
            return Fetched("invalid")

    async def _follow(self, text: str, *, own: bool) -> Fetched:
        url = URL(text) if own else self._guard.check(text)
        for _ in range(REDIRECTS + 1):
            async with self._session(own=own).get(url, allow_redirects=False) as response:
                if response.status not in _MOVED:
                    return await self._read(response)
                target = response.headers.get("Location", "")
            following = url.join(URL(target))
            # The operator's address may redirect to itself. Any other target is untrusted.
            own = own and following.origin() == url.origin()
            url = following if own else self._guard.check(str(following))
        raise _Ended("refused")

    def _session(self, *, own: bool) -> ClientSession:
        session = self._sessions.get(own)
        if session is None:
            session = self._sessions[own] = self._open(own=own)
        return session

    def _open(self, *, own: bool) -> ClientSession:
        if not own:
            return self._guard.session(_HEADERS, timeout_s=self._timeout_s)
        return ClientSession(
            connector=TCPConnector(limit=CONNECTIONS),
            headers=_HEADERS,
            timeout=ClientTimeout(total=self._timeout_s),
            cookie_jar=DummyCookieJar(),
            auto_decompress=False,
        )

    async def _read(self, response: ClientResponse) -> Fetched:
        if response.status != 200:
            raise _Ended("not_found" if response.status in (404, 410) else "unreachable")
        if response.content_type.startswith("image/"):
            # Clients show images; their bytes are not needed here.
            return Fetched("ok", media_type=response.content_type)
        if (response.content_length or 0) > self._max_bytes:
            raise _Ended("too_large")
        body = bytearray()
        async for piece in response.content.iter_any():
            body += piece
            if len(body) > self._max_bytes:
                raise _Ended("too_large")
        encoding = response.headers.get("Content-Encoding", "identity").strip().lower()
        return Fetched("ok", expanded(bytes(body), encoding, self._max_bytes), response.content_type)

    async def close(self) -> None:
        for session in self._sessions.values():
            await session.close()


def expanded(body: bytes, encoding: str, limit: int) -> bytes:
    """The decompressed body. Raises if it exceeds the limit."""
    if encoding in ("", "identity"):
        return body
    if encoding not in ("gzip", "x-gzip", "deflate"):
        raise _Ended("invalid")
    # 32 + 15: detect gzip or zlib from the header.
    expander = zlib.decompressobj(47)
    try:
        whole = expander.decompress(body, limit + 1)
    except zlib.error:
        raise _Ended("invalid") from None
    if len(whole) > limit:
        raise _Ended("too_large")
    if not expander.eof:
        raise _Ended("invalid")
    return whole
