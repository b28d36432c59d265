"""Transactions that are sent to private relays, in Postgres: whose they are, and when they become public.

A row is written before the transaction is sent, so that its sender finds it through every worker and host. The signed
transaction itself is kept only while its sender wants it to be sent to the public mempool later.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from proxy.store.postgres import sql
from proxy.store.postgres.pool import PATIENT_S, Pool

# How the wait of a transaction to become public ends.
WaitEnd = Literal["public", "done"]


@dataclass(frozen=True, slots=True)
class PrivateTransaction:
    """One transaction of one account."""

    network: str
    hash: bytes
    account: str

    @property
    def name(self) -> str:
        return f"0x{self.hash.hex()}"


@dataclass(frozen=True, slots=True)
class DueTransaction:
    """One that has to be sent to the public mempool."""

    sent: PrivateTransaction
    raw: bytes


class PrivateTransactionStore:
    def __init__(self, pool: Pool) -> None:
        self._pool = pool

    def __repr__(self) -> str:
        return f"<PrivateTransactionStore {self._pool!r}>"

    async def record(
        self, sent: PrivateTransaction, *, key_id: str, raw: bytes | None, public_after: int | None
    ) -> None:
        """`raw` and `public_after`: only for a transaction that becomes public."""
        await self._execute(sql.private_transactions.record_transaction, sent, key_id, raw, public_after)

    async def mark_accepted(self, sent: PrivateTransaction) -> None:
        await self._execute(sql.private_transactions.mark_accepted, sent)

    async def mark_refused(self, sent: PrivateTransaction) -> None:
        await self._execute(sql.private_transactions.mark_refused, sent)

    async def end_wait(self, sent: PrivateTransaction, outcome: WaitEnd) -> None:
        await self._execute(sql.private_transactions.end_wait, sent, outcome)

    async def postpone(self, sent: PrivateTransaction, block: int) -> None:
        await self._execute(sql.private_transactions.postpone, sent, block)

    async def cancel(self, sent: PrivateTransaction) -> bool:
        """Give up the transaction. Returns whether relays may have it."""
        async with self._pool.connection() as connection:
            row = await connection.fetchrow(
                sql.private_transactions.cancel_transaction, sent.network, sent.hash, sent.account
            )
        return row is not None

    async def newest_of(self, network: str, account: str, *, limit: int) -> frozenset[bytes]:
        """The hashes of the account's newest transactions which relays may still have."""
        async with self._pool.connection() as connection:
            rows = await connection.fetch(sql.private_transactions.newest_of_account, network, account, limit)
        return frozenset(row["hash"] for row in rows)

    async def is_recorded(self, sent: PrivateTransaction) -> bool:
        """Whether relays may still have the account's transaction."""
        async with self._pool.connection() as connection:
            row = await connection.fetchrow(
                sql.private_transactions.read_transaction, sent.network, sent.hash, sent.account
            )
        return row is not None

    async def due(self, network: str, block: int, *, at_once: int) -> list[DueTransaction]:
        async with self._pool.connection(within_s=PATIENT_S) as connection:
            rows = await connection.fetch(sql.private_transactions.due_transactions, network, block, at_once)
        return [
            DueTransaction(PrivateTransaction(network, row["hash"], row["account_id"]), row["raw"] or b"")
            for row in rows
        ]

    async def purge(self, *, keep_days: int, at_once: int = 1_000) -> bool:
        """Delete some old rows; return whether there may be more."""
        async with self._pool.connection(within_s=PATIENT_S) as connection:
            status = await connection.execute(sql.private_transactions.purge, keep_days, at_once)
        return int(status.rsplit(" ", 1)[1]) >= at_once

    async def _execute(self, query: str, sent: PrivateTransaction, *values: object) -> None:
        async with self._pool.connection() as connection:
            await connection.execute(query, sent.network, sent.hash, sent.account, *values)
