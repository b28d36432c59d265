"""The log of operations that policies refused, shown to their owners: collected in memory, written every second.

Refused operations must not keep the database busy. Between two writes at most `KEPT` refusals of a policy are held, which is as
many as the table keeps, and of at most `MOST_POLICIES` policies. Refusals that cannot be written are dropped: they are
information, not accounting.
"""

from __future__ import annotations

import asyncio
import datetime
from collections import deque
from collections.abc import Callable

from proxy.errors import Unavailable
from proxy.store.postgres.bad_rows import BadRows
from proxy.store.postgres.refusals import MOST_STORED, RefusalStore, RefusedOperation

__all__ = ("RefusalLog", "RefusedOperation")

FLUSH_S = 1.0
MOST_POLICIES = 1000


def _utc_now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)


class RefusalLog:
    def __init__(self, store: RefusalStore, *, now: Callable[[], datetime.datetime] = _utc_now) -> None:
        self._store = store
        self._now = now
        self._noted: dict[str, deque[RefusedOperation]] = {}
        self._bad = BadRows("refusal")

    def __repr__(self) -> str:
        return f"<RefusalLog {len(self._noted)} policies to write>"

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
            await self._bad.write([each for of_policy in noted.values() for each in of_policy], self._store.add)
        except Unavailable:
            pass
