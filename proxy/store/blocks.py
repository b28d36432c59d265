"""How far a network is written, and by whom.

One session at a time may write a network's blocks: the one that holds its advisory lock. It writes through that very session,
so that losing the lock is losing the transaction. As a second wall, every transaction moves the cursor from the block where
its writer believes it to be, compared by hash in the row that it locks: whoever is mistaken changes nothing and is told so.

A leader says something every few seconds. One that dies loses its session, and with it the lock, at once; one that hangs (a
stopped process, a machine that is gone) is found silent by those who wait for the lock, and its session is ended for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import asyncpg

from proxy.errors import InvalidRequest
from proxy.store import sql
from proxy.store.pool import DatabaseConnection, Pool, translated

# The first half of the lock's name, the network's number is the second: the letters "foll" and "back".
FOLLOWING = 0x666F6C6C
BACKFILLING = 0x6261636B
# How often those who wait try, and how often a leader speaks. A silent one is given this much time.
TRY_S = 0.5
ALIVE_S = 2.0
SILENT_S = 15.0
# No statement of a leader's takes as long; one that does stands on a line that is dead.
STATEMENT_S = 30.0
# So that the server, too, sees soon that a leader's machine is gone.
_SESSION = {
    "tcp_keepalives_idle": "5",
    "tcp_keepalives_interval": "2",
    "tcp_keepalives_count": "3",
    "idle_in_transaction_session_timeout": "60s",
}


class LeadershipLost(Exception):
    """The cursor is not where it was believed to be: somebody else writes this network, or it was begun anew."""


@dataclass(frozen=True, slots=True)
class BlockMark:
    """A block, by number and hash."""

    number: int
    hash: bytes


# Before the first block of a chain, whose parent is nothing.
NOTHING = BlockMark(-1, bytes(32))


@dataclass(frozen=True, slots=True)
class Followed:
    """A network as the store knows it: `cursor` is the last block written, None before the first."""

    id: str
    number: int
    first_block: int
    cursor: BlockMark | None


class LeaderSession:
    """The session that holds a network's lock. `transaction` is the only way to write."""

    def __init__(self, connection: DatabaseConnection, network: str, number: int) -> None:
        self._connection = connection
        self._turn = asyncio.Lock()
        self.network = network
        self.number = number

    def __repr__(self) -> str:
        return f"<LeaderSession of {self.network}, {'over' if self._connection.is_closed() else 'open'}>"

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[DatabaseConnection]:
        async with self._turn:
            with translated():
                async with self._connection.transaction():
                    yield self._connection

    async def stay(self) -> None:
        """Say something now and then; raises when the session is lost. Runs beside the work."""
        while True:
            await asyncio.sleep(ALIVE_S)
            async with self._turn:
                with translated():
                    await self._connection.fetchval(sql.blocks.keep_alive, timeout=ALIVE_S * 2)

    async def read(self) -> Followed:
        async with self.transaction() as connection:
            return _followed(await connection.fetchrow(sql.blocks.read_network, self.network))

    async def begin(self, first: int, parent: bytes) -> Followed:
        """Follow from this block on, whose parent this is; where somebody has begun already, from where they did."""
        async with self.transaction() as connection:
            if await connection.fetchrow(sql.blocks.begin_following, self.number, first, parent):
                await remember(connection, self.number, [BlockMark(first - 1, parent)])
        return await self.read()

    async def recent(self, cursor: BlockMark, count: int) -> list[BlockMark]:
        """The cursor's block and those below it that are remembered, the newest first."""
        async with self.transaction() as connection:
            rows = await connection.fetch(sql.blocks.recent_blocks, self.number, cursor.number, count)
        return [BlockMark(row["number"], row["hash"]) for row in rows]

    async def set_fault(self, fault: str | None) -> None:
        async with self.transaction() as connection:
            await connection.execute(sql.blocks.set_fault, self.number, fault)

    async def uncovered(self, contract: bytes, first: int, last: int) -> list[tuple[int, int]]:
        """The parts of a range that no back-fill of this contract, or of all, has covered."""
        if first > last:
            return []
        async with self.transaction() as connection:
            rows = await connection.fetch(sql.blocks.uncovered, self.number, contract, first, last)
        return [(row["first"], row["last"]) for row in rows]

    async def covered_contracts(self, first: int, last: int) -> list[tuple[bytes, int, int]]:
        """Contracts that were indexed alone, and where within the range."""
        async with self.transaction() as connection:
            rows = await connection.fetch(sql.blocks.covered_contracts, self.number, first, last)
        return [(row["contract"], row["first"], row["last"]) for row in rows]


class BlockStore:
    def __init__(self, pool: Pool, *, silent_s: float = SILENT_S, statement_s: float = STATEMENT_S) -> None:
        self._pool = pool
        self._silent_s = silent_s
        self._statement_s = statement_s

    @asynccontextmanager
    async def lead(self, network: str) -> AsyncIterator[LeaderSession]:
        """Wait until nobody else follows the network, then be the one who does."""
        async with self._session(network, self._statement_s) as (connection, number):
            with translated():
                while not await connection.fetchval(sql.blocks.try_lead, FOLLOWING, number):
                    await connection.fetch(sql.blocks.end_silent_leader, FOLLOWING, number, self._silent_s)
                    await asyncio.sleep(TRY_S)
            yield LeaderSession(connection, network, number)

    @asynccontextmanager
    async def backfill(self, network: str, *, hurries: bool = True) -> AsyncIterator[LeaderSession]:
        """One back-fill of a network at a time; the follower goes on beside it. To delete a large network takes minutes: who
        does that does not hurry."""
        async with self._session(network, self._statement_s if hurries else None) as (connection, number):
            with translated():
                free = await connection.fetchval(sql.blocks.try_lead, BACKFILLING, number)
            if not free:
                raise InvalidRequest(f"another back-fill of {network} is running: wait for it, or stop it")
            yield LeaderSession(connection, network, number)

    @asynccontextmanager
    async def _session(self, network: str, statement_s: float | None) -> AsyncIterator[tuple[DatabaseConnection, int]]:
        with translated():
            connection = await asyncpg.connect(
                self._pool.url,
                timeout=5.0,
                command_timeout=statement_s,
                server_settings={"application_name": f"penstock {network}"[:63], **_SESSION},
            )
        try:
            with translated():
                await connection.execute(sql.blocks.add_network, network)
                row = await connection.fetchrow(sql.blocks.read_network, network)
            assert row is not None
            yield connection, row["number"]
        finally:
            # Not a polite good-bye: it could wait for a line that is dead, and the lock with it.
            connection.terminate()


def _followed(row: asyncpg.Record | None) -> Followed:
    assert row is not None
    cursor = None if row["block"] is None else BlockMark(row["block"], row["block_hash"])
    return Followed(row["network"], row["number"], row["first_block"] or 0, cursor)


# For those who write, in their transaction; `network` is its number


async def move(connection: DatabaseConnection, network: int, *, cursor: BlockMark, to: BlockMark, time: int) -> None:
    """The first step of every transaction: it locks the cursor, or finds that it is not ours to move."""
    arguments = (network, cursor.number, cursor.hash, to.number, to.hash, float(time))
    if await connection.fetchval(sql.blocks.move_cursor, *arguments) is None:
        raise LeadershipLost(f"the cursor is not at block {cursor.number}")


async def tell(connection: DatabaseConnection, network: int) -> None:
    """Whoever listens on penstock_blocks hears of it when the transaction is through."""
    await connection.execute(sql.blocks.notify_block, network)


async def remember(connection: DatabaseConnection, network: int, blocks: Sequence[BlockMark]) -> None:
    numbers, hashes = [block.number for block in blocks], [block.hash for block in blocks]
    await connection.execute(sql.blocks.remember_blocks, network, numbers, hashes)


async def forget_above(connection: DatabaseConnection, network: int, number: int) -> None:
    await connection.execute(sql.blocks.forget_blocks_above, network, number)


async def forget_below(connection: DatabaseConnection, network: int, number: int) -> None:
    await connection.execute(sql.blocks.forget_blocks_below, network, number)


async def forget(connection: DatabaseConnection, network: int) -> None:
    """As if the network had never been followed."""
    await connection.execute(sql.blocks.forget_blocks_above, network, -2)
    await connection.execute(sql.blocks.forget_backfills, network)
    await connection.execute(sql.blocks.forget_network, network)


async def cover(
    connection: DatabaseConnection, network: int, contract: bytes, *, ranges: Iterable[tuple[int, int]]
) -> None:
    for first, last in ranges:
        await connection.execute(sql.blocks.cover, network, contract, first, last)
