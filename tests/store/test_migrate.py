"""Migrations are applied once each, in order, completely or not at all, from any number of processes."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import asyncpg
import pytest

from proxy.errors import StartError
from proxy.store import migrate
from tests.database import connected
from tests.service import until

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


async def test_members_are_added_without_a_deadlock_with_traffic(empty_database: str, tmp_path: Path) -> None:
    """A transaction that holds one of the tables gets the others, and then the migration gets all."""
    for path in migrate.files()[:22]:
        shutil.copy(path, tmp_path)
    await run(empty_database, tmp_path)
    shutil.copy(migrate.MIGRATIONS / "0023_members.sql", tmp_path)
    async with connected(empty_database) as traffic, connected(empty_database) as watch:
        # Long, so that the migration would be the one to fail.
        await traffic.execute("set deadlock_timeout = '30s'")
        transaction = traffic.transaction()
        await transaction.start()
        await traffic.execute("lock table account_passwords in row exclusive mode")

        async def is_waiting() -> bool:
            waiting = "select from pg_stat_activity where datname = current_database() and wait_event_type = 'Lock'"
            return bool(await watch.fetchval(f"select exists ({waiting})"))

        async with asyncio.TaskGroup() as group:
            migration = group.create_task(run(empty_database, tmp_path))
            await until(is_waiting)
            await traffic.execute("lock table sessions, accounts, admin_tokens, sign_in_links in row exclusive mode")
            await transaction.commit()
        assert migration.result() == ["0023_members"]


async def test_pending_returns_the_missing_migrations(empty_database: str, database: str) -> None:
    async with connected(empty_database) as connection:
        assert await migrate.pending(connection) == NAMES
    async with connected(database) as connection:
        assert await migrate.pending(connection) == []


def test_migrations_are_numbered_without_gaps() -> None:
    assert NAMES
    assert [int(name.split("_")[0]) for name in NAMES] == list(range(1, len(NAMES) + 1))


async def record(url: str, names: tuple[str, ...]) -> None:
    """Make the database look like one that an older version has migrated."""
    async with connected(url) as connection:
        await connection.execute(
            "create table if not exists schema_migrations (name text primary key, applied_at timestamptz)"
        )
        await connection.execute("delete from schema_migrations")
        await connection.executemany("insert into schema_migrations (name) values ($1)", [(name,) for name in names])


async def test_database_with_every_squashed_migration_is_recorded_as_initial(
    empty_database: str, database: str
) -> None:
    async with connected(empty_database) as connection:
        await connection.execute(migrate.files()[0].read_text("utf-8"))
    await record(empty_database, migrate.SQUASHED)
    async with connected(empty_database) as connection:
        assert await migrate.pending(connection) == NAMES[1:]
    assert await run(empty_database) == NAMES[1:]
    assert await applied(empty_database) == sorted({*migrate.SQUASHED, *NAMES})
    assert await run(empty_database) == []
    async with connected(empty_database) as connection:
        assert await migrate.finish(connection)
        assert not await migrate.finish(connection)
    assert await tables(empty_database) == await tables(database)


@pytest.mark.parametrize("count", [1, 10])
async def test_database_with_some_squashed_migrations_is_refused_unchanged(empty_database: str, count: int) -> None:
    await record(empty_database, migrate.SQUASHED[:count])
    message = rf"lacks the migrations .*{migrate.SQUASHED[-1]}.*: run `penstock migrate` with the last version before"
    with pytest.raises(StartError, match=message):
        await run(empty_database)
    async with connected(empty_database) as connection:
        with pytest.raises(StartError, match=message):
            await migrate.pending(connection)
        held = "select count(*) from pg_locks join pg_database d on d.oid = database where locktype = 'advisory'"
        assert await connection.fetchval(f"{held} and d.datname = current_database()") == 0
    assert await applied(empty_database) == list(migrate.SQUASHED[:count])
    assert await tables(empty_database) == {"schema_migrations"}


async def test_migration_after_the_initial_one_is_applied_to_a_squashed_database(
    empty_database: str, tmp_path: Path
) -> None:
    (tmp_path / f"{migrate.INITIAL}.sql").write_text("create table never (n int);")
    (tmp_path / "0002_two.sql").write_text("create table two (n int);")
    await record(empty_database, migrate.SQUASHED)
    assert await run(empty_database, tmp_path) == ["0002_two"]
    assert await tables(empty_database) == {"two", "schema_migrations"}
