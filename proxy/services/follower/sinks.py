"""Sinks derive data from blocks and write it in the follower's transaction.

A sink can rely on this: blocks come in order, each once and without gaps. Its writes are committed together with the cursor.
When the chain drops blocks, `undo` reverts those above the last common block before new ones come. A block that is settled is
never undone. A sink must use nothing but the connection it is given, because the transaction waits for it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from typing import Protocol

from proxy import telemetry
from proxy.chains.evm import activity
from proxy.chains.evm.facts import TOPICS, BlockFacts
from proxy.chains.evm.matching import InternalTransfer
from proxy.core.holdings import HoldingChanges, Transfer
from proxy.core.transfer_history import INTERNAL, NATIVE
from proxy.store.postgres import blocks, holdings, trace_jobs, transfers
from proxy.store.postgres.blocks import BlockId, Followed
from proxy.store.postgres.pool import DatabaseConnection
from proxy.store.postgres.trace_jobs import TraceJob
from proxy.store.postgres.transfers import BlockRow


class StaleRead(Exception):
    """The blocks were read without data that a sink needs by now. The transaction is rolled back and they are read again."""


class IndexIncomplete(Exception):
    """Blocks were written without the holdings of this database. Only a new index is complete again."""


class FollowerSink(Protocol):
    """`topics`: the first topics of the logs it needs; None means all logs. `blocks`: whether it needs every block on its own,
    with the header; without such a sink old blocks come in ranges. `transactions`: whether it needs full transactions in the
    headers. `receipts`: whether it needs to know which transactions failed. All of these may change at any time."""

    @property
    def topics(self) -> frozenset[str] | None: ...
    @property
    def blocks(self) -> bool: ...
    @property
    def transactions(self) -> bool: ...
    @property
    def receipts(self) -> bool: ...

    async def write(self, connection: DatabaseConnection, network: Followed, facts: Sequence[BlockFacts]) -> None:
        """Write the facts of blocks, in order. A block with a header may be undone later, a range is not."""

    async def undo(
        self, connection: DatabaseConnection, network: Followed, stays: BlockId, removed: Sequence[BlockId]
    ) -> None:
        """Revert the `removed` blocks, newest first. `stays` is the newest block left."""

    async def settle(self, connection: DatabaseConnection, network: Followed, below: int) -> None:
        """Blocks below this one will not be undone. Called every few blocks."""

    async def forget(self, connection: DatabaseConnection, network: Followed) -> None:
        """Delete all data of the network: its index is reset."""


class HoldingsSink:
    """Indexes token holdings."""

    topics: frozenset[str] | None = TOPICS
    blocks = False
    transactions = False
    receipts = False

    async def write(self, connection: DatabaseConnection, network: Followed, facts: Sequence[BlockFacts]) -> None:
        if not network.indexes_holdings:
            raise IndexIncomplete(
                "its holdings were kept in another database, those in this one are incomplete: "
                f"run `penstock index --chain {network.id} --forget` to rebuild the index"
            )
        whole = HoldingChanges()
        packed = []
        for piece in facts:
            if piece.header is None:
                whole.add(piece.transfers)
            else:
                changes = HoldingChanges()
                changes.add(piece.transfers)
                whole.include(changes)
                if len(changes):
                    packed.append((piece.last, changes.pack()))
            telemetry.odd_logs_total.labels(network.id).inc(piece.odd)
            telemetry.transfers_total.labels(network.id).inc(len(piece.transfers))
        await holdings.add(connection, network.number, whole)
        await holdings.record_changes(connection, network.number, packed)

    async def undo(
        self, connection: DatabaseConnection, network: Followed, stays: BlockId, removed: Sequence[BlockId]
    ) -> None:
        await holdings.take_back(connection, network.number, stays.number)

    async def settle(self, connection: DatabaseConnection, network: Followed, below: int) -> None:
        await holdings.delete_changes_below(connection, network.number, below)

    async def forget(self, connection: DatabaseConnection, network: Followed) -> None:
        await holdings.delete_network(connection, network.number)


class NoHoldingsSink:
    """Replaces `HoldingsSink` in the main database if the network's index is in another one."""

    topics: frozenset[str] | None = frozenset()
    blocks = False
    transactions = False
    receipts = False

    async def write(self, connection: DatabaseConnection, network: Followed, facts: Sequence[BlockFacts]) -> None:
        await blocks.leave_out_holdings(connection, network.number)

    async def undo(
        self, connection: DatabaseConnection, network: Followed, stays: BlockId, removed: Sequence[BlockId]
    ) -> None:
        await blocks.leave_out_holdings(connection, network.number)

    async def settle(self, connection: DatabaseConnection, network: Followed, below: int) -> None:
        pass

    async def forget(self, connection: DatabaseConnection, network: Followed) -> None:
        await holdings.delete_network(connection, network.number)


class TransfersSink:
    """Keeps the history of one network's transfers, of the given categories.

    Tokens come from logs, native transfers from transactions and their receipts. Internal transfers need traces, which take
    long: the sink only stores a trace job for each block, and the block is not complete until `write_calls` ends the job.
    """

    topics: frozenset[str] | None = TOPICS

    def __init__(self, categories: Collection[int], *, span: int, keep: int = 0) -> None:
        """`span`: the blocks per table of a network without any. `keep`: the blocks whose transfers are kept; 0: all."""
        self.categories = frozenset(categories)
        self._span = span
        self._keep = keep
        # The block after those written last, in the same term, and the last block that has tables: while blocks come in a row,
        # their tables and coverage are known to be there.
        self._term: Followed | None = None
        self._next = self._opened = -1

    def __repr__(self) -> str:
        return f"<TransfersSink of {sorted(self.categories)}>"

    @property
    def blocks(self) -> bool:
        return bool(self.categories & {NATIVE, INTERNAL})

    @property
    def transactions(self) -> bool:
        return NATIVE in self.categories

    receipts = transactions

    async def write(self, connection: DatabaseConnection, network: Followed, facts: Sequence[BlockFacts]) -> None:
        first, last = facts[0].first, facts[-1].last
        if network is not self._term or first != self._next or last > self._opened:
            await self._open(connection, network, first, last + transfers.AHEAD)
        history = BlockHistory(network.number, self.categories)
        for piece in facts:
            history.add(piece)
            if NATIVE in self.categories:
                history.add(piece, _native(piece))
        await transfers.write(connection, network.number, history.blocks(), history.rows)
        if INTERNAL in self.categories:
            await trace_jobs.add(connection, network.id, [(piece.last, piece.hash) for piece in facts])
        self._term, self._next = network, last + 1

    async def _open(self, connection: DatabaseConnection, network: Followed, first: int, last: int) -> None:
        if self.categories:
            await transfers.open_tables(connection, network.number, first, last, span=self._span)
        await transfers.follow(connection, network.number, self.categories - {INTERNAL}, at=first)
        self._opened = last

    async def hold(self, connection: DatabaseConnection) -> None:
        """Nothing to lock."""

    async def write_calls(
        self, connection: DatabaseConnection, network: str, job: TraceJob, calls: Sequence[InternalTransfer]
    ) -> None:
        """Write the internal transfers of a block, in the transaction that ends its trace job."""
        if INTERNAL not in self.categories:
            return
        number = await transfers.number_of(connection, network)
        known = await transfers.transactions_of(connection, number, [job.block])
        # Written while internal transfers were not kept: a back-fill adds them.
        if job.block not in known:
            return
        history = BlockHistory(number, {INTERNAL}, known)
        history.add_transfers(activity.internal_transfers(calls, job.block))
        await transfers.write(connection, number, history.blocks(), history.rows)
        await transfers.extend(connection, number, history.extended())
        await transfers.cover(connection, number, {INTERNAL}, blocks=(job.block, job.block))

    async def undo(
        self, connection: DatabaseConnection, network: Followed, stays: BlockId, removed: Sequence[BlockId]
    ) -> None:
        # First, because a block whose job is being finished has to be written before it can be removed.
        await trace_jobs.drop(connection, network.id, above=stays.number)
        await transfers.take_back(connection, network.number, stays.number)

    async def settle(self, connection: DatabaseConnection, network: Followed, below: int) -> None:
        if self._keep:
            await transfers.expire_below(connection, network.number, below - self._keep)

    async def forget(self, connection: DatabaseConnection, network: Followed) -> None:
        await trace_jobs.drop(connection, network.id, above=-1)
        await transfers.delete_network(connection, network.number)


def _native(piece: BlockFacts) -> list[Transfer]:
    if piece.header is None or piece.failed is None or not activity.is_whole(piece.header):
        raise StaleRead
    return activity.native_transfers(piece.header, piece.failed)


class BlockHistory:
    """The rows of blocks and of their transfers. `known`: the blocks that have rows already, each with the hashes of its
    transactions."""

    def __init__(self, network: int, categories: Set[int], known: Mapping[int, bytes] | None = None) -> None:
        self._network = network
        self._categories = categories
        self._places: dict[int, tuple[bytes, int]] = {}
        self._hashes = {number: _positions(hashes) for number, hashes in (known or {}).items()}
        self._known = {number: len(hashes) for number, hashes in self._hashes.items()}
        self.rows: list[bytes] = []

    def __repr__(self) -> str:
        return f"<BlockHistory of {len(self.rows)} transfers>"

    @property
    def numbers(self) -> list[int]:
        """The blocks that have transfers."""
        return [*self._hashes]

    def add(self, piece: BlockFacts, moved: Sequence[Transfer] | None = None) -> None:
        """Add the transfers of a block or range, by default those of its tokens. If internal transfers are kept, every block
        gets a row, to which they can be added later."""
        self._places |= places_of(piece)
        if INTERNAL in self._categories and piece.header is not None:
            self._hashes.setdefault(piece.last, {})
        self.add_transfers(piece.transfers if moved is None else moved)

    def add_places(self, places: Mapping[int, tuple[bytes, int]]) -> None:
        """Add the hashes and times of blocks."""
        self._places |= places

    def add_transfers(self, moved: Iterable[Transfer]) -> None:
        """Add transfers of blocks that are known."""
        network, categories, hashes, rows = self._network, self._categories, self._hashes, self.rows
        for transfer in moved:
            if transfer.standard not in categories:
                continue
            of_block = hashes.get(transfer.block)
            if of_block is None:
                of_block = hashes[transfer.block] = {}
            tx = of_block.setdefault(transfer.transaction, len(of_block))
            rows.append(transfers.packed(network, tx, transfer))

    def blocks(self) -> list[BlockRow]:
        """The blocks that get a row."""
        return [
            BlockRow(number, *self._places[number], _joined(hashes))
            for number, hashes in self._hashes.items()
            if number not in self._known
        ]

    def extended(self) -> dict[int, bytes]:
        """The blocks that had a row and get more transactions, each with the hashes of all."""
        return {
            number: _joined(self._hashes[number])
            for number, count in self._known.items()
            if len(self._hashes[number]) > count
        }


def _positions(hashes: bytes) -> dict[str, int]:
    return {"0x" + hashes[at : at + 32].hex(): at // 32 for at in range(0, len(hashes), 32)}


def _joined(hashes: Iterable[str]) -> bytes:
    return b"".join(bytes.fromhex(each[2:]) for each in hashes)


def places_of(piece: BlockFacts) -> dict[int, tuple[bytes, int]]:
    """The hash and time of each block that has logs."""
    if piece.header is not None:
        return {piece.last: (piece.hash, piece.time)}
    known = {(log.block_number, log.block_hash, log.block_timestamp) for log in piece.logs}
    return {int(number, 16): (bytes.fromhex(hash_[2:]), int(time or "0x0", 16)) for number, hash_, time in known}


def topics_of(sinks: Sequence[FollowerSink]) -> frozenset[str] | None:
    """The topics that any of the sinks needs; None means all logs."""
    topics: set[str] = set()
    for sink in sinks:
        if sink.topics is None:
            return None
        topics |= sink.topics
    return frozenset(topics)
