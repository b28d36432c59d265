"""Index blocks from before the follower's first block.

Every transfer is counted once, by this rule: the follower indexes all contracts from its first block on. A back-fill writes
only below that block, and records in the same transaction which blocks it has covered, for all contracts or for one. Covered
blocks are skipped later, so an interrupted back-fill resumes where it stopped, and a back-fill of all contracts skips the
logs of contracts that were covered alone.

The history of transfers has the same rule for each of its categories, with a first block of its own: the one from which on the
follower writes the category. A back-fill of one contract adds holdings only. Tokens are read by ranges of logs; native and
internal transfers need the transactions, receipts and traces of each block.

Holdings are staged with their range and merged later (`staged_holdings`).

All upstreams are read at once (`range_lanes`), and their logs are checked: an upstream may return too few without an error. A
back-fill waits while the follower is behind, and while the database's disk is full.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import TypeVar

import asyncpg

from proxy.chains.evm import activity, facts
from proxy.chains.evm.facts import BlockFacts, ChainLog
from proxy.chains.evm.matching import InternalTransfer
from proxy.core import upstream_errors
from proxy.core.holdings import HoldingChanges, Transfer
from proxy.core.transfer_history import INTERNAL, NATIVE, OF_LOGS, blocks_per_table
from proxy.errors import Fault, InvalidRequest, Unavailable
from proxy.services.follower.block_reader import BlockReader, RangeChecks, ReadFailed
from proxy.services.follower.network_follower import begin
from proxy.services.follower.range_lanes import LaneReader, UpstreamLane, WorkList
from proxy.services.follower.sinks import BlockHistory, places_of
from proxy.services.follower.staged_holdings import StagedHoldings
from proxy.services.rpc.calls import RpcError
from proxy.services.rpc.traces import MalformedTrace, TraceReader
from proxy.store.postgres import blocks, transfers
from proxy.store.postgres.blocks import BlockStore, Followed, LeaderSession
from proxy.store.postgres.pool import DatabaseConnection

# How often the follower is looked at, and the most blocks that it may be behind.
FOLLOWER_CHECK_S, MOST_LAG = 1.0, 3
# The pause between attempts to write to a full disk.
DISK_PAUSE_S = 5.0
# Blocks of a range, and those read at the same time, if each is read on its own.
COIN_BLOCKS, BLOCKS_AT_ONCE = 64, 8
ALL = b""
T = TypeVar("T")


@dataclass(slots=True)
class BackfillProgress:
    """`last` is the last block of the run, `done` and `total` count blocks, `block` is the newest block written. `lag`: the
    blocks that the follower is behind. `paused`: why nothing is written. `gaps`: the blocks that could not be read, and why."""

    last: int = 0
    total: int = 0
    done: int = 0
    block: int = 0
    transfers: int = 0
    odd: int = 0
    calls: int = 0
    lag: int = 0
    paused: str = ""
    gaps: list[tuple[int, int, str]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class BackfillLimits:
    """Calls per second, and credits of all upstreams with a cost, 0: no limit. `verifies`: whether each block without logs is
    checked against its bloom filter."""

    calls_per_second: float = 0.0
    credits: int = 0
    verifies: bool = True


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


@dataclass(frozen=True, slots=True)
class ReadRange:
    """A range as it will be written. `history` is for blocks without rows of other categories; it was made of `kept` and
    `places`."""

    part: Missing
    changes: HoldingChanges
    transfers: int
    odd: int
    kept: Sequence[Transfer]
    places: Mapping[int, tuple[bytes, int]]
    history: BlockHistory


@dataclass(frozen=True, slots=True)
class Batch:
    """Ranges that are written together, and their sums, also packed."""

    ranges: Sequence[ReadRange]
    changes: HoldingChanges
    packed: bytes

    @classmethod
    def of(cls, ranges: Sequence[ReadRange]) -> Batch:
        whole = HoldingChanges()
        for each in ranges:
            whole.include(each.changes)
        return cls(ranges, whole, whole.pack())


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
    limits: BackfillLimits = BackfillLimits()
    progress: BackfillProgress = field(default_factory=BackfillProgress)
    _checked_at: float = 0.0
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
            staged = StagedHoldings(term)
            await staged.load()
            try:
                async with asyncio.TaskGroup() as group:
                    await self._fill(staged, term, group, parts, report)
            except BaseExceptionGroup as failed:
                if isinstance(failed.exceptions[0], (ReadFailed, InvalidRequest)):
                    # A write may have been cancelled, so only the database knows what is staged.
                    staged = StagedHoldings(term)
                    await staged.load()
                    await staged.merge_all()
                raise failed.exceptions[0] from None
            await self._when_disk_has_room(staged.merge_all, report)
        return self.progress

    async def _followed(self, term: LeaderSession) -> Followed:
        """The network's index. If the follower never ran, this sets its first block."""
        followed = await term.read()
        if followed.cursor is None:
            return await begin(self.reader, term, await self.reader.head(), start=self.start)
        return followed

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
        covered: defaultdict[bytes, list[tuple[int, int]]] = defaultdict(list)
        for contract, low, high in await term.covered_contracts(parts[0].first, parts[-1].last):
            covered[contract].append((low, high))
        self._covered = dict(covered)

    async def _fill(
        self,
        staged: StagedHoldings,
        term: LeaderSession,
        group: asyncio.TaskGroup,
        parts: Sequence[Missing],
        report: Callable[[BackfillProgress], None],
    ) -> None:
        """Read ranges from all upstreams while others are written."""
        limits, upstreams = self.limits, self.reader.route.upstreams
        checks = RangeChecks(every_block=limits.verifies, calls_per_second=limits.calls_per_second)
        lanes = [UpstreamLane(each.label, self.reader.of_upstream(each, checks)) for each in upstreams]
        work, spent = WorkList(parts), self._credits()
        reading = LaneReader(lanes, partial(self._read, checks, term.number), _size)
        writing: asyncio.Task[None] | None = None
        async for ranges in reading.ranges(work, group):
            await self._wait_for_follower(term, report)
            # Encoded while the ranges before are being written.
            batch = Batch.of(ranges)
            if writing is not None:
                await writing
            self.progress.calls = checks.calls
            writing = group.create_task(self._write(staged, term, batch, report))
            if 0 < limits.credits <= self._credits() - spent and work:
                await writing
                raise InvalidRequest(
                    f"{limits.credits:,} credits are used up (--credits): run the command again to continue"
                )
        if writing is not None:
            await writing
        self.progress.gaps += [(each.part.first, each.part.last, each.reason) for each in work.gaps]

    def _credits(self) -> int:
        meters = [each.health.meter for each in self.reader.route.upstreams]
        return sum(each.total.credits for each in meters if each is not None)

    async def _wait_for_follower(self, term: LeaderSession, report: Callable[[BackfillProgress], None]) -> None:
        """Let the follower catch up: both write to the same database, and its blocks are new."""
        now = asyncio.get_running_loop().time()
        if now < self._checked_at + FOLLOWER_CHECK_S:
            return
        while True:
            block = await term.follower_block()
            lag = 0 if block is None else max(0, self.reader.route.heads.tip - block)
            self._checked_at, self.progress.lag = asyncio.get_running_loop().time(), lag
            if lag <= MOST_LAG:
                self.progress.paused = ""
                return
            self.progress.paused = f"the follower is {lag:,} blocks behind"
            report(self.progress)
            await asyncio.sleep(FOLLOWER_CHECK_S)

    async def _write(
        self,
        staged: StagedHoldings,
        term: LeaderSession,
        batch: Batch,
        report: Callable[[BackfillProgress], None],
    ) -> None:
        number = await self._when_disk_has_room(partial(self._commit, staged, term, batch), report)
        staged.include(batch.changes, number)
        for each in batch.ranges:
            self.progress.done += each.part.last - each.part.first + 1
            self.progress.block = max(self.progress.block, each.part.last)
            self.progress.transfers += each.transfers
            self.progress.odd += each.odd
        report(self.progress)
        await self._when_disk_has_room(staged.merge_some, report)

    async def _when_disk_has_room(
        self, write: Callable[[], Awaitable[T]], report: Callable[[BackfillProgress], None]
    ) -> T:
        """Run transactions, and run them again for as long as the database's disk is full."""
        while True:
            try:
                done = await write()
            except Unavailable as exc:
                if not isinstance(exc.__cause__, asyncpg.DiskFullError):
                    raise
                self.progress.paused = "the disk of the database is full"
                report(self.progress)
                await asyncio.sleep(DISK_PAUSE_S)
            else:
                self.progress.paused = ""
                return done

    async def _read(self, checks: RangeChecks, network: int, reader: BlockReader, part: Missing) -> ReadRange:
        block_facts = await reader.blocks(part.first, part.last) if part.needs_logs else None
        coins = Coins()
        if part.needs_blocks:
            for first in range(part.first, part.last + 1, BLOCKS_AT_ONCE):
                numbers = range(first, min(first + BLOCKS_AT_ONCE, part.last + 1))
                await asyncio.gather(*(self._read_coins(checks, reader, part, number, coins) for number in numbers))
        return self._prepared(network, part, block_facts, coins)

    def _prepared(self, network: int, part: Missing, block_facts: BlockFacts | None, coins: Coins) -> ReadRange:
        moved, odd = ([], 0) if block_facts is None else (block_facts.transfers, block_facts.odd)
        kept = [*(each for each in moved if each.standard in part.categories), *coins.transfers]
        places = (
            coins.places if block_facts is None or not part.categories else {**places_of(block_facts), **coins.places}
        )
        if self._covered and block_facts is not None:
            moved, odd = facts.transfers_of(log for log in block_facts.logs if not self._is_covered(log))
        changes = HoldingChanges()
        if part.holdings:
            changes.add(moved)
        count = len(moved) + len(coins.transfers)
        return ReadRange(part, changes, count, odd, kept, places, _history(network, part.categories, kept, places))

    async def _read_coins(
        self, checks: RangeChecks, reader: BlockReader, part: Missing, number: int, coins: Coins
    ) -> None:
        moved: list[Transfer] = []
        if NATIVE in part.categories:
            header, failed = await reader.outcomes(number)
            moved += activity.native_transfers(header, failed)
        else:
            header = await reader.existing_header(number)
        name = bytes.fromhex(header.hash[2:])
        if INTERNAL in part.categories:
            await checks.call()
            moved += activity.internal_transfers(await self._calls(number, name), number)
        if moved:
            coins.transfers += moved
            coins.places[number] = name, int(header.timestamp, 16)

    async def _calls(self, number: int, name: bytes) -> list[InternalTransfer]:
        try:
            return await self.traces.calls(number, name)
        except (RpcError, MalformedTrace, Fault) as exc:
            if isinstance(exc, RpcError) and upstream_errors.classify(exc.error).kind == "unsupported":
                raise InvalidRequest(
                    f"block {number} cannot be traced: add an upstream that serves debug_traceBlockByHash or trace_block, "
                    "or remove `internal` from follower.transfers"
                ) from None
            raise ReadFailed(f"block {number} could not be traced: {exc}") from None

    async def _commit(self, staged: StagedHoldings, term: LeaderSession, batch: Batch) -> int:
        """Returns the number of the staged sums."""
        async with term.transaction() as connection:
            await _write_history(connection, term.number, batch.ranges)
            number = await staged.stage(connection, batch.packed)
            for each in batch.ranges:
                ends = (each.part.first, each.part.last)
                if each.part.holdings:
                    await blocks.cover(connection, term.number, self.contract, ranges=[ends])
                if each.part.categories:
                    await transfers.cover(connection, term.number, each.part.categories, blocks=ends)
        return number

    def _is_covered(self, log: ChainLog) -> bool:
        """Whether the log's block was already indexed for its contract alone."""
        ranges = self._covered.get(bytes.fromhex(log.address[2:]))
        if not ranges:
            return False
        number = int(log.block_number, 16)
        return any(low <= number <= high for low, high in ranges)


def _size(reader: BlockReader, part: Missing) -> int:
    """The blocks that are read together."""
    most = reader.range_size.blocks
    return min(most, COIN_BLOCKS) if part.needs_blocks else most


def _history(
    network: int,
    categories: frozenset[int],
    kept: Sequence[Transfer],
    places: Mapping[int, tuple[bytes, int]],
    known: Mapping[int, bytes] | None = None,
) -> BlockHistory:
    history = BlockHistory(network, categories, known)
    history.add_places(places)
    history.add_transfers(kept)
    return history


async def _write_history(connection: DatabaseConnection, network: int, ranges: Sequence[ReadRange]) -> None:
    """Add transfers to blocks that may have transfers of other categories already."""
    histories = [each.history for each in ranges]
    numbers = [number for each in histories for number in each.numbers]
    if not numbers:
        return
    if known := await transfers.transactions_of(connection, network, numbers):
        histories = [_with_known(network, each, known) for each in ranges]
    rows = [row for each in histories for row in each.rows]
    await transfers.write(connection, network, [row for each in histories for row in each.blocks()], rows)
    await transfers.extend(connection, network, {k: v for each in histories for k, v in each.extended().items()})


def _with_known(network: int, read_range: ReadRange, known: Mapping[int, bytes]) -> BlockHistory:
    """The same history, but for the blocks that have rows."""
    mine = {number: known[number] for number in read_range.history.numbers if number in known}
    return (
        _history(network, read_range.part.categories, read_range.kept, read_range.places, mine)
        if mine
        else read_range.history
    )


def _pieces(holdings: Sequence[tuple[int, int]], categories: Mapping[int, Sequence[tuple[int, int]]]) -> list[Missing]:
    """Ranges in each of which the same is missing."""
    every = [*holdings, *(part for parts in categories.values() for part in parts)]
    cuts = sorted({edge for low, high in every for edge in (low, high + 1)})
    missing = []
    for first, after in pairwise(cuts):
        needed = frozenset(each for each, parts in categories.items() if _has(parts, first))
        if needed or _has(holdings, first):
            missing.append(Missing(first, after - 1, _has(holdings, first), needed))
    return missing


def _has(parts: Sequence[tuple[int, int]], block: int) -> bool:
    return any(low <= block <= high for low, high in parts)
