"""POST /v1/rpc/{chain}/{network}, for whatever the hot path hands over."""

from __future__ import annotations

import asyncio
import re
import time

from aiohttp import web

from proxy.chains.registry import Registry
from proxy.core import jsonrpc
from proxy.core.access import Key
from proxy.core.jsonrpc import Call, Malformed
from proxy.errors import Fault, InvalidRequest, NotFound
from proxy.services.admission import Admission
from proxy.services.rpc.calls import Batch, Pending, Rpc, RpcError
from proxy.services.rpc.networks import ANY_SCOPE, Networks, Route
from proxy.web.door import Visitor
from proxy.web.gate import CACHE, UNITS, UPSTREAM, Gate

_NAME = re.compile(r"[a-z0-9-]{1,40}/[a-z0-9-]{1,40}", re.ASCII)


class RpcHandler:
    def __init__(
        self,
        gate: Gate,
        admission: Admission,
        chains: Registry,
        networks: Networks,
        rpc: Rpc,
        *,
        shows_upstream: bool = False,
    ) -> None:
        self._gate = gate
        self._admission = admission
        self._chains = chains
        self._networks = networks
        self._rpc = rpc
        self._shows_upstream = shows_upstream

    async def answer(self, request: web.Request) -> web.StreamResponse:
        key = self._gate.authenticate(request, "rpc_call")
        route = self._route(key, request.match_info["chain"], request.match_info["network"])
        body = await self._gate.read_body(request)
        fresh = "no-cache" in request.headers.get("Cache-Control", "").lower()
        try:
            if jsonrpc.is_batch(body):
                reply = await self._batch(request, route, key, jsonrpc.parse_batch(body), fresh=fresh)
            else:
                reply = await self._single(request, route, key, jsonrpc.parse(body), fresh=fresh)
        except Malformed as exc:
            raise InvalidRequest(exc.message, details={"rpc_code": exc.code}) from None
        if not reply:
            return web.Response(status=204)
        return web.Response(body=reply, content_type="application/json")

    def _route(self, key: Key, chain: str, name: str) -> Route:
        network = self._chains.find(chain, name)
        if network is None:
            # Only what could be a name is repeated: a key may stand in a path by mistake.
            named = f" {chain}/{name}" if _NAME.fullmatch(f"{chain}/{name}") else ""
            raise NotFound(f"there is no network{named}")
        if refusal := self._admission.may(key, ANY_SCOPE, network):
            raise refusal
        route = self._networks.find(network)
        if route is None:
            raise NotFound(f"the network {network.id} is known, but no upstream is configured for it")
        return route

    async def _single(self, request: web.Request, route: Route, key: Key, call: Call, *, fresh: bool) -> bytes:
        pending = Pending()
        began = time.monotonic()
        self._rpc.ask(pending, route, key, call, began, fresh=fresh)
        try:
            try:
                reply = jsonrpc.result_reply(call[2], await _unless_left(request, pending))
                outcome = "results"
            except RpcError as exc:
                reply = jsonrpc.error_reply(call[2], exc.error)
                outcome = "errors"
        except Fault as fault:
            self._rpc.refund(key, fault, 1, pending.units)
            pending.units = 0
            pending.count("faults", time.monotonic() - began)
            raise
        pending.count(outcome, time.monotonic() - began)
        request[UNITS] = pending.units
        request[CACHE] = pending.cache
        if self._shows_upstream and pending.flight is not None:
            request[UPSTREAM] = pending.flight.answered_label
        return reply if call[2] else b""

    async def _batch(
        self, request: web.Request, route: Route, key: Key, items: list[Call | Malformed], *, fresh: bool
    ) -> bytes:
        pending = Pending()

        def done(batch: Batch) -> None:
            request[UNITS] = self._rpc.settle_batch(key, batch)
            pending.on_result(batch.body())

        asked = self._rpc.ask_batch(items, route, key, time.monotonic(), done, fresh=fresh)
        if isinstance(asked, Fault):
            raise asked
        try:
            return await _unless_left(request, pending)
        except asyncio.CancelledError:
            asked.leave()
            raise


async def _unless_left(request: web.Request, pending: Pending) -> bytes:
    """What it waits for; a client that leaves first takes its question back, as on the hot path."""
    visitor = request.protocol
    if not isinstance(visitor, Visitor):
        return await pending.result()
    visitor.on_lost = pending.future.cancel
    try:
        return await pending.result()
    finally:
        visitor.on_lost = None
