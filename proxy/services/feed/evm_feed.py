"""The feed of an evm network: one look at the chain for all listeners.

The first block that is seen is where the feed begins: it is not told, all after it are. Whoever subscribes waits until
there is such a block, so that what happens after the confirmation is told.
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
from proxy.services.feed.head_watcher import HeadWatcher
from proxy.services.feed.pending import PendingTransactions
from proxy.services.feed.replay import Replay
from proxy.services.feed.syncing import SyncingStatus
from proxy.services.feed.topics import MOST_TOPICS, Listener, Topic, refusal
from proxy.services.feed.walk import ChainWalk
from proxy.services.rpc.networks import Route
from proxy.tasks import until_set

# How long a subscription waits for the first block of a feed that begins with it.
READY_S = 10.0
# Blocks that a replay may go back; and how many replays run at a time, others wait for their turn.
REPLAY_BLOCKS = 10_000
REPLAYS_AT_ONCE = 16


class EvmFeed:
    def __init__(self, route: Route, *, replay_blocks: int = REPLAY_BLOCKS) -> None:
        self.route = route
        self._replay_blocks = replay_blocks
        self.blocks = BlockSource(route)
        self.walk = ChainWalk(self.blocks, self._change)
        self.heads = HeadDispatch()
        self.logs = LogDispatch(self.blocks, self.is_orphan)
        self.lookout = HeadWatcher(route, self.blocks, self.walk, room=self.logs.room)
        self.pending = PendingTransactions(route, self.blocks)
        self.syncing = SyncingStatus(self.blocks)
        self._ready = asyncio.Event()
        # Who waits for the first block, or is in a replay: the chain is followed for them too.
        self._waiting: dict[tuple[Topic, Listener], asyncio.Timeout] = {}
        self._replays = asyncio.Semaphore(REPLAYS_AT_ONCE)
        self._wanted = Demand(lambda: bool(self.heads.listeners or self.logs.filters or self._waiting))

    def __repr__(self) -> str:
        return f"<EvmFeed {self.route.network.id}: {self.heads!r}, {self.logs!r}, {self.walk.chain!r}>"

    @property
    def is_ready(self) -> bool:
        return self._ready.is_set()

    # Listeners

    async def subscribe(self, topic: Topic, listener: Listener) -> None:
        match topic.kind:
            case "newHeads" | "logs":
                async with self._wait(topic, listener):
                    await self._until_ready()
                    self._check_room(topic)
                    self.listen(topic, listener)
            case "newPendingTransactions":
                await self.pending.subscribe(listener, full=topic.detail is True)
            case "syncing":
                self.syncing.add(listener)
            case _:
                raise refusal(f"there is no subscription {topic.kind[:40]!r}: {_KINDS}", jsonrpc.INVALID_PARAMS)

    async def subscribe_from(self, topic: Topic, listener: Listener, from_block: int) -> None:
        self.check_from(topic, from_block)
        async with self._wait(topic, listener):
            await self._until_ready()
            self.check_from(topic, from_block)
            self._check_room(topic)
            replay = Replay(self, topic, listener)
            await replay.wait_for(from_block)
            async with self._replays:
                await replay.run(from_block)

    def check_from(self, topic: Topic, from_block: int) -> None:
        if topic.kind not in ("newHeads", "logs"):
            raise refusal(
                f'member "fromBlock" has no meaning for {topic.kind[:40]}: only newHeads and logs are replayed'
            )
        tip = self.walk.chain.tip.number if self.walk.chain.tip is not None else self.route.heads.tip
        if tip - from_block >= self._replay_blocks:
            raise refusal(
                f'member "fromBlock" is {tip - from_block + 1} blocks back: at most {self._replay_blocks} are replayed; '
                f"the oldest possible is {tip - self._replay_blocks + 1:#x} (older logs: eth_getLogs)"
            )

    def unsubscribe(self, topic: Topic, listener: Listener) -> None:
        if (patience := self._waiting.pop((topic, listener), None)) is not None:
            patience.reschedule(asyncio.get_running_loop().time())
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
        self._wanted.changed()

    @asynccontextmanager
    async def _wait(self, topic: Topic, listener: Listener) -> AsyncIterator[None]:
        """A listener that is not live yet. When it unsubscribes, its time is up."""
        who = (topic, listener)
        patience = asyncio.timeout(None)
        try:
            async with patience:
                self._waiting[who] = patience
                self._wanted.changed()
                yield
        except TimeoutError:
            if not patience.expired():
                raise
        finally:
            if self._waiting.get(who) is patience:
                del self._waiting[who]
            self._wanted.changed()

    def is_waiting(self, topic: Topic, listener: Listener) -> bool:
        return (topic, listener) in self._waiting

    def listen(self, topic: Topic, listener: Listener) -> None:
        """Live from now on, unless it has left while it waited."""
        if not self.is_waiting(topic, listener):
            return
        if isinstance(topic.detail, LogFilter):
            self.logs.add(topic.detail, listener)
        else:
            self.heads.listeners[listener] = None

    def join(self, topic: Topic, listener: Listener, chain: HeadChain, logs: LogDispatch | None = None) -> None:
        """Live from now on, after a replay that has come to where we are: its past is ours."""
        if not self.is_waiting(topic, listener):
            return
        self.walk.chain.put_under(tuple(chain.newest_first()))
        if logs is not None and isinstance(topic.detail, LogFilter):
            self.logs.join(topic.detail, listener, logs)
        else:
            self.listen(topic, listener)

    def _check_room(self, topic: Topic) -> None:
        if isinstance(topic.detail, LogFilter) and self.logs.filters >= MOST_TOPICS:
            raise Unavailable("too many different filters are subscribed to at the moment")

    async def _until_ready(self) -> None:
        if not await until_set(self._ready, within_s=READY_S):
            raise Unavailable(f"no upstream of {self.route.network.id} tells its head at the moment")

    # The chain

    async def run(self) -> None:
        """A supervised loop. Whatever fails, what was told is remembered, and the next run goes on from there."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._wanted.run(self._follow, self._forget))
            group.create_task(self.pending.run())
            group.create_task(self.syncing.run())

    async def _follow(self) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self.logs.run())
            group.create_task(self.lookout.run())

    def _forget(self) -> None:
        """Nobody listens: the next one begins anew."""
        self._ready.clear()
        self.walk.chain.clear()
        self.logs.clear()
        self.blocks.clear()

    def _change(self, removed: Sequence[ChainBlock], added: Sequence[ChainBlock]) -> None:
        source = self.lookout.source.upstream if self.lookout.source is not None else None
        # First: whoever is told of a block must not be told then, by a call, what was true before it.
        if source is not None:
            self.route.compare_number(added[-1].number, source.health, time.monotonic())
        if removed:
            self.route.forget_recent()
        if self._ready.is_set():
            self.heads.tell(added)
        self.logs.enter(removed, added, source)
        self._ready.set()

    def is_orphan(self, block: ChainBlock) -> bool:
        chain = self.walk.chain
        return block.number >= chain.floor and not chain.knows(block.hash)


_KINDS = "newHeads, logs, newPendingTransactions and syncing are"
