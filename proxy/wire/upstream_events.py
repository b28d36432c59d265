"""An event stream of an upstream (server-sent events), on a connection of its own.

It is used once: when it ends, its reader opens another, perhaps at another upstream. The address contains credentials and stays
in `WebSocketLink`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import TypeAlias

import aiohttp

from proxy.core.event_stream import EVENT_STREAM
from proxy.wire.upstream_stream import REPLY_S, StreamLost
from proxy.wire.websocket_client import NOT_CONNECTED, WebSocketLink

# Upstreams refuse streams at once, but some, such as lodestar, send the headers of a stream with its first event. A stream that
# was not refused within this time has begun.
ACCEPTED_S = 2.0
# The part of a refusal that is kept.
_LONGEST_REFUSAL = 500
# Returns the next bytes of a stream, and none at its end.
NextBytes: TypeAlias = Callable[[], Awaitable[bytes]]
EventStream: TypeAlias = AbstractAsyncContextManager[NextBytes]


class StreamRefused(Exception):
    """The upstream's status and the beginning of its reply."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(status, text)
        self.status = status
        self.text = text


@asynccontextmanager
async def event_stream(link: WebSocketLink, label: str, target: str) -> AsyncIterator[NextBytes]:
    """Open a stream. Raises StreamRefused, or StreamLost, also while it is read."""
    async with link.session() as session:
        headers = {"Accept": EVENT_STREAM, "Accept-Encoding": "identity"}
        opening = asyncio.get_running_loop().create_task(link.get(session, target, headers), name=f"stream of {label}")
        reply = _OpeningReply(label, opening)
        try:
            await reply.begin()
            yield reply.next_bytes
        except NOT_CONNECTED:
            raise StreamLost(f"{label} closed the connection, or cannot be reached") from None
        finally:
            await reply.end()


class _OpeningReply:
    """The reply to the request for a stream. Its headers may arrive with the first event, which may be minutes later."""

    def __init__(self, label: str, opening: asyncio.Task[aiohttp.ClientResponse]) -> None:
        self._label = label
        self._opening = opening
        # Set once its headers are there and were checked.
        self._body: aiohttp.StreamReader | None = None

    def __repr__(self) -> str:
        return f"<_OpeningReply of {self._label}, {'open' if self._body else 'without headers'}>"

    async def begin(self) -> None:
        """Wait for the headers, or until the upstream would have refused the stream."""
        await asyncio.wait([self._opening], timeout=ACCEPTED_S)
        if self._opening.done():
            self._body = await self._checked(self._opening.result())

    async def next_bytes(self) -> bytes:
        if self._body is None:
            await asyncio.wait([self._opening])  # A reader that stops waiting does not end the request.
            self._body = await self._checked(self._opening.result())
        return await self._body.readany()

    async def end(self) -> None:
        self._opening.cancel()
        await asyncio.wait([self._opening])
        if not self._opening.cancelled() and self._opening.exception() is None:
            self._opening.result().close()

    async def _checked(self, response: aiohttp.ClientResponse) -> aiohttp.StreamReader:
        if response.status != 200:
            async with asyncio.timeout(REPLY_S):
                text = await response.content.read(_LONGEST_REFUSAL)
            raise StreamRefused(response.status, text.decode("utf-8", "replace"))
        if response.content_type != EVENT_STREAM:
            raise StreamLost(f"{self._label} does not send events")
        return response.content
