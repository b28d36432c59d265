"""Smart wallets in Postgres: whose they are, and where they were deployed.

A wallet is its lineage's, so a rotated key keeps it. Where it is on the chain is the same for all who hold its address. Those
who follow the chain pass their own connection: what they write belongs together with their cursor.
"""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import asyncpg

from proxy.core.paging import Page
from proxy.store import sql
from proxy.store.pool import DatabaseConnection, Pool

WalletOutcome = Literal["new", "known", "full"]


@dataclass(frozen=True, slots=True)
class Deployment:
    """`at`: the block's time, where it is known."""

    address: bytes
    transaction: bytes
    block: int
    block_hash: bytes
    at: datetime.datetime | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Wallet:
    network: str
    address: bytes
    owner: bytes
    version: str
    factory: bytes
    created_at: datetime.datetime
    deployed_at: datetime.datetime | None = None
    deploy_tx: bytes | None = None
    deploy_block: int | None = None
    deploy_block_hash: bytes | None = None


class WalletStore:
    def __init__(self, pool: Pool) -> None:
        self._pool = pool

    def __repr__(self) -> str:
        return f"<WalletStore {self._pool!r}>"

    async def create(
        self, *, account: str, lineage: str, wallet: Wallet, salt: int, most: int
    ) -> tuple[WalletOutcome, Wallet | None]:
        """The wallet that is there now; None where the account may have no more."""
        async with self._pool.connection() as connection, connection.transaction():
            outcome: WalletOutcome = await connection.fetchval(
                sql.wallets.create_wallet, account, lineage, wallet.network, wallet.address, wallet.owner,
                salt.to_bytes(32, "big"), wallet.version, wallet.factory, most,
            )  # fmt: skip
            row = await connection.fetchrow(sql.wallets.read_wallet, lineage, wallet.network, wallet.address)
        return outcome, None if row is None else _wallet(row)

    async def find(self, lineage: str, address: bytes) -> list[Wallet]:
        """The lineage's wallets at this address, one for each network."""
        async with self._pool.connection() as connection:
            return [_wallet(row) for row in await connection.fetch(sql.wallets.find_wallets, lineage, address)]

    async def page(self, lineage: str, page: Page, *, network: str | None = None) -> tuple[list[Wallet], int]:
        """The newest first, and how many there are in all."""
        async with self._pool.connection() as connection:
            total = await connection.fetchval(sql.wallets.count_wallets, lineage, network)
            rows = []
            if page.offset < total:
                rows = await connection.fetch(sql.wallets.list_wallets, lineage, network, page.limit, page.offset)
        return [_wallet(row) for row in rows], int(total)

    async def found(self, network: str, deployment: Deployment) -> None:
        """A reader has seen on the chain what the follower has not told yet."""
        async with self._pool.connection() as connection:
            await mark_deployed(connection, network, [deployment])

    async def lost(self, wallet: Wallet) -> None:
        """A reader has seen that the block which deployed it is not on the chain any more."""
        async with self._pool.connection() as connection:
            await connection.execute(
                sql.wallets.unmark_deployed, wallet.network, wallet.address, wallet.deploy_block_hash
            )


# For those who follow the chain


async def mark_deployed(connection: DatabaseConnection, network: str, found: Sequence[Deployment]) -> None:
    columns = zip(*((d.address, d.transaction, d.block, d.block_hash, d.at) for d in found), strict=True)
    await connection.execute(sql.wallets.mark_deployed, network, *map(list, columns))


async def keep_only(
    connection: DatabaseConnection, network: str, born: Sequence[bytes], *, blocks: tuple[int, int]
) -> None:
    """No other wallet was deployed in these blocks, whatever a reader has seen in those that stood there before."""
    await connection.execute(sql.wallets.unmark_absent, network, *blocks, list(born))


async def take_back(connection: DatabaseConnection, network: str, above: int) -> None:
    """Blocks above this one are gone, and so is what they deployed."""
    await connection.execute(sql.wallets.take_back_deployments, network, above)


def _wallet(row: asyncpg.Record) -> Wallet:
    return Wallet(
        network=row["network"],
        address=row["address"],
        owner=row["owner"],
        version=row["version"],
        factory=row["factory"],
        created_at=row["created_at"],
        deployed_at=row["deployed_at"],
        deploy_tx=row["deploy_tx"],
        deploy_block=row["deploy_block"],
        deploy_block_hash=row["deploy_block_hash"],
    )
