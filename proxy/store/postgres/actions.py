"""The record of changes to each account and their authors, in Postgres."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from proxy.core.paging import Page
from proxy.store.postgres import sql
from proxy.store.postgres.pool import PATIENT_S, Pool

# A person makes far fewer changes in an hour.
MOST_PER_HOUR = 1_000
KEPT_DAYS = 365


@dataclass(frozen=True, slots=True)
class Actor:
    """The holder, a key or an operator. The holder has no name here."""

    by: Literal["holder", "key", "operator"]
    name: str = ""


class ActionStore:
    def __init__(self, pool: Pool) -> None:
        self._pool = pool

    def __repr__(self) -> str:
        return f"<ActionStore {self._pool!r}>"

    async def record(self, account: str, actor: Actor, action: str, *, subject: str, address: str) -> None:
        async with self._pool.connection() as connection:
            await connection.execute(
                sql.actions.record, account, actor.by, actor.name, action, subject, address, MOST_PER_HOUR
            )

    async def page(self, account: str, page: Page) -> tuple[list[dict[str, Any]], int]:
        """Return one page, newest first, and the number of all."""
        async with self._pool.connection() as connection:
            rows = await connection.fetch(sql.actions.list_actions, account, page.limit, page.offset)
            total = await connection.fetchval(sql.actions.count_actions, account)
        return [dict(row) for row in rows], total

    async def purge(self) -> None:
        async with self._pool.connection(within_s=PATIENT_S) as connection:
            await connection.execute(sql.actions.delete_old_actions, KEPT_DAYS)
