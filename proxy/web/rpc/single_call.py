"""One call of a request that aiohttp serves: made, awaited and counted, whether it is JSON-RPC or a REST route."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

from aiohttp import web

from proxy import telemetry
from proxy.core.access import Key
from proxy.core.jsonrpc import RawCall
from proxy.core.usage import Outcome, outcome_of
from proxy.errors import Fault
from proxy.services.rpc.call_checks import SubscriptionCalls
from proxy.services.rpc.calls import PendingReply, RpcError
from proxy.services.rpc.flights import cost_of
from proxy.services.rpc.method_policy import invented_name_of, method_of
from proxy.services.rpc.networks import Route
from proxy.services.rpc.rpc_service import RpcService
from proxy.tracing import below
from proxy.web.api_middleware import ApiMiddleware
from proxy.web.front.handler_connection import HandlerConnection
from proxy.web.request_state import STATE, RequestState

R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class SingleCalls:
    """`shows_upstream`: replies name the upstream that answered."""

    api: ApiMiddleware
    rpc: RpcService
    shows_upstream: bool

    async def serve(
        self,
        request: web.Request,
        call: tuple[Route, Key, RawCall],
        pending: PendingReply,
        finish: Callable[[bytes | RpcError], Awaitable[R]],
        subscriber: SubscriptionCalls | None = None,
    ) -> R:
        """Make the call, and let `finish` make the reply of its result or error, and write it if it is large. The call counts
        once it is answered, even if the client leaves while its reply is written. `subscriber`: serves calls that subscribe,
        whose replies last for long."""
        route, key, raw = call
        state, accounting, began = request[STATE], self.api.accounting, time.monotonic()
        state.method, state.params = "", raw[1]
        with below(state.span, "cache") as looking:
            self.rpc.call(pending, route, key, raw, began, directives=state.directives, subscriber=subscriber)
            if looking is not None:
                looking.set({"penstock.cache": pending.cache})
        state.method, state.invented_name = method_of(pending.policy), invented_name_of(pending.policy)
        outcome: Outcome | None = None
        try:
            try:
                result: bytes | RpcError = await result_or_leave(request, pending)
                outcome = "results"
            except RpcError as exc:
                result, outcome = exc, "errors"
                state.failure = exc.error.decode("utf-8", "replace")
            self._describe(state, pending)
            if subscriber is not None:
                state.began_after_s = time.monotonic() - began
            return await finish(result)
        except Fault as fault:
            pending.units = accounting.refund(key, fault, pending.units)
            state.units, outcome = pending.units or None, outcome_of(fault)
            raise
        except asyncio.CancelledError:
            pending.drop()
            raise
        finally:
            state.flight, state.cost = pending.flight, cost_of(pending.flight, pending.cache)
            if outcome is not None:
                took_s = time.monotonic() - began if state.began_after_s is None else state.began_after_s
                self._count(state, key, pending, outcome, took_s)

    def _describe(self, state: RequestState, pending: PendingReply) -> None:
        """Note what the headers of the reply say."""
        state.units, state.cache, state.block = pending.units, pending.cache, pending.reached
        state.cost = cost_of(pending.flight, pending.cache)
        if self.shows_upstream and pending.flight is not None:
            state.upstream = pending.flight.answered_label

    def _count(self, state: RequestState, key: Key, pending: PendingReply, outcome: Outcome, took_s: float) -> None:
        self.api.accounting.count(key, pending, outcome, took_s)
        if state.span is not None and pending.policy is not None:
            telemetry.exemplars.note(pending.policy.tally.labels, took_s, state.span.trace_id, time.time())


async def result_or_leave(request: web.Request, pending: PendingReply) -> bytes:
    """Wait for the result. If the client leaves first, cancel the call, as on the hot path."""
    connection = request.protocol
    if not isinstance(connection, HandlerConnection):
        return await pending.result()
    connection.on_lost = pending.cancel
    try:
        return await pending.result()
    finally:
        connection.on_lost = None
