"""Filters of pending transactions at a network's upstreams. A filter exists only at the upstream that created it, so its
name includes the upstream."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
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
        """Return the hashes of the transactions since the last call. Raises RpcError if the filter has expired."""
        own_name = name.partition(" ")[2]
        hashes = orjson.loads(await self._call(name, "eth_getFilterChanges", own_name))
        return hashes if isinstance(hashes, list) else []

    async def transactions(self, name: str, hashes: Sequence[str]) -> list[bytes]:
        """Return the JSON of each transaction, as the filter's upstream has it: others may not know it yet. Gone
        ones are null."""
        return [*await asyncio.gather(*(self._call(name, "eth_getTransactionByHash", each) for each in hashes))]

    async def _call(self, name: str, method: str, param: str) -> bytes:
        upstream = self._route.upstreams[int(name.partition(" ")[0])]
        policy = self._route.policies[method]
        pending = call_upstream(self._route.dispatcher, policy, orjson.dumps([param]), upstream=upstream)
        return await pending.result()
