"""A new email address for a person: a link that is mailed to it confirms it, and the old address is informed.

The reply to a request is the same whether or not another account has the address: only a person who reads its mail finds out.
"""

from __future__ import annotations

from proxy.core import sessions
from proxy.core.dashboard_links import token_link
from proxy.errors import InvalidRequest, Unauthorized
from proxy.services.accounts.account_mails import AccountMails
from proxy.services.accounts.sign_in import SignedIn, SignIn, SignInPlace, new_token
from proxy.settings import DashboardSettings
from proxy.store.postgres.keys import KeyStore
from proxy.store.postgres.sessions import SessionStore

_WRONG_LINK = "this link has been used or has expired: change the address again"


class EmailChange:
    def __init__(
        self,
        sign_in: SignIn,
        store: SessionStore,
        keys: KeyStore,
        settings: DashboardSettings,
        mails: AccountMails,
    ) -> None:
        self._sign_in = sign_in
        self._store = store
        self._keys = keys
        self._settings = settings
        self._mails = mails

    def __repr__(self) -> str:
        return f"<EmailChange {self._store!r}>"

    async def begin(self, by: SignedIn, *, email: str, current: str | None) -> None:
        """Mail a link to the new address, in the background."""
        if not self._mails.is_configured:
            raise InvalidRequest("the service sends no mail: ask its operators to change your email address")
        await self._sign_in.prove(by, current)
        await self._sign_in.count_mail(email)
        token = new_token()
        await self._store.begin_email_change(by.session.person, email.strip(), token, lasts_s=self._settings.link_s)
        url = token_link(self._sign_in.url, "email", token)
        minutes = round(self._settings.link_s / 60)
        self._mails.send(
            email.strip(),
            "Confirm your email address",
            f"Confirm that this is your new email address:\n\n{url}\n\n"
            f"The link works once and expires in {minutes} minutes. If you did not request it, ignore this mail.\n",
        )

    async def confirm(self, token: str, *, at: SignInPlace) -> tuple[str, str]:
        """Change the address by a link; return the account and the new address. Pending sign-in links, which went to the old
        address, become invalid."""
        await self._sign_in.count_link(at)
        change = await self._store.take_email_change(token) if sessions.is_token(token) else None
        if change is None:
            raise Unauthorized(_WRONG_LINK, reason="session")
        await self._keys.change_email(change.person_id, change.email)
        await self._store.end_links(change.person_id)
        self._mails.send(
            change.old_email,
            "Your email address was changed",
            f"You now sign in with the email address {change.email}.\n\n"
            "If you did not change it, contact the operators of the service at once.\n",
        )
        return change.account_id, change.email
