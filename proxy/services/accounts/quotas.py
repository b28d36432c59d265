"""Daily allowances, counted in memory and leased from Postgres in chunks.

A request takes one from its account's lease without waiting. When a lease runs low the account is queued, and this loop renews
all queued leases with one query. Until the query returns, requests run on credit that the new lease pays back. Credit is
limited to a share of the remaining quota, so that a burst on all workers does not exceed it; while Postgres is down it is
unlimited. If a worker crashes, its account loses the unused part of the lease: at most one chunk.
"""

from __future__ import annotations

import asyncio
import datetime
import logging
from collections.abc import Callable, Iterable, Sequence

from proxy.core.access import Account
from proxy.errors import Unavailable
from proxy.store.postgres.bad_rows import BadRows
from proxy.store.postgres.quotas import QuotaStore
from proxy.tasks import until_set

log = logging.getLogger("penstock.quotas")

# A worker's credit is 1/SHARES of the remaining quota, plus one. Up to this many workers may spend their credit at once. The
# extra request means that an account with little left, which sends one request at a time, rarely has to wait.
SHARES = 64


class Quotas:
    def __init__(
        self,
        store: QuotaStore,
        *,
        chunk: int,
        flush_s: float,
        day: Callable[[], datetime.date],
        accounts: Callable[[], Iterable[Account]],
    ) -> None:
        self._store = store
        self._chunk = chunk
        self._flush_s = flush_s
        self._today = day
        self._accounts = accounts
        self._day = day()
        self._short: set[Account] = set()
        self._wake = asyncio.Event()
        self._away = False
        self._bad = BadRows("quota")

    def __repr__(self) -> str:
        return f"<Quotas {self._day} {len(self._short)} accounts short>"

    def chunk_of(self, account: Account) -> int:
        """At most a thousandth of the daily limit, so that a crash does not cost a small account much."""
        return max(1, min(self._chunk, account.day_limit // 1000))

    def count(self, account: Account, requests: int) -> None:
        """Count admitted requests of an account that has a daily limit."""
        account.left -= requests
        if account.left * 2 < self.chunk_of(account):
            self._short.add(account)
            self._wake.set()
            account.exhausted = not self._away and _is_spent(account)

    def is_over(self, account: Account) -> bool:
        """Whether an exhausted account has used its whole quota, rather than waiting for a lease."""
        return account.remaining <= 0

    async def run(self) -> None:
        """Supervised loop: renew leases, and reset every account at the start of a day."""
        while True:
            await until_set(self._wake, within_s=self._flush_s)
            self._wake.clear()
            if self._today() != self._day:
                self._begin_day()
            try:
                await self._renew()
            except Unavailable:
                await asyncio.sleep(self._flush_s)

    def _begin_day(self) -> None:
        self._day = self._today()
        for account in self._accounts():
            account.left = 0
            account.remaining = account.day_limit
            account.exhausted = False

    async def _renew(self) -> None:
        # Sorted: two workers that lock the same rows must do it in the same order.
        short = sorted((a for a in self._short if a.day_limit and not self._is_done(a)), key=lambda a: a.id)
        self._short.clear()
        if not short:
            return
        try:
            await self._bad.write(short, self._lease)
        except Unavailable:
            self._away = True
            self._short.update(short)
            for account in short:
                account.exhausted = False
            raise
        self._away = False

    async def _lease(self, short: Sequence[Account]) -> None:
        wants = [(account.id, self.chunk_of(account) - account.left, account.day_limit) for account in short]
        granted = await self._store.lease(self._day, wants)
        for account, (_, wanted, _), grant in zip(short, wants, granted, strict=True):
            account.left += grant
            account.remaining = account.remaining - grant if grant == wanted else 0
            account.exhausted = _is_spent(account)
            if self._is_done(account):
                log.info("daily quota used up", extra={"account": account.id})

    async def close(self) -> None:
        """Return unused leases to the store."""
        unused = sorted((a.id, a.left) for a in self._accounts() if a.day_limit and a.left > 0)
        if unused:
            try:
                await self._store.give_back(self._day, unused)
            except Unavailable:
                log.warning("unused leases were not returned", extra={"accounts": len(unused)})

    def _is_done(self, account: Account) -> bool:
        return account.exhausted and self.is_over(account)


def _is_spent(account: Account) -> bool:
    """Whether both the lease and the credit are used up."""
    credit = 1 + account.remaining // SHARES if account.remaining > 0 else 0
    return account.left <= -credit
