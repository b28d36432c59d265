"""Leases of the upstreams' budgets, and what follows when one is used up.

The processes of all hosts lease credits of a budget from Postgres and spend them without asking again; credits that they have
not spent are returned when they stop. A limit that an operator sets is known to all of them within LEASE_S. While Postgres does
not answer, a hard budget gives no more credits than were leased.
"""

from __future__ import annotations

import asyncio
import datetime
import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence

from proxy import telemetry
from proxy.core.budgets import LEASE_S, WARN_SHARE, CreditBudget, runs_out
from proxy.core.upstream_health import UpstreamHealth
from proxy.errors import Unavailable
from proxy.store.postgres.spending import SpendingStore
from proxy.tasks import until_set

log = logging.getLogger("penstock.budgets")

# How often the spending of accounts is read, for budgets of which one account may use a part only.
ACCOUNTS_S = 10.0
# How long to wait after Postgres did not answer.
RETRY_S = 1.0


def _today() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)


class Budgets:
    def __init__(
        self,
        store: SpendingStore,
        healths: Iterable[UpstreamHealth],
        clock: Callable[[], datetime.datetime] = _today,
        *,
        accounts_s: float = ACCOUNTS_S,
    ) -> None:
        """`healths`: those of all upstreams. `clock`: the time in UTC. `accounts_s`: how often accounts' spending is read."""
        self._accounts_s = accounts_s
        self._store = store
        self._clock = clock
        self._healths: dict[CreditBudget, list[UpstreamHealth]] = {}
        for health in healths:
            if health.meter is not None and health.meter.budget is not None:
                self._healths.setdefault(health.meter.budget, []).append(health)
            if health.meter is not None and health.meter.included is not None:
                # When these are used up, calls have a price, and nothing else changes.
                self._healths.setdefault(health.meter.included, [])
        self._wake = asyncio.Event()
        # When the limits that operators have set were read.
        self._limits_read_at = -math.inf
        # When the spending of accounts was read.
        self._accounts_read_at = -math.inf
        # The budgets that were warned about in their present period.
        self._warned: dict[CreditBudget, datetime.date] = {}
        for budget in self._healths:
            budget.on_short = self._wake.set

    def __repr__(self) -> str:
        return f"<Budgets {list(self._healths)!r}>"

    async def start(self) -> None:
        """Lease before the first call. If Postgres does not answer, the loop leases later."""
        try:
            await self.renew()
        except Unavailable:
            log.warning("the budgets of upstreams were not leased; it is tried again")

    @property
    def is_needed(self) -> bool:
        return bool(self._healths)

    async def run(self) -> None:
        """Supervised loop."""
        while True:
            await until_set(self._wake, within_s=LEASE_S)
            self._wake.clear()
            try:
                await self.renew()
            except Unavailable:
                for budget in self._healths:
                    _call(budget.lease_failed())
                await asyncio.sleep(RETRY_S)

    async def renew(self) -> None:
        """Lease what is needed for the next seconds."""
        now = self._clock()
        await self._read_limits(now.timestamp())
        for budget, healths in self._healths.items():
            period = budget.begins(now.date())
            if period != budget.period:
                budget.begin(period)
            budget.allow(now.date())
            budget.tick(now.timestamp())
            if wanted := budget.wanted:
                _call(budget.leased(*await self._store.lease(budget.name, period, wanted, budget.allowance)))
            else:
                _call(budget.lease_failed())
            for health in healths:
                health.budget_changed(is_over=budget.is_over)
            self._report(budget, healths, now)
        await self._read_accounts(now.timestamp())

    async def _read_accounts(self, now: float) -> None:
        """Find out which accounts have used their part of a budget."""
        if now - self._accounts_read_at < self._accounts_s:
            return
        self._accounts_read_at = now
        for budget, healths in self._healths.items():
            if budget.account_share < 1.0 and healths:
                labels = sorted({health.label for health in healths})
                accounts = await self._store.accounts_over(labels, budget.period, budget.most_of_account)
                budget.accounts_spent(accounts)

    async def _read_limits(self, now: float) -> None:
        """Operators change limits rarely, and a lease must not take two queries."""
        if now - self._limits_read_at < LEASE_S:
            return
        limits = await self._store.limits()
        self._limits_read_at = now
        for budget in self._healths:
            budget.limit_to(limits[budget.name]["credits"] if budget.name in limits else None)

    def _report(self, budget: CreditBudget, healths: Sequence[UpstreamHealth], now: datetime.datetime) -> None:
        if not healths:
            return
        used = budget.used
        begins, ends = (
            datetime.datetime.combine(day, datetime.time(), datetime.UTC)
            for day in (budget.period, budget.ends(now.date()))
        )
        at = runs_out(used, budget.limit, begins=begins, now=now)
        is_early = at is not None and at < ends and used >= budget.limit // 10
        for health in healths:
            telemetry.upstream_budget_credits.labels(health.label).set(budget.limit)
            left = budget.limit - used + max(0, budget.left)
            telemetry.upstream_budget_left_credits.labels(health.label).set(left)
            telemetry.upstream_budget_end.labels(health.label).set(at.timestamp() if is_early and at is not None else 0)
        if (used >= WARN_SHARE * budget.limit or is_early) and self._warned.get(budget) != budget.period:
            self._warned[budget] = budget.period
            end = None if at is None else f"{min(at, ends):%Y-%m-%d %H:%M} UTC"
            log.warning(
                "a budget of upstreams will be used up",
                extra={
                    "upstreams": [health.label for health in healths],
                    "used": used,
                    "credits": budget.limit,
                    "runs_out": end,
                    "next_period": str(ends.date()),
                },
            )

    async def close(self) -> None:
        """Return what was leased and not spent."""
        unused: Mapping[CreditBudget, int] = {each: each.take_unused() for each in self._healths}
        try:
            for budget, amount in unused.items():
                if amount > 0:
                    await self._store.give_back(budget.name, budget.period, amount)
        except Unavailable:
            log.warning("credits of budgets were not returned", extra={"credits": sum(unused.values())})


def _call(waiting: Iterable[Callable[[], None]]) -> None:
    for again in waiting:
        again()
