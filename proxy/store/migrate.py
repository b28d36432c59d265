"""Forward-only migrations: numbered files, run once each, in order, by one runner at a time.

Two programs that migrate at once wait for each other on an advisory lock; the second finds nothing left to do. Each file
is one transaction together with the row that records it, so a crash in the middle leaves the file undone, not half done.
"""

from __future__ import annotations

from pathlib import Path

import asyncpg

MIGRATIONS = Path(__file__).resolve().parents[2] / "schemas" / "sql" / "migrations"
# Any number that nobody else uses: the letters "pens".
LOCK = 0x70656E73
# A migration that waits for a busy table must not stop the traffic that queues up behind it.
_TIMEOUTS = "set lock_timeout = '4s'; set statement_timeout = '60s'"
_TABLE = """
create table if not exists schema_migrations (
    name text primary key,
    applied_at timestamptz not null default now()
)"""


def files(directory: Path = MIGRATIONS) -> list[Path]:
    return sorted(directory.glob("[0-9]*.sql"))


async def migrate(connection: asyncpg.Connection[asyncpg.Record], directory: Path = MIGRATIONS) -> list[str]:
    """Apply what is missing; the names of what was applied now."""
    await connection.execute("select pg_advisory_lock($1)", LOCK)
    try:
        await connection.execute(_TIMEOUTS)
        await connection.execute(_TABLE)
        done = {row["name"] for row in await connection.fetch("select name from schema_migrations")}
        missing = [path for path in files(directory) if path.stem not in done]
        for path in missing:
            async with connection.transaction():
                await connection.execute(path.read_text("utf-8"))
                await connection.execute("insert into schema_migrations (name) values ($1)", path.stem)
        return [path.stem for path in missing]
    finally:
        await connection.execute("reset lock_timeout; reset statement_timeout")
        await connection.execute("select pg_advisory_unlock($1)", LOCK)


async def pending(connection: asyncpg.Connection[asyncpg.Record]) -> list[str]:
    """Names of migrations that this program has and the database has not."""
    exists = await connection.fetchval("select to_regclass('schema_migrations') is not null")
    done = {row["name"] for row in await connection.fetch("select name from schema_migrations")} if exists else set()
    return [path.stem for path in files() if path.stem not in done]
