"""The log of contradicted replies: a loop writes the replies that wait in memory, and operators read them.

An upstream that lies may do so with every call, and a client may repeat a call on which operators disagree: repetitions are
dropped, few are held in memory, and the table keeps the newest of each network.
"""

from __future__ import annotations

import asyncio
import datetime
import logging
from typing import Any

import asyncpg

from proxy import telemetry
from proxy.core.contradictions import ContradictedReply
from proxy.core.lru_cache import LruCache
from proxy.errors import Unavailable
from proxy.store.postgres.bad_rows import BadRows
from proxy.store.postgres.contradictions import ContradictionStore

log = logging.getLogger("penstock.contradictions")

FLUSH_S = 2.0
# Contradictions that wait in a worker: about 1 MB. With FLUSH_S this bounds how many are written in a second.
MOST_WAITING = 64
# Recent contradictions that are remembered, so that repetitions of them are dropped.
MOST_REMEMBERED = 1024
# Listed in the dashboard.
MOST_LISTED = 100


class ContradictionLog:
    def __init__(self, store: ContradictionStore) -> None:
        self._store = store
        self._waiting: list[ContradictedReply] = []
        self._known: LruCache[tuple[str, ...], bool] = LruCache(MOST_REMEMBERED)
        self._bad = BadRows("contradiction")

    def __repr__(self) -> str:
        return f"<ContradictionLog {len(self._waiting)} waiting>"

    def note(self, contradicted: ContradictedReply) -> None:
        if contradicted.subject in self._known:
            return
        if len(self._waiting) >= MOST_WAITING:
            telemetry.contradictions_dropped_total.inc()
            return
        self._known[contradicted.subject] = True
        self._waiting.append(contradicted)

    async def run(self) -> None:
        """Supervised loop: write those that wait."""
        while True:
            await asyncio.sleep(FLUSH_S)
            try:
                await self.flush()
            except Unavailable:
                pass  # They wait for the next round.
            except asyncpg.PostgresError as exc:
                log.error("the database refused contradicted replies", extra={"error": type(exc).__name__})
                telemetry.contradictions_dropped_total.inc(len(self._waiting))
                self._waiting.clear()

    async def flush(self) -> None:
        if waiting := self._waiting[:]:
            await self._bad.write(waiting, self._store.write)
            del self._waiting[: len(waiting)]

    async def close(self) -> None:
        """Write the last ones."""
        try:
            await self.flush()
        except (Unavailable, asyncpg.PostgresError):
            log.warning("contradicted replies were not written", extra={"count": len(self._waiting)})

    async def recent(self) -> list[dict[str, Any]]:
        """The newest of all networks."""
        return await self._store.read(network=None, since=None, most=MOST_LISTED)

    async def read(self, network: str | None, since: datetime.datetime | None) -> list[dict[str, Any]]:
        """All stored contradictions, of one network or of all, newest first."""
        return await self._store.read(network=network, since=since, most=None)
