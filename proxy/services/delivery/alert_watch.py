"""Raises the alerts of accounts: a loop that one process of the fleet runs at a time.

It reads existing counts from Postgres, a page of accounts at a time, and writes only new alerts. Each account has its
own transaction, so that one account's alerts never hold up another's.
"""

from __future__ import annotations

import asyncio
import datetime
import logging
from collections.abc import Mapping
from typing import Any, Protocol

import asyncpg

from proxy.core import alerts
from proxy.core.access import Limits
from proxy.core.alerts import Alert
from proxy.errors import Unavailable
from proxy.store.postgres.alerts import AlertStore
from proxy.store.postgres.bad_rows import BadRows

log = logging.getLogger("penstock.alerts")

CHECK_S = 30.0
# A process makes the check if the last one is older than this share of the interval: clocks and pauses are never exact.
CLAIM_SHARE = 0.9
# Accounts read at once.
PAGE = 200
# Checks between two removals of old alerts.
PURGE_EVERY = 100


class LimitedPlan(Protocol):
    @property
    def limits(self) -> Limits: ...


class AlertWatch:
    def __init__(self, store: AlertStore, plans: Mapping[str, LimitedPlan], *, check_s: float = CHECK_S) -> None:
        self._store = store
        self._plans = plans
        self._check_s = check_s
        self._checks = 0
        self._bad = BadRows("alert")

    def __repr__(self) -> str:
        return f"<AlertWatch every {self._check_s} s>"

    async def run(self) -> None:
        """Supervised loop."""
        while True:
            try:
                if await self._store.claim(self._check_s * CLAIM_SHARE):
                    await self.check()
            except Unavailable as exc:
                log.warning("cannot check alerts", extra={"reason": str(exc)})
            await asyncio.sleep(self._check_s)

    async def check(self) -> None:
        """Check all accounts once."""
        after, day = "", datetime.datetime.now(datetime.UTC).date()
        while page := await self._store.watched(after, PAGE, day):
            for row in page:
                await self._check_account(row, day)
            after = page[-1]["account_id"]
        self._checks += 1
        if self._checks % PURGE_EVERY == 0:
            await self._store.purge()

    async def _check_account(self, row: Mapping[str, Any], day: datetime.date) -> None:
        account = row["account_id"]
        try:
            with self._bad.skipped(account=account):
                if raised := self._alerts_of(row, day):
                    await self._store.raise_all(account, raised)
        except asyncpg.PostgresError as exc:
            log.error("cannot raise alerts", extra={"account": account, "reason": str(exc)})

    def _alerts_of(self, row: Mapping[str, Any], day: datetime.date) -> list[Alert]:
        limit = self._day_limit(row)
        # Refused requests are counted too, but not leased from the quota.
        used = min(row["counted"], row["leased"])
        raised = alerts.of_day(used, limit, day)
        raised += alerts.of_errors(row["failed"], row["recent"], row["error_percent"], day)
        for budget in row["budgets"]:
            raised += alerts.of_budget(budget, day)
        return [each for each in raised if each.kind in row["kinds"]]

    def _day_limit(self, row: Mapping[str, Any]) -> int:
        plan = self._plans.get(row["plan"], self._plans["free"])
        own = row["requests_per_day"]
        return plan.limits.requests_per_day if own is None else int(own)
