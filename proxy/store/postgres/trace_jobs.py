"""Blocks to be traced for the coins that move inside their transactions.

A block's job is added in the transaction that writes the block, and ends in the one that writes its internal transfers. A block
that the chain drops loses its job. So a job that exists belongs to a block of the index.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from proxy.store.postgres import sql
from proxy.store.postgres.pool import DatabaseConnection


@dataclass(frozen=True, slots=True)
class TraceJob:
    """A block to trace for internal transfers."""

    block: int
    hash: bytes
    tries: int


async def add(connection: DatabaseConnection, network: str, blocks: Sequence[tuple[int, bytes]]) -> None:
    """Add blocks, and wake the process that traces them when the transaction commits."""
    await connection.execute(sql.trace_jobs.add, network, [each[0] for each in blocks], [each[1] for each in blocks])
    await connection.execute(sql.events.notify_events, network)


async def waiting(connection: DatabaseConnection, network: str, *, limit: int) -> list[TraceJob]:
    rows = await connection.fetch(sql.trace_jobs.list, network, limit)
    return [TraceJob(row["block"], row["block_hash"], row["tries"]) for row in rows]


async def finish(connection: DatabaseConnection, network: str, job: TraceJob) -> bool:
    """Delete the job. Returns False if its block was removed; otherwise the block stays until the transaction ends."""
    return await connection.fetchval(sql.trace_jobs.finish, network, job.block, job.hash) is not None


async def count_try(connection: DatabaseConnection, network: str, job: TraceJob) -> None:
    await connection.execute(sql.trace_jobs.count_try, network, job.block, job.hash)


async def drop(connection: DatabaseConnection, network: str, *, above: int) -> None:
    """Delete the jobs of blocks above this one."""
    await connection.execute(sql.trace_jobs.drop, network, above)
