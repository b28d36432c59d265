"""What operators see and say, in Postgres: the views of all workers, upstreams that take no calls, and what waits."""

from __future__ import annotations

from typing import Any

import asyncpg
import orjson

from proxy.store import sql
from proxy.store.pool import PATIENT_S, Pool

CHANNEL = "penstock_cordons"
# A view that is older than this is of a worker that is gone.
FRESH_S = 10.0


class FleetStore:
    def __init__(self, pool: Pool) -> None:
        self._pool = pool

    def __repr__(self) -> str:
        return f"<FleetStore {self._pool!r}>"

    # Views

    async def tell(self, worker: str, view: dict[str, Any]) -> None:
        async with self._pool.connection(within_s=PATIENT_S) as connection:
            await connection.execute(sql.fleet.write_view, worker, orjson.dumps(view).decode())

    async def leave(self, worker: str) -> None:
        async with self._pool.connection() as connection:
            await connection.execute(sql.fleet.forget_view, worker)

    async def views(self) -> list[dict[str, Any]]:
        async with self._pool.connection() as connection:
            rows = await connection.fetch(sql.fleet.list_views, FRESH_S)
        return [{**orjson.loads(row["view"]), "worker": row["worker"], "seen_at": row["seen_at"]} for row in rows]

    async def keep(self) -> None:
        async with self._pool.connection(within_s=PATIENT_S) as connection:
            await connection.execute(sql.fleet.forget_views)

    # Cordons

    async def cordons(self, *, within_s: float | None = None) -> dict[str, asyncpg.Record]:
        """By the upstream's mark."""
        async with self._pool.connection(within_s=within_s) as connection:
            return {row["upstream"]: row for row in await connection.fetch(sql.fleet.list_cordons)}

    async def cordon(self, mark: str, *, label: str, reason: str, by: str) -> None:
        async with self._pool.connection() as connection:
            await connection.execute(sql.fleet.add_cordon, mark, label, reason, by)

    async def uncordon(self, mark: str) -> None:
        async with self._pool.connection() as connection:
            await connection.execute(sql.fleet.drop_cordon, mark)

    # What others have written

    async def followed(self) -> list[asyncpg.Record]:
        async with self._pool.connection() as connection:
            return await connection.fetch(sql.fleet.list_followed)

    async def deliveries(self) -> tuple[dict[str, Any], dict[str, int]]:
        """What waits to be delivered; and webhooks by their status."""
        async with self._pool.connection() as connection:
            row = await connection.fetchrow(sql.fleet.count_deliveries)
            found = await connection.fetch(sql.fleet.count_webhooks)
        assert row is not None
        return dict(row), {each["status"]: each["webhooks"] for each in found}
