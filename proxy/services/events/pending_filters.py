"""Filters of pending transactions at a network's upstreams. A filter exists only at the upstream that created it, so its
name includes the upstream."""

from __future__ import annotations

from typing import Any

import orjson

from proxy.services.rpc.calls import call_upstream
from proxy.services.rpc.networks import Route


class PendingFilters:
    def __init__(self, route: Route) -> None:
        self._route = route

    def __repr__(self) -> str:
        return f"<PendingFilters {self._route.network.id}>"

    async def create(self) -> str:
        """Create a filter at the best upstream. Raises RpcError or a Fault if none supports it."""
        policy = self._route.policies["eth_newPendingTransactionFilter"]
        pending = call_upstream(self._route.dispatcher, policy, b"[]")
        name = orjson.loads(await pending.result())
        assert pending.answered_by is not None
        return f"{pending.answered_by.health.index} {name}"

    async def changes(self, name: str) -> list[Any]:
        """Return the transactions since the last call. Raises RpcError if the filter has expired."""
        index, _, own_name = name.partition(" ")
        policy = self._route.policies["eth_getFilterChanges"]
        upstream = self._route.upstreams[int(index)]
        pending = call_upstream(self._route.dispatcher, policy, orjson.dumps([own_name]), upstream=upstream)
        found = orjson.loads(await pending.result())
        return found if isinstance(found, list) else []
