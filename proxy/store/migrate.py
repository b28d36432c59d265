"""Forward-only migrations: numbered files, each applied once, in order, by one runner at a time.

Concurrent runners wait for each other on an advisory lock; the second one finds nothing left to apply. Each file runs in one
transaction with the row that records it, so a crash leaves a file unapplied, never half applied.

The eleven migrations from before 1.0.0 were squashed into `0001_initial`. A database that has all eleven has the same schema
and is recorded as such; one that has only some of them is refused.

Migrations only add. A change that older versions do not survive is a function of the database, which `finish` calls once none
of their processes is left; on a new database that is at once. The program works before and after it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import asyncpg

from proxy.data_files import SCHEMAS
from proxy.errors import StartError
from proxy.store import sql

MIGRATIONS = SCHEMAS / "sql" / "migrations"
INITIAL = "0001_initial"
# The migrations that `0001_initial` replaces. Their rows stay in schema_migrations: a process of the version before looks
# for them when it starts.
SQUASHED = (
    "0001_accounts_and_keys",
    "0002_blocks_and_holdings",
    "0003_wallets_and_operations",
    "0004_gas",
    "0005_webhooks",
    "0006_usage_and_sessions",
    "0007_gas_refusals",
    "0008_gas_by_nonce",
    "0009_webhook_upkeep",
    "0010_emails",
    "0011_wallets_known_at_once",
)
# The advisory lock's key: any number that no other program uses. These are the letters "pens".
LOCK = 0x70656E73
# A migration that waits for a busy table must not hold up the traffic that queues behind it.
_TIMEOUTS = "set lock_timeout = '4s'; set statement_timeout = '60s'"
_TABLE = """
create table if not exists schema_migrations (
    name text primary key,
    applied_at timestamptz not null default now()
)"""
# Processes of versions without this migration do not survive `finish`.
SPLIT = "0028_events_by_day"
# A process that was not seen for this long has ended: it reports every three seconds.
GONE_S = 30.0
_RECORD = "insert into schema_migrations (name) values ($1)"


def files(directory: Path = MIGRATIONS) -> list[Path]:
    return sorted(directory.glob("[0-9]*.sql"))


def newest() -> str:
    return files()[-1].stem


async def migrate(connection: asyncpg.Connection[asyncpg.Record], directory: Path = MIGRATIONS) -> list[str]:
    """Apply the missing migrations and return their names."""
    async with _locked(connection):
        await connection.execute(_TIMEOUTS)
        await connection.execute(_TABLE)
        done = await _recorded(connection)
        if _has_squashed(done) and INITIAL not in done:
            await connection.execute(_RECORD, INITIAL)
            done.add(INITIAL)
        is_new = not done
        missing = [path for path in files(directory) if path.stem not in done]
        for path in missing:
            async with connection.transaction():
                await connection.execute(path.read_text("utf-8"))
                await connection.execute(_RECORD, path.stem)
        if is_new and SPLIT in await _recorded(connection):
            await connection.execute(sql.migrations.split)
        return [path.stem for path in missing]


@asynccontextmanager
async def _locked(connection: asyncpg.Connection[asyncpg.Record]) -> AsyncIterator[None]:
    await connection.execute("select pg_advisory_lock($1)", LOCK)
    try:
        yield
    finally:
        await connection.execute("reset lock_timeout; reset statement_timeout")
        await connection.execute("select pg_advisory_unlock($1)", LOCK)


async def finish(connection: asyncpg.Connection[asyncpg.Record]) -> bool:
    """Split events and deliveries by day, and return whether that was still to be done. It can be interrupted and repeated."""
    if missing := await pending(connection):
        raise StartError(
            [f"the database lacks the migrations {', '.join(missing)}: run `python -m proxy migrate` first"]
        )
    async with _locked(connection):
        if not await needs_finish(connection):
            return False
        if older := await connection.fetch(sql.migrations.older_processes, SPLIT, GONE_S):
            found = ", ".join(f"{row['role']} on {row['host']} (pid {row['pid']})" for row in older)
            raise StartError([f"processes of an older version are running: {found}: update them, then run it again"])
        # This reads both tables, which may take minutes, while others write to them.
        await connection.execute(sql.migrations.validate_events)
        await connection.execute(sql.migrations.validate_deliveries)
        await connection.execute(sql.migrations.split)
    return True


async def needs_finish(connection: asyncpg.Connection[asyncpg.Record]) -> bool:
    return not await connection.fetchval(sql.migrations.is_split)


async def pending(connection: asyncpg.Connection[asyncpg.Record]) -> list[str]:
    """Return the names of migrations that this program has and the database lacks."""
    exists = await connection.fetchval("select to_regclass('schema_migrations') is not null")
    done = await _recorded(connection) if exists else set()
    if _has_squashed(done):
        done.add(INITIAL)
    return [path.stem for path in files() if path.stem not in done]


def _has_squashed(done: set[str]) -> bool:
    """Whether all migrations from before 1.0.0 are recorded; raise StartError if only some are."""
    lacking = [name for name in SQUASHED if name not in done]
    if lacking and len(lacking) < len(SQUASHED):
        raise StartError(
            [
                f"the database is from before 1.0.0 and lacks the migrations {', '.join(lacking)}, which this version no "
                "longer includes: run `penstock migrate` with the last version before 1.0.0, then with this one"
            ]
        )
    return not lacking


async def _recorded(connection: asyncpg.Connection[asyncpg.Record]) -> set[str]:
    return {row["name"] for row in await connection.fetch("select name from schema_migrations")}
