"""The log of all accounts and operators: every change and every sign-in, with the time, the person or key, the address, and
what was changed.

A record is written after the change. If the database fails in between, the change stays and the log lacks it: refusing a change
that has happened would be worse.
"""

from __future__ import annotations

import logging
from typing import Any

from proxy.core.paging import Page
from proxy.core.sessions import SAFE
from proxy.errors import Unavailable
from proxy.store.postgres.actions import Action, ActionFilter, ActionStore, Actor
from proxy.tasks import repeat

__all__ = ("Action", "ActionFilter", "ActionLog", "Actor", "is_change")

log = logging.getLogger("penstock.actions")

PURGE_EVERY_S = 3600.0
# POST requests that change nothing.
_READS = ("backtest_webhook", "account_backtest_webhook")


def is_change(operation: str, method: str) -> bool:
    return method not in SAFE and operation not in _READS


class ActionLog:
    def __init__(self, store: ActionStore) -> None:
        self._store = store

    def __repr__(self) -> str:
        return f"<ActionLog {self._store!r}>"

    async def record(self, account: str | None, actor: Actor, done: Action) -> None:
        """`account`: None for what operators do outside of accounts, and for the deletion of an account."""
        try:
            await self._store.record(account, actor, done)
        except Unavailable as exc:
            log.warning("action not recorded", extra={"account": account, "action": done.operation, "reason": str(exc)})

    async def page(self, account: str, page: Page) -> tuple[list[dict[str, Any]], int]:
        return await self._store.page(account, page)

    async def search(self, wanted: ActionFilter, limit: int) -> tuple[list[dict[str, Any]], int | None]:
        """The newest entries that match, and where the next page begins (`before_id`); None if there are no more."""
        entries = await self._store.search(wanted, limit + 1)
        return entries[:limit], entries[limit - 1]["id"] if len(entries) > limit else None

    async def keep(self) -> None:
        """Supervised loop: delete old records."""
        await repeat(self._store.purge, every_s=PURGE_EVERY_S)
