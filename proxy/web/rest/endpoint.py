"""What stands around every REST operation, so that a handler holds only its own idea.

In this order: the key, its scope, the price, then the path, the query and the body, each checked by the contract. An answer is
data; it becomes JSON here. A call that we fail, or refuse, costs nothing; one that was asked wrongly costs one unit.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from proxy.chains.registry import Network
from proxy.core import access
from proxy.core.access import Key
from proxy.core.paging import Page
from proxy.core.usage import Tally
from proxy.errors import Fault, Forbidden, InternalError
from proxy.services.accounts.admission import Admission
from proxy.web.api_spec import ApiOperation, ApiSpec
from proxy.web.gate import CACHE, UNITS, Gate
from proxy.web.network_resolver import NetworkResolver
from proxy.web.reply import json_reply

# What a request costs that was asked wrongly.
UNITS_OF_AN_ERROR = 1


@dataclass(frozen=True, slots=True)
class RestRequest:
    """A request, checked: its values have the types and the bounds that the contract gives them."""

    key: Key
    scopes: int
    path: Mapping[str, str]
    query: Mapping[str, Any]
    body: Any
    where: NetworkResolver
    # The networks that it was found to mean: the first is what it is counted under.
    meant: list[str] = field(default_factory=list)

    def network(self, word: str | None = None) -> Network:
        """The network that the path means, or the given word."""
        found = self.where.network(self.key, self.scopes, word or self.path["chain"])
        self.meant.append(found.id)
        return found

    @property
    def page(self) -> Page:
        return Page(self.query["page"], self.query["limit"])


@dataclass(frozen=True, slots=True)
class RestReply:
    """What a handler has to say that is more than data: a status, or how it came by it."""

    data: Any
    status: int = 200
    cache: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)


RestHandler = Callable[[RestRequest], Awaitable[Any]]
# Where a request of a key is counted, by its network and operation.
OperationTally = Callable[[Key, str, str], Tally]


class RestEndpoints:
    def __init__(
        self,
        gate: Gate,
        admission: Admission,
        contract: ApiSpec,
        prices: Mapping[str, int],
        where: NetworkResolver,
        *,
        count: OperationTally,
        large_body: int = 0,
    ) -> None:
        """`large_body`: the most bytes of a body, for operations that say that theirs may be large."""
        self._large_body = large_body
        self._count = count
        self._gate = gate
        self._admission = admission
        self._contract = contract
        self._prices = prices
        self._where = where

    def handlers(
        self, answers: Mapping[str, RestHandler]
    ) -> dict[str, Callable[[web.Request], Awaitable[web.Response]]]:
        """By the operation's id, what aiohttp calls."""
        return {name: self._handler(self._contract.operations[name], answer) for name, answer in answers.items()}

    def _handler(
        self, operation: ApiOperation, answer: RestHandler
    ) -> Callable[[web.Request], Awaitable[web.Response]]:
        units = self._prices[operation.id]
        scopes = access.SCOPE_BIT[operation.scope]

        async def handle(request: web.Request) -> web.Response:
            key = self._gate.authenticate(request, operation.id)
            began, meant, outcome = time.monotonic(), list[str](), "faults"
            try:
                refusal = self._admission.may(key, scopes) or self._admission.charge(key, 1, units, began)
                if refusal is not None:
                    raise refusal
                try:
                    found = await answer(await self._read(request, operation, key, scopes, meant))
                except Fault as fault:
                    request[UNITS] = self._settle(key, units, fault)
                    raise
                request[UNITS] = units
                outcome = "results"
                return _reply(request, found if isinstance(found, RestReply) else RestReply(found))
            finally:
                tally = self._count(key, meant[0] if meant else "", operation.id)
                tally.count(outcome, request.get(CACHE, ""), request.get(UNITS, 0), time.monotonic() - began)

        return handle

    async def _read(
        self, request: web.Request, operation: ApiOperation, key: Key, scopes: int, meant: list[str]
    ) -> RestRequest:
        path = operation.check_path(request.match_info)
        query = operation.check_query(request.query)
        body = None
        if operation.body is not None:
            larger = self._large_body if operation.large_body else 0
            body = operation.check_body(await self._gate.read_body(request, larger=larger))
        return RestRequest(key, scopes, path, query, body, self._where, meant)

    def _settle(self, key: Key, units: int, fault: Fault) -> int:
        """What a request costs that ended in a fault."""
        if isinstance(fault, InternalError | Forbidden):
            self._admission.refund(key, 1, units)
            return 0
        self._admission.refund(key, 0, units - UNITS_OF_AN_ERROR)
        return UNITS_OF_AN_ERROR


def _reply(request: web.Request, answer: RestReply) -> web.Response:
    if answer.cache:
        request[CACHE] = answer.cache
    return json_reply(answer.data, status=answer.status, headers=answer.headers)
