"""One network's record, kept as the chain is.

Whoever leads (store/blocks: one in the whole fleet) reads the chain from its cursor on and writes what it finds: the cursor,
the blocks and what every sink makes of them are one transaction, so that a kill at any moment leaves either all of a block or
nothing. Two ways to read:

*Ranges*, while the head is far: logs of many blocks at once, for blocks so deep that they stay, if no sink wants each alone.
*Blocks*, near the head: each alone, its parent compared with the block before it, and remembered so that it can be undone.

Some are read ahead while others are written, never more than a few. When a parent does not fit, the chain has dropped blocks:
the record goes back to the newest that both still have. Where that is deeper than is remembered, the network stops, says
so, and looks again now and then; only an operator, or a development service, begins anew.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence

from proxy import telemetry
from proxy.chains.evm.facts import BlockFacts, Header
from proxy.errors import Unavailable
from proxy.services.follower.block_reader import BlockReader, ReadFailed
from proxy.services.follower.sinks import FollowerSink, StaleRead
from proxy.store import blocks
from proxy.store.blocks import NOTHING, BlockMark, BlockStore, Followed, LeaderSession, LeadershipLost

log = logging.getLogger("penstock.follower")

# The head is asked for a few times per block, within these bounds.
SHORTEST_S, LONGEST_S = 0.25, 2.0
# What is read ahead of the writing, and how much is written at once: both bound memory, the latter the transaction.
RANGES_AHEAD, BLOCKS_AHEAD = 3, 8
LOGS_AT_ONCE = 20_000
# How often it is seen to what can be forgotten.
SETTLE_BLOCKS = 16
# After a failure; and how long an upstream may fail before another follower is given the chance.
PAUSE_S, LONGEST_PAUSE_S = 0.5, 5.0
STEP_DOWN_S = 30.0
# How often a network that stopped is looked at again.
STOPPED_S = 30.0
# A head below ours, seen this often in a row, is no upstream that is behind: the chain was cut. Development chains are, at a
# person's command. Elsewhere an upstream that hangs is likelier by far, and is given this much time before it is believed.
SHORTER = 20
SHORTER_S = 600.0


class ParentMismatch(Exception):
    """A block does not stand on the one before it."""


class NoCommonBlock(Exception):
    """The chain and the record have no block in common any more."""


class NetworkFollower:
    """One network. `start`: the first block of one that was never followed; None: its newest final block.

    `keep`: how many blocks can be undone. `renews`: begin anew where the record is lost.
    """

    def __init__(
        self,
        reader: BlockReader,
        store: BlockStore,
        sinks: Sequence[FollowerSink],
        *,
        start: int | None,
        keep: int,
        renews: bool = False,
    ) -> None:
        facts = reader.route.network.facts
        self._reader = reader
        self._store = store
        self._sinks = sinks
        self._start = start
        self.keep = max(keep, 2 * facts.finality_blocks)
        self._renews = renews
        self._poll_s = min(max(facts.block_time_s / 3, SHORTEST_S), LONGEST_S)
        self._finality = facts.finality_blocks
        self.patience = SHORTER if renews else max(SHORTER, int(SHORTER_S / self._poll_s))
        # How long upstreams have failed; a head that does not fit the record; how often the head was below ours.
        self._failing_s = 0.0
        self._doubted = b""
        self._shorter = 0
        self.id = reader.route.network.id
        self.network: Followed | None = None
        self.cursor = NOTHING

    def __repr__(self) -> str:
        return f"<NetworkFollower {self.id}, {f'at {self.cursor.number}' if self.network else 'not leading'}>"

    async def run(self) -> None:
        """A supervised loop: lead, and when that ends for whatever reason, stand again."""
        while True:
            try:
                async with self._store.lead(self.id) as term:
                    log.info("following", extra={"network": self.id})
                    await self._lead_with_pulse(term)
            except (LeadershipLost, Unavailable) as exc:
                log.warning("no longer following", extra={"network": self.id, "reason": str(exc)})
            finally:
                self.network = None
                telemetry.follower_leads.labels(self.id).set(0)
            await asyncio.sleep(LONGEST_PAUSE_S if self._failing_s else PAUSE_S)

    async def _lead_with_pulse(self, term: LeaderSession) -> None:
        """Lead for as long as the session is alive."""
        self._failing_s = 0.0
        try:
            async with asyncio.TaskGroup() as group:
                pulse = group.create_task(term.keep_alive())
                await self._lead(term)
                pulse.cancel()
        except BaseExceptionGroup as failed:
            raise failed.exceptions[0] from None

    async def _lead(self, term: LeaderSession) -> None:
        telemetry.follower_leads.labels(self.id).set(1)
        self.network = None
        pause_s = PAUSE_S
        while self._failing_s < STEP_DOWN_S:
            try:
                await self.step(term)
                self._failing_s, pause_s = 0.0, PAUSE_S
                await asyncio.sleep(self._poll_s)
            except StaleRead:
                continue
            except NoCommonBlock as exc:
                await self._stop(term, str(exc))
            except ReadFailed as exc:
                log.warning("not read", extra={"network": self.id, "reason": str(exc), "again_in_s": pause_s})
                await asyncio.sleep(pause_s)
                self._failing_s += pause_s
                pause_s = min(pause_s * 2, LONGEST_PAUSE_S)

    async def step(self, term: LeaderSession) -> None:
        """Look at the head, and write all that is new up to it."""
        head = await self._reader.head()
        if self.network is None:
            await self._take_up(term, head)
        number = int(head.number, 16)
        telemetry.follower_head.labels(self.id).set(number)
        try:
            await self._advance(term, number)
            if number <= self.cursor.number and await self._is_forked(term, head, number):
                raise ParentMismatch(f"the head is another block {number}")
        except ParentMismatch as exc:
            log.info("the chain dropped blocks", extra={"network": self.id, "reason": str(exc)})
            await self._go_back(term)

    async def _take_up(self, term: LeaderSession, head: Header) -> None:
        """Where the record ends; or its first block, where there is none."""
        found = await term.read()
        if found.cursor is None:
            found = await begin(self._reader, term, head, start=self._start)
        assert found.cursor is not None
        self.network, self.cursor = found, found.cursor
        self._show()

    # Reading ahead and writing behind

    async def _advance(self, term: LeaderSession, head: int) -> None:
        deep = head - self.keep
        if not any(sink.blocks for sink in self._sinks) and self.cursor.number < deep:
            await self._read_on(term, self._ranges(deep), self._read_range, ahead=RANGES_AHEAD)
        numbers = ((number, number) for number in range(self.cursor.number + 1, head + 1))
        await self._read_on(term, numbers, self._read_block, ahead=BLOCKS_AHEAD)

    def _ranges(self, last: int) -> Iterator[tuple[int, int]]:
        first = self.cursor.number + 1
        while first <= last:
            end = min(first + self._reader.span.blocks - 1, last)
            yield first, end
            first = end + 1

    async def _read_range(self, first: int, last: int) -> BlockFacts:
        return await self._reader.blocks(first, last)

    async def _read_block(self, first: int, last: int) -> BlockFacts:
        return await self._reader.block(last)

    async def _read_on(
        self,
        term: LeaderSession,
        wanted: Iterator[tuple[int, int]],
        read: Callable[[int, int], Awaitable[BlockFacts]],
        *,
        ahead: int,
    ) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                window: deque[asyncio.Task[BlockFacts | ReadFailed]] = deque()
                while True:
                    while len(window) < ahead and (part := next(wanted, None)):
                        window.append(group.create_task(_reading(read, *part)))
                    if not window:
                        return
                    await self._write(term, await _ready(window))
        except BaseExceptionGroup as failed:
            raise failed.exceptions[0] from None

    async def _write(self, term: LeaderSession, found: Sequence[BlockFacts]) -> None:
        """One transaction: the cursor first, which no other writer can move from then on, then all else."""
        assert self.network is not None
        cursor = self.cursor
        for piece in found:
            if piece.parent != cursor.hash or piece.first != cursor.number + 1:
                raise ParentMismatch(f"block {piece.first} does not stand on {cursor.number}")
            cursor = BlockMark(piece.last, piece.hash)
        below = cursor.number - self.keep
        async with term.transaction() as connection:
            await blocks.move(connection, term.number, cursor=self.cursor, to=cursor, time=found[-1].time)
            for sink in self._sinks:
                await sink.write(connection, self.network, found)
            await blocks.record(connection, term.number, [BlockMark(piece.last, piece.hash) for piece in found])
            if found[-1].header is None:
                below = cursor.number
            if found[-1].header is None or cursor.number // SETTLE_BLOCKS != self.cursor.number // SETTLE_BLOCKS:
                await blocks.delete_below(connection, term.number, below)
                for sink in self._sinks:
                    await sink.settle(connection, self.network, below)
            await blocks.notify(connection, term.number)
        self.cursor = cursor
        telemetry.followed_blocks_total.labels(self.id).inc(sum(piece.blocks for piece in found))
        self._show()

    def _show(self) -> None:
        telemetry.follower_block.labels(self.id).set(self.cursor.number)
        telemetry.follower_stopped.labels(self.id).set(0)

    # Blocks that the chain dropped

    async def _is_forked(self, term: LeaderSession, head: Header, number: int) -> bool:
        """Whether the head is a block that we have otherwise. Believed when it is seen twice: an upstream may be on a fork that
        nobody follows. One that is behind tells of a block that we have, and is believed to be the head after a long while."""
        ours = next(iter(await term.recent(BlockMark(number, b""), 1)), None)
        hash_ = bytes.fromhex(head.hash[2:])
        if ours is None or ours.number != number or ours.hash != hash_:
            was, self._doubted = self._doubted, hash_
            return was == hash_
        self._doubted = b""
        self._shorter = self._shorter + 1 if number < self.cursor.number else 0
        return self._shorter > self.patience

    async def _go_back(self, term: LeaderSession) -> None:
        """To the newest block that the chain still has, in one transaction with all that is undone."""
        assert self.network is not None
        if (await term.read()).cursor != self.cursor:
            raise LeadershipLost(f"the cursor is not at block {self.cursor.number}: the network was begun anew")
        removed: list[BlockMark] = []
        for mark in await term.recent(self.cursor, self.keep + SETTLE_BLOCKS + 1):
            if (time := await self._time_of(mark)) is not None:
                break
            removed.append(mark)
        else:
            raise NoCommonBlock(
                f"the chain was replaced from before block {removed[-1].number if removed else self.cursor.number} on, "
                f"deeper than is remembered: `python -m proxy index --chain {self.id} --forget` begins anew"
            )
        if not removed:
            return  # The chain came back while we looked.
        async with term.transaction() as connection:
            await blocks.move(connection, term.number, cursor=self.cursor, to=mark, time=time)
            for sink in reversed(self._sinks):
                await sink.undo(connection, self.network, mark, removed)
            await blocks.delete_above(connection, term.number, mark.number)
            await blocks.notify(connection, term.number)
        self.cursor = mark
        telemetry.reorgs_total.labels(self.id).inc()
        telemetry.undone_blocks_total.labels(self.id).inc(len(removed))
        self._show()

    async def _time_of(self, mark: BlockMark) -> int | None:
        """When the chain made the block; None where it has another, or none."""
        if mark == NOTHING:
            return 0
        header = await self._reader.header(mark.number)
        return int(header.timestamp, 16) if header is not None and bytes.fromhex(header.hash[2:]) == mark.hash else None

    async def _stop(self, term: LeaderSession, reason: str) -> None:
        if self._renews:
            log.warning("begun anew", extra={"network": self.id, "reason": reason})
            await forget(term, self._sinks)
            self.network = None
            return
        log.error("the network is not followed any more", extra={"network": self.id, "reason": reason})
        telemetry.follower_stopped.labels(self.id).set(1)
        await term.set_fault(reason)
        await asyncio.sleep(STOPPED_S)


async def begin(reader: BlockReader, term: LeaderSession, head: Header, *, start: int | None) -> Followed:
    """The first block of a network that was never followed: the one that is asked for, or the newest final one."""
    newest = int(head.number, 16)
    first = max(0, newest - reader.route.network.facts.finality_blocks + 1) if start is None else min(start, newest)
    if first == 0:
        return await term.begin(0, NOTHING.hash)
    before = await reader.header(first - 1)
    if before is None:
        raise ReadFailed(f"block {first - 1} is not there")
    return await term.begin(first, bytes.fromhex(before.hash[2:]))


async def forget(term: LeaderSession, sinks: Sequence[FollowerSink]) -> None:
    """All that was ever written of the network, in one transaction."""
    found = await term.read()
    async with term.transaction() as connection:
        await blocks.reset(connection, term.number)
        for sink in sinks:
            await sink.forget(connection, found)


async def _reading(read: Callable[[int, int], Awaitable[BlockFacts]], first: int, last: int) -> BlockFacts | ReadFailed:
    """A failure is a value: it must not cut short the writing of what was read before it."""
    try:
        return await read(first, last)
    except ReadFailed as exc:
        return exc


async def _ready(window: deque[asyncio.Task[BlockFacts | ReadFailed]]) -> list[BlockFacts]:
    """The next piece, and those behind it that are here already, up to a good size."""
    first = await window.popleft()
    if isinstance(first, ReadFailed):
        raise first
    found, count = [first], len(first.logs)
    while window and window[0].done() and count < LOGS_AT_ONCE:
        more = window[0].result()
        if isinstance(more, ReadFailed):
            break
        del window[0]
        found.append(more)
        count += len(more.logs)
    return found
