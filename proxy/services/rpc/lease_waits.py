"""Calls that wait for a token of an upstream's limit, if the limit is leased from Valkey and no upstream has a token left."""

from __future__ import annotations

import time
from functools import partial

from proxy.services.rpc.dispatcher import Dispatcher
from proxy.services.rpc.flights import Flight
from proxy.store.upstream_leases import LeasedRate


class LeaseWaits:
    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher

    def __repr__(self) -> str:
        return f"<LeaseWaits on {self._dispatcher.state.network_id}>"

    def take(self, flight: Flight) -> bool:
        """Let the flight wait, if Valkey has to be asked for a token. Returns False if that would not help."""
        return self._wait(flight, time.monotonic())

    def _wait(self, flight: Flight, began: float) -> bool:
        rates = [upstream.health.rate for upstream in self._dispatcher.state.upstreams]
        lacking = [rate for rate in rates if isinstance(rate, LeasedRate) and rate.waits(began)]
        if lacking:
            lacking[0].when_leased(partial(self._again, flight, began))
        return bool(lacking)

    def _again(self, flight: Flight, began: float) -> None:
        if flight.done:
            return
        now = time.monotonic()
        upstream = self._dispatcher.choose(flight, now, flight.tried)
        if upstream is not None:
            self._dispatcher.send(flight, upstream, now)
        elif not self._wait(flight, began):
            self._dispatcher.refuse(flight)
