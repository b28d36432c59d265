"""Publish heads and logs to their listeners.

*Heads* are published as soon as the chain changes. *Logs* have to be fetched first, so they follow behind: added and removed
blocks wait in a queue, and each is published once its logs are there, in order and without gaps. A block that is removed
before its logs arrive is not published at all. If no upstream has the logs of a block and the queue is full, the
subscriptions to logs end with an error, so that heads can go on.

Every block that joins the chain gets a *position*, an increasing number. A listener of logs has two of them: it receives
blocks after `since`; and it receives the removal of a block after `seen`, because it received that block here or in a replay.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from proxy import telemetry
from proxy.chains.evm.log_filter import LogFilter, LogFilterIndex
from proxy.core.head_chain import DEPTH, ChainBlock
from proxy.errors import Unavailable
from proxy.services.feed.blocks import BlockSource, BlockUnavailable, LogRecord, read_logs
from proxy.services.feed.topics import FeedEvent, Listener
from proxy.turn_queue import next_turn
from proxy.wire.upstream import Upstream

log = logging.getLogger("penstock.feed")

# Blocks whose logs are fetched ahead, concurrently.
FETCHED_AHEAD = 8
# Bounds memory: blocks that wait for their logs. Beyond that, heads wait too.
MAX_QUEUED = 10_000
# Logs matched before yielding to the event loop, and comparisons with filters that are too large for the index: a few
# milliseconds.
LOGS_PER_TURN = 500
CHECKS_PER_TURN = 500
# Listeners that receive a head before yielding to the event loop: a tenth of a millisecond.
LISTENERS_PER_TURN = 128
# Bounds memory: published logs are remembered, oldest dropped first, so that a reorganisation can send them as removed.
MAX_SENT_BYTES = 32 * 1024 * 1024
FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 2.0
# Retries of an empty reply if the block's bloom filter contains logs. Limited, because on some networks the filter is
# meaningless.
EMPTY_RETRIES = 3
# Attempts before the block's receipts are tried first, and attempts before the operator is warned.
PLAIN_ATTEMPTS = 2
QUIET_ATTEMPTS = 6

_TRUE = msgspec.Raw(b"true")
_members = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


class HeadDispatch:
    """Publishes heads, in order, over several turns of the event loop if there are many listeners. A listener receives the
    heads that come after it joined."""

    def __init__(self) -> None:
        self.listeners: dict[Listener, None] = {}
        # Events being published, oldest first, each with the listeners that still have to receive them.
        self._unsent: deque[tuple[list[FeedEvent], Iterator[Listener]]] = deque()

    def __repr__(self) -> str:
        return f"<HeadDispatch {len(self.listeners)} listeners>"

    def publish(self, added: Sequence[ChainBlock]) -> None:
        if not self.listeners:
            return
        self._unsent.append((events_of(added), iter(tuple(self.listeners))))
        if len(self._unsent) == 1:
            self._publish_some()

    def _publish_some(self) -> None:
        events, listeners = self._unsent[0]
        some = tuple(itertools.islice(listeners, LISTENERS_PER_TURN))
        if len(some) < LISTENERS_PER_TURN:
            self._unsent.popleft()
        # Scheduled first: an exception of one listener must not stop the others from receiving the event.
        if self._unsent:
            asyncio.get_running_loop().call_soon(self._publish_some)
        for listener in some:
            if listener in self.listeners:
                listener.on_events(events)


def events_of(blocks: Sequence[ChainBlock]) -> list[FeedEvent]:
    return [FeedEvent(block.head, block.number) for block in blocks]


@dataclass(slots=True)
class SentBlock:
    """A published block and those of its logs that matched a filter, by their place in the block. `size` is their length in
    bytes. Filters are matched again to remove them: lists of logs for each filter would take a multiple of the memory."""

    position: int
    block: ChainBlock
    logs: dict[int, bytes] = field(default_factory=dict)
    size: int = 0


@dataclass(slots=True)
class _QueuedBlock:
    """A block that waits to be published, or to be published as removed."""

    block: ChainBlock
    position: int
    removed: bool = False
    source: Upstream | None = None
    fetching: asyncio.Task[list[LogRecord] | None] | None = None


class LogDispatch:
    """Publishes logs. `is_orphan` returns whether a block is no longer part of the chain."""

    def __init__(
        self,
        blocks: BlockSource,
        is_orphan: Callable[[ChainBlock], bool],
        *,
        fetched_ahead: int = FETCHED_AHEAD,
        max_sent_bytes: int = MAX_SENT_BYTES,
    ) -> None:
        self._blocks = blocks
        self._is_orphan = is_orphan
        self._fetched_ahead = fetched_ahead
        self._max_sent_bytes = max_sent_bytes
        self._index = LogFilterIndex()
        self._listeners: dict[LogFilter, dict[Listener, tuple[int, int]]] = {}
        # Filters without listeners that are still in the index.
        self._unused: deque[LogFilter] = deque()
        self._sent: deque[SentBlock] = deque()
        self._queue: deque[_QueuedBlock] = deque()
        self._wake = asyncio.Event()
        self._has_room = asyncio.Event()
        self._has_room.set()
        self._sent_bytes = 0
        # The position of the newest block in the queue.
        self.position = 0

    def __repr__(self) -> str:
        return f"<LogDispatch {len(self._listeners)} filters, {len(self._queue)} blocks queued>"

    @property
    def tip(self) -> ChainBlock | None:
        """The last published block."""
        return self._sent[-1].block if self._sent else None

    @property
    def filters(self) -> int:
        """The number of distinct filters with listeners."""
        return len(self._listeners)

    def clear(self) -> None:
        self._sent.clear()
        self._queue.clear()
        self._has_room.set()
        self._sent_bytes = 0

    # Listeners

    def add(self, log_filter: LogFilter, listener: Listener) -> None:
        """Send the listener the logs of every block queued from now on."""
        self._add(log_filter, listener, self.position, self.position)

    def join(self, log_filter: LogFilter, listener: Listener, other: LogDispatch) -> None:
        """Take the listener over from a replay's dispatch that has published everything up to the same block."""
        seen = since = self._sent[-1].position
        mine = reversed(tuple(self._sent))
        for others in reversed(other._sent):
            sent = next(mine, None) or self._put_under(others.block)
            if sent is None or sent.block.hash != others.block.hash:
                break
            seen = sent.position - 1
            self._remember(sent, others.logs)
        self._forget_oldest()
        self._add(log_filter, listener, since, seen)

    def _put_under(self, block: ChainBlock) -> SentBlock | None:
        """Remember a block from before this dispatch began."""
        oldest = self._sent[0]
        if len(self._sent) >= DEPTH or oldest.block.parent != block.hash:
            return None
        self._sent.appendleft(SentBlock(oldest.position - 1, block))
        return self._sent[0]

    def _add(self, log_filter: LogFilter, listener: Listener, since: int, seen: int) -> None:
        self._index.add(log_filter)
        self._listeners.setdefault(log_filter, {})[listener] = (since, seen)

    def remove(self, log_filter: LogFilter, listener: Listener) -> None:
        listeners = self._listeners.get(log_filter)
        if listeners is None:
            return
        listeners.pop(listener, None)
        if not listeners:
            del self._listeners[log_filter]
            self._unused.append(log_filter)
            if len(self._unused) == 1:
                asyncio.get_running_loop().call_soon(self._drop_unused)

    def _drop_unused(self) -> None:
        """Remove one filter from the index in each turn of the event loop: a large one takes a millisecond, and a socket that
        closes may have had many."""
        log_filter = self._unused.popleft()
        if self._unused:
            asyncio.get_running_loop().call_soon(self._drop_unused)
        if log_filter not in self._listeners:
            self._index.remove(log_filter)

    # Blocks

    def enqueue(
        self, removed: Sequence[ChainBlock], added: Sequence[ChainBlock], source: Upstream | None = None
    ) -> None:
        """Queue a change of the chain."""
        for block in removed:
            self._queue.append(_QueuedBlock(block, 0, removed=True))
        for block in added:
            self.position += 1
            self._queue.append(_QueuedBlock(block, self.position, source=source))
        self._wake.set()
        if len(self._queue) >= MAX_QUEUED:
            self._has_room.clear()

    async def room(self) -> None:
        """Return when the queue can take more blocks."""
        await self._has_room.wait()

    async def run(self) -> None:
        """Loop. It resumes the work that a cancelled run left in the queue."""
        for queued in self._queue:
            queued.fetching = None
        async with asyncio.TaskGroup() as group:
            while True:
                while self._queue:
                    await self._publish_next(group)
                self._wake.clear()
                await self._wake.wait()

    async def drain(self, room: Callable[[], Awaitable[None]], block_s: float) -> None:
        """Publish everything in the queue, one block after the other, waiting for room after each. Raises TimeoutError if a
        block takes longer than `block_s`."""
        now = asyncio.get_running_loop().time
        async with asyncio.timeout(block_s) as limit, asyncio.TaskGroup() as group:
            while self._queue:
                await self._publish_next(group)
                limit.reschedule(None)
                await room()
                limit.reschedule(now() + block_s)

    async def _publish_next(self, group: asyncio.TaskGroup) -> None:
        queued = self._queue[0]
        if len(self._queue) < MAX_QUEUED:
            self._has_room.set()
        if queued.removed:
            self._queue.popleft()
            self._publish_removal(queued.block)
            return
        logs = await self._logs_of(queued, group)
        # The event loop does not run between here and the start of publishing, so a listener joins before or after it.
        self._queue.popleft()
        await self._publish(SentBlock(queued.position, queued.block), logs)

    async def _logs_of(self, queued: _QueuedBlock, group: asyncio.TaskGroup) -> list[LogRecord]:
        while self._listeners:
            for ahead in itertools.islice(self._queue, self._fetched_ahead):
                if not ahead.removed and ahead.fetching is None:
                    ahead.fetching = group.create_task(self._fetch(ahead.block, ahead.source))
            assert queued.fetching is not None
            logs = await queued.fetching
            if logs is not None:
                return logs
            queued.fetching = None
        return []

    async def _fetch(self, block: ChainBlock, source: Upstream | None) -> list[LogRecord] | None:
        """Fetch the logs, however long it takes. Returns an empty list if the block was removed meanwhile, and None if there
        are no listeners any more."""
        pause_s, empty_replies, attempt = FIRST_PAUSE_S, 0, 0
        while self._listeners:
            attempt += 1
            try:
                logs = await self._try_fetch(block, source, attempt)
            except BlockUnavailable:
                if self._is_orphan(block):
                    return []
                self._note_failure(block, attempt)
            else:
                empty_replies += 1
                if logs or not block.has_logs or empty_replies > EMPTY_RETRIES:
                    return logs
            await asyncio.sleep(pause_s)
            pause_s = min(pause_s * 2, LONGEST_PAUSE_S)
        return None

    async def _try_fetch(self, block: ChainBlock, source: Upstream | None, attempt: int) -> list[LogRecord]:
        """Only the first attempt prefers the source for eth_getLogs."""
        if attempt > PLAIN_ATTEMPTS:
            try:
                return await self._blocks.receipt_logs_of(block, source)
            except BlockUnavailable:
                pass
        return await self._blocks.logs_of(block, source if attempt == 1 else None)

    def _note_failure(self, block: ChainBlock, attempt: int) -> None:
        """Warn once that all logs wait for this block, and give up on it when the queue is full."""
        if attempt == QUIET_ATTEMPTS:
            telemetry.feed_blocks_stuck_total.labels(self._blocks.network).inc()
            extra = {"network": self._blocks.network, "block": block.number, "waiting": len(self._queue)}
            log.warning("no upstream has the logs of a block: log subscriptions wait for it", extra=extra)
        is_first = bool(self._queue) and self._queue[0].block is block
        if attempt >= QUIET_ATTEMPTS and is_first and not self._has_room.is_set():
            self._give_up(block)

    def _give_up(self, block: ChainBlock) -> None:
        message = (
            f"no upstream has the logs of block {block.number}: subscribe again with fromBlock {hex(block.number)}"
        )
        for log_filter, listeners in [*self._listeners.items()]:
            for listener in [*listeners]:
                self.remove(log_filter, listener)
                listener.on_end(Unavailable(message))

    async def _publish(self, sent: SentBlock, logs: list[LogRecord]) -> None:
        # Recorded first, because a listener may join from a replay, which has seen this block, while it is being published.
        self._sent.append(sent)
        if len(self._sent) > DEPTH:
            self._sent_bytes -= self._sent.popleft().size
        start = 0
        while start < len(logs):
            if start:
                await next_turn()
            some = logs[start : start + max(1, min(LOGS_PER_TURN, CHECKS_PER_TURN // (1 + self._index.checked)))]
            self._publish_slice(sent, some, start)
            start += len(some)
        self._forget_oldest()

    def _publish_slice(self, sent: SentBlock, logs: list[LogRecord], start: int) -> None:
        """Publish logs of a block. `start`: the index of the first of them in the block."""
        by_number: dict[int, FeedEvent] = {}
        for log_filter, matching in self._index.match(logs).items():
            for number in matching:
                if number not in by_number:
                    by_number[number] = FeedEvent(bytes(logs[number].raw), sent.block.number)
            events = [by_number[number] for number in matching]
            for listener, (since, _) in tuple(self._listeners.get(log_filter, {}).items()):
                if since < sent.position:
                    listener.on_events(events)
        self._remember(sent, {start + number: event.result for number, event in by_number.items()})

    def _remember(self, sent: SentBlock, logs: Mapping[int, bytes]) -> None:
        """Remember logs of a published block, so that they can be removed."""
        new = {place: log for place, log in logs.items() if place not in sent.logs}
        size = sum(map(len, new.values()))
        sent.logs |= new
        sent.size += size
        self._sent_bytes += size

    def _publish_removal(self, block: ChainBlock) -> None:
        if not self._sent or self._sent[-1].block.hash != block.hash:
            return
        sent = self._sent.pop()
        self._sent_bytes -= sent.size
        raws = [raw for _, raw in sorted(sent.logs.items())]
        removed = [as_removed(FeedEvent(raw, block.number)) for raw in raws]
        logs = read_logs(b"[%b]" % b",".join(raws)) or []
        for log_filter, matching in self._index.match(logs).items():
            events = [removed[number] for number in reversed(matching)]
            for listener, (_, seen) in tuple(self._listeners.get(log_filter, {}).items()):
                if seen < sent.position:
                    listener.on_events(events)

    def _forget_oldest(self) -> None:
        for sent in self._all_but_newest():
            if self._sent_bytes <= self._max_sent_bytes:
                return
            self._sent_bytes -= sent.size
            sent.logs, sent.size = {}, 0

    def _all_but_newest(self) -> Iterator[SentBlock]:
        return itertools.islice(self._sent, len(self._sent) - 1)


def as_removed(event: FeedEvent) -> FeedEvent:
    """The same log with `removed` set."""
    members = _members(event.result)
    members["removed"] = _TRUE
    return FeedEvent(msgspec.json.encode(members), event.block)
