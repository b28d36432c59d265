"""Smart wallets in Postgres: their owners and deployments.

A wallet belongs to a key's lineage, so it survives key rotation. Its deployment is the same for every lineage that has its
address. The follower passes its own connection, because deployments and cursor must change in one transaction.
"""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import asyncpg

from proxy.core.paging import Page
from proxy.store.postgres import sql
from proxy.store.postgres.pool import DatabaseConnection, Pool

WalletOutcome = Literal["new", "known", "full"]


@dataclass(frozen=True, slots=True)
class Deployment:
    """`at`: the block's time, if known."""

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
    salt: int
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
        self, *, account: str, lineage: str, wallet: Wallet, most: int
    ) -> tuple[WalletOutcome, Wallet | None]:
        """Create a wallet, or return the existing one; None if the account already has `most`."""
        async with self._pool.connection() as connection, connection.transaction():
            outcome: WalletOutcome = await connection.fetchval(
                sql.wallets.create_wallet,
                account,
                lineage,
                wallet.network,
                wallet.address,
                wallet.owner,
                wallet.salt.to_bytes(32, "big"),
                wallet.version,
                wallet.factory,
                most,
            )
            row = await connection.fetchrow(sql.wallets.read_wallet, lineage, wallet.network, wallet.address)
        return outcome, None if row is None else _wallet(row)

    async def find(self, lineage: str, address: bytes) -> list[Wallet]:
        """Return the lineage's wallets at this address, one per network."""
        async with self._pool.connection() as connection:
            return [_wallet(row) for row in await connection.fetch(sql.wallets.find_wallets, lineage, address)]

    async def version_of(self, network: str, address: bytes) -> str | None:
        """Return the version of the wallet at this address, whichever lineage created it; None if it is unknown."""
        async with self._pool.connection() as connection:
            version: str | None = await connection.fetchval(sql.wallets.wallet_version, network, address)
        return version

    async def page(
        self, lineage: str, page: Page, *, networks: Sequence[str] | None = None
    ) -> tuple[list[Wallet], int]:
        """Return a page of wallets, newest first, and their total number. `networks`: only those on one of these."""
        async with self._pool.connection() as connection:
            total = await connection.fetchval(sql.wallets.count_wallets, lineage, networks)
            rows = []
            if page.offset < total:
                rows = await connection.fetch(sql.wallets.list_wallets, lineage, networks, page.limit, page.offset)
        return [_wallet(row) for row in rows], int(total)

    async def mark_deployed(self, network: str, deployment: Deployment) -> None:
        """Record a deployment that a read found on the chain before the follower wrote it."""
        async with self._pool.connection() as connection:
            await mark_deployed(connection, network, [deployment])

    async def unmark_deployed(self, wallet: Wallet) -> None:
        """Clear a deployment after a read found that its block is no longer on the chain."""
        async with self._pool.connection() as connection:
            await connection.execute(
                sql.wallets.unmark_deployed, wallet.network, wallet.address, wallet.deploy_block_hash
            )


# Writes of the follower, in its transaction


async def mark_deployed(connection: DatabaseConnection, network: str, deployments: Sequence[Deployment]) -> None:
    columns = zip(*((d.address, d.transaction, d.block, d.block_hash, d.at) for d in deployments), strict=True)
    await connection.execute(sql.wallets.mark_deployed, network, *map(list, columns))


async def keep_only(
    connection: DatabaseConnection, network: str, born: Sequence[bytes], *, blocks: tuple[int, int]
) -> None:
    """Clear deployments recorded in these blocks except the given ones: reads may have recorded some from removed blocks."""
    await connection.execute(sql.wallets.unmark_absent, network, *blocks, list(born))


async def take_back(connection: DatabaseConnection, network: str, above: int) -> None:
    """Clear deployments in removed blocks, those above this one."""
    await connection.execute(sql.wallets.take_back_deployments, network, above)


def _wallet(row: asyncpg.Record) -> Wallet:
    return Wallet(
        network=row["network"],
        address=row["address"],
        owner=row["owner"],
        salt=int.from_bytes(row["salt"], "big"),
        version=row["version"],
        factory=row["factory"],
        created_at=row["created_at"],
        deployed_at=row["deployed_at"],
        deploy_tx=row["deploy_tx"],
        deploy_block=row["deploy_block"],
        deploy_block_hash=row["deploy_block_hash"],
    )
