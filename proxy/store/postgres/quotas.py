"""Daily quotas of accounts, which workers lease in chunks."""

from __future__ import annotations

import datetime
from collections.abc import Sequence

from proxy.store.postgres import sql
from proxy.store.postgres.pool import PATIENT_S, Pool


class QuotaStore:
    def __init__(self, pool: Pool) -> None:
        self._pool = pool

    async def lease(self, day: datetime.date, wants: Sequence[tuple[str, int, int]]) -> list[int]:
        """Return the amount granted for each (account, wanted, day limit)."""
        accounts, wanted, limits = ([want[index] for want in wants] for index in range(3))
        async with self._pool.connection(within_s=PATIENT_S) as connection:
            rows = await connection.fetch(sql.accounts.lease_quotas, accounts, wanted, limits, day)
        return [row[0] for row in rows]

    async def give_back(self, day: datetime.date, amounts: Sequence[tuple[str, int]]) -> None:
        accounts, unused = ([amount[index] for amount in amounts] for index in range(2))
        async with self._pool.connection(within_s=PATIENT_S) as connection:
            await connection.execute(sql.accounts.return_quotas, accounts, unused, day)
