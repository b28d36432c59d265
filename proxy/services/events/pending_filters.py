"""Filters of pending transactions at a network's upstreams. A filter exists only at the upstream that created it, so its
name includes the upstream."""

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

    async def create(self) -> str:
        """Create a filter at the best upstream. Raises RpcError or a Fault if none supports it."""
        flight, pending = self._flight("eth_newPendingTransactionFilter", b"[]")
        self._route.launch(flight, time.monotonic())
        name = orjson.loads(await pending.result())
        return f"{flight.answered_by} {name}"

    async def changes(self, name: str) -> list[Any]:
        """Return the transactions since the last call. Raises RpcError if the filter has expired."""
        index, _, own_name = name.partition(" ")
        flight, pending = self._flight("eth_getFilterChanges", orjson.dumps([own_name]))
        flight.tried = -1  # All bits set, so that no other upstream is tried: only this one has the filter.
        flight.send(self._route.upstreams[int(index)], time.monotonic())
        found = orjson.loads(await pending.result())
        return found if isinstance(found, list) else []

    def _flight(self, method: str, params: bytes) -> tuple[Flight, PendingReply]:
        pending = PendingReply()
        flight = Flight(self._route, self._route.policies[method], params, pending, time.monotonic())
        pending.flight = flight
        return flight, pending
