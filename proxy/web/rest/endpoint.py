"""The common part of every REST operation, so that a handler contains only its own logic.

A request passes, in this order: authentication, the scope, the units, then validation of the path, the query and the body
against the API spec. Handlers return data, which is encoded as JSON here. The price covers upstream calls of the same list
price; a request that needs more pays for each of them as it is made (`services/accounts/metering.py`). A request that fails on
our side, or is forbidden or refused, costs no more than the upstream calls that were made for it, and an invalid one at least
one unit.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from aiohttp import web

from proxy.chains.families import family_of
from proxy.chains.registry import Network
from proxy.core import access
from proxy.core.access import Key
from proxy.core.directives import Directives
from proxy.core.paging import Page
from proxy.core.usage import Outcome, outcome_of
from proxy.errors import BehindBlock, DeadlinePassed, Fault
from proxy.services.accounts.action_log import Action, ActionLog, Actor, is_change
from proxy.services.accounts.admission import Admission
from proxy.services.accounts.metering import Meters, meter_of_task
from proxy.services.rpc.calls import PendingReply
from proxy.services.rpc.internal_calls import calls_of_task
from proxy.tasks import min_block_of_task
from proxy.web.api_middleware import ApiMiddleware
from proxy.web.api_spec import ApiOperation, ApiSpec
from proxy.web.changed_objects import NO_CHANGES, ChangedObject, ChangedObjects, Changes
from proxy.web.fault_injection import plan_for
from proxy.web.front.handler_connection import HandlerConnection
from proxy.web.network_resolver import NetworkResolver
from proxy.web.reply import encoded_reply
from proxy.web.request_directives import directives_of, without_directives
from proxy.web.request_state import STATE

# The pause before the data is read again, to find out whether it has reached the block of X-Min-Block: a third of the time
# waited so far, within these bounds.
BLOCK_CHECK_S, LONGEST_CHECK_S = 0.1, 1.0
# Long operations that change nothing, and whose work no other request shares.
_ENDING_WITH_CLIENT = frozenset({"backtest_webhook"})


@dataclass(frozen=True, slots=True)
class RestRequest:
    """A validated request: its values have the types and bounds given in the API spec."""

    key: Key
    scopes: int
    path: Mapping[str, str]
    query: Mapping[str, Any]
    body: Any
    resolver: NetworkResolver
    directives: Directives | None = None
    # Ids of the networks that the request resolved to. Usage is counted under the first.
    resolved: list[str] = field(default_factory=list)

    def network(self, word: str | None = None) -> Network:
        """The network that `word` means for this key, by default the word in the path. Raises if the key may not use it."""
        network = self.resolver.network(self.key, self.scopes, word or self.path["chain"])
        self.resolved.append(network.id)
        return network

    def known_network(self, word: str) -> Network:
        """Like `network`, whether or not the network has an upstream."""
        network = self.resolver.known(self.key, self.scopes, word)
        self.resolved.append(network.id)
        return network

    def require_network(self, network_id: str) -> None:
        """Raise if the key may not use the network. A network that is no longer configured passes."""
        if (network := self.resolver.configured(network_id)) is not None:
            self.network(network.word(live=self.key.live))

    def network_word(self, network_id: str) -> str:
        """The word that means the network for this key. A network that is no longer configured keeps its old name."""
        network = self.resolver.configured(network_id)
        return network_id.replace("/", "-") if network is None else network.word(live=self.key.live)

    def require_contract(self, network: Network, contract: bytes) -> None:
        """Raise if the key may not be used for the contract."""
        addresses = family_of(network).addresses
        self._refuse_contracts([addresses.fold(addresses.show(contract))])

    def require_all_contracts(self) -> None:
        """Raise if the key is limited to some contracts."""
        self._refuse_contracts(None)

    def _refuse_contracts(self, contracts: Sequence[str] | None) -> None:
        limits = self.key.restrictions
        if limits is not None and (refusal := limits.contract_refusal(contracts)) is not None:
            raise refusal

    @property
    def min_block(self) -> int:
        """The result must be from this block or a later one; 0 for any."""
        return self.directives.min_block if self.directives is not None else 0

    @property
    def page(self) -> Page:
        return Page(self.query["page"], self.query["limit"])

    def listed(self, name: str, items: Sequence[Any], total: int) -> dict[str, Any]:
        """The body of a list: one page of the items, under their name."""
        return {name: items, "page": self.page.number, "total": total}


@dataclass(frozen=True, slots=True)
class RestReply:
    """The result of a handler that sets more than the data: a status, the cache outcome, headers, or for the log of actions the
    name of the subject if the path does not have it, and what was changed if no operation reads that."""

    data: Any
    status: int = 200
    cache: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)
    subject: str = ""
    changes: Changes = NO_CHANGES


RestHandler = Callable[[RestRequest], Awaitable[Any]]


def data_of(result: Any) -> Any:
    return result.data if isinstance(result, RestReply) else result


def changes_of(changed: ChangedObject | None, before: Mapping[str, Any] | None, result: Any) -> Changes:
    """The objects that a handler with this result has changed."""
    if isinstance(result, RestReply) and result.changes != NO_CHANGES:
        return result.changes
    return NO_CHANGES if changed is None else changed.changes(before, data_of(result))


class RestEndpoints:
    def __init__(
        self,
        api: ApiMiddleware,
        admission: Admission,
        meters: Meters,
        spec: ApiSpec,
        prices: Mapping[str, int],
        resolver: NetworkResolver,
        *,
        actions: ActionLog,
        large_body: int = 0,
    ) -> None:
        """`actions`: the log of changes that the account's holder could make too. `large_body`: the largest body, in bytes, of
        operations marked `x-large-body` in the API spec."""
        self._large_body = large_body
        self._actions = actions
        self._api = api
        self._admission = admission
        self._meters = meters
        self._spec = spec
        self._prices = prices
        self._resolver = resolver
        self._changed = ChangedObjects(spec)
        self._handlers: dict[str, RestHandler] = {}

    def wrapped(
        self, handlers: Mapping[str, RestHandler]
    ) -> dict[str, Callable[[web.Request], Awaitable[web.Response]]]:
        """The aiohttp handlers, by operation id."""
        self._handlers |= handlers
        return {name: self._wrap(self._spec.operations[name], handler) for name, handler in handlers.items()}

    def _wrap(self, operation: ApiOperation, handler: RestHandler) -> Callable[[web.Request], Awaitable[web.Response]]:
        units = self._prices[operation.id]
        # An operation without a scope is open to every key.
        scopes = access.SCOPE_BIT.get(operation.scope, access.ALL_SCOPES)
        is_of_account = operation.session is not None or f"account_{operation.id}" in self._spec.operations
        is_logged = is_of_account and is_change(operation.id, operation.method)
        changed = self._changed.of(operation) if is_logged else None

        async def handle(request: web.Request) -> web.Response:
            key = self._api.authentication.authenticate(request, operation.id)
            began, resolved = time.monotonic(), list[str]()
            outcome: Outcome = "faults"
            state, meter = request[STATE], None
            state.calls = calls = list[PendingReply]()
            calls_of_task.set(calls)
            try:
                refusal = self._admission.authorize(key, scopes) or await self._admission.admit(key, 1, units, began)
                if refusal is not None:
                    outcome = outcome_of(refusal)
                    raise refusal
                meter = self._meters.open(key, prepaid=units)
                meter_of_task.set(meter)
                try:
                    asked = await self._read(request, operation, key, scopes, resolved)
                    if (plan := plan_for(asked.directives)) is not None:
                        await self._api.faults.before(plan, request, key.account.id)
                    before = await self._before(changed, asked)
                    with _ending_with_client(request, operation):
                        result = await _in_time(operation, handler, asked)
                    if is_logged:
                        await self._record(request, operation, asked, result, changes_of(changed, before, result))
                except Fault as fault:
                    outcome = outcome_of(fault)
                    self._api.accounting.refund_unused(meter, fault)
                    raise
                except asyncio.CancelledError:
                    outcome = "errors"  # The client has left.
                    raise
                outcome = "results"
                if isinstance(result, web.Response):
                    return result
                reply = await _reply(request, result if isinstance(result, RestReply) else RestReply(result))
                if plan is None:
                    return reply
                body: bytes = reply.body  # type: ignore[assignment]
                return self._api.faults.after(plan, request, key.account.id, body, status=reply.status)
            finally:
                took_s = time.monotonic() - began
                if meter is not None:
                    state.units, state.cost = meter.settle(units), meter.cost
                    took_s -= meter.waited_s
                state.network = resolved[0] if resolved else ""
                tally = self._api.accounting.of_operation(key, state.network, operation.id)
                tally.count(outcome, state.cache, state.units or 0, took_s)

        return handle

    async def _before(self, changed: ChangedObject | None, asked: RestRequest) -> Mapping[str, Any] | None:
        """The object that a request is about to change; None for a new one, and for one that cannot be read."""
        if changed is None or changed.is_created or (read := self._handlers.get(changed.read.id)) is None:
            return None
        try:
            result = await read(replace(asked, query=changed.read.default_query(), body=None, resolved=[]))
        except Fault:
            return None
        before: Mapping[str, Any] = data_of(result)
        return before

    async def _record(
        self, request: web.Request, operation: ApiOperation, asked: RestRequest, result: Any, changes: Changes
    ) -> None:
        subject, address = subject_of(result, asked.path), self._api.authentication.address_of(request)
        done = Action(operation.id, subject, address, *changes)
        await self._actions.record(asked.key.account.id, Actor("key", asked.key.id), done)

    async def _read(
        self, request: web.Request, operation: ApiOperation, key: Key, scopes: int, resolved: list[str]
    ) -> RestRequest:
        request[STATE].directives = directives = directives_of(request, key)
        path, query = operation.check_parameters(request.match_info, without_directives(request.query))
        body = None
        if operation.body is not None:
            larger = self._large_body if operation.large_body else 0
            body = await self._api.bodies.read_checked(request, operation, larger=larger)
        return RestRequest(key, scopes, path, query, body, self._resolver, directives, resolved=resolved)


@contextmanager
def _ending_with_client(request: web.Request, operation: ApiOperation) -> Iterator[None]:
    """Cancel such an operation if its client leaves: no one would see its result."""
    connection, task = request.protocol, asyncio.current_task()
    if operation.id not in _ENDING_WITH_CLIENT or task is None or not isinstance(connection, HandlerConnection):
        yield
        return
    connection.on_lost = task.cancel
    try:
        yield
    finally:
        connection.on_lost = None


async def _in_time(operation: ApiOperation, handler: RestHandler, asked: RestRequest) -> Any:
    """Run the handler within the request's own deadline. Only reads have one: a change must not be cancelled half-way."""
    timeout_ms = asked.directives.timeout_ms if asked.directives is not None else 0
    if not timeout_ms or operation.method != "GET":
        return await _at_block(handler, asked)
    deadline = asyncio.timeout(timeout_ms / 1000)
    try:
        async with deadline:
            return await _at_block(handler, asked)
    except TimeoutError:
        if not deadline.expired():
            raise
        raise DeadlinePassed(f"there was no result within {timeout_ms} ms, the request's X-Timeout-Ms") from None


async def _at_block(handler: RestHandler, asked: RestRequest) -> Any:
    """Run the handler until its result is as new as X-Min-Block requires. A result without a block is taken as it is."""
    min_block_of_task.set(asked.min_block)
    result = await handler(asked)
    if not asked.min_block:
        return result
    assert asked.directives is not None
    began, most_s = time.monotonic(), asked.directives.min_block_wait
    while 0 < (block := _block_of(result)) < asked.min_block:
        waited_s = time.monotonic() - began
        if waited_s >= most_s:
            raise BehindBlock("the data", asked.min_block, block)
        await asyncio.sleep(min(max(BLOCK_CHECK_S, waited_s / 3), LONGEST_CHECK_S))
        result = await handler(asked)
    return result


def _block_of(result: Any) -> int:
    """The block that the result belongs to; 0 if it names none. Gas prices have it as `block_number`."""
    data = data_of(result)
    block = data.get("as_of_block", data.get("block_number")) if isinstance(data, dict) else None
    return block if isinstance(block, int) else 0


async def _reply(request: web.Request, reply: RestReply) -> web.Response:
    request[STATE].block, request[STATE].cache = _block_of(reply), reply.cache
    return await encoded_reply(reply.data, status=reply.status, headers=reply.headers)


def subject_of(result: Any, path: Mapping[str, str]) -> str:
    """The subject of a change in the account's log: named by the handler or the path, or the id of a created object."""
    if not isinstance(result, RestReply):
        return next(iter(path.values()), "")
    data = result.data if isinstance(result.data, Mapping) else {}
    return result.subject or next(iter(path.values()), "") or str(data.get("id", ""))
