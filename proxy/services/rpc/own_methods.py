"""JSON-RPC methods that Penstock answers itself, from its index and with calls of its own.

They are ordinary methods to everything before: the same keys, scopes, prices, batches and sockets. The forwarder hands such a
call over instead of sending it to an upstream, and this module runs its handler and answers the caller once. The price of the
method covers calls of the same list price; a handler that makes more pays for each of them as it is made.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import orjson

from proxy.chains.registry import Network
from proxy.core import jsonrpc
from proxy.core.access import Key
from proxy.core.bounded_json import RefusedJson, parse_bounded
from proxy.core.directives import Directives
from proxy.core.fair_permits import FairPermits
from proxy.errors import DeadlinePassed, Fault, InternalError, InvalidRequest, RateLimited
from proxy.services.accounts.metering import Meter, Meters, meter_of_task
from proxy.services.rpc.calls import RpcError
from proxy.services.rpc.flights import Call, Caller, next_id
from proxy.services.rpc.method_policy import MethodPolicy
from proxy.services.rpc.networks import Route
from proxy.tasks import Tasks, client_of_task, min_block_of_task
from proxy.turn_queue import TurnQueue, turns_of_task

log = logging.getLogger("penstock.own_methods")

# Calls that run at a time, in all and of one account, and how long one may take.
MOST_RUNNING, MOST_OF_ACCOUNT = 1024, 64
LONGEST_S = 30.0
# Larger params would take the loop's time: these take up to a millisecond. The longest that SDKs send are 1,500 addresses.
MOST_PARAMS = 73_728
# How long it may wait for its account's units.
PAYING_S = 0.8 * LONGEST_S

OwnMethod = Callable[[Network, list[Any]], Awaitable[Any]]


class OwnMethods:
    def __init__(self, tasks: Tasks, meters: Meters, turns: TurnQueue) -> None:
        self._tasks = tasks
        self._turns = turns
        self._meters = meters
        self._permits = FairPermits(MOST_RUNNING, per_client=MOST_OF_ACCOUNT)
        self._handlers: dict[str, OwnMethod] = {}

    def __repr__(self) -> str:
        return f"<OwnMethods {self._permits!r}>"

    def register(self, handlers: Mapping[str, OwnMethod]) -> None:
        """Answer these methods, by name. They are built after the data plane, whose calls they use."""
        self._handlers |= handlers

    def start(
        self, call: tuple[Caller, MethodPolicy, bytes], route: Route, *, key: Key, directives: Directives | None
    ) -> None:
        """Run the method's handler, and answer the caller later."""
        _, policy, params = call
        handler = self._handlers[policy.method.name]
        self.answer(call, route, lambda: _result(handler, route.network, params), key=key, directives=directives)

    def answer(
        self,
        call: tuple[Caller, MethodPolicy, bytes],
        route: Route,
        work: Callable[[], Awaitable[bytes]],
        *,
        key: Key,
        directives: Directives | None,
        late: Callable[[Fault], Fault] = lambda fault: fault,
    ) -> None:
        """Answer the caller later, with the result of this work as JSON. `late`: the fault if the work takes too long, made of
        the usual one."""
        caller, policy, params = call
        client = key.account.id
        # It is never sent: it has the block of the reply, for the request's record.
        flight = route.dispatcher.new_flight(Call(policy, params, client=client), caller, time.monotonic())
        caller.on_flight(flight)
        if not self._permits.take(client):
            caller.on_fault(RateLimited("too many of these calls at a time: make fewer", retry_after_s=1))
            return
        meter = self._meters.open(key, prepaid=caller.units, within_s=PAYING_S)
        self._tasks.start_once("own method", lambda: self._run(call, work, meter, directives, late), of=next_id())

    async def _run(
        self,
        call: tuple[Caller, MethodPolicy, bytes],
        work: Callable[[], Awaitable[bytes]],
        meter: Meter,
        directives: Directives | None,
        late: Callable[[Fault], Fault],
    ) -> None:
        caller, policy, _ = call
        client, price = meter.key.account.id, caller.units
        try:
            outcome = await self._outcome(policy.method.name, work, meter, directives, late)
        finally:
            self._permits.give_back(client)
        further = meter.settle(price) - price
        caller.on_waited(meter.waited_s)
        match outcome:
            case bytes():
                caller.on_charged(further)
                caller.on_result(outcome)
            case RpcError():
                caller.on_charged(further)
                caller.on_error(outcome.error)
            case Fault():
                outcome.keep(further)
                if meter.used > 0:
                    outcome.keep_price()
                caller.on_fault(outcome)

    async def _outcome(
        self,
        method: str,
        work: Callable[[], Awaitable[bytes]],
        meter: Meter,
        directives: Directives | None,
        late: Callable[[Fault], Fault],
    ) -> bytes | RpcError | Fault:
        meter_of_task.set(meter)
        client_of_task.set(meter.key.account.id)
        turns_of_task.set(self._turns)
        longest_s = LONGEST_S
        if directives is not None:
            min_block_of_task.set(directives.min_block)
            longest_s = directives.timeout_ms / 1000 if directives.timeout_ms else LONGEST_S
        try:
            async with asyncio.timeout(longest_s):
                return await work()
        except (RpcError, Fault) as exc:
            return _as_invalid_params(exc)
        except TimeoutError:
            return late(DeadlinePassed(f"there was no result within {longest_s:g} s"))
        except Exception:
            log.exception("a method failed", extra={"method": method})
            return InternalError("internal error; the call was not answered")


async def _result(handler: OwnMethod, network: Network, params: bytes) -> bytes:
    result = await handler(network, _listed(params))
    return result if isinstance(result, bytes) else orjson.dumps(result)


def _listed(params: bytes) -> list[Any]:
    if len(params) > MOST_PARAMS:
        raise RpcError(jsonrpc.error(jsonrpc.INVALID_PARAMS, f"params must have at most {MOST_PARAMS} bytes"))
    try:
        values = parse_bounded(params) if params else []
    except RefusedJson as exc:
        raise RpcError(jsonrpc.error(jsonrpc.INVALID_PARAMS, f"params: {exc}")) from None
    if not isinstance(values, list):
        raise RpcError(jsonrpc.error(jsonrpc.INVALID_PARAMS, "params must be an array"))
    return values


def _as_invalid_params(exc: RpcError | Fault) -> RpcError | Fault:
    """Invalid params are an error of the call, as upstreams return it."""
    if isinstance(exc, InvalidRequest):
        return RpcError(jsonrpc.error(jsonrpc.INVALID_PARAMS, exc.message))
    return exc
