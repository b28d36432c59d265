"""POST /v1/paymaster/{chain}/{network}: the two methods of ERC-7677, so that wallet libraries need only a URL.

If the policy refuses, the reply is a JSON-RPC error in a 200, because libraries retry after a 403. Batches are answered item by
item.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Mapping
from typing import Any

import orjson
from aiohttp import web

from proxy.chains.evm.user_operation import BadOperation
from proxy.chains.registry import Network
from proxy.core import access, jsonrpc
from proxy.core.access import Key
from proxy.core.batch_reader import read_batch
from proxy.core.bounded_json import RefusedJson, parse_bounded
from proxy.core.jsonrpc import MalformedCall, RawCall
from proxy.core.pricing import UNITS_OF_AN_ERROR, request_units
from proxy.core.usage import Outcome, outcome_of
from proxy.errors import Fault, Forbidden, InvalidRequest, NotFound
from proxy.services.accounts.admission import Admission
from proxy.services.accounts.metering import Meters, meter_of_task
from proxy.services.rpc.rpc_errors import rpc_error_of
from proxy.services.rpc.rpc_service import fault_of
from proxy.services.sponsor.sponsorship import SponsorRequest, SponsorService, Sponsorship
from proxy.web.api_middleware import ApiMiddleware
from proxy.web.fault_injection import plan_for
from proxy.web.network_resolver import NetworkResolver
from proxy.web.request_directives import directives_of
from proxy.web.request_state import STATE
from proxy.web.rest.gas import fields_of

STUB = "pm_getPaymasterStubData"
SCOPES = access.SCOPE_BIT["gas:manage"]
# Each item is a signature and a reservation: batches are smaller than those of plain calls.
MAX_BATCH = 100
# ERC-7769: "paymaster rejected".
REFUSED = -32501
# The names that libraries use for a policy in the context. The first is documented.
_POLICY = ("policyId", "policy_id", "sponsorshipPolicyId")
_ID = re.compile(r"[A-Za-z0-9_-]{1,128}", re.ASCII)


class PaymasterHandler:
    def __init__(
        self,
        api: ApiMiddleware,
        resolver: NetworkResolver,
        admission: Admission,
        meters: Meters,
        sponsoring: SponsorService,
        prices: Mapping[str, int],
    ) -> None:
        self._api = api
        self._resolver = resolver
        self._admission = admission
        self._meters = meters
        self._sponsoring = sponsoring
        self._prices = prices

    async def answer(self, request: web.Request) -> web.StreamResponse:
        key = self._api.authentication.authenticate(request, "paymaster_call")
        route = self._resolver.route(key, SCOPES, request.match_info["chain"], request.match_info["network"])
        body = await self._api.bodies.read_body(request)
        state = request[STATE]
        state.units, state.network = request_units(body), route.network.id
        if refusal := await self._admission.admit(key, 0, state.units, time.monotonic()):
            raise refusal
        state.directives = directives = directives_of(request, key)
        if (plan := plan_for(directives)) is not None:
            if refusal := await self._admission.admit(key, 1, UNITS_OF_AN_ERROR, time.monotonic()):
                raise refusal
            await self._api.faults.before(plan, request, key.account.id)
        try:
            if jsonrpc.is_batch(body):
                reply = await self._batch(request, key, route.network, read_batch(body, MAX_BATCH))
            else:
                reply = await self._item(request, key, route.network, jsonrpc.parse(body), alone=True)
        except MalformedCall as exc:
            refusal = await self._admission.admit(key, 1, UNITS_OF_AN_ERROR, time.monotonic())
            raise refusal or fault_of(exc) from None
        if not reply:
            return web.Response(status=204)
        if plan is not None:
            return self._api.faults.after(plan, request, key.account.id, reply)
        return web.Response(body=reply, content_type="application/json")

    async def _batch(
        self, request: web.Request, key: Key, network: Network, items: list[RawCall | MalformedCall]
    ) -> bytes:
        replies = await asyncio.gather(*(self._item(request, key, network, item) for item in items))
        present = [reply for reply in replies if reply]
        return b"[%b]" % b",".join(present) if present else b""

    async def _item(
        self, request: web.Request, key: Key, network: Network, item: RawCall | MalformedCall, *, alone: bool = False
    ) -> bytes:
        """The reply, empty for a notification. A single call that is not admitted raises its refusal."""
        if isinstance(item, MalformedCall):
            return await self._mistake(request, key, item.id, jsonrpc.error(item.code, item.message))
        method, params, id_ = item
        state, accounting = request[STATE], self._api.accounting
        units, began = self._prices.get(method), time.monotonic()
        if units is None:
            error = jsonrpc.error(jsonrpc.METHOD_NOT_FOUND, f"the method {method} does not exist or is not available")
            return await self._mistake(request, key, id_, error, alone=alone)
        limits = key.restrictions
        refused = None if limits is None else limits.method_refusal(method)
        if refusal := refused or await self._admission.admit(key, 1, units, began):
            accounting.of_operation(key, network.id, method).count(outcome_of(refusal), "", 0, 0.0)
            if alone:
                raise refusal
            return jsonrpc.error_reply(id_, rpc_error_of(refusal)) if id_ else b""
        meter = self._meters.open(key, prepaid=units)
        outcome: Outcome = "results"
        meter_of_task.set(meter)
        try:
            fields = await self._fields(key, network, method, params)
        except Fault as fault:
            outcome = outcome_of(fault)
            accounting.refund_unused(meter, fault)
            state.refused(fault)
            return jsonrpc.error_reply(id_, _error_of(fault)) if id_ else b""
        finally:
            cost = meter.settle(units)
            accounting.of_operation(key, network.id, method).count(
                outcome, "", cost, time.monotonic() - began - meter.waited_s
            )
            state.units, state.cost = (state.units or 0) + cost, state.cost + meter.cost
        return jsonrpc.result_reply(id_, orjson.dumps(fields)) if id_ else b""

    async def _mistake(self, request: web.Request, key: Key, id_: bytes, error: bytes, *, alone: bool = False) -> bytes:
        """The reply to a call that is malformed or unknown, which costs as much as for other JSON-RPC calls."""
        refusal = await self._admission.admit(key, 1, UNITS_OF_AN_ERROR, time.monotonic())
        if refusal is None:
            request[STATE].units = (request[STATE].units or 0) + UNITS_OF_AN_ERROR
        elif alone:
            raise refusal
        else:
            error = rpc_error_of(refusal)
        return jsonrpc.error_reply(id_, error) if id_ else b""

    async def _fields(self, key: Key, network: Network, method: str, params: bytes) -> dict[str, Any]:
        try:
            request = await self._read(key, network, params, draft=method == STUB)
        except BadOperation as exc:
            raise InvalidRequest.naming(str(exc)) from None
        if method == STUB:
            return {**_of_version(await self._sponsoring.stub(request)), "isFinal": False}
        return _of_version(await self._sponsoring.sponsor(request))

    async def _read(self, key: Key, network: Network, params: bytes, *, draft: bool) -> SponsorRequest:
        given = _params(params)
        if len(given) not in (3, 4):
            raise BadOperation("params: must contain the operation, the entry point, the chain id and the context")
        operation, entry_point, chain_id = given[:3]
        context = given[3] if len(given) == 4 else None
        if not isinstance(operation, dict):
            raise BadOperation("params.0: must be the operation as an object")
        if not isinstance(entry_point, str):
            raise BadOperation("params.1: must be the entry point's address")
        if _number(chain_id) != network.facts.chain_id:
            raise BadOperation(f"params.2: the chain id of {network.id} is {hex(network.facts.chain_id or 0)}")
        policy_id = (
            next((context[name] for name in _POLICY if name in context), None) if isinstance(context, dict) else None
        )
        if not isinstance(policy_id, str) or not _ID.fullmatch(policy_id):
            raise BadOperation('params.3: must be {"policyId": "gp_..."}, the policy that pays')
        return await self._sponsoring.read(
            key, network, operation, policy_id=policy_id, entry_point=entry_point, draft=draft
        )


def _params(raw: bytes) -> list[Any]:
    try:
        params = parse_bounded(raw)
    except RefusedJson as exc:
        raise BadOperation(f"params: {exc}") from None
    if not isinstance(params, list):
        raise BadOperation("params: must be an array")
    return params


def _number(value: Any) -> int | None:
    try:
        return int(value, 16) if isinstance(value, str) else None
    except ValueError:
        return None


def _of_version(sponsorship: Sponsorship) -> dict[str, Any]:
    """The members for the EntryPoint's version (ERC-7677): 0.6 has one, later ones have several."""
    fields = fields_of(sponsorship)
    both = fields.pop("paymasterAndData", None)
    return {"paymasterAndData": both} if both is not None else dict(fields)


def _error_of(fault: Fault) -> bytes:
    match fault:
        case Forbidden():
            code = REFUSED
        case InvalidRequest() | NotFound():
            code = jsonrpc.INVALID_PARAMS
        case _:
            return rpc_error_of(fault)
    return jsonrpc.error(code, fault.message, fault.details)
