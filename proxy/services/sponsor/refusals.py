"""What policies refused, for their owners: noted in memory, written every second or so.

Whoever sends operations that are refused must not make the database busy: of each policy only as many are noted between two
writes as are kept at all, and of so many policies at once. What cannot be written is dropped: it is news, not an account.
"""

from __future__ import annotations

import asyncio
import datetime
from collections import deque
from collections.abc import Callable

from proxy.errors import Unavailable
from proxy.store.refusals import MOST_STORED, RefusalStore, RefusedOperation

__all__ = ("RefusalLog", "RefusedOperation")

FLUSH_S = 1.0
MOST_POLICIES = 1000


def _present() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)


class RefusalLog:
    def __init__(self, store: RefusalStore, *, now: Callable[[], datetime.datetime] = _present) -> None:
        self._store = store
        self._now = now
        self._noted: dict[str, deque[RefusedOperation]] = {}

    def __repr__(self) -> str:
        return f"<RefusalLog of {len(self._noted)} policies waiting>"

    def note(self, policy: str, sender: bytes, rule: str, message: str) -> None:
        if policy not in self._noted and len(self._noted) >= MOST_POLICIES:
            return
        noted = self._noted.setdefault(policy, deque(maxlen=MOST_STORED))
        noted.append(RefusedOperation(policy, self._now(), sender, rule, message))

    async def latest(self, policy: str, most: int) -> list[RefusedOperation]:
        return await self._store.latest(policy, most)

    async def run(self) -> None:
        """A supervised loop."""
        while True:
            await asyncio.sleep(FLUSH_S)
            await self.flush()

    async def flush(self) -> None:
        noted, self._noted = self._noted, {}
        if not noted:
            return
        try:
            await self._store.add([each for waiting in noted.values() for each in waiting])
        except Unavailable:
            pass
