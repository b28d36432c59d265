"""Mails to a real SMTP server: one for each pause, as text and HTML, retried until it is accepted."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import AsyncIterator
from email import message_from_bytes
from email.message import EmailMessage
from email.policy import default
from pathlib import Path

import pytest
from aiosmtpd.smtp import SMTP, Envelope, Session

from proxy.__main__ import main
from proxy.services.delivery.mails import KINDS, Mails
from proxy.settings import MailSettings
from proxy.store.postgres.mails import MailStore
from proxy.tasks import Tasks
from proxy.wire.mailer import Mailer, OutgoingMail, Undelivered
from tests.delivery.harness import DeliveryHarness
from tests.delivery.test_deliverer import NEVER
from tests.service import until

MAIL = OutgoingMail("id-1", "someone@example.com", "A subject", "text\n", "<p>text</p>")


class MailServer:
    """Accepts mails, after it has sent the scripted `replies`."""

    def __init__(self) -> None:
        self.mails: list[EmailMessage] = []
        self.replies: list[str] = []
        # The time that it takes for a mail.
        self.delay_s = 0.0
        self.port = 0

    async def handle_DATA(self, server: SMTP, session: Session, envelope: Envelope) -> str:
        if self.replies:
            return self.replies.pop(0)
        await asyncio.sleep(self.delay_s)
        assert isinstance(envelope.content, bytes)
        found = message_from_bytes(envelope.content, policy=default)
        assert isinstance(found, EmailMessage)
        found["X-Rcpt"] = ",".join(map(str, envelope.rcpt_tos))
        self.mails.append(found)
        return "250 OK"

    def mailer(self) -> Mailer:
        return Mailer(MailSettings("127.0.0.1", self.port, "none", "", "", "Penstock <hooks@penstock.example>", 5.0))


@pytest.fixture
async def mail_server() -> AsyncIterator[MailServer]:
    found = MailServer()
    server = await asyncio.get_running_loop().create_server(
        lambda: SMTP(found, hostname="localhost", loop=asyncio.get_running_loop()), "127.0.0.1", 0
    )
    found.port = server.sockets[0].getsockname()[1]
    yield found
    server.close()
    await server.wait_closed()


async def test_pause_sends_exactly_one_mail_with_many_failures_and_senders(
    harness: DeliveryHarness, mail_server: MailServer
) -> None:
    hook = await harness.webhook("/x?<b>=1&c")
    harness.inbox.answer("/x", 503)
    tasks = Tasks()
    mails = [Mails(MailStore(harness.pool), mail_server.mailer(), check_s=0.05) for _ in range(3)]
    for index, each in enumerate(mails):
        tasks.start(f"mails {index}", each.run)
    async with harness.delivering(schedules=NEVER, each=8):
        await harness.events(hook, 30)
        await until(lambda: harness.are_all(hook, "parked"))
        await until(lambda: mail_server.mails)

        async def is_quiet() -> bool:
            return not await harness.rows("select from mails where ended_at is null")

        await until(is_quiet)
        (mail,) = mail_server.mails
        # The next pause sends another mail.
        await harness.webhooks.move(hook, "resume")
        await until(lambda: len(mail_server.mails) == 2)
    await tasks.close()
    assert mail["X-Rcpt"] == mail["To"] == f"{hook.account}@example.com"
    assert mail["From"] == "Penstock <hooks@penstock.example>"
    assert mail["Subject"] == f"Webhook {hook.id} is paused"
    assert mail["Message-ID"] != mail_server.mails[1]["Message-ID"]
    plain, rich = mail.get_body(("plain",)), mail.get_body(("html",))
    assert plain is not None
    assert rich is not None
    for part in (hook.id, "it replied with status 503", f"POST /v1/webhooks/{hook.id}/resume"):
        assert part in plain.get_content()
        assert part in rich.get_content()
    assert "/x?<b>=1&c" in plain.get_content()
    assert "<b>=1" not in rich.get_content()


async def test_disabled_webhook_sends_a_mail(harness: DeliveryHarness, mail_server: MailServer) -> None:
    hook = await harness.webhook("/x", "NEW_BLOCK")
    harness.inbox.answer("/x", 410)
    url = "https://penstock.example"
    mails = Mails(MailStore(harness.pool), mail_server.mailer(), dashboard_url=url, check_s=0.05)
    async with harness.delivering():
        await harness.events(hook)
        await until(lambda: harness.are_all(hook, "failed"))
    await mails.send_due()
    (mail,) = mail_server.mails
    assert mail["Subject"] == f"Webhook {hook.id} is disabled"
    plain, rich = mail.get_body(("plain",)), mail.get_body(("html",))
    assert plain is not None
    assert rich is not None
    link = f"{url}/dashboard#/webhooks/{hook.id}"
    for part in (hook.id, "status 410", "Disabled: 20", f"POST /v1/webhooks/{hook.id}/resume", link):
        assert part in plain.get_content()
    assert f'<a href="{link}">' in rich.get_content()


async def test_mail_that_is_not_accepted_is_retried(harness: DeliveryHarness, mail_server: MailServer) -> None:
    hook = await harness.webhook()
    mail_server.replies = ["451 try later", "451 try later"]
    store = MailStore(harness.pool)
    mails = Mails(store, mail_server.mailer(), retry_s=(0.0, 0.0, 0.0))
    await harness.execute(
        "insert into mails (account_id, kind, about) values ($1, 'webhook_paused', $2)",
        hook.account,
        '{"webhook": "wh_1", "url": "u", "network": "n", "event_type": "t", "event": "e", "attempts": 6,'
        ' "outcome": "timeout", "status": null}',
    )
    for _ in range(3):
        await mails.send_due()
    (mail,) = mail_server.mails
    assert "it did not reply in time" in str(mail.get_body(("plain",)))
    (row,) = await harness.rows("select tries, sent, ended_at from mails")
    assert (row["tries"], row["sent"]) == (3, True)
    assert await store.next_s(KINDS) is None


async def test_mail_that_is_refused_permanently_is_given_up_and_logged(
    harness: DeliveryHarness, mail_server: MailServer, caplog: pytest.LogCaptureFixture
) -> None:
    hook = await harness.webhook()
    mail_server.replies = ["550 no such user"]
    await harness.execute(
        "insert into mails (account_id, kind, about) values ($1, 'webhook_paused', $2)",
        hook.account,
        '{"webhook": "wh_1", "url": "u", "network": "n", "event_type": "t", "event": "e", "attempts": 6,'
        ' "outcome": "timeout", "status": null}',
    )
    with caplog.at_level(logging.ERROR, "penstock.mail"):
        await Mails(MailStore(harness.pool), mail_server.mailer()).send_due()
    assert [record.getMessage() for record in caplog.records] == ["gave up sending a mail"]
    (row,) = await harness.rows("select sent, ended_at is null as open from mails")
    assert (row["sent"], row["open"]) == (False, False)


async def test_mails_are_logged_without_a_mail_server(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "penstock.mail"):
        await Mailer(MailSettings("", 587, "starttls", "", "", "a@b", 5.0)).send(MAIL, at=0.0)
    assert caplog.records[0].__dict__["mail"] == "text\n"


async def test_unreachable_server_is_not_a_permanent_failure(mail_server: MailServer) -> None:
    closed = await asyncio.get_running_loop().create_server(asyncio.Protocol, "127.0.0.1", 0)
    port = closed.sockets[0].getsockname()[1]
    closed.close()
    with pytest.raises(Undelivered) as raised:
        await Mailer(MailSettings("127.0.0.1", port, "none", "", "", "a@b", 5.0)).send(MAIL, at=0.0)
    assert not raised.value.final


async def test_header_cannot_be_injected(mail_server: MailServer) -> None:
    """An address with a line break is refused."""
    bad = OutgoingMail("id-1", "someone@example.com\r\nBcc: other@example.com", "A subject", "text\n", "<p>text</p>")
    with pytest.raises(Undelivered) as raised:
        await mail_server.mailer().send(bad, at=0.0)
    assert raised.value.final
    assert not mail_server.mails


async def test_connection_is_tried_without_sending(mail_server: MailServer) -> None:
    await mail_server.mailer().try_connection()
    assert mail_server.mails == []
    wrong = Mailer(MailSettings("127.0.0.1", mail_server.port, "starttls", "", "", "a@penstock.example", 5.0))
    with pytest.raises(Undelivered, match="STARTTLS"):
        await wrong.try_connection()


async def test_check_waits_for_the_mail_server_as_long_as_the_service_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Many mail servers delay their greeting, by more than a cache may take."""
    monkeypatch.setattr("proxy.commands.connections.CACHE_S", 0.1)

    async def greet_late(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(0.3)
        writer.write(b"220 late\r\n")
        while line := await reader.readline():
            writer.write(b"221 bye\r\n" if line.startswith(b"QUIT") else b"250 ok\r\n")
        writer.close()

    server = await asyncio.start_server(greet_late, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    file = tmp_path / "penstock.toml"
    pepper = "p" * 32
    database = '[database]\nurl = "postgresql://127.0.0.1/none"\n'
    file.write_text(
        f'{database}[keys]\npepper = "{pepper}"\n[mail]\nhost = "127.0.0.1"\nport = {port}\nsecurity = "none"\n'
    )
    assert await asyncio.to_thread(main, ["check", "--offline", "--connect", "--config", str(file)]) == 0
    assert re.search(r"^mail +up\b", capsys.readouterr().out, re.MULTILINE)
    server.close()
    await server.wait_closed()
