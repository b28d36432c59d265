"""Index blocks from before the follower's first block.

Every transfer is counted once, by this rule: the follower indexes all contracts from its first block on. A back-fill writes
only below that block, and records in the same transaction which blocks it has covered, for all contracts or for one. Covered
blocks are skipped later, so an interrupted back-fill resumes where it stopped, and a back-fill of all contracts skips the
logs of contracts that were covered alone.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from proxy.chains.evm import facts
from proxy.chains.evm.facts import BlockFacts, ChainLog
from proxy.core.holdings import HoldingChanges
from proxy.services.follower.block_reader import BlockReader
from proxy.services.follower.network_follower import begin
from proxy.store.postgres import blocks, holdings
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


@dataclass(slots=True)
class Backfill:
    """One run over blocks `first` to `last` (None: up to the follower's first), for all contracts or for one."""

    reader: BlockReader
    store: BlockStore
    start: int | None
    contract: bytes = ALL
    progress: BackfillProgress = field(default_factory=BackfillProgress)
    _covered: dict[bytes, list[tuple[int, int]]] = field(default_factory=dict)

    async def run(self, first: int, last: int | None, report: Callable[[BackfillProgress], None]) -> BackfillProgress:
        network = self.reader.route.network.id
        async with self.store.backfill(network) as term:
            followed = await self._followed(term)
            end = followed.first_block - 1
            self.progress.last = end if last is None else min(last, end)
            parts = await term.uncovered(self.contract, first, self.progress.last)
            self.progress.total = sum(high - low + 1 for low, high in parts)
            if parts and self.contract == ALL:
                await self._load_covered(term, parts)
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

    async def _load_covered(self, term: LeaderSession, parts: Sequence[tuple[int, int]]) -> None:
        found: defaultdict[bytes, list[tuple[int, int]]] = defaultdict(list)
        for contract, low, high in await term.covered_contracts(parts[0][0], parts[-1][1]):
            found[contract].append((low, high))
        self._covered = dict(found)

    async def _fill(
        self,
        term: LeaderSession,
        group: asyncio.TaskGroup,
        parts: Sequence[tuple[int, int]],
        report: Callable[[BackfillProgress], None],
    ) -> None:
        """Read a few ranges ahead while others are written."""
        ranges = self._ranges(parts)
        window: deque[asyncio.Task[BlockFacts]] = deque()
        while True:
            while len(window) < AHEAD and (part := next(ranges, None)):
                window.append(group.create_task(self.reader.blocks(*part)))
            if not window:
                return
            await self._write(term, await window.popleft())
            report(self.progress)

    def _ranges(self, parts: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int]]:
        for low, high in parts:
            first = low
            while first <= high:
                last = min(first + self.reader.range_size.blocks - 1, high)
                yield first, last
                first = last + 1

    async def _write(self, term: LeaderSession, found: BlockFacts) -> None:
        transfers, odd = found.transfers, found.odd
        if self._covered:
            transfers, odd = facts.transfers_of(log for log in found.logs if not self._is_covered(log))
        changes = HoldingChanges()
        changes.add(transfers)
        async with term.transaction() as connection:
            await blocks.cover(connection, term.number, self.contract, ranges=[(found.first, found.last)])
            await holdings.add(connection, term.number, changes)
        self.progress.done += found.blocks
        self.progress.block = found.last
        self.progress.transfers += len(transfers)
        self.progress.odd += odd

    def _is_covered(self, log: ChainLog) -> bool:
        """Whether the log's block was already indexed for its contract alone."""
        ranges = self._covered.get(bytes.fromhex(log.address[2:]))
        if not ranges:
            return False
        number = int(log.block_number, 16)
        return any(low <= number <= high for low, high in ranges)
