"""Sign-in links: the recipient, the URL, and failures to send."""

from __future__ import annotations

import asyncio
import logging
import signal
from pathlib import Path

import pytest

from proxy.compose.dashboard import url_of
from proxy.services.accounts.account_mails import AccountMails
from proxy.services.accounts.second_factor import SecondFactor
from proxy.services.accounts.sign_in import SignIn, SignInPlace
from proxy.settings import DashboardSettings
from proxy.store.postgres.keys import KeyStore
from proxy.store.postgres.pool import Pool
from proxy.store.postgres.second_factors import SecondFactorStore
from proxy.store.postgres.secrets import Vault
from proxy.store.postgres.sessions import SessionStore
from proxy.tasks import Tasks
from tests.dashboard.service import Client, start_service
from tests.delivery.test_mails import MailServer, mail_server
from tests.service import until

__all__ = ("mail_server",)

PEPPER = "p" * 32
SETTINGS = DashboardSettings("https://dashboard.example.com/", False, 3600.0, 600.0, 900.0, 604_800.0, 5, 10, 20.0, 1.0)


def sign_in_of(pool: Pool, mail_server: MailServer, tasks: Tasks) -> SignIn:
    factor = SecondFactor(SecondFactorStore(pool, Vault(PEPPER)))
    mails = AccountMails(mail_server.mailer(), tasks, retry_s=(0.05, 0.05))
    return SignIn(SessionStore(pool, pepper=PEPPER), factor, SETTINGS, mails)


async def test_link_is_mailed_to_the_address_of_the_account(pool: Pool, mail_server: MailServer) -> None:
    """The database may match addresses that a mail server distinguishes: the Kelvin sign is a k in lower case."""
    keys, tasks = KeyStore(pool, pepper=PEPPER, plans={"free": 10}), Tasks()
    await keys.create_account(name="a", email="Kim@Example.com", plan="free")
    sign_in = sign_in_of(pool, mail_server, tasks)
    await sign_in.ask_link("kim@example.com", at=SignInPlace("192.0.2.1"))
    (mail,) = await until(lambda: mail_server.mails)
    assert mail["X-Rcpt"] == "Kim@Example.com"
    await tasks.close()


@pytest.mark.parametrize(
    ("replies", "sent", "logged"),
    [
        (["451 try later"] * 2, 1, ["cannot send sign-in link yet"] * 2),
        (["451 try later"] * 3, 0, ["cannot send sign-in link yet"] * 2 + ["sign-in link not sent"]),
        (["550 no such user"], 0, ["sign-in link not sent"]),
    ],
)
async def test_link_is_sent_again_until_the_server_accepts_it(
    pool: Pool,
    mail_server: MailServer,
    caplog: pytest.LogCaptureFixture,
    replies: list[str],
    sent: int,
    logged: list[str],
) -> None:
    keys, tasks = KeyStore(pool, pepper=PEPPER, plans={"free": 10}), Tasks()
    await keys.create_account(name="a", email="kim@example.com", plan="free")
    mail_server.replies = replies
    with caplog.at_level(logging.WARNING):
        await sign_in_of(pool, mail_server, tasks).ask_link("kim@example.com", at=SignInPlace("192.0.2.1"))
        await until(lambda: repr(tasks) == "<Tasks >")
    assert len(mail_server.mails) == sent
    assert [record.getMessage() for record in caplog.records] == logged
    await tasks.close()


async def test_link_that_cannot_be_sent_is_logged_once(
    pool: Pool, mail_server: MailServer, caplog: pytest.LogCaptureFixture
) -> None:
    tasks = Tasks()
    sign_in = sign_in_of(pool, mail_server, tasks)
    with caplog.at_level(logging.WARNING):
        await sign_in.ask_link("a\0b@example.com", at=SignInPlace("192.0.2.1"))
        # No task is left that would retry.
        await until(lambda: repr(tasks) == "<Tasks >")
    assert [record.getMessage() for record in caplog.records] == ["sign-in link not sent"]
    await tasks.close()


async def test_drain_sends_a_link_that_waits_for_another_attempt(pool: Pool, mail_server: MailServer) -> None:
    keys, tasks = KeyStore(pool, pepper=PEPPER, plans={"free": 10}), Tasks()
    await keys.create_account(name="a", email="kim@example.com", plan="free")
    mail_server.replies = ["451 try later"]
    mails = AccountMails(mail_server.mailer(), tasks, retry_s=(3600.0, 3600.0))
    factor = SecondFactor(SecondFactorStore(pool, Vault(PEPPER)))
    sign_in = SignIn(SessionStore(pool, pepper=PEPPER), factor, SETTINGS, mails)
    await sign_in.ask_link("kim@example.com", at=SignInPlace("192.0.2.1"))
    await until(lambda: not mail_server.replies)
    await mails.drain(5.0)
    assert len(mail_server.mails) == 1
    await tasks.close()


async def test_link_is_sent_although_the_settings_are_reloaded(
    database: str, tmp_path: Path, mail_server: MailServer
) -> None:
    """A reload replaces the worker that sends it, perhaps before the mail server has taken it."""
    mail_server.delay_s = 3.0
    more = f'[mail]\nhost = "127.0.0.1"\nport = {mail_server.port}\nsecurity = "none"\n'
    async with start_service(database, tmp_path, more=more) as service:
        before = set(service.running.worker_pids())
        service.running.send_signal(signal.SIGHUP)
        sent = 0
        while before & set(service.running.worker_pids()):
            await asyncio.sleep(0.2)
            # Another account each time: attempts are counted.
            account = await service.account(password=None)
            reply = await Client(service).post("/account/sign-in/link", {"email": account["email"]})
            assert reply.status == 202
            sent += 1
        await until(lambda: len(mail_server.mails) == sent)


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:8080"),
        ("2001:db8::1", "http://[2001:db8::1]:8080"),
        ("0.0.0.0", "http://localhost:8080"),
        ("::", "http://localhost:8080"),
    ],
)
def test_link_uses_the_address_that_the_service_listens_on(host: str, url: str) -> None:
    assert url_of("http", host, 8080) == url
