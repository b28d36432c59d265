"""Who is told of heads and of logs, and how far each of the two lines is.

*Heads* are told from the moment on in which the chain changes. *Logs* have to be fetched first, so they follow behind: blocks
wait in a queue, taken back ones too, and each is told when its logs are there, never before the one ahead of it and never
skipped. A block that was taken back before its logs came is not told at all. Where nobody has the logs of a block and the
queue is full, the listeners of logs are told that it ends here: the heads must go on.

Every block that becomes part of the chain has a *place*, counted up. A listener of logs has two places of its own: it is
told of blocks after `since`; and it is told that a block was taken back if the block comes after `seen`, since it heard of
that block here or in a replay before.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import msgspec

from proxy import telemetry
from proxy.chains.evm.log_filter import LogFilter, LogFilterIndex
from proxy.core.head_chain import DEPTH, ChainBlock
from proxy.errors import Unavailable
from proxy.services.feed.blocks import BlockSource, BlockUnavailable, LogRecord
from proxy.services.feed.topics import FeedEvent, Listener
from proxy.wire.upstream import Upstream

log = logging.getLogger("penstock.feed")

# Blocks whose logs are fetched at the same time.
AHEAD = 8
# Blocks that wait for their logs: beyond that the heads wait too.
MOST_WAITING = 10_000
# Logs that are matched before others have a turn of the loop: a few milliseconds.
SLICE = 500
# Listeners that are told of a head before others have a turn: a tenth of a millisecond.
LISTENERS = 128
# What is kept of logs that were told, to be able to take them back: the oldest are forgotten first.
KEPT_BYTES = 32 * 1024 * 1024
FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 2.0
# How often an empty answer is doubted when the block's bloom filter says that there are logs. Some networks' filters say
# nothing.
DOUBTS = 3
# Attempts after which the block's receipts are asked for first; and after which an operator should know.
PLAIN_TRIES = 2
QUIET_TRIES = 6

_TRUE = msgspec.Raw(b"true")
_members = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


class HeadDispatch:
    """Listeners of heads. Each hears of what comes after it joined, in order; many of them hear of it in several turns."""

    def __init__(self) -> None:
        self.listeners: dict[Listener, None] = {}
        # What is being told, the oldest first, and to whom it still has to be.
        self._telling: deque[tuple[list[FeedEvent], Iterator[Listener]]] = deque()

    def __repr__(self) -> str:
        return f"<HeadDispatch {len(self.listeners)} listeners>"

    def tell(self, added: Sequence[ChainBlock]) -> None:
        if not self.listeners:
            return
        self._telling.append((events_of(added), iter(tuple(self.listeners))))
        if len(self._telling) == 1:
            self._tell_some()

    def _tell_some(self) -> None:
        events, listeners = self._telling[0]
        some = tuple(itertools.islice(listeners, LISTENERS))
        if len(some) < LISTENERS:
            self._telling.popleft()
        # First: what goes wrong with one listener must not end the telling for all.
        if self._telling:
            asyncio.get_running_loop().call_soon(self._tell_some)
        for listener in some:
            if listener in self.listeners:
                listener.on_events(events)


def events_of(blocks: Sequence[ChainBlock]) -> list[FeedEvent]:
    return [FeedEvent(block.head, block.number) for block in blocks]


@dataclass(slots=True)
class SentBlock:
    """A block whose turn has come, and what was told of it."""

    place: int
    block: ChainBlock
    told: dict[LogFilter, list[FeedEvent]] = field(default_factory=dict)
    size: int = 0


@dataclass(slots=True)
class _Step:
    """A block that is waiting: to be told, or to be taken back."""

    block: ChainBlock
    place: int
    taken_back: bool = False
    source: Upstream | None = None
    fetching: asyncio.Task[list[LogRecord] | None] | None = None


class LogDispatch:
    """Listeners of logs. `is_orphan` says whether a block is no longer part of the chain."""

    def __init__(self, blocks: BlockSource, is_orphan: Callable[[ChainBlock], bool]) -> None:
        self._blocks = blocks
        self._is_orphan = is_orphan
        self._index = LogFilterIndex()
        self._listeners: dict[LogFilter, dict[Listener, tuple[int, int]]] = {}
        self._records: deque[SentBlock] = deque()
        self._waiting: deque[_Step] = deque()
        self._wake = asyncio.Event()
        self._has_room = asyncio.Event()
        self._has_room.set()
        self._kept_bytes = 0
        # The place of the newest block that was entered.
        self.place = 0

    def __repr__(self) -> str:
        return f"<LogDispatch {len(self._listeners)} filters, {len(self._waiting)} blocks waiting>"

    @property
    def tip(self) -> ChainBlock | None:
        """The last block that was told."""
        return self._records[-1].block if self._records else None

    @property
    def filters(self) -> int:
        """How many different ones are listened to."""
        return len(self._listeners)

    def clear(self) -> None:
        self._records.clear()
        self._waiting.clear()
        self._has_room.set()
        self._kept_bytes = 0

    # Listeners

    def add(self, wanted: LogFilter, listener: Listener) -> None:
        """Told of every block that is entered from now on."""
        self._add(wanted, listener, self.place, self.place)

    def join(self, wanted: LogFilter, listener: Listener, other: LogDispatch) -> None:
        """Go on here where the other line, whose last block is the same, has told the listener of everything so far."""
        seen = since = self._records[-1].place
        mine = reversed(tuple(self._records))
        for others in reversed(other._records):
            record = next(mine, None) or self._put_under(others.block)
            if record is None or record.block.hash != others.block.hash:
                break
            seen = record.place - 1
            if wanted in others.told:
                record.told.setdefault(wanted, others.told[wanted])
        self._add(wanted, listener, since, seen)

    def _put_under(self, block: ChainBlock) -> SentBlock | None:
        """A record of a block from before this line began."""
        oldest = self._records[0]
        if len(self._records) >= DEPTH or oldest.block.parent != block.hash:
            return None
        self._records.appendleft(SentBlock(oldest.place - 1, block))
        return self._records[0]

    def _add(self, wanted: LogFilter, listener: Listener, since: int, seen: int) -> None:
        self._index.add(wanted)
        self._listeners.setdefault(wanted, {})[listener] = (since, seen)

    def remove(self, wanted: LogFilter, listener: Listener) -> None:
        listeners = self._listeners.get(wanted)
        if listeners is None:
            return
        listeners.pop(listener, None)
        if not listeners:
            del self._listeners[wanted]
            self._index.remove(wanted)

    # Blocks

    def enter(self, removed: Sequence[ChainBlock], added: Sequence[ChainBlock], source: Upstream | None = None) -> None:
        """The chain has changed."""
        for block in removed:
            self._waiting.append(_Step(block, 0, taken_back=True))
        for block in added:
            self.place += 1
            self._waiting.append(_Step(block, self.place, source=source))
        self._wake.set()
        if len(self._waiting) >= MOST_WAITING:
            self._has_room.clear()

    async def room(self) -> None:
        """Returns when more blocks can wait here."""
        await self._has_room.wait()

    async def run(self) -> None:
        """A loop; what a cancelled one left undone, the next one does."""
        for step in self._waiting:
            step.fetching = None
        async with asyncio.TaskGroup() as group:
            while True:
                await self._drain(group)
                self._wake.clear()
                await self._wake.wait()

    async def drain(self) -> None:
        """Tell of everything that waits."""
        async with asyncio.TaskGroup() as group:
            await self._drain(group)

    async def _drain(self, group: asyncio.TaskGroup) -> None:
        while self._waiting:
            step = self._waiting[0]
            if len(self._waiting) < MOST_WAITING:
                self._has_room.set()
            if step.taken_back:
                self._waiting.popleft()
                self._take_back(step.block)
                continue
            logs = await self._logs_of(step, group)
            # No turn of the loop lies between this and the beginning of the telling: whoever joins, joins before or after.
            self._waiting.popleft()
            await self._tell(SentBlock(step.place, step.block), logs)

    async def _logs_of(self, step: _Step, group: asyncio.TaskGroup) -> list[LogRecord]:
        while self._listeners:
            for ahead in itertools.islice(self._waiting, AHEAD):
                if not ahead.taken_back and ahead.fetching is None:
                    ahead.fetching = group.create_task(self._fetch(ahead.block, ahead.source))
            assert step.fetching is not None
            logs = await step.fetching
            if logs is not None:
                return logs
            step.fetching = None
        return []

    async def _fetch(self, block: ChainBlock, source: Upstream | None) -> list[LogRecord] | None:
        """The logs, however long it takes; empty where the block is gone by then, None where nobody wants to hear of it."""
        pause_s, doubts, tries = FIRST_PAUSE_S, 0, 0
        while self._listeners:
            tries += 1
            try:
                logs = await self._try(block, source, tries)
            except BlockUnavailable:
                if self._is_orphan(block):
                    return []
                self._note_failure(block, tries)
            else:
                doubts += 1
                if logs or not block.has_logs or doubts > DOUBTS:
                    return logs
            await asyncio.sleep(pause_s)
            pause_s = min(pause_s * 2, LONGEST_PAUSE_S)
        return None

    async def _try(self, block: ChainBlock, source: Upstream | None, tries: int) -> list[LogRecord]:
        """The source has one chance to tell its logs."""
        if tries > PLAIN_TRIES:
            try:
                return await self._blocks.receipt_logs_of(block, source)
            except BlockUnavailable:
                pass
        return await self._blocks.logs_of(block, source if tries == 1 else None)

    def _note_failure(self, block: ChainBlock, tries: int) -> None:
        """All logs wait for this block. That is told once; and it must not be for ever."""
        if tries == QUIET_TRIES:
            telemetry.feed_blocks_stuck_total.labels(self._blocks.network).inc()
            extra = {"network": self._blocks.network, "block": block.number, "waiting": len(self._waiting)}
            log.warning("no upstream has the logs of a block: subscriptions to logs wait for it", extra=extra)
        is_first = bool(self._waiting) and self._waiting[0].block is block
        if tries >= QUIET_TRIES and is_first and not self._has_room.is_set():
            self._give_up(block)

    def _give_up(self, block: ChainBlock) -> None:
        words = f"no upstream has the logs of block {block.number}: subscribe again with fromBlock {hex(block.number)}"
        for wanted, listeners in [*self._listeners.items()]:
            for listener in [*listeners]:
                self.remove(wanted, listener)
                listener.on_end(Unavailable(words))

    async def _tell(self, record: SentBlock, logs: list[LogRecord]) -> None:
        # First of all: whoever joins in the middle has heard of this block.
        self._records.append(record)
        if len(self._records) > DEPTH:
            self._kept_bytes -= self._records.popleft().size
        for start in range(0, len(logs), SLICE):
            if start:
                await asyncio.sleep(0)
            self._tell_slice(record, logs[start : start + SLICE])
        self._forget_oldest()

    def _tell_slice(self, record: SentBlock, logs: list[LogRecord]) -> None:
        made: dict[int, FeedEvent] = {}
        for wanted, places in self._index.match(logs).items():
            for place in places:
                if place not in made:
                    made[place] = event = FeedEvent(bytes(logs[place].raw), record.block.number)
                    record.size += len(event.result)
                    self._kept_bytes += len(event.result)
            events = [made[place] for place in places]
            record.told.setdefault(wanted, []).extend(events)
            for listener, (since, _) in tuple(self._listeners[wanted].items()):
                if since < record.place:
                    listener.on_events(events)

    def _take_back(self, block: ChainBlock) -> None:
        if not self._records or self._records[-1].block.hash != block.hash:
            return
        record = self._records.pop()
        self._kept_bytes -= record.size
        for wanted, told in record.told.items():
            events = [taken_back(event) for event in reversed(told)]
            for listener, (_, seen) in tuple(self._listeners.get(wanted, {}).items()):
                if seen < record.place:
                    listener.on_events(events)

    def _forget_oldest(self) -> None:
        for record in self._oldest_first():
            if self._kept_bytes <= KEPT_BYTES:
                return
            self._kept_bytes -= record.size
            record.told, record.size = {}, 0

    def _oldest_first(self) -> Iterator[SentBlock]:
        """All but the newest."""
        return itertools.islice(self._records, len(self._records) - 1)


def taken_back(event: FeedEvent) -> FeedEvent:
    """The same log, removed."""
    members = _members(event.result)
    members["removed"] = _TRUE
    return FeedEvent(msgspec.json.encode(members), event.block)
