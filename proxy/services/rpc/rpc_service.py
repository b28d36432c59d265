"""JSON-RPC calls of clients: checked, priced, admitted, and then forwarded.

The same steps serve HTTP, batches and sockets. A single call that is refused is an HTTP error. In a batch every item is checked
separately, and a refused item gets a JSON-RPC error while the others run. A batch that is large or above the rate is admitted
item by item, as far as the buckets refill in time (`batch_admission.py`). A call that fails through our fault costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from proxy.core.access import Key
from proxy.core.batch_envelopes import parse_short_batch
from proxy.core.directives import Directives
from proxy.core.jsonrpc import MalformedCall, RawCall
from proxy.core.pricing import FREE_BYTES, UNITS_OF_AN_ERROR, request_units, size_units
from proxy.errors import Fault, InvalidRequest, LeasePending
from proxy.memory_budget import MemoryBudget
from proxy.services.accounts.admission import Admission
from proxy.services.rpc.batch_admission import (
    BatchAdmission,
    BatchRefusal,
    BatchServices,
    BatchTerms,
    WaitingBatches,
)
from proxy.services.rpc.batches import BatchSink, CallBatch
from proxy.services.rpc.call_checks import SubscriptionCalls, check_call
from proxy.services.rpc.flights import Caller
from proxy.services.rpc.forwarder import Forwarder
from proxy.services.rpc.held_body import ReplyShare
from proxy.services.rpc.method_policy import MethodPolicy
from proxy.services.rpc.networks import Route
from proxy.services.rpc.upstream_batch import may_be_plain, send_plain_reads
from proxy.turn_queue import TurnQueue


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
        self.waiting_batches = WaitingBatches(memory.of("batches"))
        self._batches = BatchServices(admission, forwarder, turns, self.waiting_batches, max_batch, batch_wait_s)
        self._replies = memory.of("replies")
        self._max_batch_reply_bytes = max_batch_reply_bytes
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
        policy = check_call(caller, route, key, call, subscriber)
        if not isinstance(policy, MethodPolicy):
            self._decline(caller, key, policy, now, len(call[1]))
            return
        units = route.state.price_of_all(policy, call[1], directives)
        if len(call[1]) > FREE_BYTES:
            units += size_units(len(call[1]))
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

    def _decline(self, caller: Caller, key: Key, why: bytes | Fault, now: float, size: int) -> None:
        """Answer a call that failed its check. A fault costs its size only. An error is charged first, and the charge may be
        refused."""
        if isinstance(why, Fault):
            self.charge_size(key, size_units(size), now)
            caller.on_fault(why)
            return
        units = UNITS_OF_AN_ERROR + size_units(size)
        refusal = self._admission.charge(key, 1, units, now)
        if refusal is None:
            caller.on_admitted(units)
            caller.on_error(why)
        elif self._admission.may_wait(refusal, now):
            self._admission.when_leased(key, 1, units, partial(self._decline, caller, key, why, now, size))
        else:
            caller.on_fault(refusal)

    def size_refusal(self, key: Key, units: int, now: float) -> Fault | None:
        """Why a large request is not even parsed: its account cannot pay for its size at the moment."""
        refusal = self._admission.charge(key, 0, units, now)
        if refusal is None:
            self._admission.refund(key, 0, units)
        return None if isinstance(refusal, LeasePending) else refusal

    def charge_size(self, key: Key, units: int, now: float) -> None:
        """Charge a large request that was parsed in vain."""
        if units:
            self._admission.charge(key, 0, units, now)

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
        done: Callable[[CallBatch], None],
        refuse: BatchRefusal,
        *,
        directives: Directives | None = None,
        subscriber: SubscriptionCalls | None = None,
        sink: BatchSink | None = None,
    ) -> CallBatch:
        """Admit a batch, at once or item by item, and answer its items. `done` is called when all are answered, unless the
        reply is large and `sink` takes it in parts. `refuse` is called, now or later, if the batch is refused whole."""
        batch = CallBatch(done, now, self.reply_share(key.account.id), sink)
        calls = parse_short_batch(body)
        if calls is not None and directives is None and len(calls) <= self._batches.most_items:
            plain, units = self._plain_calls(calls, route, key)
            if plain and route.only is not None and self._admission.charge(key, len(plain), units, now) is None:
                batch.on_charged(units)
                send_plain_reads(route.dispatcher, route.only, batch, plain, client=key.account.id)
                return batch
        terms = BatchTerms(route, key, directives, subscriber)

        def refuse_at_a_price(why: Fault | MalformedCall, ids: Sequence[bytes]) -> None:
            if isinstance(why, MalformedCall):
                self.charge_size(key, request_units(body), now)
            refuse(why, ids)

        admission = BatchAdmission(self._batches, batch, terms, len(body), refuse_at_a_price)
        if calls is None or len(calls) > self._batches.most_items:
            admission.read(body)
        else:
            admission.admit(calls, now)
        return batch

    def _plain_calls(
        self, calls: Sequence[RawCall], route: Route, key: Key
    ) -> tuple[list[tuple[MethodPolicy, RawCall]], int]:
        """The calls with their policies, and their price, if all are plain reads and the only upstream accepts them in one
        request. No calls otherwise."""
        upstream = route.only
        if upstream is None or not upstream.health.free:
            return [], 0
        if key.restrictions is not None and key.restrictions.limits_calls:
            return [], 0
        if not 1 < len(calls) <= upstream.batches.of(key.account.id):
            return [], 0
        plain, units = [], 0
        for call in calls:
            policy = route.policies.get(call[0])
            if policy is None or not key.scopes & policy.scope or not may_be_plain(policy, call):
                return [], 0
            if policy.is_plain or policy.names_latest(call[1]):
                units += policy.units
            elif call[1].endswith(policy.ends_latest):
                units += route.state.price(policy, call[1])
            else:
                return [], 0
            plain.append((policy, call))
        return plain, units


def fault_of(why: Fault | MalformedCall) -> Fault:
    """The fault that an HTTP client receives for a refused request."""
    return why if isinstance(why, Fault) else InvalidRequest(why.message, details={"rpc_code": why.code}, reason="body")
