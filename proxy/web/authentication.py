"""Authenticates the requests that aiohttp serves: by API key or sandbox token, and by the client's address."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TypeGuard

from aiohttp import web

from proxy.core.access import Key, client_prefix_of, has_key
from proxy.core.sandbox_tokens import PREFIX as SANDBOX_PREFIX
from proxy.services.accounts.admission import Admission
from proxy.tasks import client_of_task
from proxy.turn_queue import turns_of_task
from proxy.web.front.connection_limiter import ConnectionLimiter
from proxy.web.front.handler_connection import HandlerConnection
from proxy.web.request_state import STATE
from proxy.web.sandbox import NOT_VOUCHED, Sandbox, VouchedKey

# The key of a sandbox token that was checked.
_VOUCHED = web.RequestKey("vouched", VouchedKey)
_NO_SANDBOX = "sandbox tokens cannot open sockets: use the API key"
KEY_IN_URL = "send it in the header X-API-Key, not in the URL, which ends up in logs"


class Authentication:
    def __init__(self, admission: Admission, limiter: ConnectionLimiter, sandbox: Sandbox | None = None) -> None:
        self._admission = admission
        self._limiter = limiter
        self._sandbox = sandbox

    def authenticate(self, request: web.Request, operation: str) -> Key:
        """The key of the request, from either header."""
        address = self.enter(request, operation)
        presented = _presented(request)
        if self._sandbox is not None and _is_sandbox_token(presented):
            return self._admitted(request, self._sandbox.key(request, request.get(_VOUCHED, NOT_VOUCHED), address))
        return self._admitted(request, self._who(request, presented, address))

    def authenticate_socket(self, request: web.Request, operation: str, in_query: Sequence[str]) -> Key:
        """The key of a handshake, from the query or either header. A socket would outlive a sandbox token and its session."""
        address = self.enter(request, operation)
        presented = _presented(request, in_query)
        if _is_sandbox_token(presented):
            raise self._admission.unknown(address, time.monotonic(), _NO_SANDBOX)
        return self._admitted(request, self._who(request, presented, address))

    def _who(self, request: web.Request, presented: str | None, address: str) -> Key:
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
            request[_VOUCHED] = await self._sandbox.vouch(request, presented)

    def recognise(self, request: web.Request) -> None:
        """Find the key for the rate headers of a reply: on a path that needs no key, or if the key was refused for the client's
        address."""
        request[STATE].key = self._admission.known(_presented(request), time.monotonic())


def _presented(request: web.Request, in_query: Sequence[str] = ()) -> str | None:
    """The key that the request presents, or None. Two different keys are refused like an unknown one."""
    words = [line.partition(" ") for line in request.headers.getall("Authorization", ())]
    bearer = [token for scheme, _, token in words if scheme.lower() == "bearer"]
    for given in (in_query, request.headers.getall("X-API-Key", ()), bearer):
        if keys := {key.strip() for key in given} - {""}:
            return keys.pop() if len(keys) == 1 else ""
    return None


def _is_sandbox_token(presented: str | None) -> TypeGuard[str]:
    return presented is not None and presented.startswith(SANDBOX_PREFIX)


def presents_key(request: web.Request) -> bool:
    """Whether the request has an API key, valid or not, where a session would do too."""
    presented = _presented(request)
    if presented is None or _is_sandbox_token(presented):
        return False
    return "X-API-Key" in request.headers or has_key(presented)
