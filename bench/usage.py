"""Usage: the cost of counting per call, in this process, and of charts over ten million rows in a real Postgres."""

import asyncio
import datetime
import time
from pathlib import Path
from statistics import median

import asyncpg

from bench.processes import StartFailed
from proxy.core.usage import KeyTallies, Tally, TouchedTallies
from proxy.dev.postgres import Postgres
from proxy.errors import StartError
from proxy.services.usage import UsageService
from proxy.store.postgres import migrate
from proxy.store.postgres.pool import Pool
from proxy.store.postgres.usage import UsageQuery, UsageStore
from proxy.web.dashboard import charts

# Keys and methods used in rotation, and the number of calls between two gathers.
KEYS, METHODS, CALLS = 199, 5, 20_000
# Gathers (one per second) per flush, as with the default settings.
GATHERS = 2
BEST_OF = 20
ROWS = 10_000_000
LOOKS = 20
# Accounts, and the keys, networks and methods of each: every combination has a row in every minute.
ACCOUNTS, OF_EACH = 16, (5, 3, 10)
LARGEST = "account_1"
TITLES = {
    "count": "usage: counting one call by key",
    "flush": "usage: one call's share of a flush",
    "first": "usage chart among 10,000,000 rows: one account, 24 hours",
    "methods": "usage chart among 10,000,000 rows: one account, 24 hours by method",
    "minutes": "usage chart among 10,000,000 rows: one account, 3 hours by minute and method",
    "filtered": "usage chart among 10,000,000 rows: the same, one network",
    "month": "usage chart among 10,000,000 rows: one account, 30 days by key",
    "all": "usage chart among 10,000,000 rows: all accounts, 24 hours (operators)",
}

_SERIES = """
insert into usage_series (account_id, key_id, network, method)
select 'account_' || a, 'key_' || a || '_' || k, 'network/' || n, 'method_' || m
from generate_series(1, $1) a, generate_series(1, $2) k, generate_series(1, $3) n, generate_series(1, $4) m"""
_SUMS = """
insert into usage_series (account_id, key_id, network, method)
select account_id, coalesce(key_id, ''), coalesce(network, ''), coalesce(method, '')
from usage_series group by grouping sets ((account_id), (account_id, key_id), (account_id, network), (account_id, method))"""
_FILL = """
insert into usage
select 'minute', s.id, t.at, 10, 1, 20, 3, 1, 1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0, 1
from generate_series($1::timestamptz, $2::timestamptz, interval '1 minute') as t (at), usage_series s"""
_ROLL_UP = """
insert into usage
select $1::text, series, date_trunc($1::text, at, 'UTC'), sum(requests), sum(errors), sum(units), sum(hits), sum(t0), sum(t1),
    sum(t2), sum(t3), sum(t4), sum(t5), sum(t6), sum(t7), sum(t8), sum(t9), sum(t10), sum(t11), sum(t12), sum(t13), sum(t14)
from usage_minutes group by 2, 3"""


def microseconds() -> float:
    """Return the µs that counting by key adds to a call, gathering included: the best of several, since other work only adds.

    `chart_times` measures the cost of flushing, which needs Postgres.
    """
    taken = [(_by_method(), _by_key()) for _ in range(BEST_OF)]
    return min(by_key for _, by_key in taken) - min(by_method for by_method, _ in taken)


def _by_method() -> float:
    """The baseline: one tally per method for all keys."""
    wholes = [Tally("network", f"method_{n}") for n in range(METHODS)]
    began = time.perf_counter()
    for n in range(CALLS):
        tally = wholes[n % METHODS]
        tally.results += 1
        tally.units += 2
        tally.seconds += 0.001
        tally.buckets[1] += 1
    return (time.perf_counter() - began) / CALLS * 1e6


def _by_key() -> float:
    wholes = [Tally("network", f"method_{n}") for n in range(METHODS)]
    touched: TouchedTallies = []
    tallies = [KeyTallies("account", f"key_{n}", touched) for n in range(KEYS)]
    usage = UsageService(UsageStore(Pool("", size=1, acquire_timeout_s=1.0)), touched, flush_s=2.0, keep_s={})
    turns = [tallies[n % KEYS] for n in range(CALLS)]
    began = time.perf_counter()
    for n in range(CALLS):
        tally = turns[n][wholes[n % METHODS]]
        tally.results += 1
        tally.units += 2
        tally.seconds += 0.001
        tally.buckets[1] += 1
    usage.gather()
    return (time.perf_counter() - began) / CALLS * 1e6


async def _flush_cost(pool: Pool) -> float:
    """µs of CPU per call for a flush, from the gathered counts to the confirmation by Postgres."""
    touched: TouchedTallies = []
    wholes = [Tally("network", f"method_{n}") for n in range(METHODS)]
    tallies = [KeyTallies("account", f"key_{n}", touched) for n in range(KEYS)]
    usage = UsageService(UsageStore(pool), touched, flush_s=2.0, keep_s={})
    taken = []
    for _ in range(BEST_OF):
        for _ in range(GATHERS):
            for n in range(CALLS):
                tallies[n % KEYS][wholes[n % METHODS]].count("results", "", 2, 0.001)
            usage.gather()
        began = time.process_time()
        await usage.flush()
        taken.append((time.process_time() - began) / (GATHERS * CALLS) * 1e6)
    return min(taken)


def chart_times(workdir: Path, rows: int = ROWS) -> dict[str, float]:
    """Return the median milliseconds per chart query, and under `flush` the µs per call of a flush into small tables."""
    try:
        return asyncio.run(_chart_times(workdir, rows))
    except StartError as error:
        raise StartFailed(str(error)) from error


async def _chart_times(workdir: Path, rows: int) -> dict[str, float]:
    (sockets := workdir / "usage-sockets").mkdir(exist_ok=True)
    postgres = Postgres(workdir / "usage-postgres", sockets, workdir / "usage-postgres.log")
    await postgres.start()
    try:
        connection = await asyncpg.connect(postgres.url)
        await migrate.migrate(connection)
        pool = Pool(postgres.url, size=1, acquire_timeout_s=5.0)
        await pool.open()
        found = {"flush": await _flush_cost(pool)}
        await connection.execute("truncate usage, usage_series, usage_batches")
        await _fill(connection, rows)
        await connection.close()
        found |= {name: await _look(UsageStore(pool), wanted) for name, wanted in _wanted().items()}
        await pool.close()
        return found
    finally:
        await postgres.child.stop()


async def _fill(connection: "asyncpg.Connection[asyncpg.Record]", rows: int) -> None:
    await connection.execute("set synchronous_commit = off")
    await connection.execute(_SERIES, ACCOUNTS, *OF_EACH)
    await connection.execute(_SUMS)
    series = await connection.fetchval("select count(*) from usage_series")
    now = datetime.datetime.now(datetime.UTC).replace(second=0, microsecond=0)
    at = now - datetime.timedelta(minutes=rows // series)
    while at < now:
        end = min(at + datetime.timedelta(hours=3), now)
        await connection.execute(_FILL, at, end - datetime.timedelta(minutes=1))
        at = end
    for step in ("hour", "day"):
        await connection.execute(_ROLL_UP, step)
    await connection.execute("vacuum (analyze) usage")
    await connection.execute("analyze usage_series")


def _wanted() -> dict[str, UsageQuery]:
    now = datetime.datetime.now(datetime.UTC)
    hours = datetime.timedelta(hours=1)
    return {
        "first": UsageQuery(step="hour", first=now - 24 * hours, last=now, account=LARGEST),
        "methods": UsageQuery(step="hour", first=now - 24 * hours, last=now, account=LARGEST, by="method"),
        "minutes": UsageQuery(step="minute", first=now - 3 * hours, last=now, account=LARGEST, by="method"),
        "filtered": UsageQuery(
            step="minute", first=now - 3 * hours, last=now, account=LARGEST, by="method", network="network/1"
        ),
        "month": UsageQuery(step="day", first=now - 720 * hours, last=now, account=LARGEST, by="key"),
        # The operators' first view: all accounts.
        "all": UsageQuery(step="hour", first=now - 24 * hours, last=now, account=None, by="account"),
    }


async def _look(store: UsageStore, wanted: UsageQuery) -> float:
    taken = []
    for _ in range(LOOKS):
        began = time.perf_counter()
        charts.chart_of(wanted, await store.chart(wanted), {})
        taken.append((time.perf_counter() - began) * 1000)
    return median(taken)
