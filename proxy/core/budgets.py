"""Budgets: how many credits an upstream, or several of one provider account, may use in a day or a month.

A process spends credits that it has leased (`services/budget_leases.py`), so that the budget holds over all processes and
hosts. A *hard* budget is never exceeded: an upstream is chosen only for calls whose price is in the lease. With a *soft* one,
calls go on, and once it is used up its upstreams are chosen last.

A lease is as much as was spent lately, so that calls rarely wait for one, and at most a small part of what is left, so that
little is unused when the budget ends. A *paced* budget of a month allows each day's part of it only on that day or later, so
that it lasts to the end of the month. With an *account share*, an account that has used that part of a hard budget gets no more
of it, so that one client does not use up what is meant for all. What accounts have used is known some seconds later.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable
from typing import Final, Literal

BudgetPeriod = Literal["day", "month"]
# A lease is at most this part of what is left, because other processes have leases too.
LEASED_PART: Final = 16
# A lease lasts for about this many seconds at the present rate.
LEASE_S: Final = 4.0
# A warning is due when this share of the budget is used.
WARN_SHARE: Final = 0.8


class CreditBudget:
    """`limit`: credits of a period. `billing_day`: the day on which a month begins."""

    __slots__ = (
        "_spent_lately",
        "_ticked_at",
        "_waiting",
        "account_share",
        "allowance",
        "billing_day",
        "hard",
        "is_over",
        "least",
        "left",
        "limit",
        "name",
        "on_short",
        "over_accounts",
        "own_limit",
        "paced",
        "per",
        "period",
        "remaining",
    )

    def __init__(
        self,
        name: str,
        limit: int,
        *,
        per: BudgetPeriod,
        hard: bool,
        billing_day: int = 1,
        paced: bool = False,
        account_share: float = 1.0,
    ) -> None:
        """`account_share`: the most part of it that one account may use."""
        self.paced = paced
        self.account_share = account_share
        # Accounts that have used that part in this period.
        self.over_accounts: frozenset[str] = frozenset()
        self.name = name
        # That of the settings, and the one that holds.
        self.own_limit = self.limit = limit
        self.per = per
        self.hard = hard
        self.billing_day = billing_day
        # The first day of the present period; the credits in the lease, and those that could still be leased when it was made.
        self.period = datetime.date.min
        self.left = 0
        self.remaining = limit
        # The credits that may be used until the end of the present day: all of them, unless it is paced.
        self.allowance = limit
        # The price of the dearest call lately: a lease that is smaller is of no use.
        self.least = 1
        # Whether all of it is used.
        self.is_over = False
        self._spent_lately = 0
        self._ticked_at = 0.0
        self._waiting: list[Callable[[], None]] = []
        # Called when the lease runs low.
        self.on_short: Callable[[], None] = _nothing

    def __repr__(self) -> str:
        kind = "hard" if self.hard else "soft"
        return (
            f"<CreditBudget {self.name}: {self.limit} a {self.per}, {kind}, {self.left} leased, {self.remaining} left>"
        )

    # Decisions

    def affords(self, credits_: int) -> bool:
        """Whether a call of this price may be made now."""
        if not self.hard or self.left >= credits_:
            return True
        self.least = max(self.least, credits_)
        if not self.is_over:
            self.on_short()
        return False

    def may_wait(self, credits_: int) -> bool:
        """Whether a call that cannot be made now may be possible after the next lease."""
        return self.hard and self.left < credits_ and not self.is_over

    @property
    def used(self) -> int:
        """The credits that are used or leased, as far as is known."""
        return max(0, self.allowance - self.remaining)

    @property
    def wanted(self) -> int:
        """How many more credits to lease now; 0 if there are enough."""
        usual = max(self._spent_lately * 2, self.limit // 1000)
        target = max(self.least, min(usual, self.remaining // LEASED_PART))
        is_low = self.left < self.least or self.left * 2 < target
        return max(0, target - self.left) if is_low else 0

    # Events

    def spend(self, credits_: int) -> None:
        """A call was made, or, with a negative amount, was not billed."""
        self.left -= credits_
        if credits_ > 0:
            self._spent_lately += credits_
            self.least = max(self.least, credits_)
        # When it is used up, asking more often than on every tick is of no use.
        if not self.is_over and (self.left < self.least or self.left * 2 < self._spent_lately):
            self.on_short()

    def expect(self, credits_: int) -> None:
        """Calls usually have this price, so the first lease is enough for one."""
        self.least = max(self.least, credits_)

    def leased(self, granted: int, remaining: int) -> list[Callable[[], None]]:
        """Credits were leased, and this many are left for others. Returns what to call now: calls that waited."""
        self.left += granted
        self.remaining = remaining
        self.is_over = remaining <= 0 and self.left < (self.least if self.hard else 1)
        return self._take_waiting()

    def lease_failed(self) -> list[Callable[[], None]]:
        """No lease could be made. Calls that waited go elsewhere."""
        return self._take_waiting()

    def begin(self, period: datetime.date) -> None:
        """A new period begins, with a new budget."""
        self.period = period
        self.left = 0
        self.remaining = self.allowance = self.limit
        self.is_over = False
        self.over_accounts = frozenset()

    @property
    def most_of_account(self) -> int:
        """The credits that one account may use."""
        return int(self.limit * self.account_share)

    def accounts_spent(self, over: frozenset[str]) -> None:
        """These accounts have used what one may use."""
        self.over_accounts = over

    def limit_to(self, limit: int | None) -> None:
        """An operator has set another limit, or, with None, that of the settings. `allow` makes it hold."""
        self.limit = self.own_limit if limit is None else limit

    def allow(self, day: datetime.date) -> None:
        """It is this day. A paced budget allows the parts of the days up to now."""
        days = (day - self.begins(day)).days + 1
        allowance = self.limit * days // (self.ends(day) - self.begins(day)).days if self.paced else self.limit
        self.remaining += allowance - self.allowance
        self.allowance = allowance

    def tick(self, now: float) -> None:
        """Forget half of what was spent lately, every LEASE_S."""
        if now - self._ticked_at >= LEASE_S:
            self._ticked_at = now
            self._spent_lately //= 2

    def take_unused(self) -> int:
        """The process stops: return the lease."""
        unused, self.left = self.left, 0
        return unused

    def when_leased(self, again: Callable[[], None]) -> None:
        self._waiting.append(again)
        self.on_short()

    def _take_waiting(self) -> list[Callable[[], None]]:
        waiting, self._waiting = self._waiting, []
        return waiting

    # Dates

    def begins(self, day: datetime.date) -> datetime.date:
        """The first day of the period that contains this day."""
        if self.per == "day":
            return day
        if day.day >= self.billing_day:
            return day.replace(day=self.billing_day)
        before = day.replace(day=1) - datetime.timedelta(days=1)
        return before.replace(day=self.billing_day)

    def ends(self, day: datetime.date) -> datetime.date:
        """The first day of the next period."""
        begins = self.begins(day)
        if self.per == "day":
            return begins + datetime.timedelta(days=1)
        # Four days after the 28th are in the next month.
        return (begins.replace(day=28) + datetime.timedelta(days=4)).replace(day=self.billing_day)


def period_end(day: datetime.date, per: BudgetPeriod, billing_day: int) -> datetime.date:
    """The first day of the next period of a provider."""
    return CreditBudget("", 0, per=per, hard=True, billing_day=billing_day).ends(day)


def runs_out(used: int, limit: int, *, begins: datetime.datetime, now: datetime.datetime) -> datetime.datetime | None:
    """When a budget runs out at the rate of its period so far; None if nothing was used."""
    elapsed_s = (now - begins).total_seconds()
    if used <= 0 or elapsed_s <= 0:
        return None
    return begins + datetime.timedelta(seconds=elapsed_s * limit / used)


def _nothing() -> None: ...
