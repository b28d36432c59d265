"""The history of transfers: written by the follower and by back-fills, read by the transfer endpoints.

Writers pass their own connection, because transfers, their coverage and the cursor must change in one transaction. Rows are
copied in Postgres's binary format, which is built here: the driver's encoding takes longer than the rest.
"""

from __future__ import annotations

import io
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import asyncpg

from proxy.core.holdings import Transfer
from proxy.core.transfer_history import LAST, PageStart, Position, TransferFilter, place_of
from proxy.store.postgres import sql
from proxy.store.postgres.index_reads import IndexReads
from proxy.store.postgres.pool import DatabaseConnection

_HEADER = b"PGCOPY\n\xff\r\n\0" + bytes(8)
_TRAILER = b"\xff\xff"
# Rows of an address that are scanned for one page, if a filter may refuse most of them.
SCANNED = 1000
# For a contract: the blocks in the first range that is looked through, the number of ranges, and the rows after which a range
# is halved three times. A single block is read whole.
FIRST_RANGE, RANGES, MOST_ROWS, ROWS_OF_BLOCK = 64, 12, 2000, 1_000_000
# Tables ahead of the newest block, in blocks: created long before they are needed.
AHEAD = 10_000


@dataclass(frozen=True, slots=True)
class BlockRow:
    """A block with transfers."""

    number: int
    hash: bytes
    time: int
    transactions: bytes


@dataclass(frozen=True, slots=True)
class StoredTransfer:
    """A transfer with its block and transaction. `contract` is empty for coins, `recipient` for the creation of a contract."""

    position: Position
    block_hash: bytes
    time: int
    transaction: bytes
    category: int
    sender: bytes
    recipient: bytes
    contract: bytes
    amount: int
    token_id: int


class CompleteBlocks(NamedTuple):
    """A range of blocks without gaps."""

    first: int
    last: int


@dataclass(frozen=True, slots=True)
class TransferPage:
    """Transfers in order. `next` is where the next page starts; None if there are no more."""

    transfers: list[StoredTransfer]
    next: Position | None


class TransferStore:
    """Reads the history. Each read scans a bounded number of rows; a page may then be short, or empty, although more follow."""

    def __init__(self, index: IndexReads) -> None:
        self._index = index
        # Networks keep their number for ever.
        self._numbers: dict[str, int] = {}

    def __repr__(self) -> str:
        return f"<TransferStore of {self._index!r}>"

    async def coverage(self, network: str) -> dict[int, CompleteBlocks]:
        """For each category that is kept, the newest blocks that have all of its transfers."""
        rows = await self._index.fetch(sql.transfers.coverage, network)
        return {row["category"]: CompleteBlocks(row["first"], row["last"]) for row in rows}

    async def of_address(
        self, network: str, address: bytes, sides: tuple[bool, bool], wanted: TransferFilter, start: PageStart
    ) -> TransferPage:
        """`sides`: whether transfers from the address, and those to it, are wanted."""
        edge = start.edge(wanted)
        rows = await self._fetch(
            network,
            sql.transfers.newest_first if start.newest_first else sql.transfers.oldest_first,
            address,
            *sides,
            *edge,
            wanted.low if start.newest_first else wanted.high,
            SCANNED if wanted.is_selective else start.limit + 1,
            start.limit + 1,
            wanted.categories,
            wanted.contracts or None,
            wanted.counterparty,
            unsigned(wanted.min_amount) or None,
        )
        end = Position(rows[0]["end_block"], rows[0]["end_place"]) if rows[0]["end_block"] is not None else None
        transfers = [row for row in rows if row["block"] is not None]
        if len(transfers) > start.limit:
            transfers.pop()
            end = Position(transfers[-1]["block"], transfers[-1]["place"])
        return TransferPage(await self._completed(network, transfers), end)

    async def of_contract(
        self, network: str, contract: bytes, wanted: TransferFilter, start: PageStart, *, head: int
    ) -> TransferPage:
        """Looks through ranges of blocks, which grow while they have few transfers of the contract. `head`: the newest."""
        edge, transfers = start.edge(wanted), list[asyncpg.Record]()
        low, high = wanted.low, min(wanted.high, head)
        if start.newest_first:
            high = min(high, edge.block)
        else:
            low = max(low, edge.block)
        width = FIRST_RANGE
        for _ in range(RANGES):
            if low > high:
                break
            part = (max(low, high - width + 1), high) if start.newest_first else (low, min(high, low + width - 1))
            most = MOST_ROWS if width > 1 else ROWS_OF_BLOCK
            rows = await self._fetch(network, sql.transfers.of_contract, contract, *part, most)
            if len(rows) >= most and width > 1:
                width = max(1, width // 8)
                continue
            transfers += _ordered((row for row in rows if _matches(row, wanted) and _is_after(row, edge, start)), start)
            if start.newest_first:
                high = part[0] - 1
            else:
                low = part[1] + 1
            if len(transfers) > start.limit:
                break
            width *= 4
        end = None
        if len(transfers) > start.limit:
            del transfers[start.limit :]
            end = Position(transfers[-1]["block"], transfers[-1]["place"])
        elif low <= high:
            end = Position(high + 1, 0) if start.newest_first else Position(low - 1, LAST.place)
        return TransferPage(await self._completed(network, transfers), end)

    async def of_transaction(
        self, network: str, transaction: bytes, *, block: int, block_hash: bytes
    ) -> list[StoredTransfer] | None:
        """The transfers of a transaction in this block; None if the index has another block there."""
        rows = await self._fetch(network, sql.transfers.hashes, block)
        if rows[0]["hash"] not in (None, block_hash):
            return None
        hashes = rows[0]["transactions"]
        known = [hashes[at : at + 32] for at in range(0, len(hashes), 32)]
        if transaction not in known:
            return []
        transfers = await self._fetch(network, sql.transfers.of_transaction, block, known.index(transaction))
        return await self._completed(network, transfers)

    async def block_at(self, network: str, time: int) -> int | None:
        """The first block with transfers at this time or later."""
        ((block,),) = await self._fetch(network, sql.transfers.block_at, time)
        return None if block is None else int(block)

    async def _completed(self, network: str, rows: Sequence[asyncpg.Record]) -> list[StoredTransfer]:
        """Add hashes and times."""
        if not rows:
            return []
        blocks, places = [row["block"] for row in rows], [row["tx"] for row in rows]
        known = await self._fetch(network, sql.transfers.places, blocks, places)
        return [
            StoredTransfer(
                Position(row["block"], row["place"]),
                place["hash"],
                place["time"],
                place["transaction"],
                row["category"],
                row["sender"],
                row["recipient"],
                row["contract"],
                value_of(row["amount"]),
                value_of(row["token_id"]),
            )
            for row, place in zip(rows, known, strict=True)
            # A block that was removed between the two reads; the caller reads again.
            if place["hash"] is not None
        ]

    async def _fetch(self, network: str, query: str, *arguments: object) -> list[asyncpg.Record]:
        number = self._numbers.get(network)
        if number is None:
            ((number,),) = await self._index.fetch(sql.transfers.number_of, network)
            self._numbers[network] = number
        return await self._index.fetch_at(query, network, number, *arguments)


def _matches(row: asyncpg.Record, wanted: TransferFilter) -> bool:
    return (
        row["category"] in wanted.categories
        and (not wanted.contracts or row["contract"] in wanted.contracts)
        and wanted.counterparty in (None, row["sender"], row["recipient"])
        and value_of(row["amount"]) >= wanted.min_amount
    )


def _ordered(rows: Iterable[asyncpg.Record], start: PageStart) -> list[asyncpg.Record]:
    return sorted(rows, key=lambda row: (row["block"], row["place"]), reverse=start.newest_first)


def _is_after(row: asyncpg.Record, edge: Position, start: PageStart) -> bool:
    position = Position(row["block"], row["place"])
    return position < edge if start.newest_first else position > edge


async def index_block(connection: DatabaseConnection, network: str) -> tuple[int, int] | None:
    """The number of a network, and the newest block of its index; None if it is not indexed."""
    row = await connection.fetchrow(sql.transfers.index_block, network)
    return None if row is None else (row["number"], row["block"])


async def exported(connection: DatabaseConnection, network: int, first: int, last: int) -> list[asyncpg.Record]:
    """All transfers of these blocks, in order. `network` is the network's number."""
    return await connection.fetch(sql.transfers.export, network, first, last)


# Writes, on the caller's connection and in its transaction. `network` is the network's number.


async def open_tables(connection: DatabaseConnection, network: int, first: int, last: int, *, span: int) -> None:
    """Create the tables of these blocks, unless they exist. `span`: the blocks per table of a new network."""
    await connection.execute(sql.transfers.open, network, first, last, span)


async def follow(connection: DatabaseConnection, network: int, categories: Iterable[int], *, at: int) -> None:
    """Record that the follower writes these categories, and no others, from the block `at` on."""
    await connection.execute(sql.transfers.follow, network, sorted(categories), at)


async def write(
    connection: DatabaseConnection, network: int, blocks: Sequence[BlockRow], rows: Sequence[bytes]
) -> None:
    """Copy blocks, and transfers as `packed` returned them."""
    if blocks:
        whole = b"".join((_HEADER, *(_packed_block(network, each) for each in blocks), _TRAILER))
        await connection.copy_to_table(
            "transfer_blocks", source=io.BytesIO(whole), columns=_BLOCK_COLUMNS, format="binary"
        )
    if rows:
        whole = b"".join((_HEADER, *rows, _TRAILER))
        await connection.copy_to_table("transfers", source=io.BytesIO(whole), columns=_COLUMNS, format="binary")


async def number_of(connection: DatabaseConnection, network: str) -> int:
    """The number of a network that is followed."""
    return int(await connection.fetchval(sql.transfers.number_of, network))


async def transactions_of(connection: DatabaseConnection, network: int, blocks: Iterable[int]) -> dict[int, bytes]:
    """The hashes of transactions of those of the blocks that have a row, which is locked."""
    rows = await connection.fetch(sql.transfers.transactions_of, network, sorted(blocks))
    return {row["number"]: row["transactions"] for row in rows}


async def extend(connection: DatabaseConnection, network: int, blocks: Mapping[int, bytes]) -> None:
    """Replace the hashes of transactions of blocks that have a row."""
    if blocks:
        await connection.execute(sql.transfers.extend, network, [*blocks], [*blocks.values()])


async def take_back(connection: DatabaseConnection, network: int, above: int) -> None:
    """Delete the transfers of all blocks above this one."""
    await connection.execute(sql.transfers.delete_above, network, above)
    await connection.execute(sql.transfers.take_back, network, above)


async def expire_below(connection: DatabaseConnection, network: int, below: int) -> int:
    """Drop the tables that have only blocks below this one, unless readers are in the way. Returns how many."""
    return int(await connection.fetchval(sql.transfers.expire_below, network, below))


async def delete_network(connection: DatabaseConnection, network: int) -> None:
    """Delete all transfers of a network."""
    await connection.execute(sql.transfers.drop_below, network, 1 << 62)
    await connection.execute(sql.transfers.delete_coverage, network)


async def cover(
    connection: DatabaseConnection, network: int, categories: Iterable[int], *, blocks: tuple[int, int]
) -> None:
    """Record that all transfers of the categories in these blocks were written."""
    await connection.execute(sql.transfers.cover, network, sorted(categories), *blocks)


async def uncovered(
    connection: DatabaseConnection, network: int, categories: Iterable[int], *, blocks: tuple[int, int], head: int
) -> Mapping[int, list[tuple[int, int]]]:
    """The parts of a range in which each category is missing, below the block from which the follower writes it. `head`: the
    follower's next block, up to which a category is missing that it does not write."""
    rows = await connection.fetch(sql.transfers.uncovered, network, sorted(categories), *blocks, head)
    missing: dict[int, list[tuple[int, int]]] = {}
    for row in rows:
        missing.setdefault(row["category"], []).append((row["first"], row["last"]))
    return missing


# Postgres's binary format: for each column its length and its bytes.

_COLUMNS = (
    "block",
    "place",
    "tx",
    "network",
    "category",
    "sender",
    "recipient",
    "contract",
    "amount",
    "token_id",
)
_BLOCK_COLUMNS = ("number", "time", "network", "hash", "transactions")
_fixed = struct.Struct(">hiqiqiiihih").pack
_fixed_block = struct.Struct(">hiqiqih").pack
_length = struct.Struct(">i").pack
# The lengths of addresses and amounts.
_LENGTHS = [_length(size) for size in range(33)]
_EMPTY, _ADDRESS = _LENGTHS[0], _LENGTHS[20]


def packed(network: int, tx: int, transfer: Transfer) -> bytes:
    """A row. `tx`: its transaction's position among the hashes of its block."""
    category, contract, recipient = transfer.standard, transfer.contract, transfer.recipient
    amount, token_id = unsigned(transfer.amount), unsigned(transfer.token_id)
    place = place_of(category, transfer.log_index, transfer.item)
    return b"".join(
        (
            _fixed(10, 8, transfer.block, 8, place, 4, tx, 2, network, 2, category),
            _ADDRESS,
            transfer.sender,
            _ADDRESS if recipient else _EMPTY,
            recipient,
            _ADDRESS if contract else _EMPTY,
            contract,
            _LENGTHS[len(amount)],
            amount,
            _LENGTHS[len(token_id)],
            token_id,
        )
    )


def _packed_block(network: int, row: BlockRow) -> bytes:
    fixed = _fixed_block(5, 8, row.number, 8, row.time, 2, network)
    return b"".join((fixed, _length(len(row.hash)), row.hash, _length(len(row.transactions)), row.transactions))


def unsigned(value: int) -> bytes:
    """An amount or a token's id as it is stored."""
    return value.to_bytes(value.bit_length() + 7 >> 3, "big")


def value_of(stored: bytes) -> int:
    """The number that `unsigned` made these bytes of."""
    return int.from_bytes(stored, "big")
