"""Operations of long ago, and those that came to nothing: the record is not kept for ever."""

from __future__ import annotations

import asyncio
import logging

from proxy.errors import Unavailable
from proxy.store.operations import OperationStore

log = logging.getLogger("penstock.bundler")

# How often it is looked for what is too old to keep; and between two bites of it.
LOOK_S, BITE_S = 600.0, 0.2


class OperationCleanup:
    def __init__(self, store: OperationStore, *, keep_days: int, keep_unsent_days: int) -> None:
        self._store = store
        self._keep_days = keep_days
        self._keep_unsent_days = keep_unsent_days

    def __repr__(self) -> str:
        return f"<OperationCleanup after {self._keep_days} days, {self._keep_unsent_days} if unsent>"

    async def run(self) -> None:
        while True:
            has_more = await self.bite()
            await asyncio.sleep(BITE_S if has_more else LOOK_S)

    async def bite(self) -> bool:
        """Remove some; whether there may be more."""
        try:
            return await self._store.purge(keep_days=self._keep_days, keep_unsent_days=self._keep_unsent_days)
        except Unavailable as exc:
            log.warning("old operations were not removed", extra={"reason": str(exc)})
            return False
