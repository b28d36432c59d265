"""Tables of one day each: those of the days ahead are added in time, and old ones are dropped as a whole."""

from __future__ import annotations

import logging

import asyncpg

from proxy.store.postgres import sql
from proxy.store.postgres.pool import PATIENT_S, Pool

log = logging.getLogger("penstock.database")


async def renew_day_tables(pool: Pool, what: str, *, add: str, drop: str, keep: object) -> None:
    """Run the queries `add`, and `drop` with `keep` as its argument. If the tables are busy, the next purge does it."""
    try:
        async with pool.connection(within_s=PATIENT_S) as connection, connection.transaction():
            await connection.execute(sql.usage.bound_locks)
            await connection.execute(add)
            await connection.execute(drop, keep)
    except (asyncpg.LockNotAvailableError, asyncpg.InsufficientPrivilegeError) as exc:
        log.warning(f"daily tables for {what} were not renewed", extra={"reason": str(exc)})
