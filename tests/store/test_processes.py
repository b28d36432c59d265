"""Reports of the fleet's processes: a process that is gone or has ended is not listed."""

from __future__ import annotations

from proxy import __version__
from proxy.services.process_reports import ProcessReports
from proxy.store.postgres.fleet import FleetStore
from proxy.store.postgres.pool import Pool
from proxy.tasks import Tasks
from tests.service import until


async def test_process_is_listed_until_it_ends(pool: Pool) -> None:
    store, tasks = FleetStore(pool), Tasks()
    reports = ProcessReports(store, "follower", follows=lambda: {"dev/mainnet": {"block": 5, "head": 7}})
    tasks.start("report", reports.run)
    (found,) = await until(store.processes)
    assert (found["role"], found["version"]) == ("follower", __version__)
    assert found["follows"] == {"dev/mainnet": {"block": 5, "head": 7}}
    await tasks.close()
    await reports.close()
    assert await store.processes() == []


async def test_process_that_stopped_reporting_is_not_listed(pool: Pool) -> None:
    store = FleetStore(pool)
    await store.write_process("gone", {"host": "a", "role": "gateway", "pid": 1})
    await store.write_process("here", {"host": "b", "role": "gateway", "pid": 1})
    async with pool.connection() as connection:
        await connection.execute("update processes set seen_at = now() - interval '2 minutes' where id = 'gone'")
    assert [each["host"] for each in await store.processes()] == ["b"]
    await store.delete_process("another")
    async with pool.connection() as connection:
        assert await connection.fetchval("select count(*) from processes") == 1
