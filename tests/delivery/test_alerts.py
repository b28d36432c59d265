"""Alerts of accounts on a real database: raised once, by mail and webhook, whatever dies in between."""

from __future__ import annotations

import asyncio
import datetime
from typing import Any

import orjson
import pytest

from proxy.core import signatures
from proxy.core.alert_formats import PAGERDUTY_URL
from proxy.core.paging import Page
from proxy.errors import InvalidRequest, RateLimited
from proxy.services.alerting import AlertSettingsService
from proxy.services.delivery.alert_watch import AlertWatch
from proxy.services.delivery.mails import KINDS, Mails
from proxy.settings import EgressSettings
from proxy.store.postgres.alerts import AlertStore
from proxy.store.postgres.deliveries import DeliveryStore
from proxy.store.postgres.mails import MailStore
from proxy.wire.webhook_guard import WebhookGuard
from tests.delivery.harness import LOOPBACK, VAULT, DeliveryHarness
from tests.delivery.test_deliverer import NEVER
from tests.delivery.test_mails import MailServer, mail_server
from tests.service import until
from tests.shipped_tables import TABLES

__all__ = ("mail_server",)

PAGE = Page(1, 100)
URL = "https://penstock.example"
TODAY = datetime.datetime.now(datetime.UTC).date()


class Accounts:
    """Accounts with usage, and the alerts they want."""

    def __init__(self, harness: DeliveryHarness) -> None:
        self.harness = harness
        self.store = AlertStore(harness.pool, sends_mail=True, dashboard_url=URL)
        self.watch = AlertWatch(self.store, TABLES.plans)
        guard: Any = LOOPBACK
        self.service = AlertSettingsService(self.store, harness.webhooks, VAULT, guard)

    async def account(self, *kinds: str, used: int = 0, failed: int = 0, limit: int = 1000, **more: Any) -> str:
        name = await self.harness.account()
        await self.service.change(name, {"alerts": kinds, **more})
        await self.harness.execute("update accounts set requests_per_day = $2 where id = $1", name, limit)
        await self.use(name, used, failed)
        return name

    async def use(self, account: str, requests: int, failed: int = 0) -> None:
        """Set the day's use of an account."""
        columns = "step, series, at, requests, errors, units, hits, " + ", ".join(f"t{n}" for n in range(15))
        zeros = ", ".join(["0"] * 17)
        await self.harness.execute(
            "insert into usage_series (account_id, key_id, network, method) values ($1, '', '', '') on conflict do nothing",
            account,
        )
        await self.harness.execute(
            f"insert into usage ({columns}) select v.step, id, v.at, $2::bigint, $3::bigint, {zeros} from usage_series,"
            " (values ('day', date_trunc('day', now(), 'UTC')), ('minute', date_trunc('minute', now()))) as v (step, at)"
            " where account_id = $1"
            " on conflict (step, series, at) do update set requests = excluded.requests, errors = excluded.errors",
            account, requests, failed,
        )  # fmt: skip
        await self.harness.execute(
            "insert into quota_days (account_id, day, used) values ($1, $2, $3)"
            " on conflict (account_id, day) do update set used = excluded.used",
            account, TODAY, requests,
        )  # fmt: skip

    async def raised(self, account: str) -> list[tuple[str, int]]:
        rows = await self.harness.rows(
            "select kind, threshold from alerts where account_id = $1 and is_sent order by id", account
        )
        return [(row["kind"], row["threshold"]) for row in rows]

    async def mails(self, account: str) -> list[dict[str, Any]]:
        rows = await self.harness.rows("select about from mails where account_id = $1 order by id", account)
        return [orjson.loads(row["about"]) for row in rows]


@pytest.fixture
def accounts(harness: DeliveryHarness) -> Accounts:
    return Accounts(harness)


async def test_each_threshold_of_the_day_is_sent_once(accounts: Accounts, mail_server: MailServer) -> None:
    account = await accounts.account("day_usage", used=499)
    await accounts.watch.check()
    assert await accounts.raised(account) == []
    for used in (500, 700, 760, 1200):
        await accounts.use(account, used)
        # Several processes at once, and again.
        await asyncio.gather(*(accounts.watch.check() for _ in range(3)))
        await accounts.watch.check()
    assert await accounts.raised(account) == [("day_usage", 50), ("day_usage", 75), ("day_usage", 100)]
    mails = Mails(MailStore(accounts.harness.pool), mail_server.mailer(), dashboard_url=URL)
    await mails.send_due()
    assert [mail["Subject"] for mail in mail_server.mails] == [
        "50 % of today's requests are used",
        "75 % of today's requests are used",
        "All of today's requests are used",
    ]
    body = str(mail_server.mails[-1].get_body(("plain",)))
    assert "Requests today: 1,200 of 1,000" in body
    assert f"See: {URL}/dashboard#/overview" in body


async def test_alert_is_mailed_once_after_a_failure(accounts: Accounts, mail_server: MailServer) -> None:
    account = await accounts.account("day_usage", used=500)
    await accounts.watch.check()
    store = MailStore(accounts.harness.pool)
    mail_server.replies = ["451 try later"]
    mails = Mails(store, mail_server.mailer(), retry_s=(0.0, 0.0))
    assert await store.next_s(KINDS) is not None
    await mails.send_due()
    await mails.send_due()
    assert len(mail_server.mails) == 1
    (row,) = await accounts.harness.rows(
        "select sent, ended_at <= now() as ended from mails where account_id = $1", account
    )
    assert (row["sent"], row["ended"]) == (True, True)
    assert await store.next_s(KINDS) is None


async def test_failed_requests_raise_one_alert_a_day(accounts: Accounts) -> None:
    noisy = await accounts.account("error_rate", used=100, failed=30, error_rate_percent=30)
    quiet = await accounts.account("error_rate", used=100, failed=29, error_rate_percent=30)
    unwanted = await accounts.account("day_usage", used=100, failed=100)
    await accounts.watch.check()
    await accounts.use(noisy, 200, 200)
    await accounts.watch.check()
    assert await accounts.raised(noisy) == [("error_rate", 30)]
    assert await accounts.raised(quiet) == await accounts.raised(unwanted) == []


async def test_changed_error_rate_raises_its_alert_once_an_hour(accounts: Accounts) -> None:
    account = await accounts.account("error_rate", used=100, failed=90, error_rate_percent=30)
    for percent in (30, 40, 50):
        await accounts.harness.execute(
            "update alert_settings set error_percent = $2 where account_id = $1", account, percent
        )
        await accounts.watch.check()
    assert await accounts.raised(account) == [("error_rate", 30)]
    await accounts.harness.execute(
        "update alerts set raised_at = now() - interval '61 minutes' where account_id = $1", account
    )
    await accounts.watch.check()
    await accounts.watch.check()
    assert sorted(await accounts.raised(account)) == [("error_rate", 30), ("error_rate", 50)]


async def test_budgets_of_policies_are_reported_in_one_mail(accounts: Accounts) -> None:
    account = await accounts.account("policy_budget")
    for number, share in enumerate((40, 55, 95)):
        await accounts.harness.execute(
            "insert into gas_policies (id, account_id, network, live, name, rules, max_total, reset)"
            " values ($1, $2, 'n', true, $1, '{}', 100, 'daily')",
            f"pol_{account}_{number}", account,
        )  # fmt: skip
        await accounts.harness.execute(
            "insert into gas_meters (policy_id, sender, day, spent) values ($1, '', $2, $3)",
            f"pol_{account}_{number}", TODAY, share,
        )  # fmt: skip
    await accounts.watch.check()
    await accounts.watch.check()
    assert sorted(await accounts.raised(account)) == [("policy_budget", 50), ("policy_budget", 90)]
    (mail,) = await accounts.mails(account)
    assert len(mail["alerts"]) == 2


async def test_changed_budget_raises_a_threshold_once_an_hour(accounts: Accounts) -> None:
    account = await accounts.account("policy_budget")
    policy = f"pol_{account}"
    await accounts.harness.execute(
        "insert into gas_policies (id, account_id, network, live, name, rules, max_total, reset)"
        " values ($1, $2, 'n', true, $1, '{}', 100, 'never')",
        policy, account,
    )  # fmt: skip
    await accounts.harness.execute(
        "insert into gas_meters (policy_id, sender, day, spent) values ($1, '', '-infinity', 60)", policy
    )
    for budget in (100, 101, 102):
        await accounts.harness.execute("update gas_policies set max_total = $2 where id = $1", policy, budget)
        await accounts.watch.check()
    assert await accounts.raised(account) == [("policy_budget", 50)]
    await accounts.harness.execute("update alerts set raised_at = now() - interval '1 hour'")
    await accounts.watch.check()
    assert await accounts.raised(account) == [("policy_budget", 50)] * 2


async def test_old_alerts_are_deleted_unless_they_would_be_raised_again(accounts: Accounts) -> None:
    account = await accounts.account("policy_budget")
    await accounts.harness.execute(
        "insert into gas_policies (id, account_id, network, live, name, rules, max_total, reset)"
        " values ($1, $2, 'n', true, $1, '{}', 100, 'never')",
        f"pol_{account}", account,
    )  # fmt: skip
    for period in ("always 100", "always 99", "2020-01-01 100"):
        await accounts.harness.execute(
            "insert into alerts (account_id, kind, subject, threshold, period, is_sent, about, raised_at)"
            " values ($1, 'policy_budget', $2, 50, $3, true, '{}', now() - interval '100 days')",
            account, f"pol_{account}", period,
        )  # fmt: skip
    await accounts.store.purge()
    left = await accounts.harness.rows("select period from alerts where account_id = $1", account)
    assert [row["period"] for row in left] == ["always 100"]


async def test_alert_reaches_the_webhook_with_a_signature(accounts: Accounts) -> None:
    url = accounts.harness.inbox.url("/alerts")
    account = await accounts.account("day_usage", used=950, mail=False)
    made = await accounts.service.change(account, {"webhook_url": url})
    assert made.secret
    # Their number does not count, and a plan without deliveries left does not hold them.
    await accounts.harness.execute("update accounts set plan = 'free' where id = $1", account)
    await accounts.harness.execute(
        "insert into delivery_days (account_id, day, used) values ($1, $2, 1000)", account, TODAY
    )
    assert (await accounts.harness.webhooks.list_of(account, live=True, status=None, page=PAGE))[1] == 0
    await accounts.watch.check()
    assert await accounts.mails(account) == []
    async with accounts.harness.delivering():
        await until(lambda: accounts.harness.inbox.at("/alerts"))
    (post,) = accounts.harness.inbox.at("/alerts")
    body = orjson.loads(post.body)
    stamp = int(post.headers["X-Service-Timestamp"])
    assert post.headers["X-Service-Signature"] == signatures.format_a(made.secret, stamp, post.body)
    assert (body["event_type"], body["data"]["alert"], body["data"]["threshold"]) == ("alert", "day_usage", 90)
    assert body["data"]["url"] == f"{URL}/dashboard#/overview"


async def test_pause_of_a_webhook_is_sent_where_alerts_go(accounts: Accounts) -> None:
    harness = accounts.harness
    harness.store = DeliveryStore(harness.pool, accounts.store.sender)
    account = await accounts.account("webhook_paused", mail=False, webhook_url=harness.inbox.url("/alerts", server=1))
    hook = await harness.webhook("/gone", "NEW_BLOCK", account=account)
    harness.inbox.answer("/gone", 410)
    async with harness.delivering(schedules=NEVER):
        await harness.events(hook)
        await until(lambda: harness.inbox.at("/alerts"))
    (post,) = harness.inbox.at("/alerts")
    assert orjson.loads(post.body)["data"]["message"] == f"Webhook {hook.id} is disabled"
    # By mail only if the account wants it.
    assert await accounts.mails(account) == []


async def test_alert_that_was_not_recorded_is_raised_again(accounts: Accounts, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that dies before the commit leaves neither the row nor the mail."""
    account = await accounts.account("day_usage", used=600)
    async with accounts.harness.pool.connection() as connection:
        transaction = connection.transaction()
        await transaction.start()
        (row,) = await accounts.store.watched("", 1000, TODAY)
        found = accounts.watch._alerts_of(row, TODAY)
        assert await accounts.store.sender.raise_all(connection, account, found) == 1
        await transaction.rollback()
    assert await accounts.raised(account) == []
    assert await accounts.mails(account) == []
    await accounts.watch.check()
    assert await accounts.raised(account) == [("day_usage", 50)]
    assert len(await accounts.mails(account)) == 1


async def test_mails_of_accounts_take_turns(accounts: Accounts, mail_server: MailServer) -> None:
    loud, quiet = await accounts.account(), await accounts.account()
    for account, count in ((loud, 30), (quiet, 1)):
        for _ in range(count):
            await accounts.harness.execute(
                "insert into mails (account_id, kind, about) values ($1, 'alert', $2)",
                account, '{"alerts": [{"kind": "test", "subject": "", "threshold": 0, "about": {}}], "more": 0}',
            )  # fmt: skip
    first = await MailStore(accounts.harness.pool).claim(KINDS)
    assert f"{quiet}@example.com" in {mail.email for mail in first}


async def test_broken_account_does_not_stop_the_others(accounts: Accounts, caplog: pytest.LogCaptureFixture) -> None:
    broken, fine = await accounts.account("day_usage", used=600), await accounts.account("day_usage", used=600)
    await accounts.harness.execute(f"alter table alerts add constraint refuse_one check (account_id <> '{broken}')")
    await accounts.watch.check()
    assert await accounts.raised(fine) == [("day_usage", 50)]
    assert "row set aside" in caplog.text


async def test_test_alert_is_marked_and_bounded(accounts: Accounts) -> None:
    account = await accounts.account(webhook_url=accounts.harness.inbox.url("/alerts"))
    async with accounts.harness.delivering():
        await accounts.service.test(account)
        await until(lambda: accounts.harness.inbox.at("/alerts"))
    assert orjson.loads(accounts.harness.inbox.at("/alerts")[0].body)["test"] is True
    for _ in range(9):
        await accounts.service.test(account)
    with pytest.raises(RateLimited, match="only 10"):
        await accounts.service.test(account)


async def test_parallel_test_alerts_are_bounded(accounts: Accounts) -> None:
    account = await accounts.account()
    sent = await asyncio.gather(*(accounts.service.test(account) for _ in range(25)), return_exceptions=True)
    assert sum(isinstance(each, RateLimited) for each in sent) == 15
    assert await accounts.raised(account) == [("test", 0)] * 10


async def test_urls_that_webhooks_may_not_have_are_refused(accounts: Accounts) -> None:
    guard = WebhookGuard(EgressSettings((), (), http=False, ports=(443,)), dev=False)
    service = AlertSettingsService(accounts.store, accounts.harness.webhooks, VAULT, guard)
    account = await accounts.account()
    for url in ("http://example.com/", "https://127.0.0.1/", "ftp://example.com"):
        with pytest.raises(InvalidRequest, match="webhook_url"):
            await service.change(account, {"webhook_url": url})


async def test_paused_webhook_for_alerts_is_resumed_by_its_url(accounts: Accounts, mail_server: MailServer) -> None:
    harness, url = accounts.harness, accounts.harness.inbox.url("/alerts")
    account = await accounts.account("day_usage", used=600, webhook_url=url)
    harness.inbox.answer("/alerts", 503, 200)
    await accounts.watch.check()
    async with harness.delivering(schedules=NEVER):

        async def is_paused() -> bool:
            return (await accounts.service.read(account)).status == "paused"

        await until(is_paused)
        await Mails(MailStore(harness.pool), mail_server.mailer(), dashboard_url=URL).send_due()
        assert any("save its URL under Alerts again" in str(mail.get_body(("plain",))) for mail in mail_server.mails)
        assert not (await accounts.service.change(account, {"webhook_url": url})).secret
        await until(lambda: len(harness.inbox.at("/alerts")) == 2)
    assert (await accounts.service.change(account, {"webhook_url": None})).settings.webhook_id == ""


async def test_alert_reaches_slack_as_a_message(accounts: Accounts) -> None:
    url = accounts.harness.inbox.url("/services/T0/B0/word")
    account = await accounts.account("day_usage", used=950, mail=False, webhook_url=url, webhook_format="slack")
    await accounts.watch.check()
    async with accounts.harness.delivering():
        await until(lambda: accounts.harness.inbox.at("/services/T0/B0/word"))
    (post,) = accounts.harness.inbox.at("/services/T0/B0/word")
    body = orjson.loads(post.body)
    assert body["text"] == "Penstock: 90 % of today's requests are used"
    heading, figures, link = body["blocks"]
    assert heading["text"] == {"type": "mrkdwn", "text": "*90 % of today's requests are used*"}
    assert figures["fields"] == [{"type": "mrkdwn", "text": "*Requests today*\n950 of 1,000"}]
    assert link["text"]["text"] == f"<{URL}/dashboard#/overview|Open the dashboard>"
    assert (await accounts.service.read(account)).format == "slack"


async def test_alert_triggers_one_incident_at_pagerduty(accounts: Accounts) -> None:
    inbox, key = accounts.harness.inbox, "0123456789abcdef0123456789abcdef"
    account = await accounts.account("day_usage", used=1000, mail=False)
    wanted = {"webhook_format": "pagerduty", "webhook_url": inbox.url("/v2/enqueue"), "routing_key": key}
    made = await accounts.service.change(account, wanted)
    assert (made.settings.format, made.secret) == ("pagerduty", "")
    inbox.answer("/v2/enqueue", 503, 202)
    await accounts.watch.check()
    (stored,) = await accounts.harness.rows("select body from events where webhook_id = $1", made.settings.webhook_id)
    assert key.encode() not in stored["body"]
    async with accounts.harness.delivering(schedules={"A": (0.0,), "B": (0.0,)}):
        await until(lambda: len(inbox.at("/v2/enqueue")) == 2)
    first, second = [orjson.loads(post.body) for post in inbox.at("/v2/enqueue")]
    assert first == second
    assert (first["routing_key"], first["event_action"]) == (key, "trigger")
    assert first["dedup_key"].startswith("evt_")
    payload = first["payload"]
    assert (payload["summary"], payload["severity"]) == ("All of today's requests are used", "error")
    assert payload["custom_details"] == {"used": 1000, "limit": 1000, "threshold": 100}
    assert first["links"] == [{"href": f"{URL}/dashboard#/overview", "text": "Open the dashboard"}]
    sent = inbox.at("/v2/enqueue")[0].headers
    assert (sent["Content-Type"], "webhook-signature" in sent) == ("application/json", False)


async def test_format_of_alerts_is_changed(accounts: Accounts) -> None:
    account, service = await accounts.account(), accounts.service
    url, key = accounts.harness.inbox.url("/alerts"), "k" * 32
    for wrong, param in (
        ({"webhook_format": "slack"}, "webhook_url"),
        ({"webhook_format": "pagerduty", "webhook_url": url}, "routing_key"),
        ({"webhook_format": "slack", "webhook_url": url, "routing_key": key}, "routing_key"),
    ):
        with pytest.raises(InvalidRequest) as refused:
            await service.change(account, wrong)
        assert refused.value.param == param
    first = await service.change(account, {"webhook_url": url})
    assert first.secret
    second = await service.change(account, {"webhook_format": "slack"})
    assert (second.settings.url, second.settings.format, second.secret) == (url, "slack", "")
    assert second.settings.webhook_id != first.settings.webhook_id
    third = await service.change(account, {"webhook_format": "pagerduty", "routing_key": key, "webhook_url": url})
    assert third.settings.format == "pagerduty"
    moved = await service.change(account, {"webhook_url": f"{url}/2"})
    assert (moved.settings.webhook_id, moved.settings.format) == (third.settings.webhook_id, "pagerduty")
    assert (await service.change(account, {"webhook_url": None})).settings.webhook_id == ""
    assert (await service.change(account, {"webhook_url": url})).secret


async def test_pagerduty_needs_no_url(accounts: Accounts) -> None:
    guard = WebhookGuard(EgressSettings((), (), http=False, ports=(443,)), dev=False)
    service = AlertSettingsService(accounts.store, accounts.harness.webhooks, VAULT, guard)
    account = await accounts.account()
    made = await service.change(account, {"webhook_format": "pagerduty", "routing_key": "k" * 32})
    assert made.settings.url == PAGERDUTY_URL
    for url in ("http://example.com/", "https://127.0.0.1/", "https://[::1]/"):
        with pytest.raises(InvalidRequest, match="webhook_url"):
            await service.change(account, {"webhook_url": url})
