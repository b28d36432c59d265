"""The feed of an EVM network: it follows the chain once for all listeners.

The feed starts at the first head it gets: that block is not published, all later ones are. A subscription is confirmed only
once there is such a block, so that no event after the confirmation is missed.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from proxy.chains.evm.log_filter import LogFilter
from proxy.core import jsonrpc
from proxy.core.head_chain import ChainBlock, HeadChain
from proxy.errors import Unavailable
from proxy.services.feed.blocks import BlockSource
from proxy.services.feed.demand import Demand
from proxy.services.feed.dispatch import HeadDispatch, LogDispatch
from proxy.services.feed.feed_terms import FeedTerms
from proxy.services.feed.head_watcher import HeadWatcher
from proxy.services.feed.pending import PendingTransactions
from proxy.services.feed.replay import Replay
from proxy.services.feed.syncing import SyncingStatus
from proxy.services.feed.topics import Listener, Topic, refusal
from proxy.services.feed.walk import ChainWalk
from proxy.services.rpc.networks import Route
from proxy.tasks import until_set

# How long a subscription waits for the first block of a feed that has just started.
READY_S = 10.0
# Blocks that a replay may go back.
REPLAY_BLOCKS = 10_000


class EvmFeed:
    def __init__(self, route: Route, terms: FeedTerms, *, replay_blocks: int = REPLAY_BLOCKS) -> None:
        self.route = route
        self._terms = terms
        self._replay_blocks = replay_blocks
        self.blocks = BlockSource(route)
        self.walk = ChainWalk(self.blocks, self._change)
        self.heads = HeadDispatch()
        self.logs = LogDispatch(self.blocks, self.is_orphan)
        self._head_watcher = HeadWatcher(route, self.blocks, self.walk, room=self.logs.room)
        self.pending = PendingTransactions(route, self.blocks)
        self.syncing = SyncingStatus(self.blocks)
        self._ready = asyncio.Event()
        # Listeners that wait for the first block or are in a replay. They count as demand too.
        self._waiting: dict[tuple[Topic, Listener], asyncio.Timeout] = {}
        self._demand = Demand(lambda: bool(self.heads.listeners or self.logs.filters or self._waiting))

    def __repr__(self) -> str:
        return f"<EvmFeed {self.route.network.id}: {self.heads!r}, {self.logs!r}, {self.walk.chain!r}>"

    # Listeners

    async def subscribe(self, topic: Topic, listener: Listener) -> None:
        match topic.kind:
            case "newHeads" | "logs":
                async with self._wait(topic, listener):
                    await self._until_ready()
                    self.listen(topic, listener)
            case "newPendingTransactions":
                await self.pending.subscribe(listener, full=topic.detail is True)
            case "syncing":
                self.syncing.add(listener)
            case _:
                raise refusal(
                    f"unknown subscription {topic.kind[:40]!r}: use one of {', '.join(_KINDS)}", jsonrpc.INVALID_PARAMS
                )

    async def subscribe_from(self, topic: Topic, listener: Listener, from_block: int) -> None:
        self.check_from(topic, from_block)
        async with self._wait(topic, listener):
            await self._until_ready()
            self.check_from(topic, from_block)
            replay = Replay(self, topic, listener, self._terms)
            await replay.wait_for(from_block)
            await replay.run(from_block)

    def check_from(self, topic: Topic, from_block: int) -> None:
        if topic.kind not in ("newHeads", "logs"):
            raise refusal(
                f'member "fromBlock" is not supported for {topic.kind[:40]}: only newHeads and logs can be replayed'
            )
        tip = self.walk.chain.tip.number if self.walk.chain.tip is not None else self.route.heads.tip
        if tip - from_block >= self._replay_blocks:
            raise refusal(
                f'member "fromBlock" is {tip - from_block + 1} blocks back: at most {self._replay_blocks} can be replayed; '
                f"the oldest possible block is {tip - self._replay_blocks + 1:#x} (for older logs use eth_getLogs)"
            )

    def unsubscribe(self, topic: Topic, listener: Listener) -> None:
        if (timeout := self._waiting.pop((topic, listener), None)) is not None:
            timeout.reschedule(asyncio.get_running_loop().time())
        match topic.kind:
            case "newHeads":
                self.heads.listeners.pop(listener, None)
            case "logs":
                assert isinstance(topic.detail, LogFilter)
                self.logs.remove(topic.detail, listener)
            case "newPendingTransactions":
                self.pending.remove(listener, full=topic.detail is True)
            case _:
                self.syncing.remove(listener)
        self._demand.changed()

    @asynccontextmanager
    async def _wait(self, topic: Topic, listener: Listener) -> AsyncIterator[None]:
        """Register a listener that is not live yet. `unsubscribe` ends the wait by letting its timeout expire."""
        entry = (topic, listener)
        timeout = asyncio.timeout(None)
        try:
            async with timeout:
                self._waiting[entry] = timeout
                self._demand.changed()
                yield
        except TimeoutError:
            if not timeout.expired():
                raise
        finally:
            if self._waiting.get(entry) is timeout:
                del self._waiting[entry]
            self._demand.changed()

    def is_waiting(self, topic: Topic, listener: Listener) -> bool:
        return (topic, listener) in self._waiting

    def listen(self, topic: Topic, listener: Listener) -> None:
        """Send the listener every event from now on, unless it unsubscribed while it waited."""
        if not self.is_waiting(topic, listener):
            return
        if isinstance(topic.detail, LogFilter):
            self.logs.add(topic.detail, listener)
        else:
            self.heads.listeners[listener] = None

    def join(self, topic: Topic, listener: Listener, chain: HeadChain, logs: LogDispatch | None = None) -> None:
        """Go live after a replay that has reached the feed's own block. The replay's older blocks become part of the feed's
        chain, so that a reorganisation can remove them."""
        if not self.is_waiting(topic, listener):
            return
        self.walk.chain.put_under(tuple(chain.newest_first()))
        if logs is not None and isinstance(topic.detail, LogFilter):
            self.logs.join(topic.detail, listener, logs)
        else:
            self.listen(topic, listener)

    async def _until_ready(self) -> None:
        if not await until_set(self._ready, within_s=READY_S):
            raise Unavailable(f"no upstream of {self.route.network.id} reports its head: try again later")

    # The chain

    async def run(self) -> None:
        """Supervised loop. After a failure the next run resumes at the last published block."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._demand.run(self._follow, self._reset))
            group.create_task(self.pending.run())
            group.create_task(self.syncing.run())

    async def _follow(self) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self.logs.run())
            group.create_task(self._head_watcher.run())

    def _reset(self) -> None:
        """Drop all state after the last listener left. The next one starts the feed from scratch."""
        self._ready.clear()
        self.walk.chain.clear()
        self.logs.clear()
        self.blocks.clear()

    def _change(self, removed: Sequence[ChainBlock], added: Sequence[ChainBlock]) -> None:
        watched = self._head_watcher.source
        source = watched.upstream if watched is not None else None
        # First, so that a client that has received a head gets no cached reply from before it.
        if source is not None:
            newest = added[-1]
            self.route.state.announce((newest.number, newest.hash, newest.parent), source.health, time.monotonic())
        if removed:
            self.route.state.forget_recent()
        if self._ready.is_set():
            self.heads.publish(added)
        self.logs.enqueue(removed, added, source)
        self._ready.set()

    def is_orphan(self, block: ChainBlock) -> bool:
        chain = self.walk.chain
        return block.number >= chain.floor and not chain.knows(block.hash)


_KINDS = ("newHeads", "logs", "newPendingTransactions", "syncing")
