"""/account and /admin: signing in, being signed in, and signing out."""

from __future__ import annotations

from typing import Any

from proxy.core import sessions
from proxy.services.accounts.sign_in import Session, SignedIn, SignIn
from proxy.web.dashboard.session_endpoint import SessionHandler, SessionRequest, set_cookie
from proxy.web.rest.endpoint import RestReply
from proxy.web.timestamps import time_of


class SignInHandlers:
    def __init__(self, sign_in: SignIn, *, session_s: float) -> None:
        self._sign_in = sign_in
        self._session_s = session_s

    def answers(self) -> dict[str, SessionHandler]:
        return {
            "account_sign_in": self.by_password,
            "account_ask_link": self.ask_link,
            "account_redeem_link": self.by_link,
            "account_session": self.read,
            "account_sign_out": self.sign_out,
            "account_set_password": self.set_password,
            "admin_sign_in": self.by_admin_token,
            "admin_session": self.read,
            "admin_sign_out": self.sign_out,
        }

    async def by_password(self, visit: SessionRequest) -> RestReply:
        body = visit.body
        found = await self._sign_in.by_password(
            body["email"], body["password"], address=visit.address, before=visit.token
        )
        return self._begun(visit, found)

    async def ask_link(self, visit: SessionRequest) -> RestReply:
        await self._sign_in.ask_link(visit.body["email"], address=visit.address)
        return RestReply({"sent": True}, status=202)

    async def by_link(self, visit: SessionRequest) -> RestReply:
        body = visit.body
        found = await self._sign_in.by_link(
            body["token"], password=body.get("password"), address=visit.address, before=visit.token
        )
        return self._begun(visit, found)

    async def by_admin_token(self, visit: SessionRequest) -> RestReply:
        found = await self._sign_in.by_admin_token(visit.body["token"], address=visit.address, before=visit.token)
        return self._begun(visit, found)

    async def read(self, visit: SessionRequest) -> dict[str, Any]:
        return _shown(visit.signed_in)

    async def sign_out(self, visit: SessionRequest) -> RestReply:
        await self._sign_in.sign_out(visit.token)
        return RestReply({"signed_out": True}, headers=self._cookie(visit, visit.who, ""))

    async def set_password(self, visit: SessionRequest) -> dict[str, Any]:
        body = visit.body
        session = await self._sign_in.change_password(
            visit.signed_in, current=body.get("current_password"), new=body["new_password"]
        )
        return _shown(SignedIn(visit.token, session))

    def _begun(self, visit: SessionRequest, found: SignedIn) -> RestReply:
        return RestReply(_shown(found), headers=self._cookie(visit, found.session, found.token))

    def _cookie(self, visit: SessionRequest, session: Session, token: str) -> dict[str, str]:
        kind = "admin" if session.is_operator else "account"
        return set_cookie(kind, token, secure=visit.secure, lasts_s=self._session_s)


def _shown(found: SignedIn) -> dict[str, Any]:
    session = found.session
    times = {
        # Who came with a token in a header has no cookie, and needs nothing against forged requests.
        "csrf_token": sessions.csrf_of(found.token) if found.token else None,
        "created_at": time_of(session.created_at),
        "expires_at": time_of(session.expires_at),
    }
    if session.is_operator:
        return {"operator": {"id": session.id, "name": session.name}, **times}
    account = {
        "id": session.id,
        "name": session.name,
        "email": session.email,
        "plan": session.plan,
        "has_password": session.has_password,
        "created_at": time_of(session.account_created_at),
    }
    return {"account": account, **times}
