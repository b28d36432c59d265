"""The daily delivery limit of an account, and the removal of old deliveries."""

from __future__ import annotations

import datetime
import logging
from collections import Counter
from typing import Any

import pytest

from proxy.store.postgres import deliveries, sql
from tests.delivery.harness import DeliveryHarness
from tests.delivery.test_deliverer import SHORT
from tests.service import until


async def test_deliveries_above_the_daily_limit_wait_for_the_next_day(
    harness: DeliveryHarness, caplog: pytest.LogCaptureFixture
) -> None:
    account = await harness.account("free")
    hooks = [await harness.webhook(f"/{n}", account=account) for n in range(2)]
    paying = await harness.webhook("/paying", account=await harness.account("growth"))
    await harness.execute(
        "insert into delivery_days (account_id, day, used) values ($1, (now() at time zone 'utc')::date, 970)", account
    )
    async with harness.delivering() as deliverer:
        with caplog.at_level(logging.WARNING, "penstock.deliverer"):
            for hook in hooks:
                await harness.events(hook, 40)
            await harness.events(paying, 40)
            await until(lambda: harness.are_all(paying, "delivered"))

            async def settled() -> bool:
                return not await harness.rows("select from deliveries where state = 'due'")

            await until(settled)
        states = [state for hook in hooks for state in (await harness.states(hook)).values()]
        assert (states.count("delivered"), states.count("over_quota")) == (30, 50)
        warnings = [record for record in caplog.records if "daily delivery limit" in record.getMessage()]
        assert [record.__dict__["account"] for record in warnings] == [account]
        # Simulate the next day.
        await harness.execute("update delivery_days set day = day - 1")
        await harness.execute("update deliveries set due_at = now() where state = 'over_quota' and due_at > now()")
        deliverer._wake.set()
        for hook in hooks:
            await until(lambda hook=hook: harness.are_all(hook, "delivered"))
    used = await harness.rows("select used from delivery_days where account_id = $1 order by day", account)
    assert [row["used"] for row in used] == [1000, 50]


async def test_held_deliveries_wait_for_midnight_in_utc(harness: DeliveryHarness) -> None:
    hook = await harness.webhook(account=await harness.account("free"))
    at = datetime.datetime(2031, 3, 30, 22, 59, 59, tzinfo=datetime.UTC)
    await harness.events(hook, 3)
    claimed, exhausted = await harness.store.claim({hook.id: 2}, day_limits={"free": 1}, at=at)
    assert (len(claimed), exhausted) == (1, [hook.account])
    rows = await harness.rows("select distinct due_at from deliveries where state = 'over_quota'")
    assert [row["due_at"] for row in rows] == [datetime.datetime(2031, 3, 31, tzinfo=datetime.UTC)]
    due = await harness.store.list_due(at)
    assert due.active == {}
    assert (await harness.store.list_due(at + datetime.timedelta(hours=1, seconds=1))).active == {hook.id: hook.url}


async def test_held_delivery_is_not_attempted(harness: DeliveryHarness) -> None:
    hook = await harness.webhook(account=await harness.account("free"))
    await harness.events(hook, 2)
    claimed, _ = await harness.store.claim({hook.id: 2}, day_limits={"free": 1})
    rows = await harness.rows("select event_id, state, claim from deliveries")
    assert {row["state"]: row["claim"] for row in rows} == {"due": 1, "over_quota": 0}
    assert [each.claim for each in claimed] == [1]


async def test_hold_does_not_affect_a_delivery_claimed_by_another_process(harness: DeliveryHarness) -> None:
    hook = await harness.webhook()
    (name,) = await harness.events(hook)
    await harness.execute("update deliveries set claim = 2")
    await harness.execute(sql.deliveries.hold, [name], [1], None)
    assert [tuple(row) for row in await harness.rows("select state, claim from deliveries")] == [("due", 2)]


async def test_retries_do_not_count_towards_the_daily_limit_and_redeliveries_do(harness: DeliveryHarness) -> None:
    hook = await harness.webhook("/x", "NEW_BLOCK", account=await harness.account("free"))
    harness.inbox.answer("/x", 500, 500, 200)

    async def used() -> list[Any]:
        return [row["used"] for row in await harness.rows("select used from delivery_days")]

    async with harness.delivering(schedules=SHORT):
        (name,) = await harness.events(hook)
        await until(lambda: harness.are_all(hook, "delivered"))
        assert await used() == [1]
        assert await harness.store.redeliver(hook.id, name)
        await until(lambda: len(harness.inbox.posts) == 4)
        await until(lambda: harness.are_all(hook, "delivered"))
        assert await used() == [2]
    numbers = await harness.rows("select number from attempts order by number")
    assert [row["number"] for row in numbers] == [1, 2, 3, 4]


async def test_held_deliveries_are_sent_when_the_limit_is_raised(harness: DeliveryHarness) -> None:
    account = await harness.account("free")
    hook = await harness.webhook(account=account)
    await harness.execute(
        "insert into delivery_days (account_id, day, used) values ($1, (now() at time zone 'utc')::date, 1000)", account
    )
    async with harness.delivering():
        await harness.events(hook, 3)
        await until(lambda: harness.are_all(hook, "over_quota"))
        await harness.execute("update accounts set plan = 'enterprise' where id = $1", account)
        await until(lambda: harness.are_all(hook, "delivered"))


async def test_account_without_quota_rewrites_no_held_delivery_however_often_it_changes(
    harness: DeliveryHarness,
) -> None:
    """An account's holder can change it at will, and each change looks for deliveries to release. Others are not delayed."""
    account = await harness.account("free")
    hook, other = await harness.webhook(account=account), await harness.webhook("/other")
    await harness.execute(
        "insert into delivery_days (account_id, day, used) values ($1, (now() at time zone 'utc')::date, 1000)", account
    )
    rows = "select event_id, xmin::text from deliveries_open where webhook_id = $1 order by 1"
    async with harness.delivering():
        await harness.events(hook, 50)
        await until(lambda: harness.are_all(hook, "over_quota"))
        before = await harness.rows(rows, hook.id)
        for _ in range(5):
            await harness.execute("update accounts set name = name || '.' where id = $1", account)
            await harness.events(other)
            await until(lambda: harness.are_all(other, "delivered"))
        assert await harness.rows(rows, hook.id) == before


async def test_held_deliveries_are_released_as_far_as_the_limit_allows(
    harness: DeliveryHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    account = await harness.account("free")
    hook = await harness.webhook(account=account)
    await harness.events(hook, 10)
    await harness.execute("update deliveries set state = 'over_quota', due_at = now() + interval '1 day'")
    await harness.execute(
        "insert into delivery_days (account_id, day, used) values ($1, (now() at time zone 'utc')::date, 996)", account
    )
    monkeypatch.setattr(deliveries, "AT_ONCE", 5)
    for more, due in ((False, 4), (False, 8)):
        assert await harness.store.release_held(account, {"free": 1_000}) is more
        assert Counter((await harness.states(hook)).values())["due"] == due
    assert not await harness.store.release_held(account, {"free": 996})
    await harness.execute("update deliveries set state = 'over_quota', due_at = now() + interval '1 day'")
    for more, due in ((True, 5), (True, 10), (False, 10)):
        assert await harness.store.release_held(account, {}) is more
        assert Counter((await harness.states(hook)).values())["due"] == due
    assert not await harness.store.release_held("acct_unknown", {})


# Removal


ATTEMPT = """
insert into attempts (event_id, number, began_at, took_ms, outcome)
values ($1, 1, now() - make_interval(days => $2::integer), 5, 'delivered')
"""


async def test_attempts_of_old_days_are_dropped_with_their_tables(harness: DeliveryHarness) -> None:
    hook = await harness.webhook()
    (event,) = await harness.events(hook, 1)
    await harness.execute("select attempts_add_day((now() at time zone 'utc')::date - 40)")
    for days in (40, 35, 1, 0):
        await harness.execute(ATTEMPT, f"{event}{days or ''}", days)
    await harness.store.purge(30)
    kept = await harness.rows("select event_id, began_at < now() - interval '30 days' as old from attempts")
    assert {row["event_id"] for row in kept} == {event, f"{event}1"}
    tables = "select from pg_class where relkind = 'r' and relname ~ '^attempts_[0-9]{8}$'"
    await harness.execute("delete from attempts_of_other_days")
    await harness.store.purge(30)
    assert len(await harness.rows(tables)) == 3, "today and two days ahead"


async def test_old_events_are_removed_and_new_or_due_ones_stay(harness: DeliveryHarness) -> None:
    hook, gone = await harness.webhook(), await harness.webhook("/gone")
    old = await harness.events(hook, 7)
    await harness.execute("update events set created_at = now() - interval '31 days'")
    await harness.execute("update deliveries set state = 'delivered' where event_id <> $1", old[0])
    new = await harness.events(hook, 2)
    await harness.execute("insert into watched_addresses select number, '\\x01' from webhooks")
    await harness.execute(
        "insert into watch_changes (webhook, version, address, added, changed_at)"
        " select number, n, '\\x01', true, now() - interval '10 minutes' * n from webhooks, generate_series(1, 10) n"
    )
    await harness.webhooks.move(gone, "delete")
    await harness.execute("update webhooks set updated_at = now() - interval '31 days' where id = $1", gone.id)
    while await harness.store.purge(30, at_once=3):
        pass
    assert {*await harness.states(hook)} == {old[0], *new}
    assert {row["id"] for row in await harness.rows("select id from events")} == {old[0], *new}
    assert [row["id"] for row in await harness.rows("select id from webhooks")] == [hook.id]
    assert len(await harness.rows("select from watched_addresses")) == 1
    # The changes of the last hour stay, for both webhooks.
    assert len(await harness.rows("select from watch_changes")) == 10
