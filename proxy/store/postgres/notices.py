"""Postgres notifications (LISTEN) for all listeners of a process, over one connection.

A lost notification only causes a delay: every listener also polls from time to time.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Callable
from typing import Any, TypeAlias

from proxy.errors import Unavailable
from proxy.store.postgres.pool import AWAY, UNABLE, DatabaseConnection, Pool
from proxy.tasks import until_set

log = logging.getLogger("penstock.notices")

# Called with the payload, or with None if notifications may have been missed.
NoticeListener: TypeAlias = Callable[[str | None], None]

# A firewall may drop an idle connection without closing it. So an idle connection is checked this often, and the check may
# take this long.
CHECK_EVERY_S, CHECK_TIMEOUT_S = 5.0, 2.0
# How long to wait before connecting to Postgres again.
RETRY_S = 0.5


class Notices:
    def __init__(self, pool: Pool, *, check_every_s: float = CHECK_EVERY_S) -> None:
        self._pool = pool
        self._check_every_s = check_every_s
        self._listeners: defaultdict[str, list[NoticeListener]] = defaultdict(list)
        # Set when a channel was added or the connection was lost.
        self._changed = asyncio.Event()

    def __repr__(self) -> str:
        return f"<Notices on {sorted(self._listeners)}>"

    def listen(self, channel: str, listener: NoticeListener) -> None:
        """Add a listener. It cannot be removed: listeners live as long as the process."""
        self._listeners[channel].append(listener)
        self._changed.set()

    async def run(self) -> None:
        """Connect and listen, again after every failure. A supervised loop."""
        while True:
            try:
                connection = await self._pool.dedicated()
            except Unavailable:
                await asyncio.sleep(RETRY_S)
                continue
            try:
                await self._listen(connection)
            except (*AWAY, *UNABLE) as exc:
                log.warning(
                    "notification connection lost; polling until it is back", extra={"reason": type(exc).__name__}
                )
                await asyncio.sleep(RETRY_S)
            finally:
                connection.terminate()

    async def _listen(self, connection: DatabaseConnection) -> None:
        connection.add_termination_listener(lambda _: self._changed.set())
        listened: set[str] = set()
        while True:
            self._changed.clear()
            for channel in self._listeners.keys() - listened:
                await connection.add_listener(channel, self._on_notification)
                listened.add(channel)
                self._notify(channel, None)
            if not await until_set(self._changed, within_s=self._check_every_s) or connection.is_closed():
                await connection.execute("select 1", timeout=CHECK_TIMEOUT_S)

    def _on_notification(self, _connection: Any, _pid: int, channel: str, payload: object) -> None:
        self._notify(channel, str(payload))

    def _notify(self, channel: str, payload: str | None) -> None:
        for listener in self._listeners[channel]:
            listener(payload)
