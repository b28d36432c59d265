"""The keyring of one worker: changes arrive by notice, and by polling if a notice is missed."""

from __future__ import annotations

import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from proxy.core.access import Key
from proxy.services.accounts.keyring import Keyring
from proxy.settings import load_tables
from proxy.store import windows
from proxy.store.keys import KeyStore
from proxy.store.notices import Notices
from proxy.store.pool import Pool
from proxy.store.windows import UnsharedWindows
from proxy.tasks import Tasks
from tests.service import until

PEPPER = "a pepper that no attacker can guess"
PLANS = load_tables().plans
# A polling interval so long that a change can only arrive by its notice.
NEVER_S = 3600.0


@pytest.fixture
def store(pool: Pool) -> KeyStore:
    return KeyStore(pool, pepper=PEPPER, plans=tuple(PLANS))


@pytest.fixture
async def account(store: KeyStore) -> str:
    return str((await store.create_account(name="Acme", email="ops@example.com", plan="free"))["id"])


@asynccontextmanager
async def following(store: KeyStore, pool: Pool, *, reload_s: float) -> AsyncIterator[Keyring]:
    """A keyring that is loaded and follows changes."""
    fd, tasks, notices = windows.create(), Tasks(), Notices(pool)
    keyring = Keyring(store, notices, UnsharedWindows(fd), plans=PLANS, pepper=PEPPER, reload_s=reload_s)
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
        assert [found(keyring, text).requests_per_second for text in made] == [10] * 5  # type: ignore[union-attr]
        await store.update_account(account, plan="growth")
        await until(lambda: [key.requests_per_second for text in made if (key := found(keyring, text))] == [100] * 5)


async def test_change_without_a_notice_is_found_by_polling(store: KeyStore, pool: Pool, account: str) -> None:
    row, text = await store.create_key(account, name="default", mode="live")
    async with following(store, pool, reload_s=0.1) as keyring:
        assert found(keyring, text)
        async with pool.connection() as connection, connection.transaction():
            await connection.execute("alter table keys disable trigger keys_notice")
            await connection.execute("update keys set status = 'revoked' where id = $1", row["id"])
            await connection.execute("alter table keys enable trigger keys_notice")
        await until(lambda: found(keyring, text) is None)
