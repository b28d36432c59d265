"""The ledger of gas policies in Postgres: reserved, spent and remaining amounts.

Every step is one statement that succeeds or fails as a whole. Its rules are in the schema's functions, which lock the policy
first. A reservation is stored together with the signed data, so a crash afterwards loses nothing; an unused reservation is
released after it expires. Amounts are integers in pico-dollars.
"""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from proxy.core.paging import Page
from proxy.store.postgres import sql
from proxy.store.postgres.pool import PATIENT_S, DatabaseConnection, Pool

# How long a claim keeps other workers from checking the same reservation.
CLAIM_S = 10.0
CLAIMED_AT_ONCE = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class ReserveRequest:
    """A signed operation for which budget is requested. The signature is returned to the caller only if granted.

    `digest` identifies the operation regardless of its validity times; `op_hash` is the EntryPoint's hash of exactly what was
    signed. An existing signature for the same digest is reused if it is valid until `fresh_until` or longer. `block`: the
    operation cannot be in this block or an earlier one. `account_most`: the account's daily limit over all its policies, or
    None for no limit.
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


# absent: there is no such policy. used: an operation with this nonce was sponsored and included. The others name the limit
# that refuses the operation.
ReserveRefusal = Literal[
    "absent",
    "used",
    "max_total_usd",
    "max_per_user_usd",
    "max_per_user_per_day",
    "sponsored_usd_per_day",
    "rate_limit",
]
# granted: reserved. same: an existing signature is reused. stale: the policy has a newer revision. twice: this exact
# operation hash was signed before, so it must be signed with another validity time.
ReserveKind = Literal["granted", "same", "stale", "twice"] | ReserveRefusal


@dataclass(frozen=True, slots=True)
class ReserveOutcome:
    """`left`: what remains of the limit that refuses; for rate_limit, the seconds until the next operation is allowed."""

    kind: ReserveKind
    left: int = 0
    data: bytes = b""
    worst: int = 0
    valid_until: int = 0


@dataclass(frozen=True, slots=True)
class LandedOperation:
    """An operation on the chain. An entry point, sender and nonce identify at most one."""

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
    """A reservation that can be settled against final blocks."""

    id: int
    state: Literal["open", "spent"]
    entry_point: bytes
    sender: bytes
    nonce: int
    since_block: int
    hashes: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class LimitMeter:
    """`used`: the amount that currently counts towards the limit."""

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
                sql.ledger.reserve,
                wanted.policy,
                wanted.revision,
                wanted.network,
                wanted.entry_point,
                wanted.sender,
                wanted.nonce,
                wanted.digest,
                wanted.op_hash,
                wanted.data,
                wanted.worst,
                wanted.price,
                wanted.valid_until,
                wanted.fresh_until,
                wanted.block,
                wanted.at,
                wanted.account_most,
            )
        assert row is not None
        return ReserveOutcome(
            row["outcome"],
            int(row["remains"] or 0),
            row["data"] or b"",
            int(row["worst"] or 0),
            row["valid_until"] or 0,
        )

    # Settlement

    async def unsettled_networks(self) -> list[str]:
        async with self._pool.connection(within_s=PATIENT_S) as connection:
            return [row[0] for row in await connection.fetch(sql.ledger.list_unsettled_networks)]

    async def claim_due(
        self, network: str, *, final_block: int, final_time: int, at: datetime.datetime
    ) -> list[DueReservation]:
        async with self._pool.connection(within_s=PATIENT_S) as connection:
            rows = await connection.fetch(
                sql.ledger.claim_due, network, final_block, final_time, at, CLAIM_S, CLAIMED_AT_ONCE
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
        """Settle one operation and return the reservation that pays for it, if there is one."""
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

    # Reads for owners

    async def totals(self, policies: Sequence[str], day: datetime.date) -> dict[str, LimitMeter]:
        """The lifetime totals of each policy."""
        async with self._pool.connection() as connection:
            rows = await connection.fetch(sql.ledger.read_totals, policies, day)
        meters = {row["id"]: _meter(row) for row in rows}
        return {policy: meters.get(policy, LimitMeter(0, 0, 0)) for policy in policies}

    async def total(self, policy: str, day: datetime.date) -> LimitMeter:
        return (await self.totals([policy], day))[policy]

    async def days(self, policy: str, *, limit: int) -> list[tuple[datetime.date, LimitMeter]]:
        async with self._pool.connection() as connection:
            rows = await connection.fetch(sql.ledger.list_days, policy, limit)
        return [(row["day"], _meter(row)) for row in rows]

    async def users(self, policy: str, day: datetime.date, page: Page) -> tuple[list[UserMeter], int]:
        async with self._pool.connection() as connection:
            rows = await connection.fetch(sql.ledger.list_users, policy, day, page.limit, page.offset)
            total = await connection.fetchval(sql.ledger.count_users, policy)
        return [UserMeter(row["sender"], _meter(row), row["operations_today"]) for row in rows], total


# Writes of the follower, in its transaction


async def settle(
    connection: DatabaseConnection, network: str, events: Sequence[LandedOperation], *, coin: int
) -> list[int | None]:
    """Settle operations and return the reservation that pays for each, if any. `coin`: one coin in its smallest units."""
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
    """Reopen reservations settled in blocks above this one, which were removed."""
    await connection.execute(sql.ledger.reopen_above, network, block)


async def reopen_unsettled(connection: DatabaseConnection, network: str) -> None:
    await connection.execute(sql.ledger.reopen_unsettled, network)


def _meter(row: Any) -> LimitMeter:
    return LimitMeter(
        int(row["reserved"] or 0), int(row["spent"] or 0), row["operations"] or 0, int(row.get("used") or 0)
    )
