"""What keys have used, in Postgres: batches in, charts out.

A batch is written whole and once, into minutes, hours and days together: whoever is not told how a batch ended sends it again
under its number, and it is not counted twice. What is too old is removed in small pieces.
"""

from __future__ import annotations

import asyncio
import datetime
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import asyncpg

from proxy.core.usage import BUCKETS, ChartLine, UsageStep, UsageSums, lines_of
from proxy.store import sql
from proxy.store.pool import PATIENT_S, DatabaseConnection, Pool

# Account, key, network, method: where some are empty, a sum over them.
UsageSeries = tuple[str, str, str, str]
# What was used, by series and minute.
UsageTable = Mapping[tuple[UsageSeries, int], UsageSums]
# Rows in one statement, and rows removed in one.
ROWS = 1000
PIECE = 5000
# Series whose number is remembered.
REMEMBERED = 200_000
# Any two numbers that nobody else uses: the lock of who removes what is old.
LOCK = (0x70656E73, 9)
# A batch of many rows, and a chart of many, may take longer than a request's statement.
WRITE_S, READ_S = 30.0, 20.0


# What stands for a network where an operation has none: empty is a sum.
NO_NETWORK = "-"


def with_sums(rows: UsageTable) -> dict[tuple[UsageSeries, int], UsageSums]:
    """All that a batch is written to: each use under its own series, and under the sums that charts read."""
    found = dict(rows)
    for ((account, key, network, method), minute), used in rows.items():
        for series in ((key, "", ""), ("", network, ""), ("", "", method), ("", "", "")):
            place = (account, *series), minute
            have = found.get(place)
            if have is None:
                have = found[place] = UsageSums()
            have.merge(used)
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageQuery:
    """What a chart is of. `account` None: all accounts."""

    step: UsageStep
    first: datetime.datetime
    last: datetime.datetime
    account: str | None
    by: str = "total"
    network: str | None = None
    method: str | None = None
    key: str | None = None
    # So many lines, those with the most requests; all others are one.
    top: int = 8

    @property
    def face(self) -> tuple[bool, bool, bool]:
        """Whether what is read must be apart by key, network, method: by none or one of them, there are sums; else by all."""
        given = {"key": self.key, "network": self.network, "method": self.method}
        found = [self.by == name or value is not None for name, value in given.items()]
        key, network, method = found if sum(found) < 2 else (True, True, True)
        return key, network, method


class UsageStore:
    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._numbers: dict[UsageSeries, int] = {}

    def __repr__(self) -> str:
        return f"<UsageStore {len(self._numbers)} series remembered>"

    async def write(self, worker: str, number: int, rows: UsageTable) -> None:
        """A worker's batch, with its sums. Written before under this number: nothing is done."""
        whole = with_sums(rows)
        async with self._pool.connection(within_s=PATIENT_S) as connection:
            await self._learn(connection, {series for series, _ in whole})
            async with connection.transaction():
                if await connection.fetchval(sql.usage.begin_batch, worker, number) is None:
                    return
                # In one order over all statements: two workers never wait for each other in a circle.
                found = sorted((self._numbers[series], minute, used) for (series, minute), used in whole.items())
                for start in range(0, len(found), ROWS):
                    await _add(connection, found[start : start + ROWS])

    async def _learn(self, connection: DatabaseConnection, series: set[UsageSeries]) -> None:
        if len(self._numbers) > REMEMBERED:
            self._numbers.clear()
        new = sorted(each for each in series if each not in self._numbers)
        for start in range(0, len(new), ROWS):
            part = new[start : start + ROWS]
            columns = [list(column) for column in zip(*part, strict=True)]
            numbers = await connection.fetch(sql.usage.find_series, *columns, timeout=WRITE_S)
            self._numbers.update(zip(part, (row["id"] for row in numbers), strict=True))

    async def chart(self, wanted: UsageQuery) -> list[ChartLine]:
        """A line for each of what the sums are apart by: the largest, and one of all others. Drawn in a thread."""
        async with self._pool.connection() as connection, connection.transaction(readonly=True):
            await connection.execute(sql.usage.tune_planner)
            rows = await connection.fetch(
                sql.usage.chart, wanted.step, wanted.first, wanted.last, wanted.account, wanted.by, *wanted.face,
                wanted.key, wanted.network, wanted.method, wanted.top, timeout=READ_S,
            )  # fmt: skip
        return await asyncio.to_thread(lambda: lines_of((row["name"], row["at"], used_in(row)) for row in rows))

    async def rows(self, wanted: UsageQuery, most: int) -> list[asyncpg.Record]:
        """All there is of an account, of what is wanted; up to so many rows."""
        async with self._pool.connection() as connection:
            return await connection.fetch(
                sql.usage.rows, wanted.step, wanted.first, wanted.last, wanted.account, most,
                wanted.key, wanted.network, wanted.method, timeout=READ_S,
            )  # fmt: skip

    async def last_used(self, account: str) -> dict[str, datetime.datetime]:
        """By key."""
        async with self._pool.connection() as connection:
            rows = await connection.fetch(sql.usage.last_used, account)
        return {row["key_id"]: row["at"] for row in rows}

    async def requests_of_day(self, account: str, day: datetime.date) -> int:
        begins = datetime.datetime.combine(day, datetime.time(), datetime.UTC)
        async with self._pool.connection() as connection:
            return int(await connection.fetchval(sql.usage.requests_of_day, account, begins))

    async def keep(self, until: Mapping[UsageStep, datetime.datetime]) -> None:
        """Remove what is older; whoever finds somebody else at it leaves it to them."""
        queries = {"minute": sql.usage.forget_minutes, "hour": sql.usage.forget_hours, "day": sql.usage.forget_days}
        for step, before in until.items():
            while await self._forget(queries[step], before) == PIECE:
                pass
        async with self._pool.connection(within_s=PATIENT_S) as connection:
            await connection.execute(sql.usage.forget_batches)

    async def _forget(self, query: str, before: datetime.datetime) -> int:
        """One piece: small transactions, so that nobody waits for them."""
        async with self._pool.connection(within_s=PATIENT_S) as connection, connection.transaction():
            if not await connection.fetchval(sql.usage.try_purge_lock, *LOCK):
                return 0
            status = await connection.execute(query, before, PIECE, timeout=WRITE_S)
            return int(status.split()[-1])


async def _add(connection: DatabaseConnection, rows: Sequence[tuple[int, int, UsageSums]]) -> None:
    used = [each for _, _, each in rows]
    await connection.execute(
        sql.usage.add_usage,
        [series for series, _, _ in rows],
        [datetime.datetime.fromtimestamp(minute * 60, datetime.UTC) for _, minute, _ in rows],
        [each.requests for each in used],
        [each.errors for each in used],
        [each.units for each in used],
        [each.hits for each in used],
        *([each.took[place] for each in used] for place in range(BUCKETS)),
        timeout=WRITE_S,
    )


def used_in(row: asyncpg.Record) -> UsageSums:
    return UsageSums(row["requests"], row["errors"], row["units"], row["hits"], row["took"])
