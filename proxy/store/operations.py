"""User operations that were sent through us, in Postgres: each one's life, from before it is sent to its block.

A row is written before the operation leaves, so none is ever forgotten that a bundler has taken. Those who follow the chain
pass their own connection.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import asyncpg
import orjson

from proxy.chains.evm.operations import IncludedOperation
from proxy.chains.evm.user_operation import UserOperation
from proxy.store import sql
from proxy.store.pool import PATIENT_S, DatabaseConnection, Pool

OperationRow = dict[str, Any]


@dataclass(frozen=True, slots=True)
class SentOperation:
    """One operation as one key sends it."""

    network: str
    hash: bytes
    lineage: str
    key_id: str
    entry_point: bytes
    operation: UserOperation
    given: bytes
    # The newest block by then, where it is known.
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
                sql.operations.record_operation, sent.network, sent.hash, sent.lineage, sent.key_id, sent.entry_point,
                operation.sender, operation.nonce, sent.given.decode(), sent.block,
            )  # fmt: skip

    async def taken(self, sent: SentOperation) -> None:
        """A bundler has it."""
        async with self._pool.connection() as connection:
            await connection.execute(sql.operations.mark_sent, sent.network, sent.hash, sent.lineage)

    async def refused(self, sent: SentOperation, error: bytes) -> None:
        async with self._pool.connection() as connection:
            await connection.execute(
                sql.operations.mark_refused, sent.network, sent.hash, sent.lineage, error.decode("utf-8", "replace")
            )

    async def read(self, network: str, operation_hash: bytes) -> OperationRow | None:
        async with self._pool.connection() as connection:
            row = await connection.fetchrow(sql.operations.read_operation, network, operation_hash)
        return None if row is None else _row(row)

    async def list_of(self, lineage: str | None, *, limit: int) -> list[OperationRow]:
        """The newest first."""
        async with self._pool.connection() as connection:
            return [_row(row) for row in await connection.fetch(sql.operations.list_operations, lineage, limit)]

    async def purge(self, *, keep_days: int, keep_unsent_days: int, at_once: int = 1_000) -> bool:
        """One bite of what is older; whether there may be more."""
        async with self._pool.connection(within_s=PATIENT_S) as connection:
            gone = [
                await connection.execute(sql.operations.purge, keep_days, at_once),
                await connection.execute(sql.operations.purge_unsent, keep_unsent_days, at_once),
            ]
        return any(int(said.rsplit(" ", 1)[1]) >= at_once for said in gone)


# For those who follow the chain


async def mark_included(connection: DatabaseConnection, network: str, events: Sequence[IncludedOperation]) -> None:
    """And mark those whose nonces they have used."""
    columns = zip(
        *((e.hash, e.success, e.place.block, e.place.block_hash, e.place.transaction, e.cost_wei) for e in events),
        strict=True,
    )
    await connection.execute(sql.operations.mark_included, network, *map(list, columns))
    used = zip(
        *((e.hash, e.place.contract, e.sender, e.nonce, e.place.block, e.place.block_hash) for e in events), strict=True
    )
    await connection.execute(sql.operations.mark_replaced, network, *map(list, used))


async def take_back(connection: DatabaseConnection, network: str, above: int) -> None:
    """Blocks above this one are gone: what was in them is on its way again."""
    await connection.execute(sql.operations.take_back_inclusions, network, above)


def _row(row: asyncpg.Record) -> OperationRow:
    found = dict(row)
    found["operation"] = orjson.loads(found["operation"])
    return found
