"""Follow the head of a network from one source at a time, and switch when the source dies, goes silent or falls behind.

Heads from every source go through the same walk from the last published block. A change of sources therefore leaves no gap
and repeats nothing: the new source is first queried for its head, which covers the time in between.

A new source may be behind, or on a fork that the others have left. Until it reports our last block or a higher one, its
blocks are ignored. A head below all blocks in memory is ignored as well, except after a reset of the chain: it is accepted if
the network has no other upstream and this one reports it twice, or if the upstreams agree.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable

from proxy.core.head_chain import ChainBlock
from proxy.services.feed.blocks import BlockSource, BlockUnavailable, read_block
from proxy.services.feed.sources import FeedSource, FeedSources, SourceFailed
from proxy.services.feed.walk import ChainWalk
from proxy.services.rpc.networks import Route
from proxy.wire.upstream_stream import StreamLost, SubscriptionRefused
from proxy.wire.websocket_upstream import WebSocketUpstream

# Polls run three times per block within these bounds: fast chains are not flooded, slow ones are not reported late.
SHORTEST_POLL_S = 0.2
LONGEST_POLL_S = 2.0
# A source counts as behind once other upstreams have had a newer block for this long.
LAG_S = 3.0
# The other upstreams are queried after this many block times without a new block.
QUIET_BLOCKS = 3
# How long one stride over a gap may take.
STRIDE_S = 15.0
# Bounds memory: heads that wait for the walk. A dropped head is fetched later as part of a gap.
MAX_QUEUED = 64


class HeadInbox:
    """A queue of the newHeads notifications from a stream."""

    def __init__(self) -> None:
        self._queue: deque[bytes] = deque(maxlen=MAX_QUEUED)
        self._wake = asyncio.Event()
        self._lost = False

    def put(self, notification: bytes) -> None:
        self._queue.append(notification)
        self._wake.set()

    def lose(self) -> None:
        self._lost = True
        self._wake.set()

    async def take(self, timeout_s: float) -> bytes | None:
        """Return the next notification, or None on timeout. Raises SourceFailed once the stream is lost and the queue is
        empty."""
        try:
            async with asyncio.timeout(timeout_s):
                while not self._queue:
                    if self._lost:
                        raise SourceFailed("the connection was lost")
                    self._wake.clear()
                    await self._wake.wait()
        except TimeoutError:
            return None
        return self._queue.popleft()


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
        """`room` is awaited before each walk and applies back-pressure: it returns when more blocks can be queued."""
        self._route = route
        self._blocks = blocks
        self._walk = walk
        self._room = room
        self._clock = clock
        self._sources = FeedSources(route, subscribe_method="eth_subscribe", poll_method="eth_getBlockByNumber")
        block_time_s = route.network.facts.block_time_s
        self._poll_s = min(max(block_time_s / 3, SHORTEST_POLL_S), LONGEST_POLL_S)
        self._quiet_s = max(QUIET_BLOCKS * block_time_s, LAG_S)
        self._slack = int(LAG_S / block_time_s)
        # The current source: whether it has reported our last block or a higher one, when it last reported a new block, and
        # since when it is behind.
        self._caught_up = False
        self._moved_at = 0.0
        self._behind_since: float | None = None
        self.source: FeedSource | None = None

    def __repr__(self) -> str:
        return f"<HeadWatcher {self._route.network.id} by {self.source!r}>"

    async def run(self) -> None:
        """Supervised loop."""
        await self._sources.follow(self._follow, self._clock)

    async def _follow(self, source: FeedSource) -> None:
        self._moved_at = self._clock()
        self.source, self._caught_up, self._behind_since = source, False, None
        try:
            await (self._listen(source) if source.streams else self._poll(source))
        finally:
            self.source = None

    async def _listen(self, source: FeedSource) -> None:
        assert isinstance(source.upstream, WebSocketUpstream)
        inbox = HeadInbox()
        stream = source.upstream.stream(inbox.lose)
        try:
            await stream.open()
            await stream.subscribe("eth_subscribe", b'["newHeads"]', inbox.put)
            await self._fetch_head(source)
            while self._sources.is_best(source, self._clock()):
                notification = await inbox.take(self._poll_s)
                if notification is not None:
                    await self._on_head(read_block(notification), source)
                await self._check_lag()
        except (StreamLost, SubscriptionRefused) as exc:
            raise SourceFailed(str(exc)) from exc
        finally:
            await stream.close()

    async def _poll(self, source: FeedSource) -> None:
        while self._sources.is_best(source, self._clock()):
            await self._fetch_head(source)
            await self._check_lag()
            await asyncio.sleep(self._poll_s)

    async def _fetch_head(self, source: FeedSource) -> None:
        await self._on_head(await self._latest(source), source)

    async def _latest(self, source: FeedSource) -> ChainBlock:
        try:
            return await self._blocks.latest(source.upstream)
        except BlockUnavailable as exc:
            raise SourceFailed("it does not report its head") from exc

    async def _on_head(self, head: ChainBlock | None, source: FeedSource) -> None:
        if head is None:
            raise SourceFailed("it sent an invalid block")
        chain = self._walk.chain
        tip = chain.tip
        self._caught_up = self._caught_up or tip is None or head.number > tip.number or head.hash == tip.hash
        if head.number < chain.floor and self._route.only is not None:
            # Query again, since one old head proves no reset: several machines may share the upstream's address.
            head = await self._latest(source)
        if (not self._caught_up or head.number < chain.floor) and not self._may_be_reset(head):
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
            raise SourceFailed("its blocks do not connect to the last published block") from exc
        self._moved_at = self._clock()

    def _may_be_reset(self, head: ChainBlock) -> bool:
        heads = self._route.heads
        if self._route.only is not None:
            return True
        return self._route.state.hears(self._clock()) and 0 < heads.agreed <= head.number

    async def _check_lag(self) -> None:
        """Raise SourceFailed if other upstreams have had a newer block for a while."""
        now = self._clock()
        tip = self._walk.chain.tip
        newest = await self._newest(now)
        # A source that keeps reporting blocks may be a little late with each.
        slack = self._slack if now - self._moved_at < LAG_S else 0
        if tip is None or newest <= tip.number + slack:
            self._behind_since = None
        elif self._behind_since is None:
            self._behind_since = now
        elif now - self._behind_since >= LAG_S:
            raise SourceFailed(f"it is at block {tip.number}, other upstreams are at {newest}")

    async def _newest(self, now: float) -> int:
        """The newest block number of the network, from the tracker. Without a running tracker the upstreams are queried, but
        only after a long time without a new block."""
        if self._route.state.hears(now):
            return self._route.heads.agreed
        if now - self._moved_at < self._quiet_s:
            return 0
        return await self._blocks.newest()
