"""Events and deliveries in tables by day: over midnight, in pages, and when old days are dropped."""

from __future__ import annotations

import asyncio
import datetime
from dataclasses import dataclass
from typing import Any

import asyncpg
import orjson
import pytest

from proxy.core.attempts import AttemptVerdict
from proxy.core.paging import Page
from proxy.store.postgres import events, sql
from proxy.store.postgres.deliveries import AttemptResult, ClaimedDelivery, DeliveryStore
from proxy.store.postgres.events import NewEvent
from proxy.store.postgres.pool import Pool
from proxy.store.postgres.webhooks import NewWebhook, WebhookStore

NETWORK = "ethereum/mainnet"


@dataclass
class Desk:
    """One webhook, and the stores around it."""

    url: str
    pool: Pool
    store: DeliveryStore
    webhooks: WebhookStore
    webhook: str

    async def add(self, *ids: str, day: datetime.date | None = None, **more: Any) -> set[str]:
        new = [NewEvent(id=each, webhook=self.webhook, type="t", body=each.encode(), day=day, **more) for each in ids]
        async with self.pool.connection() as connection, connection.transaction():
            return await events.add(connection, NETWORK, new)

    async def claim(self) -> list[ClaimedDelivery]:
        return (await self.store.claim({self.webhook: 100}, day_limits={}))[0]

    async def finish(self, claimed: list[ClaimedDelivery], state: Any = "delivered") -> None:
        verdict = AttemptVerdict(state, 0, 3600.0 if state == "due" else None)
        await self.store.finish([AttemptResult(each, verdict, "ok", 200, None, 1, 0.0) for each in claimed])

    async def deliver(self, *ids: str, day: datetime.date | None = None) -> None:
        await self.add(*ids, day=day)
        await self.finish(await self.claim())

    async def listed(self) -> dict[str, str]:
        found, total = await self.store.page(self.webhook, Page(1, 100), state=None, since=None)
        assert total == len(found)
        return {each.event_id: each.state for each in found}

    async def tables(self, of: str = "events", key: str = "id") -> dict[str, str]:
        async with self.pool.connection() as connection:
            rows = await connection.fetch(f"select {key}, tableoid::regclass::text from {of}")
        return {row[0]: row[1] for row in rows}

    async def execute(self, query: str, *values: Any) -> None:
        async with self.pool.connection() as connection:
            await connection.execute(query, *values)


def table(of: str, day: datetime.date) -> str:
    return f"{of}_{day:%Y%m%d}"


def today() -> datetime.date:
    return datetime.datetime.now(datetime.UTC).date()


def start_of(day: datetime.date) -> datetime.datetime:
    return datetime.datetime.combine(day, datetime.time(), datetime.UTC)


def days_ago(count: int) -> datetime.date:
    return today() - datetime.timedelta(days=count)


async def desk_at(url: str, pool: Pool) -> Desk:
    webhooks = WebhookStore(pool)
    async with pool.connection() as connection:
        await connection.execute("insert into accounts (id, name, email, plan) values ('a', 'a', 'a@b.c', 'free')")
    new = NewWebhook(account="a", network=NETWORK, live=True, url="https://r/", event_type="NEW_BLOCK", config={})
    made = await webhooks.create(webhooks.new_id(), new, addresses=None, secret=b"s", most=10)
    return Desk(url, pool, DeliveryStore(pool), webhooks, made.id)


@pytest.fixture
async def desk(database: str, pool: Pool) -> Desk:
    return await desk_at(database, pool)


async def test_event_is_delivered_listed_and_redelivered(desk: Desk) -> None:
    await desk.store.purge(30)
    assert await desk.add("evt_1", day=today()) == {"evt_1"}
    await desk.add("evt_2", day=days_ago(400))
    assert set((await desk.store.list_due()).active) == {desk.webhook}
    claimed = await desk.claim()
    assert {each.event_id: each.body for each in claimed} == {"evt_1": b"evt_1", "evt_2": b"evt_2"}
    await desk.finish(claimed)
    assert await desk.listed() == {"evt_1": "delivered", "evt_2": "delivered"}
    assert (await desk.store.list_due()).active == {}
    assert await desk.store.redeliver(desk.webhook, "evt_1")
    assert (
        await desk.store.redeliver_since(desk.webhook, events.FIRST[0], datetime.datetime.now(datetime.UTC), state=None)
        == 1
    )
    again = await desk.claim()
    assert {each.event_id for each in again} == {"evt_1", "evt_2"}
    await desk.finish(again[:1], "failed")
    await desk.finish(again[1:], "due")
    assert sorted((await desk.listed()).values()) == ["due", "failed"]
    read = await desk.store.read(desk.webhook, "evt_2")
    assert read is not None
    assert (read.body, len(read.attempts)) == (b"evt_2", 2)


async def test_redelivery_skips_no_number_of_an_attempt(desk: Desk) -> None:
    """Before the first attempt, while a retry waits, and after the last one. Only an attempt in progress keeps its number."""
    await desk.add("evt_1", day=today())
    assert await desk.store.redeliver(desk.webhook, "evt_1")
    numbers = []
    for state in ("due", "failed", "delivered"):
        claimed = await desk.claim()
        numbers += [each.claim for each in claimed]
        await desk.finish(claimed, state)
        assert await desk.store.redeliver(desk.webhook, "evt_1")
    assert numbers == [1, 2, 3]
    under_way = await desk.claim()
    assert await desk.store.redeliver(desk.webhook, "evt_1")
    # Its outcome no longer counts.
    await desk.finish(under_way)
    assert [each.claim for each in await desk.claim()] == [6]


async def test_event_is_stored_once_whichever_day_it_is_added(desk: Desk) -> None:
    await desk.store.purge(30)
    for day in (today(), days_ago(1), days_ago(400), None):
        name = f"evt_{day}"
        assert await desk.add(name, day=day) == {name}
        assert await desk.add(name, day=day) == set()
    # Without a day it is found under each.
    await desk.execute("update events set day = day - 1 where id = 'evt_None'")
    await desk.execute("update deliveries set day = day - 1 where event_id = 'evt_None'")
    assert await desk.add("evt_None") == set()
    assert len(await desk.listed()) == 4


async def test_added_twice_at_once_it_is_stored_once(desk: Desk) -> None:
    await desk.store.purge(30)
    async with asyncio.TaskGroup() as group:
        adding = [group.create_task(desk.add("evt_1", "evt_2", day=today())) for _ in range(8)]
    assert sorted(name for each in adding for name in each.result()) == ["evt_1", "evt_2"]
    assert len(await desk.listed()) == 2


async def test_reorganisation_takes_back_sent_events_and_deletes_others(desk: Desk) -> None:
    await desk.store.purge(30)
    await desk.add("evt_sent", day=today(), block=5, block_hash=b"5")
    await desk.finish(await desk.claim())
    await desk.add("evt_claimed", day=days_ago(1), block=5, block_hash=b"5")
    await desk.claim()
    await desk.add("evt_unsent", day=today(), block=5, block_hash=b"5")
    await desk.add("evt_held", day=today(), block=5, block_hash=b"5", after_block=9)
    async with desk.pool.connection() as connection, connection.transaction():
        withdrawn = await events.withdraw(connection, NETWORK, 4)
    assert {each.id for each in withdrawn} == {"evt_sent", "evt_claimed"}
    assert await desk.listed() == {"evt_sent": "delivered", "evt_claimed": "dropped"}
    assert not await desk.store.redeliver(desk.webhook, "evt_sent")


async def test_held_and_incomplete_events_get_their_delivery_once(desk: Desk) -> None:
    await desk.add("evt_1", day=today(), block=5, block_hash=b"5", after_block=7, lacks={"token": "0x"})
    async with desk.pool.connection() as connection, connection.transaction():
        await events.release(connection, NETWORK, 8)
        for _ in range(2):
            found = await events.list_incomplete(connection, NETWORK, metadata=False, after=events.FIRST, limit=5)
            await events.complete(connection, [(each, b"whole") for each in found], dropped=[])
    (claimed,) = await desk.claim()
    assert claimed.body == b"whole"


async def test_rows_are_in_the_table_of_their_day(desk: Desk) -> None:
    await desk.store.purge(30)
    await desk.add("evt_1", day=today())
    await desk.add("evt_2", day=days_ago(3))
    await desk.add("evt_3")
    assert await desk.tables() == {
        "evt_1": table("events", today()), "evt_2": "events_of_other_days", "evt_3": table("events", today())
    }  # fmt: skip
    assert {*(await desk.tables("deliveries", "event_id")).values()} == {"deliveries_open"}
    await desk.finish(await desk.claim())
    assert await desk.tables("deliveries", "event_id") == {
        "evt_1": table("deliveries", today()), "evt_2": "deliveries_of_other_days", "evt_3": table("deliveries", today())
    }  # fmt: skip
    assert await desk.store.redeliver(desk.webhook, "evt_1")
    assert (await desk.tables("deliveries", "event_id"))["evt_1"] == "deliveries_open"


async def test_old_days_are_dropped_except_for_what_is_due(desk: Desk) -> None:
    old, boundary = days_ago(40), days_ago(35)
    for day in (old, boundary):
        await desk.execute("select add_event_day(parent, $1) from unnest(array['events', 'deliveries']) parent", day)
    await desk.deliver("evt_done", day=old)
    await desk.add("evt_due", "evt_parked", "evt_held", day=old)
    await desk.add("evt_other", day=days_ago(400))
    for state in ("parked", "held"):
        await desk.execute(
            "update deliveries set state = $2 where event_id = $1", f"evt_{state}", state.replace("held", "over_quota")
        )
    await desk.execute("update deliveries set state = 'over_quota' where event_id = 'evt_other'")
    await desk.execute("update events set created_at = now() - interval '39 days'")
    await desk.execute(
        "update deliveries set created_at = now() - interval '39 days', due_at = now() + interval '1 hour'"
    )
    # Read from its block weeks later, so it is not old yet.
    await desk.deliver("evt_late", day=boundary)
    await desk.store.purge(30)
    assert await desk.tables() == {"evt_due": "events_of_other_days", "evt_late": table("events", boundary)}
    assert set(await desk.listed()) == {"evt_due", "evt_late"}
    await desk.execute("update deliveries set due_at = now() where event_id = 'evt_due'")
    (claimed,) = await desk.claim()
    assert claimed.event_id == "evt_due"
    await desk.finish([claimed])
    await desk.store.purge(30)
    assert set(await desk.listed()) == {"evt_late"}
    left = "select relname from pg_class where relkind = 'r' and relname ~ '^(events|deliveries)_[0-9]{8}$'"
    async with desk.pool.connection() as connection:
        tables = {row["relname"] for row in await connection.fetch(left)}
    ahead = [today() + datetime.timedelta(days=n) for n in range(3)]
    assert tables == {table(of, day) for of in ("events", "deliveries") for day in (boundary, *ahead)}


async def test_hot_statements_read_no_table_of_a_finished_day(desk: Desk) -> None:
    for n in range(-2, 30):
        await desk.execute(
            "select add_event_day(parent, $1) from unnest(array['events', 'deliveries']) parent", days_ago(n)
        )
    none = orjson.dumps([]).decode()
    hot: list[tuple[str, tuple[Any, ...]]] = [
        (sql.deliveries.list_due, (None,)),
        (sql.deliveries.claim, (["wh"], [1], None, 30.0)),
        (sql.deliveries.finish, (none, None)),
        (sql.deliveries.mark_counted, (["evt"],)),
        (sql.webhooks.unpark, ("wh", 10)),
        (sql.webhooks.list_parked, ()),
        (sql.fleet.count_deliveries, ()),
    ]
    for query, values in hot:
        assert "_202" not in await explain(desk, query, *values), query
    read = await explain(desk, sql.deliveries.read_claimed, today(), ["evt"])
    assert read.count(" on events_") == 1
    assert table("events", today()) in read
    # A page reads the indexes of its tables, and sorts none.
    days = [datetime.date.max, today()]
    page = await explain(desk, sql.deliveries.list_deliveries, "wh", events.FIRST[0], None, days, 20, 0)
    assert "Merge Append" in page
    assert page.count(" on deliveries_") == page.count("_webhook_id_created_at_event_id_ta") == len(days)
    counts = await explain(desk, sql.deliveries.count_deliveries, "wh", events.FIRST[0])
    assert counts.count("Index Only Scan") == 32 + 2
    tried = await explain(desk, sql.deliveries.list_attempts, ["evt"], 20, start_of(today()), start_of(days_ago(-1)))
    assert tried.count(" on attempts_") <= 3


async def test_pages_are_in_the_order_of_creation_over_all_tables(desk: Desk) -> None:
    """Some events are read from their blocks days later, and some deliveries are unfinished."""
    for n in range(10):
        await desk.execute(
            "select add_event_day(parent, $1) from unnest(array['events', 'deliveries']) parent", days_ago(n)
        )
    for n in range(10):
        await desk.deliver(*(f"evt_{n}_{i}" for i in range(7)), day=days_ago(n))
    await desk.add("evt_open_1", "evt_open_2", day=today())
    await desk.execute(
        "update deliveries set created_at = day::timestamp at time zone 'utc'"
        " + make_interval(days => (event_id ~ '_[25]$')::integer * 3, secs => abs(hashtext(event_id)) % 86400)"
    )
    async with desk.pool.connection() as connection:
        rows = await connection.fetch("select event_id from deliveries order by created_at desc, event_id")
    expected = [row["event_id"] for row in rows]
    for limit in (1, 5, 20, 100):
        listed = []
        for number in range(1, 72 // limit + 2):
            found, total = await desk.store.page(desk.webhook, Page(number, limit), state=None, since=None)
            assert total == 72
            listed += [each.event_id for each in found]
        assert listed == expected


async def explain(desk: Desk, query: str, *values: Any) -> str:
    async with desk.pool.connection() as connection, connection.transaction():
        # The tables are empty here.
        await connection.execute("set local enable_seqscan = off; set local enable_bitmapscan = off")
        return "\n".join(row[0] for row in await connection.fetch(f"explain (analyze, timing off) {query}", *values))


async def test_statement_that_confuses_the_tables_fails(desk: Desk) -> None:
    """A deliverer of the version before names rows by their place in a table, which is not unique any more."""
    await desk.store.purge(30)
    await desk.deliver("evt_1", day=today())
    with pytest.raises(asyncpg.CheckViolationError):
        await desk.execute("update deliveries set state = 'due', claim = claim + 1")


async def test_missing_days_do_not_fail_an_insert(desk: Desk) -> None:
    await desk.deliver("evt_1", day=today())
    await desk.deliver("evt_2", day=today() + datetime.timedelta(days=3000))
    await desk.store.purge(30)
    # Today's table cannot be made, since it has a row elsewhere. Tomorrow's can.
    await desk.deliver("evt_3", day=today())
    await desk.deliver("evt_4", day=today() + datetime.timedelta(days=1))
    assert await desk.tables() == {
        "evt_1": "events_of_other_days", "evt_2": "events_of_other_days", "evt_3": "events_of_other_days",
        "evt_4": table("events", today() + datetime.timedelta(days=1)),
    }  # fmt: skip
    await desk.execute("update events set created_at = now() - interval '31 days'")
    await desk.store.purge(30)
    assert set(await desk.listed()) == {"evt_4"}
