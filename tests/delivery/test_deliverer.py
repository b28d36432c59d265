"""Deliveries from a real database to real receivers: signing, retries, failures, concurrency and crashes."""

from __future__ import annotations

import asyncio
import time

import orjson
import pytest
import standardwebhooks
import svix
from aiohttp import web

from proxy.core import signatures
from proxy.core.attempts import Format
from proxy.core.delivery_concurrency import receiver_of
from proxy.core.signatures import matches
from proxy.store.postgres.secrets import Vault
from proxy.tasks import Tasks
from tests.delivery.harness import KEY, SECRET, VAULT, DeliveryHarness
from tests.service import until

# The specified schedules with each step at least a hundred times shorter, and the same number of steps.
SHORT: dict[Format, tuple[float, ...]] = {
    "A": (0.05, 0.06, 0.07, 0.08, 0.09),
    "B": (0.03, 0.04, 0.05, 0.06, 0.07, 0.08, 0.09),
}
NEVER: dict[Format, tuple[float, ...]] = {"A": (), "B": ()}


async def test_event_is_posted_unchanged_with_the_headers_of_format_a(harness: DeliveryHarness) -> None:
    hook = await harness.webhook("/a", "token_transfer")
    async with harness.delivering():
        (name,) = await harness.events(hook, value="7")
        await until(lambda: harness.are_all(hook, "delivered"))
    (post,) = harness.inbox.at("/a")
    timestamp = int(post.headers["X-Service-Timestamp"])
    assert abs(timestamp - time.time()) < 60
    assert post.body == orjson.dumps({"id": name, "event_type": "token_transfer", "data": {"value": "7"}})
    assert matches(post.headers["X-Service-Signature"], signatures.format_a(SECRET, timestamp, post.body))
    assert post.headers["Content-Type"] == "application/json"
    assert post.headers["X-Webhook-Attempt"] == "1"
    assert not [header for header in post.headers if "Platform" in header or header == "X-Webhook-Event"]


async def test_event_is_posted_with_the_headers_of_format_b(harness: DeliveryHarness) -> None:
    hook = await harness.webhook("/b", "TOKEN_TRANSFER")
    async with harness.delivering():
        (name,) = await harness.events(hook)
        await until(lambda: harness.are_all(hook, "delivered"))
    (post,) = harness.inbox.at("/b")
    assert post.headers["X-Platform-Signature"] == signatures.format_b(SECRET, post.body)
    assert post.headers["X-Webhook-Event"] == "TOKEN_TRANSFER"
    assert post.headers["X-Webhook-Idempotency-Key"] == name
    assert not [header for header in post.headers if "Service" in header]


@pytest.mark.parametrize("event_type", ["token_transfer", "NEW_BLOCK"])
async def test_standard_verifiers_accept_deliveries(harness: DeliveryHarness, event_type: str) -> None:
    hook = await harness.webhook("/", event_type)
    async with harness.delivering():
        await harness.events(hook)
        await until(lambda: harness.are_all(hook, "delivered"))
    (post,) = harness.inbox.posts
    named = {name.lower(): value for name, value in post.headers.items()}
    for library in (standardwebhooks, svix):
        library.Webhook(SECRET).verify(post.body, named)
        with pytest.raises(library.WebhookVerificationError):
            library.Webhook(SECRET).verify(post.body + b" ", named)
        with pytest.raises(library.WebhookVerificationError):
            library.Webhook(signatures.secret_of(b"x" * 32)).verify(post.body, named)


async def test_old_secret_signs_as_well_until_it_expires(harness: DeliveryHarness) -> None:
    hook = await harness.webhook()
    new = b"n" * 32
    await harness.webhooks.rotate(hook.id, account=hook.account, secret=VAULT.seal(hook.id, new), old_for_s=3600)
    async with harness.delivering():
        await harness.events(hook)
        await until(lambda: harness.are_all(hook, "delivered"))
        await harness.execute("update webhooks set old_secret_until = now()")
        await harness.events(hook)
        await until(lambda: harness.are_all(hook, "delivered"))
    both, one = harness.inbox.posts
    named = {name.lower(): value for name, value in both.headers.items()}
    for secret in (SECRET, signatures.secret_of(new)):
        standardwebhooks.Webhook(secret).verify(both.body, named)
    assert "X-Service-Signature-Previous" in both.headers
    assert "X-Service-Signature-Previous" not in one.headers
    with pytest.raises(standardwebhooks.WebhookVerificationError):
        standardwebhooks.Webhook(SECRET).verify(one.body, {name.lower(): value for name, value in one.headers.items()})


# Retries


async def test_attempts_keep_id_and_body_and_have_their_own_timestamp_and_signature(harness: DeliveryHarness) -> None:
    hook = await harness.webhook("/x")
    harness.inbox.answer("/x", 500, 404, 200)
    async with harness.delivering(schedules={**SHORT, "A": (1.1, 0.05)}):
        await harness.events(hook)
        await until(lambda: harness.are_all(hook, "delivered"))
    posts = harness.inbox.at("/x")
    assert len({(post.event_id, post.body) for post in posts}) == 1
    assert [post.headers["X-Webhook-Attempt"] for post in posts] == ["1", "2", "3"]
    assert posts[0].headers["X-Service-Timestamp"] != posts[2].headers["X-Service-Timestamp"]
    assert posts[0].headers["X-Service-Signature"] != posts[2].headers["X-Service-Signature"]
    rows = await harness.rows("select number, outcome, status, excerpt from attempts order by number")
    assert [tuple(row) for row in rows] == [
        (1, "answered", 500, "excerpt"),
        (2, "answered", 404, "excerpt"),
        (3, "answered", 200, None),
    ]


async def due_in_s(harness: DeliveryHarness) -> float:
    rows = await harness.rows(
        "select extract(epoch from d.due_at - a.began_at - make_interval(secs => a.took_ms / 1000.0))::float8 as wait"
        " from deliveries d cross join lateral"
        " (select * from attempts where event_id = d.event_id order by number desc limit 1) a"
    )
    return float(rows[0]["wait"])


@pytest.mark.parametrize(
    ("event_type", "steps"),
    [("token_transfer", (10, 60, 600, 3600, 21600)), ("NEW_BLOCK", (1, 5, 30, 300, 1800, 7200, 28800))],
)  # fmt: skip
async def test_next_attempt_follows_every_step_of_the_schedule(
    harness: DeliveryHarness, event_type: str, steps: tuple[int, ...]
) -> None:
    """Time is simulated: after each check the next attempt is made due at once."""
    hook = await harness.webhook("/x", event_type)
    harness.inbox.answer("/x", 500)
    async with harness.delivering() as deliverer:
        await harness.events(hook)
        for failures, step in enumerate(steps, 1):

            async def failed(failures: int = failures) -> bool:
                row = (await harness.rows("select state, tries, due_at > now() as later from deliveries"))[0]
                return (row["state"], row["tries"]) == ("due", failures)

            await until(failed)
            # The time between the end of the attempt and its storing adds to it: usually parts of a second.
            assert step - 0.01 <= await due_in_s(harness) < step + 5
            await harness.execute("update deliveries set due_at = now()")
            deliverer._wake.set()
        ends = {"parked" if event_type.islower() else "failed"}
        await until(lambda: harness.are_all(hook, next(iter(ends))))
    assert len(harness.inbox.posts) == len(steps) + 1


async def test_exhausted_retries_in_format_a_pause_the_webhook_and_keep_its_events(harness: DeliveryHarness) -> None:
    """In real time, on a shortened schedule with the same number of steps."""
    hook = await harness.webhook("/x", "token_transfer")
    harness.inbox.answer("/x", 500)
    async with harness.delivering(schedules=SHORT):
        await harness.events(hook)
        await until(lambda: harness.are_all(hook, "parked"))
        assert await harness.status(hook) == ("paused", "failures")
        assert len(harness.inbox.at("/x")) == 6
        await harness.events(hook, 3)
        await until(lambda: harness.are_all(hook, "parked"))
        assert len(harness.inbox.at("/x")) == 6
        harness.inbox.answer("/x", 200)
        await harness.webhooks.move(hook, "resume")
        await until(lambda: harness.are_all(hook, "delivered"))
    assert harness.inbox.ids() == {*harness.made[hook.id]}
    assert await harness.status(hook) == ("active", None)


async def test_exhausted_retries_in_format_b_fail_the_event_and_not_the_webhook(harness: DeliveryHarness) -> None:
    hook = await harness.webhook("/x", "NEW_BLOCK")
    harness.inbox.answer("/x", *[500] * 8, 200)
    async with harness.delivering(schedules=SHORT):
        (first,) = await harness.events(hook)
        await until(lambda: harness.are_all(hook, "failed"))
        (second,) = await harness.events(hook)

        async def done() -> bool:
            return await harness.states(hook) == {first: "failed", second: "delivered"}

        await until(done)
    assert await harness.status(hook) == ("active", None)
    assert len(harness.inbox.at("/x")) == 9
    assert not await harness.rows("select from mails")


async def test_gone_receiver_disables_its_webhook(harness: DeliveryHarness) -> None:
    hook = await harness.webhook("/x", "NEW_BLOCK")
    harness.inbox.answer("/x", 410)
    async with harness.delivering(each=1):
        await harness.events(hook, 3)

        async def done() -> bool:
            return sorted((await harness.states(hook)).values()) == ["failed", "parked", "parked"]

        await until(done)
    assert await harness.status(hook) == ("disabled", "gone")
    assert len(harness.inbox.posts) == 1
    assert len(await harness.rows("select from mails")) == 1


async def test_retry_after_is_honoured(harness: DeliveryHarness) -> None:
    hook = await harness.webhook("/x", "NEW_BLOCK")
    harness.inbox.answer("/x", 429, Retry_After="1000")
    async with harness.delivering():
        await harness.events(hook)
        await until(lambda: harness.rows("select from attempts"))
    assert 999.9 < await due_in_s(harness) < 1005


@pytest.mark.parametrize("status", [500, 410])
async def test_test_event_is_attempted_once_and_does_not_affect_the_webhook(
    harness: DeliveryHarness, status: int
) -> None:
    hook = await harness.webhook("/x")
    harness.inbox.answer("/x", status)
    async with harness.delivering(schedules=NEVER):
        await harness.events(hook, test=True)
        await until(lambda: harness.are_all(hook, "failed"))
    assert await harness.status(hook) == ("active", None)


async def test_many_exhausted_deliveries_pause_once_and_queue_one_mail(harness: DeliveryHarness) -> None:
    hook = await harness.webhook("/x")
    harness.inbox.answer("/x", 500)
    # All of them are claimed before the first has failed.
    await harness.events(hook, 40)
    claimed, _ = await harness.store.claim({hook.id: 40}, day_limits={}, lease_s=0.0)
    assert len(claimed) == 40
    async with (
        harness.delivering(schedules=NEVER, total=160, each=80) as one,
        harness.delivering(schedules=NEVER) as two,
    ):
        for deliverer in (one, two):
            deliverer._lanes.lane(hook.account, receiver_of(hook.url)).window = 40
        await until(lambda: harness.are_all(hook, "parked"))
    assert await harness.status(hook) == ("paused", "failures")
    (mail,) = await harness.rows("select * from mails")
    assert orjson.loads(mail["about"])["webhook"] == hook.id


# Concurrency


async def test_paused_webhook_gets_nothing_and_everything_once_resumed(harness: DeliveryHarness) -> None:
    hook = await harness.webhook()
    other = await harness.webhook("/other")
    await harness.webhooks.move(hook, "pause")
    async with harness.delivering():
        await harness.events(hook, 5)
        await harness.events(other, 5)
        await until(lambda: harness.are_all(hook, "parked"))
        await until(lambda: harness.are_all(other, "delivered"))
        assert not harness.inbox.at("/")
        await harness.webhooks.move(hook, "activate")
        await until(lambda: harness.are_all(hook, "delivered"))
    assert len(harness.inbox.at("/")) == 5


async def test_deleted_webhook_drops_its_remaining_deliveries(harness: DeliveryHarness) -> None:
    hook = await harness.webhook()
    await harness.events(hook, 5)
    await harness.webhooks.move(hook, "delete")
    async with harness.delivering():
        await until(lambda: harness.are_all(hook, "dropped"))
    assert not harness.inbox.posts


@pytest.mark.parametrize("known", [True, False], ids=["known to be slow", "new"])
async def test_slow_receivers_do_not_delay_others(harness: DeliveryHarness, known: bool) -> None:
    """There are more of them than slots, and they do not reply while others are served."""
    stuck = asyncio.Event()

    async def page(request: web.Request) -> web.Response:
        await stuck.wait()
        return web.Response()

    account = await harness.account()
    good = await harness.webhook("/good", account=account)
    slow = [await harness.webhook(f"/slow{n}", account=account, server=n + 1) for n in range(20)]
    async with harness.delivering(total=32, each=8) as deliverer:
        if not known:
            await harness.events(good)
            await until(lambda: harness.are_all(good, "delivered"))
        for n, hook in enumerate(slow):
            harness.inbox.pages[f"/slow{n}"] = page
            deliverer._lanes.lane(hook.account, receiver_of(hook.url)).kind = "slow" if known else "new"
            await harness.events(hook, 10)
        stuck_now = 8 if known else 12
        await until(lambda: len(harness.inbox.posts) - len(harness.inbox.at("/good")) == stuck_now)
        for _ in range(5):
            await harness.events(good, 20)
            await until(lambda: harness.are_all(good, "delivered"))
        assert len(harness.inbox.posts) - len(harness.inbox.at("/good")) == stuck_now
        stuck.set()
        for hook in slow:
            await until(lambda hook=hook: harness.are_all(hook, "delivered"), within_s=30.0)


@pytest.mark.parametrize("accounts", [1, 30])
async def test_hanging_webhooks_of_others_on_the_same_host_delay_no_delivery(
    harness: DeliveryHarness, accounts: int
) -> None:
    """All webhooks of a tenant's receiver and of hostile ones point to the same server."""
    stuck = asyncio.Event()

    async def page(request: web.Request) -> web.Response:
        await stuck.wait()
        return web.Response()

    good = await harness.webhook("/good")
    owners = [await harness.account() for _ in range(accounts)]
    hostile = [await harness.webhook(f"/stuck{n}", account=owners[n % accounts]) for n in range(max(5, accounts))]
    for hook in hostile:
        harness.inbox.pages[hook.url.removeprefix(harness.inbox.url(""))] = page
    async with harness.delivering(total=64, each=16, timeout_s=60.0):
        await harness.events(good, 2)
        await until(lambda: harness.are_all(good, "delivered"))
        for hook in hostile:
            await harness.events(hook, 10)
        await until(lambda: len(harness.inbox.posts) > 2)
        await harness.events(good, 60)
        await until(lambda: harness.are_all(good, "delivered"))
        assert len(harness.inbox.posts) - 62 <= (1 if accounts == 1 else 12)
        stuck.set()
        for hook in hostile:
            await until(lambda hook=hook: harness.are_all(hook, "delivered"), within_s=30.0)


@pytest.mark.parametrize("webhooks", [1, 20])
async def test_receiver_gets_no_more_than_its_share_concurrently(harness: DeliveryHarness, webhooks: int) -> None:
    now = most = 0

    async def page(request: web.Request) -> web.Response:
        nonlocal now, most
        now += 1
        most = max(most, now)
        await asyncio.sleep(0.005)
        now -= 1
        return web.Response()

    hooks = [await harness.webhook(f"/{n}") for n in range(webhooks)]
    for n, hook in enumerate(hooks):
        harness.inbox.pages[f"/{n}"] = page
        await harness.events(hook, 200 // webhooks)
    async with harness.delivering(total=64, each=8):
        for hook in hooks:
            await until(lambda hook=hook: harness.are_all(hook, "delivered"))
    assert most == (4 if webhooks == 1 else 8)
    assert len(harness.inbox.posts) == 200


async def test_two_deliverers_send_everything_once(harness: DeliveryHarness) -> None:
    hooks = [await harness.webhook(f"/{n}") for n in range(5)]
    async with harness.delivering(), harness.delivering():
        for hook in hooks:
            await harness.events(hook, 60)
        for hook in hooks:
            await until(lambda hook=hook: harness.are_all(hook, "delivered"))
    names = [post.event_id for post in harness.inbox.posts]
    assert len(names) == len({*names}) == 300


# Crashes


async def test_attempts_in_progress_are_repeated_after_a_crash(harness: DeliveryHarness) -> None:
    hook = await harness.webhook()
    await harness.events(hook, 5)
    claimed, _ = await harness.store.claim({hook.id: 3}, day_limits={}, lease_s=0.3)  # a claim that never ends
    async with harness.delivering():
        await until(lambda: harness.are_all(hook, "delivered"))
    assert harness.inbox.ids() == {*harness.made[hook.id]}
    repeated = {each.event_id for each in claimed}
    assert {post.event_id for post in harness.inbox.posts if post.headers["X-Webhook-Attempt"] == "2"} == repeated


async def test_result_of_a_claim_that_was_taken_over_is_ignored(harness: DeliveryHarness) -> None:
    hook = await harness.webhook("/x")
    gate = asyncio.Event()
    harness.inbox.answer("/x", 500)
    fails = harness.inbox.pages["/x"]

    async def page(request: web.Request) -> web.StreamResponse:
        await gate.wait()
        return await fails(request)

    harness.inbox.pages["/x"] = page
    await harness.events(hook)
    async with harness.delivering(lease_s=0.1):
        await until(lambda: len(harness.inbox.posts) == 1)
        harness.inbox.pages.clear()
        async with harness.delivering():
            await until(lambda: harness.are_all(hook, "delivered"))
        gate.set()
        await until(lambda: harness.rows("select from attempts where status = 500"))
        assert await harness.are_all(hook, "delivered")


async def test_drained_deliverer_has_stored_all_results(harness: DeliveryHarness) -> None:
    hook = await harness.webhook()

    async def page(request: web.Request) -> web.Response:
        await asyncio.sleep(0.1)
        return web.Response()

    harness.inbox.pages["/"] = page
    await harness.events(hook, 300)
    async with harness.delivering() as deliverer:
        await until(lambda: len(harness.inbox.posts) > 10)
        await deliverer.drain()
        sent = len(harness.inbox.posts)
        rows = await harness.rows("select state, count(*) from deliveries group by 1")
    assert {row["state"]: row["count"] for row in rows} == {"delivered": sent, "due": 300 - sent}
    assert "stopping" in repr(deliverer)


async def test_cancelled_loop_loses_nothing(harness: DeliveryHarness) -> None:
    hook = await harness.webhook()
    await harness.events(hook, 200)
    for _ in range(5):
        async with harness.delivering(lease_s=0.2):
            before = len(harness.inbox.posts)
            await until(lambda before=before: len(harness.inbox.posts) > before)
    async with harness.delivering(lease_s=0.2):
        await until(lambda: harness.are_all(hook, "delivered"))
    assert harness.inbox.ids() == {*harness.made[hook.id]}
    assert len(harness.inbox.posts) <= 200 + 5 * 8


async def test_cancelled_loop_leaves_its_slots_to_the_next_run(harness: DeliveryHarness) -> None:
    hook = await harness.webhook()
    stuck = asyncio.Event()

    async def page(request: web.Request) -> web.Response:
        await stuck.wait()
        return web.Response()

    harness.inbox.pages["/"] = page
    await harness.events(hook, 3)
    async with harness.deliverer(total=2, lease_s=0.2) as deliverer:
        for sent in (1, 2):
            tasks = Tasks()
            tasks.start("deliverer", deliverer.run)
            await until(lambda sent=sent: len(harness.inbox.posts) == sent)
            await tasks.close()
            assert deliverer._lanes.busy == 1
        stuck.set()
        tasks = Tasks()
        tasks.start("deliverer", deliverer.run)
        await until(lambda: harness.are_all(hook, "delivered"))
        await tasks.close()


async def test_delivery_that_cannot_be_signed_stays_queued(harness: DeliveryHarness) -> None:
    """It is no failure of the receiver: a deliverer with the right key delivers it after the lease."""
    hook = await harness.webhook()
    await harness.events(hook)
    await harness.execute(
        "update webhooks set secret = $2 where id = $1", hook.id, Vault("another key").seal(hook.id, KEY)
    )
    async with harness.delivering(lease_s=0.5):
        await until(lambda: _was_claimed_twice(harness))
    assert not harness.inbox.posts
    assert await harness.rows("select * from attempts") == []
    assert await harness.status(hook) == ("active", None)
    await harness.execute("update webhooks set secret = $2 where id = $1", hook.id, VAULT.seal(hook.id, KEY))
    async with harness.delivering():
        await until(lambda: harness.are_all(hook, "delivered"))


async def _was_claimed_twice(harness: DeliveryHarness) -> bool:
    return bool(await harness.rows("select 1 from deliveries where claim >= 2"))
