"""/account/keys/{id}/sandbox: tokens for the reference, which sends requests as one of the account's keys."""

from __future__ import annotations

import datetime
from typing import Any

from proxy.errors import Forbidden
from proxy.services.accounts.accounts import AccountService
from proxy.web.dashboard.session_endpoint import SessionHandler, SessionRequest
from proxy.web.sandbox import Sandbox
from proxy.web.timestamps import time_of


class SandboxHandlers:
    def __init__(self, accounts: AccountService, sandbox: Sandbox) -> None:
        self._accounts = accounts
        self._sandbox = sandbox

    def handlers(self) -> dict[str, SessionHandler]:
        return {"create_sandbox_token": self.create}

    async def create(self, request: SessionRequest) -> dict[str, Any]:
        key = await self._accounts.key(request.who.id, request.path["id"])
        if key["status"] != "active":
            raise Forbidden(f"the key is {key['status']}", reason="disabled")
        token, until = self._sandbox.token_for(request.token, key["id"])
        return {"token": token, "expires_at": time_of(datetime.datetime.fromtimestamp(until, datetime.UTC))}
