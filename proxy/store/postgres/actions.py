"""The log of changes in all accounts and by all operators, with their authors, in Postgres."""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import asyncpg
import orjson

from proxy.core.paging import Page
from proxy.store.postgres import sql
from proxy.store.postgres.json_text import json_text
from proxy.store.postgres.pool import PATIENT_S, Pool

# A person makes far fewer changes in an hour.
MOST_PER_HOUR = 1_000
KEPT_DAYS = 365


@dataclass(frozen=True, slots=True)
class Actor:
    """The holder, a key or an operator. The holder has no name here."""

    by: Literal["holder", "key", "operator"]
    name: str = ""


@dataclass(frozen=True, slots=True)
class Action:
    """An operation that was done, the object that it was about, the client's address, and the members of the object that it
    changed (`core/action_changes.py`)."""

    operation: str
    subject: str = ""
    address: str = ""
    before: Mapping[str, Any] | None = None
    after: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ActionFilter:
    """None means any. `before_id`: only older entries than this one."""

    account: str | None = None
    by: str | None = None
    name: str | None = None
    action: str | None = None
    since: datetime.datetime | None = None
    until: datetime.datetime | None = None
    before_id: int | None = None


class ActionStore:
    def __init__(self, pool: Pool) -> None:
        self._pool = pool

    def __repr__(self) -> str:
        return f"<ActionStore {self._pool!r}>"

    async def record(self, account: str | None, actor: Actor, done: Action) -> None:
        """`account`: None for what operators do outside of accounts."""
        async with self._pool.connection() as connection:
            await connection.execute(
                sql.actions.record,
                account,
                actor.by,
                actor.name,
                done.operation,
                done.subject,
                done.address,
                MOST_PER_HOUR,
                _json(done.before),
                _json(done.after),
            )

    async def page(self, account: str, page: Page) -> tuple[list[dict[str, Any]], int]:
        """Return one page of an account's entries, newest first, and the number of all."""
        async with self._pool.connection() as connection:
            rows = await connection.fetch(sql.actions.list_actions, account, page.limit, page.offset)
            total = await connection.fetchval(sql.actions.count_actions, account)
        return [_read(row) for row in rows], total

    async def search(self, wanted: ActionFilter, limit: int) -> list[dict[str, Any]]:
        """Return the newest entries of all accounts and operators that match."""
        async with self._pool.connection() as connection:
            rows = await connection.fetch(
                sql.actions.search_actions,
                wanted.account,
                wanted.by,
                wanted.name,
                wanted.action,
                wanted.since,
                wanted.until,
                wanted.before_id,
                limit,
            )
        return [_read(row) for row in rows]

    async def purge(self) -> None:
        async with self._pool.connection(within_s=PATIENT_S) as connection:
            await connection.execute(sql.actions.delete_old_actions, KEPT_DAYS)


def _json(members: Mapping[str, Any] | None) -> str | None:
    return None if members is None else json_text(dict(members))


def _read(row: asyncpg.Record) -> dict[str, Any]:
    sides = {name: None if row[name] is None else orjson.loads(row[name]) for name in ("before", "after")}
    return {**dict(row), **sides}
