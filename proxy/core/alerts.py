"""Alerts of accounts: when a threshold is reached, and what the alert says.

A threshold is raised once per period: per UTC day, or per period of a policy's budget. If several thresholds are reached at
once, only the highest is sent.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

AlertKind = Literal["day_usage", "error_rate", "webhook_paused", "policy_budget"]
KINDS: tuple[AlertKind, ...] = ("day_usage", "error_rate", "webhook_paused", "policy_budget")
# Percent of the day's requests, or of a budget.
THRESHOLDS = (50, 75, 90, 100)
# The error rate is measured over this time. Fewer requests say too little about it.
ERROR_MINUTES, FEWEST_REQUESTS = 15, 20
# Pages of the dashboard that show the subject of an alert.
PAGES = {
    "day_usage": "#/overview",
    "error_rate": "#/errors",
    "webhook_paused": "#/webhooks/{}",
    "policy_budget": "#/policies/{}",
    "test": "#/alerts",
}


@dataclass(frozen=True, slots=True)
class Alert:
    """`subject`: the id of the webhook or policy; empty for the whole account. `about`: figures for the text."""

    kind: str
    threshold: int
    period: str
    subject: str = ""
    about: Mapping[str, Any] = field(default_factory=dict)
    is_sent: bool = True

    @property
    def key(self) -> tuple[str, str, int, str]:
        return self.kind, self.subject, self.threshold, self.period


def of_day(used: int, limit: int, day: datetime.date) -> list[Alert]:
    """`limit`: the requests per day; 0 for no limit."""
    about = {"used": used, "limit": limit}
    return _steps("day_usage", used, limit, period=day.isoformat(), about=about)


def of_errors(failed: int, requests: int, most_percent: int, day: datetime.date) -> list[Alert]:
    if requests < FEWEST_REQUESTS or failed * 100 < most_percent * requests:
        return []
    about = {"failed": failed, "requests": requests, "minutes": ERROR_MINUTES}
    return [Alert("error_rate", most_percent, day.isoformat(), about=about)]


def of_budget(policy: Mapping[str, Any], day: datetime.date) -> list[Alert]:
    """`policy`: a row with its id, name, reset, `max_total` and what is `used` of it, in pico-dollars."""
    used, limit = int(policy["used"]), int(policy["max_total"])
    about = {"policy": policy["name"], "used_usd": _usd(used), "limit_usd": _usd(limit)}
    # With the limit, so that the thresholds of a changed budget are raised again.
    period = f"{_period(policy['reset'], day)} {limit}"
    return _steps("policy_budget", used, limit, period=period, subject=policy["id"], about=about)


def of_pause(webhook_id: str, attempt: str, *, url: str, state: str) -> Alert:
    """Raised at every pause; the attempt that failed identifies it. `state`: paused or disabled."""
    return Alert("webhook_paused", 0, attempt, webhook_id, {"url": url, "state": state})


def _steps(
    kind: AlertKind, used: int, limit: int, *, period: str, about: Mapping[str, Any], subject: str = ""
) -> list[Alert]:
    reached = [each for each in THRESHOLDS if limit > 0 and used * 100 >= each * limit]
    return [Alert(kind, each, period, subject, about, is_sent=each == reached[-1]) for each in reached]


def _period(reset: str, day: datetime.date) -> str:
    """The first day of the budget's period."""
    match reset:
        case "daily":
            return day.isoformat()
        case "weekly":
            return (day - datetime.timedelta(days=day.weekday())).isoformat()
        case "monthly":
            return day.replace(day=1).isoformat()
        case _:
            return "always"


def _usd(pico: int) -> str:
    return f"{pico // 10**10 / 100:.2f}"


# Texts


def title_of(kind: str, threshold: int, subject: str, about: Mapping[str, Any]) -> str:
    match kind:
        case "day_usage":
            return f"{_share(threshold)} of today's requests are used"
        case "error_rate":
            return f"{percent(about['failed'], about['requests'])} % of requests failed in {about['minutes']} minutes"
        case "policy_budget":
            return f"{_share(threshold)} of the budget of policy {about['policy']} is spent"
        case "webhook_paused":
            return f"Webhook {subject} is {about['state']}"
        case _:
            return "This is a test alert"


def facts_of(kind: str, about: Mapping[str, Any]) -> dict[str, str]:
    """The figures behind an alert, by name."""
    match kind:
        case "day_usage":
            return {"Requests today": f"{about['used']:,} of {about['limit']:,}"}
        case "error_rate":
            return {"Failed requests": f"{about['failed']:,} of {about['requests']:,}"}
        case "policy_budget":
            return {"Spent": f"{about['used_usd']} of {about['limit_usd']} USD"}
        case "webhook_paused":
            return {"URL": about["url"]}
        case _:
            return {}


def page_of(kind: str, subject: str) -> str:
    return PAGES[kind].format(subject)


def percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.3g}"


def _share(threshold: int) -> str:
    return "All" if threshold == 100 else f"{threshold} %"


def sent_ones(alerts: Iterable[Alert], new: set[tuple[str, str, int, str]]) -> list[Alert]:
    """The alerts to send among those that were recorded now."""
    return [each for each in alerts if each.is_sent and each.key in new]
