"""The health of upstreams over time in Postgres: one row per upstream and moment, written by one of the workers."""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Mapping
from typing import Any

from proxy.store.postgres import sql
from proxy.store.postgres.pool import PATIENT_S, Pool

_COLUMNS = ("id", "network", "label", "state", "breaker", "lag_blocks", "error_rate", "p50_ms", "p99_ms")


class UpstreamSamples:
    def __init__(self, pool: Pool) -> None:
        self._pool = pool

    def __repr__(self) -> str:
        return f"<UpstreamSamples {self._pool!r}>"

    async def has(self, moment: datetime.datetime) -> bool:
        """Whether another worker has written samples of this moment or a later one."""
        async with self._pool.connection(within_s=PATIENT_S) as connection:
            return bool(await connection.fetchval(sql.fleet.has_samples, moment))

    async def add(self, moment: datetime.datetime, upstreams: Iterable[Mapping[str, Any]]) -> None:
        rows = list(upstreams)
        columns = [[row[name] for row in rows] for name in _COLUMNS]
        async with self._pool.connection(within_s=PATIENT_S) as connection:
            await connection.execute(sql.fleet.add_samples, moment, *columns)
            await connection.execute(sql.fleet.delete_old_samples)

    async def read(
        self, upstream: str, first: datetime.datetime, last: datetime.datetime, *, step_s: float
    ) -> list[dict[str, Any]]:
        async with self._pool.connection() as connection:
            return [dict(row) for row in await connection.fetch(sql.fleet.read_samples, upstream, first, last, step_s)]

    async def since(self, first: datetime.datetime, most: int) -> list[dict[str, Any]]:
        """The samples of all upstreams, by label, oldest first."""
        async with self._pool.connection() as connection:
            return [dict(row) for row in await connection.fetch(sql.fleet.list_samples, first, most)]

    async def last_states(self) -> dict[str, str]:
        """The state of each upstream in its newest sample."""
        async with self._pool.connection() as connection:
            return {row["upstream"]: row["state"] for row in await connection.fetch(sql.fleet.last_states)}

    async def changes(self, limit: int) -> list[dict[str, Any]]:
        async with self._pool.connection() as connection:
            return [dict(row) for row in await connection.fetch(sql.fleet.list_changes, limit)]
