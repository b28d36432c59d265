"""Data for operators in Postgres: each worker's view of the upstreams, cordoned upstreams, and queue sizes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import asyncpg
import orjson

from proxy.errors import Unavailable
from proxy.store.postgres import sql
from proxy.store.postgres.index_databases import INDEX
from proxy.store.postgres.json_text import json_text
from proxy.store.postgres.pool import PATIENT_S, Pool

CHANNEL = "penstock_cordons"
# An older view belongs to a worker that is gone.
FRESH_S = 10.0


class FleetStore:
    def __init__(self, pool: Pool, index_pools: Mapping[str, Pool] | None = None) -> None:
        """`index_pools`: the databases of networks whose index is not in the main one."""
        self._pool = pool
        self._index_pools = index_pools or {}

    def __repr__(self) -> str:
        return f"<FleetStore {self._pool!r}>"

    # Views

    async def write_view(self, worker: str, view: dict[str, Any]) -> None:
        async with self._pool.connection(within_s=PATIENT_S) as connection:
            await connection.execute(sql.fleet.write_view, worker, json_text(view))

    async def delete_view(self, worker: str) -> None:
        async with self._pool.connection() as connection:
            await connection.execute(sql.fleet.delete_view, worker)

    async def views(self) -> list[dict[str, Any]]:
        async with self._pool.connection() as connection:
            rows = await connection.fetch(sql.fleet.list_views, FRESH_S)
        return [{**orjson.loads(row["view"]), "worker": row["worker"], "seen_at": row["seen_at"]} for row in rows]

    async def purge_views(self) -> None:
        async with self._pool.connection(within_s=PATIENT_S) as connection:
            await connection.execute(sql.fleet.delete_old_views)

    # Processes

    async def write_process(self, process: str, report: dict[str, Any]) -> None:
        async with self._pool.connection(within_s=PATIENT_S) as connection:
            await connection.execute(sql.fleet.write_process, process, json_text(report))

    async def delete_process(self, process: str) -> None:
        """Delete the report of a process that ends, and those of processes that are gone."""
        async with self._pool.connection() as connection:
            await connection.execute(sql.fleet.delete_process, process)

    async def processes(self) -> list[dict[str, Any]]:
        async with self._pool.connection() as connection:
            rows = await connection.fetch(sql.fleet.list_processes, FRESH_S)
        return [orjson.loads(row["report"]) for row in rows]

    async def count_others(self, instance: str) -> int:
        """How many hosts besides this one serve clients."""
        async with self._pool.connection() as connection:
            return int(await connection.fetchval(sql.fleet.count_hosts, FRESH_S, instance))

    # Cordons

    async def cordons(self, *, within_s: float | None = None) -> dict[str, asyncpg.Record]:
        """Return the cordons by the upstream's id."""
        async with self._pool.connection(within_s=within_s) as connection:
            return {row["upstream"]: row for row in await connection.fetch(sql.fleet.list_cordons)}

    async def cordon(self, upstream_id: str, *, label: str, reason: str, by: str) -> None:
        async with self._pool.connection() as connection:
            await connection.execute(sql.fleet.add_cordon, upstream_id, label, reason, by)

    async def uncordon(self, upstream_id: str) -> None:
        async with self._pool.connection() as connection:
            await connection.execute(sql.fleet.drop_cordon, upstream_id)

    async def method_cordons(self, *, within_s: float | None = None) -> list[asyncpg.Record]:
        """Return the cordons of single methods."""
        async with self._pool.connection(within_s=within_s) as connection:
            return await connection.fetch(sql.fleet.list_method_cordons)

    async def cordon_method(self, upstream_id: str, method: str, *, label: str, reason: str, by: str) -> None:
        async with self._pool.connection() as connection:
            await connection.execute(sql.fleet.add_method_cordon, upstream_id, method, label, reason, by)

    async def uncordon_method(self, upstream_id: str, method: str) -> None:
        async with self._pool.connection() as connection:
            await connection.execute(sql.fleet.drop_method_cordon, upstream_id, method)

    # Canaries

    async def shares(self, *, within_s: float | None = None) -> dict[str, asyncpg.Record]:
        """Return the parts of calls that canaries get, by the upstream's id."""
        async with self._pool.connection(within_s=within_s) as connection:
            return {row["upstream"]: row for row in await connection.fetch(sql.fleet.list_shares)}

    async def set_share(self, upstream_id: str, *, label: str, share: float, reason: str) -> None:
        async with self._pool.connection() as connection:
            await connection.execute(sql.fleet.set_share, upstream_id, label, share, reason)

    async def claim(self, task: str, every_s: float) -> bool:
        """Whether this process does a task of the fleet now: not if another did it less than `every_s` ago."""
        async with self._pool.connection(within_s=PATIENT_S) as connection:
            return await connection.fetchval(sql.usage.claim_upkeep, task, every_s) is not None

    # Indexing and deliveries

    async def followed(self) -> list[dict[str, Any]]:
        """The networks' cursors. An index in another database is a separate row, unless that database is away."""
        rows = await _followed(self._pool)
        for network, pool in self._index_pools.items():
            try:
                index_rows = await _followed(pool)
            except Unavailable:
                continue
            rows += [{**row, "network": network + INDEX} for row in index_rows if row["network"] == network]
        return sorted(rows, key=lambda row: str(row["network"]))

    async def deliveries(self) -> tuple[dict[str, Any], dict[str, int]]:
        """Return the counts of unfinished deliveries, and of webhooks by status."""
        async with self._pool.connection() as connection:
            row = await connection.fetchrow(sql.fleet.count_deliveries)
            webhook_counts = await connection.fetch(sql.fleet.count_webhooks)
        assert row is not None
        return dict(row), {each["status"]: each["webhooks"] for each in webhook_counts}


async def _followed(pool: Pool) -> list[dict[str, Any]]:
    async with pool.connection() as connection:
        return [dict(row) for row in await connection.fetch(sql.fleet.list_followed)]
