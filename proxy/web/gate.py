"""The middleware around every request: who asks, what came out, and one line about it.

Whatever happens inside, the caller gets the contract's body, the request id and, where a key was recognised, the three
rate headers. Handlers raise a Fault or return a reply; nothing else leaves this room.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import re
import secrets
import time
from collections.abc import Awaitable, Callable

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from proxy import telemetry
from proxy.core.access import Key
from proxy.errors import (
    Fault,
    InternalError,
    InvalidRequest,
    MethodNotAllowed,
    RequestTimeout,
    TooLarge,
    UnsupportedMedia,
    of_status,
)
from proxy.services.admission import Admission
from proxy.settings import Server
from proxy.web.front import Connection, Door
from proxy.web.reply import fault_reply

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

log = logging.getLogger("penstock.access")

KEY = web.RequestKey("key", Key)
UNITS = web.RequestKey("units", int)
REQUEST_ID = web.RequestKey("request_id", str)
_OPERATION: web.RequestKey[str] = web.RequestKey("operation", str)

_WELL_FORMED = re.compile(r"[A-Za-z0-9_-]{1,64}", re.ASCII)
# Unique over workers and restarts, at the price of a counter: a random stem for each process.
_STEM = secrets.token_hex(5)
_serial = itertools.count(1)


def new_request_id() -> str:
    return f"req_{_STEM}{next(_serial):08x}"


class Gate:
    def __init__(self, admission: Admission, door: Door, settings: Server, *, access_log: bool) -> None:
        self._admission = admission
        self._door = door
        self._settings = settings
        self._access_log = access_log

    @web.middleware
    async def middleware(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        began = time.monotonic()
        connection = request.protocol
        if isinstance(connection, Connection):
            connection.begin_request()
        given = request.headers.get("X-Request-Id", "")
        request[REQUEST_ID] = given if _WELL_FORMED.fullmatch(given) else new_request_id()
        try:
            reply = await self._answer(request, handler)
            if not reply.prepared:
                self._sign(request, reply)
            self._record(request, reply, time.monotonic() - began)
            return reply
        finally:
            if isinstance(connection, Connection):
                connection.end_request()

    async def _answer(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            self._check_head(request)
            return await handler(request)
        except Fault as fault:
            return fault_reply(fault)
        except web.HTTPException as exc:
            return fault_reply(_of_http(exc, request))
        except (asyncio.CancelledError, ConnectionError):
            raise
        except (web.RequestPayloadError, HttpProcessingError, ValueError) as exc:
            if isinstance(exc, ValueError) and not isinstance(exc, UnicodeError):
                return self._bug(request)
            return fault_reply(InvalidRequest("the request is malformed"))
        except Exception:
            return self._bug(request)

    def _bug(self, request: web.Request) -> web.Response:
        logging.getLogger("penstock").exception("unhandled", extra={"request_id": request[REQUEST_ID]})
        return fault_reply(InternalError("internal error; the request id identifies it to the operator"))

    def _check_head(self, request: web.Request) -> None:
        size = sum(len(name) + len(value) + 4 for name, value in request.raw_headers)
        if size > self._settings.max_head_bytes:
            raise of_status(431, f"the request's headers are larger than {self._settings.max_head_bytes} bytes")

    def _sign(self, request: web.Request, reply: web.StreamResponse) -> None:
        """The headers that every reply carries."""
        reply.headers["X-Request-Id"] = request[REQUEST_ID]
        key = request.get(KEY)
        if key is not None:
            reply.headers.update(self._admission.headers(key, time.monotonic()))
        if self._door.draining or reply.status in (408, 413):
            reply.force_close()

    def _record(self, request: web.Request, reply: web.StreamResponse, took_s: float) -> None:
        operation = request.get(_OPERATION) or "other"
        telemetry.requests_total.labels(operation, str(reply.status)).inc()
        telemetry.request_seconds.labels(operation).observe(took_s)
        if self._access_log:
            key = request.get(KEY)
            log.info(
                "request",
                extra={
                    "request_id": request[REQUEST_ID],
                    "method": request.method,
                    "path": request.path[:200],
                    "status": reply.status,
                    "ms": round(took_s * 1000, 3),
                    "key": key.id if key else None,
                    "units": request.get(UNITS),
                },
            )

    # What handlers ask for

    def authenticate(self, request: web.Request, operation: str) -> Key:
        """The key behind the request, from either header."""
        request[_OPERATION] = operation
        address = self._door.client_address(request.remote or "", request.headers.getall("X-Forwarded-For", ()))
        key = self._admission.who(_presented(request), address, time.monotonic())
        request[KEY] = key
        return key

    async def read_body(self, request: web.Request) -> bytes:
        """The body, within its deadline and its cap."""
        if request.headers.get("Content-Encoding", "identity").lower() != "identity":
            raise UnsupportedMedia("a compressed body is not accepted: send it without Content-Encoding")
        if request.content_type != "application/json":
            raise UnsupportedMedia("the header Content-Type must be application/json")
        if (request.content_length or 0) > self._settings.max_body_bytes:
            raise self._too_large()
        try:
            async with asyncio.timeout(self._settings.body_timeout_s):
                return await request.read()
        except TimeoutError:
            raise RequestTimeout("the request's body did not arrive in time") from None
        except web.HTTPRequestEntityTooLarge:
            raise self._too_large() from None

    def _too_large(self) -> TooLarge:
        return TooLarge(f"the body is larger than {self._settings.max_body_bytes} bytes")


def _presented(request: web.Request) -> str | None:
    if key := request.headers.get("X-API-Key"):
        return key.strip()
    scheme, _, token = request.headers.get("Authorization", "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else None


def _of_http(exc: web.HTTPException, request: web.Request) -> Fault:
    """What aiohttp's router raised, in the contract's words."""
    if isinstance(exc, web.HTTPMethodNotAllowed):
        allowed = sorted(exc.allowed_methods)
        return MethodNotAllowed(
            f"the method {request.method} is not allowed here; allowed: {', '.join(allowed)}", allowed=allowed
        )
    if exc.status == 404:
        return of_status(404, "there is no such path; /docs lists what there is")
    return of_status(exc.status, exc.reason)
