"""POST /v1/rpc/{chain}/{network} and /v1/bundler/{chain}/{network}, for requests that the hot path hands over."""

from __future__ import annotations

import asyncio
import time
import weakref
from collections.abc import Sequence

import msgspec
from aiohttp import web

from proxy.core import fault_plans, jsonrpc
from proxy.core.access import Key
from proxy.core.fault_plans import FaultPlan
from proxy.core.jsonrpc import MalformedCall, RawCall
from proxy.core.pricing import request_units
from proxy.errors import Fault
from proxy.services.rpc.batches import CallBatch
from proxy.services.rpc.calls import HeldResultWaiter, PendingReply, RpcError
from proxy.services.rpc.held_body import NO_ROOM, HeldBody, ReplyShare
from proxy.services.rpc.method_policy import ANY_SCOPE
from proxy.services.rpc.networks import Route
from proxy.services.rpc.rpc_service import RpcService, fault_of
from proxy.tracing import below, traced
from proxy.web.api_middleware import ApiMiddleware
from proxy.web.fault_injection import plan_for
from proxy.web.network_resolver import NetworkResolver, require_json_rpc
from proxy.web.reply import HeldResponse
from proxy.web.request_directives import directives_of
from proxy.web.request_state import STATE
from proxy.web.rpc.single_call import SingleCalls, result_or_leave

JSON_TYPE = {"Content-Type": "application/json"}


class HeldReply(HeldResultWaiter, PendingReply):
    """A single call whose large result is held, in the pieces that it came in."""

    __slots__ = ("_pieces", "_share", "body")

    def __init__(self, share: ReplyShare) -> None:
        super().__init__()
        self.body: HeldBody | None = None
        self._pieces: list[bytes | memoryview] = []
        self._share = share

    def new_share(self) -> ReplyShare:
        return self._share

    def on_held(self, body: HeldBody) -> None:
        self._pieces = [*body.parts]
        PendingReply.on_result(self, b"")

    def on_result(self, result: bytes | msgspec.Raw) -> None:
        """A result that was not streamed: a small or cached one, or one that several callers wait for."""
        if self.is_answered:
            return
        if self._share.take(len(result)):
            self._pieces = [memoryview(result), b"}"]
            PendingReply.on_result(self, b"")
        else:
            self.on_error(NO_ROOM)

    def reply(self, id_: bytes, result: bytes | RpcError) -> list[bytes | memoryview]:
        """The reply under this id, once, for what `result` has returned or raised."""
        if isinstance(result, RpcError):
            return [jsonrpc.error_reply(id_, result.error)]
        pieces, self._pieces = self._pieces, []
        return [jsonrpc.result_start(id_), *pieces]

    def on_error(self, error: bytes) -> None:
        PendingReply.on_error(self, error)

    def on_fault(self, fault: Fault) -> None:
        PendingReply.on_fault(self, fault)

    def on_charged(self, units: int) -> bool:
        return PendingReply.on_charged(self, units)

    def on_waited(self, waited_s: float) -> None:
        PendingReply.on_waited(self, waited_s)

    def drop(self) -> None:
        self.drop_held()
        self._share.give_all()


class RpcHandler:
    def __init__(
        self,
        api: ApiMiddleware,
        resolver: NetworkResolver,
        rpc: RpcService,
        *,
        operation: str = "rpc_call",
        scopes: int = ANY_SCOPE,
        shows_upstream: bool = False,
    ) -> None:
        """A key needs one of `scopes` to use this endpoint."""
        self._api = api
        self._resolver = resolver
        self._rpc = rpc
        self._operation = operation
        self._scopes = scopes
        self._calls = SingleCalls(api, rpc, shows_upstream)

    async def answer(self, request: web.Request) -> web.StreamResponse:
        state = request[STATE]
        with below(state.span, "admission"):
            key = self._api.authentication.authenticate(request, self._operation)
            route = self._resolver.route(key, self._scopes, request.match_info["chain"], request.match_info["network"])
        if self._operation == "rpc_call":
            require_json_rpc(route.network)
        body = await self._api.bodies.read_body(request, most=route.max_body)
        state.network = route.network.id
        state.directives = traced(directives_of(request, key, route.labels), state.span)
        plan = plan_for(state.directives)
        if plan is not None:
            return await self._serve_with_faults(plan, request, route, key, body)
        reply, share = await self._serve(request, route, key, body)
        return HeldResponse(reply, share, headers=JSON_TYPE) if reply else web.Response(status=204)

    async def _serve_with_faults(
        self, plan: FaultPlan, request: web.Request, route: Route, key: Key, body: bytes
    ) -> web.Response:
        """Serve a request of a test key with the faults of its plan."""
        is_served = not (plan.status or plan.error or plan.reset)
        if not is_served and (refusal := self._rpc.charge_error(key, time.monotonic())) is not None:
            raise refusal
        await self._api.faults.before(plan, request, key.account.id)
        if plan.error and (errors := fault_plans.error_replies(body, fault_plans.error_of(plan))) is not None:
            request[STATE].failure = "injected by X-Fault"
            return self._api.faults.after(plan, request, key.account.id, errors)
        sent = fault_plans.aged(body, route.heads.tip, plan.stale) if plan.stale else body
        reply, share = await self._serve(request, route, key, sent)
        if not reply:
            return web.Response(status=204)
        heads = [name for name, policy in route.policies.items() if policy.is_head_number]
        faulty = fault_plans.faulty(plan, body, b"".join(reply), heads)
        try:
            response = self._api.faults.after(plan, request, key.account.id, faulty)
        except Fault:
            share.give_all()
            raise
        weakref.finalize(response, share.give_all)
        return response

    async def _serve(
        self, request: web.Request, route: Route, key: Key, body: bytes
    ) -> tuple[Sequence[bytes | memoryview], ReplyShare]:
        """The pieces of the reply, and the memory that it holds."""
        size_units = request_units(body)
        if refusal := self._rpc.size_refusal(key, size_units, time.monotonic()):
            raise refusal
        try:
            if jsonrpc.is_batch(body):
                return await self._batch(request, route, key, body)
            return await self._single(request, route, key, jsonrpc.parse(body, None, route.dialect))
        except MalformedCall as exc:
            self._rpc.charge_size(key, size_units, time.monotonic())
            raise fault_of(exc) from None

    async def _single(
        self, request: web.Request, route: Route, key: Key, call: RawCall
    ) -> tuple[Sequence[bytes | memoryview], ReplyShare]:
        share = self._rpc.reply_share(key.account.id)
        pending = HeldReply(share)

        async def finish(result: bytes | RpcError) -> list[bytes | memoryview]:
            return pending.reply(call[2], result) if call[2] else []

        return await self._calls.serve(request, (route, key, call), pending, finish), share

    async def _batch(
        self, request: web.Request, route: Route, key: Key, body: bytes
    ) -> tuple[Sequence[bytes | memoryview], ReplyShare]:
        pending, state = PendingReply(), request[STATE]

        def done(batch: CallBatch) -> None:
            state.units = self._api.accounting.settle_batch(key, batch)
            state.block, state.batch = batch.reached, batch
            pending.on_result(b"")

        def refuse(why: Fault | MalformedCall, ids: Sequence[bytes]) -> None:
            pending.on_fault(fault_of(why))

        batch = self._rpc.call_batch(body, route, key, time.monotonic(), done, refuse, directives=state.directives)
        try:
            await result_or_leave(request, pending)
        except asyncio.CancelledError:
            if state.batch is None:
                self._api.accounting.leave_batch(key, batch)
            raise
        assert state.batch is not None
        return state.batch.pieces(), state.batch.share
