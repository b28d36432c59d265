"""JSON-RPC calls: each one checked, priced and sent to an upstream of its network.

A single call that is refused is an HTTP error; inside a batch every item is checked on its own and a refused one has its
own JSON-RPC error while the others run. Nothing is taken from the key before the whole request is known to be affordable.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from proxy.chains.families import FAMILIES
from proxy.chains.family import Method
from proxy.chains.registry import Network
from proxy.core import access, jsonrpc
from proxy.core.access import Key
from proxy.core.jsonrpc import Call, Malformed
from proxy.core.pricing import Prices
from proxy.errors import Fault, Forbidden, InternalError, InvalidRequest, NotFound, UpstreamTimeout
from proxy.services.admission import Admission
from proxy.wire.upstream import Upstream, UpstreamClient, UpstreamFailed

# A call that takes longer than this is answered for the upstream.
CALL_TIMEOUT_S = 30.0

READ = access.SCOPE_BIT["rpc:read"]
WRITE = access.SCOPE_BIT["rpc:write"]
_SCOPE_OF = {"read": READ, "filter": READ, "subscription": READ, "write": WRITE}


@dataclass(frozen=True, slots=True)
class Answer:
    """The reply's bytes, empty where only notifications were sent, and what it cost."""

    body: bytes
    units: int
    requests: int = 1


@dataclass(frozen=True, slots=True)
class Planned:
    """One call that passed every check."""

    call: Call
    method: Method
    units: int


class Rpc:
    def __init__(
        self,
        admission: Admission,
        client: UpstreamClient,
        *,
        upstreams: Mapping[str, Sequence[Upstream]],
        prices: Prices,
    ) -> None:
        self._admission = admission
        self._client = client
        self._upstreams = upstreams
        self._prices = prices
        self._ids = itertools.count(1)

    async def answer(self, key: Key, network: Network, body: bytes, now: float) -> Answer:
        """The reply to one HTTP body, or a Fault."""
        if not self._upstreams.get(network.id):
            raise NotFound(f"the network {network.id} is known, but no upstream is configured for it")
        try:
            if jsonrpc.is_batch(body):
                return await self._batch(key, network, jsonrpc.parse_batch(body), now)
            return await self._single(key, network, jsonrpc.parse(body), now)
        except Malformed as exc:
            raise InvalidRequest(exc.message, details={"rpc_code": exc.code}) from None

    async def _single(self, key: Key, network: Network, call: Call, now: float) -> Answer:
        planned = self._plan(key, network, call)
        if isinstance(planned, Fault):
            raise planned
        if isinstance(planned, bytes):
            if refusal := self._admission.charge(key, 1, 1, now):
                raise refusal
            return Answer(
                b"" if jsonrpc.is_notification(call) else jsonrpc.error_reply(jsonrpc.id_of(call), planned), 1
            )
        if refusal := self._admission.charge(key, 1, planned.units, now):
            raise refusal
        try:
            reply = await self._forward(network, planned)
        except InternalError:
            self._admission.refund(key, 1, planned.units)
            raise
        return Answer(b"" if jsonrpc.is_notification(call) else reply, planned.units)

    async def _batch(self, key: Key, network: Network, items: Sequence[Call | Malformed], now: float) -> Answer:
        plans = [item if isinstance(item, Malformed) else self._plan(key, network, item) for item in items]
        units = sum(plan.units if isinstance(plan, Planned) else 1 for plan in plans)
        if refusal := self._admission.charge(key, len(items), units, now):
            raise refusal
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(self._item(key, network, item, plan)) for item, plan in zip(items, plans, strict=True)
            ]
        replies = [reply for task in tasks if (reply := task.result())]
        return Answer(b"[" + b",".join(replies) + b"]" if replies else b"", units, len(items))

    async def _item(
        self, key: Key, network: Network, item: Call | Malformed, plan: Planned | Fault | bytes | Malformed
    ) -> bytes:
        """One item's reply: empty for a notification."""
        if isinstance(item, Malformed):
            return jsonrpc.error_reply(item.id, jsonrpc.error(item.code, item.message))
        match plan:
            case Planned():
                try:
                    reply = await self._forward(network, plan)
                except InternalError as exc:
                    self._admission.refund(key, 1, plan.units)
                    reply = jsonrpc.error_reply(jsonrpc.id_of(item), jsonrpc.error(jsonrpc.INTERNAL_ERROR, exc.message))
            case bytes():
                reply = jsonrpc.error_reply(jsonrpc.id_of(item), plan)
            case Fault():
                reply = jsonrpc.error_reply(jsonrpc.id_of(item), jsonrpc.error(jsonrpc.UNAUTHORIZED, plan.message))
            case _:
                raise AssertionError(plan)
        return b"" if jsonrpc.is_notification(item) else reply

    def _plan(self, key: Key, network: Network, call: Call) -> Planned | Fault | bytes:
        """The call with its price; or the HTTP error that refuses it; or the JSON-RPC error that answers it."""
        method = FAMILIES[network.family].methods.get(call.method)
        if method is None:
            return jsonrpc.error(
                jsonrpc.METHOD_NOT_FOUND, f"the method {call.method} does not exist or is not available"
            )
        if not key.may(_SCOPE_OF[method.kind]):
            return Forbidden(f"this API key lacks the scope {access.scope_names(_SCOPE_OF[method.kind])[0]}")
        if method.kind == "subscription":
            return jsonrpc.error(jsonrpc.METHOD_NOT_FOUND, f"the method {call.method} needs a WebSocket")
        return Planned(call, method, self._prices.of_family(network.family)[call.method])

    async def _forward(self, network: Network, planned: Planned) -> bytes:
        upstream = self._upstreams[network.id][0]
        call_id = next(self._ids)
        body = jsonrpc.request(call_id, planned.call.method, planned.call.params)
        try:
            reply = jsonrpc.read_reply(await self._client.post(upstream, body, timeout_s=CALL_TIMEOUT_S), call_id)
        except UpstreamFailed as exc:
            kind = UpstreamTimeout if exc.reason == "time-out" else InternalError
            raise kind(f"no upstream of {network.id} answered the call") from exc
        except ValueError as exc:
            raise InternalError(f"the upstream of {network.id} sent no valid reply") from exc
        caller = jsonrpc.id_of(planned.call)
        if reply.error:
            return jsonrpc.error_reply(caller, bytes(reply.error))
        return jsonrpc.result_reply(caller, bytes(reply.result))
