"""Hold a network's webhooks in memory, consistent with the transaction that uses them.

Every change of a webhook has a version. A transaction that writes events locks the network's version and reads the changes
since the last refresh on the same connection. So a webhook created before a block is written gets its events, even if
notifications were lost. Between blocks, notifications trigger a refresh, so that no block waits for large changes.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Iterable

import asyncpg
import orjson

from proxy.chains.evm import webhook_filters
from proxy.chains.evm.watch_index import Watcher, WatchIndex
from proxy.chains.registry import Network
from proxy.errors import Unavailable
from proxy.services.events.notifications import Notifications
from proxy.store.postgres import sql
from proxy.store.postgres.bad_rows import BadRows
from proxy.store.postgres.pool import PATIENT_S, DatabaseConnection, Pool
from proxy.tasks import until_set

log = logging.getLogger("penstock.events")

CHANNEL = "penstock_webhooks"
# How often to refresh without a notification.
REFRESH_S = 15.0
RETRY_S = 1.0
# Address changes are stored for one hour. After half of it without a refresh, everything is loaded again.
TOO_LONG_S = 1800.0
# A hundred thousand addresses take a while to load.
LOAD_S = 60.0
# So many at a time, so that the followers of other networks go on meanwhile.
LOADED_AT_ONCE = 2_000


class WebhookWatch:
    def __init__(self, network: Network) -> None:
        self.network = network
        self.index = WatchIndex()
        self._version = 0
        self._refreshed_at = time.monotonic()
        self._lock = asyncio.Lock()
        self._bad = BadRows("webhook")

    def __repr__(self) -> str:
        return f"<WebhookWatch {self.network.id}, version {self._version}, {self.index!r}>"

    @property
    def version(self) -> int:
        """The version of the webhooks that the index contains."""
        return self._version

    async def hold(self, connection: DatabaseConnection) -> None:
        """Lock the network's version until the transaction ends, and refresh the index to it."""
        version = await connection.fetchval(sql.webhooks.version_of, self.network.id) or 0
        async with self._lock:
            now = time.monotonic()
            if version < self._version or now - self._refreshed_at > TOO_LONG_S:
                self.index, self._version = WatchIndex(), 0
            if version > self._version:
                await self._load_or_reset(connection)
                self._version = version
            self._refreshed_at = now

    async def _load_or_reset(self, connection: DatabaseConnection) -> None:
        """Load the changes. A failed load resets the index, because a partial one would miss events."""
        try:
            await self._load(connection)
        except BaseException:
            self.index, self._version = WatchIndex(), 0
            raise

    async def _load(self, connection: DatabaseConnection) -> None:
        rows = await connection.fetch(sql.webhooks.changed_since, self.network.id, self._version, timeout=LOAD_S)
        whole: dict[int, str] = {}
        part: dict[int, str] = {}
        for row in rows:
            if row["status"] not in ("active", "paused"):
                self.index.remove(row["id"])
            elif self.index.find(row["id"]) is None or row["addresses_version"] > self._version:
                if self._put(row):
                    whole[row["number"]] = row["id"]
            elif row["addresses"] is not None:
                part[row["number"]] = row["id"]
        await self._load_whole(connection, whole)
        await self._load_changes(connection, part)

    def _put(self, row: asyncpg.Record) -> bool:
        """Put a webhook into the index, and return whether its addresses are to be loaded."""
        self.index.remove(row["id"])
        # Its config was valid when it was created. If it cannot be read now, the other webhooks must not suffer.
        with self._bad.skipped(webhook=row["id"]):
            config = orjson.loads(row["config"])
            listed = row["addresses"] is not None
            # Its addresses are loaded separately: the parser only needs a placeholder.
            watch_filter = webhook_filters.parse(
                row["event_type"], {**config, "addresses": ["0x"]} if listed else config
            )
            self.index.put(
                Watcher(row["id"], row["event_type"], watch_filter, listed=listed, account=row["account_id"])
            )
            return True
        return False

    async def _load_whole(self, connection: DatabaseConnection, ids: dict[int, str]) -> None:
        if not ids:
            return
        cursor = await connection.cursor(sql.webhooks.addresses_of, [*ids], timeout=LOAD_S)
        while rows := await cursor.fetch(LOADED_AT_ONCE):
            for number, addresses in _grouped((row["webhook"], row["address"]) for row in rows).items():
                with self._bad.skipped(webhook=ids[number]):
                    self.index.watch(ids[number], addresses)

    async def _load_changes(self, connection: DatabaseConnection, ids: dict[int, str]) -> None:
        if not ids:
            return
        rows = await connection.fetch(sql.webhooks.address_changes, [*ids], self._version, timeout=LOAD_S)
        # The last change of an address counts. If it differs from the first one, the address is as the index has it.
        last = {(row["webhook"], row["address"]): row["added"] for row in rows}
        first = {(row["webhook"], row["address"]): row["added"] for row in reversed(rows)}
        changed = {key: added for key, added in last.items() if added == first[key]}
        for added, apply in ((False, self.index.unwatch), (True, self.index.watch)):
            for number, addresses in _grouped(key for key, is_added in changed.items() if is_added is added).items():
                with self._bad.skipped(webhook=ids[number]):
                    apply(ids[number], addresses)

    async def follow(self, pool: Pool, notifications: Notifications) -> None:
        """Supervised loop: refresh between blocks."""
        wake = notifications.event_for(CHANNEL, self.network.id)
        while True:
            wake.clear()
            try:
                async with pool.connection(within_s=PATIENT_S) as connection, connection.transaction():
                    await self.hold(connection)
            except Unavailable:
                await asyncio.sleep(RETRY_S)
            await until_set(wake, within_s=REFRESH_S)


def _grouped(pairs: Iterable[tuple[int, bytes]]) -> dict[int, list[bytes]]:
    groups: defaultdict[int, list[bytes]] = defaultdict(list)
    for number, address in pairs:
        groups[number].append(address)
    return groups
