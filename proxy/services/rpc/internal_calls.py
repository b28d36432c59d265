"""Our own questions to a network, as data: what the services around JSON-RPC ask with.

They take the same upstreams, retries and health as callers' calls, but no admission and no price. Results are decoded; integers
beyond 64 bits do not occur in them as numbers, because the families write those as text.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

import orjson

from proxy.chains.registry import Network
from proxy.errors import NotFound
from proxy.services.rpc.calls import PendingReply, Rpc, RpcError
from proxy.services.rpc.method_policy import MethodPolicy
from proxy.services.rpc.networks import Networks, Route


class InternalCalls:
    def __init__(self, rpc: Rpc, networks: Networks) -> None:
        self._rpc = rpc
        self._networks = networks

    def __repr__(self) -> str:
        return f"<InternalCalls to {self._networks!r}>"

    async def call(self, network: Network, method: str, *params: Any, fresh: bool = False) -> Any:
        """The result. RpcError for the upstream's error; a Fault where nobody answers."""
        route = self.route(network)
        pending = PendingReply()
        policy = route.policies[method]
        self._rpc.answer(pending, route, None, policy, orjson.dumps(params), time.monotonic(), fresh=fresh)
        return orjson.loads(await pending.result())

    async def call_many(
        self, network: Network, calls: Sequence[tuple[str, Sequence[Any]]], *, fresh: bool = False
    ) -> list[Any]:
        """The results in order, in as few requests as the upstream takes. An error stands in its place as an RpcError."""
        route = self.route(network)
        asked: list[tuple[PendingReply, MethodPolicy, bytes]] = [
            (PendingReply(), route.policies[method], orjson.dumps(params)) for method, params in calls
        ]
        self._rpc.answer_all(asked, route, None, time.monotonic(), fresh=fresh)
        results = await asyncio.gather(*(pending.result() for pending, _, _ in asked), return_exceptions=True)
        return [_decoded(result) for result in results]

    def route(self, network: Network) -> Route:
        route = self._networks.find(network)
        if route is None:
            raise NotFound(f"the network {network.id} is known, but no upstream is configured for it")
        return route


def _decoded(result: bytes | BaseException) -> Any:
    if isinstance(result, RpcError):
        return result
    if isinstance(result, BaseException):
        raise result
    return orjson.loads(result)
