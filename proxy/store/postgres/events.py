"""Webhook events in Postgres: written with their block, sent when complete, withdrawn with their block.

Writers pass their own connection, because events and cursor must change in one transaction. Each of them locks the version of
the network's webhooks (`webhooks.version_of`), so no webhook is paused or resumed between deciding whether its events are
due and committing them.

A table per day has a unique index of its own, so an event must always be stored under the same day: that of its block. One
without such a day is stored under the current day, after a search of all tables.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import orjson

from proxy.store.postgres import sql
from proxy.store.postgres.json_text import json_text
from proxy.store.postgres.pool import DatabaseConnection

# The position of an event in the queue of incomplete events, and the position before the first one.
EventCursor = tuple[datetime.datetime, str]
FIRST: EventCursor = (datetime.datetime.min.replace(year=1970, tzinfo=datetime.UTC), "")
# The block tags by which a chain reports finality.
FinalityTag = Literal["safe", "finalized"]


@dataclass(frozen=True, slots=True, kw_only=True)
class NewEvent:
    """`lacks`: data to look up before the event is sent. `after_block`: the event waits until this block is written or, with
    `finality`, until the chain reports it as safe or finalized. `takes_back`: the event that this one corrects. `day`: that
    of its block, if every process that may add the event knows it. `account`: the webhook's owner."""

    id: str
    webhook: str
    type: str
    body: bytes
    block: int | None = None
    block_hash: bytes | None = None
    lacks: Mapping[str, Any] | None = None
    after_block: int | None = None
    finality: FinalityTag | None = None
    takes_back: str | None = None
    day: datetime.date | None = None
    account: str = ""


@dataclass(frozen=True, slots=True)
class IncompleteEvent:
    id: str
    day: datetime.date
    type: str
    block: int | None
    block_hash: bytes | None
    body: bytes
    lacks: dict[str, Any]
    place: EventCursor


@dataclass(frozen=True, slots=True)
class WithdrawnEvent:
    """An event that may have been sent and whose block was removed."""

    id: str
    webhook: str
    body: bytes


@dataclass(frozen=True, slots=True)
class MinedLookup:
    """A transaction that a webhook has named and that may be mined already."""

    webhook: str
    transaction: str
    age_s: float


async def add(connection: DatabaseConnection, network: str, new: Sequence[NewEvent]) -> set[str]:
    """Add events, notify the processes that send or complete them, and return the ids of those that are new."""
    new = await _without_known(connection, new)
    if not new:
        return set()
    columns = zip(
        *(
            (
                e.id,
                e.webhook,
                e.type,
                e.block,
                e.block_hash,
                e.body,
                json_text(e.lacks) if e.lacks else None,
                e.after_block,
                e.finality,
                e.takes_back,
                e.day,
            )
            for e in new
        ),
        strict=True,
    )
    rows = await connection.fetch(sql.events.add_events, network, *map(list, columns))
    if any(row["ready"] for row in rows):
        await connection.execute(sql.deliveries.notify)
    if not all(row["ready"] for row in rows):
        await notify(connection, network)
    return {row["id"] for row in rows}


@dataclass(frozen=True, slots=True)
class EventDay:
    """How many events an account may still store today, and how many were dropped."""

    room: int
    dropped: int


async def read_days(
    connection: DatabaseConnection, accounts: Iterable[str], limits: Mapping[str, int]
) -> dict[str, EventDay]:
    """Return today's events of the accounts whose plans limit them. `limits` is by plan; 0 means no limit."""
    rows = await connection.fetch(sql.events.read_stored, [*accounts])
    return {
        row["id"]: EventDay(max(0, limit - row["stored"]), row["dropped"])
        for row in rows
        if (limit := limits.get(row["plan"], 0))
    }


async def count_events(
    connection: DatabaseConnection, network: str, *, stored: Mapping[str, int], dropped: Mapping[str, int]
) -> None:
    """Count today's events by account. The accounts' counts on the network stay locked until the transaction ends."""
    if accounts := sorted({*stored, *dropped}):
        await connection.execute(
            sql.events.count_events,
            network,
            accounts,
            [stored.get(each, 0) for each in accounts],
            [dropped.get(each, 0) for each in accounts],
        )


async def _without_known(connection: DatabaseConnection, new: Sequence[NewEvent]) -> Sequence[NewEvent]:
    """The given events, except those without a day that are stored already."""
    dayless = [event.id for event in new if event.day is None]
    if not dayless:
        return new
    known = {row["id"] for row in await connection.fetch(sql.events.known, dayless)}
    return [event for event in new if event.id not in known]


async def withdrawn(connection: DatabaseConnection, ids: Sequence[str]) -> set[str]:
    """Return the given events that a reorganisation has removed."""
    return {row["id"] for row in await connection.fetch(sql.events.taken_back, ids)}


async def release(connection: DatabaseConnection, network: str, block: int) -> None:
    """Release events that waited for a block up to this one; notify if others still wait for finality."""
    row = await connection.fetchrow(sql.events.release, network, block)
    assert row is not None
    if row["queued"]:
        await connection.execute(sql.deliveries.notify)
    if row["waits"]:
        await notify(connection, network)


async def waiting(connection: DatabaseConnection, network: str) -> tuple[list[FinalityTag], int]:
    """Return the finality tags that events wait for, and the last block written."""
    rows = await connection.fetch(sql.events.waiting, network)
    return [row["finality"] for row in rows], max((row["head"] for row in rows), default=0)


async def release_final(connection: DatabaseConnection, network: str, tag: FinalityTag, block: int) -> None:
    """Release events that waited for a block up to this one to reach the finality tag."""
    if await connection.fetchval(sql.events.release_final, network, tag, block):
        await connection.execute(sql.deliveries.notify)


async def list_lacking_metadata(
    connection: DatabaseConnection, network: str, *, but: Sequence[str], limit: int
) -> list[str]:
    """Return accounts with events that lack NFT metadata, except the given ones."""
    rows = await connection.fetch(sql.events.list_lacking_metadata, network, but, limit)
    return [row["account_id"] for row in rows]


async def list_incomplete(
    connection: DatabaseConnection,
    network: str,
    *,
    metadata: bool,
    after: EventCursor,
    limit: int,
    account: str | None = None,
) -> list[IncompleteEvent]:
    """Return incomplete events of one account, or of all, after a position, oldest first.

    `metadata` selects either those that lack NFT metadata, which may take long, or all others.
    """
    rows = await connection.fetch(sql.events.list_incomplete, network, metadata, *after, limit, account)
    return [
        IncompleteEvent(
            row["id"],
            row["day"],
            row["type"],
            row["block"],
            row["block_hash"],
            row["body"],
            orjson.loads(row["lacks"]),
            (row["created_at"], row["id"]),
        )
        for row in rows
    ]


async def complete(
    connection: DatabaseConnection, bodies: Sequence[tuple[IncompleteEvent, bytes]], *, dropped: Sequence[str]
) -> None:
    """Store completed bodies, and drop events that turned out not to have happened."""
    columns = [(event.id, body, event.day) for event, body in bodies]
    if dropped:
        await connection.execute(sql.events.drop_events, dropped)
    if bodies and await connection.fetchval(sql.events.complete, *map(list, zip(*columns, strict=True))):
        await connection.execute(sql.deliveries.notify)


async def withdraw(connection: DatabaseConnection, network: str, above: int) -> list[WithdrawnEvent]:
    """Withdraw the events of removed blocks: delete the unsent ones and return those that may have been sent."""
    await connection.execute(sql.trace_jobs.drop, network, above)
    await connection.execute(sql.events.drop_unsent, network, above)
    rows = await connection.fetch(sql.events.take_back, network, above)
    return [WithdrawnEvent(row["id"], row["webhook_id"], row["body"]) for row in rows]


async def reset(connection: DatabaseConnection, network: str) -> None:
    """Delete the network's trace jobs and unsent events."""
    await connection.execute(sql.trace_jobs.drop, network, -1)
    await connection.execute(sql.events.delete_unready, network)


async def notify(connection: DatabaseConnection, network: str) -> None:
    """Wake the process that completes events when the transaction commits."""
    await connection.execute(sql.events.notify_events, network)


async def add_test(
    connection: DatabaseConnection, *, event_id: str, webhook: str, network: str, named: str, body: bytes
) -> None:
    """Add a test event with a delivery that is due immediately."""
    await connection.execute(sql.events.add_test, event_id, webhook, network, named, body)


# Watching of mempools

# How often a process confirms that it watches a mempool.
CONFIRM_S = 5.0


async def set_mempool_watch(connection: DatabaseConnection, network: str, version: int | None) -> None:
    """Record the version of the webhooks for which the mempool is watched; None if it is not."""
    if version is None:
        await connection.execute(sql.events.end_mempool_watch, network)
    else:
        await connection.execute(sql.events.set_mempool_watch, network, version)


# Transactions that may be mined already


async def lookups(connection: DatabaseConnection, network: str, *, limit: int, offset: int) -> list[MinedLookup]:
    rows = await connection.fetch(sql.events.list_lookups, network, limit, offset)
    return [MinedLookup(row["webhook_id"], row["tx_hash"], row["age_s"]) for row in rows]


async def end_lookups(connection: DatabaseConnection, ended: Sequence[MinedLookup]) -> None:
    await connection.execute(
        sql.events.end_lookups, [each.webhook for each in ended], [each.transaction for each in ended]
    )


async def followed_block(connection: DatabaseConnection, network: str, number: int) -> tuple[int, bytes | None] | None:
    """Return the last block written and the hash of block `number`, which is None if it is too old to be kept."""
    row = await connection.fetchrow(sql.events.followed_block, network, number)
    return None if row is None else (row["head"], row["hash"])
