"""Usage of keys in Postgres: workers write batches, charts read sums.

A batch is added to minutes in one transaction. A host that does not learn whether a batch was committed sends it again with the
same number, and it is not counted twice. One worker of the fleet sums up minutes to hours and days, about once a minute. It
computes whole hours again instead of adding to them, so it may run at any time and more than once. Minutes are in one table per
day (UTC): old ones are dropped. Other old rows are deleted in small pieces.
"""

from __future__ import annotations

import asyncio
import datetime
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import asyncpg

from proxy.core.bounded import make_room
from proxy.core.usage import BUCKETS, ChartLine, UsageStep, UsageSums, lines_of
from proxy.store.postgres import sql
from proxy.store.postgres.bad_rows import BadRows, storable
from proxy.store.postgres.day_tables import renew_day_tables
from proxy.store.postgres.pool import PATIENT_S, DatabaseConnection, Pool
from proxy.store.postgres.replica import ReplicaReads

# Account, key, network and method. An empty element means the sum over all its values.
UsageSeries = tuple[str, str, str, str]
# Usage by series and minute.
UsageTable = Mapping[tuple[UsageSeries, int], UsageSums]
# Rows written by one statement, which is made in a millisecond, and rows deleted by one.
ROWS = 100
# Rows that are summed up in one step.
SUMMED_AT_ONCE = 50
PIECE = 5000
# Series whose id is cached; beyond that the cache is cleared.
REMEMBERED = 200_000
# Advisory locks for summing up and for deleting old rows. No other lock uses these numbers.
SUM_LOCK = (0x70656E73, 10)
LOCK = (0x70656E73, 9)
# Timeouts for large batches and charts, longer than the pool's default.
WRITE_S, READ_S = 30.0, 20.0


# The network of operations that have none; an empty string would mean the sum.
NO_NETWORK = "-"


async def with_sums(rows: UsageTable) -> dict[tuple[UsageSeries, int], UsageSums]:
    """Add to the series of a batch the sums that charts read, in short steps."""
    sums = dict(rows)
    for number, (((account, key, network, method), minute), used) in enumerate(rows.items(), 1):
        if number % SUMMED_AT_ONCE == 0:
            await asyncio.sleep(0)
        for series in ((key, "", ""), ("", network, ""), ("", "", method), ("", "", "")):
            place = (account, *series), minute
            have = sums.get(place)
            if have is None:
                have = sums[place] = UsageSums()
            have.merge(used)
    return sums


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageQuery:
    """The data that a chart shows. `account` None means all accounts."""

    step: UsageStep
    first: datetime.datetime
    last: datetime.datetime
    account: str | None
    by: str = "total"
    network: str | None = None
    method: str | None = None
    key: str | None = None
    # Lines with the most requests; all others are summed up in one.
    top: int = 8

    @property
    def split_by(self) -> tuple[bool, bool, bool]:
        """Return whether to read series split by key, network and method.

        Sums exist for at most one of the three; anything else needs the fully split series.
        """
        given = {"key": self.key, "network": self.network, "method": self.method}
        split = [self.by == name or value is not None for name, value in given.items()]
        key, network, method = split if sum(split) < 2 else (True, True, True)
        return key, network, method


class UsageStore:
    def __init__(self, pool: Pool, reads: ReplicaReads | None = None) -> None:
        """`reads`: where charts and exports are read."""
        self._pool = pool
        self._reads = reads or ReplicaReads(pool)
        self._numbers: dict[UsageSeries, int] = {}
        self._bad = BadRows("usage")

    def __repr__(self) -> str:
        return f"<UsageStore {len(self._numbers)} series cached>"

    async def write(self, worker: str, number: int, rows: UsageTable) -> None:
        """Write a worker's batch with its sums, unless a batch with this number was written before. Usage of accounts that were
        erased meanwhile is left out."""
        async with self._pool.connection(within_s=PATIENT_S) as connection:
            whole: UsageTable = await with_sums(await _without_erased(connection, rows))
            await self._find_series(connection, {series for series, _ in whole})
            async with connection.transaction():
                if await connection.fetchval(sql.usage.begin_batch, worker, number) is None:
                    return
                whole = await _without_erased(connection, whole)
                # One order over all statements, so that two workers never deadlock.
                numbers = self._numbers
                numbered = sorted(
                    (numbers[series], minute, used) for (series, minute), used in whole.items() if series in numbers
                )
                minutes = set[int]()
                for start in range(0, len(numbered), ROWS):
                    part = numbered[start : start + ROWS]
                    bad = {id(row) for row in await self._bad.write(part, lambda rows: _add(connection, rows))}
                    minutes |= {row[1] for row in part if id(row) not in bad}
                await connection.execute(sql.usage.mark_hours, [_time(minute) for minute in minutes])

    async def sum_up(self, every_s: float) -> int:
        """Sum up the hours that have changed, and their days, unless a worker did so less than `every_s` ago.

        Return the number of hours.
        """
        async with self._pool.connection(within_s=PATIENT_S) as connection, connection.transaction():
            if not await connection.fetchval(sql.usage.try_lock, *SUM_LOCK):
                return 0
            if await connection.fetchval(sql.usage.claim_upkeep, "sums", every_s) is None:
                return 0
            return await _sum_up(connection)

    async def _find_series(self, connection: DatabaseConnection, series: set[UsageSeries]) -> None:
        """Read the ids of series. A series that cannot be stored gets none."""
        make_room(self._numbers, REMEMBERED)
        new = sorted(each for each in series if each not in self._numbers)
        for start in range(0, len(new), ROWS):
            await self._bad.write(new[start : start + ROWS], lambda part: self._find(connection, part))

    async def _find(self, connection: DatabaseConnection, part: Sequence[UsageSeries]) -> None:
        columns = [list(column) for column in zip(*part, strict=True)]
        numbers = await connection.fetch(sql.usage.find_series, *columns, timeout=WRITE_S)
        self._numbers.update(zip(part, (row["id"] for row in numbers), strict=True))

    async def chart(self, wanted: UsageQuery) -> list[ChartLine]:
        """Return the chart's largest lines and one for all others. Built in a thread, because there may be many rows."""
        rows = await self._reads.read(lambda connection: _chart(connection, wanted), for_s=READ_S)
        return await asyncio.to_thread(lambda: lines_of((row["name"], row["at"], used_in(row)) for row in rows))

    async def rows(self, wanted: UsageQuery, most: int) -> list[asyncpg.Record]:
        """Return up to `most` rows of an account's usage that match the query."""
        given = wanted.step, wanted.first, wanted.last, wanted.account, most, wanted.key, wanted.network, wanted.method
        return await self._reads.read(
            lambda connection: connection.fetch(sql.usage.rows, *given, timeout=READ_S), for_s=READ_S
        )

    async def methods(self, step: UsageStep, since: datetime.datetime) -> dict[tuple[str, str], UsageSums]:
        """The calls of all accounts, by network and method."""
        rows = await self._reads.read(
            lambda connection: connection.fetch(sql.usage.methods, step, since, timeout=READ_S), for_s=READ_S
        )
        return {(row["network"], row["method"]): used_in(row) for row in rows}

    async def last_used(self, account: str) -> dict[str, datetime.datetime]:
        """Return the time of last use by key."""
        async with self._pool.connection() as connection:
            rows = await connection.fetch(sql.usage.last_used, account)
        return {row["key_id"]: row["at"] for row in rows}

    async def requests_of_day(self, account: str, day: datetime.date) -> int:
        begins = datetime.datetime.combine(day, datetime.time(), datetime.UTC)
        async with self._pool.connection() as connection:
            return int(await connection.fetchval(sql.usage.requests_of_day, account, begins))

    async def purge(self, until: Mapping[UsageStep, datetime.datetime], *, every_s: float = 0.0) -> None:
        """Delete older rows, unless another worker is doing so or did so less than `every_s` ago."""
        async with self._pool.connection(within_s=PATIENT_S) as connection:
            if await connection.fetchval(sql.usage.claim_upkeep, "purge", every_s) is None:
                return
        await renew_day_tables(
            self._pool, "usage", add=sql.usage.add_days, drop=sql.usage.remove_days, keep=until.get("minute")
        )
        queries = {
            "minute": sql.usage.delete_old_minutes,
            "hour": sql.usage.delete_old_hours,
            "day": sql.usage.delete_old_days,
        }
        for step, before in until.items():
            while await self._delete_piece(queries[step], before) == PIECE:
                pass
        async with self._pool.connection(within_s=PATIENT_S) as connection:
            await connection.execute(sql.usage.delete_old_batches)

    async def _delete_piece(self, query: str, before: datetime.datetime) -> int:
        """Delete one piece in a short transaction, so that writers do not wait, and return its number of rows."""
        async with self._pool.connection(within_s=PATIENT_S) as connection, connection.transaction():
            if not await connection.fetchval(sql.usage.try_lock, *LOCK):
                return 0
            status = await connection.execute(query, before, PIECE, timeout=WRITE_S)
            return int(status.split()[-1])


async def _without_erased(connection: DatabaseConnection, rows: UsageTable) -> UsageTable:
    """The rows of accounts that were not erased; within a transaction, none of them is erased until it ends."""
    accounts = {storable(series[0]) for series, _ in rows}
    erased_rows = await connection.fetch(sql.usage.lock_erased, [*accounts])
    if not erased_rows:
        return rows
    erased = {row["id"] for row in erased_rows}
    return {place: used for place, used in rows.items() if place[0][0] not in erased}


async def _sum_up(connection: DatabaseConnection) -> int:
    hour, day = datetime.timedelta(hours=1), datetime.timedelta(days=1)
    changed = await connection.fetch(sql.usage.changed_hours)
    for begins, version in changed:
        await connection.execute(sql.usage.sum_up, "hour", "minute", begins, begins + hour, timeout=WRITE_S)
        await connection.execute(sql.usage.settle_hour, begins, version)
    for begins in sorted({each["hour"].replace(hour=0) for each in changed}):
        await connection.execute(sql.usage.sum_up, "day", "hour", begins, begins + day, timeout=WRITE_S)
    return len(changed)


def _time(minute: int) -> datetime.datetime:
    return datetime.datetime.fromtimestamp(minute * 60, datetime.UTC)


async def _chart(connection: DatabaseConnection, wanted: UsageQuery) -> list[asyncpg.Record]:
    async with connection.transaction(readonly=True):
        await connection.execute(sql.usage.tune_planner)
        return await connection.fetch(
            sql.usage.chart,
            wanted.step,
            wanted.first,
            wanted.last,
            wanted.account,
            wanted.by,
            *wanted.split_by,
            wanted.key,
            wanted.network,
            wanted.method,
            wanted.top,
            timeout=READ_S,
        )


async def _add(connection: DatabaseConnection, rows: Sequence[tuple[int, int, UsageSums]]) -> None:
    """Add all of the rows or none, in a part of the caller's transaction."""
    used, moments = [each for _, _, each in rows], [_time(minute) for _, minute, _ in rows]
    async with connection.transaction():
        await connection.execute(
            sql.usage.add_minutes,
            [series for series, _, _ in rows],
            moments,
            [each.requests for each in used],
            [each.errors for each in used],
            [each.units for each in used],
            [each.hits for each in used],
            *([each.took[index] for each in used] for index in range(BUCKETS)),
            [each.faults for each in used],
            [each.upstream_faults for each in used],
            [each.joins for each in used],
            timeout=WRITE_S,
        )


def used_in(row: asyncpg.Record) -> UsageSums:
    return UsageSums(
        requests=row["requests"],
        errors=row["errors"],
        units=row["units"],
        hits=row["hits"],
        took=row["took"],
        faults=row["faults"],
        upstream_faults=row["upstream_faults"],
        joins=row["joins"],
    )
