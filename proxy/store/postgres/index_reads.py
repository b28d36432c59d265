"""Reads of the index of a network, in whichever database it is, never older than the block that `as_of` returned last."""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from dataclasses import dataclass

import asyncpg

from proxy.store.postgres import sql
from proxy.store.postgres.pool import DatabaseConnection, Pool
from proxy.store.postgres.replica import ReplicaReads


@dataclass(frozen=True, slots=True)
class IndexBlock:
    """The block that the index has reached. Blocks before `first_block` are included only where a back-fill covered them."""

    block: int
    hash: bytes
    time: datetime.datetime | None
    first_block: int
    fault: str | None


class IndexReads:
    def __init__(
        self, pool: Pool, reads: ReplicaReads | None = None, *, index_pools: Mapping[str, Pool] | None = None
    ) -> None:
        """`index_pools`: the databases of networks whose index is not in the main one."""
        self._reads = reads or ReplicaReads(pool)
        self._index_reads = {network: ReplicaReads(other) for network, other in (index_pools or {}).items()}
        # The position of the last `as_of` of each network.
        self._positions: dict[str, int] = {}

    def __repr__(self) -> str:
        return f"<IndexReads of {len(self._positions)} networks>"

    async def as_of(self, network: str) -> IndexBlock | None:
        """Return the block that the index has reached, or None if the network is not followed yet."""
        row, position = await self._reads_of(network).read(lambda connection: self._as_of(connection, network))
        self._positions[network] = max(position, self._positions.get(network, 0))
        if row is None:
            return None
        return IndexBlock(row["block"], row["block_hash"], row["block_time"], row["first_block"], row["fault"])

    async def _as_of(self, connection: DatabaseConnection, network: str) -> tuple[asyncpg.Record | None, int]:
        row = await connection.fetchrow(sql.holdings.as_of, network)
        return row, await self._reads_of(network).position(connection)

    async def fetch(self, query: str, network: str, *arguments: object) -> list[asyncpg.Record]:
        """Run a query whose first parameter is the network."""
        return await self.fetch_at(query, network, network, *arguments)

    async def fetch_at(self, query: str, network: str, *arguments: object) -> list[asyncpg.Record]:
        """Run a query in the database that has the network's index."""
        since = self._positions.get(network, 0)
        reads = self._reads_of(network)
        return await reads.read(lambda connection: connection.fetch(query, *arguments), since=since)

    def _reads_of(self, network: str) -> ReplicaReads:
        return self._index_reads.get(network, self._reads)
