"""Usage inside one worker: flushes while the database fails, and concurrent reads."""

from __future__ import annotations

import asyncio
import dataclasses
import datetime
import logging
import threading

import pytest

from proxy.core.usage import KeyTallies, Tally, TouchedTallies
from proxy.services.usage import READ_AT_ONCE, UsageQuery, UsageService
from proxy.store.postgres.pool import Pool
from proxy.store.postgres.usage import UsageStore
from proxy.tasks import Tasks
from tests.database import connected
from tests.service import until

METHODS = [Tally("net/one", f"method_{n}") for n in range(5)]


def span() -> UsageQuery:
    now = datetime.datetime.now(datetime.UTC)
    return UsageQuery(step="minute", first=now - datetime.timedelta(hours=2), last=now, account="acct", by="method")


async def test_oldest_usage_is_dropped_while_the_database_fails_and_the_rest_is_written(
    pool: Pool, database: str, caplog: pytest.LogCaptureFixture
) -> None:
    touched: TouchedTallies = []
    tallies = KeyTallies("acct", "key", touched)
    usage = UsageService(UsageStore(pool), touched, flush_s=0.02, keep_s={}, most_waiting=3)
    tasks = Tasks()

    def count() -> None:
        for whole in METHODS:
            tallies[whole].count("results", "", 2, 0.001)

    def has_given_up() -> bool:
        count()
        return "usage dropped" in caplog.text

    async with connected(database) as connection:
        await connection.execute("alter table usage_batches rename to elsewhere")
        with caplog.at_level(logging.WARNING, "penstock.usage"):
            tasks.start("usage", usage.run)
            await until(has_given_up)
        await connection.execute("alter table elsewhere rename to usage_batches")
    # The failed batch was kept, and is written with everything after it.
    before = sum(line.total.requests for line in await usage.chart(span()))
    count()

    async def is_written() -> bool:
        lines = await usage.chart(span())
        return len(lines) == len(METHODS) and sum(line.total.requests for line in lines) >= before + len(METHODS)

    await until(is_written)
    await tasks.close()


async def test_tables_are_built_in_threads_with_bounded_concurrency(pool: Pool) -> None:
    usage = UsageService(UsageStore(pool), [], flush_s=1.0, keep_s={})
    loops, at_once, most = threading.get_ident(), 0, 0
    counting, together = threading.Lock(), threading.Barrier(READ_AT_ONCE)

    def write(rows: object) -> int:
        nonlocal at_once, most
        with counting:
            at_once += 1
            most = max(most, at_once)
        together.wait(timeout=30)
        with counting:
            at_once -= 1
        return threading.get_ident()

    async with asyncio.TaskGroup() as group:
        # One account alone leaves a slot for others.
        queries = [dataclasses.replace(span(), account=f"acc_{number}") for number in range(3 * READ_AT_ONCE)]
        tasks = [group.create_task(usage.table(query, write)) for query in queries]
    assert loops not in {task.result() for task in tasks}
    assert most == READ_AT_ONCE
