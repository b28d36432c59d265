"""An event stream of an upstream (server-sent events), on a connection of its own.

It is used once: when it ends, its reader opens another, perhaps at another upstream. The address contains credentials and stays
in `WebSocketLink`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, closing
from typing import TypeAlias

from proxy.core.event_stream import EVENT_STREAM
from proxy.wire.upstream_stream import REPLY_S, StreamLost
from proxy.wire.websocket_client import NOT_CONNECTED, WebSocketLink

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
    """Open a stream. Raises StreamRefused, or StreamLost,
    also while it is read."""
    async with link.session() as session:
        try:
            async with asyncio.timeout(REPLY_S):
                response = await link.get(session, target, {"Accept": EVENT_STREAM, "Accept-Encoding": "identity"})
            with closing(response):
                if response.status != 200:
                    async with asyncio.timeout(REPLY_S):
                        text = await response.content.read(_LONGEST_REFUSAL)
                    raise StreamRefused(response.status, text.decode("utf-8", "replace"))
                if response.content_type != EVENT_STREAM:
                    raise StreamLost(f"{label} does not send events")
                yield response.content.readany
        except NOT_CONNECTED:
            raise StreamLost(f"{label} closed the connection, or cannot be reached") from None
