"""Authenticates the requests that aiohttp serves: by API key or sandbox token, and by the client's address."""

from __future__ import annotations

import time
from typing import TypeGuard

from aiohttp import web
from multidict import CIMultiDictProxy

from proxy.core.access import Key, client_prefix_of, has_key
from proxy.core.presented_key import PresentedKey, presented_key
from proxy.core.sandbox_tokens import PREFIX as SANDBOX_PREFIX
from proxy.services.accounts.admission import Admission
from proxy.tasks import client_of_task
from proxy.turn_queue import turns_of_task
from proxy.web.front.connection_limiter import ConnectionLimiter
from proxy.web.front.handler_connection import HandlerConnection
from proxy.web.request_state import STATE
from proxy.web.request_targets import NO_TARGET, QUERY_NAME, TARGET, RequestTarget
from proxy.web.sandbox import NOT_VOUCHED, Sandbox, VouchedKey

# The key of a sandbox token that was checked.
_VOUCHED = web.RequestKey("vouched", VouchedKey)
_NO_SANDBOX = "sandbox tokens cannot open sockets: use the API key"
KEY_IN_URL = f"send the API key in the header X-API-Key, or as {QUERY_NAME} in the query if it is allowed in URLs"


class Authentication:
    def __init__(self, admission: Admission, limiter: ConnectionLimiter, sandbox: Sandbox | None = None) -> None:
        self._admission = admission
        self._limiter = limiter
        self._sandbox = sandbox

    def authenticate(self, request: web.Request, operation: str) -> Key:
        """The key of the request, from a header or its URL."""
        address = self.enter(request, operation)
        presented = _presented(request)
        if self._sandbox is not None and _is_sandbox_token(presented):
            return self._admitted(request, self._sandbox.key(request, request.get(_VOUCHED, NOT_VOUCHED), address))
        return self._admitted(request, self._who(request, presented, address))

    def authenticate_socket(self, request: web.Request, operation: str) -> Key:
        """The key of a handshake. Every key may be in its query, because browsers cannot send headers with it. A socket would
        outlive a sandbox token and its session."""
        address = self.enter(request, operation)
        presented = key_of_socket(request.headers, request.get(TARGET, NO_TARGET))
        if _is_sandbox_token(presented):
            raise self._admission.unknown(address, time.monotonic(), _NO_SANDBOX)
        return self._admitted(request, self._who(request, presented, address))

    def _who(self, request: web.Request, presented: PresentedKey | None, address: str) -> Key:
        if presented is None and has_key(request.path_qs):
            raise self._admission.unknown(address, time.monotonic(), f"an API key is required: {KEY_IN_URL}")
        origin = request.headers.get("Origin", "")
        return self._admission.authenticate(presented, address, time.monotonic(), origin=origin)

    def _admitted(self, request: web.Request, key: Key) -> Key:
        request[STATE].key = key
        self.serve_as(request, key.account.id)
        return key

    def serve_as(self, request: web.Request, client: str) -> None:
        """Count the request, and later ones on its connection, against this client's share of loop turns and database
        connections."""
        client_of_task.set(client)
        if isinstance(request.protocol, HandlerConnection):
            request.protocol.client = client

    def enter(self, request: web.Request, operation: str) -> str:
        """Record the operation for the metrics, and return the client's address."""
        request[STATE].operation = operation
        address = self.address_of(request)
        client_of_task.set(client_prefix_of(address))
        turns_of_task.set(self._limiter.turns)
        return address

    def address_of(self, request: web.Request) -> str:
        return self._limiter.client_address(request.remote or "", request.headers.getall("X-Forwarded-For", ()))

    def is_secure(self, request: web.Request) -> bool:
        """Whether the client used https, also as reported by a trusted proxy."""
        is_forwarded = request.headers.get("X-Forwarded-Proto", "").split(",")[-1].strip().lower() == "https"
        return request.secure or (is_forwarded and self._limiter.trusts(request.remote or ""))

    async def check_sandbox(self, request: web.Request) -> None:
        """Check a sandbox token against its session, which `authenticate` cannot wait for."""
        presented = _presented(request)
        if self._sandbox is not None and _is_sandbox_token(presented):
            client_of_task.set(client_prefix_of(self.address_of(request)))
            request[_VOUCHED] = await self._sandbox.vouch(request, presented.text)

    def recognise(self, request: web.Request) -> None:
        """Find the key for the rate headers of a reply: on a path that needs no key, or if the key was refused for the client's
        address."""
        request[STATE].key = self._admission.known(_presented(request), time.monotonic())


def _presented(request: web.Request) -> PresentedKey | None:
    return key_of_request(request.headers, request.get(TARGET, NO_TARGET))


def key_of_request(headers: CIMultiDictProxy[str], target: RequestTarget) -> PresentedKey | None:
    return presented_key(headers.getall("X-API-Key", ()), headers.getall("Authorization", ()), target.keys)


def key_of_socket(headers: CIMultiDictProxy[str], target: RequestTarget) -> PresentedKey | None:
    """The query of a handshake counts like a header."""
    named = (*headers.getall("X-API-Key", ()), *target.query_keys)
    return presented_key(named, headers.getall("Authorization", ()), (target.path_key,))


def _is_sandbox_token(presented: PresentedKey | None) -> TypeGuard[PresentedKey]:
    return presented is not None and presented.text.startswith(SANDBOX_PREFIX)


def presents_key(request: web.Request) -> bool:
    """Whether the request has an API key, valid or not, where a session would do too."""
    presented = _presented(request)
    if presented is None or _is_sandbox_token(presented):
        return False
    return presented.is_in_url or "X-API-Key" in request.headers or has_key(presented.text)
