"""A signed transaction sent to several upstreams at once: one that keeps it to itself cannot hold it back.

Each upstream gets it once, in a flight of its own. The first that takes it answers the caller; a refusal is passed on only when
all have refused or failed, since one upstream's "nonce too low" may mean that another has it in a block already.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from proxy.errors import Fault
from proxy.services.rpc.flights import Flight
from proxy.services.rpc.waiters import WholeResultWaiter

if TYPE_CHECKING:
    from proxy.services.rpc.method_policy import MethodPolicy
    from proxy.services.rpc.networks import Route


class Broadcast(WholeResultWaiter):
    """The waiter of all its flights."""

    __slots__ = ("_caller", "_error", "_fault", "_open")

    def __init__(self, caller: Any) -> None:
        self._caller = caller
        self._open = 0
        self._error = b""
        self._fault: Fault | None = None

    def __repr__(self) -> str:
        return f"<Broadcast {self._open} open>"

    def send(self, route: Route, policy: MethodPolicy, params: bytes, now: float) -> None:
        flights = [Flight(route, policy, params, self, now) for _ in range(route.broadcast)]
        self._caller.flight = flights[0]
        taken, ready = 0, []
        for flight in flights:
            upstream = route.choose(flight, now, taken)
            if upstream is None:
                break
            taken |= 1 << upstream.health.index
            ready.append((flight, upstream))
        if not ready:
            self._open = 1
            flights[0].start(now)  # Nobody is there: it says so.
            return
        self._open = len(ready)
        for flight, upstream in ready:
            # None of them goes where another has gone.
            flight.tried = taken
            flight.send(upstream, now)

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
