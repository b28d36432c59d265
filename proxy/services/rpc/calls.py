"""JSON-RPC calls: each one checked, priced, and answered from memory, from a call under way, or by an upstream.

The same few steps serve HTTP, batches and sockets; whoever asks is a `Waiter` and is told the outcome, at once or later.
A single call that is refused is an HTTP error; inside a batch every item is checked on its own and a refused one has its
own JSON-RPC error while the others run. A call that we fail costs nothing.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import msgspec

from proxy.core import access, jsonrpc
from proxy.core.access import Key
from proxy.core.caching import key_of
from proxy.core.jsonrpc import MalformedCall, RawCall
from proxy.core.pricing import UnitPrices
from proxy.core.usage import KeyTallies
from proxy.errors import Fault, Forbidden, InternalError
from proxy.services.accounts.admission import Admission
from proxy.services.rpc.batches import UNITS_OF_AN_ERROR, BatchItem, CallBatch
from proxy.services.rpc.broadcasts import Broadcast
from proxy.services.rpc.filters import FilterIds
from proxy.services.rpc.flights import Flight
from proxy.services.rpc.method_policy import MethodPolicy
from proxy.services.rpc.networks import Route
from proxy.services.rpc.short_batch import ShortBatch, may_be_short
from proxy.services.rpc.waiters import Waiter, WholeResultWaiter
from proxy.wire.upstream import Upstream


class Caller(Waiter, Protocol):
    """A waiter as this room sees it: it keeps what its reply will need."""

    policy: MethodPolicy | None
    flight: Flight | None
    units: int
    cache: str


class SubscriptionCalls(Protocol):
    """Where an asker has a socket: it answers the calls that begin and end subscriptions."""

    def subscribe(self, caller: Caller, policy: MethodPolicy, params: bytes) -> None: ...


class Rpc:
    def __init__(self, admission: Admission, prices: UnitPrices, filters: FilterIds) -> None:
        self._admission = admission
        self._archive_minimum = prices.archive_minimum
        self._filters = filters

    def ask(
        self,
        caller: Caller,
        route: Route,
        key: Key,
        call: RawCall,
        now: float,
        *,
        fresh: bool = False,
        subscriber: SubscriptionCalls | None = None,
    ) -> None:
        """One call of one HTTP request or message: admit it, then answer it."""
        policy = self.check(caller, route, key, call, subscriber)
        if not isinstance(policy, MethodPolicy):
            self._decline(caller, key, policy, now)
            return
        units = policy.units if policy.is_plain else self._price(policy, route, call)
        refusal = self._admission.charge(key, 1, units, now)
        if refusal is not None:
            caller.on_fault(refusal)
            return
        caller.units = units
        if subscriber is not None and policy.method.kind == "subscription":
            subscriber.subscribe(caller, policy, call[1])
            return
        self.answer(caller, route, key, policy, call[1], now, fresh=fresh)

    def _decline(self, caller: Caller, key: Key, why: bytes | Fault, now: float) -> None:
        """A refusal is free; an error is an answer, and charged before it is given: the asker is told one thing only."""
        refusal = why if isinstance(why, Fault) else self._admission.charge(key, 1, UNITS_OF_AN_ERROR, now)
        if refusal is not None:
            caller.on_fault(refusal)
            return
        assert isinstance(why, bytes)
        caller.units = UNITS_OF_AN_ERROR
        caller.on_error(why)

    def check(
        self, caller: Caller, route: Route, key: Key, call: RawCall, subscriber: SubscriptionCalls | None = None
    ) -> MethodPolicy | bytes | Fault:
        """The call's plan; or why there is none: an error of the call's, or a fault."""
        policy = caller.policy = route.policies.get(call[0], route.unknown)
        if policy is route.unknown:
            return _no_method(call[0])
        if not key.scopes & policy.scope:
            return Forbidden(f"this API key lacks the scope {' or '.join(access.scope_names(policy.scope))}")
        if policy.method.kind == "subscription" and subscriber is None:
            return jsonrpc.error(jsonrpc.METHOD_NOT_FOUND, f"the method {call[0]} needs a WebSocket")
        if policy.is_checked and route.guard is not None:
            return route.guard.fault_of(policy, call[1]) or policy
        return policy

    def _price(self, policy: MethodPolicy, route: Route, call: RawCall) -> int:
        """A read of old state costs at least the archive price."""
        family = policy.family
        if policy.units < self._archive_minimum and route.heads.tip:
            ref = family.block_ref(policy.method, call[1])
            if family.is_archive(ref, route.heads.tip):
                return self._archive_minimum
        return policy.units

    def answer(
        self,
        caller: Caller,
        route: Route,
        key: Key | None,
        policy: MethodPolicy,
        params: bytes,
        now: float,
        *,
        fresh: bool = False,
        slot: bytes | None = None,
    ) -> None:
        """From memory, by joining the same call under way, or by an upstream. The slot saves making it again."""
        flight = self._flight(caller, route, key, policy, params, now, fresh=fresh, slot=slot)
        if flight is not None and (route.shared_cache is None or fresh or route.shared_cache.take([flight], now)):
            route.launch(flight, now)

    def answer_all(
        self,
        asked: Iterable[tuple[Caller, MethodPolicy, bytes]],
        route: Route,
        key: Key | None,
        now: float,
        *,
        fresh: bool = False,
    ) -> None:
        """Several calls at once: those that need an upstream go out together."""
        flights: list[Flight] = []
        for caller, policy, params in asked:
            flight = self._flight(caller, route, key, policy, params, now, fresh=fresh)
            if flight is not None:
                flights.append(flight)
        if flights:
            shared_cache = None if fresh else route.shared_cache
            route.launch_many(flights if shared_cache is None else shared_cache.take(flights, now), now)

    def _flight(
        self,
        caller: Caller,
        route: Route,
        key: Key | None,
        policy: MethodPolicy,
        params: bytes,
        now: float,
        *,
        fresh: bool,
        slot: bytes | None = None,
    ) -> Flight | None:
        """A flight that has to be launched; None where the asker needs none."""
        if route.shared_head.moves != route.seen_moves:
            route.catch_up()
        if policy.keeps and (route.keeps or route.coalesces):
            slot = slot or key_of(policy.request_tail, params)
            if not fresh and self._from_memory(caller, route, slot):
                return None
            caller.cache = "miss"
        elif policy.is_checked and route.guard is not None:
            assert key is not None  # and so are the operations that go over a desk
            return route.guard.flight(caller, key, policy, params, now)
        elif policy.method.kind == "filter":
            assert key is not None  # a filter is its key's own: we ask for none ourselves
            self._filters.ask(caller, route, key, policy, params, now)
            return None
        elif route.broadcast > 1 and policy.may_broadcast:
            Broadcast(caller).send(route, policy, params, now)
            return None
        flight = Flight(route, policy, params, caller, now)
        caller.flight = flight
        if slot is not None:
            flight.slot = slot
            if route.coalesces:
                route.flights[slot] = flight
        if not policy.is_plain:
            self._aim(flight, route, policy, params)
        elif policy.is_head_number:
            flight.tells_head = True
            flight.least_head = route.heads.tip
        return flight

    def _from_memory(self, caller: Caller, route: Route, slot: bytes) -> bool:
        result = route.replies.get(slot) if route.keeps else None
        if result is not None:
            caller.cache = "hit"
            caller.on_result(result)
            return True
        flight = route.flights.get(slot)
        if flight is None:
            return False
        caller.cache = "join"
        caller.flight = flight
        flight.waiters.append(caller)
        return True

    def _aim(self, flight: Flight, route: Route, policy: MethodPolicy, params: bytes) -> None:
        """What the call's block asks of its upstream."""
        ref, tip = policy.family.block_ref(policy.method, params), route.heads.tip
        if ref.moves:
            flight.least_head = tip
            flight.tells_head = policy.may_show_head and ref.tag == policy.family.latest
        elif tip:
            flight.archive = policy.family.is_archive(ref, tip)
            # Whoever does not have the last block yet would leave it out without a word.
            flight.least_head = min(tip, policy.last_block(params, tip) if policy.by_range else ref.number)

    # Batches

    def ask_batch(
        self,
        items: Sequence[RawCall | MalformedCall],
        route: Route,
        key: Key,
        now: float,
        done: Callable[[CallBatch | ShortBatch], None],
        *,
        fresh: bool = False,
        subscriber: SubscriptionCalls | None = None,
    ) -> CallBatch | ShortBatch | Fault:
        """Admit a whole batch, then answer its items; `done` is called when the last one is in."""
        batch = CallBatch(items, done, now, key.sheet)
        planned: list[tuple[BatchItem, MethodPolicy, RawCall, int]] = []
        declined: list[tuple[BatchItem, bytes | Fault]] = []
        units = 0
        for item, what in zip(batch.items, items, strict=True):
            if isinstance(what, MalformedCall):
                item.policy = route.unknown
                declined.append((item, jsonrpc.error(what.code, what.message)))
                units += UNITS_OF_AN_ERROR
                continue
            policy = self.check(item, route, key, what, subscriber)
            if not isinstance(policy, MethodPolicy):
                declined.append((item, policy))
                units += 0 if isinstance(policy, Fault) else UNITS_OF_AN_ERROR
                continue
            price = policy.units if policy.is_plain else self._price(policy, route, what)
            units += price
            planned.append((item, policy, what, price))
        refusal = self._admission.charge(key, len(items), units, now)
        if refusal is not None:
            return refusal
        if len(planned) == len(items) and not fresh and (upstream := self._short_way(route, planned)) is not None:
            calls, policies = [call for _, _, call, _ in planned], [policy for _, policy, _, _ in planned]
            short = ShortBatch(calls, policies, route, done, key.sheet)
            short.units = units
            short.send(upstream, now)
            return short
        batch.units = units
        for item, why in declined:
            item.decline(why)
        batch.expect(len(planned))
        asked = []
        for item, policy, call, price in planned:
            item.units = price
            if subscriber is not None and policy.method.kind == "subscription":
                subscriber.subscribe(item, policy, call[1])
            else:
                asked.append((item, policy, call[1]))
        self.answer_all(asked, route, key, now, fresh=fresh)
        return batch

    def _short_way(
        self, route: Route, planned: Sequence[tuple[BatchItem, MethodPolicy, RawCall, int]]
    ) -> Upstream | None:
        """The one upstream, where all of these are plain reads and it takes them in one request."""
        upstream = route.only
        if upstream is None or not upstream.health.free or not 1 < len(planned) <= upstream.batch:
            return None
        return upstream if all(may_be_short(policy, call) for _, policy, call, _ in planned) else None

    # Money back

    def settle_batch(self, key: Key, batch: CallBatch | ShortBatch) -> int:
        """What a batch costs in the end: items that we failed are free."""
        units = batch.units
        for item in batch.failed():
            assert item.fault is not None
            self.refund(key, item.fault, 1, item.units)
            units -= item.units
        return units

    def refund(self, key: Key, fault: Fault, requests: int, units: int) -> None:
        """What we failed ourselves costs nothing."""
        if isinstance(fault, InternalError):
            self._admission.refund(key, requests, units)


class PendingReply(WholeResultWaiter):
    """A waiter that a coroutine awaits: for handlers, sockets and our own questions."""

    __slots__ = ("cache", "flight", "future", "policy", "units")

    def __init__(self) -> None:
        self.future: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self.policy: MethodPolicy | None = None
        self.flight: Flight | None = None
        self.units = 0
        self.cache = ""

    def on_result(self, result: bytes | msgspec.Raw) -> None:
        if not self.future.done():
            self.future.set_result(bytes(result))

    def on_error(self, error: bytes) -> None:
        if not self.future.done():
            self.future.set_exception(RpcError(error))

    def on_fault(self, fault: Fault) -> None:
        if not self.future.done():
            self.future.set_exception(fault)

    def count(self, sheet: KeyTallies, outcome: str, seconds: float) -> None:
        if self.policy is not None:
            sheet[self.policy.tally].count(outcome, self.cache, self.units, seconds)

    async def result(self) -> bytes:
        """The result; RpcError for the upstream's error; a Fault for ours."""
        try:
            return await self.future
        except asyncio.CancelledError:
            if self.flight is not None:
                self.flight.leave(self)
            raise


class RpcError(Exception):
    """An upstream's error object, as it came."""

    def __init__(self, error: bytes) -> None:
        super().__init__(error)
        self.error = error


def _no_method(name: str) -> bytes:
    return jsonrpc.error(jsonrpc.METHOD_NOT_FOUND, f"the method {name} does not exist or is not available")


def ask_upstream(route: Route, method: str, params: bytes, *, least_head: int = 0) -> PendingReply:
    """A question of our own to a network: not admitted, not charged. Who is not at the least head is not asked."""
    pending = PendingReply()
    now = time.monotonic()
    flight = Flight(route, route.policies[method], params, pending, now)
    flight.least_head = least_head
    pending.flight = flight
    route.launch(flight, now)
    return pending
