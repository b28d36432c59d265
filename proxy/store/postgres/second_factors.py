"""Second factors of accounts in Postgres: the secret of an authenticator app, encrypted, and the digests of recovery codes."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass

from proxy.errors import Unavailable
from proxy.store.postgres import peppers, sql
from proxy.store.postgres.pool import Pool
from proxy.store.postgres.secrets import SealBroken, Vault

log = logging.getLogger("penstock.sessions")


@dataclass(frozen=True, slots=True)
class StoredFactor:
    """An encrypted secret, and whether sign-in asks for its codes."""

    sealed: bytes
    is_on: bool


class SecondFactorStore:
    def __init__(self, pool: Pool, vault: Vault) -> None:
        self._pool = pool
        self._vault = vault

    def __repr__(self) -> str:
        return f"<SecondFactorStore {self._pool!r}>"

    async def begin(self, account: str, secret: bytes) -> bool:
        """Store a secret that is not in use yet. False if another one is."""
        sealed, rotated = self._vault.seal(account, secret), self._vault.seal_for_previous(account, secret)
        async with self._pool.connection() as connection, connection.transaction():
            stored = await peppers.for_every_host(connection, sealed, rotated)
            return await connection.fetchval(sql.second_factors.begin, account, stored) is not None

    async def read(self, account: str) -> StoredFactor | None:
        async with self._pool.connection() as connection:
            row = await connection.fetchrow(sql.second_factors.read, account)
        return None if row is None else StoredFactor(row["sealed"], is_on=row["is_on"])

    def secret_of(self, account: str, factor: StoredFactor) -> bytes:
        try:
            return self._vault.open(account, factor.sealed)
        except SealBroken as exc:
            log.error("second factor cannot be decrypted", extra={"account": account, "reason": str(exc)})
            raise Unavailable("the second factor of this account cannot be checked: ask the operators") from None

    async def confirm(self, account: str, factor: StoredFactor, step: int, recovery: Sequence[str]) -> bool:
        """Turn this factor on. False if another one was stored meanwhile."""
        digests = [_digest(account, code) for code in recovery]
        return await self._did(sql.second_factors.confirm, account, step, digests, factor.sealed)

    async def use_step(self, account: str, step: int) -> bool:
        return await self._did(sql.second_factors.use_step, account, step)

    async def use_recovery(self, account: str, code: str) -> bool:
        return await self._did(sql.second_factors.use_recovery, account, _digest(account, code))

    async def remove(self, account: str) -> bool:
        return await self._did(sql.second_factors.remove, account)

    async def _did(self, query: str, *values: object) -> bool:
        async with self._pool.connection() as connection:
            return await connection.fetchrow(query, *values) is not None


def _digest(account: str, code: str) -> bytes:
    """The codes are random and long enough that a plain digest cannot be reversed."""
    return hashlib.sha256(f"{account}\0{code}".encode()).digest()
