"""User operations sent through this service, in Postgres, from before they are sent until they are in a block.

A row is written before the operation is sent, so no operation that a bundler accepted is ever missing. The follower passes its
own connection.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import asyncpg
import orjson

from proxy.chains.evm.operations import IncludedOperation
from proxy.chains.evm.user_operation import UserOperation
from proxy.store.postgres import sql
from proxy.store.postgres.pool import PATIENT_S, DatabaseConnection, Pool

OperationRow = dict[str, Any]


@dataclass(frozen=True, slots=True)
class SentOperation:
    """An operation as sent by one key. `given` is the operation's JSON as the caller sent it."""

    network: str
    hash: bytes
    lineage: str
    key_id: str
    entry_point: bytes
    operation: UserOperation
    given: bytes
    # The newest block at that time, if known.
    block: int | None = None


class OperationStore:
    def __init__(self, pool: Pool) -> None:
        self._pool = pool

    def __repr__(self) -> str:
        return f"<OperationStore {self._pool!r}>"

    async def record(self, sent: SentOperation) -> None:
        operation = sent.operation
        async with self._pool.connection() as connection:
            await connection.execute(
                sql.operations.record_operation,
                sent.network,
                sent.hash,
                sent.lineage,
                sent.key_id,
                sent.entry_point,
                operation.sender,
                operation.nonce,
                sent.given.decode(),
                sent.block,
            )

    async def mark_sent(self, sent: SentOperation) -> None:
        """Record that a bundler has accepted the operation."""
        async with self._pool.connection() as connection:
            await connection.execute(sql.operations.mark_sent, sent.network, sent.hash, sent.lineage)

    async def mark_refused(self, sent: SentOperation, error: bytes) -> None:
        async with self._pool.connection() as connection:
            await connection.execute(
                sql.operations.mark_refused, sent.network, sent.hash, sent.lineage, error.decode("utf-8", "replace")
            )

    async def read(self, network: str, operation_hash: bytes) -> OperationRow | None:
        async with self._pool.connection() as connection:
            row = await connection.fetchrow(sql.operations.read_operation, network, operation_hash)
        return None if row is None else _row(row)

    async def list_of(self, lineage: str | None, *, limit: int) -> list[OperationRow]:
        """Return operations of one lineage, or of all, newest first."""
        async with self._pool.connection() as connection:
            return [_row(row) for row in await connection.fetch(sql.operations.list_operations, lineage, limit)]

    async def purge(self, *, keep_days: int, keep_unsent_days: int, at_once: int = 1_000) -> bool:
        """Delete one batch of old operations; return whether there may be more."""
        async with self._pool.connection(within_s=PATIENT_S) as connection:
            deleted = [
                await connection.execute(sql.operations.purge, keep_days, at_once),
                await connection.execute(sql.operations.purge_unsent, keep_unsent_days, at_once),
            ]
        return any(int(status.rsplit(" ", 1)[1]) >= at_once for status in deleted)


# Writes of the follower, in its transaction


async def mark_included(connection: DatabaseConnection, network: str, events: Sequence[IncludedOperation]) -> None:
    """Mark operations as included, and others with the same sender and nonce as replaced."""
    columns = zip(
        *(
            (e.hash, e.success, e.position.block, e.position.block_hash, e.position.transaction, e.cost_wei)
            for e in events
        ),
        strict=True,
    )
    await connection.execute(sql.operations.mark_included, network, *map(list, columns))
    used = zip(
        *((e.hash, e.position.contract, e.sender, e.nonce, e.position.block, e.position.block_hash) for e in events),
        strict=True,
    )
    await connection.execute(sql.operations.mark_replaced, network, *map(list, used))


async def take_back(connection: DatabaseConnection, network: str, above: int) -> None:
    """Mark operations in removed blocks, those above this one, as sent but not included."""
    await connection.execute(sql.operations.take_back_inclusions, network, above)


def _row(row: asyncpg.Record) -> OperationRow:
    fields = dict(row)
    fields["operation"] = orjson.loads(fields["operation"])
    return fields
