"""The cost of calls to upstreams: by upstream, method and account, beside what accounts were charged, for operators.

The cost is counted by attempt (`services/spending_log.py`), and units by usage. An account's revenue follows from its units and
the price of its plan (`usage.unit_prices`). Savings are estimated: a reply from the cache, or one that a call shares with an
equal one under way, saves what an attempt for the same method and network has cost on average.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from proxy.core.budgets import CreditBudget, runs_out
from proxy.core.credits import NANOS_PER_USD, CreditMeter
from proxy.errors import NotFound
from proxy.store.postgres.spending import SpendingStore
from proxy.store.postgres.usage import UsageStore

# Accounts, upstreams and methods that are listed, the dearest ones.
MOST_ROWS = 100
UNITS_PER_PRICE = 1_000_000


@dataclass(frozen=True, slots=True)
class CostReport:
    """Rows of the days from `first` to `last`. `own`: calls for no account, such as polls. `saved`: by the cache, and
    `saved_by_joins` by calls that joined an equal one, in billionths of a dollar."""

    first: datetime.date
    last: datetime.date
    upstreams: list[dict[str, Any]]
    methods: list[dict[str, Any]]
    accounts: list[dict[str, Any]]
    own: dict[str, Any]
    total: dict[str, Any]
    saved: int
    saved_by_joins: int


class Costs:
    def __init__(
        self, spending: SpendingStore, usage: UsageStore, meters: Iterable[CreditMeter], unit_prices: Mapping[str, str]
    ) -> None:
        """`unit_prices`: what accounts of a plan pay for a million units, in US dollars."""
        self._spending = spending
        self._usage = usage
        self._unit_prices = {plan: Decimal(price) for plan, price in unit_prices.items()}
        self._budgets: dict[str, tuple[str, CreditBudget]] = {}
        for meter in meters:
            budget = meter.budget
            if budget is not None:
                shown = meter.label if budget.name not in self._budgets else budget.name
                self._budgets[budget.name] = shown, budget

    def __repr__(self) -> str:
        return f"<Costs {self._spending!r}>"

    async def read(self, days: int) -> CostReport:
        """The last days, with today."""
        last = datetime.datetime.now(datetime.UTC).date()
        first = last - datetime.timedelta(days=days - 1)
        upstreams = await self._spending.read(first, last, "upstream")
        accounts = await self._spending.accounts(first, last, MOST_ROWS)
        methods = await self._methods(first, last)
        whole = {name: sum(each[name] for each in upstreams) for name in ("calls", "credits", "nanos")}
        own = await self._spending.read(first, last, "account", "")
        return CostReport(
            first,
            last,
            upstreams[:MOST_ROWS],
            methods[:MOST_ROWS],
            [{**each, "revenue": self._revenue(each)} for each in accounts],
            own[0] if own else {"calls": 0, "credits": 0, "nanos": 0},
            whole,
            sum(each["saved"] for each in methods),
            sum(each["saved_by_joins"] for each in methods),
        )

    async def _methods(self, first: datetime.date, last: datetime.date) -> list[dict[str, Any]]:
        """The cost of each method on each network, the dearest first."""
        since = datetime.datetime.combine(first, datetime.time(), datetime.UTC)
        used = await self._usage.methods("day", since)
        methods = []
        for row in await self._spending.methods(first, last):
            sums = used.get((row["network"], row["method"]))
            hits, joins = (0, 0) if sums is None else (sums.hits, sums.joins)
            saved, by_joins = (count * row["nanos"] // max(1, row["calls"]) for count in (hits, joins))
            methods.append({**row, "hits": hits, "saved": saved, "joins": joins, "saved_by_joins": by_joins})
        return methods

    def _revenue(self, account: Mapping[str, Any]) -> int | None:
        """The account's price of its units, in billionths of a dollar; None if its plan has no price."""
        price = self._unit_prices.get(account["plan"])
        return None if price is None else int(account["units"] * price * NANOS_PER_USD / UNITS_PER_PRICE)

    async def budgets(self) -> list[dict[str, Any]]:
        return await budget_rows(self._spending, self._budgets)

    async def set_budget(self, name: str, credits_: int | None, by: str) -> tuple[int, dict[str, Any]]:
        """Set the limit of a budget in all processes; None for that of the settings. Returns the limit before, and the row."""
        rows = {row["name"]: row for row in await self.budgets()}
        if name not in rows:
            raise NotFound(f"no upstream has a budget {name}; there are: {', '.join(rows) or 'none'}")
        await self._spending.set_limit(rows[name]["budget"], credits_, by)
        (after,) = [row for row in await self.budgets() if row["name"] == name]
        return rows[name]["credits"], after


async def budget_rows(store: SpendingStore, budgets: Mapping[str, tuple[str, CreditBudget]]) -> list[dict[str, Any]]:
    """Each budget with the credits that are used or leased, and a forecast. `budgets`: by name, with the name to show."""
    now = datetime.datetime.now(datetime.UTC)
    used = await store.used({name: budget.begins(now.date()) for name, (_, budget) in budgets.items()})
    limits = await store.limits()
    return [_budget_row(shown, budget, used[name], limits.get(name), now) for name, (shown, budget) in budgets.items()]


def _budget_row(
    name: str, budget: CreditBudget, used: int, limit: Mapping[str, Any] | None, now: datetime.datetime
) -> dict[str, Any]:
    """`limit`: the one that an operator has set."""
    credits_ = budget.own_limit if limit is None else limit["credits"]
    begins, ends = (
        datetime.datetime.combine(day, datetime.time(), datetime.UTC)
        for day in (budget.begins(now.date()), budget.ends(now.date()))
    )
    at = runs_out(used, credits_, begins=begins, now=now)
    return {
        "name": name,
        "per": budget.per,
        "hard": budget.hard,
        "credits": credits_,
        "used": used,
        "left": credits_ - used,
        "ends": ends,
        "runs_out": at if at is not None and at < ends else None,
        "budget": budget.name,
        "settings": budget.own_limit,
        "set_by": None if limit is None else limit["set_by"],
        "set_at": None if limit is None else limit["set_at"],
    }
