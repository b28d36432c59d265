"""Forward-only migrations: numbered files, each applied once, in order, by one runner at a time.

Concurrent runners wait for each other on an advisory lock; the second one finds nothing left to apply. Each file runs in one
transaction with the row that records it, so a crash leaves a file unapplied, never half applied.

Processes of the previous version run while a migration is applied and after it, so migrations only add (schemas/README.md).
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import asyncpg

from proxy.data_files import SCHEMAS

MIGRATIONS = SCHEMAS / "sql" / "migrations"
# The advisory lock's key: any number that no other program uses. These are the letters "pens".
LOCK = 0x70656E73
# A migration that waits for a busy table must not hold up the traffic that queues behind it.
_TIMEOUTS = "set lock_timeout = '4s'; set statement_timeout = '60s'"
_TABLE = """
create table if not exists schema_migrations (
    name text primary key,
    applied_at timestamptz not null default now()
)"""
_RECORD = "insert into schema_migrations (name) values ($1)"


def files(directory: Path = MIGRATIONS) -> list[Path]:
    return sorted(directory.glob("[0-9]*.sql"))


async def migrate(connection: asyncpg.Connection[asyncpg.Record], directory: Path = MIGRATIONS) -> list[str]:
    """Apply the missing migrations and return their names."""
    async with _locked(connection):
        await connection.execute(_TIMEOUTS)
        await connection.execute(_TABLE)
        done = await _recorded(connection)
        missing = [path for path in files(directory) if path.stem not in done]
        for path in missing:
            async with connection.transaction():
                await connection.execute(path.read_text("utf-8"))
                await connection.execute(_RECORD, path.stem)
        return [path.stem for path in missing]


@asynccontextmanager
async def _locked(connection: asyncpg.Connection[asyncpg.Record]) -> AsyncIterator[None]:
    await connection.execute("select pg_advisory_lock($1)", LOCK)
    try:
        yield
    finally:
        await connection.execute("reset lock_timeout; reset statement_timeout")
        await connection.execute("select pg_advisory_unlock($1)", LOCK)


async def pending(connection: asyncpg.Connection[asyncpg.Record]) -> list[str]:
    """Return the names of migrations that this program has and the database lacks."""
    exists = await connection.fetchval("select to_regclass('schema_migrations') is not null")
    done = await _recorded(connection) if exists else set()
    return [path.stem for path in files() if path.stem not in done]


async def _recorded(connection: asyncpg.Connection[asyncpg.Record]) -> set[str]:
    return {row["name"] for row in await connection.fetch("select name from schema_migrations")}
