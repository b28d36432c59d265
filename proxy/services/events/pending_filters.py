"""Filters of pending transactions at a network's upstreams. One lives in the upstream that made it: its name says which."""

from __future__ import annotations

import time
from typing import Any

import orjson

from proxy.services.rpc.calls import PendingReply
from proxy.services.rpc.flights import Flight
from proxy.services.rpc.networks import Route


class PendingFilters:
    def __init__(self, route: Route) -> None:
        self._route = route

    def __repr__(self) -> str:
        return f"<PendingFilters {self._route.network.id}>"

    async def make(self) -> str:
        """A new filter, at whichever upstream is best. RpcError or a Fault where none has any."""
        flight, pending = self._flight("eth_newPendingTransactionFilter", b"[]")
        self._route.launch(flight, time.monotonic())
        name = orjson.loads(await pending.result())
        return f"{flight.answered_by} {name}"

    async def changes(self, name: str) -> list[Any]:
        """What is new there since it was last asked. RpcError where the upstream has forgotten the filter."""
        index, _, own_name = name.partition(" ")
        flight, pending = self._flight("eth_getFilterChanges", orjson.dumps([own_name]))
        flight.tried = -1  # Every bit: nobody else knows the filter.
        flight.send(self._route.upstreams[int(index)], time.monotonic())
        found = orjson.loads(await pending.result())
        return found if isinstance(found, list) else []

    def _flight(self, method: str, params: bytes) -> tuple[Flight, PendingReply]:
        pending = PendingReply()
        flight = Flight(self._route, self._route.policies[method], params, pending, time.monotonic())
        pending.flight = flight
        return flight, pending
