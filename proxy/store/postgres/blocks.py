"""Block cursors: how far each network is indexed, and which process may write it.

Only one session at a time writes a network's blocks: the one that holds its advisory lock. It writes through that same
session, so losing the lock also loses the transaction. As a second safeguard, every transaction moves the cursor from the
block where its writer expects it, compared by hash under a row lock. A writer with the wrong block changes nothing and gets
LeadershipLost.

A leader sends a statement every few seconds. If its process dies, its session ends and the lock is free at once. If it hangs
(a stopped process, a lost machine), the processes that wait for the lock find its session silent and terminate it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from types import MappingProxyType

import asyncpg

from proxy.errors import InvalidRequest
from proxy.store.postgres import sql
from proxy.store.postgres.pool import DatabaseConnection, Pool, translated

# The first half of the advisory lock's key; the second is the network's number. The letters "foll" and "back".
FOLLOWING = 0x666F6C6C
BACKFILLING = 0x6261636B
# How often a waiting process tries to take the lock, how often a leader sends a statement, and how long a leader may be
# silent before its session is terminated.
TRY_S = 0.5
ALIVE_S = 2.0
SILENT_S = 15.0
# Longer than any statement of a leader: one that takes longer is on a dead connection.
STATEMENT_S = 30.0
# Let the server notice soon that a leader's machine is gone.
_SESSION = {
    "tcp_keepalives_idle": "5",
    "tcp_keepalives_interval": "2",
    "tcp_keepalives_count": "3",
    "idle_in_transaction_session_timeout": "60s",
}


class LeadershipLost(Exception):
    """The cursor is at another block: another process writes this network, or its index was reset."""


@dataclass(frozen=True, slots=True)
class BlockId:
    """A block, by number and hash."""

    number: int
    hash: bytes


# The parent of a chain's first block.
NOTHING = BlockId(-1, bytes(32))


@dataclass(frozen=True, slots=True)
class Followed:
    """The indexing state of a network. `cursor` is the last block written, or None before the first. `indexes_holdings`:
    false if blocks were written without holdings, which are in another database."""

    id: str
    number: int
    first_block: int
    cursor: BlockId | None
    indexes_holdings: bool = True


class LeaderSession:
    """The session that holds a network's lock. All writes go through `transaction`."""

    def __init__(self, connection: DatabaseConnection, network: str, number: int) -> None:
        self._connection = connection
        self._turn = asyncio.Lock()
        self.network = network
        self.number = number

    def __repr__(self) -> str:
        return f"<LeaderSession {self.network}, {'closed' if self._connection.is_closed() else 'open'}>"

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[DatabaseConnection]:
        async with self._turn:
            with translated():
                async with self._connection.transaction():
                    yield self._connection

    async def keep_alive(self) -> None:
        """Send a statement every few seconds; raise when the session is lost. Runs beside the work."""
        while True:
            await asyncio.sleep(ALIVE_S)
            async with self._turn:
                with translated():
                    await self._connection.fetchval(sql.blocks.keep_alive, timeout=ALIVE_S * 2)

    async def read(self) -> Followed:
        async with self.transaction() as connection:
            return _followed(await connection.fetchrow(sql.blocks.read_network, self.network))

    async def begin(self, first: int, parent: bytes) -> Followed:
        """Start following at the block `first` with this parent hash, unless the network is followed already."""
        async with self.transaction() as connection:
            if await connection.fetchrow(sql.blocks.begin_following, self.number, first, parent):
                await record(connection, self.number, [BlockId(first - 1, parent)])
        return await self.read()

    async def recent(self, cursor: BlockId, count: int) -> list[BlockId]:
        """Return recorded blocks from the cursor's downwards, newest first."""
        async with self.transaction() as connection:
            rows = await connection.fetch(sql.blocks.recent_blocks, self.number, cursor.number, count)
        return [BlockId(row["number"], row["hash"]) for row in rows]

    async def set_fault(self, fault: str | None) -> None:
        async with self.transaction() as connection:
            await connection.execute(sql.blocks.set_fault, self.number, fault)

    async def set_stuck(self, reason: str | None) -> None:
        async with self.transaction() as connection:
            await connection.execute(sql.blocks.set_stuck, self.number, reason)

    async def follower_block(self) -> int | None:
        """The block that the follower has reached; None if none is running."""
        async with self.transaction() as connection:
            block: int | None = await connection.fetchval(sql.blocks.follower_block, self.number, FOLLOWING)
        return block

    async def uncovered(self, contract: bytes, first: int, last: int) -> list[tuple[int, int]]:
        """Return the parts of a range that no back-fill has covered, neither for this contract nor for all."""
        if first > last:
            return []
        async with self.transaction() as connection:
            rows = await connection.fetch(sql.blocks.uncovered, self.number, contract, first, last)
        return [(row["first"], row["last"]) for row in rows]

    async def covered_contracts(self, first: int, last: int) -> list[tuple[bytes, int, int]]:
        """Return the contracts that were back-filled individually, and their ranges within this one."""
        async with self.transaction() as connection:
            rows = await connection.fetch(sql.blocks.covered_contracts, self.number, first, last)
        return [(row["contract"], row["first"], row["last"]) for row in rows]


class BlockStore:
    def __init__(self, pool: Pool, *, silent_s: float = SILENT_S, statement_s: float = STATEMENT_S) -> None:
        self._pool = pool
        self._silent_s = silent_s
        self._statement_s = statement_s

    async def halted(self) -> dict[str, str]:
        """Return the networks whose follower has stopped or makes no progress, with the reason."""
        async with self._pool.connection() as connection:
            return {row["network"]: row["reason"] for row in await connection.fetch(sql.blocks.halted_networks)}

    @asynccontextmanager
    async def lead(self, network: str) -> AsyncIterator[LeaderSession]:
        """Wait for the network's lock, then hold it."""
        async with self._session(network, self._statement_s) as (connection, number):
            with translated():
                while not await connection.fetchval(sql.blocks.try_lead, FOLLOWING, number):
                    await connection.fetch(sql.blocks.end_silent_leader, FOLLOWING, number, self._silent_s)
                    await asyncio.sleep(TRY_S)
            yield LeaderSession(connection, network, number)

    @asynccontextmanager
    async def backfill(self, network: str, *, no_timeout: bool = False) -> AsyncIterator[LeaderSession]:
        """Hold the back-fill lock of a network; the follower continues meanwhile.

        `no_timeout` removes the statement timeout: deleting a large network takes minutes.
        """
        # Its rows and their coverage are lost together if the server crashes, and the next run writes them again.
        statement_s, more = None if no_timeout else self._statement_s, {"synchronous_commit": "off"}
        async with self._session(network, statement_s, more) as (connection, number):
            with translated():
                free = await connection.fetchval(sql.blocks.try_lead, BACKFILLING, number)
            if not free:
                raise InvalidRequest(f"another back-fill of {network} is running: wait for it, or stop it")
            yield LeaderSession(connection, network, number)

    @asynccontextmanager
    async def _session(
        self, network: str, statement_s: float | None, more: Mapping[str, str] = MappingProxyType({})
    ) -> AsyncIterator[tuple[DatabaseConnection, int]]:
        """`more`: server settings."""
        with translated():
            connection = await asyncpg.connect(
                self._pool.session_url,
                timeout=5.0,
                command_timeout=statement_s,
                server_settings={"application_name": f"penstock {network}"[:63], **_SESSION, **more},
            )
        try:
            with translated():
                await connection.execute(sql.blocks.add_network, network)
                row = await connection.fetchrow(sql.blocks.read_network, network)
            assert row is not None
            yield connection, row["number"]
        finally:
            # Terminate, not close: closing could wait for a dead connection and hold the lock meanwhile.
            connection.terminate()


def _followed(row: asyncpg.Record | None) -> Followed:
    assert row is not None
    cursor = None if row["block"] is None else BlockId(row["block"], row["block_hash"])
    return Followed(row["network"], row["number"], row["first_block"] or 0, cursor, row["indexes_holdings"])


# Writes, on the caller's connection and in its transaction. `network` is the network's number.


async def move(connection: DatabaseConnection, network: int, *, cursor: BlockId, to: BlockId, time: int) -> None:
    """Lock and move the cursor, as the first step of every transaction; raise LeadershipLost if it is elsewhere."""
    arguments = (network, cursor.number, cursor.hash, to.number, to.hash, float(time))
    if await connection.fetchval(sql.blocks.move_cursor, *arguments) is None:
        raise LeadershipLost(f"the cursor is not at block {cursor.number}")


async def notify(connection: DatabaseConnection, network: int) -> None:
    """Notify the listeners of penstock_blocks when the transaction commits."""
    await connection.execute(sql.blocks.notify_block, network)


async def record(connection: DatabaseConnection, network: int, blocks: Sequence[BlockId]) -> None:
    numbers, hashes = [block.number for block in blocks], [block.hash for block in blocks]
    await connection.execute(sql.blocks.record_blocks, network, numbers, hashes)


async def delete_above(connection: DatabaseConnection, network: int, number: int) -> None:
    await connection.execute(sql.blocks.delete_blocks_above, network, number)


async def delete_below(connection: DatabaseConnection, network: int, number: int) -> None:
    await connection.execute(sql.blocks.delete_blocks_below, network, number)


async def reset(connection: DatabaseConnection, network: int) -> None:
    """Reset the network as if it had never been followed."""
    await connection.execute(sql.blocks.delete_blocks_above, network, -2)
    await connection.execute(sql.blocks.delete_backfills, network)
    await connection.execute(sql.blocks.reset_network, network)


async def leave_out_holdings(connection: DatabaseConnection, network: int) -> None:
    """Record that blocks are written without holdings."""
    await connection.execute(sql.blocks.leave_out_holdings, network)


async def cover(
    connection: DatabaseConnection, network: int, contract: bytes, *, ranges: Iterable[tuple[int, int]]
) -> None:
    for first, last in ranges:
        await connection.execute(sql.blocks.cover, network, contract, first, last)
