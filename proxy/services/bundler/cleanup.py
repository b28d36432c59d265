"""Removing old records of operations, and of operations that were never sent."""

from __future__ import annotations

import asyncio
import logging

from proxy.errors import Unavailable
from proxy.store.postgres.operations import OperationStore

log = logging.getLogger("penstock.bundler")

# The pause between two rounds, and between two deletions of one round.
ROUND_S, PAUSE_S = 600.0, 0.2


class OperationCleanup:
    def __init__(self, store: OperationStore, *, keep_days: int, keep_unsent_days: int) -> None:
        self._store = store
        self._keep_days = keep_days
        self._keep_unsent_days = keep_unsent_days

    def __repr__(self) -> str:
        return f"<OperationCleanup after {self._keep_days} days, {self._keep_unsent_days} if unsent>"

    async def run(self) -> None:
        while True:
            has_more = await self.purge()
            await asyncio.sleep(PAUSE_S if has_more else ROUND_S)

    async def purge(self) -> bool:
        """Remove some records. Returns whether there may be more."""
        try:
            return await self._store.purge(keep_days=self._keep_days, keep_unsent_days=self._keep_unsent_days)
        except Unavailable as exc:
            log.warning("removing old operations failed", extra={"reason": str(exc)})
            return False
