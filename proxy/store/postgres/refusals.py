"""The latest refusals of each gas policy, in Postgres."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from dataclasses import dataclass

from proxy.store.postgres import sql
from proxy.store.postgres.bad_rows import storable
from proxy.store.postgres.pool import PATIENT_S, Pool

# Refusals stored per policy.
MOST_STORED = 50


@dataclass(frozen=True, slots=True)
class RefusedOperation:
    policy: str
    at: datetime.datetime
    sender: bytes
    rule: str
    message: str


class RefusalStore:
    def __init__(self, pool: Pool) -> None:
        self._pool = pool

    def __repr__(self) -> str:
        return f"<RefusalStore {self._pool!r}>"

    async def add(self, refused: Sequence[RefusedOperation]) -> None:
        rows = ((each.policy, each.at, each.sender, each.rule, storable(each.message)) for each in refused)
        columns = zip(*rows, strict=True)
        async with self._pool.connection(within_s=PATIENT_S) as connection:
            await connection.execute(sql.refusals.add_refusals, *columns)
            for policy in sorted({each.policy for each in refused}):
                await connection.execute(sql.refusals.trim_refusals, policy, MOST_STORED)

    async def latest(self, policy: str, most: int) -> list[RefusedOperation]:
        """Return up to `most` refusals, newest first."""
        async with self._pool.connection() as connection:
            rows = await connection.fetch(sql.refusals.list_refusals, policy, min(most, MOST_STORED))
        return [RefusedOperation(policy, *row) for row in rows]
