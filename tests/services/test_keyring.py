"""The keyring of one worker: changes arrive by notice, and by polling if a notice is missed."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from proxy.core.access import Key, digest
from proxy.services.accounts.keyring import Keyring
from proxy.store.postgres import peppers
from proxy.store.postgres.keys import KeyStore
from proxy.store.postgres.notices import Notices
from proxy.store.postgres.pool import DatabaseConnection, Pool
from proxy.store.postgres.secrets import Vault
from proxy.store.shared_memory import rate_buckets
from proxy.store.shared_memory.rate_buckets import UnsharedBuckets
from proxy.tasks import Tasks
from tests.service import until
from tests.shipped_tables import TABLES

PEPPER = "a pepper that no attacker can guess"
PLANS = TABLES.plans
MOST_KEYS = {name: plan.keys for name, plan in PLANS.items()}
# A polling interval so long that a change can only arrive by its notice.
NEVER_S = 3600.0


@pytest.fixture
def store(pool: Pool) -> KeyStore:
    return KeyStore(pool, pepper=PEPPER, plans=MOST_KEYS)


@pytest.fixture
async def account(store: KeyStore) -> str:
    return str((await store.create_account(name="Acme", email="ops@example.com", plan="free"))["id"])


@asynccontextmanager
async def following(
    store: KeyStore, pool: Pool, *, reload_s: float, pepper: str = PEPPER, previous: str = ""
) -> AsyncIterator[Keyring]:
    """A keyring that is loaded and follows changes."""
    fd, tasks, notices = rate_buckets.create(), Tasks(), Notices(pool)
    keyring = Keyring(
        store, UnsharedBuckets(fd), plans=PLANS, pepper=pepper, previous_pepper=previous, reload_s=reload_s
    )
    keyring.listen(notices)
    await keyring.load()
    tasks.start("notices", notices.run)
    tasks.start("keyring", keyring.follow)
    try:
        yield keyring
    finally:
        await tasks.close()
        os.close(fd)


def found(keyring: Keyring, text: str) -> Key | None:
    return keyring.find(text, time.monotonic())


async def test_notice_brings_every_change(store: KeyStore, pool: Pool, account: str) -> None:
    async with following(store, pool, reload_s=NEVER_S) as keyring:
        row, text = await store.create_key(account, name="default", mode="live")
        key = await until(lambda: found(keyring, text))
        await store.set_key_status(row["id"], "disabled")
        changed = await until(lambda: (now := found(keyring, text)) is not key and now)
        assert (key.alive, changed.disabled) == (False, True)
        await store.set_key_status(row["id"], "revoked")
        await until(lambda: found(keyring, text) is None)
        assert len(keyring) == 0


async def test_change_of_an_account_changes_all_its_keys(store: KeyStore, pool: Pool, account: str) -> None:
    made = [(await store.create_key(account, name="default", mode="live"))[1] for _ in range(5)]
    async with following(store, pool, reload_s=NEVER_S) as keyring:
        assert [found(keyring, text).rate.requests_per_second for text in made] == [10] * 5  # type: ignore[union-attr]
        await store.update_account(account, plan="growth")
        await until(
            lambda: [key.rate.requests_per_second for text in made if (key := found(keyring, text))] == [100] * 5
        )


async def test_change_without_a_notice_is_found_by_polling(store: KeyStore, pool: Pool, account: str) -> None:
    row, text = await store.create_key(account, name="default", mode="live")
    async with following(store, pool, reload_s=0.1) as keyring:
        assert found(keyring, text)
        async with pool.connection() as connection, connection.transaction():
            await connection.execute("alter table keys disable trigger keys_notice")
            await connection.execute("update keys set status = 'revoked' where id = $1", row["id"])
            await connection.execute("alter table keys enable trigger keys_notice")
        await until(lambda: found(keyring, text) is None)


async def test_rotated_pepper_loses_no_key(store: KeyStore, pool: Pool, account: str) -> None:
    """Hosts with the old and the new settings find old, moved and new keys; a used key no longer needs the old pepper."""
    new = "another pepper that no attacker can guess"
    new_store = KeyStore(pool, pepper=new, previous_pepper=PEPPER, plans=MOST_KEYS)
    async with pool.connection() as connection:
        await peppers.admit(connection, PEPPER, "", {})
        texts = [(await store.create_key(account, name="default", mode="live"))[1] for _ in range(2)]
        await peppers.admit(connection, new, PEPPER, {})
    async with (
        following(store, pool, reload_s=NEVER_S) as old_host,
        following(new_store, pool, reload_s=NEVER_S, pepper=new, previous=PEPPER) as new_host,
    ):
        before = found(old_host, texts[0])
        removed: list[Key] = []
        new_host.on_removed.append(removed.append)
        key = found(new_host, texts[0])
        assert key is not None
        assert before is not None
        await until(lambda: key.digest == digest(new.encode(), texts[0]))
        await until(lambda: before.digest == key.digest)
        assert found(old_host, texts[0]) is before
        assert found(new_host, texts[0]) is key
        assert removed == []
        created = (await new_store.create_key(account, name="default", mode="live"))[1]
        await until(lambda: found(old_host, created) and found(new_host, created))
        late = (await store.create_key(account, name="default", mode="live"))[1]
        await until(lambda: found(new_host, late))
        async with pool.connection() as connection:
            await until_zero_but(connection, new, left=1)
            await peppers.finish(connection, new, Vault(new, PEPPER))
    async with following(KeyStore(pool, pepper=new, plans=MOST_KEYS), pool, reload_s=NEVER_S, pepper=new) as after:
        assert [found(after, text) is not None for text in (*texts, created, late)] == [True, False, True, True]


async def until_zero_but(connection: DatabaseConnection, pepper: str, *, left: int) -> None:
    async with asyncio.timeout(45):
        while (await peppers.count_unmoved(connection, pepper))[0] != left:  # noqa: ASYNC110 - the database has no event
            await asyncio.sleep(0.01)


async def test_rotation_that_is_taken_back_loses_no_key(store: KeyStore, pool: Pool, account: str) -> None:
    new = "another pepper that no attacker can guess"
    async with pool.connection() as connection:
        await peppers.admit(connection, PEPPER, "", {})
        await peppers.admit(connection, new, PEPPER, {})
    ahead = KeyStore(pool, pepper=new, previous_pepper=PEPPER, plans=MOST_KEYS)
    text = (await ahead.create_key(account, name="default", mode="live"))[1]
    async with following(store, pool, reload_s=NEVER_S, pepper=PEPPER, previous=new) as back:
        assert found(back, text)
        async with pool.connection() as connection:
            await until_zero_but(connection, PEPPER, left=0)
            await peppers.finish(connection, PEPPER, Vault(PEPPER, new))
    async with following(store, pool, reload_s=NEVER_S) as after:
        assert found(after, text)
