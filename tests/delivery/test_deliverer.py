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
from proxy.core.lanes import receiver_of
from proxy.core.retries import Format
from proxy.core.signatures import matches
from proxy.store.secrets import Vault
from proxy.tasks import Tasks
from tests.delivery.scene import KEY, SECRET, VAULT, Scene
from tests.service import until

# The specified schedules with each step at least a hundred times shorter, and the same number of steps.
SHORT: dict[Format, tuple[float, ...]] = {
    "A": (0.05, 0.06, 0.07, 0.08, 0.09),
    "B": (0.03, 0.04, 0.05, 0.06, 0.07, 0.08, 0.09),
}
NEVER: dict[Format, tuple[float, ...]] = {"A": (), "B": ()}


async def test_event_is_posted_unchanged_with_the_headers_of_format_a(scene: Scene) -> None:
    hook = await scene.webhook("/a", "token_transfer")
    async with scene.delivering():
        (name,) = await scene.events(hook, value="7")
        await until(lambda: scene.are_all(hook, "delivered"))
    (post,) = scene.inbox.at("/a")
    timestamp = int(post.headers["X-Service-Timestamp"])
    assert abs(timestamp - time.time()) < 60
    assert post.body == orjson.dumps({"id": name, "event_type": "token_transfer", "data": {"value": "7"}})
    assert matches(post.headers["X-Service-Signature"], signatures.format_a(SECRET, timestamp, post.body))
    assert post.headers["Content-Type"] == "application/json"
    assert post.headers["X-Webhook-Attempt"] == "1"
    assert not [header for header in post.headers if "Platform" in header or header == "X-Webhook-Event"]


async def test_event_is_posted_with_the_headers_of_format_b(scene: Scene) -> None:
    hook = await scene.webhook("/b", "TOKEN_TRANSFER")
    async with scene.delivering():
        (name,) = await scene.events(hook)
        await until(lambda: scene.are_all(hook, "delivered"))
    (post,) = scene.inbox.at("/b")
    assert post.headers["X-Platform-Signature"] == signatures.format_b(SECRET, post.body)
    assert post.headers["X-Webhook-Event"] == "TOKEN_TRANSFER"
    assert post.headers["X-Webhook-Idempotency-Key"] == name
    assert not [header for header in post.headers if "Service" in header]


@pytest.mark.parametrize("event_type", ["token_transfer", "NEW_BLOCK"])
async def test_standard_verifiers_accept_deliveries(scene: Scene, event_type: str) -> None:
    hook = await scene.webhook("/", event_type)
    async with scene.delivering():
        await scene.events(hook)
        await until(lambda: scene.are_all(hook, "delivered"))
    (post,) = scene.inbox.posts
    named = {name.lower(): value for name, value in post.headers.items()}
    for library in (standardwebhooks, svix):
        library.Webhook(SECRET).verify(post.body, named)
        with pytest.raises(library.WebhookVerificationError):
            library.Webhook(SECRET).verify(post.body + b" ", named)
        with pytest.raises(library.WebhookVerificationError):
            library.Webhook(signatures.secret_of(b"x" * 32)).verify(post.body, named)


async def test_old_secret_signs_as_well_until_it_expires(scene: Scene) -> None:
    hook = await scene.webhook()
    new = b"n" * 32
    await scene.webhooks.rotate(hook.id, account=hook.account, secret=VAULT.seal(hook.id, new), old_for_s=3600)
    async with scene.delivering():
        await scene.events(hook)
        await until(lambda: scene.are_all(hook, "delivered"))
        await scene.execute("update webhooks set old_secret_until = now()")
        await scene.events(hook)
        await until(lambda: scene.are_all(hook, "delivered"))
    both, one = scene.inbox.posts
    named = {name.lower(): value for name, value in both.headers.items()}
    for secret in (SECRET, signatures.secret_of(new)):
        standardwebhooks.Webhook(secret).verify(both.body, named)
    assert "X-Service-Signature-Previous" in both.headers
    assert "X-Service-Signature-Previous" not in one.headers
    with pytest.raises(standardwebhooks.WebhookVerificationError):
        standardwebhooks.Webhook(SECRET).verify(one.body, {name.lower(): value for name, value in one.headers.items()})


# Retries


async def test_attempts_keep_id_and_body_and_have_their_own_timestamp_and_signature(scene: Scene) -> None:
    hook = await scene.webhook("/x")
    scene.inbox.answer("/x", 500, 404, 200)
    async with scene.delivering(schedules={**SHORT, "A": (1.1, 0.05)}):
        await scene.events(hook)
        await until(lambda: scene.are_all(hook, "delivered"))
    posts = scene.inbox.at("/x")
    assert len({(post.event_id, post.body) for post in posts}) == 1
    assert [post.headers["X-Webhook-Attempt"] for post in posts] == ["1", "2", "3"]
    assert posts[0].headers["X-Service-Timestamp"] != posts[2].headers["X-Service-Timestamp"]
    assert posts[0].headers["X-Service-Signature"] != posts[2].headers["X-Service-Signature"]
    rows = await scene.rows("select number, outcome, status, excerpt from attempts order by number")
    assert [tuple(row) for row in rows] == [
        (1, "answered", 500, "excerpt"),
        (2, "answered", 404, "excerpt"),
        (3, "answered", 200, None),
    ]


async def due_in_s(scene: Scene) -> float:
    rows = await scene.rows(
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
    scene: Scene, event_type: str, steps: tuple[int, ...]
) -> None:
    """Time is simulated: after each check the next attempt is made due at once."""
    hook = await scene.webhook("/x", event_type)
    scene.inbox.answer("/x", 500)
    async with scene.delivering() as deliverer:
        await scene.events(hook)
        for failures, step in enumerate(steps, 1):

            async def failed(failures: int = failures) -> bool:
                row = (await scene.rows("select state, tries, due_at > now() as later from deliveries"))[0]
                return (row["state"], row["tries"]) == ("due", failures)

            await until(failed)
            # The time between the end of the attempt and its storing adds to it: usually parts of a second.
            assert step - 0.01 <= await due_in_s(scene) < step + 5
            await scene.execute("update deliveries set due_at = now()")
            deliverer._wake.set()
        ends = {"parked" if event_type.islower() else "failed"}
        await until(lambda: scene.are_all(hook, next(iter(ends))))
    assert len(scene.inbox.posts) == len(steps) + 1


async def test_exhausted_retries_in_format_a_pause_the_webhook_and_keep_its_events(scene: Scene) -> None:
    """In real time, on a shortened schedule with the same number of steps."""
    hook = await scene.webhook("/x", "token_transfer")
    scene.inbox.answer("/x", 500)
    async with scene.delivering(schedules=SHORT):
        await scene.events(hook)
        await until(lambda: scene.are_all(hook, "parked"))
        assert await scene.status(hook) == ("paused", "failures")
        assert len(scene.inbox.at("/x")) == 6
        await scene.events(hook, 3)
        await until(lambda: scene.are_all(hook, "parked"))
        assert len(scene.inbox.at("/x")) == 6
        scene.inbox.answer("/x", 200)
        await scene.webhooks.move(hook, "resume")
        await until(lambda: scene.are_all(hook, "delivered"))
    assert scene.inbox.ids() == {*scene.made[hook.id]}
    assert await scene.status(hook) == ("active", None)


async def test_exhausted_retries_in_format_b_fail_the_event_and_not_the_webhook(scene: Scene) -> None:
    hook = await scene.webhook("/x", "NEW_BLOCK")
    scene.inbox.answer("/x", *[500] * 8, 200)
    async with scene.delivering(schedules=SHORT):
        (first,) = await scene.events(hook)
        await until(lambda: scene.are_all(hook, "failed"))
        (second,) = await scene.events(hook)

        async def done() -> bool:
            return await scene.states(hook) == {first: "failed", second: "delivered"}

        await until(done)
    assert await scene.status(hook) == ("active", None)
    assert len(scene.inbox.at("/x")) == 9
    assert not await scene.rows("select from mails")


async def test_gone_receiver_disables_its_webhook(scene: Scene) -> None:
    hook = await scene.webhook("/x")
    scene.inbox.answer("/x", 410)
    async with scene.delivering(each=1):
        await scene.events(hook, 3)

        async def done() -> bool:
            return sorted((await scene.states(hook)).values()) == ["failed", "parked", "parked"]

        await until(done)
    assert await scene.status(hook) == ("disabled", "gone")
    assert len(scene.inbox.posts) == 1
    assert len(await scene.rows("select from mails")) == 1


async def test_retry_after_is_honoured(scene: Scene) -> None:
    hook = await scene.webhook("/x", "NEW_BLOCK")
    scene.inbox.answer("/x", 429, Retry_After="1000")
    async with scene.delivering():
        await scene.events(hook)
        await until(lambda: scene.rows("select from attempts"))
    assert 999.9 < await due_in_s(scene) < 1005


@pytest.mark.parametrize("status", [500, 410])
async def test_test_event_is_attempted_once_and_does_not_affect_the_webhook(scene: Scene, status: int) -> None:
    hook = await scene.webhook("/x")
    scene.inbox.answer("/x", status)
    async with scene.delivering(schedules=NEVER):
        await scene.events(hook, test=True)
        await until(lambda: scene.are_all(hook, "failed"))
    assert await scene.status(hook) == ("active", None)


async def test_many_exhausted_deliveries_pause_once_and_queue_one_mail(scene: Scene) -> None:
    hook = await scene.webhook("/x")
    scene.inbox.answer("/x", 500)
    # All of them are claimed before the first has failed.
    await scene.events(hook, 40)
    claimed, _ = await scene.store.claim({hook.id: 40}, day_limits={}, lease_s=0.0)
    assert len(claimed) == 40
    async with scene.delivering(schedules=NEVER, total=64, each=40) as one, scene.delivering(schedules=NEVER) as two:
        for deliverer in (one, two):
            deliverer._lanes.lane(receiver_of(hook.url)).window = 40
        await until(lambda: scene.are_all(hook, "parked"))
    assert await scene.status(hook) == ("paused", "failures")
    (mail,) = await scene.rows("select * from mails")
    assert orjson.loads(mail["about"])["webhook"] == hook.id


# Concurrency


async def test_paused_webhook_gets_nothing_and_everything_once_resumed(scene: Scene) -> None:
    hook = await scene.webhook()
    other = await scene.webhook("/other")
    await scene.webhooks.move(hook, "pause")
    async with scene.delivering():
        await scene.events(hook, 5)
        await scene.events(other, 5)
        await until(lambda: scene.are_all(hook, "parked"))
        await until(lambda: scene.are_all(other, "delivered"))
        assert not scene.inbox.at("/")
        await scene.webhooks.move(hook, "activate")
        await until(lambda: scene.are_all(hook, "delivered"))
    assert len(scene.inbox.at("/")) == 5


async def test_deleted_webhook_drops_its_remaining_deliveries(scene: Scene) -> None:
    hook = await scene.webhook()
    await scene.events(hook, 5)
    await scene.webhooks.move(hook, "delete")
    async with scene.delivering():
        await until(lambda: scene.are_all(hook, "dropped"))
    assert not scene.inbox.posts


@pytest.mark.parametrize("known", [True, False], ids=["known to be slow", "new"])
async def test_slow_receivers_do_not_delay_others(scene: Scene, known: bool) -> None:
    """There are more of them than slots, and they do not reply while others are served."""
    stuck = asyncio.Event()

    async def page(request: web.Request) -> web.Response:
        await stuck.wait()
        return web.Response()

    account = await scene.account()
    good = await scene.webhook("/good", account=account)
    slow = [await scene.webhook(f"/slow{n}", account=account, server=n + 1) for n in range(20)]
    async with scene.delivering(total=16, each=4) as deliverer:
        if not known:
            await scene.events(good)
            await until(lambda: scene.are_all(good, "delivered"))
        for n, hook in enumerate(slow):
            scene.inbox.pages[f"/slow{n}"] = page
            deliverer._lanes.lane(receiver_of(hook.url)).kind = "slow" if known else "new"
            await scene.events(hook, 10)
        stuck_now = 8 if known else 12
        await until(lambda: len(scene.inbox.posts) - len(scene.inbox.at("/good")) == stuck_now)
        for _ in range(5):
            await scene.events(good, 20)
            await until(lambda: scene.are_all(good, "delivered"))
        assert len(scene.inbox.posts) - len(scene.inbox.at("/good")) == stuck_now
        stuck.set()
        for hook in slow:
            await until(lambda hook=hook: scene.are_all(hook, "delivered"), within_s=30.0)


@pytest.mark.parametrize("webhooks", [1, 20])
async def test_receiver_gets_no_more_than_its_share_concurrently(scene: Scene, webhooks: int) -> None:
    now = most = 0

    async def page(request: web.Request) -> web.Response:
        nonlocal now, most
        now += 1
        most = max(most, now)
        await asyncio.sleep(0.005)
        now -= 1
        return web.Response()

    hooks = [await scene.webhook(f"/{n}") for n in range(webhooks)]
    for n, hook in enumerate(hooks):
        scene.inbox.pages[f"/{n}"] = page
        await scene.events(hook, 200 // webhooks)
    async with scene.delivering(total=64, each=4):
        for hook in hooks:
            await until(lambda hook=hook: scene.are_all(hook, "delivered"))
    assert most == 4
    assert len(scene.inbox.posts) == 200


async def test_two_deliverers_send_everything_once(scene: Scene) -> None:
    hooks = [await scene.webhook(f"/{n}") for n in range(5)]
    async with scene.delivering(), scene.delivering():
        for hook in hooks:
            await scene.events(hook, 60)
        for hook in hooks:
            await until(lambda hook=hook: scene.are_all(hook, "delivered"))
    names = [post.event_id for post in scene.inbox.posts]
    assert len(names) == len({*names}) == 300


# Crashes


async def test_attempts_in_progress_are_repeated_after_a_crash(scene: Scene) -> None:
    hook = await scene.webhook()
    await scene.events(hook, 5)
    claimed, _ = await scene.store.claim({hook.id: 3}, day_limits={}, lease_s=0.3)  # a claim that never ends
    async with scene.delivering():
        await until(lambda: scene.are_all(hook, "delivered"))
    assert scene.inbox.ids() == {*scene.made[hook.id]}
    repeated = {each.event_id for each in claimed}
    assert {post.event_id for post in scene.inbox.posts if post.headers["X-Webhook-Attempt"] == "2"} == repeated


async def test_result_of_a_claim_that_was_taken_over_is_ignored(scene: Scene) -> None:
    hook = await scene.webhook("/x")
    gate = asyncio.Event()
    scene.inbox.answer("/x", 500)
    fails = scene.inbox.pages["/x"]

    async def page(request: web.Request) -> web.StreamResponse:
        await gate.wait()
        return await fails(request)

    scene.inbox.pages["/x"] = page
    await scene.events(hook)
    async with scene.delivering(lease_s=0.1):
        await until(lambda: len(scene.inbox.posts) == 1)
        scene.inbox.pages.clear()
        async with scene.delivering():
            await until(lambda: scene.are_all(hook, "delivered"))
        gate.set()
        await until(lambda: scene.rows("select from attempts where status = 500"))
        assert await scene.are_all(hook, "delivered")


async def test_drained_deliverer_has_stored_all_results(scene: Scene) -> None:
    hook = await scene.webhook()

    async def page(request: web.Request) -> web.Response:
        await asyncio.sleep(0.1)
        return web.Response()

    scene.inbox.pages["/"] = page
    await scene.events(hook, 300)
    async with scene.delivering() as deliverer:
        await until(lambda: len(scene.inbox.posts) > 10)
        await deliverer.drain()
        sent = len(scene.inbox.posts)
        rows = await scene.rows("select state, count(*) from deliveries group by 1")
    assert {row["state"]: row["count"] for row in rows} == {"delivered": sent, "due": 300 - sent}
    assert "stopping" in repr(deliverer)


async def test_cancelled_loop_loses_nothing(scene: Scene) -> None:
    hook = await scene.webhook()
    await scene.events(hook, 200)
    for _ in range(5):
        async with scene.delivering(lease_s=0.2):
            before = len(scene.inbox.posts)
            await until(lambda before=before: len(scene.inbox.posts) > before)
    async with scene.delivering(lease_s=0.2):
        await until(lambda: scene.are_all(hook, "delivered"))
    assert scene.inbox.ids() == {*scene.made[hook.id]}
    assert len(scene.inbox.posts) <= 200 + 5 * 8


async def test_cancelled_loop_leaves_its_slots_to_the_next_run(scene: Scene) -> None:
    hook = await scene.webhook()
    stuck = asyncio.Event()

    async def page(request: web.Request) -> web.Response:
        await stuck.wait()
        return web.Response()

    scene.inbox.pages["/"] = page
    await scene.events(hook, 3)
    async with scene.deliverer(total=2, lease_s=0.2) as deliverer:
        for sent in (1, 2):
            tasks = Tasks()
            tasks.start("deliverer", deliverer.run)
            await until(lambda sent=sent: len(scene.inbox.posts) == sent)
            await tasks.close()
            assert deliverer._lanes.busy == 1
        stuck.set()
        tasks = Tasks()
        tasks.start("deliverer", deliverer.run)
        await until(lambda: scene.are_all(hook, "delivered"))
        await tasks.close()


async def test_delivery_that_cannot_be_signed_stays_queued(scene: Scene) -> None:
    """It is no failure of the receiver: a deliverer with the right key delivers it after the lease."""
    hook = await scene.webhook()
    await scene.events(hook)
    await scene.execute(
        "update webhooks set secret = $2 where id = $1", hook.id, Vault("another key").seal(hook.id, KEY)
    )
    async with scene.delivering(lease_s=0.5):
        await until(lambda: _was_claimed_twice(scene))
    assert not scene.inbox.posts
    assert await scene.rows("select * from attempts") == []
    assert await scene.status(hook) == ("active", None)
    await scene.execute("update webhooks set secret = $2 where id = $1", hook.id, VAULT.seal(hook.id, KEY))
    async with scene.delivering():
        await until(lambda: scene.are_all(hook, "delivered"))


async def _was_claimed_twice(scene: Scene) -> bool:
    return bool(await scene.rows("select 1 from deliveries where claim >= 2"))
