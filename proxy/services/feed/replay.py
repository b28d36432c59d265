"""Replay the events since a block to one listener, which then joins the live feed without a gap or a repetition.

A replay has its own chain and its own log dispatch. It walks from its first block towards the last block that the feed
has published, repeatedly while that block moves on. When both are at the same block, the listener joins the feed in the same
turn of the event loop. Reorganisations need no special case: the walk reports the removed blocks.

Logs of final blocks are fetched in ranges that the upstream filters, only recent ones block by block. The number of blocks in a
range is adapted to the size of the logs of the range before it, and the next range is fetched only after these logs are sent.
All that a replay holds is counted as memory of its account.

A replay makes its calls for its account, and its key pays for each of them before it is made. Without units it waits.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import Protocol, TypeVar

import msgspec

from proxy.chains.evm.log_filter import LogFilter
from proxy.core import jsonrpc
from proxy.core.head_chain import ChainBlock, HeadChain
from proxy.core.usage import Tally
from proxy.errors import Fault, RateLimited, Unavailable
from proxy.services.feed.blocks import BlockSource, BlockUnavailable, read_logs
from proxy.services.feed.dispatch import LogDispatch, events_of
from proxy.services.feed.feed_terms import FeedTerms
from proxy.services.feed.topics import FeedEvent, Listener, Topic
from proxy.services.feed.walk import ChainWalk
from proxy.services.rpc.networks import Route
from proxy.turn_queue import next_turn

T = TypeVar("T")

# Bounds on the number of recent blocks fetched one by one, which is the network's finality depth. It may be too deep to be
# useful, or so shallow that an upstream slightly behind may still be on another fork.
MOST_RECENT = 128
LEAST_RECENT = 32
# Blocks in the first range of logs, and at most.
FIRST_RANGE = 32
LONGEST_RANGE = 500
# Bytes that the logs of one range should have; a longer reply is fetched again in smaller ranges, if it has several blocks.
RANGE_BYTES = 512 * 1024
MOST_RANGE_BYTES = 4 * RANGE_BYTES
# Events and bytes sent before waiting until the listener has room.
BATCH = 256
BATCH_BYTES = 128 * 1024
# Memory of a replay besides the logs of a range: recent blocks, their logs that may have to be removed again, and the logs of
# the blocks that are fetched.
RESERVED_BYTES = 1024 * 1024
MAX_SENT_BYTES = RESERVED_BYTES // 2
FETCHED_AHEAD = 2
# Attempts at each step before the replay fails, and the pause between them.
ATTEMPTS = 6
PAUSE_S = 0.5
# How long it may take to fetch the logs of a recent block, including the wait for the units that they cost.
BLOCK_S = 60.0
# How long a replay waits for memory of its account.
MEMORY_S = 30.0
NO_MEMORY = (
    "this account holds too much memory for another replay: close other subscriptions, or read large replies faster"
)
GIVEN_UP = "no upstream returned a block of the replay: subscribe again from the last block you received"
# Pause while the feed has not yet published as far as the replay.
SOON_S = 0.02
# The replay waits for a first block at most this far ahead of the feed. One further ahead means: from now on.
NEAR = 64

_raws = msgspec.json.Decoder(list[msgspec.Raw]).decode


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

    def __init__(self, feed: LiveFeed, topic: Topic, listener: Listener, terms: FeedTerms) -> None:
        self._feed = feed
        self._topic = topic
        self._listener = listener
        self._terms = terms
        self._blocks = feed.blocks.paid_by(self, terms.fetches.of(listener.account))

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

    @property
    def account(self) -> str:
        return self._listener.account

    async def pay(self, units: int, tally: Tally) -> str:
        """Pay for a call in the account's turn, as soon as the key has the units."""
        await next_turn()
        while not self.charge(units, tally):
            await self.wait_for_units()
        return self.account

    def charge(self, units: int, tally: Tally) -> bool:
        return self._listener.charge(units, tally)

    async def wait_for_units(self) -> None:
        await self._listener.wait_for_units()

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
            return
        try:
            async with self._terms.replays.of(self.account), self._memory(RESERVED_BYTES):
                if isinstance(self._topic.detail, LogFilter):
                    await self._replay_logs(self._topic.detail, await self._replay_old_logs(self._topic.detail, first))
                else:
                    await self._replay_heads(first)
        except ExceptionGroup as failed:
            # Blocks are fetched by task groups, and each of their tasks may find that the key has no units left.
            raise _first_of(failed) from None

    @asynccontextmanager
    async def _memory(self, size: int) -> AsyncIterator[None]:
        """Hold memory of the account, as soon as it has some left."""
        account, memory = self.account, self._terms.replay_memory
        for _ in range(int(MEMORY_S / PAUSE_S)):
            if memory.take(account, size):
                break
            await asyncio.sleep(PAUSE_S)
        else:
            raise RateLimited(NO_MEMORY, retry_after_s=1)
        try:
            yield
        finally:
            memory.give_back(account, size)

    async def _replay_heads(self, first: int) -> None:
        walk = ChainWalk(self._blocks, lambda _, added: self.on_events(events_of(added)), self._feed.walk.chain)
        await self._retry(walk.begin, first)
        while self._is_active:
            target = self._feed.walk.chain.tip
            if target is None or _same(walk.chain.tip, target):
                self._feed.join(self._topic, self._listener, walk.chain)
                return
            await self._retry(walk.towards, target)
            await next_turn()  # All blocks may have been cached.
            await self.room()

    async def _replay_logs(self, log_filter: LogFilter, first: int) -> None:
        dispatch = LogDispatch(
            self._blocks,
            self._feed.is_orphan,
            fetched_ahead=FETCHED_AHEAD,
            max_sent_bytes=MAX_SENT_BYTES,
        )
        dispatch.add(log_filter, self)
        walk = ChainWalk(self._blocks, dispatch.enqueue, self._feed.walk.chain)
        await self._retry(walk.begin, first)
        while self._is_active:
            await self._drain(dispatch)
            target = self._feed.logs.tip
            # The feed is about to remove this block. Its logs may not be had any more, and a listener that did not get them
            # must not get their removal.
            if target is not None and self._feed.is_orphan(target):
                target = None
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
            await dispatch.drain(self.room, BLOCK_S)
        except TimeoutError:
            raise Unavailable(GIVEN_UP) from None

    def _is_ahead_of(self, target: ChainBlock, tip: ChainBlock | None) -> bool:
        """Whether the replay's logs are further than the feed's, on the same chain."""
        return tip is not None and target.number < tip.number and not self._feed.is_orphan(tip)

    async def _replay_old_logs(self, log_filter: LogFilter, first: int) -> int:
        """Replay the logs of final blocks in ranges and return the first recent block."""
        recent = min(max(self._feed.route.network.facts.finality_blocks, LEAST_RECENT), MOST_RECENT)
        blocks, failures = FIRST_RANGE, 0
        while self._is_active and (tip := self._feed.walk.chain.tip) is not None:
            last = min(first + blocks - 1, tip.number - recent)
            if last < first:
                break
            try:
                size = await self._replay_range(first, last, log_filter)
            except BlockUnavailable:
                # Perhaps the range has too many blocks or logs for the upstreams.
                blocks, failures = max(1, (last - first + 1) // 2), failures + (last == first)
                if failures >= ATTEMPTS:
                    raise Unavailable(GIVEN_UP) from None
                await asyncio.sleep(PAUSE_S if last == first else 0)
                continue
            blocks, failures = _next_range(last - first + 1, size), 0
            first = last + 1 if size <= MOST_RANGE_BYTES or last == first else first
        return first

    async def _replay_range(self, first: int, last: int, log_filter: LogFilter) -> int:
        """Send the logs of a range, unless they are too long. Returns their length in bytes."""
        logs = await self._blocks.logs_in(first, last, log_filter)
        size = len(logs)
        if size > MOST_RANGE_BYTES and last > first:
            return size
        try:
            raws = _raws(logs)
        except jsonrpc.NOT_JSON:
            raise BlockUnavailable(f"no logs of blocks {first} to {last}") from None
        async with self._memory(size):
            for batch in _batches(raws):
                records = read_logs(batch)
                if records is None:
                    raise Unavailable(GIVEN_UP)
                wanted = [log for log in records if first <= log.block <= last and log_filter.matches(log)]
                self.on_events([FeedEvent(bytes(log.raw), log.block) for log in wanted])
                await next_turn()
                await self.room()
        return size

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


def _first_of(failed: ExceptionGroup[Exception]) -> Exception:
    first = failed.exceptions[0]
    return _first_of(first) if isinstance(first, ExceptionGroup) else first


def _next_range(blocks: int, size: int) -> int:
    """The number of blocks in the next range, so that its logs have about RANGE_BYTES. `size`: the bytes of logs in the last
    `blocks` blocks."""
    return max(1, min(blocks * RANGE_BYTES // max(1, size), 2 * blocks, LONGEST_RANGE))


def _batches(raws: Sequence[msgspec.Raw]) -> Iterator[bytes]:
    """The logs as JSON arrays of a few logs each."""
    batch, size = [], 0
    for raw in raws:
        batch.append(raw)
        size += len(raw)
        if len(batch) >= BATCH or size >= BATCH_BYTES:
            yield b"[%b]" % b",".join(map(bytes, batch))
            batch, size = [], 0
    if batch:
        yield b"[%b]" % b",".join(map(bytes, batch))


def _same(one: ChainBlock | None, other: ChainBlock) -> bool:
    return one is not None and one.hash == other.hash
