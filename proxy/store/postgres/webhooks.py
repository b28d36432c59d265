"""Webhooks in Postgres. A webhook belongs to an account; for other accounts it does not exist.

Every change increments the network's version before it touches the webhook (see the migration), so a block's events are
matched either with all changes of a transaction or with none. Slow changes, such as thousands of addresses, are written before
that, under a lock on the webhook alone.
"""

from __future__ import annotations

import datetime
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import asyncpg
import orjson

from proxy.core import lifecycle
from proxy.core.lifecycle import WebhookState, WebhookTrigger
from proxy.core.paging import Page
from proxy.errors import Forbidden, InvalidRequest, NotFound, RateLimited
from proxy.store.postgres import peppers, sql
from proxy.store.postgres.json_text import json_text
from proxy.store.postgres.keys import new_id
from proxy.store.postgres.pool import PATIENT_S, DatabaseConnection, Pool
from proxy.store.postgres.secrets import RotatedSecret

# The stored reason for a webhook's state: what paused or disabled it.
_REASONS: dict[WebhookTrigger, str] = {"pause": "owner", "exhaust": "failures", "gone": "gone", "disable": "operator"}
_STORED: dict[WebhookState, str] = {
    "active": "active",
    "paused": "paused",
    "disabled": "disabled",
    "removed": "deleted",
}
# Timeout for statements that write hundreds of thousands of rows.
LONG_S = 60.0
# Deliveries requeued in one statement.
AT_ONCE = 5_000
# Bytes of a config that count as one filter value: an address as text has 44 with its quotes.
VALUE_BYTES = 44
# Addresses read or written in one statement, so that no step takes long.
COPIED_AT_ONCE = 500
_DAY_S = 86_400


@dataclass(frozen=True, slots=True)
class Webhook:
    """`config` excludes the address list. `addresses` is its length, or None if there is no list. `is_listening`: whether it
    gets its events. An active webhook for pending transactions does not before the mempool is watched. `test_key`: whether a
    test key created it, so that it may have a `fault`."""

    number: int
    id: str
    account: str
    network: str
    url: str
    event_type: str
    config: Mapping[str, Any]
    addresses: int | None
    status: WebhookState
    reason: str | None
    secret: bytes
    old_secret_until: datetime.datetime | None
    version: int
    created_at: datetime.datetime
    updated_at: datetime.datetime
    test_key: bool
    fault: str | None
    is_listening: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class NewWebhook:
    account: str
    network: str
    live: bool
    url: str
    event_type: str
    config: Mapping[str, Any]
    test_key: bool = False
    fault: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AddressChange:
    """Addresses to add and to remove, which are disjoint, and the most that the webhook may have afterwards."""

    add: Sequence[bytes]
    remove: Sequence[bytes]
    most: int


class WebhookStore:
    def __init__(self, pool: Pool) -> None:
        self._pool = pool

    def __repr__(self) -> str:
        return f"<WebhookStore {self._pool!r}>"

    @staticmethod
    def new_id() -> str:
        return new_id("wh")

    async def create(
        self,
        webhook_id: str,
        new: NewWebhook,
        *,
        addresses: Sequence[bytes] | None,
        secret: bytes,
        most: int,
        values_per_day: int = 0,
        rotated: RotatedSecret | None = None,
    ) -> Webhook:
        """Create a webhook; raise Forbidden if the account already has `most`. `addresses` has no duplicates. `rotated`: the
        secret to store instead while the pepper is rotated. Raises RateLimited if the account has written as many filter values
        as it may per day (0: no limit)."""
        for_s, config = LONG_S if addresses else None, json_text(new.config)
        async with self._pool.connection(for_s=for_s) as connection:
            await _check_count(connection, new, most)
            await _take_values(connection, new.account, _values_of(config, addresses), values_per_day)
            async with connection.transaction():
                await connection.execute(sql.webhooks.lock_webhooks, new.account)
                await _check_count(connection, new, most)
                number = await connection.fetchval(sql.webhooks.next_webhook)
                await _copy(connection, number, addresses or ())
                version = await lock(connection, new.network)
                secret = await peppers.for_every_host(connection, secret, rotated)
                row = await connection.fetchrow(
                    sql.webhooks.create_webhook,
                    number,
                    webhook_id,
                    new.account,
                    new.network,
                    new.live,
                    new.url,
                    new.event_type,
                    config,
                    None if addresses is None else len(addresses),
                    secret,
                    version,
                    new.test_key,
                    new.fault,
                )
                await _add_lookups(connection, _webhook(row))
        return _webhook(row)

    async def read(self, webhook_id: str, *, account: str) -> Webhook:
        async with self._pool.connection() as connection:
            row = await connection.fetchrow(sql.webhooks.read_webhook, webhook_id, account)
        return _webhook(row, webhook_id)

    async def for_alerts(self, account: str) -> Webhook | None:
        """Return the webhook that the account's alerts are sent to."""
        async with self._pool.connection() as connection:
            row = await connection.fetchrow(sql.alerts.read_webhook, account)
        return None if row is None else _webhook(row)

    async def addresses(self, webhook: Webhook) -> list[bytes]:
        """Return the addresses that a webhook watches, in order."""
        listed: list[bytes] = []
        async with self._pool.connection(for_s=LONG_S) as connection, connection.transaction():
            cursor = await connection.cursor(sql.webhooks.read_addresses, webhook.number)
            while rows := await cursor.fetch(COPIED_AT_ONCE):
                listed += [row["address"] for row in rows]
        return listed

    async def list_of(
        self, account: str, *, live: bool, status: str | None, page: Page, networks: Sequence[str] | None = None
    ) -> tuple[list[Webhook], int]:
        """Return a page of webhooks, newest first, and their total number. Without `live`, only those on test networks.
        `networks`: only those on one of these."""
        async with self._pool.connection() as connection:
            wanted = (account, live, status, networks)
            rows = await connection.fetch(sql.webhooks.list_webhooks, *wanted, page.limit, page.offset)
            total = await connection.fetchval(sql.webhooks.count_webhooks, *wanted)
        return [_webhook(row) for row in rows], total

    async def update(
        self,
        before: Webhook,
        *,
        url: str | None = None,
        cause: WebhookTrigger | None = None,
        config: Mapping[str, Any] | None = None,
        addresses: Sequence[bytes] | None = None,
        delta: AddressChange | None = None,
        fault: str | None = None,
        values_per_day: int = 0,
    ) -> Webhook:
        """Change a webhook in one transaction; None keeps a value. A new config replaces the old one and its addresses, and an
        empty fault ends it. `values_per_day`: see `create`."""
        for_s = LONG_S if config is not None or delta is not None else None
        written = None if config is None else json_text(config)
        values = 0 if delta is None else len(delta.add) + len(delta.remove)
        if written is not None:
            values += _values_of(written, addresses)
        async with self._pool.connection(for_s=for_s) as connection:
            await _take_values(connection, before.account, values, values_per_day)
            async with connection.transaction():
                if config is not None:
                    await connection.execute(sql.webhooks.lock_webhook, before.id)
                    await connection.execute(sql.webhooks.clear_addresses, before.number, timeout=LONG_S)
                    await _copy(connection, before.number, addresses or ())
                changed = None if delta is None else await _change_addresses(connection, before, delta)
                version = await lock(connection, before.network)
                row = await connection.fetchrow(
                    sql.webhooks.update_webhook,
                    before.id,
                    before.account,
                    url,
                    written,
                    None if addresses is None else len(addresses),
                    version,
                    fault,
                )
                after = _webhook(row, before.id)
                if config is not None:
                    await _add_lookups(connection, after, known=before)
                if delta is not None and changed is not None:
                    after = await _note_addresses(connection, after, changed, most=delta.most)
                if cause is not None:
                    after = await _move(connection, after, cause)
        if cause is not None and after.status == "active":
            await self._unpark(after.id)
        return after

    async def move(self, before: Webhook, cause: WebhookTrigger) -> Webhook:
        """Apply a trigger to the webhook's state; raise InvalidRequest if the state does not allow it."""
        async with self._pool.connection() as connection, connection.transaction():
            await lock(connection, before.network)
            after = await _move(connection, before, cause)
        if after.status == "active":
            await self._unpark(after.id)
        return after

    async def requeue_parked(self) -> None:
        """Requeue deliveries left parked by an interrupted resume."""
        async with self._pool.connection(within_s=PATIENT_S) as connection:
            rows = await connection.fetch(sql.webhooks.list_parked)
        for row in rows:
            await self._unpark(row["id"])

    async def _unpark(self, webhook_id: str) -> None:
        """Make parked deliveries due again.

        A separate step after the state change: no delivery is parked any more by then, and there may be too many for one
        transaction.
        """
        count = AT_ONCE
        while count == AT_ONCE:
            async with self._pool.connection(within_s=PATIENT_S) as connection:
                count = await connection.fetchval(sql.webhooks.unpark, webhook_id, AT_ONCE)

    async def mempool_watches(self, *, within_s: float) -> dict[str, int]:
        """Return the version of the webhooks for which each mempool is watched, by network, if confirmed `within_s`."""
        async with self._pool.connection() as connection:
            rows = await connection.fetch(sql.events.list_mempool_watches, within_s)
        return {row["network"]: row["version"] for row in rows}

    async def rotate(
        self, webhook_id: str, *, account: str, secret: bytes, old_for_s: float, rotated: RotatedSecret | None = None
    ) -> Webhook:
        async with self._pool.connection() as connection, connection.transaction():
            secret = await peppers.for_every_host(connection, secret, rotated)
            row = await connection.fetchrow(sql.webhooks.rotate_secret, webhook_id, account, secret, old_for_s)
        return _webhook(row, webhook_id)


# Steps in the caller's transaction


async def lock(connection: DatabaseConnection, network: str) -> int:
    """Increment, lock and return the network's version. Call it before changing a webhook or locking its rows."""
    return int(await connection.fetchval(sql.webhooks.change_webhooks, network))


async def set_status(connection: DatabaseConnection, webhook_id: str, cause: WebhookTrigger) -> bool:
    """Apply a trigger and return whether the state changed: not if it is in that state already or was deleted."""
    row = await connection.fetchrow(sql.webhooks.status_of, webhook_id)
    after = None if row is None else lifecycle.after(row["status"], cause)
    if row is None or after is None or after == row["status"]:
        return False
    await connection.fetchrow(sql.webhooks.set_status, webhook_id, _STORED[after], _REASONS.get(cause))
    return True


async def _check_count(connection: DatabaseConnection, new: NewWebhook, most: int) -> None:
    if await connection.fetchval(sql.webhooks.count_of_account, new.account, new.network) >= most:
        raise Forbidden(f"the account's plan allows {most} webhooks: delete one first", reason="plan")


def _values_of(config: str, addresses: Sequence[bytes] | None) -> int:
    return len(config) // VALUE_BYTES + len(addresses or ())


async def _take_values(connection: DatabaseConnection, account: str, count: int, limit: int) -> None:
    """Count filter values that are about to be written. Not in the transaction that writes them: values that are rolled back
    cost as much."""
    if not limit or not count or await connection.fetchval(sql.webhooks.take_values, account, count, limit):
        return
    raise RateLimited(
        f"the account's plan allows {limit} addresses and other filter values per day in webhooks: wait until 00:00 UTC",
        retry_after_s=_DAY_S - int(time.time()) % _DAY_S,
        details={"reason": "daily_quota"},
        reason="quota",
    )


async def _move(connection: DatabaseConnection, before: Webhook, cause: WebhookTrigger) -> Webhook:
    row = await connection.fetchrow(sql.webhooks.status_of, before.id)
    if row is None:
        raise absent(before.id)
    after = lifecycle.after(row["status"], cause)
    if after is None or (cause == "resume" and row["reason"] == "operator"):
        raise InvalidRequest(f"status: not possible for a webhook that is {row['status']}", param="status")
    reason = row["reason"] if after == row["status"] else _REASONS.get(cause)
    row = await connection.fetchrow(sql.webhooks.set_status, before.id, _STORED[after], reason)
    return _webhook(row)


async def _change_addresses(
    connection: DatabaseConnection, before: Webhook, delta: AddressChange
) -> tuple[list[bytes], list[bytes]]:
    """Change the address list and return the removed and the added addresses. Slow, so it runs before the version is locked."""
    await connection.execute(sql.webhooks.lock_webhook, before.id)
    gone, new = list[bytes](), list[bytes]()
    for query, given, changed in (
        (sql.webhooks.remove_addresses, delta.remove, gone),
        (sql.webhooks.add_addresses, delta.add, new),
    ):
        for part in _parts(given):
            rows = await connection.fetch(query, before.number, part, timeout=LONG_S)
            changed += [row["address"] for row in rows]
    return gone, new


async def _note_addresses(
    connection: DatabaseConnection, webhook: Webhook, changed: tuple[list[bytes], list[bytes]], *, most: int
) -> Webhook:
    """Record address changes for processes that have the list in memory. The webhook already has its new version."""
    gone, new = changed
    for noted, is_new in ((gone, False), (new, True)):
        for part in _parts(noted):
            await connection.execute(sql.webhooks.note_addresses, webhook.number, webhook.version, part, is_new)
    row = await connection.fetchrow(sql.webhooks.count_addresses, webhook.id, len(new) - len(gone))
    after = _webhook(row, webhook.id)
    if (after.addresses or 0) > most:
        raise InvalidRequest(
            f"add_addresses: the webhook would have {after.addresses} addresses; the limit is {most}",
            param="add_addresses",
        )
    return after


async def _add_lookups(connection: DatabaseConnection, webhook: Webhook, *, known: Webhook | None = None) -> None:
    """Have the transactions that a webhook names looked up, because they may be mined already."""
    new = _transactions(webhook)
    if known is not None and (before := _transactions(known)):
        await connection.execute(sql.events.drop_lookups, webhook.id, [*new])
        new -= before
    if new:
        await connection.execute(sql.events.add_lookups, webhook.id, webhook.network, [*new])
        await connection.execute(sql.events.notify_events, webhook.network)


def _transactions(webhook: Webhook) -> set[str]:
    return {each.lower() for each in webhook.config.get("tx_hashes", ())}


def absent(webhook_id: str) -> NotFound:
    named = f" {webhook_id}" if webhook_id.startswith("wh_") and webhook_id[3:].isalnum() else " with this id"
    return NotFound(f"there is no webhook{named}")


async def _copy(connection: DatabaseConnection, number: int, addresses: Sequence[bytes]) -> None:
    for part in _parts(addresses):
        records = [(number, each) for each in part]
        await connection.copy_records_to_table(
            "watched_addresses", records=records, columns=("webhook", "address"), timeout=LONG_S
        )


def _parts(addresses: Sequence[bytes]) -> Iterator[Sequence[bytes]]:
    """Encoding the longest list at once would hold up the event loop."""
    return (addresses[first : first + COPIED_AT_ONCE] for first in range(0, len(addresses), COPIED_AT_ONCE))


def _webhook(row: asyncpg.Record | None, webhook_id: str = "") -> Webhook:
    if row is None:
        raise absent(webhook_id)
    return Webhook(
        number=row["number"],
        id=row["id"],
        account=row["account_id"],
        network=row["network"],
        url=row["url"],
        event_type=row["event_type"],
        config=orjson.loads(row["config"]),
        addresses=row["addresses"],
        status="removed" if row["status"] == "deleted" else row["status"],
        reason=row["reason"],
        secret=row["secret"],
        old_secret_until=row["old_secret_until"],
        version=row["version"],
        created_at=row["created_at"],
        updated_at=row["updated_at"],
        test_key=row["test_key"],
        fault=row["fault"],
    )
