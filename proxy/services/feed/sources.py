"""Rank the upstreams as event sources: those that push over a WebSocket first, then those that are polled.

A source that fails backs off, twice as long each time, until it has worked for a while. The choice holds only for the
moment: the code that reads from a source checks regularly whether a better one is available.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import NoReturn

from proxy.services.rpc.networks import Route
from proxy.wire.upstream import Upstream
from proxy.wire.upstream_stream import StreamLost
from proxy.wire.websocket_upstream import WebSocketUpstream

log = logging.getLogger("penstock.feed")

FIRST_BACKOFF_S = 0.5
LONGEST_BACKOFF_S = 30.0
# After working this long, a failure is a new one: the back-off starts from the beginning.
STABLE_S = 30.0


class SourceFailed(Exception):
    """The source cannot be used at the moment. The message is the reason, for the operator."""


class FeedSource:
    """One upstream as a source. `streams`: it pushes events."""

    __slots__ = ("backoff_s", "retry_at", "started_at", "streams", "upstream")

    def __init__(self, upstream: Upstream, *, streams: bool) -> None:
        self.upstream = upstream
        self.streams = streams
        self.backoff_s = 0.0
        self.retry_at = 0.0
        self.started_at = 0.0

    def __repr__(self) -> str:
        return f"<FeedSource {self.upstream.label} {'streamed' if self.streams else 'polled'}>"


class FeedSources:
    def __init__(
        self,
        route: Route,
        *,
        subscribe_method: str,
        poll_method: str | None,
        streaming: type[Upstream] = WebSocketUpstream,
    ) -> None:
        """Upstreams qualify if they allow the method that starts a stream, or the one that polls. Without a `poll_method`
        nothing is polled. `streaming`: the upstreams that push events."""
        self._route = route
        streamed = [
            FeedSource(each, streams=True)
            for each in route.every_upstream
            if isinstance(each, streaming) and each.health.may_serve(subscribe_method)
        ]
        polled = [
            FeedSource(each, streams=False)
            for each in route.upstreams
            if poll_method and each.health.may_serve(poll_method)
        ]
        self._sources: Sequence[FeedSource] = [*sorted(streamed, key=_rank), *sorted(polled, key=_rank)]

    def __repr__(self) -> str:
        return f"<FeedSources {', '.join(map(repr, self._sources))}>"

    def __len__(self) -> int:
        return len(self._sources)

    @property
    def is_empty(self) -> bool:
        return not self._sources

    async def follow(self, read: Callable[[FeedSource], Awaitable[None]], clock: Callable[[], float]) -> NoReturn:
        """Loop: read from the best source until it fails or is no longer the best, then from the next."""
        while True:
            now = clock()
            source = self.best(now)
            if source is None:
                await asyncio.sleep(max(0.0, self.next_retry_at(now) - now))
                continue
            source.started_at = now
            try:
                await read(source)
            except SourceFailed as exc:
                self.failed(source, clock())
                extra = {"network": self._route.network.id, "source": source.upstream.label, "reason": str(exc)}
                log.info("feed switches to another source", extra=extra)

    def best(self, now: float) -> FeedSource | None:
        """Return the best source, or None while all of them back off or serve another chain or branch."""
        ready = [source for source in self._sources if source.retry_at <= now and _is_ours(source)]
        return next((source for source in ready if self._is_healthy(source, now)), ready[0] if ready else None)

    def is_best(self, source: FeedSource, now: float) -> bool:
        """Whether no higher-ranked source is ready and healthy."""
        before = self._sources[: self._sources.index(source)]
        return not any(each.retry_at <= now and self._is_healthy(each, now) for each in before)

    def has_better(self, source: FeedSource, now: float) -> bool:
        """Whether the source is not healthy, and another one is."""
        return not self._is_healthy(source, now) and any(
            each.retry_at <= now and _is_ours(each) and self._is_healthy(each, now) for each in self._sources
        )

    async def has_successor(self, source: FeedSource, clock: Callable[[], float]) -> bool:
        """Whether a higher-ranked source can take over. Notifications are lost while a stream is replaced, so one that pushes
        must be reachable: its failure may not have shown in its health yet. A source that is not reachable backs off."""
        for each in self._sources[: self._sources.index(source)]:
            if each.retry_at > clock() or not self._is_healthy(each, clock()):
                continue
            if not isinstance(each.upstream, WebSocketUpstream) or await _is_reachable(each.upstream):
                return True
            self.failed(each, clock())
        return False

    def next_retry_at(self, now: float) -> float:
        """When to look for a source again."""
        ready = [source.retry_at for source in self._sources if _is_ours(source)]
        return max(min(ready, default=0.0), now + (0.0 if ready else FIRST_BACKOFF_S))

    def failed(self, source: FeedSource, now: float) -> None:
        if now - source.started_at > STABLE_S:
            source.backoff_s = 0.0
        source.backoff_s = min(source.backoff_s * 2 or FIRST_BACKOFF_S, LONGEST_BACKOFF_S)
        source.retry_at = now + source.backoff_s

    def _is_healthy(self, source: FeedSource, now: float) -> bool:
        health = source.upstream.health
        return not (health.lagging or health.silent or health.withheld or now < health.rests_until)


def _is_ours(source: FeedSource) -> bool:
    return source.upstream.health.standing == "good"


async def _is_reachable(upstream: WebSocketUpstream) -> bool:
    stream = upstream.stream(lambda: None)
    try:
        await stream.open()
    except StreamLost:
        return False
    finally:
        await stream.close()
    return True


def _rank(source: FeedSource) -> tuple[int, float]:
    return source.upstream.health.tier, -source.upstream.health.weight
