"""What stands around every operation for people who are signed in: the sibling of `rest.py`, with a session instead of a key.

In this order: whether a page of ours asks, who is signed in, the token against forged requests, then the path, the query and
the body, each checked by the contract. Nothing of it is kept by a browser or by anything on the way. It costs no units.
"""

from __future__ import annotations

import math
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from http.cookies import SimpleCookie
from typing import Any

from aiohttp import web

from proxy.core import sessions
from proxy.core.access import ALL_SCOPES, Account, Key, Limits
from proxy.core.paging import Page
from proxy.errors import Fault, Forbidden, Unauthorized
from proxy.services.accounts.admission import Admission
from proxy.services.accounts.sign_in import Session, SignedIn, SignIn
from proxy.settings import DashboardSettings
from proxy.web.api_spec import ApiOperation, ApiSpec
from proxy.web.gate import Gate
from proxy.web.network_resolver import NetworkResolver
from proxy.web.reply import fault_reply, json_reply
from proxy.web.rest.endpoint import RestHandler as KeyAnswers
from proxy.web.rest.endpoint import RestReply, RestRequest

COOKIES = {"account": "penstock_session", "admin": "penstock_admin"}
CSRF = "X-CSRF-Token"
_PRIVATE = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer"}


@dataclass(frozen=True, slots=True)
class SessionRequest:
    """A request of somebody who is signed in, or wants to be; checked."""

    session: Session | None
    # The cookie, as it came: of nobody, perhaps.
    token: str
    address: str
    secure: bool
    path: Mapping[str, str]
    query: Mapping[str, Any]
    body: Any

    @property
    def who(self) -> Session:
        assert self.session is not None
        return self.session

    @property
    def signed_in(self) -> SignedIn:
        return SignedIn(self.token, self.who)

    @property
    def page(self) -> Page:
        return Page(self.query["page"], self.query["limit"])


SessionHandler = Callable[[SessionRequest], Awaitable[Any]]
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def cookie_name(kind: str, *, secure: bool) -> str:
    """RFC 6265bis, 4.1.3.2: a name with __Host- only we can set, and only over https."""
    return f"__Host-{COOKIES[kind]}" if secure else COOKIES[kind]


def set_cookie(kind: str, token: str, *, secure: bool, lasts_s: float) -> dict[str, str]:
    """The header; an empty token takes the cookie away."""
    jar: SimpleCookie = SimpleCookie()
    name = cookie_name(kind, secure=secure)
    jar[name] = token
    jar[name]["path"] = "/"
    jar[name]["httponly"] = True
    jar[name]["samesite"] = "Strict"
    jar[name]["max-age"] = math.ceil(lasts_s) if token else 0
    if secure:
        jar[name]["secure"] = True
    return {"Set-Cookie": jar[name].OutputString()}


class SessionEndpoints:
    def __init__(
        self, gate: Gate, admission: Admission, contract: ApiSpec, sign_in: SignIn, settings: DashboardSettings
    ) -> None:
        self._gate = gate
        self._admission = admission
        self._contract = contract
        self._sign_in = sign_in
        self._settings = settings
        self._host = settings.url.partition("://")[2].partition("/")[0].lower()

    def handlers(self, answers: Mapping[str, SessionHandler]) -> dict[str, Handler]:
        """By the operation's id, what aiohttp calls."""
        return {name: self._handler(self._contract.operations[name], answer) for name, answer in answers.items()}

    def mirrored(self, answers: Mapping[str, KeyAnswers], where: NetworkResolver) -> dict[str, Handler]:
        """Operations of keys that are there below /account too: as if a key of the account with every right asked."""
        found: dict[str, SessionHandler] = {}
        for name, answer in answers.items():
            if (mirror := f"account_{name}") in self._contract.operations:

                async def asked(visit: SessionRequest, answer: KeyAnswers = answer) -> Any:
                    key = _stand_in(visit.who)
                    return await answer(RestRequest(key, ALL_SCOPES, visit.path, visit.query, visit.body, where))

                found[mirror] = asked
        return self.handlers(found)

    def _handler(self, operation: ApiOperation, answer: SessionHandler) -> Handler:
        async def handle(request: web.Request) -> web.StreamResponse:
            try:
                found = await answer(await self._read(request, operation))
            except Fault as fault:
                reply: web.StreamResponse = fault_reply(fault)
            else:
                reply = found if isinstance(found, web.StreamResponse) else _reply(found)
            reply.headers.update(_PRIVATE)
            return reply

        return handle

    async def _read(self, request: web.Request, operation: ApiOperation) -> SessionRequest:
        address = self._gate.enter(request, operation.id)
        secure = self._settings.secure or self._gate.is_secure(request)
        changes = request.method not in sessions.SAFE
        if changes:
            self._refuse_foreign(request)
        kind = "admin" if operation.path.startswith("/admin") else "account"
        token = request.cookies.get(cookie_name(kind, secure=secure), "")
        session = None
        if operation.session != "none":
            bearer = _bearer(request) if operation.session == "admin" else ""
            session = await self._session(operation, token, bearer, address)
            # No browser sends a bearer's token by itself: only a cookie needs the other token beside it.
            if changes and not bearer and not sessions.is_csrf(token, request.headers.get(CSRF, "")):
                raise Forbidden(f"the header {CSRF} must be the session's csrf_token")
        path = operation.check_path(request.match_info)
        query = operation.check_query(request.query)
        body = operation.check_body(await self._gate.read_body(request)) if operation.body is not None else None
        return SessionRequest(session, token, address, secure, path, query, body)

    def _refuse_foreign(self, request: web.Request) -> None:
        fetch_site, origin = request.headers.get("Sec-Fetch-Site", ""), request.headers.get("Origin", "")
        if sessions.is_foreign(fetch_site=fetch_site, origin=origin, hosts=(request.host.lower(), self._host)):
            raise Forbidden("a page of another origin may not ask this")

    async def _session(self, operation: ApiOperation, token: str, bearer: str, address: str) -> Session:
        def refuse(words: str) -> Fault:
            return self._admission.unknown(address, time.monotonic(), words)

        if bearer:
            return await self._sign_in.operator(bearer, refuse=refuse)
        return await self._sign_in.who(token, is_operator=operation.session == "admin", refuse=refuse)


def _bearer(request: web.Request) -> str:
    """An operator's token in a header."""
    scheme, _, token = request.headers.get("Authorization", "").partition(" ")
    token = token.strip()
    return token if scheme.lower() == "bearer" and token.startswith(sessions.ADMIN_PREFIX) else ""


def _reply(found: Any) -> web.Response:
    answer = found if isinstance(found, RestReply) else RestReply(found)
    return json_reply(answer.data, status=answer.status, headers=answer.headers)


def _stand_in(session: Session) -> Key:
    """What services take for the account's key. It is never in the keyring, and nothing is counted for it."""
    if session.is_operator:
        raise Unauthorized("sign in to an account")
    return Key(
        id="",
        lineage="",
        digest=b"",
        slot=0,
        live=True,
        scopes=ALL_SCOPES,
        account=Account(id=session.id, plan=session.plan, day_limit=0),
        limits=Limits(1, 1, 0),
        disabled=False,
        dies_at=math.inf,
    )
