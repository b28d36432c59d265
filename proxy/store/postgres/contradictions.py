"""Contradicted replies in Postgres: the newest of each network, for a limited time."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from typing import Any

import orjson

from proxy.core.contradictions import ContradictedReply
from proxy.store.postgres import sql
from proxy.store.postgres.bad_rows import storable
from proxy.store.postgres.json_text import json_text
from proxy.store.postgres.pool import PATIENT_S, Pool

# Rows that are kept of each network, about 10 MB at most, and for how many days.
MOST_OF_NETWORK, KEEP_DAYS = 1000, 90
_COLUMNS = ("network", "method", "kind", "verified_by", "upstream", "operator", "digest", "other_digest")
# Texts of clients and upstreams.
_TEXTS = ("params", "reply", "other_reply", "reason")


class ContradictionStore:
    def __init__(self, pool: Pool) -> None:
        self._pool = pool

    def __repr__(self) -> str:
        return f"<ContradictionStore {self._pool!r}>"

    async def write(self, replies: Sequence[ContradictedReply]) -> None:
        """Add these replies, and delete those that are too old or exceed the limit."""
        async with self._pool.connection(within_s=PATIENT_S) as connection, connection.transaction():
            await connection.execute(
                sql.contradictions.add,
                [datetime.datetime.fromtimestamp(each.at, datetime.UTC) for each in replies],
                [json_text(each.others) for each in replies],
                *[[getattr(each, name) for each in replies] for name in _COLUMNS],
                *[[storable(getattr(each, name)) for each in replies] for name in _TEXTS],
            )
            await connection.execute(sql.contradictions.trim, MOST_OF_NETWORK, KEEP_DAYS)

    async def read(
        self, *, network: str | None, since: datetime.datetime | None, most: int | None
    ) -> list[dict[str, Any]]:
        """Newest first. None: no limit."""
        async with self._pool.connection() as connection:
            rows = await connection.fetch(sql.contradictions.read, network, since, most)
        return [{**row, "others": orjson.loads(row["others"])} for row in rows]
