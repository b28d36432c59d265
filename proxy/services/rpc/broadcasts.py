"""Sending one call to several upstreams at once: a signed transaction, so that no single upstream can withhold it, or a read
whose highest result is the right one.

Upstreams of different operators come first. Each upstream receives it once, in a separate flight. The first one that accepts it
answers the caller. A refusal is passed on only when all have refused or failed: one upstream's "nonce too low" may mean that
another already has it in a block.

An upstream knows only the pending transactions that it has seen, so the highest of several nonces is the right one. It is the
reply once all have answered, or soon after the first has.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final

import msgspec

from proxy.chains.evm.log_range import quantity
from proxy.errors import Fault
from proxy.services.rpc.dispatcher import Dispatcher
from proxy.services.rpc.flights import Call, Caller
from proxy.services.rpc.networks import Route
from proxy.services.rpc.waiters import WholeResultWaiter
from proxy.wire.upstream import Upstream

# How long a result waits for those of other upstreams.
OTHERS_S: Final = 0.5


class Broadcast(WholeResultWaiter):
    """The waiter of all its flights."""

    __slots__ = ("_call", "_caller", "_chosen", "_error", "_fault", "_open")

    def __init__(self, caller: Caller) -> None:
        self._caller = caller
        self._open = 0
        self._call: Call | None = None
        self._chosen: tuple[Upstream, ...] = ()
        self._error = b""
        self._fault: Fault | None = None

    def __repr__(self) -> str:
        return f"<Broadcast {self._open} open>"

    def choose(self, route: Route, call: Call, now: float, most: int) -> int:
        """Choose the upstreams to ask. Returns how many calls will be made: one fails if no upstream is available."""
        tried, known = 0, 0
        while len(self._chosen) < most:
            upstream = _chosen(route.dispatcher, call, now, tried, known)
            if upstream is None:
                break
            tried |= 1 << upstream.health.index
            known |= _of_operator(route, upstream.health.operator)
            self._chosen = (*self._chosen, upstream)
        # A retry must not go to an upstream that has another of these flights.
        self._call = Call(
            call.policy,
            call.params,
            client=call.client,
            payer=call.payer,
            directives=call.directives,
            excluded=tried,
        )
        return max(1, len(self._chosen))

    def send_chosen(self, dispatcher: Dispatcher, now: float) -> None:
        assert self._call is not None
        if self._chosen:
            self.send_to(dispatcher, [(self._call, upstream) for upstream in self._chosen], now)
            return
        self._open = 1
        flight = dispatcher.new_flight(self._call, self, now)
        self._caller.on_flight(flight)
        dispatcher.launch(flight, now)  # It fails: no upstream is available.

    def send_to(self, dispatcher: Dispatcher, calls: Sequence[tuple[Call, Upstream]], now: float) -> None:
        """Send each of these calls to its upstream."""
        flights = [dispatcher.new_flight(call, self, now) for call, _ in calls]
        self._caller.on_flight(flights[0])
        self._open = len(calls)
        for flight, (_, upstream) in zip(flights, calls, strict=True):
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


class HighestResult(Broadcast):
    """A read whose highest result is the reply."""

    __slots__ = ("_highest", "_result", "_timer")

    def __init__(self, caller: Caller) -> None:
        super().__init__(caller)
        self._highest = -1
        self._result: bytes | msgspec.Raw = b""
        self._timer: asyncio.TimerHandle | None = None

    def on_result(self, result: bytes | msgspec.Raw) -> None:
        number = quantity(bytes(result))
        if not self._result or (number is not None and number > self._highest):
            self._result = result
            self._highest = -1 if number is None else number
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(OTHERS_S, self._deliver)
        self._one_less()

    def _one_less(self) -> None:
        if self._result and self._open == 1:
            self._deliver()
        else:
            super()._one_less()

    def _deliver(self) -> None:
        if self._open > 0:
            self._open = 0
            self._caller.on_result(self._result)
        if self._timer is not None:
            self._timer.cancel()


def _chosen(dispatcher: Dispatcher, call: Call, now: float, tried: int, known: int) -> Upstream | None:
    """An upstream that was not tried. Operators that do not have the transaction yet come first, unless all of their upstreams
    have a higher tier."""
    upstream = dispatcher.choose(call, now, tried)
    if upstream is None or not known >> upstream.health.index & 1:
        return upstream
    other = dispatcher.choose(call, now, tried | known)
    return upstream if other is None or other.health.tier > upstream.health.tier else other


def _of_operator(route: Route, operator: str) -> int:
    """The upstreams of an operator as a bit set of their indexes."""
    return sum([1 << each.health.index for each in route.upstreams if each.health.operator == operator])
