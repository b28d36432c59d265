"""The pepper of a database: an unknown one is refused, and a rotation loses no key, session, secret or cordon."""

from __future__ import annotations

import asyncio

import pytest

from proxy.errors import StartError, Unavailable
from proxy.store.postgres import peppers, sql
from proxy.store.postgres.fleet import FleetStore
from proxy.store.postgres.keys import KeyStore
from proxy.store.postgres.peppers import judge
from proxy.store.postgres.pool import Pool
from proxy.store.postgres.second_factors import SecondFactorStore
from proxy.store.postgres.secrets import SealBroken, Vault, check_value
from proxy.store.postgres.sessions import SessionStore
from proxy.store.postgres.webhooks import NewWebhook, WebhookStore
from tests.service import until

OLD, NEW, OTHER = "o" * 32, "n" * 32, "x" * 32
FIRST, BOTH = [check_value(OLD)], [check_value(OLD), check_value(NEW)]


@pytest.mark.parametrize(
    ("stored", "pepper", "previous", "state"),
    [
        ([], OLD, "", "new"),
        (FIRST, OLD, "", "known"),
        (FIRST, NEW, OLD, "new"),
        (BOTH, NEW, OLD, "known"),
        (BOTH, OLD, "", "known"),  # a host that still has the old settings
        (BOTH, OLD, NEW, "known"),  # a rotation that is taken back
        (BOTH[1:], NEW, "", "known"),  # after the rotation has ended
        (BOTH[1:], NEW, OLD, "known"),
    ],
)
def test_pepper_that_finds_every_key_is_accepted(stored: list[bytes], pepper: str, previous: str, state: str) -> None:
    assert judge(stored, pepper, previous) == state


@pytest.mark.parametrize(
    ("stored", "pepper", "previous", "words"),
    [
        (FIRST, OTHER, "", "keys.pepper: is not the pepper of this database"),
        (FIRST, NEW, OTHER, "keys.pepper: is not the pepper of this database"),
        (BOTH, OTHER, "", "keys.pepper: is not the pepper of this database"),
        (BOTH[1:], OLD, "", "keys.pepper: is not the pepper of this database"),
        (BOTH, NEW, "", "keys.previous_pepper: some API keys may still depend"),
        (BOTH, OTHER, NEW, "keys.pepper: another rotation of the pepper has not ended"),
    ],
)
def test_pepper_that_would_lock_clients_out_is_refused(
    stored: list[bytes], pepper: str, previous: str, words: str
) -> None:
    with pytest.raises(StartError) as refused:
        judge(stored, pepper, previous)
    assert words in refused.value.faults[0]
    assert pepper not in refused.value.faults[0]


async def test_first_pepper_is_recorded_and_another_is_refused(pool: Pool) -> None:
    async with pool.connection() as connection:
        assert await peppers.check(connection, OLD, "") == "new"
        for _ in range(2):
            await peppers.admit(connection, OLD, "", {})
        assert await peppers.check(connection, OLD, "") == "known"
        with pytest.raises(StartError, match=r"keys\.pepper"):
            await peppers.admit(connection, NEW, "", {})
        assert await peppers.check(connection, OLD, "") == "known"


async def test_rotation_ends_with_finish_and_the_old_pepper_can_come_back(pool: Pool) -> None:
    async with pool.connection() as connection:
        await peppers.admit(connection, OLD, "", {})
        await peppers.admit(connection, NEW, OLD, {})
        await peppers.finish(connection, NEW, Vault(NEW, OLD))
        assert await peppers.check(connection, NEW, "") == "known"
        with pytest.raises(StartError):
            await peppers.check(connection, OLD, "")
        await peppers.admit(connection, OLD, NEW, {})
        assert await peppers.check(connection, OLD, NEW) == "known"
        with pytest.raises(StartError, match="previous_pepper"):
            await peppers.check(connection, OLD, "")


async def test_keys_are_counted_until_they_are_moved(pool: Pool) -> None:
    old = KeyStore(pool, pepper=OLD, plans={"free": 10})
    new = KeyStore(pool, pepper=NEW, previous_pepper=OLD, plans={"free": 10})
    account = (await old.create_account(name="a", email="a@b", plan="free"))["id"]
    async with pool.connection() as connection:
        await peppers.admit(connection, OLD, "", {})
        row, _ = await old.create_key(account, name="k", mode="live")
        assert await peppers.count_unmoved(connection, OLD) == (0, 0)
        await peppers.admit(connection, NEW, OLD, {})
        assert await peppers.count_unmoved(connection, NEW) == (1, 0)
        await new.create_key(account, name="k", mode="live")
        assert await peppers.count_unmoved(connection, NEW) == (1, 0)
        await new.move_keys({row["id"]: b"d" * 32})
        assert await peppers.count_unmoved(connection, NEW) == (0, 0)


async def test_sessions_links_and_tokens_outlive_a_rotation(pool: Pool) -> None:
    old, new = SessionStore(pool, pepper=OLD), SessionStore(pool, pepper=NEW, previous_pepper=OLD)
    account = await KeyStore(pool, pepper=OLD, plans={"free": 10}).create_account(name="a", email="a@b", plan="free")
    for token in ("kept", "ended", "other"):
        await old.begin(token, person=account["id"], lasts_s=60.0)
    await old.add_link("link", account["id"], lasts_s=60.0)
    await old.add_token("ops", "admin-token")
    assert await new.take_link("link") == account["id"]
    await new.end("ended")
    await new.set_password(account["id"], "hash", but="kept")
    valid = [await new.read(token, idle_s=60.0) is not None for token in ("kept", "ended", "other")]
    assert valid == [True, False, False]
    assert await new.find_token("admin-token") is not None
    assert await SessionStore(pool, pepper=NEW).find_token("admin-token") is not None


async def test_hosts_with_the_old_pepper_keep_working_during_a_rotation(pool: Pool) -> None:
    """Whatever a host with the new settings creates or moves is found by one with the old settings."""
    old, new = SessionStore(pool, pepper=OLD), SessionStore(pool, pepper=NEW, previous_pepper=OLD)
    last = SessionStore(pool, pepper=NEW)
    account = await KeyStore(pool, pepper=OLD, plans={"free": 10}).create_account(name="a", email="a@b", plan="free")
    async with pool.connection() as connection:
        await peppers.admit(connection, OLD, "", {})
        for name in ("moved", "unused"):
            await old.add_token(name, name)
        await peppers.admit(connection, NEW, OLD, {})
        await new.add_token("created", "created")
        for host in (new, old, new, old):
            assert await host.find_token("moved") is not None
            assert await host.find_token("created") is not None
        await new.begin("session", person=account["id"], lasts_s=60.0)
        await new.add_link("link", account["id"], lasts_s=60.0)
        assert await old.read("session", idle_s=60.0) is not None
        assert await old.take_link("link") == account["id"]
        assert await peppers.count_unmoved(connection, NEW) == (0, 1)
        await peppers.finish(connection, NEW, Vault(NEW, OLD))
    for name, is_valid in (("moved", True), ("created", True), ("unused", False)):
        assert (await last.find_token(name) is not None) == is_valid
        assert await old.find_token(name) is None or name == "unused"


async def test_upstream_out_of_service_stays_out_during_a_rotation(pool: Pool) -> None:
    fleet = FleetStore(pool)
    async with pool.connection() as connection:
        await peppers.admit(connection, OLD, "", {})
        await connection.execute(
            "insert into method_cordons (upstream, method, label, reason, by_whom) values ('old', 'm', 'l', 'r', 'w')"
        )
        await connection.execute("insert into cordons (upstream, label, reason, by_whom) values ('old', 'l', 'r', 'w')")
        await connection.execute(
            "insert into canary_shares (upstream, label, share, reason) values ('old', 'l', 0.05, 'r')"
        )
        await peppers.admit(connection, NEW, OLD, {"old": "new", "absent": "none"})
    assert set(await fleet.cordons()) == {"old", "new"}
    assert {row["upstream"] for row in await fleet.method_cordons()} == {"old", "new"}
    assert {upstream: row["share"] for upstream, row in (await fleet.shares()).items()} == {"old": 0.05, "new": 0.05}


async def webhook(pool: Pool, vault: Vault, webhook_id: str) -> None:
    async with pool.connection() as connection:
        await connection.execute(
            "insert into accounts (id, name, email, plan) values ('acct_1', 'N', 'n@b', 'growth') on conflict do nothing"
        )
    await WebhookStore(pool).create(
        webhook_id,
        NewWebhook(
            account="acct_1",
            network="dev/mainnet",
            live=True,
            url="https://hooks.example.com/",
            event_type="new_block",
            config={},
        ),
        addresses=None,
        secret=vault.seal(webhook_id, b"secret"),
        rotated=vault.seal_for_previous(webhook_id, b"secret"),
        most=10,
    )


async def test_reseal_encrypts_every_secret_that_can_be_read(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peppers, "AT_ONCE", 2)
    for number in range(3):
        await webhook(pool, Vault(OLD), f"wh_{number}")
    await webhook(pool, Vault(OTHER), "wh_broken")
    async with pool.connection() as connection:
        await connection.execute("update webhooks set old_secret = secret where id = 'wh_0'")
        assert await peppers.reseal(connection, Vault(NEW, OLD)) == (3, ["wh_broken"])
        rows = await connection.fetch("select id, secret, old_secret from webhooks where id <> 'wh_broken' order by id")
    assert [Vault(NEW).open(row["id"], row["secret"]) for row in rows] == [b"secret"] * 3
    assert Vault(NEW).open("wh_0", rows[0]["old_secret"]) == b"secret"


async def test_key_that_does_not_decrypt_signing_secrets_is_refused(pool: Pool) -> None:
    async with pool.connection() as connection:
        await peppers.check_vault(connection, Vault(NEW))
        await webhook(pool, Vault(OLD), "wh_1")
        await peppers.check_vault(connection, Vault(NEW, OLD))
        with pytest.raises(StartError, match=r"webhooks\.secret_key"):
            await peppers.check_vault(connection, Vault(NEW))


def test_vault_opens_with_older_keys_and_seals_with_the_first() -> None:
    sealed = Vault(OLD).seal("wh_1", b"secret")
    both = Vault(NEW, OLD)
    assert both.open("wh_1", sealed) == b"secret"
    assert Vault(NEW).open("wh_1", both.seal("wh_1", b"secret")) == b"secret"
    with pytest.raises(SealBroken):
        Vault(NEW, OTHER).open("wh_1", sealed)


async def secrets_of(pool: Pool, vault: Vault) -> set[str]:
    """The webhooks whose secret this vault opens."""
    async with pool.connection() as connection:
        rows = await connection.fetch("select id, secret from webhooks")
    return {row["id"] for row in rows if vault.is_current(row["id"], row["secret"])}


async def test_new_webhooks_open_on_hosts_with_the_old_pepper_until_the_rotation_ends(pool: Pool) -> None:
    rotating = Vault(NEW, OLD, previous_pepper=OLD)
    async with pool.connection() as connection:
        await peppers.admit(connection, OLD, "", {})
        await webhook(pool, Vault(OLD), "wh_before")
        await peppers.admit(connection, NEW, OLD, {})
        await webhook(pool, rotating, "wh_during")
        store, sealed = WebhookStore(pool), rotating.seal("wh_before", b"fresh")
        await store.rotate(
            "wh_before",
            account="acct_1",
            secret=sealed,
            rotated=rotating.seal_for_previous("wh_before", b"fresh"),
            old_for_s=60.0,
        )
        assert await secrets_of(pool, Vault(OLD)) == {"wh_before", "wh_during"}
        await peppers.finish(connection, NEW, rotating)
        await webhook(pool, rotating, "wh_after")
    assert await secrets_of(pool, Vault(NEW)) == {"wh_before", "wh_during", "wh_after"}


async def test_rotation_that_is_taken_back_stores_secrets_under_the_first_pepper(pool: Pool) -> None:
    async with pool.connection() as connection:
        await peppers.admit(connection, OLD, "", {})
        await peppers.admit(connection, NEW, OLD, {})
        await peppers.admit(connection, OLD, NEW, {})
        await webhook(pool, Vault(OLD, NEW, previous_pepper=NEW), "wh_1")
    assert await secrets_of(pool, Vault(OLD)) == {"wh_1"}


async def test_end_of_a_rotation_waits_for_secrets_that_are_being_stored(pool: Pool) -> None:
    """Otherwise a secret stored between the last encryption and the end would be lost with the old pepper."""
    rotating = Vault(NEW, OLD, previous_pepper=OLD)
    await webhook(pool, Vault(OLD), "wh_1")

    async def finish() -> None:
        async with pool.connection(within_s=5.0) as connection:
            await peppers.finish(connection, NEW, rotating)

    async with asyncio.TaskGroup() as group, pool.connection(within_s=5.0) as connection:
        await peppers.admit(connection, OLD, "", {})
        await peppers.admit(connection, NEW, OLD, {})
        async with connection.transaction():
            assert await connection.fetchval(sql.peppers.hold_oldest_pepper) == check_value(OLD)
            finishing = group.create_task(finish())
            await until(lambda: _waits_for_a_lock(pool))
            late = Vault(OLD).seal("wh_1", b"late")
            await connection.execute("update webhooks set secret = $1 where id = 'wh_1'", late)
        await finishing
    assert await secrets_of(pool, Vault(NEW)) == {"wh_1"}


async def _waits_for_a_lock(pool: Pool) -> bool:
    async with pool.connection(within_s=5.0) as connection:
        query = "select exists (select from pg_stat_activity where wait_event_type = 'Lock' and datname = current_database())"
        return bool(await connection.fetchval(query))


async def test_second_factors_outlive_a_rotation(pool: Pool) -> None:
    """One from before, and one that a host with the new settings stores meanwhile, which one with the old settings can read."""
    keys = KeyStore(pool, pepper=OLD, plans={"free": 10})
    before, during = [(await keys.create_account(name="a", email=f"{n}@b", plan="free"))["id"] for n in range(2)]
    old = SecondFactorStore(pool, Vault(OLD))
    new = SecondFactorStore(pool, Vault(NEW, OLD, previous_pepper=OLD))
    last = SecondFactorStore(pool, Vault(NEW))

    async def secret(store: SecondFactorStore, account: str) -> bytes:
        found = await store.read(account)
        assert found is not None
        return store.secret_of(account, found)

    async with pool.connection() as connection:
        await peppers.admit(connection, OLD, "", {})
        await old.begin(before, b"first")
        await peppers.admit(connection, NEW, OLD, {})
        await new.begin(during, b"second")
        for host in (old, new):
            assert [await secret(host, each) for each in (before, during)] == [b"first", b"second"]
        with pytest.raises(Unavailable):
            await secret(last, before)
        await peppers.finish(connection, NEW, Vault(NEW, OLD))
    assert [await secret(last, each) for each in (before, during)] == [b"first", b"second"]
