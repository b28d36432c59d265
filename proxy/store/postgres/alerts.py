"""Alerts of accounts in Postgres: the settings, the figures they are judged by, and those that were raised.

An alert, its mail and its webhook event are written in one transaction, and the row is unique: an alert that was recorded
is sent by the queues, and one that was not recorded is raised again.
"""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from proxy.core import alert_formats, alerts, webhook_bodies
from proxy.core.alert_formats import AlertFormat
from proxy.core.alerts import Alert
from proxy.core.dashboard_links import page_link
from proxy.core.iso_time import iso_seconds
from proxy.core.webhook_bodies import BodyChain
from proxy.store.postgres import events, sql
from proxy.store.postgres.events import NewEvent
from proxy.store.postgres.json_text import json_text
from proxy.store.postgres.pool import PATIENT_S, DatabaseConnection, Pool

# Stands for the network of an account's webhook for alerts: no follower has it.
NO_NETWORK = "-"
# The event types of webhooks for alerts, by format. All are lower case, as those of Format A, whose schedule they have.
EVENT_TYPES: dict[AlertFormat, str] = {"json": "alert", "slack": "alert_slack", "pagerduty": "alert_pagerduty"}
_FORMAT_OF: dict[str, AlertFormat] = {event_type: name for name, event_type in EVENT_TYPES.items()}
USUAL_KINDS, USUAL_PERCENT = ("webhook_paused",), 10
# Alerts in one mail, and in a list.
MOST_IN_MAIL, MOST_RECENT = 20, 50
KEEP_DAYS = 90


@dataclass(frozen=True, slots=True)
class AlertSettings:
    """`webhook_id` is empty without a webhook."""

    kinds: tuple[str, ...]
    error_percent: int
    by_mail: bool
    email: str
    webhook_id: str = ""
    url: str = ""
    status: str = ""
    format: AlertFormat = "json"


class AlertStore:
    def __init__(self, pool: Pool, *, sends_mail: bool, dashboard_url: str = "") -> None:
        """`sends_mail`: whether mails can be sent at all. `dashboard_url`: its public URL, or empty."""
        self._pool = pool
        self.sender = AlertSender(sends_mail=sends_mail, dashboard_url=dashboard_url)
        self.sends_mail = sends_mail

    def __repr__(self) -> str:
        return f"<AlertStore {self._pool!r}>"

    async def settings(self, account: str) -> AlertSettings:
        async with self._pool.connection() as connection:
            return await read_settings(connection, account)

    async def save(self, account: str, wanted: AlertSettings) -> None:
        async with self._pool.connection() as connection:
            await connection.execute(
                sql.alerts.save_settings, account, wanted.kinds, wanted.error_percent, wanted.by_mail
            )

    async def recent(self, account: str) -> list[dict[str, Any]]:
        async with self._pool.connection() as connection:
            rows = await connection.fetch(sql.alerts.list_recent, account, MOST_RECENT)
        return [{**dict(row), "about": orjson.loads(row["about"])} for row in rows]

    async def raise_test(self, account: str, name: str, *, most: int) -> bool:
        """Send a test alert, unless the account has sent `most` in the last hour."""
        async with self._pool.connection() as connection, connection.transaction():
            await connection.execute(sql.alerts.lock_tests, account)
            # A second statement, because it sees what was committed while the first one waited.
            if await connection.fetchval(sql.alerts.count_tests, account) >= most:
                return False
            await self.sender.raise_all(connection, account, [Alert("test", 0, name)])
            return True

    async def raise_all(self, account: str, new_alerts: Sequence[Alert]) -> int:
        """Record alerts and queue their mails and events. Returns the number of alerts that are sent."""
        async with self._pool.connection(within_s=PATIENT_S) as connection, connection.transaction():
            return await self.sender.raise_all(connection, account, new_alerts)

    # For the process that watches all accounts

    async def claim(self, every_s: float) -> bool:
        """Whether this process checks the accounts now: not if another did so less than `every_s` ago."""
        async with self._pool.connection(within_s=PATIENT_S) as connection:
            return await connection.fetchval(sql.usage.claim_upkeep, "alerts", every_s) is not None

    async def watched(self, after: str, limit: int, day: datetime.date) -> list[dict[str, Any]]:
        """A page of accounts with alerts, each with its figures and the `budgets` of its policies."""
        async with self._pool.connection(within_s=PATIENT_S) as connection:
            rows = await connection.fetch(sql.alerts.list_watched, after, limit, day, alerts.ERROR_MINUTES)
            wanted = [row["account_id"] for row in rows if "policy_budget" in row["kinds"]]
            budgets = await connection.fetch(sql.alerts.list_budgets, wanted, day) if wanted else []
        return [
            {**dict(row), "budgets": [each for each in budgets if each["account_id"] == row["account_id"]]}
            for row in rows
        ]

    async def purge(self) -> None:
        async with self._pool.connection(within_s=PATIENT_S) as connection:
            await connection.execute(sql.alerts.purge, KEEP_DAYS)


class AlertSender:
    """Records alerts in the caller's transaction, with the mail and the events about them."""

    def __init__(self, *, sends_mail: bool, dashboard_url: str) -> None:
        self._sends_mail = sends_mail
        self._dashboard_url = dashboard_url

    async def raise_all(self, connection: DatabaseConnection, account: str, new_alerts: Sequence[Alert]) -> int:
        settings = await read_settings(connection, account)
        new_alerts = [each for each in new_alerts if each.kind in (*settings.kinds, "test")]
        if not new_alerts:
            return 0
        ids = [_event_id(settings, each) for each in new_alerts]
        rows = await connection.fetch(sql.alerts.raise_alerts, account, *_columns(new_alerts, ids))
        sent = alerts.sent_ones(new_alerts, {tuple(row) for row in rows})
        if not sent:
            return 0
        if self._sends_mail and settings.by_mail and (mailed := [e for e in sent if e.kind != "webhook_paused"]):
            await connection.execute(sql.alerts.add_mail, account, json_text(_mail(mailed)))
        if settings.webhook_id:
            await self._add_events(connection, settings, sent)
        return len(sent)

    async def _add_events(self, connection: DatabaseConnection, settings: AlertSettings, sent: Sequence[Alert]) -> None:
        # Locked, so that the webhook is not paused or resumed meanwhile.
        await connection.fetchval(sql.webhooks.version_of, NO_NETWORK)
        at = iso_seconds(datetime.datetime.now(datetime.UTC))
        new = [
            NewEvent(
                id=_event_id(settings, each) or "",
                webhook=settings.webhook_id,
                type=EVENT_TYPES[settings.format],
                body=self._body(settings, each, at),
            )
            for each in sent
        ]
        await events.add(connection, NO_NETWORK, new)

    def _body(self, settings: AlertSettings, alert: Alert, at: str) -> bytes:
        title = alerts.title_of(alert.kind, alert.threshold, alert.subject, alert.about)
        link = page_link(self._dashboard_url, alerts.page_of(alert.kind, alert.subject))
        event_id = _event_id(settings, alert) or ""
        match settings.format:
            case "slack":
                return alert_formats.slack_body(alert, title, link)
            case "pagerduty":
                return alert_formats.pagerduty_body(alert, title, link, event_id=event_id, at=at)
            case "json":
                pass
        data = {
            "alert": alert.kind,
            "message": title,
            "threshold": alert.threshold,
            "subject": alert.subject,
            "figures": alert.about,
            "url": link,
        }
        return webhook_bodies.body_of(
            event_id,
            EVENT_TYPES["json"],
            settings.webhook_id,
            chain=BodyChain("", 0),
            at=at,
            data=data,
            test=alert.kind == "test",
        )


async def read_settings(connection: DatabaseConnection, account: str) -> AlertSettings:
    row = await connection.fetchrow(sql.alerts.read_settings, account)
    if row is None:
        return AlertSettings((), USUAL_PERCENT, by_mail=False, email="")
    webhook = (
        row["webhook_id"] or "",
        row["url"] or "",
        row["status"] or "",
        _FORMAT_OF.get(row["event_type"], "json"),
    )
    if row["kinds"] is None:
        return AlertSettings(USUAL_KINDS, USUAL_PERCENT, True, row["email"], *webhook)
    return AlertSettings(tuple(row["kinds"]), row["error_percent"], row["by_mail"], row["email"], *webhook)


def _event_id(settings: AlertSettings, alert: Alert) -> str | None:
    if not settings.webhook_id:
        return None
    place = (alert.kind, alert.subject, str(alert.threshold), alert.period)
    return webhook_bodies.event_id(settings.webhook_id, EVENT_TYPES["json"], *place)


def _columns(new_alerts: Sequence[Alert], ids: Sequence[str | None]) -> list[list[Any]]:
    rows = [
        (each.kind, each.subject, each.threshold, each.period, each.is_sent, json_text(each.about), event_id)
        for each, event_id in zip(new_alerts, ids, strict=True)
    ]
    return [list(column) for column in zip(*rows, strict=True)]


def _mail(sent: Sequence[Alert]) -> dict[str, Any]:
    """The data of a mail. Many alerts at once are one mail."""
    listed = [
        {"kind": each.kind, "subject": each.subject, "threshold": each.threshold, "about": each.about}
        for each in sent[:MOST_IN_MAIL]
    ]
    return {"alerts": listed, "more": len(sent) - len(listed)}
