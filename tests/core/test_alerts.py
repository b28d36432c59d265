"""Thresholds of alerts, and the periods in which each is raised once."""

from __future__ import annotations

import datetime
from typing import Any

import pytest

from proxy.core import alerts
from proxy.core.alerts import Alert

MONDAY = datetime.date(2026, 11, 16)


def steps(found: list[Alert]) -> list[tuple[int, bool]]:
    return [(each.threshold, each.is_sent) for each in found]


@pytest.mark.parametrize(
    ("used", "limit", "expected"),
    [
        (0, 100, []),
        (49, 100, []),
        (50, 100, [(50, True)]),
        (89, 100, [(50, False), (75, True)]),
        (250, 100, [(50, False), (75, False), (90, False), (100, True)]),
        (1, 1, [(50, False), (75, False), (90, False), (100, True)]),
        (10**9, 0, []),
    ],
)
def test_only_the_highest_threshold_that_is_reached_is_sent(
    used: int, limit: int, expected: list[tuple[int, bool]]
) -> None:
    assert steps(alerts.of_day(used, limit, MONDAY)) == expected


@pytest.mark.parametrize(
    ("failed", "requests", "raised"), [(0, 0, False), (19, 19, False), (1, 20, False), (2, 20, True), (20, 20, True)]
)
def test_error_rate_needs_some_requests(failed: int, requests: int, *, raised: bool) -> None:
    assert bool(alerts.of_errors(failed, requests, 10, MONDAY)) is raised


@pytest.mark.parametrize(
    ("reset", "same", "other"),
    [
        ("daily", 0, 1),
        ("weekly", 6, 7),
        ("monthly", 14, 15),
    ],
)
def test_budget_is_reported_once_per_period(reset: str, same: int, other: int) -> None:
    def period(days: int, **changed: int) -> str:
        row: dict[str, Any] = {"id": "pol_1", "name": "P", "reset": reset, "max_total": 100, "used": 60, **changed}
        (found,) = alerts.of_budget(row, MONDAY + datetime.timedelta(days))
        return found.period

    assert period(0) == period(same) != period(other)
    assert period(0) != period(0, max_total=110)


def test_texts_name_the_figures() -> None:
    (found,) = alerts.of_errors(3, 40, 5, MONDAY)
    assert alerts.title_of(found.kind, found.threshold, "", found.about) == "7.5 % of requests failed in 15 minutes"
    policy = {"id": "pol_1", "name": "Shop", "reset": "never", "max_total": 2 * 10**12, "used": 10**12 + 1}
    (half,) = alerts.of_budget(policy, MONDAY)
    assert alerts.title_of(half.kind, 50, "", half.about) == "50 % of the budget of policy Shop is spent"
    assert alerts.facts_of(half.kind, half.about) == {"Spent": "1.00 of 2.00 USD"}
    assert alerts.page_of(half.kind, half.subject) == "#/policies/pol_1"
