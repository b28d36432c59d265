"""How the upstreams of a family stream events: as server-sent events of a route, or for a query over a WebSocket."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Protocol, TypeAlias

from proxy.chains.families import family_of
from proxy.chains.registry import Network
from proxy.core import jsonrpc, upstream_errors
from proxy.core.event_stream import BadEvents, EventReader, comment
from proxy.core.rest_routes import EventRoute
from proxy.services.feed.topics import Topic
from proxy.wire.rest_upstream import RestUpstream
from proxy.wire.upstream import Upstream
from proxy.wire.upstream_events import StreamRefused
from proxy.wire.upstream_stream import StreamLost, SubscriptionRefused
from proxy.wire.websocket_upstream import WebSocketUpstream

# Events that may wait for a turn of their feed. A stream with more of them is opened again.
MOST_WAITING = 1000
# Returns the next events of a stream. Raises StreamLost.
NextEvents: TypeAlias = Callable[[], Awaitable[list[bytes]]]


class TopicRefused(Exception):
    """The upstream does not stream the topic. `error`: a JSON-RPC error for clients."""

    def __init__(self, error: bytes) -> None:
        super().__init__(error)
        self.error = error


class EventSource(Protocol):
    """`method`: upstreams must allow it. `resumed`: sent to listeners when a stream is resumed at another upstream."""

    method: str
    upstream_type: type[Upstream]
    resumed: bytes

    def has_blocks(self, topic: Topic) -> bool:
        """Whether there is an event for each block."""

    def open(self, upstream: Upstream, topic: Topic) -> AbstractAsyncContextManager[NextEvents]:
        """Open a stream. Raises TopicRefused or StreamLost."""


def event_source_of(network: Network) -> EventSource:
    rest = family_of(network).rest
    return QueryEvents() if rest is None or rest.events is None else SentEvents(rest.events)


class SentEvents:
    """Server-sent events. A topic's `kind` is the target of the route, and its `detail` the topics, separated by commas."""

    upstream_type: type[Upstream] = RestUpstream
    resumed = comment("resumed at another upstream: events may be missing")

    def __init__(self, route: EventRoute) -> None:
        self.method = route.method
        self._of_blocks = route.of_blocks

    def __repr__(self) -> str:
        return f"<SentEvents {self.method}>"

    def has_blocks(self, topic: Topic) -> bool:
        return not self._of_blocks.isdisjoint(_text(topic).split(","))

    @asynccontextmanager
    async def open(self, upstream: Upstream, topic: Topic) -> AsyncIterator[NextEvents]:
        assert isinstance(upstream, RestUpstream)
        reader = EventReader()
        try:
            async with upstream.events(topic.kind) as next_bytes:

                async def next_events() -> list[bytes]:
                    piece = await next_bytes()
                    if not piece:
                        raise StreamLost(f"{upstream.label} ended the stream")
                    return [event.encoded() for event in reader.feed(piece)]

                yield next_events
        except StreamRefused as exc:
            if 400 <= exc.status < 500:
                message = "the upstreams refuse these topics: name fewer of them"
                raise TopicRefused(jsonrpc.error(exc.status, message)) from None
            raise StreamLost(f"{upstream.label} refused the stream with status {exc.status}") from None
        except BadEvents as exc:
            raise StreamLost(f"{upstream.label}: {exc}") from None


class QueryEvents:
    """Events for a query over a WebSocket, as CometBFT has them. A topic's `detail` is the query in JSON-RPC params."""

    method = "subscribe"
    upstream_type: type[Upstream] = WebSocketUpstream
    resumed = b""

    def __repr__(self) -> str:
        return "<QueryEvents>"

    def has_blocks(self, topic: Topic) -> bool:
        return "tm.event='NewBlock" in _text(topic).replace(" ", "") and " AND " not in _text(topic)

    @asynccontextmanager
    async def open(self, upstream: Upstream, topic: Topic) -> AsyncIterator[NextEvents]:
        assert isinstance(upstream, WebSocketUpstream)
        inbox = _Inbox(upstream.label)
        stream = upstream.stream(inbox.lose, echoes_ids=True)
        try:
            await stream.open()
            await stream.subscribe(self.method, _text(topic).encode(), inbox.add)
            yield inbox.next_events
        except SubscriptionRefused as exc:
            verdict = upstream_errors.classify(exc.error)
            private = stream.private_words
            error = upstream_errors.translate(exc.error, verdict, in_our_codes=False, private=private)
            raise TopicRefused(error) from None
        finally:
            await stream.close()


class _Inbox:
    """Events of a stream that were not read yet."""

    def __init__(self, label: str) -> None:
        self._label = label
        self._events: list[bytes] = []
        self._is_lost = False
        self._woken = asyncio.Event()

    def __repr__(self) -> str:
        return f"<_Inbox {len(self._events)} events of {self._label}>"

    def add(self, event: bytes) -> None:
        if len(self._events) < MOST_WAITING:
            self._events.append(event)
        else:
            self._is_lost = True
        self._woken.set()

    def lose(self) -> None:
        self._is_lost = True
        self._woken.set()

    async def next_events(self) -> list[bytes]:
        while not self._events:
            if self._is_lost:
                raise StreamLost(f"{self._label} closed the connection")
            self._woken.clear()
            await self._woken.wait()
        events, self._events = self._events, []
        return events


def _text(topic: Topic) -> str:
    return topic.detail.decode() if isinstance(topic.detail, bytes) else ""
