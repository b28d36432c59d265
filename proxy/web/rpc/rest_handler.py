"""GET and POST /v1/rest/{chain}/{network}/{path}: the routes of chains whose nodes have a REST API, and calls in the form of a
URL at nodes of JSON-RPC that have them (`core/uri_calls.py`).

A request becomes a call (`core/rest_routes.py`) and takes the way of every other call, so that it is priced, cached, joined,
retried and recorded in the same way. Large bodies are passed on as they arrive.
"""

from __future__ import annotations

import base64
import time
from typing import Final

from aiohttp import web

from proxy.chains.families import family_of
from proxy.core.access import Key
from proxy.core.event_stream import EVENT_STREAM
from proxy.core.jsonrpc import NOT_JSON, RawCall
from proxy.core.pricing import UNITS_OF_AN_ERROR, request_units, size_units
from proxy.core.rest_routes import (
    JSON,
    LARGEST_BODY,
    NO_JSON,
    BadTarget,
    RestParams,
    RestTransport,
    query_of,
    read_json,
    segments_of,
    split_record,
    target_of,
    write_params,
)
from proxy.core.uri_calls import params_of
from proxy.errors import Fault, InternalError, InvalidRequest, MethodNotAllowed, NotFound
from proxy.services.feed.topics import Topic
from proxy.services.rpc.calls import RpcError
from proxy.services.rpc.method_policy import ANY_SCOPE
from proxy.services.rpc.networks import Route
from proxy.services.rpc.rpc_service import RpcService
from proxy.services.rpc.streamed_reply import StreamedReply
from proxy.tracing import below, traced
from proxy.web.api_middleware import ApiMiddleware
from proxy.web.fault_injection import plan_for
from proxy.web.network_resolver import NetworkResolver
from proxy.web.reply import HeldResponse
from proxy.web.request_directives import directives_of
from proxy.web.request_state import STATE
from proxy.web.rest_replies import body_of, reply_to_error
from proxy.web.rest_targets import RestTarget, RestTargets, split_target
from proxy.web.rpc.event_streams import EventStreams
from proxy.web.rpc.handler import JSON_TYPE, HeldReply
from proxy.web.rpc.single_call import SingleCalls
from proxy.web.websocket.client_sockets import ClientSockets

# The operations of the API spec by verb.
OPERATIONS: Final = {"GET": "rest_get", "POST": "rest_post"}
_ID: Final = b"1"
# CometBFT's id of replies to calls in the form of a URL.
_ID_OF_URI: Final = b"-1"


class RestCallHandler:
    def __init__(
        self,
        api: ApiMiddleware,
        resolver: NetworkResolver,
        rpc: RpcService,
        targets: RestTargets,
        sockets: ClientSockets,
        *,
        shows_upstream: bool = False,
    ) -> None:
        """`sockets`: streams of events are among them."""
        self._api = api
        self._resolver = resolver
        self._rpc = rpc
        self._admission = sockets.context.admission
        self._calls = SingleCalls(api, rpc, shows_upstream)
        self._events = EventStreams(api, self._calls, sockets)
        self._targets = targets

    async def answer(self, request: web.Request) -> web.StreamResponse:
        state = request[STATE]
        with below(state.span, "admission"):
            key = self._api.authentication.authenticate(request, OPERATIONS[request.method])
            route = self._resolver.route(key, ANY_SCOPE, request.match_info["chain"], request.match_info["network"])
        state.network = route.network.id
        family = family_of(route.network)
        if family.rest is not None:
            return await self._answer_route(request, route, key, family.rest)
        if family.uri_params:
            return await self._answer_uri(request, route, key)
        raise NotFound(
            f"the network {route.network.id} has no REST routes: POST JSON-RPC to /v1/rpc/{route.network.id}",
            reason="network",
        )

    async def _answer_route(
        self, request: web.Request, route: Route, key: Key, rest: RestTransport
    ) -> web.StreamResponse:
        body = b""
        try:
            self._read_directives(request, route, key)
            method, params = self._read(request, route, rest)
            # Some clients name any type where they send nothing.
            if request.method == "POST" and request.body_exists:
                body = await self._api.bodies.read_body(request, most=LARGEST_BODY, types=rest.body_types)
                _put_body(params, body, request.content_type, rest)
        except (BadTarget, NotFound, InvalidRequest) as exc:
            raise await self._refused(request, route, key, exc, len(body)) from None
        await self._inject_fault(request, key)
        call = method, write_params(params), _ID
        if params.accept == EVENT_STREAM:
            (topics,) = params.query.values()
            topic = Topic(target_of(method, params)[1], ",".join(topics).encode())
            return await self._events.serve(request, route, key, call, topic)
        if refusal := self._rpc.size_refusal(key, request_units(call[1]), time.monotonic()):
            raise refusal
        return await self._serve(request, route, key, call)

    async def _answer_uri(self, request: web.Request, route: Route, key: Key) -> web.StreamResponse:
        try:
            self._read_directives(request, route, key)
            call = self._read_uri(request, route)
        except (BadTarget, NotFound, InvalidRequest) as exc:
            raise await self._refused(request, route, key, exc, 0) from None
        await self._inject_fault(request, key)
        return await self._serve_uri(request, route, key, call)

    def _read_directives(self, request: web.Request, route: Route, key: Key) -> None:
        state = request[STATE]
        state.directives = traced(directives_of(request, key, route.labels, in_query=False), state.span)

    async def _inject_fault(self, request: web.Request, key: Key) -> None:
        """Carry out the fault plan of a test key. A request that is not served is charged as an error."""
        if (plan := plan_for(request[STATE].directives)) is not None:
            if (plan.status or plan.reset) and (refusal := self._rpc.charge_error(key, time.monotonic())) is not None:
                raise refusal
            await self._api.faults.before(plan, request, key.account.id)

    async def _refused(self, request: web.Request, route: Route, key: Key, why: BadTarget | Fault, size: int) -> Fault:
        """The error of a request that could not be read. It is charged like a malformed message on a socket, and counted."""
        state = request[STATE]
        units = UNITS_OF_AN_ERROR + size_units(size)
        if (refusal := await self._admission.admit(key, 1, units, time.monotonic())) is not None:
            return refusal
        state.method, state.units = "other", units
        key.tallies[route.unknown.tally].count("errors", "", units, 0.0)
        return why if isinstance(why, Fault) else InvalidRequest(str(why), reason="path")

    # Reading the request

    def _read(self, request: web.Request, route: Route, rest: RestTransport) -> tuple[str, RestParams]:
        """The route that the request names, and its params without a body."""
        path, query = _target(request)
        accept = ",".join(request.headers.getall("Accept", ()))
        return self._targets.read(RestTarget(request.method, path, query, accept, request.headers), route, rest)

    def _read_uri(self, request: web.Request, route: Route) -> RawCall:
        """The call that a path of one segment names, such as `/block?height=5`. Nodes answer it under the id -1."""
        if request.method != "GET":
            message = f"calls by URL are GET requests: POST JSON-RPC to /v1/rpc/{route.network.id}"
            raise MethodNotAllowed(message, allowed=["GET"])
        path, query = _target(request)
        name = "/".join(segments_of(path))
        if name not in route.policies:
            raise self._targets.unknown("", name, route)
        return name, params_of(name, family_of(route.network).uri_params, query_of(query)), _ID_OF_URI

    # Serving it

    async def _serve(self, request: web.Request, route: Route, key: Key, call: RawCall) -> web.StreamResponse:
        share = self._rpc.reply_share(key.account.id)
        pending = StreamedReply(share)

        async def finish(result: bytes | RpcError) -> web.StreamResponse:
            if isinstance(result, RpcError):
                shown = reply_to_error(result.error)
                if isinstance(shown, Fault):
                    return self._api.refuse(shown)
                return web.Response(status=shown.status, body=body_of(shown), headers=shown.headers)
            record = split_record(result)
            if pending.is_streamed:
                return await self._write(
                    request, web.StreamResponse(status=record.status, headers=record.headers), pending
                )
            return HeldResponse([body_of(record)], share, status=record.status, headers=record.headers)

        return await self._calls.serve(request, (route, key, call), pending, finish)

    async def _serve_uri(self, request: web.Request, route: Route, key: Key, call: RawCall) -> web.StreamResponse:
        """Answer as nodes do: with the reply to the JSON-RPC call, and with status 500 if it is an error."""
        share = self._rpc.reply_share(key.account.id)
        pending = HeldReply(share)

        async def finish(result: bytes | RpcError) -> web.StreamResponse:
            status = 500 if isinstance(result, RpcError) else 200
            return HeldResponse(pending.reply(call[2], result), share, status=status, headers=JSON_TYPE)

        return await self._calls.serve(request, (route, key, call), pending, finish)

    async def _write(
        self, request: web.Request, reply: web.StreamResponse, pending: StreamedReply
    ) -> web.StreamResponse:
        """Write a large body as it arrives."""
        if pending.length is not None:
            reply.content_length = pending.length
        self._api.add_common_headers(request, reply)
        try:
            await reply.prepare(request)
            while piece := await pending.next_piece():
                await reply.write(piece)
            await reply.write_eof()
        except InternalError:
            if request.transport is not None:
                request.transport.abort()  # A body that ends early must not look complete.
            raise
        finally:  # The client may have left.
            pending.drop()
        return reply


def _target(request: web.Request) -> tuple[str, str]:
    """The path below the network, and the query, as they were sent."""
    chain, network, path, query = split_target(request.raw_path)
    if (chain, network) != (request.match_info["chain"], request.match_info["network"]):
        raise BadTarget("the path must start with /v1/rest/{chain}/{network}/, without dot segments")
    return path, query


def _put_body(params: RestParams, body: bytes, kind: str, rest: RestTransport) -> None:
    """Add the body of a request, which has this type. Raises InvalidRequest."""
    if kind in rest.body_types and kind != JSON:
        params.type, params.body = kind, base64.b64encode(body).decode()
        return
    try:
        body.decode()
        params.json = read_json(body) if body else NO_JSON
    except NOT_JSON:
        raise InvalidRequest("the body must be JSON in UTF-8", reason="body") from None
