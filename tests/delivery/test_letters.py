"""Letters to a real SMTP server: one for each pause, in text and in HTML, sent until it is taken."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from email import message_from_bytes
from email.message import EmailMessage
from email.policy import default

import pytest
from aiosmtpd.smtp import SMTP, Envelope, Session

from proxy.services.delivery.mails import Mails
from proxy.settings import MailSettings
from proxy.store.mails import MailStore
from proxy.tasks import Tasks
from proxy.wire.mailer import Mailer, OutgoingMail, Undelivered
from tests.delivery.scene import Scene
from tests.delivery.test_delivering import NEVER
from tests.service import until

LETTER = OutgoingMail("id-1", "someone@example.com", "A subject", "text\n", "<p>text</p>")


class PostOffice:
    """Takes letters; or says what it is told to, one after the other, before it does."""

    def __init__(self) -> None:
        self.letters: list[EmailMessage] = []
        self.says: list[str] = []
        self.port = 0

    async def handle_DATA(self, server: SMTP, session: Session, envelope: Envelope) -> str:
        if self.says:
            return self.says.pop(0)
        assert isinstance(envelope.content, bytes)
        found = message_from_bytes(envelope.content, policy=default)
        assert isinstance(found, EmailMessage)
        found["X-Rcpt"] = ",".join(map(str, envelope.rcpt_tos))
        self.letters.append(found)
        return "250 OK"

    def mailer(self) -> Mailer:
        return Mailer(MailSettings("127.0.0.1", self.port, "none", "", "", "Penstock <hooks@penstock.example>", 5.0))


@pytest.fixture
async def office() -> AsyncIterator[PostOffice]:
    found = PostOffice()
    server = await asyncio.get_running_loop().create_server(
        lambda: SMTP(found, hostname="localhost", loop=asyncio.get_running_loop()), "127.0.0.1", 0
    )
    found.port = server.sockets[0].getsockname()[1]
    yield found
    server.close()
    await server.wait_closed()


async def test_pause_sends_exactly_one_letter_however_many_fail_and_send(scene: Scene, office: PostOffice) -> None:
    hook = await scene.webhook("/x?<b>=1&c")
    scene.inbox.answer("/x", 503)
    tasks = Tasks()
    letters = [Mails(MailStore(scene.pool), office.mailer(), quiet_s=0.05) for _ in range(3)]
    for place, each in enumerate(letters):
        tasks.start(f"letters {place}", each.run)
    async with scene.delivering(schedules=NEVER, each=8):
        await scene.events(hook, 30)
        await until(lambda: scene.are_all(hook, "parked"))
        await until(lambda: office.letters)

        async def is_quiet() -> bool:
            return not await scene.rows("select from mails where ended_at is null")

        await until(is_quiet)
        (letter,) = office.letters
        # The next pause is news again.
        await scene.webhooks.move(hook, "resume")
        await until(lambda: len(office.letters) == 2)
    await tasks.close()
    assert letter["X-Rcpt"] == letter["To"] == f"{hook.account}@example.com"
    assert letter["From"] == "Penstock <hooks@penstock.example>"
    assert letter["Subject"] == f"Webhook {hook.id} is paused"
    assert letter["Message-ID"] != office.letters[1]["Message-ID"]
    plain, rich = letter.get_body(("plain",)), letter.get_body(("html",))
    assert plain is not None
    assert rich is not None
    for part in (hook.id, "the reply was 503", f"POST /v1/webhooks/{hook.id}/resume"):
        assert part in plain.get_content()
        assert part in rich.get_content()
    assert "/x?<b>=1&c" in plain.get_content()
    assert "<b>=1" not in rich.get_content()


async def test_letter_that_is_not_taken_is_sent_again_with_the_same_id(scene: Scene, office: PostOffice) -> None:
    hook = await scene.webhook()
    office.says = ["451 try later", "451 try later"]
    store = MailStore(scene.pool)
    letters = Mails(store, office.mailer(), again_s=(0.0, 0.0, 0.0))
    await scene.execute(
        "insert into mails (account_id, kind, about) values ($1, 'webhook_paused', $2)",
        hook.account,
        '{"webhook": "wh_1", "url": "u", "network": "n", "event_type": "t", "event": "e", "attempts": 6,'
        ' "outcome": "timeout", "status": null}',
    )
    for _ in range(3):
        await letters.send_due()
    (letter,) = office.letters
    assert "no reply came in time" in str(letter.get_body(("plain",)))
    (row,) = await scene.rows("select tries, sent, ended_at from mails")
    assert (row["tries"], row["sent"]) == (3, True)
    assert await store.next_s() is None


async def test_letter_that_is_refused_for_good_is_given_up_and_said(
    scene: Scene, office: PostOffice, caplog: pytest.LogCaptureFixture
) -> None:
    hook = await scene.webhook()
    office.says = ["550 no such user"]
    await scene.execute(
        "insert into mails (account_id, kind, about) values ($1, 'webhook_paused', $2)",
        hook.account,
        '{"webhook": "wh_1", "url": "u", "network": "n", "event_type": "t", "event": "e", "attempts": 6,'
        ' "outcome": "timeout", "status": null}',
    )
    with caplog.at_level(logging.ERROR, "penstock.mail"):
        await Mails(MailStore(scene.pool), office.mailer()).send_due()
    assert [record.getMessage() for record in caplog.records] == ["mail given up"]
    (row,) = await scene.rows("select sent, ended_at is null as open from mails")
    assert (row["sent"], row["open"]) == (False, False)


async def test_without_a_server_letters_go_to_the_log(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "penstock.mail"):
        await Mailer(MailSettings("", 587, "starttls", "", "", "a@b", 5.0)).send(LETTER, at=0.0)
    assert caplog.records[0].__dict__["mail"] == "text\n"


async def test_server_that_is_away_is_not_final(office: PostOffice) -> None:
    closed = await asyncio.get_running_loop().create_server(asyncio.Protocol, "127.0.0.1", 0)
    port = closed.sockets[0].getsockname()[1]
    closed.close()
    with pytest.raises(Undelivered) as raised:
        await Mailer(MailSettings("127.0.0.1", port, "none", "", "", "a@b", 5.0)).send(LETTER, at=0.0)
    assert not raised.value.final


async def test_header_cannot_be_smuggled_in(office: PostOffice) -> None:
    """What stands in a letter's head is ours or an account's: an address with a line end is no address."""
    bad = OutgoingMail("id-1", "someone@example.com\r\nBcc: other@example.com", "A subject", "text\n", "<p>text</p>")
    with pytest.raises(Undelivered) as raised:
        await office.mailer().send(bad, at=0.0)
    assert raised.value.final
    assert not office.letters
