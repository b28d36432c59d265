"""A network's webhooks in memory, as true as the transaction that asks.

Every change of a webhook has a version. Whoever writes events holds the network's version in its own transaction and reads, on
the same connection, what has changed since the last look: so a webhook that was there before a block is written gets its
events, whatever notices were lost. Between blocks the notices are followed, so that large changes are read while nobody waits.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Iterable

import asyncpg
import orjson

from proxy.chains.evm import filters
from proxy.chains.evm.filters import BadConfig
from proxy.chains.evm.watch_index import Watcher, WatchIndex
from proxy.chains.registry import Network
from proxy.errors import Unavailable
from proxy.services.events.notifications import Notifications
from proxy.store import sql
from proxy.store.pool import PATIENT_S, DatabaseConnection, Pool
from proxy.tasks import until_set

log = logging.getLogger("penstock.events")

CHANNEL = "penstock_webhooks"
# How often changes are looked for beside the notices.
LOOK_S = 15.0
RETRY_S = 1.0
# Changes of addresses are remembered for an hour: whoever has not looked for so long reads everything.
TOO_LONG_S = 1800.0
# A hundred thousand addresses take a while to come.
LOAD_S = 60.0


class WebhookWatch:
    def __init__(self, network: Network) -> None:
        self.network = network
        self.index = WatchIndex()
        self._version = 0
        self._looked = time.monotonic()
        self._turn = asyncio.Lock()

    def __repr__(self) -> str:
        return f"<WebhookWatch {self.network.id}, version {self._version}, {self.index!r}>"

    async def hold(self, connection: DatabaseConnection) -> None:
        """The network's webhooks as they are, until the end of the connection's transaction."""
        version = await connection.fetchval(sql.webhooks.version_of, self.network.id) or 0
        async with self._turn:
            now = time.monotonic()
            if version < self._version or now - self._looked > TOO_LONG_S:
                self.index, self._version = WatchIndex(), 0
            if version > self._version:
                await self._load_or_forget(connection)
                self._version = version
            self._looked = now

    async def _load_or_forget(self, connection: DatabaseConnection) -> None:
        """What is loaded in part is not known to be so: whoever comes next would miss the rest of it."""
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
        config = orjson.loads(row["config"])
        listed = row["addresses"] is not None
        try:
            # Its addresses are read apart: here they only have to be there.
            wanted = filters.parse(row["event_type"], {**config, "addresses": ["0x"]} if listed else config)
        except (BadConfig, KeyError) as exc:
            # It was fine when it was made. The others are not to suffer for it.
            log.error("a webhook's config is not understood", extra={"webhook": row["id"], "reason": str(exc)})
            self.index.remove(row["id"])
            return False
        self.index.put(Watcher(row["id"], row["event_type"], wanted, listed=listed))
        return True

    async def _load_whole(self, connection: DatabaseConnection, wanted: dict[int, str]) -> None:
        if not wanted:
            return
        rows = await connection.fetch(sql.webhooks.addresses_of, [*wanted], timeout=LOAD_S)
        for number, addresses in _grouped((row["webhook"], row["address"]) for row in rows).items():
            self.index.watch(wanted[number], addresses)

    async def _load_changes(self, connection: DatabaseConnection, wanted: dict[int, str]) -> None:
        if not wanted:
            return
        rows = await connection.fetch(sql.webhooks.address_changes, [*wanted], self._version, timeout=LOAD_S)
        # What an address was made last is what counts; what it was before is known by the index alone.
        last = {(row["webhook"], row["address"]): row["added"] for row in rows}
        first = {(row["webhook"], row["address"]): row["added"] for row in reversed(rows)}
        changed = {key: added for key, added in last.items() if added == first[key]}
        for added, apply in ((False, self.index.unwatch), (True, self.index.watch)):
            for number, addresses in _grouped(key for key, is_added in changed.items() if is_added is added).items():
                apply(wanted[number], addresses)

    async def follow(self, pool: Pool, bell: Notifications) -> None:
        """A supervised loop: what has changed is read between blocks."""
        wake = bell.of(CHANNEL, self.network.id)
        while True:
            wake.clear()
            try:
                async with pool.connection(within_s=PATIENT_S) as connection, connection.transaction():
                    await self.hold(connection)
            except Unavailable:
                await asyncio.sleep(RETRY_S)
            await until_set(wake, within_s=LOOK_S)


def _grouped(pairs: Iterable[tuple[int, bytes]]) -> dict[int, list[bytes]]:
    found: defaultdict[int, list[bytes]] = defaultdict(list)
    for number, address in pairs:
        found[number].append(address)
    return found
