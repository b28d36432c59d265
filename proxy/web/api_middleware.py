"""The middleware around every request that aiohttp serves: common headers, errors, metrics, the access log and the record.

Every reply has a request id and the three rate headers: those of the key, or of the client's address if there is no valid key.
Every error has the API's error body. Handlers raise a Fault or return a reply; other exceptions become a 500.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Awaitable, Callable

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from proxy import telemetry
from proxy.core.access import Key, has_key
from proxy.core.verification import VERIFICATIONS
from proxy.errors import (
    ExpectationFailed,
    Fault,
    HeadTooLarge,
    InternalError,
    InvalidRequest,
    MethodNotAllowed,
    NotFound,
    of_status,
)
from proxy.services.accounts.admission import Admission
from proxy.services.rpc.finished_call import FinishedCall
from proxy.settings import ServerSettings
from proxy.tracing import Span, Tracer, current_span
from proxy.web.authentication import KEY_IN_URL, Authentication
from proxy.web.call_accounting import CallAccounting
from proxy.web.cross_origin import CrossOrigin
from proxy.web.fault_injection import FaultInjection
from proxy.web.front.connection_limiter import ConnectionLimiter
from proxy.web.front.handler_connection import HandlerConnection
from proxy.web.reply import compress, fault_reply, fixed_headers, slice_body
from proxy.web.request_bodies import RequestBodies
from proxy.web.request_ids import new_request_id
from proxy.web.request_state import (
    BATCH,
    BLOCK,
    CACHE,
    CALLS,
    DIRECTIVES,
    FAILURE,
    FLIGHT,
    KEY,
    METHOD,
    NETWORK,
    OPERATION,
    PARAMS,
    REQUEST_ID,
    SPAN,
    UNITS,
    UPSTREAM,
)
from proxy.web.sandbox import Sandbox
from proxy.web.strict_http import check_strictly

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

log = logging.getLogger("penstock.access")

# The only expectation that is defined (RFC 9110, 10.1.1).
CONTINUE = "100-continue"
_WELL_FORMED = re.compile(telemetry.REQUEST_ID, re.ASCII)


class ApiMiddleware:
    def __init__(
        self,
        admission: Admission,
        limiter: ConnectionLimiter,
        settings: ServerSettings,
        cross_origin: CrossOrigin,
        *,
        accounting: CallAccounting,
        tracer: Tracer | None = None,
        sandbox: Sandbox | None = None,
    ) -> None:
        self._admission = admission
        self._cross_origin = cross_origin
        self._limiter = limiter
        self._settings = settings
        self._fixed_headers = fixed_headers(settings.tls)
        self._tracer = tracer
        # Used by handlers too.
        self.accounting = accounting
        self.authentication = Authentication(admission, limiter, sandbox)
        self.bodies = RequestBodies(limiter, settings)
        self.faults = FaultInjection(limiter)

    @web.middleware
    async def middleware(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        span = self._span(request)
        if span is None:
            return await self._serve(request, handler)
        request[SPAN] = span
        token = current_span.set(span)
        try:
            with span:
                reply = await self._serve(request, handler)
                span.set({"http.response.status_code": reply.status, "penstock.operation": request.get(OPERATION, "")})
                return reply
        finally:
            current_span.reset(token)

    def _span(self, request: web.Request) -> Span | None:
        """The span of a request that is sampled. A WebSocket is none: it may last for days."""
        if self._tracer is None or "Upgrade" in request.headers:
            return None
        resource = request.match_info.route.resource
        path = "" if resource is None else resource.canonical
        attributes = {"http.request.method": request.method, "http.route": path}
        given = request.headers.get("traceparent", "")
        return self._tracer.start(f"{request.method} {path}".strip(), attributes, traceparent=given, serves=True)

    async def _serve(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        began = time.monotonic()
        connection = request.protocol
        if isinstance(connection, HandlerConnection):
            connection.begin_request()
        given = request.headers.get("X-Request-Id", "")
        request[REQUEST_ID] = given if _WELL_FORMED.fullmatch(given) else new_request_id()
        try:
            reply = await self._answer(request, handler)
            if KEY not in request:
                self.authentication.recognise(request)
            if not reply.prepared:
                await compress(request, reply, least=self._settings.compress_from)
                self.add_common_headers(request, reply)
            self._end(request, reply, time.monotonic() - began)
            if not reply.prepared:
                slice_body(reply)
            return reply
        finally:
            if isinstance(connection, HandlerConnection):
                connection.end_request()
            self.bodies.release(request)

    async def _answer(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            self._check_head(request)
            await self.authentication.check_sandbox(request)
            return self._cross_origin.preflight(request) or await handler(request)
        except Fault as fault:
            request[FAILURE] = fault.message
            return self.refuse(fault)
        except web.HTTPException as exc:
            return self.refuse(_of_http(exc, request))
        except (asyncio.CancelledError, ConnectionError):
            raise
        except (web.RequestPayloadError, HttpProcessingError, ValueError) as exc:
            if isinstance(exc, ValueError) and not isinstance(exc, UnicodeError):
                return self._bug(request)
            return self.refuse(InvalidRequest("the request is malformed"))
        except Exception:
            return self._bug(request)

    def _bug(self, request: web.Request) -> web.Response:
        logging.getLogger("penstock").exception("unhandled", extra={"request_id": request[REQUEST_ID]})
        return self.refuse(InternalError("internal error; give the request id to the operator"))

    def _check_head(self, request: web.Request) -> None:
        check_strictly(request)
        size = len(request.raw_path) + sum(len(name) + len(value) + 4 for name, value in request.raw_headers)
        if size > self._settings.max_head_bytes:
            raise HeadTooLarge(f"the request's head is larger than {self._settings.max_head_bytes} bytes")
        if request.headers.get("Expect", CONTINUE).lower() != CONTINUE:
            raise ExpectationFailed(f"the header Expect must be {CONTINUE}")

    def add_common_headers(self, request: web.Request, reply: web.StreamResponse) -> None:
        """Add the headers that every reply has."""
        reply.headers["X-Request-Id"] = request[REQUEST_ID]
        reply.headers.update(self._fixed_headers)
        if (units := request.get(UNITS)) is not None:
            reply.headers["X-Compute-Units"] = str(units)
        if cache := request.get(CACHE):
            reply.headers["X-Verified" if cache in VERIFICATIONS else "X-Cache"] = cache
        if block := request.get(BLOCK):
            reply.headers["X-Block-Number"] = str(block)
        if upstream := request.get(UPSTREAM):
            reply.headers["X-Upstream"] = upstream
        key = request.get(KEY)
        if key is not None:
            reply.headers.update(self._admission.headers(key, time.monotonic()))
        else:
            reply.headers.update(self._admission.headers_without_key(self.authentication.address_of(request)))
        self._cross_origin.add_headers(request, reply, key)
        connection = request.protocol
        is_last = isinstance(connection, HandlerConnection) and connection.is_at_last_request
        if is_last or self._limiter.draining or reply.status in (408, 413, 501, 505):
            reply.force_close()

    def _end(self, request: web.Request, reply: web.StreamResponse, took_s: float) -> None:
        operation = request.get(OPERATION) or "other"
        telemetry.requests_total.labels(operation, str(reply.status)).inc()
        telemetry.request_seconds.labels(operation).observe(took_s)
        if (owner := request.get(KEY)) is not None and OPERATION in request:
            self._record_request(request, reply, owner, took_s)
        if self.accounting.logs:
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

    def _record_request(self, request: web.Request, reply: web.StreamResponse, key: Key, took_s: float) -> None:
        """Record what happened to the request, if it is to be recorded."""
        self.accounting.record(
            FinishedCall(
                request_id=request[REQUEST_ID],
                key=key,
                network=request.get(NETWORK, ""),
                took_s=took_s,
                surface="http" if METHOD in request else "rest",
                method=request.get(METHOD) or request[OPERATION],
                status=reply.status,
                units=request.get(UNITS, 0),
                cache=request.get(CACHE, ""),
                size=reply.content_length or 0,
                block=request.get(BLOCK, 0),
                error=request.get(FAILURE, "") or ("internal error" if reply.status >= 500 else ""),
                params=request.get(PARAMS, b""),
                directives=request.get(DIRECTIVES),
                batch=request.get(BATCH),
                flight=request.get(FLIGHT),
                calls=request.get(CALLS, ()),
            )
        )

    def refuse(self, fault: Fault) -> web.Response:
        return fault_reply(fault, self._limiter.site)


def _path_advice(request: web.Request) -> str:
    if has_key(request.path_qs):
        return f": {KEY_IN_URL}"
    return ": paths have no slash at their end" if request.path.startswith("/v1/") and request.path[-1] == "/" else ""


def _of_http(exc: web.HTTPException, request: web.Request) -> Fault:
    """The fault for an exception of aiohttp's router."""
    if isinstance(exc, web.HTTPMethodNotAllowed):
        allowed = sorted(exc.allowed_methods)
        return MethodNotAllowed(
            f"the method {request.method} is not allowed here; allowed: {', '.join(allowed)}", allowed=allowed
        )
    if exc.status == 404:
        return NotFound(f"there is no such path{_path_advice(request)}; /docs lists all paths", reason="path")
    return of_status(exc.status, exc.reason)
