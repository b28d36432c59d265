"""Sending a signed transaction to several upstreams at once, so that no single upstream can withhold it.

Each upstream receives it once, in a separate flight. The first one that accepts it answers the caller. A refusal is passed on
only when all have refused or failed: one upstream's "nonce too low" may mean that another already has it in a block.
"""

from __future__ import annotations

import msgspec

from proxy.core.directives import Directives
from proxy.errors import Fault
from proxy.services.rpc.flights import Caller
from proxy.services.rpc.method_policy import MethodPolicy
from proxy.services.rpc.networks import Route
from proxy.services.rpc.waiters import WholeResultWaiter


class Broadcast(WholeResultWaiter):
    """The waiter of all its flights."""

    __slots__ = ("_caller", "_directives", "_error", "_fault", "_open")

    def __init__(self, caller: Caller, directives: Directives | None = None) -> None:
        self._caller = caller
        self._directives = directives
        self._open = 0
        self._error = b""
        self._fault: Fault | None = None

    def __repr__(self) -> str:
        return f"<Broadcast {self._open} open>"

    def send(self, route: Route, policy: MethodPolicy, params: bytes, now: float, *, client: str) -> None:
        dispatcher = route.dispatcher
        flights = [dispatcher.new_flight(policy, params, self, now) for _ in range(route.broadcast)]
        for flight in flights:
            flight.client = client
            if self._directives is not None:
                dispatcher.direct(flight, self._directives)
        self._caller.flight = flights[0]
        tried, ready = 0, []
        for flight in flights:
            upstream = dispatcher.choose(flight, now, tried)
            if upstream is None:
                break
            tried |= 1 << upstream.health.index
            ready.append((flight, upstream))
        if not ready:
            self._open = 1
            dispatcher.launch(flights[0], now)  # It fails: no upstream is available.
            return
        self._open = len(ready)
        for flight, upstream in ready:
            # A retry must not go to an upstream that has another of these flights.
            flight.tried = tried
            dispatcher.send(flight, upstream, now)

    def on_result(self, result: bytes | msgspec.Raw) -> None:
        if self._open > 0:
            self._open = 0
            self._caller.on_result(result)

    def on_error(self, error: bytes) -> None:
        self._error = self._error or error
        self._one_less()

    def on_fault(self, fault: Fault) -> None:
        self._fault = self._fault or fault
        self._one_less()

    def _one_less(self) -> None:
        self._open -= 1
        if self._open != 0:
            return
        if self._error:
            self._caller.on_error(self._error)
        else:
            assert self._fault is not None
            self._caller.on_fault(self._fault)
