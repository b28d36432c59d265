"""Follows the head of a network: one source at a time, and another one when it dies, falls silent or falls behind.

Whatever the source, what it says goes through the same walk from the last block that was told. So a change of sources
leaves no gap and tells nothing twice; a new one is asked for its head first, which covers what happened in between.

A source that was just turned to may be behind, or on a fork that the others have left: until it has told our last block or
a higher one, its other blocks are not believed. Nor is a head below all that we remember, whoever tells it. The blocks of a
chain that was reset are lower; they are believed when the network has no other upstream, and it says so twice, or when its
upstreams agree.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable

from proxy.core.head_chain import ChainBlock
from proxy.services.feed.blocks import BlockSource, BlockUnavailable, read_block
from proxy.services.feed.sources import FeedSource, FeedSources
from proxy.services.feed.walk import ChainWalk
from proxy.services.rpc.networks import Route
from proxy.wire.upstream_stream import StreamLost, SubscriptionRefused
from proxy.wire.websocket_upstream import WebSocketUpstream

log = logging.getLogger("penstock.feed")

# Three times per block, within these bounds: a fast chain must not be flooded, a slow one's blocks not be told late.
SHORTEST_POLL_S = 0.2
LONGEST_POLL_S = 2.0
# A block that others have had for this long and the source has not told: it has fallen behind.
LAG_S = 3.0
# Without any news for so many block times the other upstreams are asked.
QUIET_BLOCKS = 3
# How long one stride over a gap may take.
STRIDE_S = 15.0
# Heads that wait for the walk: what is dropped is found again as a gap.
MOST_WAITING = 64


class SourceFailed(Exception):
    """The source is of no use at the moment; why, for an operator."""


class HeadInbox:
    """Heads as a stream tells them, until it is lost."""

    def __init__(self) -> None:
        self._waiting: deque[bytes] = deque(maxlen=MOST_WAITING)
        self._wake = asyncio.Event()
        self._lost = False

    def put(self, notice: bytes) -> None:
        self._waiting.append(notice)
        self._wake.set()

    def lose(self) -> None:
        self._lost = True
        self._wake.set()

    async def take(self, timeout_s: float) -> bytes | None:
        """The next; None when there is none within that time. What came before the end is still read."""
        try:
            async with asyncio.timeout(timeout_s):
                while not self._waiting:
                    if self._lost:
                        raise SourceFailed("the connection was lost")
                    self._wake.clear()
                    await self._wake.wait()
        except TimeoutError:
            return None
        return self._waiting.popleft()


class HeadWatcher:
    def __init__(
        self,
        route: Route,
        blocks: BlockSource,
        walk: ChainWalk,
        *,
        room: Callable[[], Awaitable[None]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`room` is awaited before a block is told: whoever is told of them may have enough for now."""
        self._route = route
        self._blocks = blocks
        self._walk = walk
        self._room = room
        self._clock = clock
        self._sources = FeedSources(route, subscribes="eth_subscribe", asks="eth_getBlockByNumber")
        block_time_s = route.network.facts.block_time_s
        self._poll_s = min(max(block_time_s / 3, SHORTEST_POLL_S), LONGEST_POLL_S)
        self._quiet_s = max(QUIET_BLOCKS * block_time_s, LAG_S)
        self._slack = int(LAG_S / block_time_s)
        # Of the present source: whether it has told our last block or a higher one; when it last told a new one; since when
        # it is behind.
        self._settled = False
        self._moved_at = 0.0
        self._behind_since: float | None = None
        self.source: FeedSource | None = None

    def __repr__(self) -> str:
        return f"<HeadWatcher {self._route.network.id} by {self.source!r}>"

    async def run(self) -> None:
        """A loop: from source to source."""
        while True:
            now = self._clock()
            source = self._sources.best(now)
            if source is None:
                await asyncio.sleep(max(0.0, self._sources.next_rest_ends() - now))
                continue
            try:
                await self._follow(source)
            except SourceFailed as exc:
                self._sources.failed(source, self._clock())
                extra = {"network": self._route.network.id, "source": source.upstream.label, "reason": str(exc)}
                log.info("feed moves to another source", extra=extra)
            finally:
                self.source = None

    async def _follow(self, source: FeedSource) -> None:
        now = self._moved_at = self._clock()
        self._sources.begin(source, now)
        self.source, self._settled, self._behind_since = source, False, None
        if source.streams:
            await self._listen(source)
        else:
            await self._poll(source)

    async def _listen(self, source: FeedSource) -> None:
        assert isinstance(source.upstream, WebSocketUpstream)
        inbox = HeadInbox()
        stream = source.upstream.stream(inbox.lose)
        try:
            await stream.open()
            await stream.subscribe("eth_subscribe", b'["newHeads"]', inbox.put)
            await self._look(source)
            while self._sources.is_best(source, self._clock()):
                notice = await inbox.take(self._poll_s)
                if notice is not None:
                    await self._hear(read_block(notice), source)
                await self._check(source)
        except (StreamLost, SubscriptionRefused) as exc:
            raise SourceFailed(str(exc)) from exc
        finally:
            await stream.close()

    async def _poll(self, source: FeedSource) -> None:
        while self._sources.is_best(source, self._clock()):
            await self._look(source)
            await self._check(source)
            await asyncio.sleep(self._poll_s)

    async def _look(self, source: FeedSource) -> None:
        await self._hear(await self._latest(source), source)

    async def _latest(self, source: FeedSource) -> ChainBlock:
        try:
            return await self._blocks.latest(source.upstream)
        except BlockUnavailable as exc:
            raise SourceFailed("it does not tell its head") from exc

    async def _hear(self, head: ChainBlock | None, source: FeedSource) -> None:
        if head is None:
            raise SourceFailed("it tells what is no block")
        chain = self._walk.chain
        tip = chain.tip
        self._settled = self._settled or tip is None or head.number > tip.number or head.hash == tip.hash
        if head.number < chain.floor and self._route.only is not None:
            # One answer out of the past is no reset: there may be many machines behind an address.
            head = await self._latest(source)
        if (not self._settled or head.number < chain.floor) and not self._may_be_reset(head):
            return
        if chain.knows(head.hash):
            return
        await self._room()
        try:
            reached = False
            while not reached:
                async with asyncio.timeout(STRIDE_S):
                    reached = await self._walk.towards(head, source.upstream)
        except (BlockUnavailable, TimeoutError) as exc:
            raise SourceFailed("its blocks cannot be followed back to ours") from exc
        self._moved_at = self._clock()

    def _may_be_reset(self, head: ChainBlock) -> bool:
        heads = self._route.heads
        if self._route.only is not None:
            return True
        return self._route.hears(self._clock()) and 0 < heads.agreed <= head.number

    async def _check(self, source: FeedSource) -> None:
        """Failed where other upstreams have had a newer block for a while."""
        now = self._clock()
        tip = self._walk.chain.tip
        newest = await self._newest(now)
        # One that keeps telling blocks may be a little late with each; one that tells none may not.
        slack = self._slack if now - self._moved_at < LAG_S else 0
        if tip is None or newest <= tip.number + slack:
            self._behind_since = None
        elif self._behind_since is None:
            self._behind_since = now
        elif now - self._behind_since >= LAG_S:
            raise SourceFailed(f"it is at block {tip.number}, and others at {newest}")

    async def _newest(self, now: float) -> int:
        """The newest block that is known of. Where nobody asks for it all the time, it is asked when it has been quiet for
        long."""
        if self._route.hears(now):
            return self._route.heads.agreed
        if now - self._moved_at < self._quiet_s:
            return 0
        return await self._blocks.newest()
