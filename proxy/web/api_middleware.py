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
from proxy.core.access import has_key
from proxy.core.credits import in_usd
from proxy.core.verification import VERIFICATIONS
from proxy.errors import (
    ExpectationFailed,
    Fault,
    HeadersTooLarge,
    InternalError,
    InvalidRequest,
    MethodNotAllowed,
    NotFound,
    of_status,
    without_frames,
)
from proxy.services.accounts.admission import Admission
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
from proxy.web.request_state import STATE, RequestState
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
        given = request.headers.get("X-Request-Id", "")
        request_id = given if _WELL_FORMED.fullmatch(given) else new_request_id()
        span = self._span(request)
        request[STATE] = state = RequestState(request_id, span=span)
        if span is None:
            return await self._serve(request, handler)
        token = current_span.set(span)
        try:
            with span:
                reply = await self._serve(request, handler)
                span.set({"http.response.status_code": reply.status, "penstock.operation": state.operation})
                return reply
        finally:
            current_span.reset(token)

    def _span(self, request: web.Request) -> Span | None:
        """The span of a sampled request. A WebSocket gets none, because it may last for days."""
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
        try:
            reply = await self._answer(request, handler)
            if request[STATE].key is None:
                self.authentication.recognise(request)
            if not reply.prepared:
                await compress(request, reply, least=self._settings.compress_from)
                self.add_common_headers(request, reply)
            self._record_request(request, reply, time.monotonic() - began)
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
            request[STATE].refused(fault)
            return self.refuse(without_frames(fault))
        except web.HTTPException as exc:
            return self.refuse(_of_http(without_frames(exc), request))
        except (asyncio.CancelledError, ConnectionError):
            raise
        except (web.RequestPayloadError, HttpProcessingError, ValueError) as exc:
            if isinstance(exc, ValueError) and not isinstance(exc, UnicodeError):
                return self._bug(request)
            return self.refuse(InvalidRequest("the request is malformed"))
        except Exception:
            return self._bug(request)

    def _bug(self, request: web.Request) -> web.Response:
        logging.getLogger("penstock").exception("unhandled", extra={"request_id": request[STATE].request_id})
        return self.refuse(InternalError("internal error; give the request id to the operator"))

    def _check_head(self, request: web.Request) -> None:
        check_strictly(request)
        size = len(request.raw_path) + sum(len(name) + len(value) + 4 for name, value in request.raw_headers)
        if size > self._settings.max_header_bytes:
            raise HeadersTooLarge(f"the request's headers are larger than {self._settings.max_header_bytes} bytes")
        if request.headers.get("Expect", CONTINUE).lower() != CONTINUE:
            raise ExpectationFailed(f"the header Expect must be {CONTINUE}")

    def add_common_headers(self, request: web.Request, reply: web.StreamResponse) -> None:
        """Add the headers that every reply has."""
        state = request[STATE]
        reply.headers["X-Request-Id"] = state.request_id
        reply.headers.update(self._fixed_headers)
        if state.units is not None:
            reply.headers["X-Compute-Units"] = str(state.units)
        if state.cache:
            reply.headers["X-Verified" if state.cache in VERIFICATIONS else "X-Cache"] = state.cache
        if state.block:
            reply.headers["X-Block-Number"] = str(state.block)
        if state.upstream:
            reply.headers["X-Upstream"] = state.upstream
        if state.directives is not None and state.directives.cost and state.batch is None:
            reply.headers["X-Cost"] = in_usd(state.cost)
        if state.key is not None:
            reply.headers.update(self._admission.headers(state.key, time.monotonic()))
        else:
            reply.headers.update(self._admission.headers_without_key(self.authentication.address_of(request)))
        self._cross_origin.add_headers(request, reply, state.key)
        connection = request.protocol
        is_last = isinstance(connection, HandlerConnection) and connection.is_at_last_request
        if is_last or self._limiter.draining or reply.status in (408, 413, 501, 505):
            reply.force_close()

    def _record_request(self, request: web.Request, reply: web.StreamResponse, took_s: float) -> None:
        """Count, record and log a request that has ended."""
        state = request[STATE]
        key, operation = state.key, state.operation or "other"
        took_s = took_s if state.began_after_s is None else state.began_after_s
        telemetry.requests_total.labels(operation, str(reply.status)).inc()
        telemetry.request_seconds.labels(operation).observe(took_s)
        if key is not None and state.operation:
            self.accounting.record(state.finished(key, reply, took_s))
        if self.accounting.logs:
            log.info(
                "request",
                extra={
                    "request_id": state.request_id,
                    "method": request.method,
                    "path": request.path[:200],
                    "status": reply.status,
                    "ms": round(took_s * 1000, 3),
                    "key": key.id if key else None,
                    "units": state.units,
                },
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
