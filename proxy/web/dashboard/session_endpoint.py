"""The common part of every operation for signed-in people: like `rest/endpoint.py`, with a session instead of a key.

An operation with a scope (`x-scope`) also accepts a key, which then acts for its account. Such a request passes through
`rest/endpoint.py` like all requests with a key, and needs neither a session nor its CSRF token: browsers send no keys by
themselves. If it has a cookie too, that has no effect.

A request passes, in this order: the check for a foreign origin, the rate of the client's address, the session, the CSRF token,
the role of the person, validation of the path and the query against the API spec, the rates of the person and the account, then
validation of the body. Replies are never cached by browsers or intermediaries. They cost no units, except for the upstream
calls that some make, such as back-tests: the account pays for these as with a key.
"""

from __future__ import annotations

import datetime
import math
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from http.cookies import SimpleCookie
from typing import Any

from aiohttp import web

from proxy.core import roles, sessions
from proxy.core.access import ALL_SCOPES
from proxy.core.display_text import cleaned
from proxy.core.paging import Page
from proxy.errors import Fault, Forbidden, Unauthorized
from proxy.services.accounts.accounts import Grantor
from proxy.services.accounts.action_log import Action, ActionLog, Actor, is_change
from proxy.services.accounts.admission import Admission
from proxy.services.accounts.keyring import Keyring
from proxy.services.accounts.metering import Meters, meter_of_task
from proxy.services.accounts.session_rates import SessionRates
from proxy.services.accounts.sign_in import Session, SignedIn, SignIn, SignInPlace
from proxy.settings import DashboardSettings
from proxy.web.api_middleware import ApiMiddleware, Handler
from proxy.web.api_spec import ApiOperation, ApiSpec
from proxy.web.authentication import presents_key
from proxy.web.changed_objects import NO_CHANGES, ChangedObject, ChangedObjects, Changes
from proxy.web.network_resolver import NetworkResolver
from proxy.web.reply import encoded_reply
from proxy.web.rest.endpoint import (
    RestEndpoints,
    RestHandler,
    RestReply,
    RestRequest,
    changes_of,
    data_of,
    subject_of,
)
from proxy.web.session_cookies import cookie_name

CSRF = "X-CSRF-Token"
# Characters of a User-Agent header that are stored: enough to recognise the browser.
MAX_AGENT = 200
_ERASES = ("delete_account", "admin_delete_account")
_PRIVATE = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer"}


@dataclass(frozen=True, slots=True)
class SessionRequest:
    """A validated request with a session; `session` is None for operations that need none, such as signing in."""

    session: Session | None
    # The cookie as received; it may be invalid.
    token: str
    device: str
    address: str
    agent: str
    secure: bool
    path: Mapping[str, str]
    query: Mapping[str, Any]
    body: Any
    # The key that acts for the account instead of a person.
    key_id: str = ""

    @property
    def grantor(self) -> Grantor:
        """Limits the powers of keys that this request creates or changes."""
        return Grantor(self.who.role, self.key_id)

    @property
    def who(self) -> Session:
        assert self.session is not None
        return self.session

    @property
    def signed_in(self) -> SignedIn:
        return SignedIn(self.token, self.who)

    @property
    def place(self) -> SignInPlace:
        return SignInPlace(self.address, self.device, before=self.token, agent=self.agent)

    @property
    def arrival(self) -> SignInPlace:
        """The place, for a session that does not replace the current one."""
        return SignInPlace(self.address, agent=self.agent)

    @property
    def page(self) -> Page:
        return Page(self.query["page"], self.query["limit"])


SessionHandler = Callable[[SessionRequest], Awaitable[Any]]


def set_cookie(kind: str, token: str, *, secure: bool, lasts_s: float) -> dict[str, str]:
    """The Set-Cookie header; an empty token removes the cookie."""
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
        self,
        api: ApiMiddleware,
        admission: Admission,
        spec: ApiSpec,
        sign_in: SignIn,
        actions: ActionLog,
        settings: DashboardSettings,
        rates: SessionRates,
        with_key: RestEndpoints,
    ) -> None:
        """`with_key`: serves requests with a key."""
        self._with_key = with_key
        self._api = api
        self._rates = rates
        self._admission = admission
        self._spec = spec
        self._sign_in = sign_in
        self._actions = actions
        self._settings = settings
        self._changed = ChangedObjects(spec)
        self._host = settings.url.partition("://")[2].partition("/")[0].lower()
        # The handlers of reads with JSON replies, by operation id: a page may request several of them at once.
        self.readers: dict[str, SessionHandler] = {}

    def wrapped(
        self, handlers: Mapping[str, SessionHandler], keyed: Mapping[str, Handler] | None = None
    ) -> dict[str, Handler]:
        """The aiohttp handlers, by operation id. `keyed`: those for requests with a key, if they differ."""
        operations = self._spec.operations
        self.readers |= {name: each for name, each in handlers.items() if operations[name].is_read}
        if keyed is None:
            acting = {name: _acting(each) for name, each in handlers.items() if operations[name].scope}
            keyed = self._with_key.wrapped(acting)
        return {name: self._wrap(operations[name], each, keyed.get(name)) for name, each in handlers.items()}

    def mirrored(
        self, handlers: Mapping[str, RestHandler], resolver: NetworkResolver, *, keyring: Keyring, meters: Meters
    ) -> dict[str, Handler]:
        """Key operations that also exist under /account: called with a key of the account that has all scopes. A request costs
        no units, but the upstream calls that it makes do, as with any key. With a key, a mirrored operation is the original
        one."""
        mirrored: dict[str, SessionHandler] = {}
        for name, handler in handlers.items():
            if (mirror := f"account_{name}") in self._spec.operations:

                async def call(request: SessionRequest, handler: RestHandler = handler, name: str = name) -> Any:
                    if request.who.is_operator:
                        raise Unauthorized(
                            "an operator's session has no account: sign in to an account", reason="session"
                        )
                    key = await keyring.session_key(request.who.id)
                    meter = meters.open(key)
                    meter_of_task.set(meter)
                    try:
                        return await handler(
                            RestRequest(key, ALL_SCOPES, request.path, request.query, request.body, resolver)
                        )
                    finally:
                        if units := meter.settle(least=0):
                            self._api.accounting.of_operation(key, "", name).add_units(units)

                mirrored[mirror] = call
        shared = {name: each for name, each in handlers.items() if self._is_mirrored_for_keys(name)}
        originals = self._with_key.wrapped(shared)
        return self.wrapped(mirrored, {f"account_{name}": each for name, each in originals.items()})

    def _is_mirrored_for_keys(self, name: str) -> bool:
        mirror = self._spec.operations.get(f"account_{name}")
        return mirror is not None and mirror.scope != ""

    def _wrap(self, operation: ApiOperation, handler: SessionHandler, keyed: Handler | None) -> Handler:
        is_logged = operation.session != "none" and is_change(operation.id, operation.method)
        changed = self._changed.of(operation) if is_logged else None

        async def handle(request: web.Request) -> web.StreamResponse:
            if presents_key(request) and operation.session == "account":
                if keyed is None:
                    self._api.authentication.authenticate(request, operation.id)
                    raise Forbidden("API keys cannot do this: sign in to the dashboard", reason="scope")
                reply = await keyed(request)
                reply.headers.update(_PRIVATE)
                return reply
            try:
                given = await self._read(request, operation)
                before = await self._before(changed, given)
                result = await handler(given)
                if is_logged:
                    await self._record(operation, given, result, changes_of(changed, before, result))
            except Fault as fault:
                reply = self._api.refuse(fault)
            else:
                reply = result if isinstance(result, web.StreamResponse) else await _reply(result)
            reply.headers.update(_PRIVATE)
            return reply

        return handle

    async def _before(self, changed: ChangedObject | None, request: SessionRequest) -> Mapping[str, Any] | None:
        """The object that a request is about to change; None for a new one, and for one that cannot be read."""
        if changed is None or changed.is_created or (read := self.readers.get(changed.read.id)) is None:
            return None
        try:
            result = await read(replace(request, query=changed.read.default_query(), body=None))
        except Fault:
            return None
        before: Mapping[str, Any] = data_of(result)
        return before

    async def _record(self, operation: ApiOperation, request: SessionRequest, result: Any, changes: Changes) -> None:
        """Record a change in the log: of the person's account, of the one in an operator's path, or of none."""
        named, who = dict(request.path), request.who
        account: str | None = None
        if not who.is_operator:
            account, actor = who.id, actor_of(who)
        else:
            actor = Actor("operator", who.name)
            if operation.path.startswith("/admin/accounts/{id}"):
                account = named.pop("id")
            elif operation.id == "admin_create_account":
                account = str(data_of(result)["id"])
        address = request.address
        subject = subject_of(result, named)
        if operation.id in _ERASES:
            # An account that has just been deleted has no log any more, and no name: that it was deleted is all that stays.
            subject, account, changes = account or "", None, NO_CHANGES
            if not who.is_operator:
                actor, address = Actor("holder"), ""
        await self._actions.record(account, actor, Action(operation.id, subject, address, *changes))

    async def _read(self, request: web.Request, operation: ApiOperation) -> SessionRequest:
        address = self._api.authentication.enter(request, operation.id)
        secure = self._settings.secure or self._api.authentication.is_secure(request)
        changes = request.method not in sessions.SAFE
        if changes:
            self._refuse_foreign(request, secure=secure)
        self._rates.charge_address(address, time.monotonic())
        kind = "admin" if operation.path.startswith("/admin") else "account"
        token, device = (request.cookies.get(cookie_name(each, secure=secure), "") for each in (kind, "device"))
        session = None
        if operation.session != "none":
            bearer = _bearer(request) if operation.session == "admin" else ""
            session = await self._session(operation, token, bearer, address)
            self._api.authentication.serve_as(request, session.id)
            # Browsers send cookies by themselves, but never a bearer token: only a cookie needs the CSRF token.
            if changes and not bearer and not sessions.is_csrf(token, request.headers.get(CSRF, "")):
                raise Forbidden(f"the header {CSRF} must be the session's csrf_token", param=CSRF, reason="session")
            check_role(session, operation)
        path, query = operation.check_parameters(request.match_info, request.query)
        if session is not None:
            reads = len(query.get("paths") or ("",))
            self._rates.charge_person(session.person or session.id, session.id, time.monotonic(), reads=reads)
        body = await self._api.bodies.read_checked(request, operation) if operation.body is not None else None
        agent = cleaned(request.headers.get("User-Agent"), MAX_AGENT) or ""
        return SessionRequest(session, token, device, address, agent, secure, path, query, body)

    def _refuse_foreign(self, request: web.Request, *, secure: bool) -> None:
        fetch_site, origin = request.headers.get("Sec-Fetch-Site", ""), request.headers.get("Origin", "")
        hosts = (request.host.lower(), self._host)
        if sessions.is_foreign(fetch_site=fetch_site, origin=origin, hosts=hosts, secure=secure):
            raise Forbidden("requests from pages of another origin are not allowed", reason="origin")

    async def _session(self, operation: ApiOperation, token: str, bearer: str, address: str) -> Session:
        def refuse(words: str) -> Fault:
            return self._admission.unknown(address, time.monotonic(), words, reason="session")

        if bearer:
            return await self._sign_in.operator(bearer, refuse=refuse)
        return await self._sign_in.who(token, is_operator=operation.session == "admin", refuse=refuse)


def _acting(handler: SessionHandler) -> RestHandler:
    """The handler for a key that acts for its account."""

    async def call(request: RestRequest) -> Any:
        key = request.key
        never = datetime.datetime.max.replace(tzinfo=datetime.UTC)
        session = Session(
            id=key.account.id,
            name="",
            is_operator=False,
            created_at=never,
            expires_at=never,
            person=key.id,
            email=f"API key {key.id}",
        )
        return await handler(
            SessionRequest(session, "", "", "", "", True, request.path, request.query, request.body, key.id)
        )

    return call


def check_role(session: Session, operation: ApiOperation) -> None:
    if operation.permission and (words := roles.refusal(session.role, operation.permission)):
        raise Forbidden(words)


def actor_of(session: Session) -> Actor:
    """The person of a session, as in the log of the account. Operators who visit it are known by their name."""
    return Actor("operator", session.visitor) if session.visitor else Actor("holder", session.email)


def _bearer(request: web.Request) -> str:
    """The operator's token in the Authorization header, or an empty string."""
    scheme, _, token = request.headers.get("Authorization", "").partition(" ")
    token = token.strip()
    return token if scheme.lower() == "bearer" and token.startswith(sessions.ADMIN_PREFIX) else ""


async def _reply(result: Any) -> web.Response:
    reply = result if isinstance(result, RestReply) else RestReply(result)
    return await encoded_reply(reply.data, status=reply.status, headers=reply.headers)
