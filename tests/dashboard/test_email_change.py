"""A new email address: confirmed by a mailed link, once, and reported to the old address."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from dataclasses import dataclass

import pytest

from proxy.errors import InvalidRequest, RateLimited, Unauthorized
from proxy.services.accounts.account_mails import AccountMails
from proxy.services.accounts.email_change import EmailChange
from proxy.services.accounts.sign_in import SignedIn, SignIn, SignInPlace, hash_password
from proxy.store.postgres.keys import KeyStore
from proxy.store.postgres.pool import Pool
from proxy.store.postgres.sessions import SessionStore
from proxy.tasks import Tasks
from tests.dashboard.service import PASSWORD, DashboardService
from tests.dashboard.test_sign_in_links import PEPPER, SETTINGS, sign_in_of
from tests.delivery.test_mails import MailServer, mail_server
from tests.service import until

__all__ = ("mail_server",)

OLD, NEW = "old@example.com", "new@example.com"
HERE = SignInPlace("192.0.2.1")


@dataclass
class Office:
    """The parts that change an address, and a holder who is signed in."""

    change: EmailChange
    sign_in: SignIn
    store: SessionStore
    keys: KeyStore
    holder: SignedIn
    mails: MailServer

    async def mail_to(self, address: str, subject: str) -> str:
        def found() -> str:
            fitting = [each for each in self.mails.mails if (each["X-Rcpt"], each["Subject"]) == (address, subject)]
            return str(fitting[-1].get_content()) if fitting else ""

        return str(await until(found))


@pytest.fixture
async def office(pool: Pool, mail_server: MailServer) -> AsyncIterator[Office]:
    tasks, store = Tasks(), SessionStore(pool, pepper=PEPPER)
    keys = KeyStore(pool, pepper=PEPPER, plans={"free": 10})
    account = await keys.create_account(name="a", email=OLD, plan="free")
    await store.set_password(account["id"], hash_password(PASSWORD))
    sign_in = sign_in_of(pool, mail_server, tasks)
    holder = await sign_in.by_password(OLD, PASSWORD, code=None, at=HERE)
    change = EmailChange(sign_in, store, keys, SETTINGS, AccountMails(mail_server.mailer(), tasks))
    yield Office(change, sign_in, store, keys, holder, mail_server)
    await tasks.close()


async def test_address_changes_when_the_link_is_opened_and_both_addresses_get_mail(office: Office) -> None:
    await office.change.begin(office.holder, email=NEW, current=PASSWORD)
    text = await office.mail_to(NEW, "Confirm your email address")
    found = re.search(r"https://dashboard\.example\.com/#email=(\S+)", text)
    assert found is not None
    assert (await office.store.read_holder(office.holder.session.id)).email == OLD
    link = (await office.sign_in.link(office.holder.session.id))[0].partition("#token=")[2]

    assert await office.change.confirm(found[1], at=HERE) == (office.holder.session.id, NEW)
    assert NEW in await office.mail_to(OLD, "Your email address was changed")
    with pytest.raises(Unauthorized):
        await office.change.confirm(found[1], at=HERE)
    with pytest.raises(Unauthorized):
        await office.sign_in.by_link(link, password=None, code=None, at=HERE)
    with pytest.raises(Unauthorized):
        await office.sign_in.by_password(OLD, PASSWORD, code=None, at=HERE)
    signed_in = await office.sign_in.by_password(NEW, PASSWORD, code=None, at=HERE)
    assert signed_in.session.email == NEW


async def test_address_of_another_account_is_not_taken(office: Office) -> None:
    """The refusal comes only after the mail to that address was read."""
    await office.keys.create_account(name="b", email=NEW, plan="free")
    await office.change.begin(office.holder, email=NEW, current=PASSWORD)
    text = await office.mail_to(NEW, "Confirm your email address")
    with pytest.raises(InvalidRequest):
        await office.change.confirm(text.partition("#email=")[2].split()[0], at=HERE)
    assert (await office.store.read_holder(office.holder.session.id)).email == OLD


async def test_wrong_password_sends_nothing(office: Office) -> None:
    with pytest.raises(InvalidRequest, match="current_password: is wrong"):
        await office.change.begin(office.holder, email=NEW, current="not the password")
    assert not office.mails.mails
    for token in ("", "x" * 43, "\0"):
        with pytest.raises(Unauthorized):
            await office.change.confirm(token, at=HERE)


async def test_without_a_mail_server_the_operators_are_named(service: DashboardService) -> None:
    holder = await service.holder()
    reply = await holder.post("/account/email", {"email": NEW, "current_password": PASSWORD})
    assert "ask its operators" in reply.fault(400)
    (await holder.post("/account/email/confirm", {"token": "x" * 43})).fault(401)


async def test_new_password_ends_a_pending_change(office: Office) -> None:
    await office.change.begin(office.holder, email=NEW, current=PASSWORD)
    token = (await office.mail_to(NEW, "Confirm your email address")).partition("#email=")[2].split()[0]
    await office.sign_in.change_password(office.holder, current=PASSWORD, new="another long password")
    with pytest.raises(Unauthorized):
        await office.change.confirm(token, at=HERE)


async def test_account_without_a_password_cannot_send_mails_without_end(office: Office) -> None:
    account = await office.keys.create_account(name="b", email="link@example.com", plan="free")
    link = (await office.sign_in.link(account["id"]))[0].partition("#token=")[2]
    holder = await office.sign_in.by_link(link, password=None, code=None, at=HERE)
    for _ in range(SETTINGS.tries):
        await office.change.begin(holder, email=NEW, current=None)
    with pytest.raises(RateLimited):
        await office.change.begin(holder, email=NEW, current=None)
