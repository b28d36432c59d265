"""Calls that other services make to a network, with decoded results.

They use the same upstreams, retries, cache and health as the calls of clients, but no admission and no price. Calls that are
made for a request share the upstreams as calls of its account do. No result contains integers beyond 64 bits as JSON numbers,
because all families write those as strings.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Sequence
from contextvars import ContextVar
from operator import itemgetter
from typing import Any

import orjson

from proxy.chains.registry import Network
from proxy.core.directives import FRESH
from proxy.core.request_records import READING, RecordedAttempt
from proxy.errors import NotFound
from proxy.services.rpc.calls import PendingReply, RpcError
from proxy.services.rpc.forwarder import Forwarder
from proxy.services.rpc.method_policy import MethodPolicy
from proxy.services.rpc.networks import Networks, Route
from proxy.tasks import client_of_task
from proxy.tracing import current_span, traced

# Calls of one request that its record lists.
MOST_LISTED = 50
# The calls that are made for the request of a task, for its record; None if it has none.
calls_of_task: ContextVar[list[PendingReply] | None] = ContextVar("calls_of_task", default=None)


class InternalCalls:
    def __init__(self, forwarder: Forwarder, networks: Networks) -> None:
        self._forwarder = forwarder
        self._networks = networks

    def __repr__(self) -> str:
        return f"<InternalCalls to {self._networks!r}>"

    async def call(self, network: Network, method: str, *params: Any, fresh: bool = False) -> Any:
        """The result. Raises RpcError for an upstream's error, and a Fault if no upstream replies."""
        route = self.route(network)
        pending = PendingReply()
        _list(pending)
        call = (pending, route.policies[method], orjson.dumps(params))
        directives = traced(FRESH if fresh else None, current_span.get())
        self._forwarder.forward(call, route, None, time.monotonic(), directives=directives, client=client_of_task.get())
        return orjson.loads(await pending.result())

    async def call_many(
        self, network: Network, calls: Sequence[tuple[str, Sequence[Any]]], *, fresh: bool = False
    ) -> list[Any]:
        """The results in order, in as few requests as the upstream accepts. The result of a failed call is an RpcError."""
        route = self.route(network)
        made: list[tuple[PendingReply, MethodPolicy, bytes]] = [
            (PendingReply(), route.policies[method], orjson.dumps(params)) for method, params in calls
        ]
        now = time.monotonic()
        for pending, _, _ in made:
            _list(pending)
        directives = traced(FRESH if fresh else None, current_span.get())
        self._forwarder.forward_all(made, route, None, now, directives=directives, client=client_of_task.get())
        results = await asyncio.gather(*(pending.result() for pending, _, _ in made), return_exceptions=True)
        return [_decoded(result) for result in results]

    def route(self, network: Network) -> Route:
        route = self._networks.find(network)
        if route is None:
            raise NotFound(f"no upstream is configured for the network {network.id}")
        return route


def _list(pending: PendingReply) -> None:
    listed = calls_of_task.get()
    if listed is not None and len(listed) < MOST_LISTED:
        listed.append(pending)


def attempts_of(calls: Iterable[PendingReply], began: float) -> list[RecordedAttempt]:
    """The attempts of all these calls, counted from this time, in the order in which they began."""
    now, found = time.monotonic(), list[RecordedAttempt]()
    for flight in {call.flight: None for call in calls}:
        if flight is not None:
            later_s, what = flight.began - began, f"{READING}{flight.policy.method.name}, "
            attempts = flight.attempts(now)
            found += [(label, after_s + later_s, took_s, what + how) for label, after_s, took_s, how in attempts]
    return sorted(found, key=itemgetter(1))


def _decoded(result: bytes | BaseException) -> Any:
    if isinstance(result, RpcError):
        return result
    if isinstance(result, BaseException):
        raise result
    return orjson.loads(result)
