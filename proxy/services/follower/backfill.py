"""Index blocks from before the follower's first block.

Every transfer is counted once, by this rule: the follower indexes all contracts from its first block on. A back-fill writes
only below that block, and records in the same transaction which blocks it has covered, for all contracts or for one. Covered
blocks are skipped later, so an interrupted back-fill resumes where it stopped, and a back-fill of all contracts skips the
logs of contracts that were covered alone.

The history of transfers has the same rule for each of its categories, with a first block of its own: the one from which on the
follower writes the category. A back-fill of one contract adds holdings only.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from proxy.chains.evm import facts
from proxy.chains.evm.facts import BlockFacts, ChainLog
from proxy.core.holdings import HoldingChanges
from proxy.core.transfer_history import blocks_per_table
from proxy.services.follower.block_reader import BlockReader
from proxy.services.follower.network_follower import begin
from proxy.services.follower.sinks import BlockHistory
from proxy.store.postgres import blocks, holdings, transfers
from proxy.store.postgres.blocks import BlockStore, Followed, LeaderSession

# Ranges read ahead of the writing.
AHEAD = 3
ALL = b""


@dataclass(slots=True)
class BackfillProgress:
    """`last` is the last block of the run, `done` and `total` count blocks, `block` is the newest block written."""

    last: int = 0
    total: int = 0
    done: int = 0
    block: int = 0
    transfers: int = 0
    odd: int = 0


@dataclass(frozen=True, slots=True)
class Missing:
    """Blocks to be read, and what is missing of them: holdings, and categories of transfers."""

    first: int
    last: int
    holdings: bool
    categories: frozenset[int]


@dataclass(slots=True)
class Backfill:
    """One run over blocks `first` to `last` (None: up to the follower's first), for all contracts or for one. `categories`: of
    the transfers that are kept."""

    reader: BlockReader
    store: BlockStore
    start: int | None
    contract: bytes = ALL
    categories: frozenset[int] = frozenset()
    progress: BackfillProgress = field(default_factory=BackfillProgress)
    _covered: dict[bytes, list[tuple[int, int]]] = field(default_factory=dict)

    async def run(self, first: int, last: int | None, report: Callable[[BackfillProgress], None]) -> BackfillProgress:
        network = self.reader.route.network.id
        async with self.store.backfill(network) as term:
            followed = await self._followed(term)
            end = followed.first_block - 1
            self.progress.last = end if last is None else min(last, end)
            parts = await self._missing(term, followed, first, last)
            self.progress.total = sum(part.last - part.first + 1 for part in parts)
            if parts and self.contract == ALL:
                await self._load_covered(term, parts)
                await self._open_tables(term, parts)
            try:
                async with asyncio.TaskGroup() as group:
                    await self._fill(term, group, parts, report)
            except BaseExceptionGroup as failed:
                raise failed.exceptions[0] from None
        return self.progress

    async def _followed(self, term: LeaderSession) -> Followed:
        """The network's index. If the follower never ran, this sets its first block."""
        found = await term.read()
        if found.cursor is None:
            return await begin(self.reader, term, await self.reader.head(), start=self.start)
        return found

    async def _missing(self, term: LeaderSession, followed: Followed, first: int, last: int | None) -> list[Missing]:
        holdings = await term.uncovered(self.contract, first, self.progress.last)
        if self.contract != ALL or not self.categories:
            return [Missing(low, high, holdings=True, categories=frozenset()) for low, high in holdings]
        # Blocks at the head may still be replaced. The follower writes them.
        cursor = -1 if followed.cursor is None else followed.cursor.number
        end = max(followed.first_block - 1, cursor - self.reader.network.facts.finality_blocks)
        end = end if last is None else min(last, end)
        async with term.transaction() as connection:
            missing = await transfers.uncovered(
                connection, term.number, self.categories, blocks=(first, end), head=end + 1
            )
        return _pieces(holdings, missing)

    async def _open_tables(self, term: LeaderSession, parts: Sequence[Missing]) -> None:
        """In a transaction of its own: the follower may wait for these locks while it holds those of holdings."""
        if not self.categories:
            return
        span = blocks_per_table(self.reader.network.facts.block_time_s)
        async with term.transaction() as connection:
            await transfers.open_tables(connection, term.number, parts[0].first, parts[-1].last, span=span)

    async def _load_covered(self, term: LeaderSession, parts: Sequence[Missing]) -> None:
        found: defaultdict[bytes, list[tuple[int, int]]] = defaultdict(list)
        for contract, low, high in await term.covered_contracts(parts[0].first, parts[-1].last):
            found[contract].append((low, high))
        self._covered = dict(found)

    async def _fill(
        self,
        term: LeaderSession,
        group: asyncio.TaskGroup,
        parts: Sequence[Missing],
        report: Callable[[BackfillProgress], None],
    ) -> None:
        """Read a few ranges ahead while others are written."""
        ranges = self._ranges(parts)
        window: deque[tuple[Missing, asyncio.Task[BlockFacts]]] = deque()
        while True:
            while len(window) < AHEAD and (part := next(ranges, None)):
                window.append((part, group.create_task(self.reader.blocks(part.first, part.last))))
            if not window:
                return
            part, reading = window.popleft()
            await self._write(term, part, await reading)
            report(self.progress)

    def _ranges(self, parts: Sequence[Missing]) -> Iterator[Missing]:
        for part in parts:
            first = part.first
            while first <= part.last:
                last = min(first + self.reader.range_size.blocks - 1, part.last)
                yield replace(part, first=first, last=last)
                first = last + 1

    async def _write(self, term: LeaderSession, part: Missing, found: BlockFacts) -> None:
        moved, odd = found.transfers, found.odd
        if self._covered:
            moved, odd = facts.transfers_of(log for log in found.logs if not self._is_covered(log))
        history = BlockHistory(term.number, part.categories)
        history.add(found)
        changes = HoldingChanges()
        changes.add(moved)
        ends = (part.first, part.last)
        async with term.transaction() as connection:
            # Coverage comes last: the follower may wait for it while it holds rows of holdings.
            if part.holdings:
                await holdings.add(connection, term.number, changes)
                await blocks.cover(connection, term.number, self.contract, ranges=[ends])
            if part.categories:
                await transfers.write(connection, term.number, history.blocks(), history.rows)
                await transfers.cover(connection, term.number, part.categories, blocks=ends)
        self.progress.done += found.blocks
        self.progress.block = found.last
        self.progress.transfers += len(moved)
        self.progress.odd += odd

    def _is_covered(self, log: ChainLog) -> bool:
        """Whether the log's block was already indexed for its contract alone."""
        ranges = self._covered.get(bytes.fromhex(log.address[2:]))
        if not ranges:
            return False
        number = int(log.block_number, 16)
        return any(low <= number <= high for low, high in ranges)


def _pieces(holdings: Sequence[tuple[int, int]], categories: Mapping[int, Sequence[tuple[int, int]]]) -> list[Missing]:
    """Ranges in each of which the same is missing."""
    every = [*holdings, *(part for parts in categories.values() for part in parts)]
    cuts = sorted({edge for low, high in every for edge in (low, high + 1)})
    found = []
    for first, after in pairwise(cuts):
        needed = frozenset(each for each, parts in categories.items() if _has(parts, first))
        if needed or _has(holdings, first):
            found.append(Missing(first, after - 1, _has(holdings, first), needed))
    return found


def _has(parts: Sequence[tuple[int, int]], block: int) -> bool:
    return any(low <= block <= high for low, high in parts)
