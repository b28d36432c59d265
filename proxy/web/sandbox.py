"""Requests from the reference with a sandbox token: they are served, counted and limited as those of the key it stands for."""

from __future__ import annotations

import time
from typing import NamedTuple

from aiohttp import web

from proxy.core import sandbox_tokens, sessions
from proxy.core.access import Key
from proxy.core.roles import PERMISSIONS
from proxy.services.accounts.admission import Admission
from proxy.services.accounts.sign_in import SignIn
from proxy.web.session_cookies import cookie_name

_WORDS = "the sandbox token is not valid for this session: it has expired, or was made for another one"


class VouchedKey(NamedTuple):
    """The key of a token, and the account of its session."""

    key_id: str
    account: str


NOT_VOUCHED = VouchedKey("", "")


class Sandbox:
    def __init__(self, admission: Admission, sign_in: SignIn, pepper: str) -> None:
        self._admission = admission
        self._sign_in = sign_in
        self._pepper = pepper.encode()

    def __repr__(self) -> str:
        return f"<Sandbox {self._admission!r}>"

    def token_for(self, session: str, key_id: str) -> tuple[str, int]:
        """A token for a key of the session's account, and the Unix time at which it ends."""
        until = int(time.time()) + sandbox_tokens.LASTS_S
        return sandbox_tokens.token_for(self._pepper, session, key_id, until), until

    async def vouch(self, request: web.Request, text: str) -> VouchedKey:
        """Check a token against its session as it is stored now: the person may have signed out or lost the role since."""
        origin, site = request.headers.get("Origin", ""), request.headers.get("Sec-Fetch-Site", "")
        if sessions.is_foreign(fetch_site=site, origin=origin, hosts=(request.host.lower(),), secure=request.secure):
            return NOT_VOUCHED
        cookie, key_id = self._signed(request, text)
        session = await self._sign_in.session_of(cookie) if key_id else None
        if session is None or session.is_operator or "manage" not in PERMISSIONS[session.role]:
            return NOT_VOUCHED
        return VouchedKey(key_id, session.id)

    def key(self, request: web.Request, vouched: VouchedKey, address: str) -> Key:
        """The key that a token stands for. Raises if the token was not vouched for."""
        origin = request.headers.get("Origin", "")
        return self._admission.authenticate_by_id(*vouched, address, time.monotonic(), origin=origin, words=_WORDS)

    def _signed(self, request: web.Request, text: str) -> tuple[str, str]:
        """The cookie with which the token was signed, and the id of its key; both empty if there is none."""
        for secure in (True, False):
            cookie = request.cookies.get(cookie_name("account", secure=secure), "")
            if key_id := sandbox_tokens.key_of(self._pepper, cookie, text, time.time()):
                return cookie, key_id
        return "", ""
