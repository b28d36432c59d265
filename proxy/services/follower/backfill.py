"""What lies before the block at which a network's follower began, indexed later.

The rule that keeps everything counted once: the follower has all blocks from its first on, for all contracts; a back-fill
writes below that block only, and records in the same transaction which blocks it has covered, for all contracts or for one.
What is covered is left out when it is asked for again, so that a back-fill that was stopped goes on where it was; and
a back-fill of all contracts leaves out the logs of those that were covered alone.
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
from proxy.store import blocks, holdings
from proxy.store.blocks import BlockStore, Followed, LeaderSession

AHEAD = 3
ALL = b""


@dataclass(slots=True)
class BackfillProgress:
    """`last` is the last block that there is to do; done and total are blocks."""

    last: int = 0
    total: int = 0
    done: int = 0
    block: int = 0
    transfers: int = 0
    odd: int = 0


@dataclass(slots=True)
class Backfill:
    """One run: blocks `first` to `last` (None: all below the follower's first) of all contracts, or of one."""

    reader: BlockReader
    store: BlockStore
    start: int | None
    contract: bytes = ALL
    progress: BackfillProgress = field(default_factory=BackfillProgress)
    _alone: dict[bytes, list[tuple[int, int]]] = field(default_factory=dict)

    async def run(self, first: int, last: int | None, tell: Callable[[BackfillProgress], None]) -> BackfillProgress:
        network = self.reader.route.network.id
        async with self.store.backfill(network) as term:
            followed = await self._followed(term)
            end = followed.first_block - 1
            self.progress.last = end if last is None else min(last, end)
            parts = await term.uncovered(self.contract, first, self.progress.last)
            self.progress.total = sum(high - low + 1 for low, high in parts)
            if parts and self.contract == ALL:
                await self._load_alone(term, parts)
            try:
                async with asyncio.TaskGroup() as group:
                    await self._fill(term, group, parts, tell)
            except BaseExceptionGroup as failed:
                raise failed.exceptions[0] from None
        return self.progress

    async def _followed(self, term: LeaderSession) -> Followed:
        """Where the follower began; where it never did, it will, and this is its first block."""
        found = await term.read()
        if found.cursor is None:
            return await begin(self.reader, term, await self.reader.head(), start=self.start)
        return found

    async def _load_alone(self, term: LeaderSession, parts: Sequence[tuple[int, int]]) -> None:
        found: defaultdict[bytes, list[tuple[int, int]]] = defaultdict(list)
        for contract, low, high in await term.covered_contracts(parts[0][0], parts[-1][1]):
            found[contract].append((low, high))
        self._alone = dict(found)

    async def _fill(
        self,
        term: LeaderSession,
        group: asyncio.TaskGroup,
        parts: Sequence[tuple[int, int]],
        tell: Callable[[BackfillProgress], None],
    ) -> None:
        """Some are read ahead while others are written."""
        wanted = self._ranges(parts)
        window: deque[asyncio.Task[BlockFacts]] = deque()
        while True:
            while len(window) < AHEAD and (part := next(wanted, None)):
                window.append(group.create_task(self.reader.blocks(*part)))
            if not window:
                return
            await self._write(term, await window.popleft())
            tell(self.progress)

    def _ranges(self, parts: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int]]:
        for low, high in parts:
            first = low
            while first <= high:
                last = min(first + self.reader.span.blocks - 1, high)
                yield first, last
                first = last + 1

    async def _write(self, term: LeaderSession, found: BlockFacts) -> None:
        transfers, odd = found.transfers, found.odd
        if self._alone:
            transfers, odd = facts.transfers_of(log for log in found.logs if not self._has(log))
        changes = HoldingChanges()
        changes.add(transfers)
        async with term.transaction() as connection:
            await blocks.cover(connection, term.number, self.contract, ranges=[(found.first, found.last)])
            await holdings.add(connection, term.number, changes)
        self.progress.done += found.blocks
        self.progress.block = found.last
        self.progress.transfers += len(transfers)
        self.progress.odd += odd

    def _has(self, log: ChainLog) -> bool:
        """Whether the log's contract was indexed alone there."""
        ranges = self._alone.get(bytes.fromhex(log.address[2:]))
        if not ranges:
            return False
        number = int(log.block_number, 16)
        return any(low <= number <= high for low, high in ranges)
