"""Usage in Postgres: batches are counted once, sums agree, and old rows are deleted."""

from __future__ import annotations

import asyncio
import datetime
from typing import Any

import pytest

from proxy.core.usage import BUCKETS, OTHER, UsageStep, UsageSums
from proxy.store.postgres.pool import Pool
from proxy.store.postgres.usage import LOCK, UsageQuery, UsageSeries, UsageStore
from tests.database import connected

NOW = datetime.datetime(2026, 1, 15, 9, 30, tzinfo=datetime.UTC)
MINUTE = int(NOW.timestamp()) // 60


def used(requests: int = 1) -> UsageSums:
    return UsageSums(requests, 0, 2 * requests, 0, [requests] + [0] * (BUCKETS - 1))


def batch(
    requests: int, *, account: str = "acct_1", key: str = "key_1", method: str = "m"
) -> dict[tuple[UsageSeries, int], UsageSums]:
    return {((account, key, "net/one", method), MINUTE): used(requests)}


def wanted(by: str = "total", step: UsageStep = "hour", account: str | None = "acct_1", **filters: Any) -> UsageQuery:
    hour = datetime.timedelta(hours=1)
    return UsageQuery(step=step, first=NOW - 48 * hour, last=NOW + hour, account=account, by=by, **filters)


async def total(store: UsageStore, asked: UsageQuery) -> dict[str, int]:
    await store.sum_up(0.0)
    return {line.name: line.total.requests for line in await store.chart(asked)}


async def test_batch_is_summed_up_in_minutes_hours_and_days(pool: Pool) -> None:
    store = UsageStore(pool)
    await store.write("w", 1, batch(7))
    assert await store.sum_up(0.0) == 1
    steps: tuple[UsageStep, ...] = ("minute", "hour", "day")
    for step in steps:
        (line,) = await store.chart(wanted(step=step))
        assert (line.total.requests, line.total.units, line.total.took[0]) == (7, 14, 7)
        size = {"minute": 60, "hour": 3600, "day": 86_400}[step]
        assert list(line.points) == [MINUTE * 60 // size * size]


async def test_repeated_batch_is_counted_once(pool: Pool) -> None:
    store = UsageStore(pool)
    for _ in range(3):
        await store.write("w", 1, batch(7))
    await store.write("w", 2, batch(1))
    await store.write("w", 1, batch(7))
    assert await total(store, wanted()) == {"": 8}
    await store.write("another", 1, batch(2))
    assert await total(store, wanted()) == {"": 10}


async def test_concurrent_writes_to_the_same_rows_lose_nothing(pool: Pool) -> None:
    stores = [UsageStore(pool) for _ in range(6)]
    rows: dict[tuple[UsageSeries, int], UsageSums] = {}
    for n in range(40):
        for row in batch(1, key=f"key_{n}", method=f"m{n % 3}"):
            rows.setdefault(row, used(0)).merge(used(1))

    async def write(store: UsageStore, worker: int) -> None:
        for number in range(5):
            await store.write(f"w{worker}", number + 1, rows)

    async with asyncio.TaskGroup() as group:
        for worker, store in enumerate(stores):
            group.create_task(write(store, worker))
    assert await total(stores[0], wanted()) == {"": 6 * 5 * 40}
    assert sum((await total(stores[0], wanted("key"))).values()) == 6 * 5 * 40


@pytest.mark.parametrize("by", ["total", "key", "network", "method"])
async def test_sums_agree_with_their_rows(pool: Pool, by: str) -> None:
    store = UsageStore(pool)
    rows: dict[tuple[UsageSeries, int], UsageSums] = {}
    for n in range(12):
        for row in batch(n + 1, key=f"key_{n % 2}", method=f"m{n % 3}"):
            rows.setdefault(row, used(0)).merge(used(n + 1))
    await store.write("w", 1, rows)
    plain = wanted(by)
    detailed = wanted(by, network="net/one", method="m1")
    assert plain.split_by != (True, True, True)
    assert detailed.split_by == (True, True, True)
    assert sum((await total(store, plain)).values()) == 78
    assert sum((await total(store, detailed)).values()) == 2 + 5 + 8 + 11
    assert sum((await total(store, wanted(by, key="key_0"))).values()) == 1 + 3 + 5 + 7 + 9 + 11


async def test_account_sees_only_its_own_usage(pool: Pool) -> None:
    store = UsageStore(pool)
    await store.write("w", 1, batch(3) | batch(5, account="acct_2", key="key_2"))
    assert await total(store, wanted()) == {"": 3}
    assert await total(store, wanted("key")) == {"key_1": 3}
    assert await total(store, wanted(key="key_2")) == {}
    assert await total(store, wanted("account", account=None)) == {"acct_1": 3, "acct_2": 5}
    await store.sum_up(0.0)
    assert [row["key_id"] for row in await store.rows(wanted(), 10)] == ["key_1"]


async def test_lines_beyond_the_top_are_summed_in_the_last_line(pool: Pool) -> None:
    store = UsageStore(pool)
    rows = {row: each for n in range(6) for row, each in batch(n + 1, method=f"m{n}").items()}
    await store.write("w", 1, rows)
    await store.sum_up(0.0)
    folded = await store.chart(wanted("method", top=2))
    assert [(line.name, line.total.requests) for line in folded] == [("m5", 6), ("m4", 5), (OTHER, 10)]
    whole = await store.chart(wanted("method", top=6))
    assert [line.total.requests for line in whole] == [6, 5, 4, 3, 2, 1]


async def test_rows_match_the_filters(pool: Pool) -> None:
    store = UsageStore(pool)
    await store.write("w", 1, batch(1) | batch(2, key="key_2") | batch(4, key="key_2", method="n"))

    await store.sum_up(0.0)

    async def found(**filters: Any) -> list[int]:
        return [row["requests"] for row in await store.rows(wanted(**filters), 10)]

    assert await found() == [1, 2, 4]
    assert await found(key="key_2") == [2, 4]
    assert await found(key="key_2", method="m", network="net/one") == [2]
    assert await found(network="net/two") == []


async def test_known_series_use_no_new_ids(pool: Pool) -> None:
    for number in range(1, 4):
        await UsageStore(pool).write("w", number, batch(1))  # a new worker has none cached
    await UsageStore(pool).write("w", 4, batch(1) | batch(1, method="n"))
    async with pool.connection() as connection:
        numbers = [row["id"] for row in await connection.fetch("select id from usage_series order by id")]
    assert numbers == [*range(1, 8)]  # five, plus two for the new method: its series and its sum


async def test_last_use_is_known_while_any_usage_is_stored(pool: Pool) -> None:
    store = UsageStore(pool)
    await store.write("w", 1, batch(1))
    assert await store.last_used("acct_1") == {"key_1": NOW}
    await store.sum_up(0.0)
    after = NOW + datetime.timedelta(minutes=1)
    await store.purge({"minute": after})
    assert await store.last_used("acct_1") == {"key_1": NOW.replace(minute=0)}
    await store.purge({"hour": after})
    assert await store.last_used("acct_1") == {"key_1": NOW.replace(hour=0, minute=0)}
    assert await store.last_used("acct_2") == {}


async def test_old_rows_are_deleted_per_step_and_newer_ones_stay(pool: Pool) -> None:
    store = UsageStore(pool)
    await store.write("w", 1, batch(4))
    await store.sum_up(0.0)
    await store.purge({"minute": NOW, "hour": NOW.replace(minute=0), "day": NOW.replace(hour=0, minute=0)})
    assert await total(store, wanted(step="minute")) == {"": 4}
    await store.purge({"minute": NOW + datetime.timedelta(seconds=1)})
    assert await total(store, wanted(step="minute")) == {}
    assert await total(store, wanted(step="hour")) == {"": 4}


async def test_purge_does_nothing_while_another_worker_purges(pool: Pool, database: str) -> None:
    store = UsageStore(pool)
    await store.write("w", 1, batch(4))
    async with connected(database) as other, other.transaction():
        await other.execute("select pg_advisory_xact_lock($1::integer, $2::integer)", *LOCK)
        await store.purge({"minute": NOW + datetime.timedelta(days=1)})
        assert await total(store, wanted(step="minute")) == {"": 4}
    await store.purge({"minute": NOW + datetime.timedelta(days=1)})
    assert await total(store, wanted(step="minute")) == {}


async def test_requests_of_a_day_are_counted_over_all_keys(pool: Pool) -> None:
    store = UsageStore(pool)
    assert await store.requests_of_day("acct_1", NOW.date()) == 0
    await store.write("w", 1, batch(4))
    second = batch(2, key="key_2")
    await store.write("w", 2, second)
    assert await store.requests_of_day("acct_1", NOW.date()) == 6
    await store.sum_up(0.0)
    assert await store.requests_of_day("acct_1", NOW.date()) == 6
    await store.purge({"minute": NOW + datetime.timedelta(days=1)})
    assert await store.requests_of_day("acct_1", NOW.date()) == 6
    assert await store.requests_of_day("acct_1", NOW.date() + datetime.timedelta(days=1)) == 0


async def test_batch_of_thousands_of_rows_is_written(pool: Pool) -> None:
    store = UsageStore(pool)
    rows = {(("acct_1", f"key_{n}", "net/one", "m"), MINUTE): used() for n in range(2500)}
    await store.write("w", 1, rows)
    await store.write("w", 2, rows)
    assert sum((await total(store, wanted(network="net/one", method="m"))).values()) == 5000


async def _of_day(pool: Pool) -> int:
    """The requests in the day's row."""
    async with pool.connection() as connection:
        return int(await connection.fetchval("select max(requests) from usage where step = 'day'"))


async def test_hours_are_summed_up_once_in_an_interval_and_lose_nothing(pool: Pool) -> None:
    store = UsageStore(pool)
    await store.write("w", 1, batch(4))
    assert await store.sum_up(60.0) == 1
    await store.write("w", 2, batch(3))
    assert await store.sum_up(60.0) == 0
    assert await _of_day(pool) == 4
    assert await store.sum_up(0.0) == 1
    assert await _of_day(pool) == 7
    assert await store.sum_up(0.0) == 0  # the hour is long over, and has not changed


async def test_current_hour_is_summed_up_again_and_again(pool: Pool) -> None:
    store, minute = UsageStore(pool), int(datetime.datetime.now(datetime.UTC).timestamp()) // 60
    await store.write("w", 1, {(("acct_1", "key_1", "net/one", "m"), minute): used(4)})
    assert [await store.sum_up(0.0) for _ in range(3)] == [1, 1, 1]


async def test_concurrent_workers_sum_up_one_at_a_time(pool: Pool) -> None:
    stores = [UsageStore(pool) for _ in range(5)]
    for number in range(1, 6):
        await stores[0].write("w", number, batch(1))
        await asyncio.gather(*[store.sum_up(0.0) for store in stores])
    assert await total(stores[0], wanted(step="day")) == {"": 5}


# How the previous version wrote a batch: it added to minutes, hours and days.
ADD_BEFORE = """
insert into usage as u
select step, (select id from usage_series where key_id = '' and network = '' and method = ''), date_trunc(step, $1, 'UTC'),
    5, 0, 10, 0, 5, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0
from unnest(array['day', 'hour', 'minute']) as step
on conflict (step, series, at) do update set requests = u.requests + excluded.requests, units = u.units + excluded.units,
    t0 = u.t0 + excluded.t0
"""


async def test_processes_of_the_previous_version_count_beside_this_one(pool: Pool) -> None:
    store = UsageStore(pool)
    await store.write("w", 1, batch(1))
    for number in range(2, 6):
        async with pool.connection() as connection:
            await connection.execute(ADD_BEFORE, NOW)
        await store.write("w", number, batch(1))
        assert await total(store, wanted(step="day")) == {"": 6 * (number - 1) + 1}
        async with pool.connection() as connection:
            await connection.execute("select count(*) from usage_minutes")  # its purge reads this table


async def test_sums_do_not_shrink_when_their_minutes_are_gone(pool: Pool) -> None:
    store = UsageStore(pool)
    await store.write("w", 1, batch(4))
    await store.sum_up(0.0)
    await store.purge({"minute": NOW + datetime.timedelta(days=1)})
    await store.write("w", 2, batch(1))
    assert await total(store, wanted(step="hour")) == {"": 4}
    assert await total(store, wanted(step="day")) == {"": 4}


async def test_minutes_of_a_day_have_a_table_that_is_dropped(pool: Pool) -> None:
    store = UsageStore(pool)
    now = datetime.datetime.now(datetime.UTC)
    tomorrow = now + datetime.timedelta(days=1)
    await store.purge({})
    await store.write("w", 1, {(("acct_1", "key_1", "net/one", "m"), int(tomorrow.timestamp()) // 60): used(4)})
    assert await _days(pool) == {
        f"usage_minutes_{tomorrow:%Y%m%d}": 5,
        f"usage_minutes_{now + 2 * (tomorrow - now):%Y%m%d}": 0,
    }
    await store.purge({"minute": tomorrow + datetime.timedelta(days=1)})
    await store.write("w", 2, batch(1))  # of a day without a table
    assert [*(await _days(pool)).values()] == [0]


async def test_day_with_rows_in_the_default_table_stays_there(pool: Pool) -> None:
    store, tomorrow = UsageStore(pool), datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=1)
    await store.write("w", 1, {(("acct_1", "key_1", "net/one", "m"), int(tomorrow.timestamp()) // 60): used(4)})
    await store.purge({})
    assert len(await _days(pool)) == 1
    await store.purge({"minute": tomorrow + datetime.timedelta(days=5)})
    async with pool.connection() as connection:
        assert await connection.fetchval("select count(*) from usage where step = 'minute'") == 0


async def test_busy_tables_delay_the_change_of_days(pool: Pool, database: str) -> None:
    store = UsageStore(pool)
    async with connected(database) as other, other.transaction():
        await other.execute("lock table usage_minutes in access share mode")
        await store.purge({})
        assert await _days(pool) == {}
    await store.purge({})
    assert len(await _days(pool)) == 2


async def _days(pool: Pool) -> dict[str, int]:
    """The tables of days, with their numbers of rows."""
    async with pool.connection() as connection:
        names = await connection.fetch(
            "select relname from pg_class where relname ~ '^usage_minutes_[0-9]+$' order by 1"
        )
        return {row[0]: await connection.fetchval(f"select count(*) from {row[0]}") for row in names}
