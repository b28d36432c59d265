"""Index blocks from before the follower's first block.

Every transfer is counted once, by this rule: the follower indexes all contracts from its first block on. A back-fill writes
only below that block, and records in the same transaction which blocks it has covered, for all contracts or for one. Covered
blocks are skipped later, so an interrupted back-fill resumes where it stopped, and a back-fill of all contracts skips the
logs of contracts that were covered alone.

The history of transfers has the same rule for each of its categories, with a first block of its own: the one from which on the
follower writes the category. A back-fill of one contract adds holdings only. Tokens are read by ranges of logs; native and
internal transfers need the transactions, receipts and traces of each block.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from proxy.chains.evm import activity, facts
from proxy.chains.evm.facts import BlockFacts, ChainLog
from proxy.chains.evm.matching import InternalTransfer
from proxy.core.holdings import HoldingChanges, Transfer
from proxy.core.transfer_history import INTERNAL, NATIVE, OF_LOGS, blocks_per_table
from proxy.errors import Fault
from proxy.services.follower.block_reader import BlockReader, ReadFailed
from proxy.services.follower.network_follower import begin
from proxy.services.follower.sinks import BlockHistory
from proxy.services.rpc.calls import RpcError
from proxy.services.rpc.traces import MalformedTrace, TraceReader
from proxy.store.postgres import blocks, holdings, transfers
from proxy.store.postgres.blocks import BlockStore, Followed, LeaderSession
from proxy.store.postgres.pool import DatabaseConnection

# Ranges read ahead of the writing.
AHEAD = 3
# Blocks of a range, and those read at the same time, if each is read on its own.
COIN_BLOCKS, BLOCKS_AT_ONCE = 64, 8
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

    @property
    def needs_logs(self) -> bool:
        return self.holdings or bool(self.categories & OF_LOGS)

    @property
    def needs_blocks(self) -> bool:
        """Whether each block is read on its own."""
        return bool(self.categories - OF_LOGS)


@dataclass(slots=True)
class Coins:
    """Transfers of coins, and the hash and time of each block."""

    transfers: list[Transfer] = field(default_factory=list)
    places: dict[int, tuple[bytes, int]] = field(default_factory=dict)


@dataclass(slots=True)
class Backfill:
    """One run over blocks `first` to `last` (None: up to the follower's first), for all contracts or for one. `categories`: of
    the transfers that are kept."""

    reader: BlockReader
    traces: TraceReader
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
        window: deque[tuple[Missing, asyncio.Task[tuple[BlockFacts | None, Coins]]]] = deque()
        while True:
            while len(window) < AHEAD and (part := next(ranges, None)):
                window.append((part, group.create_task(self._read(part))))
            if not window:
                return
            part, reading = window.popleft()
            await self._write(term, part, *await reading)
            report(self.progress)

    async def _read(self, part: Missing) -> tuple[BlockFacts | None, Coins]:
        found = await self.reader.blocks(part.first, part.last) if part.needs_logs else None
        coins = Coins()
        if part.needs_blocks:
            for first in range(part.first, part.last + 1, BLOCKS_AT_ONCE):
                numbers = range(first, min(first + BLOCKS_AT_ONCE, part.last + 1))
                await asyncio.gather(*(self._read_coins(part, number, coins) for number in numbers))
        return found, coins

    async def _read_coins(self, part: Missing, number: int, coins: Coins) -> None:
        moved: list[Transfer] = []
        if NATIVE in part.categories:
            header, failed = await self.reader.outcomes(number)
            moved += activity.native_transfers(header, failed)
        else:
            header = await self.reader.existing_header(number)
        name = bytes.fromhex(header.hash[2:])
        if INTERNAL in part.categories:
            moved += activity.internal_transfers(await self._calls(number, name), number)
        if moved:
            coins.transfers += moved
            coins.places[number] = name, int(header.timestamp, 16)

    async def _calls(self, number: int, name: bytes) -> list[InternalTransfer]:
        try:
            return await self.traces.calls(number, name)
        except (RpcError, MalformedTrace, Fault) as exc:
            raise ReadFailed(
                f"block {number} cannot be traced ({exc}): add an upstream that serves debug_traceBlockByHash or trace_block, "
                "or remove `internal` from follower.transfers"
            ) from None

    def _ranges(self, parts: Sequence[Missing]) -> Iterator[Missing]:
        for part in parts:
            first = part.first
            while first <= part.last:
                most = self.reader.range_size.blocks
                last = min(first + (min(most, COIN_BLOCKS) if part.needs_blocks else most) - 1, part.last)
                yield replace(part, first=first, last=last)
                first = last + 1

    async def _write(self, term: LeaderSession, part: Missing, found: BlockFacts | None, coins: Coins) -> None:
        moved, odd = ([], 0) if found is None else (found.transfers, found.odd)
        if self._covered and found is not None:
            moved, odd = facts.transfers_of(log for log in found.logs if not self._is_covered(log))
        changes = HoldingChanges()
        changes.add(moved)
        ends = (part.first, part.last)
        async with term.transaction() as connection:
            # Coverage comes last: the follower may wait for it while it holds rows of holdings.
            if part.holdings:
                await holdings.add(connection, term.number, changes)
                await blocks.cover(connection, term.number, self.contract, ranges=[ends])
            if part.categories:
                await _write_history(connection, term.number, part, found, coins)
                await transfers.cover(connection, term.number, part.categories, blocks=ends)
        self.progress.done += part.last - part.first + 1
        self.progress.block = part.last
        self.progress.transfers += len(moved) + len(coins.transfers)
        self.progress.odd += odd

    def _is_covered(self, log: ChainLog) -> bool:
        """Whether the log's block was already indexed for its contract alone."""
        ranges = self._covered.get(bytes.fromhex(log.address[2:]))
        if not ranges:
            return False
        number = int(log.block_number, 16)
        return any(low <= number <= high for low, high in ranges)


async def _write_history(
    connection: DatabaseConnection, network: int, part: Missing, found: BlockFacts | None, coins: Coins
) -> None:
    """Add transfers to blocks that may have transfers of other categories already."""
    moved = [] if found is None else [each for each in found.transfers if each.standard in part.categories]
    known = await transfers.transactions_of(connection, network, {each.block for each in (*moved, *coins.transfers)})
    history = BlockHistory(network, part.categories, known)
    if found is not None:
        history.add(found, moved)
    history.add_places(coins.places)
    history.add_transfers(coins.transfers)
    await transfers.write(connection, network, history.blocks(), history.rows)
    await transfers.extend(connection, network, history.extended())


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
