"""POST /v1/rpc/{chain}/{network}."""

from __future__ import annotations

import time

from aiohttp import web

from proxy.chains.registry import Registry
from proxy.core import access
from proxy.errors import NotFound
from proxy.services.admission import Admission
from proxy.services.rpc import Rpc
from proxy.web.gate import UNITS, Gate

_SCOPES = access.SCOPE_BIT["rpc:read"] | access.SCOPE_BIT["rpc:write"]


class RpcHandler:
    def __init__(self, gate: Gate, admission: Admission, chains: Registry, rpc: Rpc) -> None:
        self._gate = gate
        self._admission = admission
        self._chains = chains
        self._rpc = rpc

    async def answer(self, request: web.Request) -> web.StreamResponse:
        key = self._gate.authenticate(request, "rpc_call")
        chain, name = request.match_info["chain"], request.match_info["network"]
        network = self._chains.find(chain, name)
        if network is None:
            raise NotFound(f"there is no network {chain}/{name}"[:200])
        if refusal := self._admission.may(key, _SCOPES, network):
            raise refusal
        body = await self._gate.read_body(request)
        answer = await self._rpc.answer(key, network, body, time.monotonic())
        request[UNITS] = answer.units
        headers = {"X-Compute-Units": str(answer.units)}
        if not answer.body:
            return web.Response(status=204, headers=headers)
        return web.Response(body=answer.body, headers=headers, content_type="application/json")
