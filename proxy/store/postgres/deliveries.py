"""The webhook outbox in Postgres: due deliveries, claims and attempts.

Claiming a delivery moves its due time to the end of a lease; recording the attempt ends the lease. If the process dies in
between, the lease expires and the delivery is due again. Every claim has a number, and a result is accepted only with the
number of the current claim. Times come from Postgres; the `at` parameters are for tests.
"""

from __future__ import annotations

import datetime
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from proxy.core import alerts
from proxy.core.attempts import AttemptVerdict, WebhookEnd
from proxy.core.paging import DayRows, Page, days_of
from proxy.core.webhook_faults import DeliveryFault, InjectedEvent, fault_of
from proxy.store.postgres import events, mails, sql, webhooks
from proxy.store.postgres.alerts import NO_NETWORK, AlertSender
from proxy.store.postgres.bad_rows import BadRows
from proxy.store.postgres.day_tables import renew_day_tables
from proxy.store.postgres.json_text import json_text
from proxy.store.postgres.pool import PATIENT_S, DatabaseConnection, Pool
from proxy.store.postgres.webhooks import Webhook

# Longer than any attempt, so that no other process claims a delivery while it is being sent.
LEASE_S = 30.0
# The most rows that one statement parks, holds or redelivers.
AT_ONCE = 5_000
# Addresses that are purged per other row: they are deleted as fast as they can be created.
ADDRESSES_PER_ROW = 10
# The most attempts listed with a delivery.
SHOWN_ATTEMPTS = 20
# How far the recorded start of an attempt may be outside the time between its delivery's creation and end: clocks differ, and
# an attempt in progress can outlast the claim that counts.
CLOCKS = datetime.timedelta(hours=1)
# The attempts that a webhook's health is judged by.
RECENT = 50
# A webhook's events of the last day are counted up to this many: a list of webhooks reads few rows for each.
COUNTED = 100
_DAY_TABLES = (
    ("events", sql.deliveries.add_event_days, sql.deliveries.remove_event_days),
    ("deliveries", sql.deliveries.add_delivery_days, sql.deliveries.remove_delivery_days),
    ("delivery attempts", sql.deliveries.add_attempt_days, sql.deliveries.remove_attempt_days),
)
_EXCHANGE = ("sent", "reply_headers", "reply_body")


@dataclass(frozen=True, slots=True)
class DueWebhooks:
    """Webhooks with due deliveries, the active ones with their URLs and accounts. `next_s`: seconds until the next is due."""

    active: dict[str, str]
    accounts: dict[str, str]
    inactive: list[str]
    next_s: float | None


class ClaimedDelivery(NamedTuple):
    """A delivery claimed until its lease ends, with everything that an attempt needs."""

    event_id: str
    webhook_id: str
    claim: int
    tries: int
    network: str
    url: str
    event_type: str
    secret: bytes
    old_secret: bytes | None
    type: str
    test: bool
    body: bytes
    account: str
    # The fault that the webhook of a test key injects, if any.
    fault: DeliveryFault | None = None


class AttemptResult(NamedTuple):
    """The result of an attempt. `ago_s`: the time between its start and the moment it is recorded."""

    claimed: ClaimedDelivery
    verdict: AttemptVerdict
    outcome: str
    status: int | None
    excerpt: str | None
    took_ms: int
    ago_s: float
    # Header lines and the beginning of the reply's body, for the receiver's owner.
    sent: str = ""
    reply_headers: str = ""
    reply_body: str = ""


@dataclass(frozen=True, slots=True)
class Attempt:
    number: int
    began_at: datetime.datetime
    took_ms: int
    outcome: str
    status: int | None
    excerpt: str | None
    # Read with a single delivery.
    sent: str | None = None
    reply_headers: str | None = None
    reply_body: str | None = None


@dataclass(frozen=True, slots=True)
class Delivery:
    event_id: str
    type: str
    state: str
    tries: int
    due_at: datetime.datetime
    created_at: datetime.datetime
    finished_at: datetime.datetime | None
    block: int | None
    test: bool
    attempts: tuple[Attempt, ...]
    # Read with a single delivery.
    body: bytes = b""


@dataclass(frozen=True, slots=True)
class WebhookHealth:
    """The last attempts of a webhook, newest last: when each began, its outcome, status and duration."""

    attempts: tuple[Attempt, ...]
    # Its events of the last 24 hours, without tests, counted up to COUNTED.
    events: int


class DeliveryStore:
    def __init__(self, pool: Pool, alerts: AlertSender | None = None) -> None:
        """`alerts`: for webhooks that are paused."""
        self._pool = pool
        self._alerts = alerts
        self._bad = BadRows("delivery")

    def __repr__(self) -> str:
        return f"<DeliveryStore {self._pool!r}>"

    # Claims

    async def list_due(self, at: datetime.datetime | None = None) -> DueWebhooks:
        async with self._pool.connection(within_s=PATIENT_S) as connection:
            rows = await connection.fetch(sql.deliveries.list_due, at)
        active = {row["webhook_id"]: row["url"] for row in rows if row["status"] == "active"}
        accounts = {row["webhook_id"]: row["account_id"] for row in rows if row["status"] == "active"}
        inactive = [row["webhook_id"] for row in rows if row["status"] not in (None, "active")]
        next_s = next((row["in_s"] for row in rows if row["webhook_id"] is None), None)
        return DueWebhooks(active, accounts, inactive, next_s)

    async def claim(
        self,
        rooms: Mapping[str, int],
        *,
        day_limits: Mapping[str, int],
        lease_s: float = LEASE_S,
        at: datetime.datetime | None = None,
    ) -> tuple[list[ClaimedDelivery], list[str]]:
        """Claim up to the given number of deliveries per webhook.

        Also returns the accounts whose daily quota was used up by this claim. `day_limits` is by plan; 0 means no limit.
        """
        async with self._pool.connection(within_s=PATIENT_S) as connection:
            rows = await connection.fetch(sql.deliveries.claim, [*rooms], [*rooms.values()], at, lease_s)
            uncounted = [row for row in rows if _is_uncounted(row) and day_limits.get(row["plan"], 0)]
            held, exhausted = set[str](), list[str]()
            if uncounted:
                async with connection.transaction():
                    held, exhausted = await _take_quota(connection, uncounted, day_limits, at)
            pairs = await _with_events(
                connection, sql.deliveries.read_claimed, [row for row in rows if row["event_id"] not in held]
            )
            claimed = []
            for row, event in pairs:
                with self._bad.skipped(event=row["event_id"]):
                    claimed.append(_claimed(row, event))
            if late := [each for each in claimed if each.fault is not None and each.fault.wait_s]:
                await _postpone(connection, late, at)
                claimed = [each for each in claimed if each not in late]
        return claimed, exhausted

    async def park(self, webhook_ids: Sequence[str], at: datetime.datetime | None = None) -> None:
        """Park due deliveries of inactive webhooks and drop those of deleted ones; a bounded number per call."""
        async with self._pool.connection(within_s=PATIENT_S) as connection:
            await connection.execute(sql.deliveries.park, webhook_ids, at, AT_ONCE)
            await connection.execute(sql.deliveries.drop_orphans, webhook_ids, AT_ONCE)

    async def release_held(self, account: str, day_limits: Mapping[str, int]) -> bool:
        """Make deliveries that were held for lack of daily quota due again if there is room in it: the quota may have been
        raised. A bounded number per call; returns whether there may be more."""
        async with self._pool.connection(within_s=PATIENT_S) as connection:
            day = await connection.fetchrow(sql.deliveries.day_used, account)
            if day is None:
                return False
            limit = day_limits.get(day["plan"], 0)
            room = min(AT_ONCE, limit - day["used"]) if limit else AT_ONCE
            if room <= 0:
                return False
            status = await connection.execute(sql.deliveries.release_held, account, room)
        return _changed(status) == AT_ONCE

    # Results

    async def finish(self, results: Sequence[AttemptResult], at: datetime.datetime | None = None) -> None:
        """Record attempts that change nothing but their deliveries."""
        async with self._pool.connection(within_s=PATIENT_S) as connection:
            await _finish(connection, results, at)

    async def finish_injecting(
        self, result: AttemptResult, injected: Sequence[InjectedEvent], at: datetime.datetime | None = None
    ) -> None:
        """Record an attempt after which a fault plan takes its event back."""
        claimed, columns = result.claimed, [(e.id, e.type, e.body, e.takes_back) for e in injected]
        async with self._pool.connection(within_s=PATIENT_S) as connection, connection.transaction():
            await _finish(connection, [result], at)
            await connection.execute(
                sql.events.add_injected, claimed.event_id, claimed.claim, *map(list, zip(*columns, strict=True))
            )
            await notify(connection)

    async def finish_with(
        self, result: AttemptResult, cause: WebhookEnd, about: Mapping[str, Any], at: datetime.datetime | None = None
    ) -> bool:
        """Record an attempt that changes its webhook, and queue the email about it, in one transaction.

        Returns whether this attempt changed the webhook: if several fail at once, only one does, and one email is sent.
        """
        claimed = result.claimed
        async with self._pool.connection(within_s=PATIENT_S) as connection, connection.transaction():
            await webhooks.lock(connection, claimed.network)
            has_changed = await webhooks.set_status(connection, claimed.webhook_id, cause)
            await _finish(connection, [result], at)
            if has_changed:
                await mails.add(connection, claimed.webhook_id, "webhook_paused", about)
                await self._raise_alert(connection, claimed, cause)
        return has_changed

    async def _raise_alert(self, connection: DatabaseConnection, claimed: ClaimedDelivery, cause: WebhookEnd) -> None:
        """A pause of the webhook for alerts is reported by mail only."""
        if self._alerts is None or claimed.network == NO_NETWORK:
            return
        state = "disabled" if cause == "gone" else "paused"
        attempt = f"{claimed.event_id} {claimed.claim}"
        alert = alerts.of_pause(claimed.webhook_id, attempt, url=claimed.url, state=state)
        await self._alerts.raise_all(connection, claimed.account, [alert])

    # Reads and redelivery for owners

    async def page(
        self, webhook_id: str, page: Page, *, state: str | None, since: datetime.datetime | None
    ) -> tuple[list[Delivery], int]:
        """Return a page of deliveries, newest first, and their total number."""
        # All from one snapshot: a delivery that ends meanwhile moves to another table.
        async with (
            self._pool.connection() as connection,
            connection.transaction(isolation="repeatable_read", readonly=True),
        ):
            first = since or events.FIRST[0]
            if state is None:
                counted = await connection.fetch(sql.deliveries.count_deliveries, webhook_id, first)
            else:
                counted = await connection.fetch(sql.deliveries.count_in_state, webhook_id, first, state)
            days, offset = days_of(page, [DayRows(*row) for row in counted])
            rows = await connection.fetch(
                sql.deliveries.list_deliveries, webhook_id, first, state, days, page.limit, offset
            )
            pairs = await _with_events(connection, sql.deliveries.describe_events, rows)
            attempts = await _list_attempts(connection, rows)
        total = sum(row["count"] for row in counted)
        return [_delivery(row, event, attempts[row["event_id"]]) for row, event in pairs], total

    async def read(self, webhook_id: str, event_id: str) -> Delivery | None:
        """One delivery with its body, and its attempts with what was sent and received."""
        async with self._pool.connection() as connection:
            row = await connection.fetchrow(sql.deliveries.read_delivery, webhook_id, event_id)
            tried = await connection.fetch(sql.deliveries.read_attempts, event_id, SHOWN_ATTEMPTS)
        if row is None:
            return None
        attempts = [replace(_attempt(each), **{name: each[name] for name in _EXCHANGE}) for each in tried]
        return replace(_delivery(row, row, attempts), body=row["body"])

    async def health(self, webhook_ids: Sequence[str]) -> dict[str, WebhookHealth]:
        """The last attempts and the events of each webhook."""
        async with self._pool.connection() as connection:
            rows = await connection.fetch(sql.deliveries.recent_attempts, webhook_ids, RECENT)
            counts = await connection.fetch(sql.deliveries.count_last_day, webhook_ids, COUNTED)
        counted = {row["webhook_id"]: row["events"] for row in counts}
        attempts: defaultdict[str, list[Attempt]] = defaultdict(list)
        for row in rows:
            attempts[row["webhook_id"]].append(_attempt(row))
        return {each: WebhookHealth(tuple(attempts[each]), counted[each]) for each in webhook_ids}

    async def redeliver(self, webhook_id: str, event_id: str) -> bool:
        """Make a delivery due again; return False if there is none or its event was removed by a reorganisation."""
        async with self._pool.connection() as connection, connection.transaction():
            redelivered = await connection.fetchval(sql.deliveries.redeliver, webhook_id, event_id)
            await notify(connection)
        return redelivered is not None

    async def redeliver_since(
        self, webhook_id: str, since: datetime.datetime, until: datetime.datetime, *, state: str | None
    ) -> int:
        """Make deliveries created in a period due again and return their number; without a state, only finished ones.

        Works in transactions of a few thousand rows, so that other writers do not wait for long.
        """
        total, last = 0, ""
        while True:
            async with self._pool.connection() as connection, connection.transaction():
                row = await connection.fetchrow(
                    sql.deliveries.redeliver_since, webhook_id, since, last, until, state, AT_ONCE
                )
                await notify(connection)
            if row is None:
                return total
            total += row["changed"]
            since, last = row["created_at"], row["event_id"]

    async def add_test(
        self, webhook: Webhook, event_id: str, kind: str, body: bytes, *, day_limits: Mapping[str, int]
    ) -> bool:
        """Add a test event with a delivery that is due immediately. Returns False if the account has as many events today as
        its plan allows."""
        async with self._pool.connection() as connection, connection.transaction():
            day = (await events.read_days(connection, [webhook.account], day_limits)).get(webhook.account)
            if day is not None and day.room == 0:
                return False
            if day is not None:
                # Not on the webhook's network, where its follower holds the count while it writes a block.
                await events.count_events(connection, NO_NETWORK, stored={webhook.account: 1}, dropped={})
            await events.add_test(
                connection, event_id=event_id, webhook=webhook.id, network=webhook.network, named=kind, body=body
            )
            await notify(connection)
        return True

    # Retention

    async def purge(self, keep_days: int, *, at_once: int = 1_000) -> bool:
        """Delete one batch of old rows; return whether there may be more."""
        async with self._pool.connection(within_s=PATIENT_S) as connection:
            addresses = at_once * ADDRESSES_PER_ROW
            deleted = [
                (at_once, await connection.execute(sql.deliveries.purge_other_days, keep_days, at_once)),
                (at_once, await connection.execute(sql.deliveries.purge_attempts, keep_days, at_once)),
                (addresses, await connection.execute(sql.deliveries.purge_addresses, addresses)),
                (addresses, await connection.execute(sql.deliveries.purge_changes, addresses)),
                (at_once, await connection.execute(sql.deliveries.purge_webhooks, at_once)),
            ]
            await connection.execute(sql.deliveries.purge_days, keep_days)
            await connection.execute(sql.deliveries.purge_event_days, keep_days)
            await connection.execute(sql.mails.purge, keep_days)
        # In this order: deliveries are dropped after their events.
        for what, add, drop in _DAY_TABLES:
            await renew_day_tables(self._pool, what, add=add, drop=drop, keep=keep_days)
        return any(_changed(status) >= most for most, status in deleted)


def _changed(status: str) -> int:
    """The number of rows that a statement has changed, from the status that Postgres returns."""
    return int(status.rsplit(" ", 1)[1])


def _is_uncounted(row: Any) -> bool:
    """Whether a delivery has yet to be counted towards the daily quota. Alerts never are."""
    return not row["counted"] and row["network"] != NO_NETWORK


async def notify(connection: DatabaseConnection) -> None:
    """Wake the deliverer when the transaction commits."""
    await connection.execute(sql.deliveries.notify)


async def _take_quota(
    connection: DatabaseConnection, rows: Sequence[Any], day_limits: Mapping[str, int], at: datetime.datetime | None
) -> tuple[set[str], list[str]]:
    """Count claimed deliveries against their accounts' daily quotas and hold the excess until the next day.

    Returns the ids of the held events, and the accounts to notify.
    """
    by_account: defaultdict[str, list[Any]] = defaultdict(list)
    for row in rows:
        by_account[row["account_id"]].append(row)
    accounts = sorted(by_account)
    granted = await connection.fetch(
        sql.deliveries.take_quota,
        accounts,
        [len(by_account[account]) for account in accounts],
        [day_limits[by_account[account][0]["plan"]] for account in accounts],
        at,
    )
    counted = [row["event_id"] for each in granted for row in by_account[each["account"]][: each["granted"]]]
    held = [row for each in granted for row in by_account[each["account"]][each["granted"] :]]
    await connection.execute(sql.deliveries.mark_counted, counted)
    if held:
        await connection.execute(
            sql.deliveries.hold, [row["event_id"] for row in held], [row["claim"] for row in held], at
        )
        await connection.execute(sql.deliveries.hold_more, sorted({row["webhook_id"] for row in held}), at, AT_ONCE)
    return {row["event_id"] for row in held}, [each["account"] for each in granted if each["tell"]]


async def _postpone(
    connection: DatabaseConnection, late: Sequence[ClaimedDelivery], at: datetime.datetime | None
) -> None:
    waits = [0.0 if each.fault is None else each.fault.wait_s for each in late]
    await connection.execute(
        sql.deliveries.postpone, [each.event_id for each in late], [each.claim for each in late], waits, at
    )


async def _finish(
    connection: DatabaseConnection, results: Sequence[AttemptResult], at: datetime.datetime | None
) -> None:
    """Record results as one JSON document: ten arrays would take asyncpg longer to encode than a delivery takes."""
    done = [
        {
            "event_id": r.claimed.event_id,
            "claim": r.claimed.claim,
            "ago_s": r.ago_s,
            "took_ms": r.took_ms,
            "outcome": r.outcome,
            "status": r.status,
            "excerpt": r.excerpt,
            "state": r.verdict.state,
            "tries": r.verdict.tries,
            "again_s": r.verdict.again_s,
            "sent": r.sent,
            "reply_headers": r.reply_headers,
            "reply_body": r.reply_body,
        }
        for r in results
    ]
    await connection.execute(sql.deliveries.finish, json_text(done), at)


async def _with_events(connection: DatabaseConnection, query: str, rows: Sequence[Any]) -> list[tuple[Any, Any]]:
    """Pair deliveries with their events, which the query reads day by day. Those of removed events are left out."""
    by_day: defaultdict[datetime.date, list[str]] = defaultdict(list)
    for row in rows:
        by_day[row["day"]].append(row["event_id"])
    by_id: dict[str, Any] = {}
    for day, ids in by_day.items():
        by_id |= {event["id"]: event for event in await connection.fetch(query, day, ids)}
    return [(row, by_id[row["event_id"]]) for row in rows if row["event_id"] in by_id]


async def _list_attempts(connection: DatabaseConnection, rows: Sequence[Any]) -> Mapping[str, list[Attempt]]:
    """The last attempts of each delivery."""
    attempts: defaultdict[str, list[Attempt]] = defaultdict(list)
    if not rows:
        return attempts
    now = datetime.datetime.now(datetime.UTC)
    first = min(row["created_at"] for row in rows) - CLOCKS
    last = max(row["finished_at"] or now for row in rows) + CLOCKS
    ids = [row["event_id"] for row in rows]
    for each in await connection.fetch(sql.deliveries.list_attempts, ids, SHOWN_ATTEMPTS, first, last):
        attempts[each["event_id"]].append(_attempt(each))
    return attempts


def _claimed(row: Any, event: Any) -> ClaimedDelivery:
    return ClaimedDelivery(
        row["event_id"],
        row["webhook_id"],
        row["claim"],
        row["tries"],
        row["network"],
        row["url"],
        row["event_type"],
        row["secret"],
        row["old_secret"],
        event["type"],
        event["test"],
        event["body"],
        row["account_id"],
        _fault(row, event),
    )


def _fault(row: Any, event: Any) -> DeliveryFault | None:
    if row["fault"] is None or event["injected"]:
        return None
    is_correction = event["takes_back"] is not None
    return fault_of(
        row["fault"], row["event_id"], age_s=row["age_s"], copies=row["copies"], is_correction=is_correction
    )


def _attempt(row: Any) -> Attempt:
    return Attempt(row["number"], row["began_at"], row["took_ms"], row["outcome"], row["status"], row["excerpt"])


def _delivery(row: Any, event: Any, attempts: Sequence[Attempt]) -> Delivery:
    return Delivery(
        row["event_id"],
        event["type"],
        row["state"],
        row["tries"],
        row["due_at"],
        row["created_at"],
        row["finished_at"],
        event["block"],
        event["test"],
        tuple(attempts),
    )
