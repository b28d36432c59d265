"""GET and POST /v1/rest/{chain}/{network}/{path}: the routes of chains whose nodes have a REST API.

A request becomes a call (`core/rest_routes.py`) and takes the way of every other call, so that it is priced, cached, joined,
retried and recorded in the same way. Large bodies are passed on as they arrive.
"""

from __future__ import annotations

import asyncio
import base64
import time
from typing import Final

from aiohttp import web

from proxy.chains.families import family_of
from proxy.core.access import Key
from proxy.core.jsonrpc import RawCall
from proxy.core.near_names import near_names
from proxy.core.pricing import request_units
from proxy.core.rest_routes import (
    JSON,
    BadTarget,
    RestParams,
    RestRecord,
    RestTransport,
    RouteTable,
    accepted_type,
    query_of,
    read_error,
    read_record,
    segments_of,
    write_params,
)
from proxy.core.usage import Outcome, outcome_of
from proxy.errors import Fault, InternalError, InvalidRequest, MethodNotAllowed, NotFound, of_status
from proxy.services.rpc.calls import RpcError
from proxy.services.rpc.flights import cost_of
from proxy.services.rpc.held_body import NO_ROOM, ReplyShare
from proxy.services.rpc.method_policy import ANY_SCOPE, invented_name_of, method_of
from proxy.services.rpc.networks import Networks, Route
from proxy.services.rpc.rpc_service import RpcService
from proxy.services.rpc.streamed_reply import StreamedReply
from proxy.tracing import below, traced
from proxy.web.api_middleware import ApiMiddleware
from proxy.web.fault_injection import plan_for
from proxy.web.network_resolver import NetworkResolver
from proxy.web.request_directives import directives_of
from proxy.web.request_state import STATE
from proxy.web.routes import REST_ROOT
from proxy.web.rpc.handler import HeldResponse, result_or_leave

REST_PATH = f"{REST_ROOT}/{{chain}}/{{network}}/{{path:.*}}"
OPERATION = "rest_call"
_ID: Final = b"1"


class RestCallHandler:
    def __init__(
        self,
        api: ApiMiddleware,
        resolver: NetworkResolver,
        rpc: RpcService,
        networks: Networks,
        *,
        shows_upstream: bool = False,
    ) -> None:
        self._api = api
        self._resolver = resolver
        self._rpc = rpc
        self._shows_upstream = shows_upstream
        self._tables = {
            name: RouteTable(route.policies)
            for name, route in networks.routes.items()
            if family_of(route.network).rest is not None
        }

    async def answer(self, request: web.Request) -> web.StreamResponse:
        state = request[STATE]
        with below(state.span, "admission"):
            key = self._api.authentication.authenticate(request, OPERATION)
            route = self._resolver.route(key, ANY_SCOPE, request.match_info["chain"], request.match_info["network"])
        state.network = route.network.id
        rest = family_of(route.network).rest
        if rest is None:
            raise NotFound(
                f"the network {route.network.id} has no REST routes: POST JSON-RPC to /v1/rpc/{route.network.id}",
                reason="network",
            )
        state.directives = traced(directives_of(request, key, route.labels, in_query=False), state.span)
        try:
            method, params = self._read(request, route, rest)
        except (BadTarget, NotFound, MethodNotAllowed) as exc:
            state.method = "other"
            if refusal := self._rpc.charge_error(key, time.monotonic()):
                raise refusal from None
            raise (exc if isinstance(exc, Fault) else InvalidRequest(str(exc), reason="path")) from None
        if request.method == "POST":
            await self._read_body(request, route, rest, params)
        if (plan := plan_for(state.directives)) is not None:
            await self._api.faults.before(plan, request, key.account.id)
        encoded = write_params(params)
        if refusal := self._rpc.size_refusal(key, request_units(encoded), time.monotonic()):
            raise refusal
        return await self._serve(request, route, key, (method, encoded, _ID))

    # Reading the request

    def _read(self, request: web.Request, route: Route, rest: RestTransport) -> tuple[str, RestParams]:
        """The route that the request names, and its params without a body."""
        path, _, query = request.raw_path.partition("?")
        parts = path.split("/", 5)
        named = [request.match_info["chain"], request.match_info["network"]]
        if parts[:3] != ["", "v1", "rest"] or parts[3:5] != named:
            raise BadTarget("the path must start with /v1/rest/{chain}/{network}/, without dot segments")
        methods, values = self._tables[route.network.id].find(segments_of("/" + "".join(parts[5:])))
        if not methods:
            raise self._unknown(request.method, "/" + "".join(parts[5:]), route)
        if request.method not in methods:
            allowed = sorted(methods)
            raise MethodNotAllowed(f"this route has {' and '.join(allowed)} only", allowed=allowed)
        accept = accepted_type(",".join(request.headers.getall("Accept", ())), rest.types)
        if not accept:
            raise InvalidRequest(f"Accept: must allow {' or '.join(rest.types)}", param="Accept")
        headers = {name: request.headers[name] for name in sorted(rest.request_headers) if name in request.headers}
        if not all(value.isascii() and value.isprintable() and len(value) <= 256 for value in headers.values()):
            raise InvalidRequest(f"the headers {', '.join(headers)} must be of printable ASCII, up to 256 characters")
        params = RestParams(path=dict(values), query=query_of(query), accept=accept, headers=headers)
        return methods[request.method], params

    def _unknown(self, verb: str, path: str, route: Route) -> NotFound:
        """A route that is not listed. Its path is repeated only in the form of a listed one: it may contain a key."""
        refused = family_of(route.network).refused
        methods, _ = RouteTable(refused).find(segments_of(path)) if refused else ({}, {})
        if name := methods.get(verb):
            return NotFound(f"the route {name} is not available: {refused[name]}", reason="path")
        nearest = near_names(frozenset(route.policies)).nearest(f"{verb} {path}") if len(path) <= 100 else ""
        advice = f"; did you mean {nearest}?" if nearest else ""
        return NotFound(f"{route.network.id} has no such route, or it is not available{advice}", reason="path")

    async def _read_body(self, request: web.Request, route: Route, rest: RestTransport, params: RestParams) -> None:
        if not request.body_exists:
            return  # Some clients name any type where they send nothing.
        body = await self._api.bodies.read_body(request, most=route.max_body, types=rest.body_types)
        if request.content_type in rest.body_types and request.content_type != JSON:
            params.type, params.body = request.content_type, base64.b64encode(body).decode()
            return
        try:
            params.body = body.decode()
        except UnicodeDecodeError:
            raise InvalidRequest("the body must be JSON in UTF-8", reason="body") from None

    # Serving it

    async def _serve(self, request: web.Request, route: Route, key: Key, call: RawCall) -> web.StreamResponse:
        share = self._rpc.reply_share(key.account.id)
        pending, began = StreamedReply(share), time.monotonic()
        state, accounting = request[STATE], self._api.accounting
        state.method, state.params = "", call[1]
        with below(state.span, "cache") as looking:
            self._rpc.call(pending, route, key, call, began, directives=state.directives)
            if looking is not None:
                looking.set({"penstock.cache": pending.cache})
        state.method, state.invented_name = method_of(pending.policy), invented_name_of(pending.policy)
        outcome: Outcome = "results"
        try:
            reply = self._reply(read_record(await result_or_leave(request, pending)), pending, share)
        except RpcError as exc:
            outcome, state.failure = "errors", exc.error.decode("utf-8", "replace")[:1000]
            reply = self._api.refuse(_fault_of(exc.error)) if (found := _record_in(exc.error)) is None else found
        except Fault as fault:
            pending.units = accounting.refund(key, fault, pending.units)
            state.units = pending.units or None
            accounting.count(key, pending, outcome_of(fault), time.monotonic() - began)
            raise
        except asyncio.CancelledError:
            share.give_all()
            raise
        finally:
            state.flight, state.cost = pending.flight, cost_of(pending.flight, pending.cache)
        state.units, state.cache, state.block = pending.units, pending.cache, pending.reached
        if self._shows_upstream and pending.flight is not None:
            state.upstream = pending.flight.answered_label
        if pending.is_streamed:
            await self._write(request, reply, pending)
        accounting.count(key, pending, outcome, time.monotonic() - began)
        return reply

    def _reply(self, record: RestRecord, pending: StreamedReply, share: ReplyShare) -> web.StreamResponse:
        if pending.is_streamed:
            return web.StreamResponse(status=record.status, headers=record.headers)
        return HeldResponse(_body_of(record), share, status=record.status, headers=record.headers)

    async def _write(self, request: web.Request, reply: web.StreamResponse, pending: StreamedReply) -> None:
        """Write a large body as it arrives."""
        if pending.length is not None:
            reply.content_length = pending.length
        self._api.add_common_headers(request, reply)
        try:
            await reply.prepare(request)
            while piece := await pending.next_piece():
                await reply.write(piece)
            await reply.write_eof()
        finally:  # The client may have left.
            pending.leave()


def _body_of(record: RestRecord) -> bytes:
    if record.base64:
        return record.base64
    body = bytes(record.body)
    return b"" if body == b"null" else body


def _record_in(error: bytes) -> web.Response | None:
    """The upstream's own reply, if its error may be shown."""
    try:
        found = read_error(error).data
    except ValueError:
        return None
    if found is None:
        return None
    return web.Response(status=found.status, body=_body_of(found), headers=found.headers)


def _fault_of(error: bytes) -> Fault:
    """An error without a reply of the upstream: its text must not be shown, or it is ours."""
    found = read_error(error)
    if error == NO_ROOM:
        return of_status(503, found.message)
    if found.code in (404, 410):
        return NotFound(f"the chain has no such object: {found.message[:200]}")
    if 400 <= found.code < 500 and found.code not in (401, 402, 403, 407, 429):
        return of_status(found.code, found.message[:200])
    return InternalError(f"the upstreams failed: {found.message[:200]}", reason="upstream")
