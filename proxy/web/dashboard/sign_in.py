"""/account and /admin: signing in, the session, and signing out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import segno
from multidict import CIMultiDict

from proxy.core import sessions
from proxy.core.roles import PERMISSIONS
from proxy.core.sessions import PLACE_S
from proxy.services.accounts.action_log import Action, ActionLog, Actor
from proxy.services.accounts.email_change import EmailChange
from proxy.services.accounts.sign_in import SignedIn, SignIn
from proxy.web.dashboard.session_endpoint import SessionHandler, SessionRequest, actor_of, set_cookie
from proxy.web.rest.endpoint import RestReply
from proxy.web.timestamps import time_of


class SignInHandlers:
    def __init__(self, sign_in: SignIn, emails: EmailChange, actions: ActionLog, *, session_s: float) -> None:
        self._sign_in = sign_in
        self._emails = emails
        self._actions = actions
        self._session_s = session_s

    def handlers(self) -> dict[str, SessionHandler]:
        return {
            "account_sign_in": self.by_password,
            "account_ask_link": self.ask_link,
            "account_redeem_link": self.by_link,
            "account_session": self.read,
            "account_sign_out": self.sign_out,
            "account_set_password": self.set_password,
            "change_email": self.change_email,
            "confirm_email": self.confirm_email,
            "begin_second_factor": self.begin_factor,
            "confirm_second_factor": self.confirm_factor,
            "remove_second_factor": self.remove_factor,
            "list_sessions": self.list_sessions,
            "end_session": self.end_session,
            "end_other_sessions": self.end_other_sessions,
            "admin_sign_in": self.by_admin_token,
            "admin_session": self.read,
            "admin_sign_out": self.sign_out,
        }

    async def by_password(self, request: SessionRequest) -> RestReply:
        body = request.body
        signed_in = await self._sign_in.by_password(
            body["email"], body["password"], code=body.get("code"), at=request.place
        )
        return await self.signed_in(request, signed_in, "account_sign_in")

    async def ask_link(self, request: SessionRequest) -> RestReply:
        await self._sign_in.ask_link(request.body["email"], at=request.place)
        return RestReply({"sent": True}, status=202)

    async def by_link(self, request: SessionRequest) -> RestReply:
        body = request.body
        signed_in = await self._sign_in.by_link(
            body["token"], password=body.get("password"), code=body.get("code"), at=request.place
        )
        return await self.signed_in(request, signed_in, "account_redeem_link")

    async def by_admin_token(self, request: SessionRequest) -> RestReply:
        signed_in = await self._sign_in.by_admin_token(request.body["token"], at=request.place)
        actor = Actor("operator", signed_in.session.name)
        await self._actions.record(None, actor, Action("admin_sign_in", address=request.address))
        return self._session_reply(request, signed_in)

    async def read(self, request: SessionRequest) -> dict[str, Any]:
        return shown_session(request.signed_in)

    async def sign_out(self, request: SessionRequest) -> RestReply:
        await self._sign_in.sign_out(request.token)
        return RestReply({"signed_out": True}, headers=self.cookie(request, SignedIn("", request.who)))

    async def set_password(self, request: SessionRequest) -> dict[str, Any]:
        body = request.body
        session = await self._sign_in.change_password(
            request.signed_in, current=body.get("current_password"), new=body["new_password"]
        )
        return shown_session(SignedIn(request.token, session))

    async def change_email(self, request: SessionRequest) -> RestReply:
        body = request.body
        await self._emails.begin(request.signed_in, email=body["email"], current=body.get("current_password"))
        return RestReply({"sent": True}, status=202)

    async def confirm_email(self, request: SessionRequest) -> dict[str, Any]:
        account, email = await self._emails.confirm(request.body["token"], at=request.place)
        await self._actions.record(account, Actor("holder", email), Action("confirm_email", address=request.address))
        return {"email": email}

    async def begin_factor(self, request: SessionRequest) -> dict[str, Any]:
        secret = await self._sign_in.begin_factor(request.signed_in, request.body.get("current_password"))
        return {"secret": secret.text, "uri": secret.uri, "qr_code": _squares(secret.uri)}

    async def confirm_factor(self, request: SessionRequest) -> dict[str, Any]:
        return {"recovery_codes": await self._sign_in.confirm_factor(request.signed_in, request.body["code"])}

    async def remove_factor(self, request: SessionRequest) -> dict[str, Any]:
        await self._sign_in.turn_factor_off(request.signed_in, request.body["code"])
        return {"removed": True}

    async def list_sessions(self, request: SessionRequest) -> dict[str, Any]:
        return {"sessions": [_shown_row(row) for row in await self._sign_in.sessions_of(request.signed_in)]}

    async def end_session(self, request: SessionRequest) -> dict[str, Any]:
        await self._sign_in.end_session(request.signed_in, request.path["session_id"])
        return {"signed_out": True}

    async def end_other_sessions(self, request: SessionRequest) -> dict[str, Any]:
        await self._sign_in.end_other_sessions(request.signed_in)
        return {"signed_out": True}

    async def signed_in(self, request: SessionRequest, signed_in: SignedIn, action: str) -> RestReply:
        """Record a sign-in, and reply with the cookies."""
        done = Action(action, address=request.address)
        await self._actions.record(signed_in.session.id, actor_of(signed_in.session), done)
        return self._session_reply(request, signed_in)

    def _session_reply(self, request: SessionRequest, signed_in: SignedIn) -> RestReply:
        headers = CIMultiDict(self.cookie(request, signed_in))
        if signed_in.device:
            headers.extend(set_cookie("device", signed_in.device, secure=request.secure, lasts_s=PLACE_S))
        return RestReply(shown_session(signed_in), headers=headers)

    def cookie(self, request: SessionRequest, signed_in: SignedIn) -> dict[str, str]:
        """The cookie of a session; without a token it is removed."""
        kind = "admin" if signed_in.session.is_operator else "account"
        return set_cookie(kind, signed_in.token, secure=request.secure, lasts_s=self._session_s)


def _squares(text: str) -> list[str]:
    """The QR code of a text: one line per row, with 1 for a dark square."""
    return ["".join(map(str, row)) for row in segno.make_qr(text, error="m").matrix]


def _shown_row(row: Mapping[str, Any]) -> dict[str, Any]:
    times = {name: time_of(row[name]) for name in ("created_at", "seen_at", "expires_at")}
    return {"id": row["id"], **times, "address": row["address"], "agent": row["agent"], "current": row["is_current"]}


def shown_session(signed_in: SignedIn) -> dict[str, Any]:
    session = signed_in.session
    times = {
        # A session by bearer token has no cookie and needs no CSRF token.
        "csrf_token": sessions.csrf_of(signed_in.token) if signed_in.token else None,
        "created_at": time_of(session.created_at),
        "expires_at": time_of(session.expires_at),
    }
    if session.is_operator:
        return {"operator": {"id": session.id, "name": session.name}, **times}
    account = {
        "id": session.id,
        "name": session.name,
        "email": session.account_email,
        "plan": session.plan,
        "has_password": session.has_password,
        "has_second_factor": session.has_second_factor,
        "created_at": time_of(session.account_created_at),
    }
    person = {
        "id": session.person,
        "email": session.email,
        "role": session.role,
        "permissions": sorted(PERMISSIONS[session.role]),
    }
    return {"account": account, "person": person, **times}
