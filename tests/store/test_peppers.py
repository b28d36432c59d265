"""The pepper of a database: an unknown one is refused, and a rotation loses no key, session, secret or cordon."""

from __future__ import annotations

import pytest

from proxy.errors import StartError
from proxy.store import peppers
from proxy.store.fleet import FleetStore
from proxy.store.keys import KeyStore
from proxy.store.peppers import check_value, judge
from proxy.store.pool import Pool
from proxy.store.secrets import SealBroken, Vault
from proxy.store.sessions import SessionStore
from proxy.store.webhooks import NewWebhook, WebhookStore

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
        await peppers.finish(connection, NEW)
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
        assert await peppers.count_unmoved_keys(connection, OLD) == 0
        await peppers.admit(connection, NEW, OLD, {})
        assert await peppers.count_unmoved_keys(connection, NEW) == 1
        await new.create_key(account, name="k", mode="live")
        assert await peppers.count_unmoved_keys(connection, NEW) == 1
        await new.move_keys({row["id"]: b"d" * 32})
        assert await peppers.count_unmoved_keys(connection, NEW) == 0


async def test_sessions_links_and_tokens_outlive_a_rotation(pool: Pool) -> None:
    old, new = SessionStore(pool, pepper=OLD), SessionStore(pool, pepper=NEW, previous_pepper=OLD)
    account = await KeyStore(pool, pepper=OLD, plans={"free": 10}).create_account(name="a", email="a@b", plan="free")
    for token in ("kept", "ended", "other"):
        await old.begin(token, account=account["id"], lasts_s=60.0)
    await old.add_link("link", account["id"], lasts_s=60.0)
    await old.add_token("ops", "admin-token")
    assert await new.take_link("link") == account["id"]
    await new.end("ended")
    await new.set_password(account["id"], "hash", but="kept")
    valid = [await new.read(token, idle_s=60.0) is not None for token in ("kept", "ended", "other")]
    assert valid == [True, False, False]
    assert await new.find_token("admin-token") is not None
    assert await SessionStore(pool, pepper=NEW).find_token("admin-token") is not None


async def test_upstream_out_of_service_stays_out_during_a_rotation(pool: Pool) -> None:
    fleet = FleetStore(pool)
    async with pool.connection() as connection:
        await peppers.admit(connection, OLD, "", {})
        await connection.execute("insert into cordons (upstream, label, reason, by_whom) values ('old', 'l', 'r', 'w')")
        await peppers.admit(connection, NEW, OLD, {"old": "new", "absent": "none"})
    assert set(await fleet.cordons()) == {"old", "new"}


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
