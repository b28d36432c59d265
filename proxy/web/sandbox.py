"""Requests from the reference with a sandbox token: they are served, counted and limited as those of the key it stands for."""

from __future__ import annotations

import time

from aiohttp import web

from proxy.core import sandbox_tokens, sessions
from proxy.core.access import Key
from proxy.services.accounts.admission import Admission
from proxy.web.session_cookies import cookie_name

_WORDS = "the sandbox token is not valid for this session: it has expired, or was made for another one"


class Sandbox:
    def __init__(self, admission: Admission, pepper: str) -> None:
        self._admission = admission
        self._pepper = pepper.encode()

    def __repr__(self) -> str:
        return f"<Sandbox {self._admission!r}>"

    def token_for(self, session: str, key_id: str) -> tuple[str, int]:
        """A token for a key of the session's account, and the Unix time at which it ends."""
        until = int(time.time()) + sandbox_tokens.LASTS_S
        return sandbox_tokens.token_for(self._pepper, session, key_id, until), until

    def key(self, request: web.Request, text: str, address: str) -> Key:
        """The key that a token stands for. Raises if the request is not from a page of ours with the token's session."""
        origin = request.headers.get("Origin", "")
        site = request.headers.get("Sec-Fetch-Site", "")
        key_id = ""
        if not sessions.is_foreign(fetch_site=site, origin=origin, hosts=(request.host.lower(),)):
            key_id = self._key_id(request, text)
        return self._admission.stand_in(key_id, address, time.monotonic(), origin=origin, words=_WORDS)

    def _key_id(self, request: web.Request, text: str) -> str:
        names = (cookie_name("account", secure=secure) for secure in (True, False))
        tokens = (request.cookies.get(name, "") for name in names)
        found = (sandbox_tokens.key_of(self._pepper, token, text, time.time()) for token in tokens)
        return next(filter(None, found), "")
