"""Webhooks in Postgres: ownership, changes and concurrency."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from proxy.core.paging import Page
from proxy.errors import Forbidden, InvalidRequest, NotFound, RateLimited
from proxy.store.postgres import sql, webhooks
from proxy.store.postgres.deliveries import DeliveryStore
from proxy.store.postgres.pool import Pool
from proxy.store.postgres.webhooks import AddressChange, NewWebhook, Webhook, WebhookStore
from tests.service import until

A, B, C = (bytes([n]) * 20 for n in (1, 2, 3))


class Desk:
    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.store = WebhookStore(pool)

    async def make(
        self,
        *,
        account: str = "acct_1",
        most: int = 100,
        addresses: Any = (A,),
        values_per_day: int = 0,
        **changes: Any,
    ) -> Webhook:
        new = {
            "account": account,
            "network": "dev/mainnet",
            "live": True,
            "url": "https://hooks.example.com/",
            "event_type": "address_activity",
            "config": {},
            **changes,
        }
        return await self.store.create(
            WebhookStore.new_id(),
            NewWebhook(**new),
            addresses=addresses,
            secret=b"sealed",
            most=most,
            values_per_day=values_per_day,
        )

    async def value(self, query: str, *values: Any) -> Any:
        async with self.pool.connection() as connection:
            return await connection.fetchval(query, *values)

    async def version(self, network: str = "dev/mainnet") -> int:
        return int(await self.value("select version from webhook_versions where network = $1", network))


@pytest.fixture
async def desk(pool: Pool) -> Desk:
    async with pool.connection() as connection:
        for name in ("acct_1", "acct_2"):
            await connection.execute(
                "insert into accounts (id, name, email, plan) values ($1, 'N', 'n@example.com', 'growth')", name
            )
    return Desk(pool)


async def test_every_change_increments_the_version_and_marks_the_webhook(desk: Desk) -> None:
    made = await desk.make()
    assert made.version == await desk.version() == 1
    paused = await desk.store.move(made, "pause")
    assert paused.version == await desk.version() == 2
    watched = await desk.store.update(made, delta=AddressChange(add=[B], remove=[], most=10))
    assert watched.version == 3
    changed = await desk.store.update(made, url="https://other.example.com/")
    assert (changed.version, changed.url, changed.status) == (4, "https://other.example.com/", "paused")
    await desk.make(network="dev/testnet", live=False)
    assert await desk.version() == 4
    assert await desk.version("dev/testnet") == 1


async def test_change_sends_a_notification(desk: Desk) -> None:
    heard: asyncio.Queue[object] = asyncio.Queue()
    listening = await desk.pool.dedicated()
    await listening.add_listener("penstock_webhooks", lambda *said: heard.put_nowait(said[-1]))
    await desk.make()
    async with asyncio.timeout(10):
        assert await heard.get() == "dev/mainnet"
    await listening.close()


async def test_concurrent_creations_do_not_exceed_the_limit(desk: Desk) -> None:
    found = await asyncio.gather(*(desk.make(most=3) for _ in range(8)), return_exceptions=True)
    assert sum(isinstance(each, Webhook) for each in found) == 3
    assert sum(isinstance(each, Forbidden) for each in found) == 5


async def test_deleted_webhook_frees_a_place(desk: Desk) -> None:
    made = await desk.make(most=1)
    await desk.store.move(made, "delete")
    await desk.make(most=1)
    with pytest.raises(NotFound):
        await desk.store.read(made.id, account="acct_1")
    with pytest.raises(NotFound):
        await desk.store.move(made, "pause")
    with pytest.raises(NotFound):
        await desk.store.update(made, delta=AddressChange(add=[B], remove=[], most=10))
    assert await desk.value("select count(*) from watched_addresses where address = $1", B) == 0


async def test_webhook_of_another_account_is_not_found(desk: Desk) -> None:
    made = await desk.make()
    with pytest.raises(NotFound):
        await desk.store.read(made.id, account="acct_2")
    with pytest.raises(NotFound):
        await desk.store.rotate(made.id, account="acct_2", secret=b"x", old_for_s=1.0)
    assert await desk.store.list_of("acct_2", live=True, status=None, page=Page(1, 25)) == ([], 0)


async def test_webhooks_on_live_networks_are_listed_only_for_live_keys(desk: Desk) -> None:
    live = await desk.make()
    test = await desk.make(network="dev/testnet", live=False)
    found, total = await desk.store.list_of("acct_1", live=True, status=None, page=Page(1, 25))
    assert ({each.id for each in found}, total) == ({live.id, test.id}, 2)
    found, total = await desk.store.list_of("acct_1", live=False, status=None, page=Page(1, 25))
    assert ([each.id for each in found], total) == ([test.id], 1)


async def test_concurrent_address_changes_keep_the_count_correct(desk: Desk) -> None:
    made = await desk.make(addresses=[A])
    many = [n.to_bytes(20, "big") for n in range(1, 41)]
    changes = [
        desk.store.update(made, delta=AddressChange(add=many[n : n + 20], remove=many[:5], most=100))
        for n in range(0, 20, 2)
    ]
    await asyncio.gather(*changes)
    after = await desk.store.read(made.id, account="acct_1")
    stored = await desk.store.addresses(after)
    assert after.addresses == len(stored) == len({*stored})


async def test_too_many_addresses_change_nothing(desk: Desk) -> None:
    made = await desk.make(addresses=[A])
    with pytest.raises(InvalidRequest, match="the limit is 2"):
        await desk.store.update(made, delta=AddressChange(add=[B, C], remove=[], most=2))
    assert await desk.store.addresses(made) == [A]
    assert await desk.version() == 1


async def test_removing_addresses_from_a_filter_without_a_list_adds_none(desk: Desk) -> None:
    made = await desk.make(event_type="token_transfer", addresses=None)
    after = await desk.store.update(made, delta=AddressChange(add=[], remove=[A], most=10))
    assert after.addresses is None
    listed = await desk.store.update(made, delta=AddressChange(add=[B], remove=[A], most=10))
    assert listed.addresses == 1
    emptied = await desk.store.update(made, delta=AddressChange(add=[], remove=[B], most=10))
    assert emptied.addresses == 0


async def test_partly_refused_change_changes_nothing(desk: Desk) -> None:
    made = await desk.store.move(await desk.make(), "gone")
    before = await desk.version()
    with pytest.raises(InvalidRequest, match="status"):
        await desk.store.update(
            made, url="https://other.example.com/", cause="activate", delta=AddressChange(add=[B], remove=[A], most=10)
        )
    assert await desk.store.addresses(made) == [A]
    assert await desk.store.read(made.id, account="acct_1") == made
    assert await desk.version() == before


async def test_new_config_replaces_all_addresses(desk: Desk) -> None:
    made = await desk.make(addresses=[A, B])
    changed = await desk.store.update(made, config={"direction": "incoming"}, addresses=[C])
    assert (changed.addresses, changed.config) == (1, {"direction": "incoming"})
    assert await desk.store.addresses(changed) == [C]
    without = await desk.store.update(made, config={}, addresses=None)
    assert without.addresses is None


async def test_rotation_keeps_the_old_secret_for_a_while(desk: Desk) -> None:
    made = await desk.make()
    after = await desk.store.rotate(made.id, account="acct_1", secret=b"new", old_for_s=86_400.0)
    assert after.secret == b"new"
    row = await desk.value(
        "select old_secret = 'sealed' and old_secret_until - now() between '23 hours' and '24 hours' from webhooks"
    )
    assert row


@pytest.mark.parametrize(
    ("cause", "status", "reason"), [("exhaust", "paused", "failures"), ("gone", "disabled", "gone")]
)
async def test_deliverer_changes_the_status_once(desk: Desk, cause: Any, status: str, reason: str) -> None:
    made = await desk.make()

    async def move() -> bool:
        async with desk.pool.connection() as connection, connection.transaction():
            await webhooks.lock(connection, made.network)
            return await webhooks.set_status(connection, made.id, cause)

    assert sorted(await asyncio.gather(*(move() for _ in range(5)))) == [False] * 4 + [True]
    after = await desk.store.read(made.id, account="acct_1")
    assert (after.status, after.reason) == (status, reason)
    assert after.version > made.version


async def test_disabled_webhook_is_enabled_by_the_dashboard_and_not_by_an_update(desk: Desk) -> None:
    made = await desk.store.move(await desk.make(), "gone")
    for cause in ("activate", "pause"):
        with pytest.raises(InvalidRequest, match="status"):
            await desk.store.move(made, cause)
    assert (await desk.store.move(made, "resume")).status == "active"


async def test_owner_cannot_resume_a_webhook_disabled_by_the_operator(desk: Desk) -> None:
    made = await desk.store.move(await desk.make(), "disable")
    with pytest.raises(InvalidRequest):
        await desk.store.move(made, "resume")
    assert (await desk.store.move(made, "enable")).status == "active"


async def test_changes_and_event_writers_wait_for_each_other(desk: Desk) -> None:
    """While a transaction holds the version, no webhook changes, so its decisions stay valid until it ends."""
    made = await desk.make()
    async with desk.pool.connection() as connection:
        transaction = connection.transaction()
        await transaction.start()
        await connection.fetchval(sql.webhooks.version_of, "dev/mainnet")
        async with asyncio.TaskGroup() as group:
            pausing = group.create_task(desk.store.move(made, "pause"))
            blocked = "select count(*) from pg_stat_activity where wait_event_type = 'Lock'"
            await until(lambda: desk.value(blocked))
            assert not pausing.done()
            await transaction.commit()
    assert (await desk.store.read(made.id, account="acct_1")).status == "paused"


async def test_all_parked_deliveries_are_due_again_after_a_resume(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(webhooks, "AT_ONCE", 10)
    made = await desk.store.move(await desk.make(), "pause")
    await desk.value(
        "with made as (insert into deliveries (event_id, webhook_id, state) "
        "select 'evt_' || n, $1, 'parked' from generate_series(1, 35) n returning 1) select count(*) from made",
        made.id,
    )
    await desk.store.requeue_parked()
    assert await desk.value("select count(*) from deliveries where state = 'parked'") == 35
    await desk.store.move(made, "resume")
    assert await desk.value("select count(*) from deliveries where state = 'due'") == 35


async def test_interrupted_resume_is_completed_later(desk: Desk) -> None:
    made = await desk.make()
    await desk.value(
        "insert into deliveries (event_id, webhook_id, state) values ('evt_1', $1, 'parked') returning 1", made.id
    )
    await desk.store.requeue_parked()
    assert await desk.value("select state from deliveries") == "due"


# Filter values per day


def values(count: int) -> list[bytes]:
    return [index.to_bytes(20, "big") for index in range(1, count + 1)]


async def wal_bytes(desk: Desk) -> int:
    return int(await desk.value("select pg_current_wal_insert_lsn() - '0/0'::pg_lsn"))


async def test_filter_values_of_a_day_are_limited_by_account(desk: Desk) -> None:
    """One account creates and deletes webhooks with long lists until it may write no more. Others can go on."""
    made = await desk.make(addresses=values(2_000), values_per_day=5_000)
    await desk.store.move(made, "delete")
    second = await desk.make(addresses=values(2_000), values_per_day=5_000)
    before = await wal_bytes(desk)
    for _ in range(20):
        with pytest.raises(RateLimited, match="allows 5000 addresses") as refused:
            await desk.make(addresses=values(2_000), values_per_day=5_000)
        assert 0 < refused.value.retry_after_s <= 86_400
    assert await wal_bytes(desk) - before < 20_000
    await desk.make(account="acct_2", addresses=values(2_000), values_per_day=5_000)
    # Changes count too, and so do the values of a config.
    await desk.store.update(second, delta=AddressChange(add=[A], remove=values(400), most=10_000), values_per_day=5_000)
    long = {"topics": [f"0x{index:064x}" for index in range(1_000)]}
    with pytest.raises(RateLimited):
        await desk.store.update(second, config=long, values_per_day=5_000)
    await desk.store.update(second, config={}, addresses=values(599), values_per_day=5_000)
    with pytest.raises(RateLimited):
        await desk.store.update(second, config={}, addresses=[A], values_per_day=5_000)
    await desk.store.update(second, url="https://other.example.com/", values_per_day=5_000)


async def test_values_that_are_rolled_back_count(desk: Desk) -> None:
    made = await desk.make(addresses=[A], values_per_day=100)
    for _ in range(2):
        with pytest.raises(InvalidRequest, match="limit is 10"):
            await desk.store.update(made, delta=AddressChange(add=values(45), remove=[], most=10), values_per_day=100)
    with pytest.raises(RateLimited):
        await desk.store.update(made, delta=AddressChange(add=values(45), remove=[], most=10), values_per_day=100)


async def test_webhook_above_the_plan_takes_no_values(desk: Desk) -> None:
    for _ in range(3):
        with pytest.raises(Forbidden):
            await desk.make(most=0, addresses=values(60), values_per_day=100)
    await desk.make(addresses=values(60), values_per_day=100)


async def test_deleted_webhook_without_deliveries_is_removed_after_an_hour(desk: Desk) -> None:
    made, recent = await desk.make(), await desk.make()
    for each in (made, recent):
        await desk.store.move(each, "delete")
    await desk.value("update webhooks set updated_at = now() - interval '61 minutes' where id = $1", made.id)
    await DeliveryStore(desk.pool).purge(30)
    assert await desk.value("select array_agg(id) from webhooks") == [recent.id]
    assert not await desk.value("select count(*) from watched_addresses")
