"""The pepper of a database, and its rotation.

Keys, sessions and sign-in links are stored as digests keyed with `keys.pepper`. With another pepper none of them is found:
every client gets a 401 from a service that looks healthy. The database therefore stores a check value of the pepper, and a
start with an unknown one is refused.

A rotation: set `keys.pepper` to a new value and `keys.previous_pepper` to the old one, and reload every host. A digest cannot
be computed without its key, so each key and admin token is moved to the new pepper when it is first used. Hosts with the old
settings keep working meanwhile: a key or token that was moved or created keeps its digest under the old pepper too, and
signing secrets, sessions and links are still stored under the old one. `penstock reseal` counts the keys that were not
used yet; with `--finish` it retires the old pepper and encrypts the signing secrets again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import asyncpg

from proxy.errors import StartError
from proxy.store.postgres import sql
from proxy.store.postgres.pool import DatabaseConnection
from proxy.store.postgres.secrets import RotatedSecret, SealBroken, Vault, check_value

# Secrets that are re-encrypted per statement.
AT_ONCE = 1_000
PepperState = Literal["known", "new"]


def judge(stored: Sequence[bytes], pepper: str, previous: str) -> PepperState:
    """Decide about a pepper; raise StartError if clients would be locked out. `stored`: check values, oldest first."""
    current = check_value(pepper)
    older = stored[: stored.index(current)] if current in stored else stored
    known = [check_value(previous)] if previous else []
    if missing := [each for each in older if each not in known]:
        raise StartError([_refusal(is_known=current in stored, is_unrelated=len(missing) == len(older))])
    return "known" if current in stored else "new"


def _refusal(*, is_known: bool, is_unrelated: bool) -> str:
    if is_known:
        return (
            "keys.previous_pepper: some API keys may still depend on the pepper before keys.pepper: set it, or run "
            "`penstock reseal --finish` with it to end the rotation"
        )
    if not is_unrelated:
        return (
            "keys.pepper: another rotation of the pepper has not ended: run `penstock reseal --finish` with the "
            "peppers of that rotation first"
        )
    return (
        "keys.pepper: is not the pepper of this database, so every API key would be refused: restore it, or set "
        "keys.previous_pepper to the old one to rotate it"
    )


async def check(connection: DatabaseConnection, pepper: str, previous: str) -> PepperState:
    """Read-only: whether the database knows the pepper. Raises StartError if it must not be used."""
    rows = await connection.fetch(sql.peppers.list_peppers)
    return judge([row["check_value"] for row in rows], pepper, previous)


async def admit(connection: DatabaseConnection, pepper: str, previous: str, upstream_ids: Mapping[str, str]) -> None:
    """Check the pepper and record a new one. `upstream_ids` maps the previous id of each upstream to its new one: an upstream
    that is out of service stays so."""
    if await check(connection, pepper, previous) == "known":
        return
    async with connection.transaction():
        await connection.execute(sql.peppers.lock_peppers)
        if await check(connection, pepper, previous) == "new":
            await connection.execute(sql.peppers.add_pepper, check_value(pepper))
            for query in (sql.peppers.copy_cordon, sql.peppers.copy_method_cordon, sql.peppers.copy_share):
                await connection.executemany(query, list(upstream_ids.items()))


async def check_vault(connection: DatabaseConnection, vault: Vault) -> None:
    """Raise StartError if the newest signing secret cannot be decrypted."""
    row = await connection.fetchrow(sql.peppers.newest_sealed_secret)
    try:
        if row is not None:
            vault.open(row["id"], row["secret"])
    except SealBroken:
        raise StartError(
            [
                "webhooks.secret_key: does not decrypt the signing secrets in this database, so no webhook could be "
                "delivered: restore its value (if it was empty, restore that)"
            ]
        ) from None


async def reseal(connection: DatabaseConnection, vault: Vault) -> tuple[int, list[str]]:
    """Encrypt all secrets of webhooks and second factors with the vault's current key. Returns how many were done, and the ids
    of those that cannot be decrypted, which stay unchanged. Secrets that have the current key already are left alone."""
    done, broken, last = 0, list[str](), ""
    while rows := await connection.fetch(sql.peppers.list_sealed_secrets, last, AT_ONCE):
        changes = []
        for row in rows:
            try:
                if not _is_current(vault, row):
                    changes.append((row["id"], row["secret"], row["old_secret"], *_resealed(vault, row)))
            except SealBroken:
                broken.append(row["id"])
        await connection.executemany(sql.peppers.reseal_secret, changes)
        done, last = done + len(changes), rows[-1]["id"]
    return done, broken


def _is_current(vault: Vault, row: asyncpg.Record) -> bool:
    sealed = (row["secret"],) if row["old_secret"] is None else (row["secret"], row["old_secret"])
    return all(vault.is_current(row["id"], each) for each in sealed)


def _resealed(vault: Vault, row: asyncpg.Record) -> tuple[bytes, bytes | None]:
    name, old = row["id"], row["old_secret"]
    secret = vault.seal(name, vault.open(name, row["secret"]))
    return secret, None if old is None else vault.seal(name, vault.open(name, old))


async def for_every_host(connection: DatabaseConnection, secret: bytes, rotated: RotatedSecret | None) -> bytes:
    """The secret under the oldest pepper in use, which every host has. The pepper stays in use until the transaction ends."""
    if rotated is None or await connection.fetchval(sql.peppers.hold_oldest_pepper) != rotated.pepper:
        return secret
    return rotated.sealed


async def count_unmoved(connection: DatabaseConnection, pepper: str) -> tuple[int, int]:
    """The numbers of API keys and admin tokens that only the previous pepper finds."""
    row = await connection.fetchrow(sql.peppers.count_unmoved, check_value(pepper))
    assert row is not None
    return row["keys"], row["tokens"]


async def finish(connection: DatabaseConnection, pepper: str, vault: Vault) -> None:
    """Retire every other pepper: keys that were not moved stop working. Secrets that hosts have sealed with the previous
    pepper until this moment are encrypted again; after it they use the current one."""
    async with connection.transaction():
        await connection.execute(sql.peppers.lock_peppers)
        # Waits for transactions that store such a secret: they hold the pepper's row.
        await connection.execute(sql.peppers.retire_other_peppers, check_value(pepper))
        await reseal(connection, vault)
        await connection.execute(sql.peppers.drop_previous_digests, check_value(pepper))
        await connection.execute(sql.peppers.drop_previous_token_digests, check_value(pepper))
