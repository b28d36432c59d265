"""Reads that may be a few seconds old: from a replica while its data is recent enough, otherwise from the primary.

A read that follows another one can be bound to its *position* in the write-ahead log: it never sees an older state. So a list
of holdings is never older than the block it is said to belong to, whichever servers are used.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from proxy import telemetry
from proxy.core.replica_age import ReplicaAge
from proxy.errors import Unavailable
from proxy.settings import DatabaseSettings
from proxy.store.postgres import sql
from proxy.store.postgres.pool import DatabaseConnection, Pool

_T = TypeVar("_T")

# How often the positions of primary and replica are compared.
SAMPLE_S = 1.0
# Connections per worker: charts and lists are few compared to other statements.
REPLICA_POOL_SIZE = 4


class ReplicaReads:
    def __init__(self, primary: Pool, replica: Pool | None = None, *, max_age_s: float = 0.0) -> None:
        self._primary = primary
        self._replica = replica
        self.max_age_s = max_age_s
        self._age = ReplicaAge()

    def __repr__(self) -> str:
        return f"<ReplicaReads {self._age!r}>" if self._replica else "<ReplicaReads without a replica>"

    async def read(
        self, work: Callable[[DatabaseConnection], Awaitable[_T]], *, since: int = 0, for_s: float | None = None
    ) -> _T:
        """Run statements that only read. `since`: a position that the server must have reached."""
        if self._replica is not None and self._age.seconds(time.monotonic()) <= self.max_age_s:
            try:
                async with self._replica.connection(for_s=for_s) as connection:
                    if await position(connection) >= since:
                        telemetry.replica_reads_total.labels("replica").inc()
                        return await work(connection)
            except Unavailable:
                pass  # The primary answers instead.
        if self._replica is not None:
            telemetry.replica_reads_total.labels("primary").inc()
        return await self._primary.read(work, for_s=for_s)

    async def position(self, connection: DatabaseConnection) -> int:
        """The position to which later reads can be bound; without a replica there is nothing to bind."""
        return 0 if self._replica is None else await position(connection)

    async def watch(self) -> None:
        """Supervised loop: open the connections to the replica and compare its position with the primary's."""
        if self._replica is None:
            return
        await self._replica.open()
        while True:
            try:
                await self._sample(self._replica)
            except Unavailable:
                pass  # The data grows older until both answer.
            telemetry.replica_age.set(self._age.seconds(time.monotonic()))
            await asyncio.sleep(SAMPLE_S)

    async def _sample(self, replica: Pool) -> None:
        began = time.monotonic()
        written = await self._primary.read(position)
        async with replica.connection() as connection:
            self._age.sample(began, written=written, replayed=await position(connection))

    async def close(self) -> None:
        if self._replica is not None:
            await self._replica.close()


async def position(connection: DatabaseConnection) -> int:
    return int(await connection.fetchval(sql.replica.position))


def replica_reads(given: DatabaseSettings, primary: Pool) -> ReplicaReads:
    if not given.replica_url:
        return ReplicaReads(primary)
    replica = Pool(
        given.replica_url,
        size=REPLICA_POOL_SIZE,
        acquire_timeout_s=given.acquire_timeout_s,
        request_timeout_s=given.request_timeout_s,
        application="penstock-replica",
        only_reads=True,
    )
    return ReplicaReads(primary, replica, max_age_s=given.replica_lag_s)
