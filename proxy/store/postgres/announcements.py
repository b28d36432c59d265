"""Announcements of operators in Postgres."""

from __future__ import annotations

import datetime
from typing import Any

from proxy.errors import NotFound
from proxy.store.postgres import sql
from proxy.store.postgres.pool import Pool

# Shown at the same time, and listed for operators.
MOST_CURRENT, MOST_LISTED = 5, 100


class AnnouncementStore:
    def __init__(self, pool: Pool) -> None:
        self._pool = pool

    def __repr__(self) -> str:
        return f"<AnnouncementStore {self._pool!r}>"

    async def add(
        self, level: str, text: str, *, starts: datetime.datetime | None, ends: datetime.datetime, by: str
    ) -> dict[str, Any]:
        async with self._pool.connection() as connection:
            row = await connection.fetchrow(sql.announcements.add, level, text, starts, ends, by)
        assert row is not None
        return dict(row)

    async def current(self) -> list[dict[str, Any]]:
        async with self._pool.connection() as connection:
            return [dict(row) for row in await connection.fetch(sql.announcements.list_current, MOST_CURRENT)]

    async def all(self) -> list[dict[str, Any]]:
        async with self._pool.connection() as connection:
            return [dict(row) for row in await connection.fetch(sql.announcements.list_all, MOST_LISTED)]

    async def remove(self, number: int) -> dict[str, Any]:
        async with self._pool.connection() as connection:
            row = await connection.fetchrow(sql.announcements.remove, number)
        if row is None:
            raise NotFound(f"there is no announcement {number}")
        return dict(row)
