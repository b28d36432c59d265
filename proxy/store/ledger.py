"""The ledger of gas policies in Postgres: what is reserved, what was spent, and what is left.

Every step is one statement that either happens as a whole or not at all; its rules are in the schema's functions, which lock
the policy first. A reservation is written together with what was signed for it: a crash after it loses nothing, and what was
reserved and never used is free again once it has expired. Amounts are whole pico-dollars.
"""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from proxy.core.paging import Page
from proxy.store import sql
from proxy.store.pool import PATIENT_S, DatabaseConnection, Pool

# How long a claim on a reservation keeps other workers from looking at it.
CLAIM_S = 10.0
CLAIMED_AT_ONCE = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class ReserveRequest:
    """An operation that is signed, and may be given out if there is room for it.

    `digest` names the operation whatever the times; `op_hash` is the EntryPoint's, of exactly what was signed. A signature for
    the same that is good until `fresh_until` or longer is given out again. `block`: none up to it can have the operation.
    `account_most`: what the account may have sponsored in a day by all its policies; None for any amount.
    """

    policy: str
    revision: int
    network: str
    entry_point: bytes
    sender: bytes
    nonce: int
    digest: bytes
    op_hash: bytes
    data: bytes
    worst: int
    price: int
    valid_until: int
    fresh_until: int
    block: int
    at: datetime.datetime
    account_most: int | None = None


@dataclass(frozen=True, slots=True)
class ReserveOutcome:
    """`kind`: granted, same, absent, stale, used, twice, or the rule that refuses, of which `left` is left.

    For rate_limit that is the seconds until there is room again.
    """

    kind: str
    left: int = 0
    data: bytes = b""
    worst: int = 0
    valid_until: int = 0


@dataclass(frozen=True, slots=True)
class LandedOperation:
    """An operation on the chain: there is one at most for a nonce of a sender at an entry point."""

    entry_point: bytes
    sender: bytes
    nonce: int
    op_hash: bytes
    cost_wei: int
    block: int
    block_hash: bytes
    transaction: bytes


@dataclass(frozen=True, slots=True)
class DueReservation:
    """A reservation about which the chain has the last word by now."""

    id: int
    state: Literal["open", "spent"]
    entry_point: bytes
    sender: bytes
    nonce: int
    since_block: int
    hashes: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class LimitMeter:
    """`used`: what counts towards the limit at the moment."""

    reserved: int
    spent: int
    operations: int
    used: int = 0


@dataclass(frozen=True, slots=True)
class UserMeter:
    sender: bytes
    meter: LimitMeter
    operations_today: int


class LedgerStore:
    def __init__(self, pool: Pool) -> None:
        self._pool = pool

    def __repr__(self) -> str:
        return f"<LedgerStore {self._pool!r}>"

    async def reserve(self, wanted: ReserveRequest) -> ReserveOutcome:
        async with self._pool.connection() as connection:
            row = await connection.fetchrow(
                sql.ledger.reserve, wanted.policy, wanted.revision, wanted.network, wanted.entry_point, wanted.sender,
                wanted.nonce, wanted.digest, wanted.op_hash, wanted.data, wanted.worst, wanted.price, wanted.valid_until,
                wanted.fresh_until, wanted.block, wanted.at, wanted.account_most,
            )  # fmt: skip
        assert row is not None
        return ReserveOutcome(
            row["outcome"],
            int(row["remains"] or 0),
            row["data"] or b"",
            int(row["worst"] or 0),
            row["valid_until"] or 0,
        )

    # What has the last word

    async def unsettled_networks(self) -> list[str]:
        async with self._pool.connection(within_s=PATIENT_S) as connection:
            return [row[0] for row in await connection.fetch(sql.ledger.list_unsettled_networks)]

    async def claim_due(
        self, network: str, *, final_block: int, final_time: int, at: datetime.datetime, claim_s: float = CLAIM_S
    ) -> list[DueReservation]:
        async with self._pool.connection(within_s=PATIENT_S) as connection:
            rows = await connection.fetch(
                sql.ledger.claim_due, network, final_block, final_time, at, claim_s, CLAIMED_AT_ONCE
            )
        return [
            DueReservation(
                row["id"],
                row["state"],
                row["entry_point"],
                row["sender"],
                int(row["nonce"]),
                row["since_block"],
                tuple(row["hashes"]),
            )
            for row in rows
        ]

    async def settle(self, network: str, event: LandedOperation, *, coin: int) -> int | None:
        """The reservation that pays for it."""
        async with self._pool.connection(within_s=PATIENT_S) as connection:
            [paying] = await settle(connection, network, [event], coin=coin)
        return paying

    async def reopen(self, reservation: int) -> None:
        await self._execute(sql.ledger.reopen, reservation)

    async def close(self, reservation: int, *, final_block: int) -> None:
        await self._execute(sql.ledger.close, reservation, final_block)

    async def release(self, reservation: int, *, final_time: int) -> None:
        await self._execute(sql.ledger.release, reservation, final_time)

    async def _execute(self, query: str, *values: Any) -> None:
        async with self._pool.connection(within_s=PATIENT_S) as connection:
            await connection.execute(query, *values)

    # What owners see

    async def total(self, policy: str, day: datetime.date) -> LimitMeter:
        async with self._pool.connection() as connection:
            row = await connection.fetchrow(sql.ledger.read_total, policy, day)
        return LimitMeter(0, 0, 0) if row is None else _meter(row)

    async def days(self, policy: str, *, limit: int) -> list[tuple[datetime.date, LimitMeter]]:
        async with self._pool.connection() as connection:
            rows = await connection.fetch(sql.ledger.list_days, policy, limit)
        return [(row["day"], _meter(row)) for row in rows]

    async def users(self, policy: str, day: datetime.date, page: Page) -> tuple[list[UserMeter], int]:
        async with self._pool.connection() as connection:
            rows = await connection.fetch(sql.ledger.list_users, policy, day, page.limit, page.offset)
            total = await connection.fetchval(sql.ledger.count_users, policy)
        return [UserMeter(row["sender"], _meter(row), row["operations_today"]) for row in rows], total


# For those who follow the chain, in their own transaction


async def settle(
    connection: DatabaseConnection, network: str, events: Sequence[LandedOperation], *, coin: int
) -> list[int | None]:
    """For each the reservation that pays for it, if there is one. `coin`: one whole coin in its smallest units."""
    columns = zip(
        *(
            (e.entry_point, e.sender, e.nonce, e.op_hash, e.cost_wei, e.block, e.block_hash, e.transaction)
            for e in events
        ),
        strict=True,
    )
    rows = await connection.fetch(sql.ledger.settle, network, coin, *map(list, columns))
    return [row[0] for row in rows]


async def reopen_above(connection: DatabaseConnection, network: str, block: int) -> None:
    """Blocks above this one are gone."""
    await connection.execute(sql.ledger.reopen_above, network, block)


async def reopen_unsettled(connection: DatabaseConnection, network: str) -> None:
    await connection.execute(sql.ledger.reopen_unsettled, network)


def _meter(row: Any) -> LimitMeter:
    return LimitMeter(
        int(row["reserved"] or 0), int(row["spent"] or 0), row["operations"] or 0, int(row.get("used") or 0)
    )
