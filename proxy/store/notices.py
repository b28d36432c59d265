"""What Postgres tells (LISTEN) the rooms of a process, over one connection.

A notice that is lost costs time, nothing else: whoever waits for one looks by itself now and then.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Callable
from typing import Any, TypeAlias

from proxy.errors import Unavailable
from proxy.store.pool import AWAY, DatabaseConnection, Pool
from proxy.tasks import until_set

log = logging.getLogger("penstock.notices")

# Given what was said; or None: something may have been said while nobody listened.
NoticeListener: TypeAlias = Callable[[str | None], None]

# Who hears nothing may be deaf: a router on the way forgets a connection that is silent, and tells nobody. So often it is asked
# for a sign of life, and so long that may take.
ALIVE_S, DEAF_S = 5.0, 2.0
# How long to wait before Postgres is tried again.
RETRY_S = 0.5


class Notices:
    def __init__(self, pool: Pool, *, alive_s: float = ALIVE_S) -> None:
        self._pool = pool
        self._alive_s = alive_s
        self._ears: defaultdict[str, list[NoticeListener]] = defaultdict(list)
        # Whether there is a new channel, or no connection any more.
        self._changed = asyncio.Event()

    def __repr__(self) -> str:
        return f"<Notices of {sorted(self._ears)}>"

    def hear(self, channel: str, ear: NoticeListener) -> None:
        """For good: rooms live as long as their process."""
        self._ears[channel].append(ear)
        self._changed.set()

    async def run(self) -> None:
        """A supervised loop."""
        while True:
            try:
                connection = await self._pool.dedicated()
            except Unavailable:
                await asyncio.sleep(RETRY_S)
                continue
            try:
                await self._listen(connection)
            except AWAY as exc:
                log.warning("notices lost: changes are found by looking", extra={"reason": type(exc).__name__})
                await asyncio.sleep(RETRY_S)
            finally:
                connection.terminate()

    async def _listen(self, connection: DatabaseConnection) -> None:
        connection.add_termination_listener(lambda _: self._changed.set())
        listened: set[str] = set()
        while True:
            self._changed.clear()
            for channel in self._ears.keys() - listened:
                await connection.add_listener(channel, self._hear)
                listened.add(channel)
                self._tell(channel, None)
            if not await until_set(self._changed, within_s=self._alive_s) or connection.is_closed():
                await connection.execute("select 1", timeout=DEAF_S)

    def _hear(self, _connection: Any, _pid: int, channel: str, said: object) -> None:
        self._tell(channel, str(said))

    def _tell(self, channel: str, said: str | None) -> None:
        for ear in self._ears[channel]:
            ear(said)
