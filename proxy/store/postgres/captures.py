"""Captures of calls: which accounts are captured, and the records that it yields."""

from __future__ import annotations

import datetime
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

from proxy.store.postgres import sql
from proxy.store.postgres.pool import PATIENT_S, Pool

# Records that one statement reads.
ROWS = 1000


@dataclass(frozen=True, slots=True)
class CapturedRow:
    """The record of a call. `at`: its end."""

    at: datetime.datetime
    id: str
    ms: float
    network: str
    surface: str
    method: str
    params: str | None


class CaptureStore:
    def __init__(self, pool: Pool) -> None:
        self._pool = pool

    def __repr__(self) -> str:
        return f"<CaptureStore {self._pool!r}>"

    async def start(self, accounts: Sequence[str] | None, seconds: float) -> list[str]:
        """Record all requests of these accounts, or of all, for a while. Returns those that record params."""
        async with self._pool.connection(within_s=PATIENT_S) as connection:
            return [row["id"] for row in await connection.fetch(sql.accounts.start_capture, accounts, seconds)]

    async def end(self, accounts: Sequence[str]) -> None:
        async with self._pool.connection(within_s=PATIENT_S) as connection:
            await connection.execute(sql.accounts.end_capture, accounts)

    async def now(self) -> datetime.datetime:
        async with self._pool.connection(within_s=PATIENT_S) as connection:
            now: datetime.datetime = await connection.fetchval(sql.keys.read_clock)
            return now

    async def count(self, accounts: Sequence[str], since: datetime.datetime) -> int:
        async with self._pool.connection(within_s=PATIENT_S) as connection:
            return int(await connection.fetchval(sql.requests.count_captured, accounts, since))

    async def rows(self, accounts: Sequence[str], since: datetime.datetime) -> AsyncIterator[CapturedRow]:
        """All calls that ended since then, oldest first."""
        after, after_id = since, ""
        while True:
            async with self._pool.connection(within_s=PATIENT_S) as connection:
                rows = await connection.fetch(sql.requests.list_captured, accounts, after, after_id, ROWS)
            for row in rows:
                yield CapturedRow(**row)
            if len(rows) < ROWS:
                return
            after, after_id = rows[-1]["at"], rows[-1]["id"]
