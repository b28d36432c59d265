"""Builds signing in: passwords, links, second factors, email addresses, and the members of accounts."""

from __future__ import annotations

from proxy.services.accounts.account_mails import AccountMails
from proxy.services.accounts.email_change import EmailChange
from proxy.services.accounts.second_factor import SecondFactor
from proxy.services.accounts.sign_in import SignIn
from proxy.services.accounts.team import Team
from proxy.settings import Settings
from proxy.store.postgres.keys import KeyStore
from proxy.store.postgres.members import MemberStore
from proxy.store.postgres.pool import Pool
from proxy.store.postgres.second_factors import SecondFactorStore
from proxy.store.postgres.secrets import vault_of
from proxy.store.postgres.sessions import SessionStore
from proxy.tasks import Tasks
from proxy.wire.mailer import Mailer


class SignInFeature:
    def __init__(self, settings: Settings, pool: Pool, keys: KeyStore, tasks: Tasks) -> None:
        store = SessionStore(pool, pepper=settings.keys.pepper, previous_pepper=settings.keys.previous_pepper)
        factor = SecondFactor(SecondFactorStore(pool, vault_of(settings)))
        mails = AccountMails(Mailer(settings.mail), tasks)
        self.sign_in = SignIn(store, factor, settings.dashboard, mails)
        self.emails = EmailChange(self.sign_in, store, keys, settings.dashboard, mails)
        self.team = Team(MemberStore(pool), store, self.sign_in, mails, settings.dashboard)

    def __repr__(self) -> str:
        return f"<SignInFeature {self.sign_in!r}>"
