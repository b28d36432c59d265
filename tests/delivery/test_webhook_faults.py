"""Fault plans of webhooks that test keys created: late, repeated and corrected deliveries, and other webhooks as ever."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import orjson
import pytest

from proxy.chains.evm import samples
from proxy.chains.evm.watch_index import KINDS
from proxy.core import webhook_bodies
from proxy.core.webhook_bodies import CORRECTIONS, BodyChain
from proxy.core.webhook_faults import fault_of, reorganised
from tests.delivery.harness import DeliveryHarness
from tests.service import until

NO_LIMITS = {"enterprise": 0}


async def test_delivery_waits_for_its_delay_and_for_no_longer(harness: DeliveryHarness) -> None:
    late, plain = await harness.webhook("/late", fault="delay=60s"), await harness.webhook("/plain")
    (event,) = await harness.events(late)
    (other,) = await harness.events(plain)
    rooms = {late.id: 1, plain.id: 1}
    claimed, _ = await harness.store.claim(rooms, day_limits=NO_LIMITS)
    assert [each.event_id for each in claimed] == [other]
    due = await harness.store.list_due()
    assert due.next_s is not None
    assert 0 < due.next_s <= 60
    later = datetime.now(UTC) + timedelta(seconds=61)
    claimed, _ = await harness.store.claim({late.id: 1}, day_limits=NO_LIMITS, at=later)
    assert [(each.event_id, each.claim) for each in claimed] == [(event, 1)]


async def test_event_is_delivered_again_with_the_same_id(harness: DeliveryHarness) -> None:
    hook, plain = await harness.webhook("/twice", fault="duplicate=2"), await harness.webhook("/once")
    async with harness.delivering():
        (event,) = await harness.events(hook)
        await harness.events(plain)
        await until(lambda: harness.are_all(hook, "delivered"))
        await until(lambda: harness.are_all(plain, "delivered"))
    posts = harness.inbox.at("/twice")
    assert [post.event_id for post in posts] == [event] * 3
    assert len({post.body for post in posts}) == 1
    assert [post.headers["X-Webhook-Attempt"] for post in posts] == ["1", "2", "3"]
    assert len(harness.inbox.at("/once")) == 1


async def test_failed_attempt_is_not_a_copy(harness: DeliveryHarness) -> None:
    hook = await harness.webhook("/flaky", fault="duplicate=1")
    harness.inbox.answer("/flaky", 500, 200)
    async with harness.delivering(schedules={"A": (0.01,), "B": (0.01,)}):
        await harness.events(hook)
        await until(lambda: harness.are_all(hook, "delivered"))
    assert len(harness.inbox.at("/flaky")) == 3


@pytest.mark.parametrize("event_type", ["token_transfer", "NEW_BLOCK"])
async def test_event_is_taken_back_and_comes_again_under_a_new_id(harness: DeliveryHarness, event_type: str) -> None:
    hook = await harness.webhook("/reorg", event_type, fault="correction")
    async with harness.delivering():
        (event,) = await harness.events(hook, chain="dev")
        await until(lambda: len(harness.inbox.at("/reorg")) == 3)
        await until(lambda: harness.are_all(hook, "delivered"))
    kind, takes_back = ("event_type", "takes_back") if event_type.islower() else ("type", "takesBack")
    # On a slow machine, the last two may be sent at once.
    posts = [orjson.loads(post.body) for post in harness.inbox.at("/reorg")]
    first, again, correction = sorted(posts, key=lambda said: (said[kind] != event_type, said["id"] != event))
    assert posts[0] == first
    assert (correction[kind], correction["data"][takes_back]) == (
        CORRECTIONS["A" if event_type.islower() else "B"],
        event,
    )
    assert correction["data"]["event"] == first["data"]
    assert (again[kind], again["data"]) == (event_type, first["data"])
    assert len({each["id"] for each in (first, correction, again)}) == 3
    # As after a reorganisation, the first event is not delivered again.
    assert not await harness.store.redeliver(hook.id, event)
    assert await harness.store.redeliver(hook.id, again["id"])


async def test_attempt_that_lost_its_claim_takes_nothing_back(harness: DeliveryHarness) -> None:
    hook = await harness.webhook("/", fault="correction")
    (event,) = await harness.events(hook, chain="dev")
    async with harness.deliverer() as deliverer:
        (claimed,), _ = await harness.store.claim({hook.id: 1}, day_limits=NO_LIMITS)
        assert await harness.store.redeliver(hook.id, event)
        await deliverer._attempt(claimed)
        await deliverer._write(deliverer._finished_attempts)
    assert await harness.states(hook) == {event: "due"}
    assert [row["taken_back"] for row in await harness.rows("select taken_back from events")] == [False]


@pytest.mark.parametrize("event_type", KINDS)
def test_event_of_every_type_can_be_taken_back(event_type: str) -> None:
    data = samples.sample_of(event_type, chain="dev", symbol="ETH", decimals=18, block=1, time="2026-01-01T00:00:00Z")
    chain = BodyChain("dev", 31337)
    body = webhook_bodies.body_of("evt_1", event_type, "wh_1", chain=chain, at="2026", data=data, test=True)
    correction, again = reorganised("evt_1", event_type, "wh_1", body, at="2026")
    said, repeated = orjson.loads(correction.body), orjson.loads(again.body)
    assert (said["id"], said["test"], correction.takes_back) == (correction.id, True, "evt_1")
    assert (repeated["id"], repeated["data"]) == (again.id, orjson.loads(body)["data"])
    assert said.get("chain") in (None, "dev")


def test_plan_of_a_later_version_has_no_effect() -> None:
    assert fault_of("explode=1", "evt_1", age_s=0, copies=0) is None
    assert fault_of("correction,p=0", "evt_1", age_s=0, copies=0) is None
