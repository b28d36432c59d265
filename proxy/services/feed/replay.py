"""What happened since a block, told to one listener, which then goes on with the others as if it had been there all the time.

A replay has a chain and a line of logs of its own. It walks from its first block towards the last one that the others were
told of, again and again while that moves on. When both are at the same block there is no seam: in that moment, without a
turn of the loop between, the listener joins the others. A reorganisation in the middle is nothing special: the walk takes
back what has to be taken back.

Logs of blocks that can no longer change are taken by ranges, filtered by the upstream already; only the young ones block by
block.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol, TypeVar

from proxy.chains.evm.log_filter import LogFilter
from proxy.core.head_chain import ChainBlock, HeadChain
from proxy.errors import Fault, Unavailable
from proxy.services.feed.blocks import BlockSource, BlockUnavailable, LogRecord
from proxy.services.feed.dispatch import LogDispatch, events_of
from proxy.services.feed.topics import FeedEvent, Listener, Topic
from proxy.services.feed.walk import ChainWalk
from proxy.services.rpc.networks import Route

T = TypeVar("T")

# Blocks that are taken one by one, where a network's own depth of finality is out of all proportion: too deep to be of use, or
# so shallow that an upstream which is a little behind may still be on another fork.
MOST_YOUNG = 128
LEAST_YOUNG = 32
# Blocks of one range of logs, and events that are told before the listener is asked for room.
RANGE = 500
BATCH = 256
# Attempts at each step before the replay is given up, and the pause between them.
ATTEMPTS = 6
PAUSE_S = 0.5
# How long the logs of a stride may take.
DRAIN_S = 60.0
GIVEN_UP = "no upstream gave a block of the replay: subscribe again from the last block you have heard of"
# While the others have not told yet what we have.
SOON_S = 0.02
# A first block so far ahead of the feed is waited for; one further away is taken for now.
NEAR = 64


class LiveFeed(Protocol):
    """The feed that a replay catches up with and then joins."""

    route: Route
    blocks: BlockSource
    walk: ChainWalk
    logs: LogDispatch

    def is_waiting(self, topic: Topic, listener: Listener) -> bool:
        """Whether the listener still waits to go live. False after it unsubscribed."""

    def listen(self, topic: Topic, listener: Listener) -> None:
        """Send the listener every event from now on."""

    def join(self, topic: Topic, listener: Listener, chain: HeadChain, logs: LogDispatch | None = None) -> None:
        """Go live after a replay that has reached the feed's own block."""

    def is_orphan(self, block: ChainBlock) -> bool:
        """Whether the block is no longer part of the chain."""


class Replay:
    """Passes events on to the listener until it unsubscribes."""

    def __init__(self, feed: LiveFeed, topic: Topic, listener: Listener) -> None:
        self._feed = feed
        self._blocks = feed.blocks
        self._topic = topic
        self._listener = listener

    def __repr__(self) -> str:
        return f"<Replay of {self._topic.kind}{'' if self._is_wanted else ', over'}>"

    @property
    def _is_wanted(self) -> bool:
        return self._feed.is_waiting(self._topic, self._listener)

    def on_events(self, events: Sequence[FeedEvent]) -> None:
        if self._is_wanted:
            self._listener.on_events(events)

    def on_end(self, why: Fault) -> None:
        if self._is_wanted:
            self._listener.on_end(why)

    async def room(self) -> None:
        await self._listener.room()

    async def wait_for(self, first: int) -> None:
        """A listener may know more than this feed, from another one that is a little ahead: it is not told of that again."""
        while self._is_wanted and (tip := self._feed.walk.chain.tip) is not None:
            if not 1 < first - tip.number <= NEAR:
                return
            await asyncio.sleep(SOON_S)

    async def run(self, first: int) -> None:
        """Until the listener is live, or has left. Unavailable where the upstreams fail us."""
        tip = self._feed.walk.chain.tip
        if tip is None or first > tip.number:
            self._feed.listen(self._topic, self._listener)
        elif isinstance(self._topic.detail, LogFilter):
            await self._replay_logs(self._topic.detail, await self._replay_old_logs(self._topic.detail, first))
        else:
            await self._replay_heads(first)

    async def _replay_heads(self, first: int) -> None:
        walk = ChainWalk(self._blocks, lambda _, added: self.on_events(events_of(added)), self._feed.walk.chain)
        await self._persist(walk.begin, first)
        while self._is_wanted:
            target = self._feed.walk.chain.tip
            if target is None or _same(walk.chain.tip, target):
                self._feed.join(self._topic, self._listener, walk.chain)
                return
            await self._persist(walk.towards, target)
            await asyncio.sleep(0)  # All of it may have been at hand: others have a turn too.
            await self.room()

    async def _replay_logs(self, wanted: LogFilter, first: int) -> None:
        line = LogDispatch(self._blocks, self._feed.is_orphan)
        line.add(wanted, self)
        walk = ChainWalk(self._blocks, line.enter, self._feed.walk.chain)
        await self._persist(walk.begin, first)
        while self._is_wanted:
            await self._drain(line)
            target = self._feed.logs.tip
            if target is not None and _same(line.tip, target):
                self._feed.join(self._topic, self._listener, walk.chain, line)
                return
            # They have not come as far as we have; or they are in the middle of taking blocks back.
            if target is None or walk.chain.knows(target.hash) or self._is_ahead_of(target, walk.chain.tip):
                await asyncio.sleep(SOON_S)
            else:
                await self._persist(walk.towards, target)
            await self.room()

    async def _drain(self, line: LogDispatch) -> None:
        try:
            async with asyncio.timeout(DRAIN_S):
                await line.drain()
        except TimeoutError:
            raise Unavailable(GIVEN_UP) from None

    def _is_ahead_of(self, target: ChainBlock, tip: ChainBlock | None) -> bool:
        """The others' logs have not come as far as ours, on the same chain."""
        return tip is not None and target.number < tip.number and not self._feed.is_orphan(tip)

    async def _replay_old_logs(self, wanted: LogFilter, first: int) -> int:
        """Up to the young blocks: the first of those."""
        young = min(max(self._feed.route.network.facts.finality_blocks, LEAST_YOUNG), MOST_YOUNG)
        while self._is_wanted and (tip := self._feed.walk.chain.tip) is not None:
            last = min(first + RANGE - 1, tip.number - young)
            if last < first:
                break
            await self._tell_logs(await self._persist(self._blocks.logs_in, first, last, wanted))
            first = last + 1
        return first

    async def _tell_logs(self, logs: list[LogRecord]) -> None:
        for start in range(0, len(logs), BATCH):
            self.on_events([FeedEvent(bytes(log.raw), log.block) for log in logs[start : start + BATCH]])
            await self.room()

    async def _persist(self, step: Callable[..., Awaitable[T]], *args: object) -> T:
        """The step's result, at the latest after some attempts."""
        for attempt in range(ATTEMPTS):
            if attempt:
                await asyncio.sleep(PAUSE_S)
            try:
                return await step(*args)
            except BlockUnavailable:
                continue
        raise Unavailable(GIVEN_UP)


def _same(one: ChainBlock | None, other: ChainBlock) -> bool:
    return one is not None and one.hash == other.hash
