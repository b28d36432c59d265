"""Budgets of upstreams: leases, periods and forecasts."""

from __future__ import annotations

import datetime

import pytest

from proxy.core.budgets import BudgetPeriod, CreditBudget, period_end, runs_out
from proxy.core.upstream_errors import exhausted_period


def budget(
    limit: int = 10_000, *, hard: bool = True, per: BudgetPeriod = "month", billing_day: int = 1
) -> CreditBudget:
    return CreditBudget("a", limit, per=per, hard=hard, billing_day=billing_day)


def test_hard_budget_affords_only_leased_credits() -> None:
    asked = []
    found = budget()
    found.on_short = lambda: asked.append(1)
    assert not found.affords(26)
    assert asked
    found.leased(30, 9_970)
    assert found.affords(26)
    found.spend(26)
    assert not found.affords(26)
    assert found.affords(4)


def test_soft_budget_affords_every_call_and_tells_when_it_is_over() -> None:
    found = budget(hard=False)
    found.spend(20_000)
    assert found.affords(26)
    found.leased(10_000, 0)
    assert found.is_over


def test_lease_shrinks_with_what_is_left() -> None:
    found = budget(160_000)
    found.affords(26)
    found.leased(0, 160_000)
    for _ in range(1000):
        found.spend(26)
    assert found.wanted - found.left > 0
    found.left = 0
    assert found.wanted == 160_000 // 16
    found.remaining = 320
    assert found.wanted == 26


def test_rest_that_is_too_small_for_a_call_is_the_end() -> None:
    found = budget()
    found.leased(46, 0)
    found.spend(26)
    assert found.wanted == 6
    found.leased(0, 0)
    assert found.is_over


def test_paced_budget_allows_a_part_each_day() -> None:
    found = CreditBudget("a", 30_000, per="month", hard=True, billing_day=5, paced=True)
    found.begin(datetime.date(2026, 11, 5))
    found.allow(datetime.date(2026, 11, 5))
    assert (found.allowance, found.remaining, found.used) == (1000, 1000, 0)
    found.leased(1000, 0)
    found.spend(1000)
    found.leased(0, 0)
    assert (found.is_over, found.used) == (True, 1000)
    found.allow(datetime.date(2026, 11, 7))
    assert (found.allowance, found.remaining, found.used) == (3000, 2000, 1000)
    found.allow(datetime.date(2026, 12, 4))
    assert (found.allowance, found.used) == (30_000, 1000)


def test_budget_that_is_used_up_is_not_leased_at_every_call() -> None:
    found = budget(hard=False)
    found.spend(20_000)
    found.leased(10_000, 0)
    asked = []
    found.on_short = lambda: asked.append(1)
    found.spend(26)
    assert not asked


def test_unused_credits_are_returned_once() -> None:
    found = budget()
    found.leased(100, 9_900)
    found.spend(40)
    assert (found.take_unused(), found.take_unused()) == (60, 0)


def test_refund_goes_back_into_the_lease() -> None:
    found = budget()
    found.leased(26, 9_974)
    found.spend(26)
    found.spend(-26)
    assert found.affords(26)


@pytest.mark.parametrize(
    ("per", "billing_day", "day", "begins", "ends"),
    [
        ("day", 1, "2026-11-18", "2026-11-18", "2026-11-19"),
        ("month", 1, "2026-11-18", "2026-11-01", "2026-12-01"),
        ("month", 20, "2026-11-18", "2026-10-20", "2026-11-20"),
        ("month", 18, "2026-11-18", "2026-11-18", "2026-12-18"),
        ("month", 28, "2027-03-01", "2027-02-28", "2027-03-28"),
        ("month", 5, "2027-01-01", "2026-12-05", "2027-01-05"),
    ],
)
def test_period_begins_on_its_billing_day(
    per: BudgetPeriod, billing_day: int, day: str, begins: str, ends: str
) -> None:
    found = budget(per=per, billing_day=billing_day)
    date = datetime.date.fromisoformat(day)
    assert (str(found.begins(date)), str(found.ends(date))) == (begins, ends)
    assert str(period_end(date, per, billing_day)) == ends


def test_forecast_follows_the_rate_of_the_period() -> None:
    begins = datetime.datetime(2026, 11, 1, tzinfo=datetime.UTC)
    now = begins + datetime.timedelta(days=10)
    assert runs_out(50, 100, begins=begins, now=now) == begins + datetime.timedelta(days=20)
    assert runs_out(0, 100, begins=begins, now=now) is None


@pytest.mark.parametrize(
    ("words", "period"),
    [
        ("Monthly capacity limit exceeded. Visit https://dashboard.example.com to upgrade", "month"),
        ("You have reached your daily credit limit. To continue, upgrade your plan", "day"),
        ("Your app has exceeded its monthly quota", "month"),
        ("quota exceeded for this month", "month"),
        ("Your app has exceeded its compute units per second capacity", None),
        ("too many requests", None),
        ("rate limit of 25 requests per second reached", None),
        ("daily request count exceeded, request rate limited", None),
    ],
)
def test_exhausted_capacity_is_told_from_a_rate_limit(words: str, period: str | None) -> None:
    assert exhausted_period(words) == period
