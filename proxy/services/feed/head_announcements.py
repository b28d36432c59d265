"""Subscribe to new heads while a network is in use, so that a block makes replies from before it out of date at once.

Only upstreams with a WebSocket announce blocks. Nothing depends on them: the tracker polls every second as well. Each worker
subscribes for itself, because an announcement also says which upstream has the block.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from proxy.services.feed.sources import FeedSource, FeedSources
from proxy.services.rpc.networks import Route
from proxy.services.rpc.tracker import Tracker
from proxy.tasks import until_set
from proxy.wire.upstream_stream import StreamLost, SubscriptionRefused
from proxy.wire.websocket_upstream import WebSocketUpstream

log = logging.getLogger("penstock.heads")

# How often to check whether the network is in use, and whether a better source is available.
CHECK_S = 0.5


class HeadAnnouncements:
    """The subscription of one network. It needs the network's `tracker`, which knows whether the network is in use."""

    def __init__(self, route: Route, tracker: Tracker, clock: Callable[[], float] = time.monotonic) -> None:
        self._route = route
        self._tracker = tracker
        self._clock = clock
        lookups = route.state.head_reader.lookups
        self._head = lookups.head
        self._method, self._params = ("", b"") if lookups.subscribe is None else lookups.subscribe.first
        self._sources = FeedSources(route, subscribe_method=self._method, poll_method=None)
        # The newest block that the current source has announced.
        self._announced = 0

    def __repr__(self) -> str:
        return f"<HeadAnnouncements {self._route.network.id} at {self._announced}>"

    @property
    def is_possible(self) -> bool:
        return bool(self._method) and not self._sources.is_empty

    async def run(self) -> None:
        """A supervised loop."""
        while True:
            now = self._clock()
            source = self._sources.best(now) if self._tracker.is_in_use(now) else None
            if source is not None:
                await self._follow(source)
            await asyncio.sleep(CHECK_S)

    async def _follow(self, source: FeedSource) -> None:
        source.started_at = self._clock()
        try:
            await self._listen(source)
        except (StreamLost, SubscriptionRefused) as exc:
            self._sources.failed(source, self._clock())
            extra = {"network": self._route.network.id, "source": source.upstream.label, "reason": str(exc)[:300]}
            log.info("upstream does not announce its heads", extra=extra)

    async def _listen(self, source: FeedSource) -> None:
        assert isinstance(source.upstream, WebSocketUpstream)
        lost = asyncio.Event()
        stream = source.upstream.stream(lost.set)
        try:
            await stream.open()
            await stream.subscribe(self._method, self._params, lambda block: self._on_block(block, source))
            self._announced = self._route.heads.agreed
            # A block may have come just before the subscription.
            self._tracker.wake()
            while self._is_wanted(source, self._clock()):
                if await until_set(lost, within_s=CHECK_S) or self._is_mute():
                    raise StreamLost(f"{source.upstream.label} announces nothing any more")
        finally:
            await stream.close()

    def _is_wanted(self, source: FeedSource, now: float) -> bool:
        return self._tracker.is_in_use(now) and self._sources.is_best(source, now)

    def _on_block(self, notification: bytes, source: FeedSource) -> None:
        block = None if self._head is None else self._head.block_in(notification)
        if block is None:
            return
        self._announced = block[0]
        self._route.state.announce(block, source.upstream.health, self._clock())
        self._tracker.wake()

    def _is_mute(self) -> bool:
        """Whether polls have found several blocks that were not announced."""
        heads = self._route.heads
        return self._announced < heads.agreed - heads.behind_blocks
