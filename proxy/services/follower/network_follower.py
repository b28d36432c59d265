"""Keep the index of one network in step with its chain.

The leader (one in the whole fleet, see store/postgres/blocks) reads the chain from its cursor on. The cursor, the blocks and
the data of every sink are written in one transaction, so a crash at any moment leaves either all of a block or nothing of it.
There are two ways to read:

*Ranges*, far from the head: the logs of many final blocks in one call, unless a sink needs every block on its own.
*Blocks*, near the head: one by one. Each parent hash is compared with the block before it, and each block is stored so that
it can be undone.

A few blocks are read ahead while others are written. If a parent hash does not match, the chain has dropped blocks: the
index goes back to the newest block that both have. If that is deeper than the stored blocks, the network stops, reports it,
and checks again from time to time. Only an operator, or a development service, starts the index again from scratch.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence

from proxy import telemetry
from proxy.chains.evm.facts import BlockFacts, Header
from proxy.core.head_rhythm import HeadRhythm
from proxy.errors import Unavailable
from proxy.services.follower.block_reader import BlockReader, ReadFailed
from proxy.services.follower.sinks import FollowerSink, IndexIncomplete, StaleRead
from proxy.store.postgres import blocks
from proxy.store.postgres.blocks import NOTHING, BlockId, BlockStore, Followed, LeaderSession, LeadershipLost
from proxy.tasks import FirstFailure

log = logging.getLogger("penstock.follower")

# Bounds memory: reads ahead of the writing.
RANGES_AHEAD, BLOCKS_AHEAD = 3, 8
# Bounds the size of a transaction.
LOGS_PER_WRITE = 20_000
# After how many blocks the undo data of final blocks is removed.
SETTLE_BLOCKS = 16
# Pauses after a failed read, and how long reads may fail before another process gets the chance to lead.
PAUSE_S, LONGEST_PAUSE_S = 0.5, 5.0
STEP_DOWN_S = 30.0
# A follower is stuck if the head has moved this far, or reads have failed this long, since it last wrote a block.
STUCK_BLOCKS = 20
STUCK_S = 60.0
# How often a stopped network is checked again.
STOPPED_S = 30.0
# After this many heads in a row below the cursor, the chain counts as shortened. Development chains are shortened on
# purpose. On other networks a stuck upstream is far more likely, so it takes that many heads and at least this much time.
SHORTER_HEADS = 20
SHORTER_S = 600.0
# While the chain has no new block, the index is read once per this many heads: it may have been reset.
HEADS_PER_READ = 8


class ParentMismatch(Exception):
    """A block's parent hash is not the hash of the block before it."""


class NoCommonBlock(Exception):
    """The chain and the index have no block in common any more."""


class FollowerProgress:
    """Whether a follower moves. `reason` is the last thing that kept it from writing a block."""

    def __init__(self) -> None:
        self._reached = -1
        self._head_then = 0
        self._since: float | None = None
        self.reason = ""

    def __repr__(self) -> str:
        return f"<FollowerProgress at {self._reached}{f', held up: {self.reason}' if self.reason else ''}>"

    def began(self, now: float) -> None:
        """The follower leads. If it did before, without moving, it has been held up since then."""
        if self._since is None:
            self._since = now

    def reached(self, block: int, head: int, now: float) -> None:
        """The follower is at this block. Going back and forth is no progress, unless it catches up with the head. One that is
        stuck has to catch up too, or to write many blocks: it may get to the block before the one that it cannot write."""
        least = STUCK_BLOCKS if self.is_stuck(head, now) else 1
        if self._reached < 0 or block >= self._reached + least or block >= head:
            self._reached, self._head_then, self._since, self.reason = block, head, now, ""

    def is_stuck(self, head: int, now: float) -> bool:
        if not self.reason or self._since is None:
            return False
        has_moved = self._reached >= 0 and head - self._head_then >= STUCK_BLOCKS
        return has_moved or now - self._since >= STUCK_S


class NetworkFollower:
    """Follows one network. `start` is the first block of a network that was never followed; None means its newest final
    block. `keep` is the number of blocks that can be undone. With `renews`, an index that no longer matches the chain is
    dropped and started again.
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
        label: str = "",
    ) -> None:
        """`label`: its name in metrics and logs, if that is not the network's."""
        facts = reader.route.network.facts
        self._reader = reader
        self._store = store
        self._sinks = sinks
        self._start = start
        self.keep = max(keep, 2 * facts.finality_blocks)
        self._renews = renews
        self.rhythm = HeadRhythm(facts.block_time_s)
        self.patience = SHORTER_HEADS if renews else max(SHORTER_HEADS, int(SHORTER_S / self.rhythm.interval_s))
        # How long reads have failed, the last head that contradicts the index, and the number of heads below the cursor.
        self._failing_s = 0.0
        self._doubted = b""
        self._shorter_heads = 0
        # How often in a row the head was the cursor's block.
        self._equal_heads = 0
        self._failure = FirstFailure(log, "no longer following network")
        self._read_failure = FirstFailure(log, "cannot read blocks")
        self._progress = FollowerProgress()
        self._head = 0
        self._is_stuck = False
        self.id = reader.route.network.id
        self.label = label or self.id
        self.network: Followed | None = None
        self.cursor = NOTHING

    def __repr__(self) -> str:
        return f"<NetworkFollower {self.label}, {f'at {self.cursor.number}' if self.network else 'not leading'}>"

    async def run(self) -> None:
        """Supervised loop: acquire the leadership, lead, and start again when that ends."""
        while True:
            try:
                async with self._store.lead(self.id) as term:
                    log.info("following network", extra={"network": self.label})
                    self._failure.clear()
                    await self._lead_while_alive(term)
            except (LeadershipLost, Unavailable) as exc:
                self._failure.report(network=self.label, reason=str(exc))
            finally:
                self.network = None
                telemetry.follower_leads.labels(self.label).set(0)
                telemetry.follower_stuck.labels(self.label).set(0)
            await asyncio.sleep(LONGEST_PAUSE_S if self._failing_s else PAUSE_S)

    async def _lead_while_alive(self, term: LeaderSession) -> None:
        """Lead for as long as the session is alive."""
        self._failing_s = 0.0
        try:
            async with asyncio.TaskGroup() as group:
                heartbeat = group.create_task(term.keep_alive())
                await self._lead(term)
                heartbeat.cancel()
        except BaseExceptionGroup as failed:
            raise failed.exceptions[0] from None

    async def _lead(self, term: LeaderSession) -> None:
        telemetry.follower_leads.labels(self.label).set(1)
        self.network = None
        self._progress.began(asyncio.get_running_loop().time())
        if self._is_stuck:  # It stepped down, and no other process has taken over.
            telemetry.follower_stuck.labels(self.label).set(1)
        pause_s = PAUSE_S
        while self._failing_s < STEP_DOWN_S:
            try:
                await self.step(term)
                self._read_failure.clear()
                self._failing_s, pause_s = 0.0, PAUSE_S
                await self._judge(term)
                await asyncio.sleep(self.rhythm.pause_s(asyncio.get_running_loop().time()))
            except StaleRead:
                self._progress.reason = "the data for a block was out of date when it was written"
                await self._judge(term)
            except (NoCommonBlock, IndexIncomplete) as exc:
                await self._stop(term, str(exc))
            except ReadFailed as exc:
                self._progress.reason = str(exc)
                self._read_failure.report(network=self.label, reason=str(exc))
                await self._judge(term)
                await asyncio.sleep(pause_s)
                self._failing_s += pause_s
                pause_s = min(pause_s * 2, LONGEST_PAUSE_S)

    async def _judge(self, term: LeaderSession) -> None:
        """Report when the follower gets stuck, and when it moves again."""
        now = asyncio.get_running_loop().time()
        if self.network is not None:
            self._progress.reached(self.cursor.number, self._head, now)
        is_stuck = self._progress.is_stuck(self._head, now)
        if is_stuck:  # A block that is written clears it.
            await term.set_stuck(self._progress.reason)
        if is_stuck == self._is_stuck:
            return
        self._is_stuck = is_stuck
        telemetry.follower_stuck.labels(self.label).set(is_stuck)
        extra = {"network": self.label, "block": self.cursor.number, "head": self._head}
        if is_stuck:
            log.error("follower is stuck", extra={**extra, "reason": self._progress.reason})
        else:
            log.warning("follower moves again", extra=extra)
            await term.set_stuck(None)

    async def step(self, term: LeaderSession) -> None:
        """Read the head and write all blocks up to it."""
        began = asyncio.get_running_loop().time()
        head = await self._reader.head()
        self.rhythm.polled(int(head.number, 16), int(head.timestamp, 16), began)
        if self.network is None:
            await self._load(term, head)
        self._head = number = int(head.number, 16)
        telemetry.follower_head.labels(self.label).set(number)
        try:
            await self._advance(term, number)
            if number <= self.cursor.number and await self._is_forked(term, head, number):
                raise ParentMismatch(f"block {number} was replaced")
        except ParentMismatch as exc:
            self._progress.reason = str(exc)
            await self._go_back(term, str(exc))

    async def _load(self, term: LeaderSession, head: Header) -> None:
        """Load the cursor. A new network gets its first block."""
        followed = await term.read()
        if followed.cursor is None:
            followed = await begin(self._reader, term, head, start=self._start)
        assert followed.cursor is not None
        self.network, self.cursor = followed, followed.cursor
        self._show()

    # Reading and writing

    async def _advance(self, term: LeaderSession, head: int) -> None:
        deep = head - self.keep
        if not any(sink.blocks for sink in self._sinks) and self.cursor.number < deep:
            await self._index(term, self._ranges(deep), self._read_range, ahead=RANGES_AHEAD)
        numbers = ((number, number) for number in range(self.cursor.number + 1, head + 1))
        await self._index(term, numbers, self._read_block, ahead=BLOCKS_AHEAD)

    def _ranges(self, last: int) -> Iterator[tuple[int, int]]:
        first = self.cursor.number + 1
        while first <= last:
            end = min(first + self._reader.range_size.blocks - 1, last)
            yield first, end
            first = end + 1

    async def _read_range(self, first: int, last: int) -> BlockFacts:
        return await self._reader.blocks(first, last)

    async def _read_block(self, first: int, last: int) -> BlockFacts:
        return await self._reader.block(last)

    async def _index(
        self,
        term: LeaderSession,
        ranges: Iterator[tuple[int, int]],
        read: Callable[[int, int], Awaitable[BlockFacts]],
        *,
        ahead: int,
    ) -> None:
        """Write the ranges in order while up to `ahead` of them are being read."""
        try:
            async with asyncio.TaskGroup() as group:
                window: deque[asyncio.Task[BlockFacts | ReadFailed]] = deque()
                while True:
                    while len(window) < ahead and (part := next(ranges, None)):
                        window.append(group.create_task(_read_or_failure(read, *part)))
                    if not window:
                        return
                    await self._write(term, await _next_pieces(window))
        except BaseExceptionGroup as failed:
            raise failed.exceptions[0] from None

    async def _write(self, term: LeaderSession, facts: Sequence[BlockFacts]) -> None:
        """Write blocks in one transaction: the cursor first, which locks out any other writer, then everything else."""
        assert self.network is not None
        cursor = self.cursor
        for piece in facts:
            if piece.parent != cursor.hash or piece.first != cursor.number + 1:
                raise ParentMismatch(f"block {piece.first} does not follow block {cursor.number}")
            cursor = BlockId(piece.last, piece.hash)
        below = cursor.number - self.keep
        async with term.transaction() as connection:
            await blocks.move(connection, term.number, cursor=self.cursor, to=cursor, time=facts[-1].time)
            for sink in self._sinks:
                await sink.write(connection, self.network, facts)
            await blocks.record(connection, term.number, [BlockId(piece.last, piece.hash) for piece in facts])
            if facts[-1].header is None:
                below = cursor.number
            if facts[-1].header is None or cursor.number // SETTLE_BLOCKS != self.cursor.number // SETTLE_BLOCKS:
                await blocks.delete_below(connection, term.number, below)
                for sink in self._sinks:
                    await sink.settle(connection, self.network, below)
            await blocks.notify(connection, term.number)
        self.cursor = cursor
        telemetry.followed_blocks_total.labels(self.label).inc(sum(piece.blocks for piece in facts))
        self._show()

    def _show(self) -> None:
        telemetry.follower_block.labels(self.label).set(self.cursor.number)
        telemetry.follower_stopped.labels(self.label).set(0)

    # Blocks that the chain dropped

    async def _is_forked(self, term: LeaderSession, head: Header, number: int) -> bool:
        """Whether the head contradicts the index. It must be reported twice, because one upstream may be on an abandoned
        fork. A head that is in the index comes from an upstream that is behind; after many of them the chain counts as
        shortened."""
        hash_ = bytes.fromhex(head.hash[2:])
        self._equal_heads = self._equal_heads + 1 if BlockId(number, hash_) == self.cursor else 0
        if self._equal_heads % HEADS_PER_READ and not self._doubted:
            self._shorter_heads = 0
            return False
        ours = next(iter(await term.recent(BlockId(number, b""), 1)), None)
        if ours is None or ours.number != number or ours.hash != hash_:
            was, self._doubted = self._doubted, hash_
            return was == hash_
        self._doubted = b""
        self._shorter_heads = self._shorter_heads + 1 if number < self.cursor.number else 0
        return self._shorter_heads > self.patience

    async def _go_back(self, term: LeaderSession, reason: str) -> None:
        """Return to the newest block that the chain still has and undo the blocks above it, in one transaction."""
        assert self.network is not None
        if (await term.read()).cursor != self.cursor:
            raise LeadershipLost(f"the cursor is no longer at block {self.cursor.number}: the index was reset")
        removed: list[BlockId] = []
        for block in await term.recent(self.cursor, self.keep + SETTLE_BLOCKS + 1):
            if (time := await self._time_of(block)) is not None:
                break
            removed.append(block)
        else:
            raise NoCommonBlock(
                f"the chain was replaced below block {removed[-1].number if removed else self.cursor.number}, deeper than "
                f"can be undone: run `penstock index --chain {self.id} --forget` to rebuild the index"
            )
        if not removed:
            return  # The chain returned to our blocks meanwhile.
        async with term.transaction() as connection:
            await blocks.move(connection, term.number, cursor=self.cursor, to=block, time=time)
            for sink in reversed(self._sinks):
                await sink.undo(connection, self.network, block, removed)
            await blocks.delete_above(connection, term.number, block.number)
            await blocks.notify(connection, term.number)
        self.cursor = block
        log.info("chain reorganised", extra={"network": self.label, "reason": reason, "blocks": len(removed)})
        telemetry.reorgs_total.labels(self.label).inc()
        telemetry.undone_blocks_total.labels(self.label).inc(len(removed))
        self._show()

    async def _time_of(self, block: BlockId) -> int | None:
        """The block's timestamp, or None if the chain has no such block."""
        if block == NOTHING:
            return 0
        header = await self._reader.header(block.number)
        return (
            int(header.timestamp, 16) if header is not None and bytes.fromhex(header.hash[2:]) == block.hash else None
        )

    async def _stop(self, term: LeaderSession, reason: str) -> None:
        if self._renews:
            log.warning("restarting the index from scratch", extra={"network": self.label, "reason": reason})
            await forget(term, self._sinks)
            self.network = None
            return
        log.error("stopped following network", extra={"network": self.label, "reason": reason})
        telemetry.follower_stopped.labels(self.label).set(1)
        await term.set_fault(reason)
        await asyncio.sleep(STOPPED_S)


async def begin(reader: BlockReader, term: LeaderSession, head: Header, *, start: int | None) -> Followed:
    """Start the index of a network at `start`, or at its newest final block."""
    newest = int(head.number, 16)
    first = max(0, newest - reader.route.network.facts.finality_blocks + 1) if start is None else min(start, newest)
    if first == 0:
        return await term.begin(0, NOTHING.hash)
    before = await reader.header(first - 1)
    if before is None:
        raise ReadFailed(f"block {first - 1} does not exist")
    return await term.begin(first, bytes.fromhex(before.hash[2:]))


async def forget(term: LeaderSession, sinks: Sequence[FollowerSink]) -> None:
    """Delete the whole index of the network in one transaction."""
    followed = await term.read()
    async with term.transaction() as connection:
        await blocks.reset(connection, term.number)
        for sink in sinks:
            await sink.forget(connection, followed)


async def _read_or_failure(
    read: Callable[[int, int], Awaitable[BlockFacts]], first: int, last: int
) -> BlockFacts | ReadFailed:
    """Return a failure as a value: raised in the task group it would cancel the writing of earlier blocks."""
    try:
        return await read(first, last)
    except ReadFailed as exc:
        return exc


async def _next_pieces(window: deque[asyncio.Task[BlockFacts | ReadFailed]]) -> list[BlockFacts]:
    """Wait for the next piece and add those behind it that are already read, up to `LOGS_PER_WRITE`."""
    first = await window.popleft()
    if isinstance(first, ReadFailed):
        raise first
    pieces, count = [first], len(first.logs)
    while window and window[0].done() and count < LOGS_PER_WRITE:
        more = window[0].result()
        if isinstance(more, ReadFailed):
            break
        del window[0]
        pieces.append(more)
        count += len(more.logs)
    return pieces
