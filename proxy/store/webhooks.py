"""Webhooks in Postgres. They are the account's; somebody else's is as one that is not there.

Every change counts the network's version up before it touches the webhook (see the migration): so the events of a block are
matched by all changes that were made before it was written, or by none. What takes long, thousands of addresses, is written
before that, under a lock of the webhook's own.
"""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import asyncpg
import orjson

from proxy.core import lifecycle
from proxy.core.lifecycle import WebhookState, WebhookTrigger
from proxy.core.paging import Page
from proxy.errors import Forbidden, InvalidRequest, NotFound
from proxy.store import sql
from proxy.store.keys import new_id
from proxy.store.pool import PATIENT_S, DatabaseConnection, Pool

# Whose doing it is that a webhook is in a state.
_REASONS: dict[WebhookTrigger, str] = {"pause": "owner", "exhaust": "failures", "gone": "gone", "disable": "operator"}
_STORED: dict[WebhookState, str] = {
    "active": "active",
    "paused": "paused",
    "disabled": "disabled",
    "removed": "deleted",
}
# Hundreds of thousands of rows take longer than a statement usually may.
LONG_S = 60.0
# Deliveries that are made due again together.
AT_ONCE = 5_000


@dataclass(frozen=True, slots=True)
class Webhook:
    """`config` without its addresses, of which `addresses` is the number; None: it has no such list."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class NewWebhook:
    account: str
    network: str
    live: bool
    url: str
    event_type: str
    config: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class AddressChange:
    """Addresses that are added and removed, which have none in common; and how many there may be afterwards."""

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
        self, webhook_id: str, new: NewWebhook, *, addresses: Sequence[bytes] | None, secret: bytes, most: int
    ) -> Webhook:
        """A new webhook, if the account has not as many as it may. `addresses` are each there once."""
        async with self._pool.connection() as connection, connection.transaction():
            await connection.execute(sql.webhooks.lock_webhooks, new.account)
            if await connection.fetchval(sql.webhooks.count_of_account, new.account) >= most:
                raise Forbidden(f"the account's plan allows {most} webhooks: delete one first")
            number = await connection.fetchval(sql.webhooks.next_webhook)
            await _copy(connection, number, addresses or ())
            version = await lock(connection, new.network)
            row = await connection.fetchrow(
                sql.webhooks.create_webhook, number, webhook_id, new.account, new.network, new.live, new.url,
                new.event_type, _json(new.config), None if addresses is None else len(addresses), secret, version,
            )  # fmt: skip
        return _webhook(row)

    async def read(self, webhook_id: str, *, account: str) -> Webhook:
        async with self._pool.connection() as connection:
            row = await connection.fetchrow(sql.webhooks.read_webhook, webhook_id, account)
        return _webhook(row, webhook_id)

    async def addresses(self, found: Webhook) -> list[bytes]:
        """All that it watches, in order."""
        async with self._pool.connection() as connection:
            rows = await connection.fetch(sql.webhooks.read_addresses, found.number)
        return [row["address"] for row in rows]

    async def list_of(self, account: str, *, live: bool, status: str | None, page: Page) -> tuple[list[Webhook], int]:
        """A page, the newest first, and how many there are. Those on live networks only for who may use them."""
        async with self._pool.connection() as connection:
            rows = await connection.fetch(sql.webhooks.list_webhooks, account, live, status, page.limit, page.offset)
            total = await connection.fetchval(sql.webhooks.count_webhooks, account, live, status)
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
    ) -> Webhook:
        """All of it or nothing; what is None stays. A config is replaced as a whole, and its addresses with it."""
        async with self._pool.connection() as connection, connection.transaction():
            if config is not None:
                await connection.execute(sql.webhooks.lock_webhook, before.id)
                await connection.execute(sql.webhooks.clear_addresses, before.number, timeout=LONG_S)
                await _copy(connection, before.number, addresses or ())
            changed = None if delta is None else await _change_addresses(connection, before, delta)
            version = await lock(connection, before.network)
            row = await connection.fetchrow(
                sql.webhooks.update_webhook, before.id, before.account, url,
                None if config is None else _json(config), None if addresses is None else len(addresses), version,
            )  # fmt: skip
            found = _webhook(row, before.id)
            if delta is not None and changed is not None:
                found = await _note_addresses(connection, found, changed, most=delta.most)
            if cause is not None:
                found = await _move(connection, found, cause)
        if cause is not None and found.status == "active":
            await self._unpark(found.id)
        return found

    async def move(self, before: Webhook, cause: WebhookTrigger) -> Webhook:
        """To the state that follows; InvalidRequest where none does."""
        async with self._pool.connection() as connection, connection.transaction():
            await lock(connection, before.network)
            found = await _move(connection, before, cause)
        if found.status == "active":
            await self._unpark(found.id)
        return found

    async def unpark_left(self) -> None:
        """What whoever resumed a webhook did not come to."""
        async with self._pool.connection(within_s=PATIENT_S) as connection:
            rows = await connection.fetch(sql.webhooks.list_parked)
        for row in rows:
            await self._unpark(row["id"])

    async def _unpark(self, webhook_id: str) -> None:
        """What was kept is due again. Not with the change of its state: nothing new is parked after that, and there may be more
        than anybody should wait for."""
        count = AT_ONCE
        while count == AT_ONCE:
            async with self._pool.connection(within_s=PATIENT_S) as connection:
                count = await connection.fetchval(sql.webhooks.unpark, webhook_id, AT_ONCE)

    async def rotate(self, webhook_id: str, *, account: str, secret: bytes, old_for_s: float) -> Webhook:
        async with self._pool.connection() as connection:
            row = await connection.fetchrow(sql.webhooks.rotate_secret, webhook_id, account, secret, old_for_s)
        return _webhook(row, webhook_id)


# In somebody's transaction


async def lock(connection: DatabaseConnection, network: str) -> int:
    """The network's next version. Before anything else of a webhook is changed, and before its rows are locked."""
    return int(await connection.fetchval(sql.webhooks.change_webhooks, network))


async def set_status(connection: DatabaseConnection, webhook_id: str, cause: WebhookTrigger) -> bool:
    """Whether it moved just now: not where it is in the state already, or is gone."""
    row = await connection.fetchrow(sql.webhooks.status_of, webhook_id)
    after = None if row is None else lifecycle.after(row["status"], cause)
    if row is None or after is None or after == row["status"]:
        return False
    await connection.fetchrow(sql.webhooks.set_status, webhook_id, _STORED[after], _REASONS.get(cause))
    return True


async def _move(connection: DatabaseConnection, before: Webhook, cause: WebhookTrigger) -> Webhook:
    row = await connection.fetchrow(sql.webhooks.status_of, before.id)
    if row is None:
        raise absent(before.id)
    after = lifecycle.after(row["status"], cause)
    if after is None or (cause == "resume" and row["reason"] == "operator"):
        raise InvalidRequest(f"status: a webhook that is {row['status']} cannot be changed so")
    reason = row["reason"] if after == row["status"] else _REASONS.get(cause)
    row = await connection.fetchrow(sql.webhooks.set_status, before.id, _STORED[after], reason)
    return _webhook(row)


async def _change_addresses(
    connection: DatabaseConnection, before: Webhook, delta: AddressChange
) -> tuple[list[bytes], list[bytes]]:
    """Those that were there and are not, and those that were not and are: before the version is held, because it takes long."""
    await connection.execute(sql.webhooks.lock_webhook, before.id)
    gone = await connection.fetch(sql.webhooks.remove_addresses, before.number, delta.remove, timeout=LONG_S)
    new = await connection.fetch(sql.webhooks.add_addresses, before.number, delta.add, timeout=LONG_S)
    return [row["address"] for row in gone], [row["address"] for row in new]


async def _note_addresses(
    connection: DatabaseConnection, found: Webhook, changed: tuple[list[bytes], list[bytes]], *, most: int
) -> Webhook:
    """What has changed, for those who have the others in memory. The webhook has its new version already."""
    gone, new = changed
    for noted, is_new in ((gone, False), (new, True)):
        await connection.execute(sql.webhooks.note_addresses, found.number, found.version, noted, is_new)
    row = await connection.fetchrow(sql.webhooks.count_addresses, found.id, len(new) - len(gone))
    after = _webhook(row, found.id)
    if (after.addresses or 0) > most:
        raise InvalidRequest(f"add_addresses: there would be {after.addresses}, at most {most} are allowed")
    return after


def absent(webhook_id: str) -> NotFound:
    named = f" {webhook_id}" if webhook_id.startswith("wh_") and webhook_id[3:].isalnum() else " of this id"
    return NotFound(f"there is no webhook{named}")


async def _copy(connection: DatabaseConnection, number: int, addresses: Sequence[bytes]) -> None:
    if addresses:
        await connection.copy_records_to_table(
            "watched_addresses", records=[(number, each) for each in addresses], columns=("webhook", "address"),
            timeout=LONG_S,
        )  # fmt: skip


def _json(data: Mapping[str, Any]) -> str:
    return orjson.dumps(data).decode()


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
    )
