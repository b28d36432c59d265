"""The pepper of a database, and its rotation.

Keys, sessions and sign-in links are stored as digests keyed with `keys.pepper`. With another pepper none of them is found:
every client gets a 401 from a service that looks healthy. The database therefore stores a check value of the pepper, and a
start with an unknown one is refused.

A rotation: set `keys.pepper` to a new value and `keys.previous_pepper` to the old one, and reload every host. A digest cannot
be computed without its key, so each key is moved to the new pepper when it is first used. Hosts with the old settings keep
working meanwhile: a key that was moved or created keeps its digest under the old pepper too. `python -m proxy reseal` then
re-encrypts signing secrets that depend on the old pepper and counts the keys that were not used yet; with `--finish` it retires
the old pepper.
"""

from __future__ import annotations

import hmac
from collections.abc import Mapping, Sequence
from typing import Literal

import asyncpg

from proxy.errors import StartError
from proxy.store import sql
from proxy.store.pool import DatabaseConnection
from proxy.store.secrets import SealBroken, Vault

# Secrets that are re-encrypted per statement.
AT_ONCE = 1_000
_CHECKED = b"penstock pepper check"

PepperState = Literal["known", "new"]


def check_value(pepper: str) -> bytes:
    """A value that identifies the pepper. The pepper cannot be derived from it, and no digest of a key equals it."""
    return hmac.digest(pepper.encode(), _CHECKED, "sha256")


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
            "`python -m proxy reseal --finish` with it to end the rotation"
        )
    if not is_unrelated:
        return (
            "keys.pepper: another rotation of the pepper has not ended: run `python -m proxy reseal --finish` with the "
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


async def admit(connection: DatabaseConnection, pepper: str, previous: str, marks: Mapping[str, str]) -> None:
    """Check the pepper and record a new one. `marks` maps the previous mark of each upstream to its new one: an upstream
    that is out of service stays so."""
    if await check(connection, pepper, previous) == "known":
        return
    async with connection.transaction():
        await connection.execute(sql.peppers.lock_peppers)
        if await check(connection, pepper, previous) == "new":
            await connection.execute(sql.peppers.add_pepper, check_value(pepper))
            await connection.executemany(sql.peppers.copy_cordon, list(marks.items()))


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
    """Encrypt all signing secrets with the vault's current key. Returns how many webhooks were done, and the ids of those
    whose secret cannot be decrypted, which stay unchanged."""
    done, broken, last = 0, list[str](), ""
    while rows := await connection.fetch(sql.peppers.list_sealed_secrets, last, AT_ONCE):
        changes = []
        for row in rows:
            try:
                changes.append((row["id"], row["secret"], row["old_secret"], *_resealed(vault, row)))
            except SealBroken:
                broken.append(row["id"])
        await connection.executemany(sql.peppers.reseal_secret, changes)
        done, last = done + len(changes), rows[-1]["id"]
    return done, broken


def _resealed(vault: Vault, row: asyncpg.Record) -> tuple[bytes, bytes | None]:
    name, old = row["id"], row["old_secret"]
    secret = vault.seal(name, vault.open(name, row["secret"]))
    return secret, None if old is None else vault.seal(name, vault.open(name, old))


async def count_unmoved_keys(connection: DatabaseConnection, pepper: str) -> int:
    return int(await connection.fetchval(sql.peppers.count_unmoved_keys, check_value(pepper)))


async def finish(connection: DatabaseConnection, pepper: str) -> None:
    """Retire every other pepper: keys that were not moved stop working."""
    async with connection.transaction():
        await connection.execute(sql.peppers.lock_peppers)
        await connection.execute(sql.peppers.drop_previous_digests, check_value(pepper))
        await connection.execute(sql.peppers.retire_other_peppers, check_value(pepper))
