"""The outbox of webhooks in Postgres: what is due, who has taken it, and how it went.

A delivery is taken by moving its time to the end of a lease, and given back by what is written after the attempt; who dies in
between gives it back by dying. Every claim has a number, and a result counts only under the number that it was claimed with.
The times are Postgres's own: `at` is for tests.
"""

from __future__ import annotations

import datetime
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import orjson

from proxy.core.attempts import AttemptVerdict, WebhookEnd
from proxy.core.paging import Page
from proxy.store import events, mails, sql, webhooks
from proxy.store.pool import PATIENT_S, DatabaseConnection, Pool
from proxy.store.webhooks import Webhook

# Longer than an attempt takes: nobody else takes up what is under way.
LEASE_S = 30.0
# Rows that one statement moves aside.
AT_ONCE = 5_000
# Attempts that are shown of a delivery.
SHOWN_ATTEMPTS = 20


@dataclass(frozen=True, slots=True)
class DueWebhooks:
    """Webhooks that have something due, the active ones with their URLs; and in how many seconds the next falls due, if
    anything does."""

    active: dict[str, str]
    inactive: list[str]
    next_s: float | None


class ClaimedDelivery(NamedTuple):
    """A delivery that is ours until its lease ends, with all that an attempt needs."""

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


class AttemptResult(NamedTuple):
    """How an attempt ended. `ago_s`: how long before it is written it began."""

    claimed: ClaimedDelivery
    verdict: AttemptVerdict
    outcome: str
    status: int | None
    excerpt: str | None
    took_ms: int
    ago_s: float


@dataclass(frozen=True, slots=True)
class Attempt:
    number: int
    began_at: datetime.datetime
    took_ms: int
    outcome: str
    status: int | None
    excerpt: str | None


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


class DeliveryStore:
    def __init__(self, pool: Pool) -> None:
        self._pool = pool

    def __repr__(self) -> str:
        return f"<DeliveryStore {self._pool!r}>"

    # Taking

    async def list_due(self, at: datetime.datetime | None = None) -> DueWebhooks:
        async with self._pool.connection(within_s=PATIENT_S) as connection:
            rows = await connection.fetch(sql.deliveries.list_due, at)
        active = {row["webhook_id"]: row["url"] for row in rows if row["status"] == "active"}
        inactive = [row["webhook_id"] for row in rows if row["status"] not in (None, "active")]
        return DueWebhooks(active, inactive, next((row["in_s"] for row in rows if row["webhook_id"] is None), None))

    async def claim(
        self,
        rooms: Mapping[str, int],
        *,
        day_limits: Mapping[str, int],
        lease_s: float = LEASE_S,
        at: datetime.datetime | None = None,
    ) -> tuple[list[ClaimedDelivery], list[str]]:
        """So many of each webhook; and the accounts whose day has just been used up. `day_limits`: by plan; 0: none."""
        async with self._pool.connection(within_s=PATIENT_S) as connection:
            rows = await connection.fetch(sql.deliveries.claim, [*rooms], [*rooms.values()], at, lease_s)
            unpaid = [row for row in rows if not row["counted"] and day_limits.get(row["plan"], 0)]
            if not unpaid:
                return [_claimed(row) for row in rows], []
            async with connection.transaction():
                held, told = await _pay(connection, unpaid, day_limits, at)
        return [_claimed(row) for row in rows if row["event_id"] not in held], told

    async def park(self, webhook_ids: Sequence[str], at: datetime.datetime | None = None) -> None:
        """What is due of webhooks that are not active is put aside, or dropped with its webhook; a bounded number."""
        async with self._pool.connection(within_s=PATIENT_S) as connection:
            await connection.execute(sql.deliveries.park, webhook_ids, at, AT_ONCE)
            await connection.execute(sql.deliveries.drop_orphans, webhook_ids)

    async def release_held(self, accounts: Sequence[str]) -> None:
        """What was held because the day was used up is due again: an account may more than before."""
        async with self._pool.connection(within_s=PATIENT_S) as connection:
            await connection.execute(sql.deliveries.release_held, accounts)

    # Giving back

    async def finish(self, results: Sequence[AttemptResult], at: datetime.datetime | None = None) -> None:
        """Write down attempts after which nothing but their deliveries changes."""
        async with self._pool.connection(within_s=PATIENT_S) as connection:
            await _finish(connection, results, at)

    async def finish_with(
        self, result: AttemptResult, cause: WebhookEnd, about: Mapping[str, Any], at: datetime.datetime | None = None
    ) -> bool:
        """Write down an attempt that changes its webhook: all of it, and the letter that tells of it, or nothing.

        Whether the webhook has changed by it: of many that fail at once, it is changed by one, and one letter goes out.
        """
        claimed = result.claimed
        async with self._pool.connection(within_s=PATIENT_S) as connection, connection.transaction():
            await webhooks.lock(connection, claimed.network)
            has_changed = await webhooks.set_status(connection, claimed.webhook_id, cause)
            await _finish(connection, [result], at)
            if has_changed and cause == "exhaust":
                await mails.add(connection, claimed.webhook_id, "webhook_paused", about)
        return has_changed

    # What owners see and ask for

    async def page(
        self, webhook_id: str, page: Page, *, state: str | None, since: datetime.datetime | None
    ) -> tuple[list[Delivery], int]:
        """The newest first, and how many there are."""
        async with self._pool.connection() as connection:
            rows = await connection.fetch(
                sql.deliveries.list_deliveries, webhook_id, state, since, page.limit, page.offset
            )
            total = await connection.fetchval(sql.deliveries.count_deliveries, webhook_id, state, since)
            tried = await connection.fetch(
                sql.deliveries.list_attempts, [row["event_id"] for row in rows], SHOWN_ATTEMPTS
            )
        attempts: defaultdict[str, list[Attempt]] = defaultdict(list)
        for each in tried:
            attempts[each["event_id"]].append(_attempt(each))
        return [_delivery(row, attempts[row["event_id"]]) for row in rows], total

    async def redeliver(self, webhook_id: str, event_id: str) -> bool:
        """Whether there is such a delivery, of an event that still holds."""
        async with self._pool.connection() as connection, connection.transaction():
            found = await connection.fetchval(sql.deliveries.redeliver, webhook_id, event_id)
            await tell(connection)
        return found is not None

    async def redeliver_since(
        self, webhook_id: str, since: datetime.datetime, until: datetime.datetime, *, state: str | None
    ) -> int:
        """How many there were; without a state those that are over. Bit by bit: nobody waits for more than a few thousand."""
        total, last = 0, ""
        while True:
            async with self._pool.connection() as connection, connection.transaction():
                row = await connection.fetchrow(
                    sql.deliveries.redeliver_since, webhook_id, since, last, until, state, AT_ONCE
                )
                await tell(connection)
            if row is None:
                return total
            total += row["changed"]
            since, last = row["created_at"], row["event_id"]

    async def add_test(self, webhook: Webhook, event_id: str, kind: str, body: bytes) -> None:
        """An event of nothing that happened, due at once."""
        async with self._pool.connection() as connection, connection.transaction():
            await events.add_test(
                connection, event_id=event_id, webhook=webhook.id, network=webhook.network, named=kind, body=body
            )
            await connection.execute(sql.deliveries.add, event_id, webhook.id)
            await tell(connection)

    # What is old

    async def purge(self, keep_days: int, *, at_once: int = 1_000) -> bool:
        """One bite of what is older; whether there may be more."""
        async with self._pool.connection(within_s=PATIENT_S) as connection:
            gone = [
                await connection.execute(sql.deliveries.purge, keep_days, at_once),
                await connection.execute(sql.deliveries.purge_addresses, at_once),
                await connection.execute(sql.deliveries.purge_changes, at_once),
            ]
            await connection.execute(sql.deliveries.purge_webhooks, keep_days)
            await connection.execute(sql.deliveries.purge_days, keep_days)
            await connection.execute(sql.mails.purge, keep_days)
        return any(int(said.rsplit(" ", 1)[1]) >= at_once for said in gone)


async def tell(connection: DatabaseConnection) -> None:
    """Something is due: whoever delivers wakes up when the transaction is through."""
    await connection.execute(sql.deliveries.notify)


async def _pay(
    connection: DatabaseConnection, rows: Sequence[Any], day_limits: Mapping[str, int], at: datetime.datetime | None
) -> tuple[set[str], list[str]]:
    """Take what was claimed from its accounts' days. What is beyond is held until the next: what that is, and whom to tell."""
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
    paid = [row["event_id"] for each in granted for row in by_account[each["account"]][: each["granted"]]]
    held = [row for each in granted for row in by_account[each["account"]][each["granted"] :]]
    await connection.execute(sql.deliveries.mark_counted, paid)
    if held:
        await connection.execute(
            sql.deliveries.hold, [row["event_id"] for row in held], [row["claim"] for row in held], at
        )
        await connection.execute(sql.deliveries.hold_more, sorted({row["webhook_id"] for row in held}), at, AT_ONCE)
    return {row["event_id"] for row in held}, [each["account"] for each in granted if each["tell"]]


async def _finish(
    connection: DatabaseConnection, results: Sequence[AttemptResult], at: datetime.datetime | None
) -> None:
    """As one JSON document: ten arrays of so many would take asyncpg longer than the delivery takes."""
    done = [
        {
            "event_id": r.claimed.event_id, "claim": r.claimed.claim, "ago_s": r.ago_s, "took_ms": r.took_ms,
            "outcome": r.outcome, "status": r.status, "excerpt": r.excerpt, "state": r.verdict.state,
            "tries": r.verdict.tries, "again_s": r.verdict.again_s,
        }
        for r in results
    ]  # fmt: skip
    await connection.execute(sql.deliveries.finish, orjson.dumps(done).decode(), at)


def _claimed(row: Any) -> ClaimedDelivery:
    return ClaimedDelivery(
        row["event_id"], row["webhook_id"], row["claim"], row["tries"], row["network"], row["url"], row["event_type"],
        row["secret"], row["old_secret"], row["type"], row["test"], row["body"],
    )  # fmt: skip


def _attempt(row: Any) -> Attempt:
    return Attempt(row["number"], row["began_at"], row["took_ms"], row["outcome"], row["status"], row["excerpt"])


def _delivery(row: Any, attempts: Sequence[Attempt]) -> Delivery:
    return Delivery(
        row["event_id"], row["type"], row["state"], row["tries"], row["due_at"], row["created_at"], row["finished_at"],
        row["block"], row["test"], tuple(attempts),
    )  # fmt: skip
