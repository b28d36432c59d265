"""Events in Postgres: written with the block that they are of, told when they are whole, taken back with the block.

Those who write pass their own connection: what they write belongs together with their cursor. Each of them holds the version of
the network's webhooks (`webhooks.version_of`), so that what is to be told, and what has to wait until a webhook is resumed, is
decided by how the webhook is, and stays so until the transaction is through.
"""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import orjson

from proxy.store import sql
from proxy.store.pool import DatabaseConnection

# Where an event stands in the order of all that lack something; and before the first.
EventCursor = tuple[datetime.datetime, str]
FIRST: EventCursor = (datetime.datetime.min.replace(year=1970, tzinfo=datetime.UTC), "")
# What a chain calls its blocks.
FinalityTag = Literal["safe", "finalized"]


@dataclass(frozen=True, slots=True, kw_only=True)
class NewEvent:
    """`lacks`: what must be found out before it is told. `after_block`: the block that must be there first; with `finality`,
    that must be so first, by the chain's own word."""

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


@dataclass(frozen=True, slots=True)
class IncompleteEvent:
    id: str
    type: str
    block: int | None
    block_hash: bytes | None
    body: bytes
    lacks: dict[str, Any]
    place: EventCursor


@dataclass(frozen=True, slots=True)
class WithdrawnEvent:
    """An event that somebody may have been told of, and that is not true any more."""

    id: str
    webhook: str
    body: bytes


@dataclass(frozen=True, slots=True)
class TraceJob:
    """A block whose calls are to be looked into."""

    block: int
    hash: bytes
    tries: int


async def add(connection: DatabaseConnection, network: str, new: Sequence[NewEvent]) -> set[str]:
    """Which of them were not there. Whoever has to be told of them is."""
    if not new:
        return set()
    columns = zip(
        *(
            (
                e.id, e.webhook, e.type, e.block, e.block_hash, e.body, _json(e.lacks), e.after_block, e.finality,
                e.takes_back,
            )
            for e in new
        ),
        strict=True,
    )  # fmt: skip
    rows = await connection.fetch(sql.events.add_events, network, *map(list, columns))
    if any(row["ready"] for row in rows):
        await connection.execute(sql.deliveries.notify)
    if not all(row["ready"] for row in rows):
        await tell(connection, network)
    return {row["id"] for row in rows}


async def taken_back(connection: DatabaseConnection, ids: Sequence[str]) -> set[str]:
    """Which of these were there before, and are not any more."""
    return {row["id"] for row in await connection.fetch(sql.events.taken_back, ids)}


async def release(connection: DatabaseConnection, network: str, block: int) -> None:
    """What has waited for this block, or one before it. Who waits for the chain's word on one is told that there is another."""
    row = await connection.fetchrow(sql.events.release, network, block)
    assert row is not None
    if row["queued"]:
        await connection.execute(sql.deliveries.notify)
    if row["waits"]:
        await tell(connection, network)


async def waiting(connection: DatabaseConnection, network: str) -> tuple[list[FinalityTag], int]:
    """What words of the chain's own are waited for, and the last block that is written."""
    rows = await connection.fetch(sql.events.waiting, network)
    return [row["finality"] for row in rows], max((row["head"] for row in rows), default=0)


async def release_final(connection: DatabaseConnection, network: str, word: FinalityTag, block: int) -> None:
    """What has waited until this block, or one before it, is so."""
    if await connection.fetchval(sql.events.release_final, network, word, block):
        await connection.execute(sql.deliveries.notify)


async def lacking(
    connection: DatabaseConnection, network: str, *, metadata: bool, after: EventCursor, limit: int
) -> list[IncompleteEvent]:
    """The oldest first, from this place on. `metadata`: those that lack an NFT's, which may take long, or the others."""
    rows = await connection.fetch(sql.events.list_incomplete, network, metadata, *after, limit)
    return [
        IncompleteEvent(
            row["id"], row["type"], row["block"], row["block_hash"], row["body"], orjson.loads(row["lacks"]),
            (row["created_at"], row["id"]),
        )
        for row in rows
    ]  # fmt: skip


async def complete(connection: DatabaseConnection, bodies: Mapping[str, bytes], *, dropped: Sequence[str]) -> None:
    """Bodies that lack nothing any more; and events that turned out to be none."""
    if dropped:
        await connection.execute(sql.events.drop_events, dropped)
    if bodies and await connection.fetchval(sql.events.complete, [*bodies], [*bodies.values()]):
        await connection.execute(sql.deliveries.notify)


async def take_back(connection: DatabaseConnection, network: str, above: int) -> list[WithdrawnEvent]:
    """Blocks above this one are gone: what nobody was told of is forgotten, the rest is returned."""
    await connection.execute(sql.events.drop_jobs, network, above)
    await connection.execute(sql.events.drop_unsent, network, above)
    rows = await connection.fetch(sql.events.take_back, network, above)
    return [WithdrawnEvent(row["id"], row["webhook_id"], row["body"]) for row in rows]


async def forget(connection: DatabaseConnection, network: str) -> None:
    await connection.execute(sql.events.drop_jobs, network, -1)
    await connection.execute(sql.events.forget_unready, network)


async def tell(connection: DatabaseConnection, network: str) -> None:
    """Whoever completes events wakes up."""
    await connection.execute(sql.events.notify_events, network)


async def add_test(
    connection: DatabaseConnection, *, event_id: str, webhook: str, network: str, named: str, body: bytes
) -> None:
    await connection.execute(sql.events.add_test, event_id, webhook, network, named, body)


# Blocks whose calls are to be looked into


async def add_jobs(connection: DatabaseConnection, network: str, blocks: Sequence[tuple[int, bytes]]) -> None:
    await connection.execute(sql.events.add_jobs, network, [each[0] for each in blocks], [each[1] for each in blocks])
    await tell(connection, network)


async def jobs(connection: DatabaseConnection, network: str, *, limit: int) -> list[TraceJob]:
    rows = await connection.fetch(sql.events.list_jobs, network, limit)
    return [TraceJob(row["block"], row["block_hash"], row["tries"]) for row in rows]


async def end_job(connection: DatabaseConnection, network: str, job: TraceJob) -> bool:
    """Whether its block is still there: then nobody takes it back before this transaction is through."""
    return await connection.fetchval(sql.events.end_job, network, job.block, job.hash) is not None


async def count_try(connection: DatabaseConnection, network: str, job: TraceJob) -> None:
    await connection.execute(sql.events.count_try, network, job.block, job.hash)


def _json(lacks: Mapping[str, Any] | None) -> str | None:
    return orjson.dumps(lacks).decode() if lacks else None
