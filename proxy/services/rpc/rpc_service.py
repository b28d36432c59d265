"""JSON-RPC calls of clients: checked, priced, admitted, and then forwarded.

The same steps serve HTTP, batches and sockets. A single call that is refused is an HTTP error. In a batch every item is checked
separately, and a refused item gets a JSON-RPC error while the others run. A large batch is taken in a few items at a time
(`batch_intake.py`). It, and a batch above the rate, is admitted item by item, as far as the buckets refill in time
(`batch_admission.py`). A call that fails through our fault costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol, TypeAlias

from proxy.chains.families import family_of
from proxy.core import jsonrpc
from proxy.core.access import Key
from proxy.core.batch_envelopes import parse_short_batch
from proxy.core.batch_reader import BatchReader
from proxy.core.directives import Directives
from proxy.core.jsonrpc import MalformedCall, RawCall
from proxy.core.near_names import near_names
from proxy.errors import Fault, InvalidRequest, RateLimited
from proxy.memory_budget import MemoryBudget
from proxy.services.accounts.admission import Admission, missing_scope
from proxy.services.rpc.batch_admission import (
    BatchAdmission,
    BatchRoom,
    CheckedItems,
    MistakenItem,
    PricedItem,
    SendItems,
    WaitingBatches,
)
from proxy.services.rpc.batch_intake import BatchIntake, BatchRefusal
from proxy.services.rpc.batches import UNITS_OF_AN_ERROR, BatchSink, CallBatch
from proxy.services.rpc.flights import Caller
from proxy.services.rpc.forwarder import Forwarder
from proxy.services.rpc.method_policy import MethodPolicy
from proxy.services.rpc.networks import Route
from proxy.services.rpc.reply_share import ReplyShare
from proxy.services.rpc.short_batch import ShortBatch, may_be_short
from proxy.turn_queue import TurnQueue

# A batch that its client may abandon.
BatchUnderWay: TypeAlias = CallBatch | ShortBatch | BatchAdmission | BatchIntake


class SubscriptionCalls(Protocol):
    """Answers the calls that start and end subscriptions, for callers with a socket."""

    def subscribe(self, caller: Caller, policy: MethodPolicy, params: bytes) -> None: ...


class RpcService:
    def __init__(
        self,
        admission: Admission,
        forwarder: Forwarder,
        memory: MemoryBudget,
        turns: TurnQueue,
        *,
        max_batch: int,
        max_batch_reply_bytes: int,
        batch_wait_s: float,
    ) -> None:
        """`memory`: for replies that cannot be sent yet, and for batches that wait."""
        self._admission = admission
        self._turns = turns
        self._batch_wait_s = batch_wait_s
        self.waiting_batches = WaitingBatches(memory.of("batches"))
        self._replies = memory.of("replies")
        self._max_batch_reply_bytes = max_batch_reply_bytes
        self.max_batch = max_batch
        self.forwarder = forwarder

    def reply_share(self, account: str) -> ReplyShare:
        """The memory of one request or message of the account."""
        return ReplyShare(self._replies, account, self._max_batch_reply_bytes)

    def call(
        self,
        caller: Caller,
        route: Route,
        key: Key,
        call: RawCall,
        now: float,
        *,
        directives: Directives | None = None,
        subscriber: SubscriptionCalls | None = None,
    ) -> None:
        """Admit a single call, then answer it."""
        policy = self.check(caller, route, key, call, subscriber)
        if not isinstance(policy, MethodPolicy):
            self._decline(caller, key, policy, now)
            return
        units = route.state.price(policy, call[1])
        if directives is not None:
            units *= directives.price_factor
        refusal = self._admission.charge(key, 1, units, now)
        if refusal is not None:
            if self._admission.may_wait(refusal, now):
                again = partial(self.call, caller, route, key, call, now, directives=directives, subscriber=subscriber)
                self._admission.when_leased(key, 1, units, again)
            else:
                caller.on_fault(refusal)
            return
        caller.on_admitted(units)
        if subscriber is not None and policy.method.kind == "subscription":
            subscriber.subscribe(caller, policy, call[1])
            return
        self.forwarder.forward((caller, policy, call[1]), route, key, now, directives=directives)

    def _decline(self, caller: Caller, key: Key, why: bytes | Fault, now: float) -> None:
        """Answer a call that failed its check. A fault is free. An error is charged first, and the charge may be refused."""
        refusal = why if isinstance(why, Fault) else self._admission.charge(key, 1, UNITS_OF_AN_ERROR, now)
        if self._admission.may_wait(refusal, now):
            again = partial(self._decline, caller, key, why, now)
            self._admission.when_leased(key, 1, UNITS_OF_AN_ERROR, again)
            return
        if refusal is not None:
            caller.on_fault(refusal)
            return
        assert isinstance(why, bytes)
        caller.on_admitted(UNITS_OF_AN_ERROR)
        caller.on_error(why)

    def check(
        self, caller: Caller, route: Route, key: Key, call: RawCall, subscriber: SubscriptionCalls | None = None
    ) -> MethodPolicy | bytes | Fault:
        """The policy of the call's method; or a JSON-RPC error or a fault if the key may not make this call."""
        policy = route.policies.get(call[0], route.unknown)
        caller.on_checked(policy)
        if policy is route.unknown:
            return _no_method(route, call[0])
        if not key.scopes & policy.scope:
            return missing_scope(policy.scope)
        if policy.method.kind == "subscription" and subscriber is None:
            return jsonrpc.error(jsonrpc.METHOD_NOT_FOUND, f"the method {call[0]} needs a WebSocket")
        if policy.is_checked and route.guard is not None:
            return route.guard.fault_of(policy, call[1]) or policy
        return policy

    def charge_error(self, key: Key, now: float) -> Fault | None:
        """Charge a request that is answered with an error without being served. Returns the refusal."""
        return self._admission.charge(key, 1, UNITS_OF_AN_ERROR, now)

    # Batches

    def call_batch(
        self,
        body: bytes,
        route: Route,
        key: Key,
        now: float,
        done: Callable[[CallBatch | ShortBatch], None],
        refuse: BatchRefusal,
        *,
        directives: Directives | None = None,
        subscriber: SubscriptionCalls | None = None,
        sink: BatchSink | None = None,
    ) -> BatchUnderWay | None:
        """Admit a batch, at once or item by item, and answer its items. `done` is called when all are answered, unless the
        reply is large and `sink` takes it in parts. `refuse` is called, now or later, if the batch is refused whole; None is
        returned if it was."""
        share = self.reply_share(key.account.id)
        calls = parse_short_batch(body)
        send = partial(self._send_items, route, key, directives, subscriber)
        factor = 1 if directives is None else directives.price_factor
        if calls is None or len(calls) > self.max_batch:
            batch = CallBatch((), done, now, key.tallies, share, sink)
            return self._take_in(body, batch, route, key, subscriber, send, refuse, factor)
        if directives is None:
            short, units = self._short_calls(calls, route, key)
            if short and self._admission.charge(key, len(short), units, now) is None:
                assert route.only is not None
                short_batch = ShortBatch(short, route, done, key, share, sink, units=units)
                short_batch.send(route.only, now)
                return short_batch
        batch = CallBatch((), done, now, key.tallies, share, sink)
        checked = CheckedItems()
        self._check_items(batch, checked, route, key, subscriber, factor, calls)
        if self._admission.charge(key, len(calls), checked.units, now) is not None:
            room = self.waiting_batches.room(key.account.id, len(body), len(calls))
            return self._admit_by_item(batch, key, checked, send, refuse, room)
        batch.on_charged(checked.units)
        for item, why in checked.declined:
            item.decline(why)
        batch.expect(len(checked.accepted))
        send(checked.accepted, now)
        return batch

    def _take_in(
        self,
        body: bytes,
        batch: CallBatch,
        route: Route,
        key: Key,
        subscriber: SubscriptionCalls | None,
        send: SendItems,
        refuse: BatchRefusal,
        factor: int,
    ) -> BatchIntake:
        """Read, check and admit the items in turn with other clients."""
        checked = CheckedItems()
        room = self.waiting_batches.room(key.account.id, len(body), self.max_batch)
        intake = BatchIntake(
            BatchReader(body, self.max_batch),
            batch,
            check=partial(self._check_items, batch, checked, route, key, subscriber, factor),
            admit=partial(self._admit_by_item, batch, key, checked, send, refuse, room),
            refuse=refuse,
            turns=self._turns,
            room=room,
            wait_s=self._batch_wait_s,
        )
        intake.start()
        return intake

    def _check_items(
        self,
        batch: CallBatch,
        checked: CheckedItems,
        route: Route,
        key: Key,
        subscriber: SubscriptionCalls | None,
        factor: int,
        calls: Sequence[RawCall | MalformedCall],
    ) -> None:
        """Add these calls to the batch, with their prices, times `factor`, or the reasons to decline them."""
        for call in calls:
            item = batch.add(call)
            if isinstance(call, MalformedCall):
                item.on_checked(route.unknown)
                checked.decline(item, jsonrpc.error(call.code, call.message))
                continue
            policy = self.check(item, route, key, call, subscriber)
            if isinstance(policy, MethodPolicy):
                checked.accept(item, policy, call, route.state.price(policy, call[1]) * factor)
            else:
                checked.decline(item, policy)

    def _admit_by_item(
        self,
        batch: CallBatch,
        key: Key,
        checked: CheckedItems,
        send: SendItems,
        refuse: BatchRefusal,
        room: BatchRoom,
    ) -> BatchAdmission | None:
        # A rate admits some items, sooner or later. An exhausted daily quota admits none, so it refuses the whole batch.
        exhausted = self._admission.charge(key, 0, 0, batch.began)
        if isinstance(exhausted, RateLimited) and exhausted.wait_s > self._batch_wait_s:
            refuse(exhausted, [item.id or b"" for item in batch.items])
            return None
        mistaken: list[MistakenItem] = []
        for item, why in checked.declined:
            if isinstance(why, Fault):
                item.decline(why)
            else:
                mistaken.append((item, why))
        admission = BatchAdmission(
            batch,
            key,
            self._admission,
            send,
            turns=self._turns,
            room=room,
            deadline=batch.began + self._batch_wait_s,
        )
        admission.start(checked.accepted, mistaken)
        return admission

    def _send_items(
        self,
        route: Route,
        key: Key,
        directives: Directives | None,
        subscriber: SubscriptionCalls | None,
        items: Sequence[PricedItem],
        now: float,
    ) -> None:
        forwarded = []
        for item, policy, call, price in items:
            item.on_admitted(price)
            if subscriber is not None and policy.method.kind == "subscription":
                subscriber.subscribe(item, policy, call[1])
            else:
                forwarded.append((item, policy, call[1]))
        self.forwarder.forward_all(forwarded, route, key, now, directives=directives)

    def _short_calls(
        self, calls: Sequence[RawCall], route: Route, key: Key
    ) -> tuple[list[tuple[MethodPolicy, RawCall]], int]:
        """The calls with their policies, and their price, if all are plain reads and the only upstream accepts them in one
        request. No calls otherwise."""
        upstream = route.only
        if upstream is None or not upstream.health.free:
            return [], 0
        if not 1 < len(calls) <= upstream.batches.of(key.account.id):
            return [], 0
        found, units = [], 0
        for call in calls:
            policy = route.policies.get(call[0])
            if policy is None or not key.scopes & policy.scope or not may_be_short(policy, call):
                return [], 0
            if policy.is_plain or policy.names_latest(call[1]):
                units += policy.units
            elif call[1].endswith(policy.ends_latest):
                units += route.state.price(policy, call[1])
            else:
                return [], 0
            found.append((policy, call))
        return found, units


def _no_method(route: Route, name: str) -> bytes:
    if reason := family_of(route.network).refused.get(name):
        return jsonrpc.error(jsonrpc.METHOD_NOT_FOUND, f"the method {name} is not available: {reason}")
    nearest = near_names(frozenset(route.policies)).nearest(name)
    advice = f"; did you mean {nearest}?" if nearest else ""
    return jsonrpc.error(jsonrpc.METHOD_NOT_FOUND, f"the method {name} does not exist or is not available{advice}")


def fault_of(why: Fault | MalformedCall) -> Fault:
    """The fault that an HTTP client receives for a refused request."""
    return why if isinstance(why, Fault) else InvalidRequest(why.message, details={"rpc_code": why.code}, reason="body")
