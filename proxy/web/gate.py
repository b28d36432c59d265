"""The middleware around every request that aiohttp serves: authentication, common headers, errors, and the access log.

Every reply has a request id and the three rate headers: those of the key, or of the client's address if there is no valid key.
Every error has the API's error body. Handlers raise a Fault or return a reply; other exceptions become a 500.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeGuard

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from proxy import telemetry
from proxy.core import encodings
from proxy.core.access import Key, has_key, place_of
from proxy.core.directives import Directives
from proxy.core.sandbox_tokens import PREFIX as SANDBOX_PREFIX
from proxy.core.verification import VERIFICATIONS
from proxy.errors import (
    ExpectationFailed,
    Fault,
    HeadTooLarge,
    InternalError,
    InvalidRequest,
    MethodNotAllowed,
    NotFound,
    RequestTimeout,
    TooLarge,
    UnsupportedMedia,
    of_status,
)
from proxy.request_threads import request_threads
from proxy.services.accounts.admission import Admission
from proxy.services.request_recorder import RequestRecorder
from proxy.services.rpc.batches import CallBatch
from proxy.services.rpc.calls import PendingReply
from proxy.services.rpc.flights import Flight
from proxy.services.rpc.internal_calls import attempts_of
from proxy.services.rpc.short_batch import ShortBatch
from proxy.settings import ServerSettings
from proxy.tasks import client_of_task
from proxy.tracing import Span, Tracer, current_span
from proxy.turn_queue import turns_of_task
from proxy.web.api_spec import ApiOperation
from proxy.web.cross_origin import CrossOrigin
from proxy.web.fault_injection import FaultInjection
from proxy.web.front.connection_limiter import ConnectionLimiter
from proxy.web.front.handler_connection import HandlerConnection
from proxy.web.reply import fault_reply, fixed_headers, slice_body
from proxy.web.request_ids import new_request_id
from proxy.web.sandbox import NOT_VOUCHED, Sandbox, VouchedKey
from proxy.web.strict_http import check_strictly

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

log = logging.getLogger("penstock.access")

KEY = web.RequestKey("key", Key)
UNITS = web.RequestKey("units", int)
CACHE = web.RequestKey("cache", str)
UPSTREAM = web.RequestKey("upstream", str)
# The span of a sampled request.
SPAN = web.RequestKey("span", Span)
# A block that the state behind the reply has reached.
BLOCK = web.RequestKey("block", int)
REQUEST_ID = web.RequestKey("request_id", str)
# For the record of a request: the network and the method of a call, its flight or its batch, the calls that a REST operation
# made, its directives, and its error.
NETWORK = web.RequestKey("network", str)
METHOD = web.RequestKey("method", str)
FLIGHT = web.RequestKey("flight", Flight)
BATCH: web.RequestKey[CallBatch | ShortBatch] = web.RequestKey("batch", object)  # type: ignore[arg-type]
CALLS: web.RequestKey[list[PendingReply]] = web.RequestKey("calls", list)
DIRECTIVES = web.RequestKey("directives", Directives)
FAILURE = web.RequestKey("failure", str)
PARAMS = web.RequestKey("params", bytes)
# The key of a sandbox token that was checked.
_VOUCHED = web.RequestKey("vouched", VouchedKey)
_OPERATION: web.RequestKey[str] = web.RequestKey("operation", str)
# Who sent a large body, and the memory that it takes.
_HELD: web.RequestKey[tuple[str, int]] = web.RequestKey("held", tuple)
# Bodies from this size on are counted until the request ends, with what is parsed from them: an object of Python for each value
# beside the text.
_LARGE_BODY, _PARSED = 65_536, 3

_OCTETS = "application/octet-stream"
# The only expectation that is defined (RFC 9110, 10.1.1).
CONTINUE = "100-continue"
# Bodies from this size on are compressed in a thread.
COMPRESS_APART = 262_144
_NO_SANDBOX = "sandbox tokens cannot open sockets: use the API key"
KEY_IN_URL = "send it in the header X-API-Key, not in the URL, which ends up in logs"
_WELL_FORMED = re.compile(telemetry.REQUEST_ID, re.ASCII)


class Gate:
    def __init__(
        self,
        admission: Admission,
        limiter: ConnectionLimiter,
        settings: ServerSettings,
        cross_origin: CrossOrigin,
        *,
        recorder: RequestRecorder,
        access_log: bool,
        tracer: Tracer | None = None,
        sandbox: Sandbox | None = None,
    ) -> None:
        self._admission = admission
        self._sandbox = sandbox
        self._cross_origin = cross_origin
        self._limiter = limiter
        self._settings = settings
        self._fixed_headers = fixed_headers(settings.tls)
        self._access_log = access_log
        self._recorder = recorder
        self._tracer = tracer
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
                span.set({"http.response.status_code": reply.status, "penstock.operation": request.get(_OPERATION, "")})
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
                self._recognise(request)
            if not reply.prepared:
                await self._compress(request, reply)
                self.sign(request, reply)
            self._record(request, reply, time.monotonic() - began)
            if not reply.prepared:
                slice_body(reply)
            return reply
        finally:
            if isinstance(connection, HandlerConnection):
                connection.end_request()
            if (held := request.get(_HELD)) is not None:
                self._limiter.give_back_body(*held)

    async def _answer(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            self._check_head(request)
            await self._check_sandbox(request)
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

    async def _compress(self, request: web.Request, reply: web.StreamResponse) -> None:
        """Compress a large reply if the client accepts that. Replies to a session are left as they are: from the sizes of many
        compressed ones, an attacker could learn a secret in them (BREACH)."""
        body = reply.body if isinstance(reply, web.Response) else None
        is_small = not isinstance(body, bytes) or not 0 < self._settings.compress_from <= len(body)
        if is_small or "Content-Encoding" in reply.headers or "Cookie" in request.headers:
            return
        assert isinstance(reply, web.Response)
        assert isinstance(body, bytes)
        encoding = encodings.accepted(",".join(request.headers.getall("Accept-Encoding", ())))
        # A cache between the client and us may keep the reply to a GET, in either form.
        if encoding or request.method == "GET":
            reply.headers.add("Vary", "Accept-Encoding")
        if encoding:
            if len(body) < COMPRESS_APART:
                reply.body = encodings.compress(encoding, body)
            else:
                reply.body = await request_threads.run(lambda: encodings.compress_apart(encoding, body))
            reply.headers["Content-Encoding"] = encodings.NAMES[encoding]

    def _recognise(self, request: web.Request) -> None:
        """Show a key's rate headers on a path that needs no key too, or if the key was refused for its address."""
        key = self._admission.known(_presented(request), time.monotonic())
        if key is not None:
            request[KEY] = key

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

    async def _check_sandbox(self, request: web.Request) -> None:
        """Check a sandbox token against its session, which `authenticate` cannot wait for."""
        presented = _presented(request)
        if self._sandbox is not None and _is_sandbox_token(presented):
            client_of_task.set(place_of(self.address_of(request)))
            request[_VOUCHED] = await self._sandbox.vouch(request, presented)

    def sign(self, request: web.Request, reply: web.StreamResponse) -> None:
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
            reply.headers.update(self._admission.headers_without_key(self.address_of(request)))
        self._cross_origin.sign(request, reply, key)
        connection = request.protocol
        is_last = isinstance(connection, HandlerConnection) and connection.is_at_last_request
        if is_last or self._limiter.draining or reply.status in (408, 413, 501, 505):
            reply.force_close()

    def _record(self, request: web.Request, reply: web.StreamResponse, took_s: float) -> None:
        operation = request.get(_OPERATION) or "other"
        telemetry.requests_total.labels(operation, str(reply.status)).inc()
        telemetry.request_seconds.labels(operation).observe(took_s)
        if (owner := request.get(KEY)) is not None and _OPERATION in request:
            self._explain(request, reply, owner, took_s)
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

    def _explain(self, request: web.Request, reply: web.StreamResponse, key: Key, took_s: float) -> None:
        """Record what happened to the request, if it is to be recorded."""
        size = reply.content_length or 0
        shared = {"network": request.get(NETWORK, ""), "took_s": took_s, "units": request.get(UNITS, 0), "size": size}
        directives = request.get(DIRECTIVES)
        if (batch := request.get(BATCH)) is not None:
            self._recorder.note_batch(request[REQUEST_ID], key, batch, directives=directives, **shared)
            return
        failure = request.get(FAILURE, "") or ("internal error" if reply.status >= 500 else "")
        reason = self._recorder.reason(key.account, took_s, directives, failed=failure != "")
        if reason is not None:
            self._recorder.note(
                request[REQUEST_ID],
                key,
                reason,
                surface="http" if METHOD in request else "rest",
                method=request.get(METHOD) or request[_OPERATION],
                status=reply.status,
                flight=request.get(FLIGHT),
                params=request.get(PARAMS, b""),
                error=failure,
                cache=request.get(CACHE, ""),
                **_without_flight(request, took_s),
                **shared,
            )

    # Called by handlers

    def refuse(self, fault: Fault) -> web.Response:
        return fault_reply(fault, self._limiter.site)

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
        return self._admission.who(presented, address, time.monotonic(), origin=request.headers.get("Origin", ""))

    def _admitted(self, request: web.Request, key: Key) -> Key:
        request[KEY] = key
        self.serve_as(request, key.account.id)
        return key

    def serve_as(self, request: web.Request, client: str) -> None:
        """The request, and those that follow on its connection, share the turns and the database of this client."""
        client_of_task.set(client)
        if isinstance(request.protocol, HandlerConnection):
            request.protocol.client = client

    def enter(self, request: web.Request, operation: str) -> str:
        """Record the operation for the metrics, and return the client's address."""
        request[_OPERATION] = operation
        address = self.address_of(request)
        client_of_task.set(place_of(address))
        turns_of_task.set(self._limiter.turns)
        return address

    def address_of(self, request: web.Request) -> str:
        return self._limiter.client_address(request.remote or "", request.headers.getall("X-Forwarded-For", ()))

    def is_secure(self, request: web.Request) -> bool:
        """Whether the client used https, also as reported by a trusted proxy."""
        is_forwarded = request.headers.get("X-Forwarded-Proto", "").split(",")[-1].strip().lower() == "https"
        return request.secure or (is_forwarded and self._limiter.trusts(request.remote or ""))

    async def read_checked(self, request: web.Request, operation: ApiOperation, *, larger: int = 0) -> Any:
        """The body of an operation, validated. Between the steps that a large one takes, other clients have their turns."""
        body = await self._receive(request, most=operation.body_bytes, larger=larger)
        self._hold(request, len(body))
        steps = operation.body_steps(body)
        while True:
            try:
                next(steps)
            except StopIteration as end:
                return end.value
            await self._limiter.turns.wait(client_of_task.get())

    def _hold(self, request: web.Request, size: int) -> None:
        """Count a large body, which is about to be parsed, as memory of its sender until the request ends."""
        if size < _LARGE_BODY:
            return
        held = (_sender(request), size * _PARSED)
        if refusal := self._limiter.take_body(*held):
            raise refusal
        request[_HELD] = held

    async def read_body(self, request: web.Request, *, most: int | None = None) -> bytes:
        """The body, within its deadline and the general size limit, or a lower one."""
        return bytes(await self._receive(request, most=most))

    async def _receive(self, request: web.Request, *, most: int | None = None, larger: int = 0) -> bytearray:
        """The body, within its deadline and its size limit: the general limit, lowered by `most` or raised by `larger`.

        A large one is not copied at its end, which would take milliseconds.
        """
        cap = max(self._settings.max_body_bytes, larger)
        most = min(most or cap, cap)
        if request.headers.get("Content-Encoding", "identity").lower() != "identity":
            raise UnsupportedMedia("compressed bodies are not accepted: send the body without Content-Encoding")
        if not _is_json(request):
            raise UnsupportedMedia("the header Content-Type must be application/json")
        body = bytearray()
        too_large = TooLarge(f"the body is larger than {most} bytes")
        if (request.content_length or 0) > most:
            raise too_large
        sender = _sender(request)
        try:
            async with asyncio.timeout(self._settings.body_timeout_s):
                # A chunked body has no length up front.
                async for piece in request.content.iter_any():
                    if len(body) + len(piece) > most:
                        raise too_large
                    if refusal := self._limiter.take_body(sender, len(piece)):
                        raise refusal
                    body += piece
        except TimeoutError:
            raise RequestTimeout("the request's body did not arrive in time") from None
        finally:
            if body:
                self._limiter.give_back_body(sender, len(body))
        return body


def _sender(request: web.Request) -> str:
    return request.protocol.client if isinstance(request.protocol, HandlerConnection) else ""


def _without_flight(request: web.Request, took_s: float) -> dict[str, Any]:
    """The block and the attempts of a request that is not a call to one network."""
    if FLIGHT in request:
        return {}
    calls = request.get(CALLS, ())
    return {"block": request.get(BLOCK, 0), "attempts": attempts_of(calls, time.monotonic() - took_s)}


def _is_json(request: web.Request) -> bool:
    """Accept a missing or generic type too: RFC 9110, 8.3 allows examining such a body.

    web3.py sends no type if its user sets headers, and its asynchronous client sends application/octet-stream.
    """
    given = request.headers.get("Content-Type", _OCTETS)
    return given.lower() == _OCTETS or request.content_type == "application/json"


def _presented(request: web.Request, in_query: Sequence[str] = ()) -> str | None:
    """The key that the request presents, or None. Two different keys name no client: they are refused like an unknown one."""
    words = [line.partition(" ") for line in request.headers.getall("Authorization", ())]
    bearer = [token for scheme, _, token in words if scheme.lower() == "bearer"]
    for given in (in_query, request.headers.getall("X-API-Key", ()), bearer):
        if keys := {key.strip() for key in given} - {""}:
            return keys.pop() if len(keys) == 1 else ""
    return None


def _is_sandbox_token(presented: str | None) -> TypeGuard[str]:
    return presented is not None and presented.startswith(SANDBOX_PREFIX)


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
