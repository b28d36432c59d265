"""/account/members and /account/invitations: the people of an account; and visits of operators to an account."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from proxy.errors import InvalidRequest
from proxy.services.accounts.accounts import AccountService
from proxy.services.accounts.team import MemberRow, Team
from proxy.web.dashboard.session_endpoint import SessionHandler, SessionRequest
from proxy.web.dashboard.sign_in import SignInHandlers, shown_session
from proxy.web.rest.endpoint import RestReply
from proxy.web.timestamps import time_of

_TIMES = ("joined_at", "seen_at", "created_at", "expires_at")


class PeopleHandlers:
    def __init__(self, team: Team, accounts: AccountService, signing: SignInHandlers) -> None:
        self._team = team
        self._accounts = accounts
        self._signing = signing

    def handlers(self) -> dict[str, SessionHandler]:
        return {
            "list_members": self.list_members,
            "update_member": self.update,
            "remove_member": self.remove,
            "invite_member": self.invite,
            "revoke_invitation": self.revoke,
            "account_read_invitation": self.read_invitation,
            "account_accept_invitation": self.accept,
            "admin_visit_account": self.visit,
        }

    async def list_members(self, request: SessionRequest) -> dict[str, Any]:
        members, invitations = await self._team.read(request.who.id)
        return {"members": [*map(_shown, members)], "invitations": [*map(_shown, invitations)]}

    async def invite(self, request: SessionRequest) -> RestReply:
        body = request.body
        by = request.signed_in
        if request.key_id:
            account = await self._accounts.read(request.who.id)
            by = replace(by, session=replace(by.session, name=account["name"]))
        sent = await self._team.invite(by, email=body["email"], role=body["role"])
        shown = {**_shown(sent.row), "invited_by": request.who.email, "url": sent.url or None}
        return RestReply(shown, status=201, subject=sent.row["email"])

    async def revoke(self, request: SessionRequest) -> RestReply:
        email = await self._team.revoke(request.signed_in, request.path["invitation_id"])
        return RestReply({"id": request.path["invitation_id"], "revoked": True}, subject=email)

    async def update(self, request: SessionRequest) -> RestReply:
        member, role = request.path["member_id"], request.body["role"]
        email, before = await self._team.change_role(request.signed_in, member, role)
        data = {"id": member, "email": email, "role": role}
        return RestReply(data, subject=email, changes=({"role": before}, {"role": role}))

    async def remove(self, request: SessionRequest) -> RestReply:
        email = await self._team.remove(request.signed_in, request.path["member_id"])
        return RestReply({"id": request.path["member_id"], "removed": True}, subject=email)

    async def read_invitation(self, request: SessionRequest) -> dict[str, Any]:
        invitation = await self._team.read_invitation(request.body["token"], at=request.place)
        return {"account": invitation["account_name"], "email": invitation["email"], "role": invitation["role"]}

    async def accept(self, request: SessionRequest) -> RestReply:
        body = request.body
        signed_in = await self._team.accept(body["token"], password=body["password"], at=request.place)
        return await self._signing.signed_in(request, signed_in, "account_accept_invitation")

    async def visit(self, request: SessionRequest) -> RestReply:
        account = await self._accounts.read(request.path["id"])
        if account["disabled"]:
            raise InvalidRequest("the account is disabled: enable it first")
        signed_in = await self._team.visit(account["id"], request.who.id, at=request.arrival)
        return RestReply(shown_session(signed_in), status=201, headers=self._signing.cookie(request, signed_in))


def _shown(row: MemberRow) -> Mapping[str, Any]:
    return {name: time_of(value) if name in _TIMES else value for name, value in row.items()}
