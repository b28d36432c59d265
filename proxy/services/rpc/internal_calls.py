"""Calls that other services make to a network, with decoded results.

They use the same upstreams, retries, cache and health as the calls of clients, but no admission. Calls that are made for a
request share the upstreams as calls of its account do, and are paid for by the request's meter at their list price before they
are made (`services/accounts/metering.py`). A call that reaches no upstream, because the reply is cached, costs nothing. Reading
a large reply costs by its size, wherever it comes from. No result contains integers beyond 64 bits as JSON numbers, because all
families write those as strings.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Iterator, Sequence
from contextvars import ContextVar
from operator import itemgetter
from typing import Any

import orjson

from proxy.chains.evm.log_range import quantity
from proxy.chains.registry import Network
from proxy.core.directives import FRESH
from proxy.core.pricing import reading_units
from proxy.core.request_records import READING, RecordedAttempt
from proxy.errors import NotFound, Unavailable
from proxy.services.accounts.metering import Meter, meter_of_task
from proxy.services.rpc.calls import PendingReply, RpcError
from proxy.services.rpc.forwarder import Forwarder
from proxy.services.rpc.method_policy import MethodPolicy
from proxy.services.rpc.networks import Networks, Route
from proxy.tasks import client_of_task
from proxy.tracing import current_span, traced
from proxy.turn_queue import next_turn

# Calls of one request that its record lists.
MOST_LISTED = 50
# Calls of one request that are sent together, if it pays for them.
MOST_AT_ONCE = 200
# A larger result is returned in the client's turn: decoding it takes a moment, and many may arrive in one round of the loop.
READ_AT_ONCE = 65_536
# Ways in which a call is answered without an upstream call of its own.
ANSWERED_HERE = frozenset(("hit", "stale", "join"))
AwaitedCall = tuple[PendingReply, MethodPolicy, bytes]
# The calls that are made for the request of a task, for its record; None if it has none.
calls_of_task: ContextVar[list[PendingReply] | None] = ContextVar("calls_of_task", default=None)


class InternalCalls:
    def __init__(self, forwarder: Forwarder, networks: Networks) -> None:
        self._forwarder = forwarder
        self._networks = networks

    def __repr__(self) -> str:
        return f"<InternalCalls to {self._networks!r}>"

    async def call(
        self, network: Network, method: str, *params: Any, fresh: bool = False, is_shared: bool = False
    ) -> Any:
        """The result. Raises RpcError for an upstream's error, and a Fault if no upstream replies. `is_shared`: the result is
        kept for all clients, so the request that happens to need it first does not pay for it."""
        return orjson.loads(await self.raw(network, method, *params, fresh=fresh, is_shared=is_shared))

    async def quantity(
        self, network: Network, method: str, *params: Any, fresh: bool = False, is_shared: bool = False
    ) -> int:
        """The number that the result is. Raises Unavailable if the upstream replies with anything else."""
        number = quantity(await self.raw(network, method, *params, fresh=fresh, is_shared=is_shared))
        if number is None:
            raise Unavailable(f"{network.id} does not answer {method} with a number at the moment; try again shortly")
        return number

    async def raw(
        self,
        network: Network,
        method: str,
        *params: Any,
        fresh: bool = False,
        is_shared: bool = False,
        pieces: int = 1,
    ) -> bytes:
        """Like `call`, not decoded: decoding a large result would take the loop's time in one step. `pieces`: how many calls it
        costs, if it has the work of several in it."""
        route = self.route(network)
        policy, raw = route.policies[method], orjson.dumps(params)
        meter = None if is_shared else meter_of_task.get()
        price = 0 if meter is None else pieces * route.state.price_of_all(policy, raw)
        if meter is not None:
            await meter.pay(price)
        pending = PendingReply()
        _list(pending)
        directives = traced(FRESH if fresh else None, current_span.get())
        self._forwarder.forward(
            (pending, policy, raw),
            route,
            None,
            time.monotonic(),
            directives=directives,
            client=client_of_task.get(),
            meter=meter,
        )
        try:
            result = await pending.result()
            if meter is not None:
                meter.owe(reading_units(len(result)))
            if len(result) > READ_AT_ONCE:
                await next_turn()
            return result
        finally:
            if meter is not None and not _reached_upstream(pending):
                meter.answered_here(price)

    async def call_many(
        self, network: Network, calls: Sequence[tuple[str, Sequence[Any]]], *, fresh: bool = False
    ) -> list[Any]:
        """The results in order, in as few requests as the upstream accepts and the account's units allow. The result of a
        failed call is an RpcError."""
        return [_decoded(result) for result in await self.raw_many(network, calls, fresh=fresh)]

    async def raw_many(
        self, network: Network, calls: Sequence[tuple[str, Sequence[Any]]], *, fresh: bool = False
    ) -> list[bytes | RpcError]:
        """Like `call_many`, not decoded."""
        route, meter = self.route(network), meter_of_task.get()
        awaited: list[AwaitedCall] = [
            (PendingReply(), route.policies[method], orjson.dumps(params)) for method, params in calls
        ]
        if meter is None:
            return await self._send(route, awaited, None, fresh=fresh)
        results: list[bytes | RpcError] = []
        for part, price in _portions(route, awaited, meter):
            await meter.pay(price)
            results += await self._send(route, part, meter, fresh=fresh)
        return results

    async def _send(
        self, route: Route, awaited: Sequence[AwaitedCall], meter: Meter | None, *, fresh: bool
    ) -> list[bytes | RpcError]:
        for pending, _, _ in awaited:
            _list(pending)
        directives = traced(FRESH if fresh else None, current_span.get())
        client = client_of_task.get()
        self._forwarder.forward_all(
            awaited, route, None, time.monotonic(), directives=directives, client=client, meter=meter
        )
        results = await asyncio.gather(*(pending.result() for pending, _, _ in awaited), return_exceptions=True)
        if meter is not None:
            meter.owe(sum(reading_units(len(each)) for each in results if isinstance(each, bytes)))
            meter.answered_here(
                sum(
                    route.state.price_of_all(policy, raw)
                    for each, policy, raw in awaited
                    if not _reached_upstream(each)
                )
            )
        return [_raised(result) for result in results]

    def reaches(self, network: Network) -> bool:
        """Whether the network has an upstream."""
        return self._networks.find(network) is not None

    def route(self, network: Network) -> Route:
        route = self._networks.find(network)
        if route is None:
            raise NotFound(f"no upstream is configured for the network {network.id}")
        return route


def _portions(
    route: Route, awaited: Sequence[AwaitedCall], meter: Meter
) -> Iterator[tuple[Sequence[AwaitedCall], int]]:
    """The calls in parts that can be paid for at once, each with its price. A part is sent when it is paid for, so the next one
    is priced only then."""
    most, part, price = meter.portion, list[AwaitedCall](), 0
    for call in awaited:
        one = route.state.price_of_all(call[1], call[2])
        if part and (price + one > most or len(part) == MOST_AT_ONCE):
            yield part, price
            part, price = [], 0
        part.append(call)
        price += one
    if part:
        yield part, price


def _reached_upstream(pending: PendingReply) -> bool:
    """Whether the call was sent to an upstream for this caller: it was neither cached, nor shared, nor refused because no
    upstream had room for it."""
    return pending.cache not in ANSWERED_HERE and not pending.is_unavailable


def _list(pending: PendingReply) -> None:
    listed = calls_of_task.get()
    if listed is not None and len(listed) < MOST_LISTED:
        listed.append(pending)


def attempts_of(calls: Iterable[PendingReply], began: float) -> list[RecordedAttempt]:
    """The attempts of all these calls, counted from this time, in the order in which they began."""
    now, recorded = time.monotonic(), list[RecordedAttempt]()
    for flight in {call.flight: None for call in calls}:
        if flight is not None:
            later_s, what = flight.began - began, f"{READING}{flight.policy.method.name}, "
            attempts = flight.attempts(now)
            recorded += [(label, after_s + later_s, took_s, what + how) for label, after_s, took_s, how in attempts]
    return sorted(recorded, key=itemgetter(1))


def _raised(result: bytes | BaseException) -> bytes | RpcError:
    if isinstance(result, bytes | RpcError):
        return result
    raise result


def _decoded(result: bytes | RpcError) -> Any:
    return result if isinstance(result, RpcError) else orjson.loads(result)
