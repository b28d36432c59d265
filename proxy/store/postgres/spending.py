"""The spending on calls to upstreams, by day, in Postgres.

A process that does not learn whether a batch was committed sends it again with the same number, and it is not counted twice."""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from proxy.core.credits import Spender, Spent
from proxy.store.postgres import sql
from proxy.store.postgres.bad_rows import storable
from proxy.store.postgres.pool import PATIENT_S, Pool

# The label of an upstream, its network, and who has spent.
SpendingPlace = tuple[str, str, Spender]
SpendingBatch = Mapping[SpendingPlace, Spent]
SpendingColumn = Literal["upstream", "method", "network", "account", "key", "day"]
COLUMNS: tuple[SpendingColumn, ...] = ("upstream", "method", "network", "account", "key", "day")


class SpendingStore:
    def __init__(self, pool: Pool) -> None:
        self._pool = pool

    def __repr__(self) -> str:
        return f"<SpendingStore {self._pool!r}>"

    async def write(self, process: str, number: int, day: datetime.date, batch: SpendingBatch) -> None:
        """Add a process's batch, unless a batch with this number was added before."""
        places, spent = list(batch), list(batch.values())
        async with self._pool.connection(within_s=PATIENT_S) as connection, connection.transaction():
            if await connection.fetchval(sql.usage.begin_batch, process, number) is None:
                return
            await connection.execute(
                sql.spending.add,
                day,
                [upstream for upstream, _, _ in places],
                [network for _, network, _ in places],
                *[[storable(spender[index]) for _, _, spender in places] for index in range(3)],
                [each.calls for each in spent],
                [each.credits for each in spent],
                [each.nanos for each in spent],
            )

    async def read(
        self, first: datetime.date, last: datetime.date, by: SpendingColumn, account: str | None = None
    ) -> list[dict[str, Any]]:
        """Sums of these days, the largest first. `account`: only what this one has spent."""
        async with self._pool.connection() as connection:
            return [dict(row) for row in await connection.fetch(sql.spending.read, first, last, by, account)]

    async def rows(self, first: datetime.date, last: datetime.date, most: int) -> list[dict[str, Any]]:
        """Every row of these days, up to `most`."""
        async with self._pool.connection() as connection:
            return [dict(row) for row in await connection.fetch(sql.spending.rows, first, last, most)]

    async def methods(self, first: datetime.date, last: datetime.date) -> list[dict[str, Any]]:
        """Sums of these days by network and method, the dearest first."""
        async with self._pool.connection() as connection:
            return [dict(row) for row in await connection.fetch(sql.spending.methods, first, last)]

    async def accounts(self, first: datetime.date, last: datetime.date, most: int) -> list[dict[str, Any]]:
        """The dearest accounts of these days, with their requests and units."""
        async with self._pool.connection() as connection:
            return [dict(row) for row in await connection.fetch(sql.spending.accounts, first, last, most)]

    async def lease(self, budget: str, begins: datetime.date, wanted: int, limit: int) -> tuple[int, int]:
        """Lease credits of a budget. Returns how many were granted, and how many are left for others."""
        async with self._pool.connection(within_s=PATIENT_S) as connection:
            row = await connection.fetchrow(sql.spending.lease, budget, begins, wanted, limit)
        assert row is not None
        return row["granted"], row["remaining"]

    async def give_back(self, budget: str, begins: datetime.date, unused: int) -> None:
        async with self._pool.connection(within_s=PATIENT_S) as connection:
            await connection.execute(sql.spending.give_back, budget, begins, unused)

    async def used(self, budgets: Mapping[str, datetime.date]) -> dict[str, int]:
        """The credits of each budget that are used or leased in the period that begins on its day."""
        async with self._pool.connection(within_s=PATIENT_S) as connection:
            rows = await connection.fetch(sql.spending.used, list(budgets), list(budgets.values()))
        return dict.fromkeys(budgets, 0) | {row["budget"]: row["used"] for row in rows}

    async def accounts_over(self, upstreams: Sequence[str], since: datetime.date, credits_: int) -> frozenset[str]:
        """The accounts that have spent so many credits on these upstreams since a day."""
        async with self._pool.connection(within_s=PATIENT_S) as connection:
            rows = await connection.fetch(sql.spending.accounts_over, list(upstreams), since, credits_)
        return frozenset(row["account_id"] for row in rows)

    async def limits(self) -> dict[str, dict[str, Any]]:
        """The limits that operators have set in place of those in the settings, by budget."""
        async with self._pool.connection(within_s=PATIENT_S) as connection:
            return {row["budget"]: dict(row) for row in await connection.fetch(sql.spending.limits)}

    async def set_limit(self, budget: str, credits_: int | None, by: str) -> None:
        """`credits_`: None for the limit of the settings."""
        async with self._pool.connection() as connection:
            if credits_ is None:
                await connection.execute(sql.spending.clear_limit, budget)
            else:
                await connection.execute(sql.spending.set_limit, budget, credits_, by)

    async def calls(self, since: datetime.date) -> list[tuple[str, str, int]]:
        """The calls to metered upstreams since a day: network, method, and how many."""
        async with self._pool.connection() as connection:
            rows = await connection.fetch(sql.spending.calls, since)
        return [(row["network"], row["method"], row["calls"]) for row in rows]
