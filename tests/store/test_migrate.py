"""Migrations are applied once each, in order, completely or not at all, from any number of processes."""

from __future__ import annotations

import asyncio
from pathlib import Path

import asyncpg
import pytest

from proxy.store.postgres import migrate
from tests.database import connected

NAMES = [path.stem for path in migrate.files()]


async def applied(url: str) -> list[str]:
    async with connected(url) as connection:
        return [row["name"] for row in await connection.fetch("select name from schema_migrations order by name")]


async def run(url: str, directory: Path = migrate.MIGRATIONS) -> list[str]:
    async with connected(url) as connection:
        return await migrate.migrate(connection, directory)


async def tables(url: str) -> set[str]:
    async with connected(url) as connection:
        rows = await connection.fetch(
            "select relname from pg_class where relkind = 'r' and relnamespace = 'public'::regnamespace"
        )
        return {row["relname"] for row in rows}


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / "0001_one.sql").write_text("create table one (n int);")
    (tmp_path / "0002_two.sql").write_text("alter table one add m int; create table two (n int);")
    return tmp_path


async def test_fresh_database_gets_every_file_in_order(empty_database: str) -> None:
    assert await run(empty_database) == NAMES
    assert await applied(empty_database) == NAMES


async def test_second_run_has_nothing_to_do(database: str) -> None:
    assert await run(database) == []
    assert await applied(database) == NAMES


@pytest.mark.parametrize("count", [2, 8])
async def test_concurrent_runs_apply_each_file_once(empty_database: str, count: int) -> None:
    async with asyncio.TaskGroup() as group:
        runs = [group.create_task(run(empty_database)) for _ in range(count)]
    results = sorted((one.result() for one in runs), key=len)
    assert results == [[]] * (count - 1) + [NAMES]
    assert await applied(empty_database) == NAMES


async def test_failing_file_is_rolled_back_and_earlier_ones_are_kept(empty_database: str, directory: Path) -> None:
    (directory / "0003_bad.sql").write_text("create table three (n int); create table one (n int);")
    with pytest.raises(asyncpg.DuplicateTableError):
        await run(empty_database, directory)
    assert await applied(empty_database) == ["0001_one", "0002_two"]
    assert await tables(empty_database) == {"one", "two", "schema_migrations"}


async def test_corrected_file_is_applied_after_a_failure(empty_database: str, directory: Path) -> None:
    bad = directory / "0003_bad.sql"
    bad.write_text("create table three (n nonsense);")
    async with connected(empty_database) as connection:
        with pytest.raises(asyncpg.UndefinedObjectError):
            await migrate.migrate(connection, directory)
        bad.write_text("create table three (n int);")
        assert await migrate.migrate(connection, directory) == ["0003_bad"]


async def test_failure_releases_the_lock_and_the_timeouts(empty_database: str, directory: Path) -> None:
    (directory / "0003_bad.sql").write_text("nonsense;")
    async with connected(empty_database) as connection:
        before = await connection.fetchval("show statement_timeout")
        with pytest.raises(asyncpg.PostgresSyntaxError):
            await migrate.migrate(connection, directory)
        assert await connection.fetchval("show statement_timeout") == before
        held = "select count(*) from pg_locks join pg_database d on d.oid = database where locktype = 'advisory'"
        assert await connection.fetchval(f"{held} and d.datname = current_database()") == 0


async def test_file_added_later_is_the_only_one_applied(empty_database: str, directory: Path) -> None:
    await run(empty_database, directory)
    (directory / "0003_three.sql").write_text("create table three (n int);")
    assert await run(empty_database, directory) == ["0003_three"]


async def test_busy_table_fails_the_migration_instead_of_blocking_traffic(empty_database: str, directory: Path) -> None:
    await run(empty_database, directory)
    (directory / "0003_wait.sql").write_text("set local lock_timeout = '50ms'; alter table one add k int;")
    async with connected(empty_database) as busy, busy.transaction():
        await busy.execute("select * from one")
        with pytest.raises(asyncpg.LockNotAvailableError):
            await run(empty_database, directory)
    assert await run(empty_database, directory) == ["0003_wait"]


async def test_empty_directory_applies_nothing(empty_database: str, tmp_path: Path) -> None:
    assert await run(empty_database, tmp_path) == []
    assert await applied(empty_database) == []


async def test_pending_returns_the_missing_migrations(empty_database: str, database: str) -> None:
    async with connected(empty_database) as connection:
        assert await migrate.pending(connection) == NAMES
    async with connected(database) as connection:
        assert await migrate.pending(connection) == []


def test_migrations_are_numbered_without_gaps() -> None:
    assert NAMES
    assert [int(name.split("_")[0]) for name in NAMES] == list(range(1, len(NAMES) + 1))
