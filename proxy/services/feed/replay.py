"""Replay the events since a block to one listener, which then joins the live feed without a gap or a repetition.

A replay has its own chain and its own log dispatch. It walks from its first block towards the last block that the feed
has published, repeatedly while that block moves on. When both are at the same block, the listener joins the feed in the same
turn of the event loop. Reorganisations need no special case: the walk reports the removed blocks.

Logs of final blocks are fetched in ranges that the upstream filters, only recent ones block by block.
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

# Bounds on the number of recent blocks fetched one by one, which is the network's finality depth. It may be too deep to be
# useful, or so shallow that an upstream slightly behind may still be on another fork.
MOST_RECENT = 128
LEAST_RECENT = 32
# Blocks in one range of logs, and events sent before waiting until the listener has room.
RANGE = 500
BATCH = 256
# Attempts at each step before the replay fails, and the pause between them.
ATTEMPTS = 6
PAUSE_S = 0.5
# How long the logs of a stride may take.
DRAIN_S = 60.0
GIVEN_UP = "no upstream returned a block of the replay: subscribe again from the last block you received"
# Pause while the feed has not yet published as far as the replay.
SOON_S = 0.02
# The replay waits for a first block at most this far ahead of the feed. One further ahead means: from now on.
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
        return f"<Replay of {self._topic.kind}{'' if self._is_active else ', over'}>"

    @property
    def _is_active(self) -> bool:
        return self._feed.is_waiting(self._topic, self._listener)

    def on_events(self, events: Sequence[FeedEvent]) -> None:
        if self._is_active:
            self._listener.on_events(events)

    def on_end(self, why: Fault) -> None:
        if self._is_active:
            self._listener.on_end(why)

    async def room(self) -> None:
        await self._listener.room()

    async def wait_for(self, first: int) -> None:
        """Wait until the feed reaches the first block. A client that moves over from another worker may be slightly ahead."""
        while self._is_active and (tip := self._feed.walk.chain.tip) is not None:
            if not 1 < first - tip.number <= NEAR:
                return
            await asyncio.sleep(SOON_S)

    async def run(self, first: int) -> None:
        """Replay until the listener is live or has unsubscribed. Raises Unavailable if the upstreams fail."""
        tip = self._feed.walk.chain.tip
        if tip is None or first > tip.number:
            self._feed.listen(self._topic, self._listener)
        elif isinstance(self._topic.detail, LogFilter):
            await self._replay_logs(self._topic.detail, await self._replay_old_logs(self._topic.detail, first))
        else:
            await self._replay_heads(first)

    async def _replay_heads(self, first: int) -> None:
        walk = ChainWalk(self._blocks, lambda _, added: self.on_events(events_of(added)), self._feed.walk.chain)
        await self._retry(walk.begin, first)
        while self._is_active:
            target = self._feed.walk.chain.tip
            if target is None or _same(walk.chain.tip, target):
                self._feed.join(self._topic, self._listener, walk.chain)
                return
            await self._retry(walk.towards, target)
            await asyncio.sleep(0)  # All blocks may have been cached: yield to the event loop.
            await self.room()

    async def _replay_logs(self, log_filter: LogFilter, first: int) -> None:
        dispatch = LogDispatch(self._blocks, self._feed.is_orphan)
        dispatch.add(log_filter, self)
        walk = ChainWalk(self._blocks, dispatch.enqueue, self._feed.walk.chain)
        await self._retry(walk.begin, first)
        while self._is_active:
            await self._drain(dispatch)
            target = self._feed.logs.tip
            if target is not None and _same(dispatch.tip, target):
                self._feed.join(self._topic, self._listener, walk.chain, dispatch)
                return
            # The feed has not published as far as the replay, or is in the middle of removing blocks.
            if target is None or walk.chain.knows(target.hash) or self._is_ahead_of(target, walk.chain.tip):
                await asyncio.sleep(SOON_S)
            else:
                await self._retry(walk.towards, target)
            await self.room()

    async def _drain(self, dispatch: LogDispatch) -> None:
        try:
            async with asyncio.timeout(DRAIN_S):
                await dispatch.drain()
        except TimeoutError:
            raise Unavailable(GIVEN_UP) from None

    def _is_ahead_of(self, target: ChainBlock, tip: ChainBlock | None) -> bool:
        """Whether the replay's logs are further than the feed's, on the same chain."""
        return tip is not None and target.number < tip.number and not self._feed.is_orphan(tip)

    async def _replay_old_logs(self, log_filter: LogFilter, first: int) -> int:
        """Replay the logs of final blocks in ranges and return the first recent block."""
        recent = min(max(self._feed.route.network.facts.finality_blocks, LEAST_RECENT), MOST_RECENT)
        while self._is_active and (tip := self._feed.walk.chain.tip) is not None:
            last = min(first + RANGE - 1, tip.number - recent)
            if last < first:
                break
            await self._send_logs(await self._retry(self._blocks.logs_in, first, last, log_filter))
            first = last + 1
        return first

    async def _send_logs(self, logs: list[LogRecord]) -> None:
        for start in range(0, len(logs), BATCH):
            self.on_events([FeedEvent(bytes(log.raw), log.block) for log in logs[start : start + BATCH]])
            await self.room()

    async def _retry(self, step: Callable[..., Awaitable[T]], *args: object) -> T:
        """Run the step until it succeeds. Raises Unavailable after `ATTEMPTS` failures."""
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
