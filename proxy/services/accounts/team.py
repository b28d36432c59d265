"""The people of an account: invitations by email, roles, removal, and visits of operators.

The account's own email address is that of its first owner, who always stays an owner, so an account has at least one. An
invitation is a link that works once. It is mailed, or returned to the inviting owner if the service sends no mail. The reply to
an invitation is the same whether or not the address has an account elsewhere: only a person who opens the link finds out.
"""

from __future__ import annotations

from dataclasses import dataclass

from proxy.core import sessions
from proxy.core.dashboard_links import token_link
from proxy.core.roles import Role
from proxy.errors import Unauthorized
from proxy.services.accounts.account_mails import AccountMails
from proxy.services.accounts.sign_in import SignedIn, SignIn, SignInPlace, new_token
from proxy.settings import DashboardSettings
from proxy.store.postgres.members import MemberRow, MemberStore
from proxy.store.postgres.sessions import SessionStore
from proxy.tasks import repeat

__all__ = ("MemberRow", "SentInvitation", "Team")

# Invitations per hour: by one account, and by it to one address. The latter is lower than the mails to one address from all
# accounts (`SignIn.count_mail`): one account does not use up the mails of others.
MOST_BY_ACCOUNT, MOST_TO_ADDRESS = 20, 5
# How long an operator may look at an account.
VISIT_S = 1800.0
PURGE_EVERY_S = 3600.0

_WRONG_LINK = "this invitation has been used, was revoked or has expired: ask for a new one"


@dataclass(frozen=True, slots=True)
class SentInvitation:
    """An invitation. `url` is empty if it was mailed."""

    row: MemberRow
    url: str


class Team:
    def __init__(
        self,
        store: MemberStore,
        tokens: SessionStore,
        sign_in: SignIn,
        mails: AccountMails,
        settings: DashboardSettings,
    ) -> None:
        self._store = store
        self._tokens = tokens
        self._sign_in = sign_in
        self._mails = mails
        self._settings = settings

    def __repr__(self) -> str:
        return f"<Team {self._store!r}>"

    async def read(self, account: str) -> tuple[list[MemberRow], list[MemberRow]]:
        """The people of the account, and its open invitations."""
        return await self._store.members(account), await self._store.invitations(account)

    async def invite(self, by: SignedIn, *, email: str, role: Role) -> SentInvitation:
        account = by.session.id
        await self._count(account, email.strip())
        token = new_token()
        row = await self._store.invite(
            account,
            by.session.person,
            email=email,
            role=role,
            digest=self._tokens.digest_for_every_host("invitation", token),
            lasts_s=self._settings.invitation_s,
            most=self._settings.members,
        )
        url = token_link(self._sign_in.url, "invitation", token)
        if not self._mails.is_configured:
            return SentInvitation(row, url)
        self._mail_invitation(by, row, url)
        return SentInvitation(row, "")

    async def _count(self, account: str, address: str) -> None:
        for kind, subject, most in (
            ("invitation by", account, MOST_BY_ACCOUNT),
            ("invitation by and to", f"{account} {address}", MOST_TO_ADDRESS),
        ):
            await self._sign_in.count(kind, subject, most=most, within_s=3600.0)
        await self._sign_in.count_mail(address)

    def _mail_invitation(self, by: SignedIn, row: MemberRow, url: str) -> None:
        hours = round(self._settings.invitation_s / 3600)
        period = f"{hours // 24} days" if hours >= 48 else f"{hours} hours"
        self._mails.send(
            row["email"],
            f"Invitation to the account {by.session.name}",
            f"{by.session.email} invites you to the account {by.session.name}, with the role {row['role']}:\n\n{url}\n\n"
            f"The link works once and expires in {period}. If you do not know the sender, ignore this mail.\n",
        )

    async def revoke(self, by: SignedIn, invitation: str) -> str:
        return await self._store.revoke_invitation(by.session.id, by.session.person, invitation)

    async def change_role(self, by: SignedIn, member: str, role: Role) -> tuple[str, str]:
        """Return the member's address and former role."""
        return await self._store.change_role(by.session.id, by.session.person, member, role)

    async def remove(self, by: SignedIn, member: str) -> str:
        return await self._store.remove(by.session.id, by.session.person, member)

    # For the person who is invited

    async def read_invitation(self, token: str, *, at: SignInPlace) -> MemberRow:
        await self._sign_in.count_link(at)
        invitation = await self._store.read_invitation(self._digests(token)) if sessions.is_token(token) else None
        if invitation is None:
            raise Unauthorized(_WRONG_LINK, reason="session")
        return invitation

    async def accept(self, token: str, *, password: str, at: SignInPlace) -> SignedIn:
        """Join the account with a password, and sign in. The first owner is informed."""
        invitation = await self.read_invitation(token, at=at)
        hashed = await self._sign_in.hash(password, email=invitation["email"])
        joined = await self._store.accept(self._digests(token), hashed)
        if joined is None:
            raise Unauthorized(_WRONG_LINK, reason="session")
        if self._mails.is_configured:
            self._mails.send(
                joined.first_owner,
                "A new member of your account",
                f"{joined.email} has joined your account with the role {joined.role}.\n\n"
                "If you did not expect this, remove the member in the dashboard, under Account.\n",
            )
        return await self._sign_in.begin(joined.id, at)

    def _digests(self, token: str) -> list[bytes]:
        return self._tokens.digests("invitation", token)

    # For operators

    async def visit(self, account: str, operator: str, *, at: SignInPlace) -> SignedIn:
        """Begin a session in which an operator looks at an account. It ends by itself."""
        person = await self._store.begin_visit(account, operator, lasts_s=VISIT_S)
        return await self._sign_in.begin_visit(person, at, lasts_s=VISIT_S)

    async def keep(self) -> None:
        """Supervised loop: delete members who are left in deleted accounts."""
        await repeat(self._store.purge, every_s=PURGE_EVERY_S)
